//! The JUnit report: one suite for the host, one for each GPU and one for each Python
//! environment.
//!
//! A warning is a test case that passes with the warning in its `system-out`.

use std::collections::HashMap;
use std::path::{Component, Path};

use junit_report::{Duration, OffsetDateTime, TestCase, TestResult, TestSuite};

use super::burn_rows::burn_rows_of;
use super::coverage::Coverage;
use super::faults::documentation_url;
use super::junit_xml::{Properties, document};
use super::node_summary::Machine;
use super::text::{cause_in_words, one_line, xml};
use super::verdict;
use crate::diagnosis::{diagnose, gpu_of, name_of, recommended_action_of};
use crate::findings::{Finding, GpuSubject, Run, Subject, Verdict};

/// The JUnit report, UTF-8.
pub fn junit(run: &Run) -> anyhow::Result<String> {
    let suites = suites(run);
    let suites = suites
        .iter()
        .map(|it| (it.written(run), properties_of(it, run)));
    document(suites.collect())
}

/// The findings about one subject.
struct Suite<'a> {
    subject: &'a Subject,
    findings: Vec<&'a Finding>,
}

/// The host's suite is always there, also without findings: it holds the machine's facts.
fn suites(run: &Run) -> Vec<Suite<'_>> {
    let mut suites = vec![Suite {
        subject: &Subject::Host,
        findings: Vec::new(),
    }];
    let mut positions = HashMap::from([(&Subject::Host, 0)]);
    for finding in &run.findings {
        let position = *positions.entry(&finding.subject).or_insert(suites.len());
        if position == suites.len() {
            suites.push(Suite {
                subject: &finding.subject,
                findings: Vec::new(),
            });
        }
        suites[position].findings.push(finding);
    }
    suites
}

impl Suite<'_> {
    fn written(&self, run: &Run) -> TestSuite {
        let hostname = run.facts.host.hostname.value().map(String::as_str);
        let mut suite = TestSuite::new(&attribute(&suite_name(self.subject, run)));
        "gpu-validator".clone_into(&mut suite.package);
        suite.hostname = attribute(hostname.unwrap_or("unknown"));
        suite.timestamp = timestamp(&run.facts.collected_at);
        let class_name = attribute(&class_name(self.subject, run));
        let mut names: Vec<&str> = Vec::new();
        for finding in &self.findings {
            // GPUs that report neither UUID nor PCI address share a suite; readers want distinct
            // names.
            let before = names.iter().filter(|it| **it == finding.check).count();
            names.push(&finding.check);
            let name = match before {
                0 => finding.check.clone(),
                before => format!("{} #{}", finding.check, before + 1),
            };
            suite.add_testcase(test_case(finding, &name, &class_name, run));
        }
        if *self.subject == Subject::Host {
            suite.set_system_out(&xml(&machine_text(run)));
        }
        suite
    }
}

