//! `gpu-validator burn` as a person uses it: in the background, stopped, twice at once, and the
//! burn of `run`.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::node::{Node, Ran, Said, said, set, texts};
use crate::processes::signal;

fn status(node: &Node) -> Said {
    said(node.validator().args(["burn", "status"]))
}

/// Waits until a burn that was started in the foreground reports that it runs.
fn wait_for(node: &Node) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while status(node).1.starts_with("no burn") {
        assert!(Instant::now() < deadline, "no burn after 30 s");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn start(node: &Node) -> Child {
    let child = node
        .burn_command(&["--duration", "60s"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the validator starts");
    wait_for(node);
    child
}

#[test]
fn a_burn_in_the_background_is_shown_stopped_and_reported() {
    let node = Node::healthy("h200x1");
    let (code, stdout, stderr) = said(&mut node.burn_command(&["--duration", "60s", "--detach"]));
    assert_eq!(code, 0, "{stdout}{stderr}");
    assert!(stdout.contains(": 1 GPU for 60 s, log "), "{stdout}");
    assert!(status(&node).1.contains(": 1 GPU for 60 s"));
    let second = said(&mut node.burn_command(&["--duration", "1s"]));
    assert_eq!(second.0, 4, "one burn a GPU: the other one is busy");
    assert!(second.2.contains(" is burned by process "), "{}", second.2);
    let started = Instant::now();
    let (code, stdout, _) = said(node.validator().args(["burn", "stop"]));
    assert_eq!(code, 0);
    assert!(
        stdout.contains("stopped, its reports are written"),
        "{stdout}"
    );
    assert!(started.elapsed() < Duration::from_secs(5));
    let ended = status(&node).1;
    assert!(
        ended.starts_with("no burn is running\nlast burn: process "),
        "{ended}"
    );
    assert!(ended.contains(", exit code 2, log "), "{ended}");
    assert!(
        ended.contains("SIMULATED NOT JUDGED: the run is incomplete: signal 15"),
        "{ended}"
    );
    let report: serde_json::Value =
        serde_json::from_str(&node.out.read("report.json")).expect("JSON");
    assert_eq!(report["incomplete"], "signal 15 (SIGTERM)");
    assert_eq!(report["exit_code"], 2, "what was stopped is no pass");
    let (code, stdout, _) = said(node.validator().args(["burn", "stop"]));
    assert_eq!((code, stdout.as_str()), (0, "no burn is running\n"));
}

#[test]
fn a_burn_in_the_background_that_cannot_begin_says_why() {
    let node = Node::healthy("h200x1");
    let (code, _, stderr) = said(&mut node.burn_command(&["--detach", "--gpu", "GPU-x"]));
    assert_eq!(code, 3);
    assert!(
        stderr.starts_with(
            "error: no GPU GPU-x; expected an index, PCI address or UUID of: GPU 0 (0000:"
        ),
        "{stderr}"
    );
}

#[test]
fn a_burn_in_the_background_that_ends_leaves_its_reports_and_nothing_else() {
    let node = Node::healthy("h200x1");
    let (code, stdout, stderr) = said(&mut node.burn_command(&["--duration", "0.5s", "--detach"]));
    assert_eq!(code, 0, "{stdout}{stderr}");
    let (code, stdout, stderr) = said(node.validator().args(["burn", "wait"]));
    assert_eq!(code, 0, "{stdout}{stderr}");
    assert!(
        stdout.contains("SIMULATED PASS: node is ready: "),
        "{stdout}"
    );
    let log = stdout
        .split(", log ")
        .nth(1)
        .and_then(|it| it.lines().next());
    let log = std::fs::read_to_string(log.expect("its log")).expect("the log is there");
    assert!(log.contains("SIMULATED PASS: node is ready: "), "{log}");
    let (code, again, _) = said(node.validator().args(["burn", "wait"]));
    assert_eq!((code, again), (0, stdout), "the last result stays");
    let (code, json, _) = said(node.validator().args(["burn", "status", "--json"]));
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(
        (code, &json["last"]["exit_code"]),
        (0, &0.into()),
        "{json:#}"
    );
    let report: serde_json::Value =
        serde_json::from_str(&node.out.read("report.json")).expect("JSON");
    assert_eq!(report["exit_code"], 0, "{report:#}");
    assert_eq!(report["burn"].as_array().expect("rows").len(), 1);
}

#[test]
fn waiting_returns_the_exit_code_of_the_burn_and_fails_without_one() {
    let node = Node::with("h200x1", &[], &["gpu.persistence_mode=false"]);
    let (code, _, stderr) = said(node.validator().args(["burn", "wait"]));
    assert_eq!(code, 3, "{stderr}");
    assert!(
        stderr.contains("no burn is running, and none has ended"),
        "{stderr}"
    );
    let (code, stdout, stderr) =
        said(&mut node.burn_command(&["--duration", "0.5s", "--gpu", "0", "--detach"]));
    assert_eq!(code, 0, "{stdout}{stderr}");
    let (code, stdout, stderr) = said(node.validator().args(["burn", "wait"]));
    assert_eq!(code, 1, "{stdout}{stderr}");
    assert!(stdout.contains("SIMULATED FAIL: GPU 0 (0000:"), "{stdout}");
}

#[test]
fn an_interrupted_burn_stops_and_reports_what_it_measured() {
    let node = Node::healthy("h200x1");
    let child = start(&node);
    let deadline = Instant::now() + Duration::from_secs(30);
    let measured =
        |text: &str| text.contains(" products verified") && !text.contains(" 0 products");
    while !measured(&status(&node).1) {
        assert!(Instant::now() < deadline, "nothing is measured in 30 s");
        std::thread::sleep(Duration::from_millis(50));
    }
    signal(child.id(), "INT");
    let started = Instant::now();
    let output = child.wait_with_output().expect("it can be waited for");
    let took = started.elapsed();
    let ran = Ran::ended(texts(output), took, &node.out.read("report.json"));
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert_eq!(ran.code, 2);
    assert_eq!(ran.report.0["incomplete"], "signal 2 (SIGINT)");
    let row = &ran.report.0["burn"][0];
    assert!(row["products_verified"].as_u64() > Some(0), "{row}");
    assert_eq!(row["mismatches"], 0);
}

/// The file of a killed burn stays; it must not be taken for a burn.
#[test]
fn a_burn_that_was_killed_leaves_no_burn_and_no_lock() {
    let node = Node::healthy("h200x1");
    let mut child = start(&node);
    signal(child.id(), "KILL");
    child.wait().expect("it can be waited for");
    assert_eq!(status(&node).1, "no burn is running\n");
    let (code, stdout, stderr) = said(&mut node.burn_command(&["--duration", "0.2s"]));
    // The killed burn's worker may still be ending: a busy GPU is no broken one.
    assert!([0, 4].contains(&code), "{stdout}{stderr}");
}

#[test]
fn run_burns_what_the_profile_says_and_not_what_the_command_line_forbids() {
    let node = Node::healthy("h200x1");
    let profile = node.out.write(
        "profile.yaml",
        "levels: {standard: {burn: {precisions: [bf16, fp16]}}}",
    );
    let profile = profile.to_str().expect("UTF-8");
    let ran = node.run(&["--level", "standard", "--profile", profile]);
    assert_eq!(ran.code, 0, "{}", ran.stdout);
    assert_eq!(ran.report.not_green(), set(&[]));
    let summary = ran.report.finding("gemm_numerics")["summary"].to_string();
    assert!(
        summary.contains("bf16: ") && summary.contains("fp16: "),
        "{summary}"
    );
    let ran = node.run(&["--level", "standard", "--no-burn"]);
    assert_eq!(ran.code, 0, "{}", ran.stdout);
    assert_eq!(
        ran.report.finding("gemm_numerics")["summary"],
        "no burn: --no-burn was given"
    );
    let refused = node
        .out
        .write("long.yaml", "levels: {standard: {deadline_s: 5}}");
    let (code, _, stderr) = said(node.run_command(&[]).arg("--profile").arg(refused));
    assert_eq!(code, 3);
    assert!(
        stderr.contains("the burn takes 10 s, the whole run may take 5 s"),
        "{stderr}"
    );
}

#[test]
fn a_gpu_of_others_is_busy_and_burned_only_where_that_is_allowed() {
    let node = Node::with_fault("h200x8", "foreign-process");
    let ran = node.run(&["--level", "standard"]);
    assert_eq!(ran.code, 4, "{}", ran.stdout);
    let busy = |ran: &Ran| {
        let findings = ran.report.of_check("gemm_numerics");
        findings.filter(|it| it["busy"] == true).count()
    };
    assert_eq!(busy(&ran), 1);
    let passed = ran
        .report
        .of_check("gemm_numerics")
        .filter(|it| it["verdict"] == "pass");
    assert_eq!(passed.count(), 7, "the other GPUs are burned");
    let ran = node.run(&["--level", "standard", "--burn-share"]);
    assert_eq!(ran.code, 0, "{}", ran.stdout);
    assert_eq!(busy(&ran), 0);
}
