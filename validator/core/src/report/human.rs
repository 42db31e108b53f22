//! The report for a person at a terminal or in a build log.
//!
//! First the answer: verdict, cause, GPU and remediation. Then the GPUs, further problems, and a
//! line of counts. Every check and the coverage by name are in the details (`-v`).

use super::answer::{action, answer, named_cause, word};
use super::gpu_table::GpuTable;
use super::human_details::details;
use super::node_summary::{Machine, missing};
use super::page::{Color, HumanStyle, Page, color_of_verdict};
use super::text::{cause_in_words, counted, one_line, wrapped};
use super::verdict;
use crate::diagnosis::{RootCause, diagnose};
use crate::findings::{ExitStatus, Finding, Run};
use crate::level::Level;

/// The report for a person: the answer, the GPUs, further problems, details where they are wanted,
/// and counts.
pub fn human(run: &Run, style: HumanStyle) -> String {
    let causes = diagnose(run);
    let mut page = Page {
        text: String::new(),
        style: HumanStyle {
            width: style.width.max(HumanStyle::WIDTH_MINIMUM),
            ..style
        },
    };
    page.answer(run, &causes);
    if judged_nothing(run) && !style.verbose {
        page.nothing_judged(run, &causes);
        page.counts(run);
        return page.text;
    }
    page.machine(run);
    page.gpus(run, &causes);
    page.missing(run);
    page.problems(run, &causes);
    if style.verbose {
        details(&mut page, run);
    }
    page.counts(run);
    page.text
}

impl Page {
    fn answer(&mut self, run: &Run, causes: &[RootCause]) {
        let answer = answer(run, causes);
        let (word, text) = answer.split_once(": ").unwrap_or((&answer, ""));
        self.after_word(&format!("{word}:"), color_of(run), text);
        if let Some(cause) = named_cause(run, causes) {
            let evidence = wrapped(&evidence(run, cause), "  ", self.style.width);
            self.line(&evidence);
        }
        for banner in verdict::banners(run) {
            let (word, text) = banner.split_once(": ").unwrap_or((&banner, ""));
            self.after_word(&format!("{word}:"), Color::Yellow, text);
        }
    }

    fn machine(&mut self, run: &Run) {
        for line in Machine::of(&run.facts).short_lines() {
            let line = wrapped(&line, "", self.style.width);
            self.line(&line);
        }
        let line = format!(
            "level {}, profile {}, gpu-validator {}",
            run.level,
            one_line(&run.profile),
            one_line(&run.facts.validator_version)
        );
        let line = wrapped(&line, "", self.style.width);
        self.line(&line);
    }

    /// The layers that are missing and the first remediation; everything else follows from them.
    fn nothing_judged(&mut self, run: &Run, causes: &[RootCause]) {
        let [host, _] = Machine::of(&run.facts).short_lines();
        let level = format!("level {}, profile {}", run.level, one_line(&run.profile));
        for line in [host, level] {
            self.line(&wrapped(&line, "", self.style.width));
        }
        for line in missing(&run.facts) {
            self.line(&wrapped(&line, "  ", self.style.width));
        }
        if let Some(remedy) = causes.iter().find_map(|it| it.remedy.as_deref()) {
            let line = format!("Remediation: {}", one_line(remedy));
            self.line(&wrapped(&line, "", self.style.width));
        }
    }

    fn gpus(&mut self, run: &Run, causes: &[RootCause]) {
        let table = GpuTable::of(run, causes, self.style.width);
        if table.rows.is_empty() {
            return;
        }
        self.heading(&table.head);
        for row in table.rows {
            let word = self.paint(color_of_verdict(row.verdict), &row.word);
            self.line(&format!("{}{word}{}", row.before, row.after));
        }
    }

    fn missing(&mut self, run: &Run) {
        let missing = missing(&run.facts);
        if missing.is_empty() {
            return;
        }
        self.heading("Missing on this machine");
        for line in missing {
            self.line(&wrapped(&line, "  ", self.style.width));
        }
    }

