//! `gpu-validator allocation --layouts … -- COMMAND`: a user's own command on simulated GPUs.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::node::{Node, Ran, said, texts};
use crate::processes::{eventually, signal};

/// The command with this fault, and the file that it writes.
fn command(node: &Node, arguments: &[&str], fault: &str, file: &Path) -> Command {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("launched_command.py");
    let mut command = node.validator();
    command
        .args(["allocation", "--simulated-ok", "--sysroot"])
        .arg(node.sysroot())
        .arg("--json")
        .arg(node.out.path("report.json"))
        .arg("--junit")
        .arg(node.out.path("report.xml"))
        .arg("--facts")
        .arg(node.out.path("facts.json"))
        .args(arguments)
        .args(["--", "python3"])
        .arg(script)
        .arg(fault)
        .arg(file);
    command
}

fn run(node: &Node, arguments: &[&str], fault: &str) -> Ran {
    let file = node.out.path("started.txt");
    node.finish(&mut command(node, arguments, fault, &file))
}

fn layouts(node: &Node) -> Vec<Value> {
    let facts: Value = serde_json::from_str(&node.out.read("facts.json")).expect("facts");
    let runs = facts["load"]["layouts"]["runs"].as_array();
    runs.expect("layouts").clone()
}

fn uuids(node: &Node) -> Vec<String> {
    let scenario = node.state().scenario();
    scenario.gpus.iter().map(|it| it.uuid.clone()).collect()
}

/// The finding's summary, after its verdict was compared.
fn summary(ran: &Ran, verdict: &str) -> String {
    let finding = ran.report.finding("allocation_layouts");
    assert_eq!(finding["verdict"], verdict, "{finding} {}", ran.stderr);
    finding["summary"].as_str().expect("a summary").to_owned()
}

fn has_ended(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.map_or(true, |it| it.contains(") Z "))
}

/// The processes that the command has recorded are gone, and so is their memory.
fn nothing_is_left(node: &Node, processes: usize) {
    let pids = node.out.read("started.txt");
    assert_eq!(pids.split_whitespace().count(), processes, "{pids}");
    eventually("the end of what the command started", || {
        pids.split_whitespace().all(has_ended)
    });
    let state = node.state();
    assert!(state.state().gpu(0).processes().is_empty());
}

#[test]
fn a_command_that_keeps_to_its_gpus_passes_under_every_layout() {
    let node = Node::healthy("h100-pcie-2");
    let ran = run(&node, &[], "none");
    assert_eq!(summary(&ran, "pass"), "the command passed under 4 layouts");
    let uuids = uuids(&node);
    let given = [
        vec![&uuids[1]],
        vec![&uuids[0], &uuids[1]],
        vec![&uuids[0]],
        vec![],
    ];
    for (run, given) in layouts(&node).iter().zip(given) {
        assert_eq!(run["given"], json!(given));
        assert_eq!(run["end"], json!({"value": {"exited": {"status": 0}}}));
        // NVML listed a process of the command on these GPUs and on no other.
        for uuid in &uuids {
            let own = run["gpus"][uuid]["own"].as_array().expect("a list");
            assert_eq!(own.len(), usize::from(given.contains(&uuid)), "{run}");
            assert_eq!(run["gpus"][uuid]["left_bytes"], 0, "{run}");
        }
        let output = run["stdout"].as_str().expect("output");
        assert!(
            output.starts_with(&format!("used {} GPUs of ", given.len())),
            "{output}"
        );
    }
    assert!(
        ran.stderr.contains("none        0     0 "),
        "{}",
        ran.stderr
    );
    // The workers' checks were not requested.
    assert_eq!(ran.report.finding("allocation_leaks")["verdict"], "skip");
}

#[test]
fn a_command_on_a_gpu_that_it_was_not_given_is_found_by_nvml() {
    let node = Node::healthy("h100-pcie-2");
    let ran = run(&node, &["--layouts", "single,none"], "wrong GPU");
    let summary = summary(&ran, "fail");
    assert!(
        summary.starts_with("single: it used GPU 0 (0000:"),
        "{summary}"
    );
    assert!(
        summary.ends_with("which it was not given; and 1 more"),
        "{summary}"
    );
}

#[test]
fn a_command_that_hangs_is_ended_with_everything_that_it_started() {
    let node = Node::healthy("h200x1");
    let ran = run(
        &node,
        &["--layouts", "single", "--time-limit", "1s"],
        "hang",
    );
    assert_eq!(
        summary(&ran, "fail"),
        "single: it did not end within 1 s, and was ended: waiting for the other ranks"
    );
    nothing_is_left(&node, 2);
}

#[test]
fn processes_that_outlive_the_command_are_ended_and_reported() {
    let node = Node::healthy("h200x1");
    let ran = run(&node, &["--layouts", "all"], "leaves processes");
    // The shell, the one in a session of its own, and the sleep of that one.
    let summary = summary(&ran, "warn");
    assert!(summary.starts_with("all: it left "), "{summary}");
    nothing_is_left(&node, 2);
}

