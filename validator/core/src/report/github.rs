//! Annotations for GitHub Actions: workflow commands on stdout.

use super::faults::faults;
use super::text::{counted, counted_subjects, one_line, xml};
use super::verdict;
use crate::diagnosis::name_of;
use crate::findings::{ExitStatus, Run, Subject, Verdict};

/// One `::error` or `::warning` for each fault, the same fault on several GPUs as one.
///
/// GitHub shows ten of each kind in a step, so that faults of one kind beyond that are counted in
/// the last.
pub fn github_annotations(run: &Run) -> String {
    let mut commands = String::new();
    let faults = faults(run);
    for (is_warning, command) in [(false, "error"), (true, "warning")] {
        let of_kind: Vec<_> = faults
            .iter()
            .filter(|it| (it.finding.verdict == Verdict::Warn) == is_warning)
            .collect();
        for fault in of_kind.iter().take(ANNOTATIONS_SHOWN - 1) {
            let finding = fault.finding;
            let mut message = shown(&fault.summary());
            for (what, value) in [
                ("expected", &finding.expected),
                ("observed", &finding.observed),
                ("remedy", &finding.remedy),
            ] {
                if let Some(value) = value {
                    message.extend(["\n", what, ": ", &shown(value)]);
                }
            }
            if let Some(action) = finding.recommended_action {
                message.extend(["\n", "recommended_action: ", action.name()]);
            }
            let subjects = match &fault.subjects[..] {
                [Subject::Host] => "host".to_owned(),
                [one] => name_of(one, &run.facts),
                many => counted_subjects(many.iter().copied()),
            };
            let checks = match &fault.checks[..] {
                [one] => (*one).to_owned(),
                [one, others @ ..] => format!("{one} and {}", counted(others.len(), "other check")),
                [] => String::new(),
            };
            let title = format!("{checks} ({subjects}): {}", finding.verdict);
            commands.push_str(&annotation(command, run, &title, &message));
        }
        if of_kind.len() >= ANNOTATIONS_SHOWN {
            let more = of_kind.len() - (ANNOTATIONS_SHOWN - 1);
            let message = format!("{more} more are in the report");
            commands.push_str(&annotation(command, run, "gpu-validator", &message));
        }
    }
    let status = run.exit_status();
    // Without a fault to point at, a verdict that is not green still needs its annotation.
    if commands.is_empty() && status != ExitStatus::Passed {
        let message = verdict::sentence(run);
        commands.push_str(&annotation("error", run, verdict::word(status), &message));
    }
    for banner in verdict::banners(run) {
        commands.push_str(&annotation("notice", run, "gpu-validator", &banner));
    }
    commands
}

/// Source: GitHub Actions documentation, usage limits of annotations (10 warnings and 10 errors a
/// step).
const ANNOTATIONS_SHOWN: usize = 10;

fn annotation(command: &str, run: &Run, title: &str, message: &str) -> String {
    let file = if run.profile == Run::BUILT_IN_PROFILE {
        String::new()
    } else {
        format!("file={},", property(&one_line(&run.profile)))
    };
    format!(
        "::{command} {file}title={}::{}\n",
        property(&shown(title)),
        data(message)
    )
}

/// One workflow command, `::error title=…::message`, for what is not a finding.
pub fn workflow_command(command: &str, title: &str, message: &str) -> String {
    format!(
        "::{command} title={}::{}\n",
        property(&shown(title)),
        data(&shown(message))
    )
}

/// Line by line without anything that the service or who reads its log would act on; what XML
/// cannot carry, a log viewer should not get either.
fn shown(text: &str) -> String {
    let lines: Vec<String> = text.lines().map(|line| xml(&one_line(line))).collect();
    lines.join("\n")
}

/// Source of the escapes: actions/toolkit, packages/core, command.ts (escapeData).
fn data(text: &str) -> String {
    text.replace('%', "%25")
        .replace('\r', "%0D")
        .replace('\n', "%0A")
}

/// Source of the escapes: actions/toolkit, packages/core, command.ts (escapeProperty).
fn property(text: &str) -> String {
    data(text).replace(':', "%3A").replace(',', "%2C")
}