    /// The causes that the answer does not name.
    fn problems(&mut self, run: &Run, causes: &[RootCause]) {
        let named = named_cause(run, causes);
        let others = causes.iter().filter(|it| Some(*it) != named);
        let others = alike_once(others);
        if others.is_empty() {
            return;
        }
        self.heading(if named.is_some() {
            "Further problems"
        } else {
            "Problems"
        });
        for cause in &others {
            self.after_verdict(cause.verdict, &cause_in_words(cause));
            let remediation = one_line(&remediation(cause));
            let remediation = remediation.trim_end_matches('.');
            self.under_verdict(&format!(
                "Remediation: {remediation}. {}",
                evidence(run, cause)
            ));
        }
    }

    fn counts(&mut self, run: &Run) {
        let counts = run.counts();
        let mut parts = vec![format!("{} passed", counts.pass)];
        for (count, what) in [
            (counts.fail, "failed"),
            (counts.error, "not judged"),
            (counts.skip, "skipped"),
        ] {
            if count > 0 {
                parts.push(format!("{count} {what}"));
            }
        }
        if counts.warn > 0 {
            parts.insert(1, counted(counts.warn, "warning"));
        }
        let simulated = if run.facts.simulated.is_some() {
            "SIMULATED "
        } else {
            ""
        };
        let more = if self.style.verbose {
            ""
        } else {
            "; every check by name: -v"
        };
        let text = format!(
            "{}: {} (exit code {}){more}",
            counted(counts.total(), "test case"),
            parts.join(", "),
            run.exit_status() as u8
        );
        self.blank();
        self.after_word(&format!("{simulated}{}:", word(run)), color_of(run), &text);
    }
}

/// A node without a GPU in NVML, of which nothing failed: one reason explains every finding.
fn judged_nothing(run: &Run) -> bool {
    run.exit_status() == ExitStatus::NotJudged
        && run.incomplete.is_none()
        && run.level != Level::Image
        && verdict::judged_gpus(run) == 0
        && !missing(&run.facts).is_empty()
}

/// One obstacle that kept several checks from being judged is one entry with their names.
fn alike_once<'c>(causes: impl Iterator<Item = &'c RootCause>) -> Vec<RootCause> {
    let mut distinct: Vec<RootCause> = Vec::new();
    for cause in causes {
        let same = distinct.iter_mut().find(|it| {
            it.verdict == cause.verdict
                && it.gpus == cause.gpus
                && it.summary == cause.summary
                && remediation(it) == remediation(cause)
        });
        match same {
            Some(same) => {
                same.evidence.extend(cause.evidence.iter().cloned());
                same.consequences.extend(cause.consequences.iter().cloned());
            }
            None => distinct.push(cause.clone()),
        }
    }
    distinct
}

/// The checks of a cause, what follows from it, and what the profile changed.
fn evidence(run: &Run, cause: &RootCause) -> String {
    let checks = names(cause.evidence.iter().map(|it| it.check.as_str()));
    let mut parts = vec![format!("Checks: {checks}")];
    let consequences = names(cause.consequences.iter().map(|it| it.check.as_str()));
    if !consequences.is_empty() {
        parts.push(format!("consequences: {consequences}"));
    }
    parts.extend(overridden(run, cause).map(one_line));
    parts.join("; ")
}

/// What to do about a problem that stands in a list.
fn remediation(cause: &RootCause) -> String {
    cause.remedy.clone().unwrap_or_else(|| action(cause))
}

/// Names once each, the first ones by name.
fn names<'n>(names: impl Iterator<Item = &'n str>) -> String {
    const NAMED: usize = 8;
    let mut distinct: Vec<String> = Vec::new();
    for name in names {
        let name = one_line(name);
        if !distinct.contains(&name) {
            distinct.push(name);
        }
    }
    let further = distinct.len().saturating_sub(NAMED);
    distinct.truncate(NAMED);
    if further > 0 {
        distinct.push(format!("and {further} more"));
    }
    distinct.join(", ")
}

/// What the profile changed of the finding that names the cause.
fn overridden<'r>(run: &'r Run, cause: &RootCause) -> Option<&'r str> {
    let first = cause.evidence.first()?;
    let is_it = |it: &&Finding| it.check == first.check && it.subject == first.subject;
    run.findings.iter().find(is_it)?.overridden.as_deref()
}

fn color_of(run: &Run) -> Color {
    match word(run) {
        "PASS" => Color::Green,
        "WARN" => Color::Yellow,
        "FAIL" => Color::Red,
        _ => Color::Magenta,
    }
}