#[test]
fn each_silent_end_is_told_apart() {
    let node = Node::healthy("h200x1");
    for (fault, expected) in [
        (
            "signal",
            "single: it was ended by signal 11 (SIGSEGV): about to read a null pointer",
        ),
        (
            "silent",
            "single: it exited with status 7: it printed nothing",
        ),
        (
            "out of memory",
            "single: it exited with status 1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (the GPU's memory is in use)",
        ),
        (
            "CPU",
            "single: it was given 1 GPU and used none: it computed on the CPU",
        ),
        (
            "prints control characters",
            "single: it exited with status 5: ",
        ),
    ] {
        let ran = run(&node, &["--layouts", "single"], fault);
        assert_eq!(ran.code, 1, "{fault}: {}", ran.stderr);
        let summary = summary(&ran, "fail");
        assert!(summary.starts_with(expected), "{fault}: {summary}");
        // The output is bounded, and the reports stay well-formed.
        let output = layouts(&node)[0]["stderr"].as_str().expect("text").len();
        assert!(output <= 8 * 1024, "{output}");
        let junit = node.out.read("report.xml");
        assert!(!junit.contains('\u{1b}') && !junit.contains('\0'));
    }
}

#[test]
fn an_end_by_the_control_group_is_told_by_its_events() {
    let node = Node::healthy("h200x1");
    let own = node.sysroot().join("proc/self/cgroup");
    let events = node.sysroot().join("sys/fs/cgroup/job/memory.events");
    for path in [&own, &events] {
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
    }
    std::fs::write(own, "0::/job\n").expect("written");
    std::fs::write(&events, "oom 0\noom_kill 0\n").expect("written");
    let mut command = command(
        &node,
        &["--layouts", "single"],
        "out of host memory",
        &events,
    );
    let ran = node.finish(&mut command);
    assert_eq!(
        summary(&ran, "fail"),
        "single: it was ended by signal 9 (SIGKILL); the kernel ended processes of its control group for want of host memory"
    );
    assert_eq!(layouts(&node)[0]["oom_kills"], json!({"value": 1}));
}

#[test]
fn shared_memory_that_the_command_leaves_is_reported() {
    let node = Node::healthy("h200x1");
    let segments = node.sysroot().join("dev/shm");
    std::fs::create_dir_all(&segments).expect("made");
    let file = segments.join("psm_1234");
    let mut command = command(&node, &["--layouts", "all"], "leaves shared memory", &file);
    let ran = node.finish(&mut command);
    assert_eq!(
        summary(&ran, "warn"),
        "all: it left 1 segment in /dev/shm, first psm_1234"
    );
}

#[test]
fn a_layout_that_does_not_apply_is_skipped_and_none_needs_a_fall_back() {
    let node = Node::healthy("h200x1");
    let ran = run(&node, &["--layouts", "subset,none"], "needs a GPU");
    let text = summary(&ran, "fail");
    assert!(
        text.starts_with("none: it exited with status 1: RuntimeError: No CUDA GPUs are available"),
        "{text}"
    );
    assert_eq!(layouts(&node)[0]["skipped"], "one GPU has no subset");
    let ran = run(&node, &["--layouts", "subset"], "none");
    assert_eq!(
        summary(&ran, "skip"),
        "no layout applies: subset: one GPU has no subset"
    );
}

#[test]
fn a_busy_gpu_is_given_to_no_command() {
    let others = "processes.training-job={gpu: 0, pid: 4000001, memory: 20GiB}";
    let node = Node::with("h200x1", &[], &[others]);
    let ran = run(&node, &["--layouts", "single,all"], "none");
    assert_eq!(ran.code, 4, "{}", ran.stdout);
    assert_eq!(ran.report.finding("allocation_layouts")["busy"], true);
}

#[test]
fn ctrl_c_and_sigkill_of_the_validator_end_the_command() {
    for name in ["INT", "KILL"] {
        let node = Node::healthy("h200x1");
        let file = node.out.path("started.txt");
        let mut child = command(&node, &["--layouts", "single"], "hang", &file)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        eventually("the command's processes", || {
            std::fs::read_to_string(&file).is_ok_and(|it| it.split_whitespace().count() == 2)
        });
        let began = Instant::now();
        signal(child.id(), name);
        if name == "INT" {
            let (code, _, stderr) = texts(child.wait_with_output().expect("it ends"));
            assert_eq!(code, 2, "{stderr}");
        } else {
            child.wait().expect("reaped");
        }
        nothing_is_left(&node, 2);
        assert!(
            began.elapsed() < Duration::from_secs(8),
            "{:?}",
            began.elapsed()
        );
    }
}

#[test]
fn bad_input_is_refused() {
    let node = Node::healthy("h200x1");
    for (arguments, expected) in [
        (&["--layouts", "single"][..], "<COMMAND>"),
        (
            &["--layouts", "half", "--", "true"],
            "possible values: single, all, subset, none",
        ),
        (&["--workers", "2", "--", "true"], "cannot be used with"),
    ] {
        let mut command = node.validator();
        command
            .args(["allocation", "--simulated-ok"])
            .args(arguments);
        let (code, _, stderr) = said(&mut command);
        assert_eq!(code, 3, "{stderr}");
        assert!(stderr.contains(expected), "{stderr}");
    }
}
