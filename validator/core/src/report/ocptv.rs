//! The report as OCP Test & Validation output 2.0: one JSON artifact a line.
//!
//! A check is a test step, a finding a diagnosis of the GPU's hardware or the host's software.
//! Source: <https://github.com/opencomputeproject/ocp-diag-core/tree/main/json_spec>.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Serialize;

use super::measurements_of;
use super::text::{one_line, visible_json};
use super::time_span::TimeSpan;
use super::verdict;
use crate::diagnosis::{CauseGpu, gpu_of};
use crate::facts::Reading;
use crate::findings::{ExitStatus, Finding, Run, Subject, Verdict};

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    #[serde(flatten)]
    artifact: Artifact,
    sequence_number: usize,
    timestamp: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
#[expect(
    clippy::enum_variant_names,
    reason = "the members' names are the specification's"
)]
enum Artifact {
    SchemaVersion { major: u8, minor: u8 },
    TestRunArtifact(RunArtifact),
    TestStepArtifact(StepArtifact),
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
enum RunArtifact {
    TestRunStart(RunStart),
    TestRunEnd { status: Status, result: TestResult },
    Log(Log),
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RunStart {
    name: &'static str,
    version: String,
    command_line: &'static str,
    parameters: BTreeMap<&'static str, String>,
    dut_info: DutInfo,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
#[expect(
    clippy::struct_field_names,
    reason = "the members' names are the specification's"
)]
struct DutInfo {
    dut_info_id: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    software_infos: Vec<SoftwareInfo>,
    hardware_infos: Vec<HardwareInfo>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
#[expect(
    clippy::struct_field_names,
    reason = "the members' names are the specification's"
)]
struct SoftwareInfo {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    software_type: &'static str,
    software_info_id: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
#[expect(
    clippy::struct_field_names,
    reason = "the members' names are the specification's"
)]
struct HardwareInfo {
    name: String,
    hardware_info_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    location: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    serial_number: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    part_number: Option<String>,
    part_type: &'static str,
    manufacturer: &'static str,
}

#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
enum Status {
    Complete,
    Error,
    Skip,
}

#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
enum TestResult {
    NotApplicable,
    Pass,
    Fail,
}

