//! The report in Common Test Report Format, for CI services and dashboards that read it.
//!
//! Source: <https://ctrf.io>, specification 1.0.0. `cargo xtask ci` validates the expected reports
//! against CTRF's schema (`tests/schemas`).

use std::collections::BTreeMap;

use serde::Serialize;

use super::text::{one_line, visible_json};
use super::time_span::TimeSpan;
use super::verdict;
use crate::diagnosis::{gpu_of, name_of};
use crate::findings::{ExitStatus, Finding, Run, Subject, Verdict};

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    report_format: &'static str,
    spec_version: &'static str,
    timestamp: String,
    generated_by: String,
    results: Results,
}

#[derive(Serialize)]
struct Results {
    tool: Tool,
    summary: Summary,
    tests: Vec<Test>,
    environment: Environment,
}

#[derive(Serialize)]
struct Tool {
    name: &'static str,
    version: String,
}

#[derive(Serialize)]
struct Summary {
    tests: usize,
    passed: usize,
    failed: usize,
    skipped: usize,
    pending: usize,
    other: usize,
    start: i64,
    stop: i64,
    extra: SummaryExtra,
}

#[derive(Serialize)]
struct SummaryExtra {
    verdict: &'static str,
    exit_code: u8,
    text: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    banners: Vec<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Test {
    name: String,
    status: &'static str,
    raw_status: String,
    duration: i64,
    suite: Vec<String>,
    message: String,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    labels: BTreeMap<&'static str, String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    extra: BTreeMap<&'static str, String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
#[expect(
    clippy::struct_field_names,
    reason = "the members' names are the specification's"
)]
struct Environment {
    #[serde(skip_serializing_if = "Option::is_none")]
    test_environment: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    os_version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    os_release: Option<String>,
    os_platform: &'static str,
    healthy: bool,
    extra: BTreeMap<&'static str, String>,
}

/// The CTRF report.
pub fn ctrf(run: &Run) -> String {
    let span = TimeSpan::of(&run.facts);
    let version = one_line(&run.facts.validator_version);
    let document = Document {
        report_format: "CTRF",
        spec_version: "1.0.0",
        timestamp: span.stop.to_string(),
        generated_by: format!("gpu-validator {version}"),
        results: Results {
            tool: Tool {
                name: "gpu-validator",
                version,
            },
            summary: summary(run, span),
            tests: run.findings.iter().map(|it| test(it, run)).collect(),
            environment: environment(run),
        },
    };
    let mut text = serde_json::to_string_pretty(&document).unwrap_or_default();
    text.push('\n');
    visible_json(&text)
}

fn summary(run: &Run, span: TimeSpan) -> Summary {
    let counts = run.counts();
    let status = run.exit_status();
    Summary {
        tests: counts.total(),
        passed: counts.pass + counts.warn,
        failed: counts.fail + counts.error,
        skipped: counts.skip,
        pending: 0,
        other: 0,
        start: span.start.as_millisecond(),
        stop: span.stop.as_millisecond(),
        extra: SummaryExtra {
            verdict: verdict::key(status),
            exit_code: status as u8,
            text: one_line(&super::answer_of(run)),
            banners: verdict::banners(run),
        },
    }
}

/// What could not be judged has no status of its own that readers take for a failure, and must not
/// be taken for a success: it is `failed`, and `rawStatus` has the verdict.
fn status(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass | Verdict::Warn => "passed",
        Verdict::Fail | Verdict::Error => "failed",
        Verdict::Skip => "skipped",
    }
}

fn test(finding: &Finding, run: &Run) -> Test {
    let named = |name, value: &Option<String>| Some((name, one_line(value.as_ref()?)));
    let action = finding.recommended_action.map(|it| it.to_string());
    let extra = [
        named("expected", &finding.expected),
        named("observed", &finding.observed),
        named("override", &finding.overridden),
        named("remedy", &finding.remedy),
        named("recommended_action", &action),
    ];
    let labels = match &finding.subject {
        Subject::Host | Subject::Environment(_) => BTreeMap::new(),
        Subject::Gpu(gpu) => {
            let gpu = gpu_of(gpu, &run.facts);
            let labels = [
                named("pci_address", &gpu.pci_address),
                named("serial", &gpu.serial),
                named("uuid", &gpu.uuid),
                named("model", &gpu.name),
            ];
            labels.into_iter().flatten().collect()
        }
    };
    Test {
        name: one_line(&finding.check),
        status: status(finding.verdict),
        raw_status: finding.verdict.to_string(),
        duration: milliseconds(finding.time_s),
        suite: vec![
            "gpu-validator".to_owned(),
            one_line(&name_of(&finding.subject, &run.facts)),
        ],
        message: one_line(&finding.summary),
        labels,
        extra: extra.into_iter().flatten().collect(),
    }
}

fn environment(run: &Run) -> Environment {
    let host = &run.facts.host;
    let read = |value: &crate::facts::Reading<String>| value.value().map(|it| one_line(it));
    let driver = read(&run.facts.nvml.driver_version).map(|it| ("driver", it));
    let known = [
        ("profile", one_line(&run.profile)),
        ("level", run.level.to_string()),
    ];
    Environment {
        test_environment: read(&host.hostname),
        os_version: read(&host.operating_system),
        os_release: read(&host.kernel_release),
        os_platform: "linux",
        healthy: run.exit_status() == ExitStatus::Passed,
        extra: known.into_iter().chain(driver).collect(),
    }
}

/// Whole milliseconds; what is not a duration counts as none.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a cast saturates, and NaN becomes 0"
)]
fn milliseconds(seconds: f64) -> i64 {
    const LONGEST_MS: f64 = 1e12;
    if !seconds.is_finite() {
        return 0;
    }
    (seconds * 1000.0).clamp(0.0, LONGEST_MS).round() as i64
}

#[cfg(test)]
mod tests {
    use super::ctrf;
    use crate::report::sample;

    #[test]
    fn counts_are_those_of_the_tests_and_only_a_pass_is_healthy() {
        for (name, run) in sample::all() {
            let report: serde_json::Value = serde_json::from_str(&ctrf(&run)).expect("JSON");
            let results = &report["results"];
            let tests = results["tests"].as_array().expect("tests");
            for status in ["passed", "failed", "skipped"] {
                let count = tests.iter().filter(|it| it["status"] == status).count();
                assert_eq!(results["summary"][status], count, "{name}: {status}");
            }
            assert_eq!(results["summary"]["tests"], tests.len(), "{name}");
            let healthy = run.exit_status() == crate::findings::ExitStatus::Passed;
            assert_eq!(results["environment"]["healthy"], healthy, "{name}");
            assert!(
                !tests
                    .iter()
                    .any(|it| it["rawStatus"] == "error" && it["status"] == "passed")
            );
        }
    }
}
