//! What is not right, with the same fault on several GPUs as one entry.

use crate::findings::{Finding, Run, Subject, Verdict};

/// One fault and everything that has it.
#[derive(Debug)]
pub(crate) struct Fault<'a> {
    /// The finding about the first subject; the others say the same.
    pub(crate) finding: &'a Finding,
    pub(crate) subjects: Vec<&'a Subject>,
}

/// Failures first, then what could not be judged, then warnings; within each in the order of the findings.
pub(crate) fn faults(run: &Run) -> Vec<Fault<'_>> {
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
                subjects: vec![&finding.subject],
            }),
        }
    }
    faults.sort_by_key(|it| match it.finding.verdict {
        Verdict::Fail => 0,
        Verdict::Error => 1,
        _ => 2,
    });
    faults
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