#[derive(Serialize)]
struct Log {
    severity: &'static str,
    message: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct StepArtifact {
    test_step_id: String,
    #[serde(flatten)]
    event: StepEvent,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
enum StepEvent {
    TestStepStart { name: String },
    TestStepEnd { status: Status },
    Diagnosis(Diagnosis),
    Error { symptom: String, message: String },
    Log(Log),
    Measurement(Measurement),
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Diagnosis {
    verdict: String,
    r#type: &'static str,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    hardware_info_id: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Measurement {
    name: String,
    value: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    unit: Option<&'static str>,
    hardware_info_id: String,
}

/// The OCP Test & Validation report.
pub fn ocptv(run: &Run) -> String {
    let span = TimeSpan::of(&run.facts);
    let mut lines = Lines {
        text: String::new(),
        count: 0,
    };
    lines.add(span.start, Artifact::SchemaVersion { major: 2, minor: 0 });
    let start = RunArtifact::TestRunStart(run_start(run));
    lines.add(span.start, Artifact::TestRunArtifact(start));
    for banner in verdict::banners(run) {
        let log = Log {
            severity: "WARNING",
            message: banner,
        };
        let log = Artifact::TestRunArtifact(RunArtifact::Log(log));
        lines.add(span.start, log);
    }
    for (index, (check, findings)) in by_check(run).into_iter().enumerate() {
        for event in step(check, &findings, run) {
            lines.step(span.stop, index, event);
        }
    }
    for event in measurements(run) {
        lines.step(span.stop, by_check(run).len(), event);
    }
    let (status, result) = conclusion(run.exit_status());
    let end = RunArtifact::TestRunEnd { status, result };
    lines.add(span.stop, Artifact::TestRunArtifact(end));
    lines.text
}

struct Lines {
    text: String,
    count: usize,
}

impl Lines {
    fn add(&mut self, time: Timestamp, artifact: Artifact) {
        let line = Line {
            artifact,
            sequence_number: self.count,
            timestamp: time.to_string(),
        };
        self.count += 1;
        let text = serde_json::to_string(&line).unwrap_or_default();
        self.text.push_str(&visible_json(&text));
        self.text.push('\n');
    }

    fn step(&mut self, time: Timestamp, step: usize, event: StepEvent) {
        let test_step_id = step.to_string();
        let artifact = StepArtifact {
            test_step_id,
            event,
        };
        self.add(time, Artifact::TestStepArtifact(artifact));
    }
}

fn run_start(run: &Run) -> RunStart {
    let mut parameters = BTreeMap::from([
        ("profile", one_line(&run.profile)),
        ("level", run.level.to_string()),
    ]);
    if let Some(scenario) = &run.facts.simulated {
        parameters.insert("simulated", one_line(scenario));
    }
    RunStart {
        name: "gpu-validator",
        version: one_line(&run.facts.validator_version),
        // Facts hold no arguments; what they set is in the parameters.
        command_line: "gpu-validator",
        parameters,
        dut_info: DutInfo {
            dut_info_id: "node",
            name: read(&run.facts.host.hostname),
            software_infos: software(run),
            hardware_infos: run
                .facts
                .gpus
                .iter()
                .enumerate()
                .map(|(index, gpu)| HardwareInfo {
                    name: read(&gpu.name).unwrap_or_else(|| "GPU".to_owned()),
                    hardware_info_id: hardware_id(index),
                    location: read(&gpu.pci_address),
                    serial_number: read(&gpu.serial),
                    part_number: read(&gpu.board_part_number),
                    part_type: "GPU",
                    manufacturer: "NVIDIA",
                })
                .collect(),
        },
    }
}

fn software(run: &Run) -> Vec<SoftwareInfo> {
    let facts = &run.facts;
    let known = [
        (
            "operating system",
            "SYSTEM",
            read(&facts.host.operating_system),
        ),
        ("kernel", "SYSTEM", read(&facts.host.kernel_release)),
        ("NVIDIA driver", "SYSTEM", read(&facts.nvml.driver_version)),
    ];
    let known = known
        .into_iter()
        .filter(|(_, _, version)| version.is_some());
    let software = known.enumerate().map(|(index, it)| SoftwareInfo {
        name: it.0.to_owned(),
        version: it.2,
        software_type: it.1,
        software_info_id: format!("software-{index}"),
    });
    let firmware = facts.gpus.iter().enumerate().filter_map(|(index, gpu)| {
        Some(SoftwareInfo {
            name: format!(
                "VBIOS of {}",
                one_line(&CauseGpu::of(gpu, index).to_string())
            ),
            version: Some(read(&gpu.vbios_version)?),
            software_type: "FIRMWARE",
            software_info_id: format!("vbios-{index}"),
        })
    });
    software.chain(firmware).collect()
}

fn read(reading: &Reading<String>) -> Option<String> {
    reading.value().map(|it| one_line(it))
}

fn hardware_id(index: usize) -> String {
    format!("gpu-{index}")
}

/// Findings by check, in the order in which the checks come first.
fn by_check(run: &Run) -> Vec<(&str, Vec<&Finding>)> {
    let mut checks: Vec<(&str, Vec<&Finding>)> = Vec::new();
    for finding in &run.findings {
        match checks.iter_mut().find(|(check, _)| *check == finding.check) {
            Some((_, findings)) => findings.push(finding),
            None => checks.push((&finding.check, vec![finding])),
        }
    }
    checks
}

fn step(check: &str, findings: &[&Finding], run: &Run) -> Vec<StepEvent> {
    let name = one_line(check);
    let mut events = vec![StepEvent::TestStepStart { name }];
    events.extend(findings.iter().map(|it| event(it, run)));
    let has = |verdict| findings.iter().any(|it| it.verdict == verdict);
    let status = if has(Verdict::Error) {
        Status::Error
    } else if findings.iter().all(|it| it.verdict == Verdict::Skip) {
        Status::Skip
    } else {
        Status::Complete
    };
    events.push(StepEvent::TestStepEnd { status });
    events
}

/// A judged finding is a diagnosis, one that could not be judged an error, a skip a log line.
fn event(finding: &Finding, run: &Run) -> StepEvent {
    let index = match &finding.subject {
        Subject::Host | Subject::Environment(_) => None,
        Subject::Gpu(gpu) => gpu_of(gpu, &run.facts).index,
    };
    let message = message(finding, run);
    let check = one_line(&finding.check);
    match finding.verdict {
        Verdict::Error => StepEvent::Error {
            symptom: format!("{check}-not-judged"),
            message,
        },
        Verdict::Skip => StepEvent::Log(Log {
            severity: "INFO",
            message: format!("skipped: {message}"),
        }),
        verdict => StepEvent::Diagnosis(Diagnosis {
            verdict: format!("{check}-{verdict}"),
            r#type: if verdict == Verdict::Fail {
                "FAIL"
            } else {
                "PASS"
            },
            message,
            hardware_info_id: index.map(hardware_id),
        }),
    }
}

fn message(finding: &Finding, run: &Run) -> String {
    let subject = crate::diagnosis::name_of(&finding.subject, &run.facts);
    let remedy = finding.remedy.as_ref();
    let remedy = remedy.map_or_else(String::new, |it| format!("; remedy: {it}"));
    one_line(&format!("{subject}: {}{remedy}", finding.summary))
}

/// Everything that was measured of the GPUs, as one step; nothing where nothing was.
fn measurements(run: &Run) -> Vec<StepEvent> {
    let gpus = run.facts.gpus.iter().enumerate();
    let measured = gpus.flat_map(|(index, gpu)| {
        let measured = measurements_of(gpu, &run.facts).into_iter();
        measured.map(move |(name, value)| {
            StepEvent::Measurement(Measurement {
                unit: unit(&name),
                name,
                value,
                hardware_info_id: hardware_id(index),
            })
        })
    });
    let mut events: Vec<StepEvent> = measured.collect();
    if events.is_empty() {
        return events;
    }
    let name = "measurements".to_owned();
    events.insert(0, StepEvent::TestStepStart { name });
    events.push(StepEvent::TestStepEnd {
        status: Status::Complete,
    });
    events
}

/// By the end of the measurement's name.
fn unit(name: &str) -> Option<&'static str> {
    let units = [
        ("_w", "W"),
        ("_c", "Celsius"),
        ("_mhz", "MHz"),
        ("_mib", "MiB"),
        ("_ms", "ms"),
        ("_tflops", "TFLOP/s"),
    ];
    let unit = units.into_iter().find(|(end, _)| name.ends_with(end));
    unit.map(|(_, unit)| unit)
}

/// Only these combinations are valid: a test that is not complete has no result.
fn conclusion(status: ExitStatus) -> (Status, TestResult) {
    match status {
        ExitStatus::Passed => (Status::Complete, TestResult::Pass),
        ExitStatus::Failed => (Status::Complete, TestResult::Fail),
        ExitStatus::Busy => (Status::Skip, TestResult::NotApplicable),
        ExitStatus::NotJudged | ExitStatus::BadInput => (Status::Error, TestResult::NotApplicable),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::ocptv;
    use crate::findings::{ExitStatus, Run};
    use crate::report::sample;

    /// The members of an object: required ones by name, optional ones with `?`.
    fn members(value: &Value, allowed: &[&str]) {
        let object = value.as_object().expect("an object");
        for name in allowed.iter().filter(|it| !it.ends_with('?')) {
            assert!(object.contains_key(*name), "{name} is missing in {value}");
        }
        for name in object.keys() {
            let known = allowed.iter().any(|it| it.trim_end_matches('?') == name);
            assert!(known, "{name} is unknown in {value}");
        }
    }

    fn one_of(value: &Value, words: &[&str]) {
        assert!(
            words.iter().any(|it| value == it),
            "{value} is none of {words:?}"
        );
    }

    fn only_member(value: &Value) -> (&str, &Value) {
        let object = value.as_object().expect("an object");
        let mut members = object.iter().filter(|(name, _)| *name != "testStepId");
        let (name, value) = members.next().expect("a member");
        assert!(members.next().is_none(), "{object:?}");
        (name, value)
    }

    const STATUS: [&str; 3] = ["COMPLETE", "ERROR", "SKIP"];

    // Members and words of the specification's schemas (json_spec/output), version 2.0.
    fn judge_line(line: &Value, sequence: usize) {
        assert_eq!(line["sequenceNumber"], sequence);
        let time = line["timestamp"].as_str().expect("a time");
        time.parse::<jiff::Timestamp>().expect("RFC 3339");
        let names: Vec<&String> = line.as_object().expect("an object").keys().collect();
        assert_eq!(names.len(), 3, "{line}");
        if let Some(version) = line.get("schemaVersion") {
            assert_eq!(version, &serde_json::json!({"major": 2, "minor": 0}));
        } else if let Some(artifact) = line.get("testRunArtifact") {
            judge_run_artifact(artifact);
        } else {
            judge_step_artifact(&line["testStepArtifact"]);
        }
    }

    fn judge_run_artifact(artifact: &Value) {
        match only_member(artifact) {
            ("testRunStart", it) => {
                members(
                    it,
                    &["name", "version", "commandLine", "parameters", "dutInfo"],
                );
                let dut = &it["dutInfo"];
                members(
                    dut,
                    &["dutInfoId", "name?", "softwareInfos?", "hardwareInfos?"],
                );
                for software in dut["softwareInfos"].as_array().expect("a list") {
                    members(
                        software,
                        &["name", "softwareInfoId", "version?", "softwareType?"],
                    );
                    one_of(
                        &software["softwareType"],
                        &["FIRMWARE", "SYSTEM", "APPLICATION"],
                    );
                }
                for hardware in dut["hardwareInfos"].as_array().expect("a list") {
                    let optional = [
                        "location?",
                        "serialNumber?",
                        "partNumber?",
                        "partType?",
                        "manufacturer?",
                    ];
                    members(
                        hardware,
                        &[&["name", "hardwareInfoId"][..], &optional].concat(),
                    );
                }
            }
            ("testRunEnd", it) => {
                members(it, &["status", "result"]);
                one_of(&it["status"], &STATUS);
                let complete = it["status"] == "COMPLETE";
                assert_eq!(complete, it["result"] != "NOT_APPLICABLE", "{it}");
            }
            ("log", it) => judge_log(it),
            (other, _) => panic!("{other}"),
        }
    }

    fn judge_log(log: &Value) {
        members(log, &["severity", "message"]);
        one_of(
            &log["severity"],
            &["INFO", "DEBUG", "WARNING", "ERROR", "FATAL"],
        );
    }

    fn judge_step_artifact(artifact: &Value) {
        assert!(artifact["testStepId"].is_string(), "{artifact}");
        match only_member(artifact) {
            ("testStepStart", it) => members(it, &["name"]),
            ("testStepEnd", it) => {
                members(it, &["status"]);
                one_of(&it["status"], &STATUS);
            }
            ("diagnosis", it) => {
                members(it, &["verdict", "type", "message?", "hardwareInfoId?"]);
                one_of(&it["type"], &["PASS", "FAIL", "UNKNOWN"]);
            }
            ("error", it) => members(it, &["symptom", "message?"]),
            ("log", it) => judge_log(it),
            ("measurement", it) => {
                members(it, &["name", "value", "unit?", "hardwareInfoId?"]);
                assert!(it["value"].is_number(), "{it}");
            }
            (other, _) => panic!("{other}"),
        }
    }

    fn lines(run: &Run) -> Vec<Value> {
        let text = ocptv(run);
        let lines = text
            .lines()
            .map(|it| serde_json::from_str(it).expect("JSON"));
        lines.collect()
    }

    #[test]
    fn every_line_is_an_artifact_of_the_specification() {
        for (_, run) in sample::all() {
            for (sequence, line) in lines(&run).iter().enumerate() {
                judge_line(line, sequence);
            }
        }
    }

    #[test]
    fn every_step_ends_and_every_diagnosis_names_declared_hardware() {
        for (name, run) in sample::all() {
            let lines = lines(&run);
            let hardware = &lines[1]["testRunArtifact"]["testRunStart"]["dutInfo"]["hardwareInfos"];
            let ids: Vec<&Value> = hardware
                .as_array()
                .expect("a list")
                .iter()
                .map(|it| &it["hardwareInfoId"])
                .collect();
            let steps = || lines.iter().filter_map(|it| it.get("testStepArtifact"));
            let count = |member: &str| steps().filter(|it| it.get(member).is_some()).count();
            assert_eq!(count("testStepStart"), count("testStepEnd"), "{name}");
            for step in steps() {
                for event in ["diagnosis", "measurement"] {
                    let id = step.get(event).and_then(|it| it.get("hardwareInfoId"));
                    assert!(id.is_none_or(|id| ids.contains(&id)), "{name}: {step}");
                }
            }
            let counts = run.counts();
            assert_eq!(count("diagnosis"), counts.judged(), "{name}");
            assert_eq!(count("error"), counts.error, "{name}");
        }
    }

    #[test]
    fn only_a_run_that_passes_has_the_result_pass() {
        for (name, run) in sample::all() {
            let lines = lines(&run);
            let end = &lines[lines.len() - 1]["testRunArtifact"]["testRunEnd"];
            let passed = run.exit_status() == ExitStatus::Passed;
            assert_eq!(end["result"] == "PASS", passed, "{name}");
            let failed = run.exit_status() == ExitStatus::Failed;
            assert_eq!(end["result"] == "FAIL", failed, "{name}");
        }
    }
}
