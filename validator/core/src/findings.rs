//! The result of a check for one subject, and of a whole run.

use std::collections::HashMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cause::{CauseKind, RecommendedAction};
use crate::facts::{Facts, GpuFacts, Unread};
use crate::level::Level;

/// What a check concluded about one subject.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Looked, and it is right.
    Pass,
    /// Does not apply, by the profile or by the hardware, with the reason.
    Skip,
    /// Right, but should be improved.
    Warn,
    /// Could not look. Never a pass, never a skip.
    Error,
    /// Looked, and it is wrong.
    Fail,
}

impl Verdict {
    /// It was judged: the only verdicts that count as coverage.
    pub fn judged(self) -> bool {
        matches!(self, Self::Pass | Self::Warn | Self::Fail)
    }
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Pass => "pass",
            Self::Skip => "skip",
            Self::Warn => "warn",
            Self::Error => "error",
            Self::Fail => "fail",
        })
    }
}

/// One line or value that a finding rests on, tied to a GPU by its PCI address.
///
/// A check of the host (the kernel log) attaches these to its [`Finding`], so that the diagnosis
/// can assign parts of one finding to GPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Evidence {
    /// `0000:3b:00.0`; `None` where the line names none.
    pub pci_address: Option<String>,
    pub verdict: Verdict,
    pub kind: CauseKind,
    pub recommended_action: RecommendedAction,
    /// `Xid 79 (GPU has fallen off the bus), 10 min ago`.
    pub summary: String,
    /// The line of the kernel log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<String>,
}

/// The result of a check, before it is tied to a check id and a subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub(crate) verdict: Verdict,
    pub(crate) summary: String,
    pub(crate) expected: Option<String>,
    pub(crate) observed: Option<String>,
    pub(crate) remedy: Option<String>,
    pub(crate) busy: bool,
    /// What the check recommends where it differs from its default in [`crate::diagnosis`].
    pub(crate) recommended_action: Option<RecommendedAction>,
    /// The kind of cause where it differs from the check's own.
    pub(crate) cause: Option<CauseKind>,
    /// Boxed, as an outcome is also the error that `?` passes on.
    pub(crate) evidence: Box<[Evidence]>,
}

impl Outcome {
    fn new(verdict: Verdict, summary: impl Into<String>) -> Self {
        Self {
            verdict,
            summary: summary.into(),
            expected: None,
            observed: None,
            remedy: None,
            busy: false,
            recommended_action: None,
            cause: None,
            evidence: Box::default(),
        }
    }

    /// `summary` states what was seen: `persistence mode is on`.
    pub fn pass(summary: impl Into<String>) -> Self {
        Self::new(Verdict::Pass, summary)
    }

    /// `summary` states what should be improved.
    pub fn warn(summary: impl Into<String>) -> Self {
        Self::new(Verdict::Warn, summary)
    }

    /// `summary` names the fault with both values:
    /// `driver is 570.86.15, the profile requires at least 580.65.06`.
    pub fn fail(summary: impl Into<String>) -> Self {
        Self::new(Verdict::Fail, summary)
    }

    /// `summary` states what could not be judged, and why.
    pub fn error(summary: impl Into<String>) -> Self {
        Self::new(Verdict::Error, summary)
    }

    /// `reason` states why the check does not apply here.
    pub fn skip(reason: impl Into<String>) -> Self {
        Self::new(Verdict::Skip, reason)
    }

    /// Load could not be put on this GPU, or is no evidence about it, because other processes use
    /// it: an `error` with an exit code of its own, 4.
    pub fn busy(summary: impl Into<String>) -> Self {
        Self {
            busy: true,
            ..Self::new(Verdict::Error, summary)
        }
    }

    #[must_use]
    pub fn expected(mut self, expected: impl std::fmt::Display) -> Self {
        self.expected = Some(expected.to_string());
        self
    }

    #[must_use]
    pub fn observed(mut self, observed: impl std::fmt::Display) -> Self {
        self.observed = Some(observed.to_string());
        self
    }

