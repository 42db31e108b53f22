//! The report for a person at a terminal or in a build log.
//!
//! First the answer: verdict, cause, GPU and remediation. Then the GPUs, further problems, and a line of counts. Every check
//! and the coverage by name are in the details (`-v`).

use super::answer::{action, answer, named_cause, word};
use super::gpu_table::GpuTable;
use super::human_details::details;
use super::node_summary::{Machine, missing};
use super::text::{cause_in_words, counted, one_line, wrapped};
use super::verdict;
use crate::diagnosis::{RootCause, diagnose};
use crate::findings::{Finding, Run, Verdict};

/// How the report for a person looks.
#[derive(Clone, Copy, Debug)]
pub struct HumanStyle {
    /// ANSI colours.
    pub color: bool,
    /// Every check of every GPU on a line of its own.
    pub verbose: bool,
    /// Columns of the terminal.
    pub width: usize,
}

impl HumanStyle {
    /// Columns where no terminal has a width: files and pipes get the same text everywhere.
    pub const WIDTH_OF_PIPES: usize = 100;
    /// On narrower terminals lines are broken by the terminal.
    const WIDTH_MINIMUM: usize = 60;
}

impl Default for HumanStyle {
    fn default() -> Self {
        Self {
            color: false,
            verbose: false,
            width: Self::WIDTH_OF_PIPES,
        }
    }
}

/// The report for a person: the answer, the GPUs, further problems, details where they are wanted, and counts.
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

pub(super) struct Page {
    text: String,
    pub(super) style: HumanStyle,
}

impl Page {
    pub(super) fn line(&mut self, line: &str) {
        self.text.push_str(line.trim_end());
        self.text.push('\n');
    }

    fn blank(&mut self) {
        self.text.push('\n');
    }

    pub(super) fn heading(&mut self, heading: &str) {
        let heading = self.paint(Color::Bold, heading);
        self.blank();
        self.line(&heading);
    }

    /// `text` after a word in colour, wrapped; further lines begin at column 2.
    fn after_word(&mut self, word: &str, color: Color, text: &str) {
        let lines = wrapped(&format!("{word} {text}"), "  ", self.style.width);
        // Escapes have no width, so that the word is painted after wrapping.
        let rest = lines.trim_start().strip_prefix(word).unwrap_or_default();
        let word = self.paint(color, word);
        self.line(&format!("{word}{rest}"));
    }

    /// A verdict in its column and `text` in the next one, wrapped there.
    pub(super) fn after_verdict(&mut self, verdict: Verdict, text: &str) {
        let lines = wrapped(text, VERDICT_INDENT, self.style.width);
        let lines = lines.strip_prefix(VERDICT_INDENT).unwrap_or(&lines);
        self.verdict_line(verdict, lines);
    }

    /// A verdict in its column and one line after it.
    pub(super) fn verdict_line(&mut self, verdict: Verdict, line: &str) {
        let word = verdict_in_capitals(verdict);
        let padding = " ".repeat(VERDICT_INDENT.len().saturating_sub(word.len()));
        let word = self.paint(color_of_verdict(verdict), word);
        self.line(&format!("{word}{padding}{line}"));
    }

    /// Lines that belong to the entry above.
    pub(super) fn under_verdict(&mut self, text: &str) {
        let lines = wrapped(text, VERDICT_INDENT, self.style.width);
        self.line(&lines);
    }

    pub(super) fn paint(&self, color: Color, text: &str) -> String {
        if !self.style.color {
            return text.to_owned();
        }
        let code = match color {
            Color::Bold => "1",
            Color::Dim => "2",
            Color::Green => "32",
            Color::Yellow => "33",
            Color::Red => "1;31",
            Color::Magenta => "1;35",
        };
        format!("\u{1b}[{code}m{text}\u{1b}[0m")
    }

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
        let others: Vec<&RootCause> = causes.iter().filter(|it| Some(*it) != named).collect();
        if others.is_empty() {
            return;
        }
        self.heading(if named.is_some() {
            "Further problems"
        } else {
            "Problems"
        });
        for cause in others {
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

/// As wide as the longest verdict and a gap.
const VERDICT_INDENT: &str = "       ";

/// Capitals where something must be done.
pub(super) fn verdict_in_capitals(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "pass",
        Verdict::Skip => "skip",
        Verdict::Warn => "WARN",
        Verdict::Error => "ERROR",
        Verdict::Fail => "FAIL",
    }
}

#[derive(Clone, Copy)]
pub(super) enum Color {
    Bold,
    Dim,
    Green,
    Yellow,
    Red,
    Magenta,
}

fn color_of_verdict(verdict: Verdict) -> Color {
    match verdict {
        Verdict::Pass => Color::Green,
        Verdict::Skip => Color::Dim,
        Verdict::Warn => Color::Yellow,
        Verdict::Error => Color::Magenta,
        Verdict::Fail => Color::Red,
    }
}

fn color_of(run: &Run) -> Color {
    match word(run) {
        "PASS" => Color::Green,
        "WARN" => Color::Yellow,
        "FAIL" => Color::Red,
        _ => Color::Magenta,
    }
}
