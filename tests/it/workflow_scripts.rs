//! The scripts of the workflows, with what GitHub gives them, on simulated nodes.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::node::{Node, Said, Scratch, executable, in_place_of, said};

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../workflows")
        .join(name)
}

/// One step that uses the action, with the defaults of its inputs.
struct Step {
    out: Scratch,
    inputs: Vec<(&'static str, String)>,
}

impl Step {
    fn new() -> Self {
        let out = Scratch::new();
        std::fs::create_dir(out.path("temp")).expect("a folder");
        let binary = executable().display().to_string();
        let defaults = [
            ("INPUT_PROFILE", ""),
            ("INPUT_LEVEL", "quick"),
            ("INPUT_BINARY", binary.as_str()),
            ("INPUT_VERSION", ""),
            ("INPUT_SHA256", ""),
            ("INPUT_RELEASES_URL", "http://127.0.0.1:1"),
            ("INPUT_FAIL_ON", "not-pass"),
            ("INPUT_ALLOW_SIMULATED", "true"),
        ];
        Self {
            out,
            inputs: defaults
                .map(|(name, value)| (name, value.to_owned()))
                .to_vec(),
        }
    }

    fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.inputs.push((name, value.into()));
        self
    }

    fn run(&self, node: &Node) -> Said {
        let mut command = in_place_of(&node.validator(), "bash");
        command
            .arg(script("validate-gpu/validate.sh"))
            .env("GITHUB_OUTPUT", self.out.path("output"))
            .env("RUNNER_TEMP", self.out.path("temp"))
            .envs(self.inputs.iter().map(|(name, value)| (*name, value)));
        said(&mut command)
    }

    /// An output of the step; of several values the last counts.
    fn output(&self, name: &str) -> Option<String> {
        let outputs = self.out.read("output");
        let of_name = |line: &str| Some(line.strip_prefix(name)?.strip_prefix('=')?.to_owned());
        outputs.lines().rev().find_map(of_name)
    }
}

#[test]
fn the_action_tells_verdict_coverage_and_where_the_reports_are() {
    // The host's log and services are those of the machine that runs the tests, so only what is said is compared.
    let node = Node::healthy("h200x1");
    let step = Step::new();
    let (code, stdout, stderr) = step.run(&node);
    let verdict = step.output("verdict").expect("told");
    let exit_code = step.output("exit-code").expect("told");
    assert_eq!(code == 0, verdict == "pass", "{stdout}{stderr}");
    let report = PathBuf::from(step.output("report").expect("told"));
    for name in ["report.xml", "report.html", "report.json", "facts.json"] {
        assert!(report.join(name).is_file(), "{name}");
    }
    let json: Value =
        serde_json::from_slice(&std::fs::read(report.join("report.json")).expect("read"))
            .expect("JSON");
    assert_eq!(json["exit_code"].to_string(), exit_code);
    let (judged, all) = step
        .output("coverage")
        .expect("told")
        .split_once('/')
        .map(|(a, b)| (a.to_owned(), b.to_owned()))
        .expect("a ratio");
    assert!(judged.parse::<u32>().expect("a number") <= all.parse().expect("a number"));
}

#[test]
fn wrong_inputs_of_the_action_are_errors() {
    let node = Node::healthy("h200x1");
    let digits = "0".repeat(64);
    for (inputs, says) in [
        (
            &[("INPUT_FAIL_ON", "sometimes")][..],
            "fail-on is 'sometimes'",
        ),
        (
            &[("INPUT_ALLOW_SIMULATED", "maybe")],
            "allow-simulated is 'maybe'",
        ),
        (
            &[("INPUT_BINARY", "no-such-validator")],
            "no program 'no-such-validator'",
        ),
        (
            &[("INPUT_VERSION", "9.9.9")],
            "the workflow asks for '9.9.9'",
        ),
        (
            &[("INPUT_BINARY", "none"), ("INPUT_SHA256", &digits)],
            "sha256 needs version",
        ),
        (
            &[
                ("INPUT_BINARY", "none"),
                ("INPUT_VERSION", "0.1.0"),
                ("INPUT_SHA256", "abc"),
            ],
            "a checksum has 64 digits",
        ),
        (
            &[
                ("INPUT_BINARY", "none"),
                ("INPUT_VERSION", "../0.1.0"),
                ("INPUT_SHA256", &digits),
            ],
            "sha256 needs version",
        ),
    ] {
        let step = inputs
            .iter()
            .fold(Step::new(), |step, (name, value)| step.with(name, *value));
        let (code, stdout, stderr) = step.run(&node);
        assert_eq!(code, 1, "{says}: {stdout}{stderr}");
        assert!(
            stdout.contains("::error title=gpu-validator::") && stdout.contains(says),
            "{says}: {stdout}"
        );
        assert_eq!(
            step.output("verdict").as_deref(),
            Some("not_judged"),
            "{says}"
        );
    }
}

