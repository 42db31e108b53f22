//! What was judged, and by name what was not, and why.

use schemars::JsonSchema;
use serde::Serialize;

use super::text::{counted, counted_subjects, one_line};
use crate::diagnosis::name_of;
use crate::findings::{Finding, Run, Subject, Verdict, gpu_count};

/// How much of a run was judged. A test case is one check on the host or on one GPU.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Coverage {
    /// Test cases with a pass, a warning or a failure.
    pub judged: usize,
    pub total: usize,
    /// The others by reason: first those that could not be looked at, then those that do not apply.
    pub not_judged: Vec<NotJudged>,
}

/// Test cases that were not judged for one and the same reason.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct NotJudged {
    /// `error` (could not look) or `skip` (does not apply).
    pub verdict: Verdict,
    pub reason: String,
    pub checks: Vec<NotJudgedCheck>,
}

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct NotJudgedCheck {
    pub check: String,
    pub subjects: Vec<Subject>,
}

impl Coverage {
    pub(crate) fn of(run: &Run) -> Self {
        let counts = run.counts();
        let mut not_judged: Vec<NotJudged> = Vec::new();
        for finding in run.findings.iter().filter(|it| !it.verdict.judged()) {
            let reason = reason(finding);
            let position = not_judged
                .iter()
                .position(|it| it.verdict == finding.verdict && it.reason == reason)
                .unwrap_or_else(|| {
                    not_judged.push(NotJudged {
                        verdict: finding.verdict,
                        reason,
                        checks: Vec::new(),
                    });
                    not_judged.len() - 1
                });
            not_judged[position].add(finding);
        }
        not_judged.sort_by_key(|it| it.verdict != Verdict::Error);
        Self {
            judged: counts.judged(),
            total: counts.total(),
            not_judged,
        }
    }

    /// `152 of 168 test cases were judged; 12 could not be, 4 do not apply`.
    pub(crate) fn sentence(&self) -> String {
        let count = |verdict| {
            let groups = self.not_judged.iter().filter(|it| it.verdict == verdict);
            groups.map(NotJudged::test_cases).sum::<usize>()
        };
        let mut parts = vec![format!(
            "{} of {} were judged",
            self.judged,
            counted(self.total, "test case")
        )];
        match count(Verdict::Error) {
            0 => {}
            errors => parts.push(format!("{errors} could not be judged")),
        }
        match count(Verdict::Skip) {
            0 => {}
            skips => parts.push(format!("{skips} skipped")),
        }
        parts.join(", ")
    }
}

impl NotJudged {
    fn add(&mut self, finding: &Finding) {
        match self.checks.iter_mut().find(|it| it.check == finding.check) {
            Some(check) => check.subjects.push(finding.subject.clone()),
            None => self.checks.push(NotJudgedCheck {
                check: finding.check.clone(),
                subjects: vec![finding.subject.clone()],
            }),
        }
    }

    pub(crate) fn test_cases(&self) -> usize {
        self.checks.iter().map(|it| it.subjects.len()).sum()
    }

    /// `device_nodes; ecc_mode, ecc_errors on 8 GPUs; inforom on GPU 3 (0000:3b:00.0)`; the only
    /// GPU of a run is not named.
    pub(crate) fn names(&self, run: &Run) -> String {
        let only_gpu = gpu_count(&run.findings) == 1;
        let mut groups: Vec<(&[Subject], Vec<String>)> = Vec::new();
        for check in &self.checks {
            let name = one_line(&check.check);
            match groups
                .iter_mut()
                .find(|(subjects, _)| *subjects == check.subjects)
            {
                Some((_, names)) => names.push(name),
                None => groups.push((&check.subjects, vec![name])),
            }
        }
        let groups: Vec<String> = groups
            .into_iter()
            .map(|(subjects, names)| {
                let names = names.join(", ");
                match subjects {
                    [Subject::Host] => names,
                    [Subject::Gpu(_)] if only_gpu => names,
                    [subject] => format!("{names} on {}", one_line(&name_of(subject, &run.facts))),
                    subjects => format!("{names} on {}", counted_subjects(subjects)),
                }
            })
            .collect();
        groups.join("; ")
    }
}

/// Why it was not judged, without the name of the reading, so that one missing library is one
/// reason.
pub(crate) fn reason(finding: &Finding) -> String {
    match finding.summary.split_once("could not be read: ") {
        Some((_, reason)) if !reason.is_empty() => reason.to_owned(),
        _ => finding.summary.clone(),
    }
}