/// `host`, or `GPU 3 (0000:3b:00.0)`, after what the run is not.
fn suite_name(subject: &Subject, run: &Run) -> String {
    let simulated = run.facts.simulated.as_ref().map(|_| "SIMULATED".to_owned());
    let incomplete = run.incomplete.as_ref().map(|_| "INCOMPLETE".to_owned());
    let subject = name_of(subject, &run.facts);
    let parts = [simulated, incomplete, Some(subject)];
    parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

/// `NVIDIA H200 GPU-… 0000:3b:00.0`.
fn described(gpu: &GpuSubject) -> String {
    let parts = [&gpu.name, &gpu.uuid, &gpu.pci_address];
    let known: Vec<&str> = parts.into_iter().flatten().map(String::as_str).collect();
    if known.is_empty() {
        return "GPU without a name".to_owned();
    }
    known.join(" ")
}

fn test_case(finding: &Finding, name: &str, class_name: &str, run: &Run) -> TestCase {
    let text = xml(&details(finding, run));
    let message = attribute(&message(finding, run));
    let type_ = if finding.busy {
        "busy".to_owned()
    } else {
        finding.verdict.to_string()
    };
    let mut case = TestCase::success(&attribute(name), seconds(finding.time_s));
    let body = Some(text.clone());
    case.result = match finding.verdict {
        Verdict::Pass | Verdict::Warn => TestResult::Success,
        Verdict::Fail => TestResult::Failure {
            type_,
            message,
            cause: body,
        },
        Verdict::Error => TestResult::Error {
            type_,
            message,
            cause: body,
        },
        Verdict::Skip => TestResult::SkippedWithCause {
            type_,
            message,
            cause: body,
        },
    };
    if case.is_success() {
        let warning = finding.verdict == Verdict::Warn;
        let prefix = if warning { "warning: " } else { "" };
        case.set_system_out(&format!("{prefix}{text}"));
    }
    case.set_classname(class_name);
    if let Some(file) = file(run) {
        case.set_filepath(&attribute(file));
    }
    case
}

/// Readers print attributes as they are: a line break in one could begin a command to the service
/// that shows the log.
fn attribute(text: &str) -> String {
    xml(&one_line(text))
}

/// What is wrong, and on which GPU or in which environment: readers that annotate show no more than
/// this.
fn message(finding: &Finding, run: &Run) -> String {
    match &finding.subject {
        Subject::Gpu(_) | Subject::Environment(_)
            if matches!(finding.verdict, Verdict::Fail | Verdict::Error) =>
        {
            let subject = name_of(&finding.subject, &run.facts);
            format!("{subject}: {}", finding.summary)
        }
        _ => finding.summary.clone(),
    }
}

/// Readers that compare runs take class and name for the test's identity. The PCI address is the
/// same for a lost GPU, for the board that replaces it, and on all nodes of one type. Instances of
/// one GPU share its address, which their UUIDs then follow. A Python environment is its folder.
fn class_name(subject: &Subject, run: &Run) -> String {
    let gpu = match subject {
        Subject::Host => return "gpu-validator.host".to_owned(),
        Subject::Environment(it) => return format!("gpu-validator.environment.{}", it.path),
        Subject::Gpu(gpu) => gpu,
    };
    let at_address = |address: &String| {
        let gpus = run.facts.gpus.iter();
        gpus.filter(|it| it.pci_address.value() == Some(address))
            .count()
    };
    match (&gpu.pci_address, &gpu.uuid) {
        (Some(address), Some(uuid)) if at_address(address) > 1 => {
            format!("gpu-validator.gpu.{address}.{uuid}")
        }
        (Some(name), _) | (None, Some(name)) => format!("gpu-validator.gpu.{name}"),
        (None, None) => "gpu-validator.gpu.unnamed".to_owned(),
    }
}

/// The profile, which holds what is expected, where it may be a file of the reader's repository:
/// readers annotate the file that a test case names, and warn of one that is not there.
fn file(run: &Run) -> Option<&str> {
    let path = Path::new(&run.profile);
    let within = |it: Component<'_>| matches!(it, Component::Normal(_) | Component::CurDir);
    let is_named = run.profile != Run::BUILT_IN_PROFILE;
    (is_named && path.components().all(within)).then_some(&run.profile)
}

/// The contents of the finding, one fact a line.
fn details(finding: &Finding, run: &Run) -> String {
    let subject = match &finding.subject {
        Subject::Gpu(_) | Subject::Environment(_) if finding.verdict != Verdict::Pass => {
            Some(name_of(&finding.subject, &run.facts))
        }
        _ => None,
    };
    let parts = [
        ("", Some(finding.summary.as_str())),
        ("on: ", subject.as_deref()),
        ("expected: ", finding.expected.as_deref()),
        ("observed: ", finding.observed.as_deref()),
        ("override: ", finding.overridden.as_deref()),
        ("remedy: ", finding.remedy.as_deref()),
        (
            "documentation: ",
            documentation_url(&finding.check)
                .filter(|_| !matches!(finding.verdict, Verdict::Pass | Verdict::Skip)),
        ),
    ];
    let lines: Vec<String> = parts
        .iter()
        .filter_map(|(what, value)| value.map(|value| format!("{what}{}", one_line(value))))
        .collect();
    lines.join("\n")
}

/// What the machine is, the coverage and the verdict.
fn machine_text(run: &Run) -> String {
    let mut lines = verdict::banners(run);
    for (what, value) in Machine::of(&run.facts).lines() {
        lines.push(format!("{what}: {value}"));
    }
    let profile = one_line(&run.profile);
    lines.push(format!("profile: {profile}, level {}", run.level));
    for gpu in &run.facts.gpus {
        let name = described(&GpuSubject::of(gpu));
        lines.push(format!("GPU: {}", one_line(&name)));
    }
    let coverage = Coverage::of(run);
    lines.push(format!("coverage: {}", coverage.sentence()));
    for group in &coverage.not_judged {
        lines.push(format!(
            "{}: {}: {}",
            group.verdict,
            one_line(&group.reason),
            group.names(run)
        ));
    }
    lines.push(format!(
        "verdict: {}: {}",
        verdict::word(run.exit_status()),
        verdict::sentence(run)
    ));
    lines.join("\n")
}

/// Whole microseconds; what is not a duration counts as none.
fn seconds(seconds: f64) -> Duration {
    const LONGEST_S: f64 = 1e9;
    if !seconds.is_finite() {
        return Duration::ZERO;
    }
    #[expect(clippy::cast_possible_truncation, reason = "clamped just before")]
    let microseconds = (seconds.clamp(0.0, LONGEST_S) * 1e6).round() as i64;
    Duration::microseconds(microseconds)
}

fn timestamp(rfc3339: &str) -> OffsetDateTime {
    let seconds = rfc3339
        .parse::<jiff::Timestamp>()
        .map_or(0, jiff::Timestamp::as_second);
    OffsetDateTime::from_unix_timestamp(seconds).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

/// The actions that the diagnosis recommends, then what the burn showed.
fn properties_of(suite: &Suite<'_>, run: &Run) -> Properties {
    let mut properties = identity_properties(suite.subject, run);
    properties.extend(action_properties(suite.subject, run));
    properties.extend(burn_properties(suite, run));
    properties
}

/// Which board stood at the address of a GPU's suite.
fn identity_properties(subject: &Subject, run: &Run) -> Properties {
    let Subject::Gpu(subject) = subject else {
        return Vec::new();
    };
    let gpu = gpu_of(subject, &run.facts);
    let values = [
        ("gpu.index", gpu.index.map(|it| it.to_string())),
        ("gpu.pci_address", gpu.pci_address),
        ("gpu.uuid", gpu.uuid),
        ("gpu.serial", gpu.serial),
        ("gpu.name", gpu.name),
    ];
    let known = values
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_owned(), attribute(&value?))));
    known.collect()
}

