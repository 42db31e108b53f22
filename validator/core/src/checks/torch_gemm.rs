//! GEMM results of PyTorch on every GPU equal those of the CPU.
//!
//! ## Why
//! `torch.cuda.is_available()` returned true on nodes where the first kernel failed: only a result
//! that was read back shows that the build has code for the GPU.
//!
//! ## How it is judged
//! In each environment that was started, on each GPU: a tensor is made, moved, added and read back;
//! a product of 1024 x 1024 in FP32 and, where the GPU has it, in BF16 is compared with the CPU's;
//! one step of autograd is compared with its known gradient. The operands are integers, so that
//! every product is exact in FP32, TF32 and BF16 alike.
//!
//! Skipped where no Python environment has the package, and where none was started.
//!
//! ## What to do
//! `gpu-validator environment` prints each environment with its packages, libraries and the reason.
//! The remedy names the package or driver to install.
//!
//! ## Source
//! PyTorch, numerical accuracy,
//! <https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html>

use crate::check::{Check, Judge};
use crate::environment::installed::{self, Part};
use crate::facts::{Facts, Framework, PythonEnvironment};
use crate::findings::Judgement;
use crate::level::{Level, Stage};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "torch_gemm",
    stage: Stage::Load,
    level: Level::Standard,
    judge: Judge::EachEnvironment(Some(Framework::Torch), judge),
    documentation_url: "https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html",
};

fn judge(environment: &PythonEnvironment, facts: &Facts, profile: &Profile) -> Judgement {
    installed::judge_framework(
        environment,
        facts,
        profile,
        Framework::Torch,
        Part::Computation,
    )
}
