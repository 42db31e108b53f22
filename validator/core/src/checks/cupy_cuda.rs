//! CuPy starts on every GPU and its results equal those of the CPU.
//!
//! ## Why
//! CuPy has one package for each CUDA major version; two of them in one environment, or the wrong
//! one, fail at the first array.
//!
//! ## How it is judged
//! In each Python environment that has it, the framework is started in a process of its own, with a
//! time limit and a memory limit. The build's CUDA version and the architectures of its GPU code
//! are judged against driver and GPUs; a proof that succeeded outweighs the tables. A failure is a
//! `warn` in an environment that neither the profile nor a variable selects, where another
//! environment works.
//!
//! Skipped where no Python environment has the package, and where none was started.
//!
//! ## What to do
//! `gpu-validator environment` prints each environment with its packages, libraries and the reason.
//! The remedy names the package or driver to install.
//!
//! ## Source
//! CuPy, installation, <https://docs.cupy.dev/en/stable/install.html>

use crate::check::{Check, Judge};
use crate::environment::installed::{self, Part};
use crate::facts::{Facts, Framework, PythonEnvironment};
use crate::findings::Judgement;
use crate::level::{Level, Stage};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "cupy_cuda",
    stage: Stage::Load,
    level: Level::Standard,
    judge: Judge::EachEnvironment(Some(Framework::Cupy), judge),
    documentation_url: "https://docs.cupy.dev/en/stable/install.html",
};

fn judge(environment: &PythonEnvironment, facts: &Facts, profile: &Profile) -> Judgement {
    installed::judge_framework(environment, facts, profile, Framework::Cupy, Part::All)
}
