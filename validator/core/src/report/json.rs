//! The report for programs.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

use super::burn_rows::{BurnRow, burn_rows};
use super::coverage::Coverage;
use super::node_summary::Machine;
use super::verdict;
use crate::diagnosis::{RecommendedAction, RootCause, diagnose, recommended_action_of};
use crate::findings::{Counts, Finding, Run};
use crate::level::{Level, Stage};

/// The format of the JSON report. It grows when a reader of the older format would misread.
pub const REPORT_FORMAT: u32 = 1;

/// The JSON report.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Report {
    /// [`REPORT_FORMAT`] of the writer.
    pub format: u32,
    /// Version of the `gpu-validator` that judged.
    pub validator_version: String,
    /// `pass`, `fail`, `not_judged` or `busy`.
    pub verdict: String,
    /// The verdict in words.
    pub verdict_text: String,
    /// The process exit code that belongs to the verdict: 0 pass, 1 fail, 2 not judged, 4 busy.
    pub exit_code: u8,
    /// The scenario of the simulated driver libraries that answered, if any did.
    pub simulated: Option<String>,
    /// The action of the first root cause: `wait`, `fix_software`, `drain`, `reset`, `reboot` or
    /// `rma`; absent where the node may take work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recommended_action: Option<RecommendedAction>,
    /// Root causes, the one to act on first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub diagnosis: Vec<RootCause>,
    /// Why the run is not complete, if it is not.
    pub incomplete: Option<String>,
    /// Serial numbers, UUIDs and host names were replaced.
    pub anonymized: bool,
    /// The profile's path as given, or `built-in`.
    pub profile: String,
    pub level: Level,
    /// When the facts were collected, RFC 3339 in UTC.
    pub collected_at: String,
    pub machine: Machine,
    /// Findings by verdict. A JUnit report of the same run has as many test cases, failures, errors
    /// and skips.
    pub counts: Counts,
    pub coverage: Coverage,
    /// What the burn showed, one row for each GPU and precision; absent where nothing was burned.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub burn: Vec<BurnRow>,
    /// The checks that the findings name, by id.
    pub checks: BTreeMap<String, ReportedCheck>,
    pub findings: Vec<Finding>,
    /// Wall time of each probe, in milliseconds.
    pub timings_ms: BTreeMap<String, f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ReportedCheck {
    pub title: String,
    pub stage: Stage,
    pub documentation_url: String,
}

impl Report {
    pub fn of(run: &Run) -> Self {
        let status = run.exit_status();
        Self {
            format: REPORT_FORMAT,
            validator_version: env!("CARGO_PKG_VERSION").to_owned(),
            verdict: verdict::key(status).to_owned(),
            verdict_text: verdict::sentence(run),
            exit_code: status as u8,
            simulated: run.facts.simulated.clone(),
            recommended_action: recommended_action_of(run),
            diagnosis: diagnose(run),
            incomplete: run.incomplete.clone(),
            anonymized: run.facts.anonymized,
            profile: run.profile.clone(),
            level: run.level,
            collected_at: run.facts.collected_at.clone(),
            machine: Machine::of(&run.facts),
            counts: run.counts(),
            coverage: Coverage::of(run),
            burn: burn_rows(&run.facts),
            checks: reported_checks(&run.findings),
            findings: run.findings.clone(),
            timings_ms: run.facts.timings_ms.clone(),
        }
    }
}

fn reported_checks(findings: &[Finding]) -> BTreeMap<String, ReportedCheck> {
    crate::checks::ALL
        .iter()
        .filter(|entry| findings.iter().any(|it| it.check == entry.check.id))
        .map(|entry| {
            let reported = ReportedCheck {
                title: crate::check::title(entry).to_owned(),
                stage: entry.check.stage,
                documentation_url: entry.check.documentation_url.to_owned(),
            };
            (entry.check.id.to_owned(), reported)
        })
        .collect()
}

/// The JSON report, indented, with a line break at its end.
pub fn json(run: &Run) -> String {
    // Every map of the report has string keys, so that writing it cannot fail; numbers that JSON
    // lacks become null.
    let mut text = serde_json::to_string_pretty(&Report::of(run)).unwrap_or_default();
    text.push('\n');
    super::text::visible_json(&text)
}
