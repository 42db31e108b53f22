//! The verdict of a run in words, and what every report must say above it.

use super::text::{counted, counted_subjects, one_line};
use crate::findings::{ExitStatus, Finding, Run, Subject, Verdict};
use crate::level::Level;

/// The verdict in one word or two, the same in every report.
pub fn word(status: ExitStatus) -> &'static str {
    match status {
        ExitStatus::Passed => "PASS",
        ExitStatus::Failed => "FAIL",
        ExitStatus::NotJudged => "NOT JUDGED",
        ExitStatus::BadInput => "BAD INPUT",
        ExitStatus::Busy => "BUSY",
    }
}

/// The verdict as a machine reads it: `pass`, `fail`, `not_judged`, `busy`.
pub(crate) fn key(status: ExitStatus) -> &'static str {
    match status {
        ExitStatus::Passed => "pass",
        ExitStatus::Failed => "fail",
        ExitStatus::NotJudged => "not_judged",
        ExitStatus::BadInput => "bad_input",
        ExitStatus::Busy => "busy",
    }
}

/// What the verdict means, as the end of a sentence that `word` begins.
pub fn sentence(run: &Run) -> String {
    let counts = run.counts();
    let named = |verdict| named_checks(&run.findings, verdict);
    if run.level == Level::Image {
        return sentence_of_an_image(run);
    }
    match run.exit_status() {
        ExitStatus::Passed => {
            let warnings = match counts.warn {
                0 => String::new(),
                warn => format!(", {}", counted(warn, "warning")),
            };
            let gpus = judged_gpus(run);
            format!(
                "node is ready: {} judged, none failed{warnings}",
                counted(gpus, "GPU")
            )
        }
        ExitStatus::Failed => format!("node is not ready: {}", named(Verdict::Fail)),
        ExitStatus::NotJudged if judged_gpus(run) == 0 => {
            "inconclusive, no GPU was judged; node is not ready".to_owned()
        }
        ExitStatus::NotJudged if counts.error == 0 => {
            "inconclusive, the run is not complete; node is not ready".to_owned()
        }
        ExitStatus::NotJudged => format!(
            "inconclusive, not everything could be judged; node is not ready: {}",
            named(Verdict::Error)
        ),
        ExitStatus::Busy => format!(
            "nothing failed, but GPUs that others are using could not be judged under load: {}",
            named(Verdict::Error)
        ),
        ExitStatus::BadInput => "the input could not be used".to_owned(),
    }
}

/// An image is published, and takes no work itself.
fn sentence_of_an_image(run: &Run) -> String {
    let counts = run.counts();
    let named = |verdict| named_checks(&run.findings, verdict);
    match run.exit_status() {
        ExitStatus::Passed => format!(
            "this image may be published: {} judged, none failed{}",
            counted(counts.judged(), "test case"),
            match counts.warn {
                0 => String::new(),
                warn => format!(", {}", counted(warn, "warning")),
            }
        ),
        ExitStatus::Failed => {
            format!("this image must not be published: {}", named(Verdict::Fail))
        }
        _ if counts.error > 0 => format!(
            "nothing failed, but not everything could be judged; this image is not cleared: {}",
            named(Verdict::Error)
        ),
        _ => format!(
            "nothing failed, but {}; this image is not cleared",
            if run.incomplete.is_some() {
                "the run is not complete"
            } else {
                "its driver was not judged"
            }
        ),
    }
}

/// What makes this run less than a run of a real machine from end to end; shown first in every
/// report.
pub(crate) fn banners(run: &Run) -> Vec<String> {
    let simulated = run.facts.simulated.as_ref().map(|scenario| {
        format!(
            "SIMULATED: the driver libraries are simulated ({}); the result does not describe a real machine",
            one_line(scenario)
        )
    });
    let incomplete = run.incomplete.as_ref().map(|reason| {
        format!(
            "INCOMPLETE: {}; what is missing below was not read",
            one_line(reason)
        )
    });
    let anonymized = run
        .facts
        .anonymized
        .then(|| "anonymized: serial numbers, UUIDs and host names were replaced".to_owned());
    [simulated, incomplete, anonymized]
        .into_iter()
        .flatten()
        .collect()
}

/// GPUs on which at least one check was judged.
pub(super) fn judged_gpus(run: &Run) -> usize {
    let mut gpus: Vec<&Subject> = run
        .findings
        .iter()
        .filter(|it| it.verdict.judged() && it.subject.is_gpu())
        .map(|it| &it.subject)
        .collect();
    gpus.dedup();
    gpus.len()
}

/// `persistence_mode (3 GPUs), fabric_manager`; no more than six names.
fn named_checks(findings: &[Finding], verdict: Verdict) -> String {
    const NAMED: usize = 6;
    let mut names: Vec<(&str, Vec<&Subject>)> = Vec::new();
    for finding in findings.iter().filter(|it| it.verdict == verdict) {
        match names.iter_mut().find(|(name, _)| *name == finding.check) {
            Some((_, subjects)) => subjects.push(&finding.subject),
            None => names.push((&finding.check, vec![&finding.subject])),
        }
    }
    let mut words: Vec<String> = names
        .iter()
        .take(NAMED)
        .map(|(name, subjects)| match subjects.as_slice() {
            [Subject::Host] => one_line(name),
            subjects => {
                let subjects = counted_subjects(subjects.iter().copied());
                format!("{} ({subjects})", one_line(name))
            }
        })
        .collect();
    if names.len() > NAMED {
        words.push(format!("{} more", names.len() - NAMED));
    }
    words.join(", ")
}
