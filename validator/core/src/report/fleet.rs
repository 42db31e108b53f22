//! The report on many machines: one line each, and the totals.

use schemars::JsonSchema;
use serde::Serialize;

use super::text::{counted, one_line};
use super::verdict;
use crate::findings::{Counts, ExitStatus, Finding, Run, Verdict};

/// The line for one facts file of a folder.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct FleetEntry {
    /// The file's name within the folder.
    pub file: String,
    /// `pass`, `fail`, `not_judged`, `busy`; `not_judged` also for a file that could not be read.
    pub verdict: String,
    pub exit_code: u8,
    /// The verdict in words, or why the file could not be read.
    pub text: String,
    pub hostname: Option<String>,
    pub simulated: bool,
    pub incomplete: bool,
    /// `None` for a file that could not be read.
    pub counts: Option<Counts>,
    /// What is neither pass nor skip.
    pub findings: Vec<Finding>,
}

impl FleetEntry {
    /// The line of `run` for the facts in `file`.
    pub fn judged(file: &str, run: &Run) -> Self {
        let status = run.exit_status();
        Self {
            file: file.to_owned(),
            verdict: verdict::key(status).to_owned(),
            exit_code: status as u8,
            text: verdict::sentence(run),
            hostname: run.facts.host.hostname.value().cloned(),
            simulated: run.facts.simulated.is_some(),
            incomplete: run.incomplete.is_some(),
            counts: Some(run.counts()),
            findings: run
                .findings
                .iter()
                .filter(|it| !matches!(it.verdict, Verdict::Pass | Verdict::Skip))
                .cloned()
                .collect(),
        }
    }

    /// A file without readable facts: its machine was not judged.
    pub fn unreadable(file: &str, reason: &str) -> Self {
        Self {
            file: file.to_owned(),
            verdict: verdict::key(ExitStatus::NotJudged).to_owned(),
            exit_code: ExitStatus::NotJudged as u8,
            text: reason.to_owned(),
            hostname: None,
            simulated: false,
            incomplete: false,
            counts: None,
            findings: Vec::new(),
        }
    }
}

/// How many machines have which verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct FleetTotals {
    pub files: usize,
    pub pass: usize,
    pub fail: usize,
    /// Unreadable files included.
    pub not_judged: usize,
    pub busy: usize,
    pub unreadable: usize,
    pub simulated: usize,
}

impl FleetTotals {
    pub fn of(entries: &[FleetEntry]) -> Self {
        let count =
            |matches: &dyn Fn(&FleetEntry) -> bool| entries.iter().filter(|it| matches(it)).count();
        Self {
            files: entries.len(),
            pass: count(&|it| it.verdict == "pass"),
            fail: count(&|it| it.verdict == "fail"),
            not_judged: count(&|it| it.verdict == "not_judged"),
            busy: count(&|it| it.verdict == "busy"),
            unreadable: count(&|it| it.counts.is_none()),
            simulated: count(&|it| it.simulated),
        }
    }

    /// The worst verdict of the machines; an empty folder judged nothing.
    pub fn exit_status(self) -> ExitStatus {
        if self.fail > 0 {
            ExitStatus::Failed
        } else if self.not_judged > 0 || self.files == 0 {
            ExitStatus::NotJudged
        } else if self.busy > 0 {
            ExitStatus::Busy
        } else {
            ExitStatus::Passed
        }
    }
}

impl std::fmt::Display for FleetTotals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}: {} pass, {} fail, {} not judged",
            counted(self.files, "file"),
            self.pass,
            self.fail,
            self.not_judged
        )?;
        if self.unreadable > 0 {
            write!(f, " ({} of them unreadable)", self.unreadable)?;
        }
        write!(f, ", {} busy", self.busy)?;
        if self.simulated > 0 {
            write!(f, "; {} of them SIMULATED", self.simulated)?;
        }
        Ok(())
    }
}

/// The line about one machine.
pub fn fleet_line(entry: &FleetEntry) -> String {
    let word = entry.verdict.replace('_', " ");
    let word = if entry.exit_code == 0 {
        word
    } else {
        word.to_uppercase()
    };
    let mut marks = String::new();
    if entry.simulated {
        marks.push_str("SIMULATED ");
    }
    if entry.incomplete {
        marks.push_str("INCOMPLETE ");
    }
    format!(
        "{word:<10}  {}  {marks}{}",
        one_line(&entry.file),
        one_line(&entry.text)
    )
}

/// The entries and their totals as JSON.
pub fn fleet_json(entries: &[FleetEntry]) -> String {
    #[derive(Serialize)]
    struct Fleet<'a> {
        format: u32,
        totals: FleetTotals,
        exit_code: u8,
        files: &'a [FleetEntry],
    }
    let totals = FleetTotals::of(entries);
    let fleet = Fleet {
        format: super::REPORT_FORMAT,
        totals,
        exit_code: totals.exit_status() as u8,
        files: entries,
    };
    let mut text = serde_json::to_string_pretty(&fleet).unwrap_or_default();
    text.push('\n');
    super::text::visible_json(&text)
}