    /// What a person should do, as a sentence or a command.
    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }

    /// The action that follows from what was observed, where it is not the check's default.
    #[must_use]
    pub fn recommends(mut self, action: RecommendedAction) -> Self {
        self.recommended_action = Some(action);
        self
    }

    /// The kind of cause that was observed, where it is not the check's default.
    #[must_use]
    pub fn caused_by(mut self, cause: CauseKind) -> Self {
        self.cause = Some(cause);
        self
    }

    /// Lines and values that tie parts of this outcome to GPUs.
    #[must_use]
    pub fn evidence(mut self, evidence: Vec<Evidence>) -> Self {
        self.evidence = evidence.into_boxed_slice();
        self
    }
}

impl Subject {
    pub fn is_gpu(&self) -> bool {
        matches!(self, Self::Gpu(_))
    }
}

impl From<Unread> for Outcome {
    fn from(unread: Unread) -> Self {
        if unread.not_applicable {
            Self::skip(unread.summary)
        } else {
            Self::error(unread.summary)
        }
    }
}

/// What a check returns. `Err` is the outcome of a check that could not go on, so that `?` works on
/// [`crate::facts::Reading::required`]; it is an outcome like any other.
pub type Judgement = Result<Outcome, Outcome>;

/// What a finding is about.
#[derive(
    Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    Host,
    Gpu(GpuSubject),
    Environment(EnvironmentSubject),
}

impl Subject {
    pub(crate) fn gpu(&self) -> Option<&GpuSubject> {
        match self {
            Self::Gpu(gpu) => Some(gpu),
            Self::Host | Self::Environment(_) => None,
        }
    }

    pub(crate) fn environment(&self) -> Option<&EnvironmentSubject> {
        match self {
            Self::Environment(environment) => Some(environment),
            Self::Host | Self::Gpu(_) => None,
        }
    }
}

/// Findings by the part of their subject that `key` returns, in the order of the first of each.
pub(crate) fn findings_by<K: Eq + std::hash::Hash>(
    findings: &[Finding],
    key: impl Fn(&Subject) -> Option<&K>,
) -> Vec<(&K, Vec<&Finding>)> {
    let mut groups: Vec<(&K, Vec<&Finding>)> = Vec::new();
    let mut positions = HashMap::new();
    for finding in findings {
        let Some(key) = key(&finding.subject) else {
            continue;
        };
        let position = *positions.entry(key).or_insert_with(|| {
            groups.push((key, Vec::new()));
            groups.len() - 1
        });
        groups[position].1.push(finding);
    }
    groups
}

/// A Python environment, named by its folder, which is the same from run to run.
#[derive(
    Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(deny_unknown_fields)]
pub struct EnvironmentSubject {
    /// `/opt/venv`.
    pub path: String,
}

impl std::fmt::Display for EnvironmentSubject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Python environment {}", self.path)
    }
}

/// A GPU, named by UUID where it has reported one.
#[derive(
    Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(deny_unknown_fields)]
pub struct GpuSubject {
    pub uuid: Option<String>,
    pub pci_address: Option<String>,
    pub name: Option<String>,
}

impl GpuSubject {
    pub fn of(gpu: &GpuFacts) -> Self {
        Self {
            uuid: gpu.uuid.value().cloned(),
            pci_address: gpu.pci_address.value().cloned(),
            name: gpu.name.value().cloned(),
        }
    }

    /// Where the first GPU with this name stands in the facts.
    pub(crate) fn position_in(&self, facts: &Facts) -> Option<usize> {
        let is_it = |gpu: &GpuFacts| {
            self.uuid.as_ref() == gpu.uuid.value()
                && self.pci_address.as_ref() == gpu.pci_address.value()
                && self.name.as_ref() == gpu.name.value()
        };
        facts.position_of((self.uuid.as_deref(), self.pci_address.as_deref()), is_it)
    }
}

impl std::fmt::Display for GpuSubject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (&self.uuid, &self.pci_address) {
            (Some(uuid), Some(address)) => write!(f, "{uuid} ({address})"),
            (Some(uuid), None) => f.write_str(uuid),
            (None, Some(address)) => write!(f, "GPU at {address}"),
            (None, None) => f.write_str("a GPU that NVML counts but cannot name"),
        }
    }
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Gpu(gpu) => gpu.fmt(f),
            Self::Environment(environment) => environment.fmt(f),
        }
    }
}

