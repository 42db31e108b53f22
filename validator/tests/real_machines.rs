//! Facts of real machines, and their expected verdicts.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;
use validator_core::facts::{Facts, Reading};
use validator_core::findings::{ExitStatus, Finding, Run, Subject, Verdict};
use validator_core::level::Level;
use validator_core::profile::Profile;

/// `tests/facts/<machine>.verdicts.yaml`: every check that does not pass. Written by hand.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Expected {
    host: BTreeMap<String, Verdict>,
    /// On every GPU.
    gpu: BTreeMap<String, Verdict>,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/facts")
}

fn read(file: &str) -> String {
    let path = folder().join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn judge(machine: &str) -> Run {
    let facts = Facts::from_json(read(&format!("{machine}.facts.json")).as_bytes()).expect("facts");
    Run::judged(facts, &Profile::default(), "built-in", Level::Standard)
}

fn expected_verdict(expected: &Expected, finding: &Finding) -> Verdict {
    let of_subject = match finding.subject {
        Subject::Host | Subject::Environment(_) => &expected.host,
        Subject::Gpu(_) => &expected.gpu,
    };
    of_subject
        .get(&finding.check)
        .copied()
        .unwrap_or(Verdict::Pass)
}

fn holds_to_the_verdicts(machine: &str, gpus: usize) {
    let expected: Expected =
        serde_yaml::from_str(&read(&format!("{machine}.verdicts.yaml"))).expect("verdicts");
    let run = judge(machine);
    assert_eq!(run.facts.gpus.len(), gpus);
    assert!(
        run.facts.anonymized,
        "{machine}: identifiers must be replaced"
    );
    assert_eq!(run.facts.simulated, None, "{machine} is a real machine");
    let wrong: Vec<String> = run
        .findings
        .iter()
        .filter(|it| it.verdict != expected_verdict(&expected, it))
        .map(|it| {
            format!(
                "{} on {}: {} ({})",
                it.check, it.subject, it.verdict, it.summary
            )
        })
        .collect();
    assert!(wrong.is_empty(), "{machine}: {wrong:#?}");
    let named = expected.host.keys().chain(expected.gpu.keys());
    for check in named {
        assert!(
            run.findings.iter().any(|it| it.check == *check),
            "{machine}: no check {check}"
        );
    }
    assert_eq!(run.exit_status(), ExitStatus::Passed);
}

#[test]
fn one_h200() {
    holds_to_the_verdicts("h200x1", 1);
}

#[test]
fn four_burned_h200s() {
    holds_to_the_verdicts("h200x4", 4);
}

#[test]
fn one_burned_h100() {
    holds_to_the_verdicts("h100x1", 1);
}

/// It has no neighbours that are faster.
#[test]
fn a_lone_gpu_is_held_against_what_its_model_reaches() {
    let healthy = judge("h100x1").facts;
    for (share, expected) in [
        (0.95, Verdict::Pass),
        (0.8, Verdict::Warn),
        (0.6, Verdict::Fail),
    ] {
        let mut facts = healthy.clone();
        let runs = facts.load.burn.values_mut();
        for reading in runs {
            let Reading::Value(run) = reading else {
                panic!("the GPU was not burned: {reading:?}")
            };
            for products in &mut run.precisions {
                products.tflops *= share;
                let intervals = products.tflops_intervals.iter_mut();
                #[expect(clippy::cast_possible_truncation, reason = "a few digits count")]
                intervals.for_each(|it| *it *= share as f32);
            }
        }
        let run = Run::judged(facts, &Profile::default(), "built-in", Level::Standard);
        let mut findings = run.findings.iter();
        let finding = findings.find(|it| it.check == "gemm_throughput");
        let finding = finding.expect("it is judged");
        assert_eq!(finding.verdict, expected, "{share}: {}", finding.summary);
    }
}

#[test]
fn four_burned_h100s() {
    holds_to_the_verdicts("h100x4", 4);
}

#[test]
fn eight_h200s() {
    holds_to_the_verdicts("h200x8", 8);
}

#[test]
fn every_file_of_facts_has_its_verdicts() {
    let mut machines = 0;
    for entry in folder().read_dir().expect("tests/facts").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if let Some(machine) = name.strip_suffix(".facts.json") {
            machines += 1;
            assert!(
                folder().join(format!("{machine}.verdicts.yaml")).is_file(),
                "{machine} has no verdicts"
            );
        }
    }
    assert_eq!(machines, 5);
}

/// Samples of format 1 are written as plain columns, which the command of docs/facts.md prints.
#[test]
fn the_documented_jq_command_prints_every_sample() {
    let text = read("h100x4.facts.json");
    assert!(text.contains("\"format\": 1"), "facts of the first format");
    let facts = Facts::from_json(text.as_bytes()).expect("facts");
    let mut expected = Vec::new();
    for (uuid, log) in &facts.load.sensors {
        for it in &log.samples {
            let cell = |value: Option<i64>| value.map_or(String::new(), |it| it.to_string());
            let cells = [
                cell(it.power_mw.map(i64::from)),
                cell(it.sm_mhz.map(i64::from)),
                cell(it.gpu_c.map(i64::from)),
            ];
            expected.push(format!(
                "\"{uuid}\",{:.0},{}",
                it.t * 1000.0,
                cells.join(",")
            ));
        }
    }
    assert!(expected.len() > 100, "{}", expected.len());
    let guide = read("../../docs/facts.md");
    let command = guide.lines().find(|it| it.starts_with("jq -r '"));
    let filter = command
        .and_then(|it| it.split('\'').nth(1))
        .expect("a command");
    let jq = Command::new("jq")
        .args(["-r", filter])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let mut jq = match jq {
        Ok(jq) => jq,
        Err(error) => {
            eprintln!("not tried without jq: {error}");
            return;
        }
    };
    let mut input = jq.stdin.take().expect("its input");
    let facts = serde_json::to_vec(&facts).expect("JSON");
    let writer = std::thread::spawn(move || input.write_all(&facts));
    let output = jq.wait_with_output().expect("jq ends");
    writer.join().expect("no panic").expect("jq reads all");
    assert!(output.status.success());
    let printed = String::from_utf8(output.stdout).expect("text");
    assert_eq!(printed.lines().collect::<Vec<_>>(), expected);
}