/// On the host's suite the action of the run and the root causes; on a GPU's suite the action of
/// its first root cause.
fn action_properties(subject: &Subject, run: &Run) -> Properties {
    let name = "recommended_action".to_owned();
    let causes = diagnose(run);
    match subject {
        Subject::Host => {
            let action = recommended_action_of(run).map(|it| (name, it.name().to_owned()));
            let causes = causes.iter().enumerate().map(|(index, cause)| {
                let text = format!("{}: {}", cause.recommended_action, cause_in_words(cause));
                (format!("diagnosis.{}", index + 1), attribute(&text))
            });
            action.into_iter().chain(causes).collect()
        }
        Subject::Gpu(gpu) => causes
            .iter()
            .find(|it| {
                it.gpus
                    .iter()
                    .any(|of| of.uuid == gpu.uuid && of.pci_address == gpu.pci_address)
            })
            .map(|it| (name, it.recommended_action.name().to_owned()))
            .into_iter()
            .collect(),
        Subject::Environment(_) => causes
            .iter()
            .find(|it| it.evidence.iter().any(|of| of.subject == *subject))
            .map(|it| (name, it.recommended_action.name().to_owned()))
            .into_iter()
            .collect(),
    }
}

/// What the burn showed of the suite's GPU: `burn.bf16.tflops`.
fn burn_properties(suite: &Suite<'_>, run: &Run) -> Properties {
    let Subject::Gpu(subject) = suite.subject else {
        return Vec::new();
    };
    let uuid = subject.uuid.as_deref();
    let rows = uuid.map(|it| burn_rows_of(it, &run.facts));
    rows.into_iter()
        .flatten()
        .flat_map(|row| {
            let name = |what: &str| format!("burn.{}.{what}", row.precision);
            let number = |value: f64| format!("{value:.1}");
            let values = [
                ("tflops", row.tflops.map(number)),
                ("reference_percent", row.reference_percent.map(number)),
                ("products_verified", Some(row.products_verified.to_string())),
                ("mismatches", Some(row.mismatches.to_string())),
                ("power_w", row.power_w.map(number)),
                ("temperature_c", row.temperature_c.map(|it| it.to_string())),
            ];
            values.map(|(what, value)| Some((name(what), attribute(&value?))))
        })
        .flatten()
        .collect()
}