/// The result of one check for one subject.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Finding {
    /// The check's id: `persistence_mode`.
    pub check: String,
    pub subject: Subject,
    pub verdict: Verdict,
    pub summary: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// What to do, as a closed set of words; absent where nothing is to be done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recommended_action: Option<RecommendedAction>,
    /// The kind of cause where it is not the one of the check.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<CauseKind>,
    /// Lines and values that tie parts of this finding to GPUs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evidence: Vec<Evidence>,
    /// An `error` only because others use the GPU.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub busy: bool,
    /// What the profile changed, and its reason: `severity warn by the profile: …`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overridden: Option<String>,
    /// Seconds that reading what this check judges took, as far as it is known.
    pub time_s: f64,
}

/// How often each verdict was given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Counts {
    pub pass: usize,
    pub warn: usize,
    pub fail: usize,
    pub error: usize,
    pub skip: usize,
}

impl Counts {
    pub fn of<'a>(findings: impl IntoIterator<Item = &'a Finding>) -> Self {
        let mut counts = Self::default();
        for finding in findings {
            match finding.verdict {
                Verdict::Pass => counts.pass += 1,
                Verdict::Warn => counts.warn += 1,
                Verdict::Fail => counts.fail += 1,
                Verdict::Error => counts.error += 1,
                Verdict::Skip => counts.skip += 1,
            }
        }
        counts
    }

    pub fn total(self) -> usize {
        self.pass + self.warn + self.fail + self.error + self.skip
    }

    pub fn judged(self) -> usize {
        self.pass + self.warn + self.fail
    }
}

/// Everything a report is made of. Reports are pure functions of this value.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    pub facts: Facts,
    /// Name of the profile that was applied: its file's path as given, or `built-in` when none was.
    pub profile: String,
    pub level: Level,
    /// Host first, then GPU by GPU; within a subject in the order in which `checks/mod.rs` lists
    /// the checks.
    pub findings: Vec<Finding>,
    /// Why the run is not complete (a signal, a stage still to come), if it is not.
    pub incomplete: Option<String>,
}

/// The process exit codes; they are API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitStatus {
    /// All judged and none failed; warnings allowed.
    Passed = 0,
    /// At least one check failed.
    Failed = 1,
    /// Nothing failed, but something could not be judged.
    NotJudged = 2,
    /// Bad input: a profile, arguments.
    BadInput = 3,
    /// Nothing failed, and the only thing not judged is load on GPUs that others are using.
    Busy = 4,
}

/// The check without which level image never passes: it alone judges the driver for GPUs to come.
pub(crate) const REPORTS_IMAGE_WITHOUT_DRIVER: &str = "image_kernel_modules";

impl Run {
    /// [`Run::profile`] of a run without a profile.
    pub const BUILT_IN_PROFILE: &str = "built-in";

    pub fn counts(&self) -> Counts {
        Counts::of(&self.findings)
    }

    /// The verdict of the whole run.
    ///
    /// A run in which no GPU was judged never passes: an empty test is not a green one. An image
    /// may be baked without a GPU; there it is the driver on its disk that must have been judged.
    pub fn exit_status(&self) -> ExitStatus {
        let counts = self.counts();
        if counts.fail > 0 {
            return ExitStatus::Failed;
        }
        let its_driver_was_judged = self
            .findings
            .iter()
            .any(|it| it.check == REPORTS_IMAGE_WITHOUT_DRIVER && it.verdict.judged());
        let a_gpu_was_judged = self
            .findings
            .iter()
            .any(|it| it.subject.is_gpu() && it.verdict.judged());
        let judged_at_all = if self.level == Level::Image {
            its_driver_was_judged
        } else {
            a_gpu_was_judged
        };
        let others_in_the_way = |it: &Finding| it.verdict != Verdict::Error || it.busy;
        if self.incomplete.is_some()
            || !judged_at_all
            || !self.findings.iter().all(others_in_the_way)
        {
            ExitStatus::NotJudged
        } else if counts.error > 0 {
            ExitStatus::Busy
        } else {
            ExitStatus::Passed
        }
    }
}
/// How many GPUs the findings are about.
pub(crate) fn gpu_count(findings: &[Finding]) -> usize {
    let mut gpus: Vec<&Subject> = findings
        .iter()
        .map(|it| &it.subject)
        .filter(|it| it.is_gpu())
        .collect();
    gpus.sort_unstable();
    gpus.dedup();
    gpus.len()
}
