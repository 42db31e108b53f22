//! What a booted machine wrote down, held against what must have happened.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, ensure};
use serde_json::Value;

const VALIDATION: &str = "gpu-validator-firstboot.service";

/// What must be in one record of a boot.
#[derive(Debug)]
pub(super) struct Expected<'a> {
    /// The name that `after-boot` gave it.
    pub(super) record: &'a str,
    /// The validation's `ActiveState` and `Result`.
    pub(super) validation: &'a str,
    pub(super) result: &'a str,
    pub(super) gated_starts: bool,
    /// The last of the gated unit's arguments.
    pub(super) arguments: &'a str,
    /// The journal's messages.
    pub(super) journal: &'a [&'a str],
    /// The report's; `None` where it is incomplete.
    pub(super) verdict: Option<&'a str>,
}

/// Returns for how long the validation ran, in seconds.
pub(super) fn check(out: &Path, gated_unit: &str, expected: &Expected<'_>) -> anyhow::Result<f64> {
    let folder = out.join("boot-test").join(expected.record);
    let read = |name: &str| {
        let path = folder.join(name);
        std::fs::read_to_string(&path).with_context(|| format!("{} cannot be read", path.display()))
    };
    let validation = properties(&read(VALIDATION)?);
    let gated = properties(&read(gated_unit)?);
    let of =
        |unit: &BTreeMap<String, String>, name: &str| unit.get(name).cloned().unwrap_or_default();
    let (state, result) = (of(&validation, "ActiveState"), of(&validation, "Result"));
    ensure!(
        state == expected.validation && result == expected.result,
        "{VALIDATION} is {state} with result {result}, expected {} with {}",
        expected.validation,
        expected.result
    );
    let gated_state = of(&gated, "ActiveState");
    // A unit that started and failed has been started, too.
    let has_started =
        of(&gated, "ExecMainStartTimestampMonotonic") != "0" || gated_state == "active";
    ensure!(
        has_started == expected.gated_starts && (gated_state == "active") == expected.gated_starts,
        "{gated_unit} is {gated_state}, expected that it {}",
        if expected.gated_starts {
            "runs"
        } else {
            "was never started"
        }
    );
    let jobs = read("jobs")?;
    ensure!(
        !jobs.contains(gated_unit) && !jobs.contains(VALIDATION),
        "it is not decided what starts:\n{jobs}"
    );
    if expected.gated_starts {
        let journal = read("journal")?;
        let called = journal
            .lines()
            .rev()
            .find_map(|line| line.split_once(": called with:"));
        let (_, arguments) =
            called.with_context(|| format!("{gated_unit} does not say how it was called"))?;
        ensure!(
            arguments.ends_with(expected.arguments),
            "{gated_unit} was called with {arguments:?}, expected {:?} at the end",
            expected.arguments
        );
        let (end, start) = (
            microseconds(&validation, "ExecMainExitTimestampMonotonic")?,
            microseconds(&gated, "ExecMainStartTimestampMonotonic")?,
        );
        ensure!(
            end <= start,
            "{gated_unit} started at {start} us, before the validation ended at {end} us"
        );
    }
    let failed_units = read("failed-units")?;
    ensure!(
        failed_units.contains(VALIDATION) == (expected.validation == "failed"),
        "the failed units are\n{failed_units}"
    );
    let journal = read("journal")?;
    check_journal(&journal, expected.journal)?;
    ensure!(
        expected.gated_starts || journal.contains(&format!("Dependency failed for {gated_unit}")),
        "the journal does not say why {gated_unit} was not started"
    );
    check_report(
        &read("reports/report.json")?,
        &read("reports/report.xml")?,
        expected.verdict,
    )?;
    let (start, end) = (
        microseconds(&validation, "ExecMainStartTimestampMonotonic")?,
        microseconds(&validation, "ExecMainExitTimestampMonotonic")?,
    );
    Ok((end - start) / 1e6)
}

/// `NAME=VALUE` a line, as `systemctl show` prints them.
fn properties(text: &str) -> BTreeMap<String, String> {
    let pairs = text.lines().filter_map(|line| line.split_once('='));
    pairs
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

fn microseconds(unit: &BTreeMap<String, String>, name: &str) -> anyhow::Result<f64> {
    let value = unit.get(name).with_context(|| format!("no {name}"))?;
    value
        .parse()
        .with_context(|| format!("{name} is {value:?}, expected microseconds"))
}

fn check_journal(journal: &str, expected: &[&str]) -> anyhow::Result<()> {
    for text in expected {
        ensure!(journal.contains(text), "the journal does not say {text:?}");
    }
    let cycles: Vec<&str> = journal
        .lines()
        .filter(|line| line.contains("ordering cycle"))
        .collect();
    ensure!(
        cycles.is_empty(),
        "units wait for each other:\n{}",
        cycles.join("\n")
    );
    Ok(())
}

fn check_report(json: &str, junit: &str, verdict: Option<&str>) -> anyhow::Result<()> {
    let report: Value = serde_json::from_str(json).context("the report is not JSON")?;
    ensure!(
        junit.contains("</testsuites>"),
        "the JUnit report is not whole"
    );
    ensure!(
        report["simulated"]
            .as_str()
            .is_some_and(|it| it.starts_with("g6.xlarge"))
            // What ended before its GPUs were seen cannot know.
            || verdict.is_none(),
        "the report is not about the simulated GPUs: {}",
        report["simulated"]
    );
    let is_as_expected = match verdict {
        Some(verdict) => report["verdict"] == verdict && report["incomplete"].is_null(),
        None => report["verdict"] != "pass" && report["incomplete"].is_string(),
    };
    ensure!(
        is_as_expected,
        "the report's verdict is {} (incomplete: {}), expected {}",
        report["verdict"],
        report["incomplete"],
        verdict.unwrap_or("an incomplete one")
    );
    Ok(())
}