/// Serves one file at one path until the test ends.
fn serve(path: &'static str, content: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut request = BufReader::new(stream.try_clone().expect("cloned"));
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") && request.read_line(&mut head).is_ok_and(|it| it > 0)
            {
            }
            let found = head.starts_with(&format!("GET {path} "));
            let (status, body) = if found {
                ("200 OK", &content[..])
            } else {
                ("404 Not Found", &b""[..])
            };
            let _ = write!(
                stream,
                "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                body.len()
            );
            let _ = stream.write_all(body);
        }
    });
    url
}

#[test]
fn the_released_binary_is_downloaded_by_checksum_and_by_no_other() {
    let node = Node::healthy("h200x1");
    let (_, version, _) = said(Command::new(executable()).arg("--version"));
    assert_eq!(version.split(' ').nth(1), Some("0.1.0"), "{version}");
    // What is released is a file; here it is one that starts the binary which was built.
    let released = format!("#!/bin/sh\nexec '{}' \"$@\"\n", executable().display());
    let out = Scratch::new();
    let file = out.write("gpu-validator", &released);
    let sum = said(Command::new("sha256sum").arg(&file)).1;
    let sum = sum.split(' ').next().expect("a checksum").to_owned();
    let url = serve("/v0.1.0/gpu-validator", released.into_bytes());
    let step = |sum: &str| {
        Step::new()
            .with("INPUT_BINARY", "no-such-validator")
            .with("INPUT_VERSION", "0.1.0")
            .with("INPUT_RELEASES_URL", url.clone())
            .with("INPUT_SHA256", sum)
    };
    let good = step(&sum);
    let (_, stdout, stderr) = good.run(&node);
    assert!(
        good.output("exit-code").is_some(),
        "it ran: {stdout}{stderr}"
    );
    let bad = step(&"0".repeat(64));
    let (code, stdout, _) = bad.run(&node);
    assert_eq!(code, 1);
    assert!(
        stdout.contains("has another checksum than sha256 says; it was not run"),
        "{stdout}"
    );
    assert_eq!(bad.output("exit-code"), None);
    let missing = step(&sum).with("INPUT_RELEASES_URL", format!("{url}/elsewhere"));
    let (code, stdout, _) = missing.run(&node);
    assert_eq!(code, 1);
    assert!(stdout.contains("could not be downloaded"), "{stdout}");
    // A machine that has that version downloads nothing.
    let baked = Step::new()
        .with("INPUT_VERSION", "0.1.0")
        .with("INPUT_SHA256", sum);
    baked.run(&node);
    assert!(baked.output("exit-code").is_some());
}

/// The facts of nodes as the artifacts of their jobs have them, and the report on them.
fn fleet_report(nodes: &[(&str, Option<&Node>)]) -> (Said, Scratch) {
    let out = Scratch::new();
    std::fs::create_dir(out.path("nodes")).expect("a folder");
    for (name, node) in nodes {
        let Some(node) = node else { continue };
        let folder = out.path(&format!("nodes/node-{name}"));
        std::fs::create_dir(&folder).expect("a folder");
        let mut command = node.validator();
        command
            .args(["collect", "--level", "quick", "--sysroot"])
            .arg(node.sysroot())
            .arg("-o")
            .arg(folder.join("facts.json"));
        assert_eq!(said(&mut command).0, 0);
    }
    let names: Vec<Value> = nodes
        .iter()
        .map(|(name, _)| serde_json::json!({"name": name, "labels": [name]}))
        .collect();
    let mut command = Command::new("bash");
    command
        .arg(script("fleet-report.sh"))
        .arg(out.path("nodes"))
        .arg(out.path("fleet.json"))
        .env("FLEET", Value::from(names).to_string())
        .env("GPU_VALIDATOR_BINARY", executable())
        .env("GITHUB_STEP_SUMMARY", out.path("summary.md"))
        .env("RUNNER_TEMP", out.path(""))
        .env_remove("GITHUB_ACTIONS");
    (said(&mut command), out)
}

#[test]
fn a_fleet_is_as_well_as_its_worst_node_and_silence_is_no_pass() {
    let well = Node::healthy("h200x1");
    let sick = Node::with_fault("h200x1", "ecc-volatile-uncorrectable");
    let ((code, stdout, stderr), out) = fleet_report(&[("gpu-1", Some(&well))]);
    assert_eq!(code, 0, "{stdout}{stderr}");
    assert!(out.read("summary.md").starts_with("## GPU fleet\n\n    "));
    let ((code, stdout, stderr), out) =
        fleet_report(&[("gpu-1", Some(&well)), ("gpu-2", Some(&sick))]);
    assert_eq!(code, 1, "{stdout}{stderr}");
    let fleet: Value = serde_json::from_str(&out.read("fleet.json")).expect("JSON");
    assert!(fleet.to_string().contains("gpu-2"), "{fleet}");
    let ((code, stdout, _), _) = fleet_report(&[("gpu-1", Some(&well)), ("gpu-3", None)]);
    assert_eq!(code, 2);
    assert!(
        stdout.contains("::error title=fleet::gpu-3 left no facts"),
        "{stdout}"
    );
    let ((code, stdout, _), _) = fleet_report(&[("gpu-3", None)]);
    assert_eq!(code, 2);
    assert!(
        stdout.contains("no node of the fleet was validated"),
        "{stdout}"
    );
}
