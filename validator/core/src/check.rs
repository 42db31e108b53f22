//! A check: its id, stage, level and pure judge function.

use crate::facts::{Facts, Framework, GpuFacts, PythonEnvironment};
use crate::findings::Judgement;
use crate::level::{Level, Stage};
use crate::profile::Profile;

/// One check. Its file is `checks/<id>.rs`; the file's `//!` comment is its documentation.
#[derive(Debug)]
pub struct Check {
    /// The property that is wanted; equal to the file's name.
    pub id: &'static str,
    pub stage: Stage,
    /// The lowest level at which it is judged; below, it is skipped with that reason. A check of
    /// level image judges what only that level looks at: it has no finding at any other.
    pub level: Level,
    pub judge: Judge,
    /// NVIDIA's or another public page on the matter.
    pub documentation_url: &'static str,
}

/// What a check judges. All are pure: no IO, no clock, no environment.
///
/// [`crate::judge()`] makes the findings, one for each subject, so that a check cannot forget a
/// GPU or a Python environment.
#[derive(Debug)]
pub enum Judge {
    /// The machine as a whole.
    Host(fn(&Facts, &Profile) -> Judgement),
    /// Each GPU that NVML lists.
    EachGpu(fn(&GpuFacts, &Facts, &Profile) -> Judgement),
    /// The same, for a check that compares a GPU with the others: it computes once of all what it
    /// compares with, so that the time does not grow with the square of the number of GPUs.
    EachGpuAmongAll(for<'f> fn(&'f Facts, &'f Profile) -> JudgeGpu<'f>),
    /// Each Python environment with a GPU package, and each that the profile or `--python` names;
    /// with a framework, each that has the framework.
    EachEnvironment(Option<Framework>, JudgeEnvironment),
}

/// Judges one GPU of the facts for which it was made.
pub type JudgeGpu<'f> = Box<dyn Fn(&GpuFacts) -> Judgement + 'f>;

/// Judges one Python environment.
pub type JudgeEnvironment = fn(&PythonEnvironment, &Facts, &Profile) -> Judgement;

/// A check as `checks/mod.rs` lists it.
#[derive(Debug)]
pub struct Entry {
    pub check: &'static Check,
    pub file_name: &'static str,
    /// The file's `//!` lines.
    pub documentation: &'static str,
}

/// The title of a check: the first line of its documentation.
pub fn title(entry: &Entry) -> &'static str {
    entry
        .documentation
        .lines()
        .find_map(|line| line.strip_prefix("//! "))
        .unwrap_or_default()
        .trim_end_matches('.')
}
