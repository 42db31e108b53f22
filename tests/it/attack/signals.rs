//! Signals, and outputs that are no files (threat model: T7).

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{Random, seed, trials};
use crate::node::{Node, in_place_of, said, texts};
use crate::processes::{eventually, signal};

fn report(node: &Node) -> Value {
    serde_json::from_str(&node.out.read("report.json")).expect("a whole report")
}

#[test]
fn sighup_leaves_a_final_report_and_no_run_file() {
    let node = Node::healthy("h200x1");
    let command = node.burn_command(&["--duration", "60s"]);
    // Who runs the tests may ignore SIGHUP (nohup), which programs inherit.
    let mut burn = in_place_of(&command, "env");
    burn.arg("--default-signal=HUP").arg(command.get_program());
    let child = burn
        .args(command.get_args())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let child = child.expect("the validator starts");
    let runtime = node.folder().join("run");
    let run_file = runtime.join(format!("burn-{}.json", child.id()));
    eventually("the run file", || run_file.exists());
    signal(child.id(), "HUP");
    let (code, stdout, _) = texts(child.wait_with_output().expect("it ends"));
    assert_eq!(code, 2, "{stdout}");
    assert!(!run_file.exists());
    let incomplete = report(&node)["incomplete"].to_string();
    assert!(incomplete.contains("signal 1 (SIGHUP)"), "{incomplete}");
}

#[test]
fn nohup_keeps_a_run_from_being_stopped() {
    let node = Node::healthy("h200x1");
    let run = node.run_command(&["--level", "standard"]);
    let mut nohup = in_place_of(&run, "nohup");
    nohup.arg(run.get_program()).args(run.get_args());
    let child = nohup.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.expect("nohup");
    eventually("the first report", || node.out.path("report.json").exists());
    signal(child.id(), "HUP");
    let (code, stdout, _) = texts(child.wait_with_output().expect("it ends"));
    assert_eq!(code, 0, "{stdout}");
}

#[test]
fn sigterm_soon_after_the_start_leaves_a_report_that_is_not_green() {
    let node = Node::healthy("h200x1");
    let mut random = Random::new(seed());
    for _ in 0..trials(5) {
        let moment = Duration::from_millis(40 + random.below(60));
        let mut run = node.run_command(&["--level", "quick"]);
        let child = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let child = child.expect("the validator starts");
        // Where the first instructions are late, the kernel ends the process before it has a
        // handler.
        eventually("the handlers", || handles_sigterm(child.id()));
        std::thread::sleep(moment / 4);
        signal(child.id(), "TERM");
        let output = child.wait_with_output().expect("it ends");
        let (code, stdout, _) = texts(output);
        let report = report(&node);
        assert_eq!(report["exit_code"], code, "{stdout}");
        std::fs::remove_file(node.out.path("report.json")).expect("removed");
    }
}

fn handles_sigterm(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|it| it.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|it| u64::from_str_radix(it.trim(), 16).ok());
    mask.is_none_or(|it| it >> 14 & 1 == 1)
}

#[test]
fn a_pipe_without_a_reader_is_refused_and_one_with_a_reader_gets_the_report() {
    let node = Node::healthy("h200x1");
    let pipe = node.out.path("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("mkfifo").success());
    let run = || {
        let mut run = node.validator();
        run.args(["run", "--simulated-ok", "--level", "quick", "--sysroot"]);
        run.arg(node.sysroot()).arg("--json").arg(&pipe);
        run
    };
    let started = Instant::now();
    let (code, _, stderr) = said(&mut run());
    assert!(started.elapsed() < Duration::from_secs(20));
    assert_eq!(code, 3, "{stderr}");
    assert!(
        stderr.contains("a named pipe that no program reads"),
        "{stderr}"
    );
    let reader = Command::new("cat")
        .arg(&pipe)
        .stdout(Stdio::piped())
        .spawn();
    let reader = reader.expect("cat");
    // It opens the pipe before the validator is there.
    std::thread::sleep(Duration::from_millis(300));
    let (code, _, stderr) = said(&mut run());
    assert_eq!(code, 0, "{stderr}");
    let read = reader.wait_with_output().expect("read").stdout;
    let report: Value = serde_json::from_slice(&read).expect("one whole report");
    assert_eq!(report["exit_code"], 0);
}

#[test]
fn children_are_waited_for_where_the_parent_ignored_sigchld() {
    let node = Node::healthy("h200x1");
    let run = node.run_command(&["--level", "quick"]);
    let mut shell = in_place_of(&run, "python3");
    let script = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])";
    shell
        .args(["-c", script])
        .arg(run.get_program())
        .args(run.get_args());
    let (code, stdout, stderr) = said(&mut shell);
    assert_eq!(code, 0, "{stdout}{stderr}");
}
