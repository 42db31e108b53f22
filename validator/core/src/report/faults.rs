//! What is not right, with the same fault on several GPUs, or the same obstacle before several
//! checks, as one entry.

use super::coverage::reason;
use super::text::{counted, one_line};
use crate::diagnosis::name_of;
use crate::facts::Facts;
use crate::findings::{Finding, Run, Subject, Verdict, gpu_count};

/// One fault and everything that has it.
#[derive(Debug)]
pub(crate) struct Fault<'a> {
    /// The first finding; the others say the same.
    pub(crate) finding: &'a Finding,
    /// More than one where one obstacle kept several checks from looking.
    pub(crate) checks: Vec<&'a str>,
    pub(crate) subjects: Vec<&'a Subject>,
    facts: &'a Facts,
    /// How many GPUs the run has findings about.
    gpus: usize,
}

impl Fault<'_> {
    /// What is wrong, on one line.
    pub(crate) fn summary(&self) -> String {
        if self.checks.len() > 1 {
            one_line(&reason(self.finding))
        } else {
            one_line(&self.finding.summary)
        }
    }

    /// The checks' ids.
    pub(crate) fn names(&self) -> String {
        let names: Vec<String> = self.checks.iter().map(|it| one_line(it)).collect();
        names.join(", ")
    }

    /// Its subjects: none (the host), `all 8 GPUs`, or each GPU or environment by name.
    pub(crate) fn subject_names(&self) -> Vec<String> {
        if self.subjects == [&Subject::Host] {
            Vec::new()
        } else if self.subjects.len() > 1
            && self.subjects.len() == self.gpus
            && self.subjects.iter().all(|it| it.is_gpu())
        {
            vec![format!("all {}", counted(self.gpus, "GPU"))]
        } else {
            let names = self.subjects.iter().map(|it| name_of(it, self.facts));
            names.map(|it| one_line(&it)).collect()
        }
    }

    /// The public page on the matter; `None` for several checks, or one that this version does not
    /// know.
    pub(crate) fn documentation_url(&self) -> Option<&'static str> {
        documentation_url(&self.finding.check).filter(|_| self.checks.len() == 1)
    }
}

/// Failures first, then what could not be judged, then warnings; within each in the order of the
/// findings.
pub(crate) fn faults(run: &Run) -> Vec<Fault<'_>> {
    let gpus = gpu_count(&run.findings);
    let mut faults: Vec<Fault<'_>> = Vec::new();
    for finding in &run.findings {
        if matches!(finding.verdict, Verdict::Pass | Verdict::Skip) {
            continue;
        }
        match faults
            .iter_mut()
            .find(|it| says_the_same(it.finding, finding))
        {
            Some(fault) => fault.subjects.push(&finding.subject),
            None => faults.push(Fault {
                finding,
                checks: vec![&finding.check],
                subjects: vec![&finding.subject],
                facts: &run.facts,
                gpus,
            }),
        }
    }
    let mut faults = with_one_obstacle_once(faults);
    faults.sort_by_key(|it| match it.finding.verdict {
        Verdict::Fail => 0,
        Verdict::Error => 1,
        _ => 2,
    });
    faults
}

/// A missing library or a lost GPU keeps many checks from looking: that is one thing to be done.
fn with_one_obstacle_once(faults: Vec<Fault<'_>>) -> Vec<Fault<'_>> {
    let mut merged: Vec<Fault<'_>> = Vec::new();
    for fault in faults {
        let same = merged.iter_mut().find(|it| {
            let (one, other) = (it.finding, fault.finding);
            let bare = |it: &Finding| it.expected.is_none() && it.observed.is_none();
            one.verdict == Verdict::Error
                && other.verdict == Verdict::Error
                && bare(one)
                && bare(other)
                && one.remedy == other.remedy
                && one.busy == other.busy
                && it.subjects == fault.subjects
                && reason(one) == reason(other)
        });
        match same {
            Some(same) => same.checks.extend(fault.checks),
            None => merged.push(fault),
        }
    }
    merged
}

fn says_the_same(one: &Finding, other: &Finding) -> bool {
    one.check == other.check
        && one.verdict == other.verdict
        && one.summary == other.summary
        && one.expected == other.expected
        && one.observed == other.observed
        && one.remedy == other.remedy
        && one.overridden == other.overridden
}

/// The public page on this check's matter; `None` for a check that this version does not know.
pub(crate) fn documentation_url(check: &str) -> Option<&'static str> {
    crate::checks::ALL
        .iter()
        .find(|it| it.check.id == check)
        .map(|it| it.check.documentation_url)
}
