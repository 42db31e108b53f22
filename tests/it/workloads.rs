//! Workloads in worker processes: the memory test of a run, several workers on one GPU, one worker
//! on several.

use std::process::Child;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::node::{Node, said, set, texts};
use crate::processes::{eventually, signal};

/// One precision of the burn, of which this is no test.
const EXTENDED: [&str; 4] = ["--level", "extended", "--burn-precision", "bf16"];

fn facts_of(node: &Node) -> Value {
    serde_json::from_str(&node.out.read("facts.json")).expect("facts")
}

fn run_extended(node: &Node) -> crate::node::Ran {
    let mut command = node.run_command(&EXTENDED);
    command.arg("--facts").arg(node.out.path("facts.json"));
    node.finish(&mut command)
}

#[test]
fn a_run_of_level_extended_tests_the_memory_of_every_gpu() {
    let node = Node::with("h200x8", &[], &[]);
    let ran = run_extended(&node);
    assert_eq!(ran.report.not_green(), set(&[]), "{}", ran.stdout);
    let findings: Vec<_> = ran.report.of_check("memory_pattern").collect();
    assert_eq!(findings.len(), 8);
    assert!(findings.iter().all(|it| it["verdict"] == "pass"));
    let facts = facts_of(&node);
    let runs = facts["load"]["runs"].as_array().expect("runs");
    let of_memory = |run: &&Value| run["id"]["workload"] == "memory";
    let runs: Vec<&Value> = runs.iter().filter(of_memory).collect();
    assert_eq!(runs.len(), 8);
    for run in runs {
        assert_eq!(run["end"], json!({"value": "finished"}), "{run}");
        let used = run["memory"]["used_bytes"].as_u64().expect("bytes");
        assert_eq!(used, 8 << 20, "the burn's share of the memory");
        assert_eq!(run["measured"]["bytes_verified"], used);
        assert_eq!(run["measured"]["passes"], 1);
    }
}

#[test]
fn wrong_memory_fails_with_its_address_and_only_tests_of_memory_object() {
    let node = Node::with_fault("h200x1", "memory-wrong-bit");
    let ran = run_extended(&node);
    // The allocation test writes with the same kernel.
    let expected = set(&["allocation_success: fail", "memory_pattern: fail"]);
    assert_eq!(ran.report.not_green(), expected);
    let run = &facts_of(&node)["load"]["runs"][0];
    // One bit of the write of the pattern, and one of the write of its inverse.
    assert_eq!(run["mismatches"], 2);
    for example in run["first_mismatches"].as_array().expect("examples") {
        let bits = |name: &str| {
            let text = example[name].as_str().expect("hex");
            u64::from_str_radix(&text[2..], 16).expect("a number")
        };
        assert_eq!((bits("expected") ^ bits("observed")).count_ones(), 1);
        assert_eq!(bits("address") % 8, 0);
    }
    let finding = ran.report.finding("memory_pattern");
    let summary = finding["summary"].as_str().expect("a summary");
    assert!(summary.contains("first address 0x"), "{summary}");
}

#[test]
fn a_run_without_load_and_one_below_level_extended_test_no_memory() {
    let node = Node::healthy("h200x1");
    for arguments in [&["--level", "extended", "--no-burn"][..], &[]] {
        let ran = node.run(arguments);
        let finding = ran.report.finding("memory_pattern");
        assert_eq!(finding["verdict"], "skip", "{finding}");
    }
}

/// The UUIDs of a node's GPUs.
fn uuids(node: &Node) -> Vec<String> {
    node.run(&["--level", "quick"]);
    let state = node.state();
    let scenario = state.scenario();
    scenario.gpus.iter().map(|it| it.uuid.clone()).collect()
}

/// A worker of the memory test, repeated until its time is over.
fn worker(node: &Node, gpus: &[&str], ordinal: u32, seconds: f64, on_foreign: &str) -> Child {
    let assignment = json!({
        "id": {"workload": "memory", "gpus": gpus, "ordinal": ordinal},
        "devices": gpus,
        "memory": {"bytes": 4 << 20},
        "requested": {"seconds": seconds, "passes": null},
        "on_foreign_process": on_foreign,
        "task": {"memory": {"seed": 7}},
    });
    node.validator()
        .args(["worker", "workload", "--assignment"])
        .arg(assignment.to_string())
        .env("CUDA_VISIBLE_DEVICES", gpus.join(","))
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the worker starts")
}

/// The last run that a worker reported.
fn run_of(child: Child) -> Value {
    let (code, stdout, stderr) = texts(child.wait_with_output().expect("it ends"));
    assert_eq!(code, 0, "{stderr}");
    let messages = stdout.lines().map(|line| {
        let message: Value = serde_json::from_str(line).expect("a message");
        message
    });
    let mut runs = messages.filter_map(|it| Some(it.get("field")?.get("value")?.clone()));
    runs.next_back().expect("a run")
}

#[test]
fn several_workers_share_a_gpu_and_one_worker_has_several() {
    let node = Node::healthy("h200x8");
    let gpus = uuids(&node);
    let (first, second) = (gpus[0].as_str(), gpus[1].as_str());
    let workers = [
        worker(&node, &[first], 0, 1.0, "report"),
        worker(&node, &[first], 1, 1.0, "report"),
        worker(&node, &[first, second], 0, 1.0, "report"),
    ];
    let runs = workers.map(run_of);
    for run in &runs {
        assert_eq!(run["end"], json!({"value": "finished"}), "{run}");
        assert_eq!(run["mismatches"], 0);
        assert!(run["measured"]["passes"].as_u64() >= Some(1), "{run}");
    }
    assert_eq!(runs[1]["id"]["ordinal"], 1);
    assert_eq!(runs[0]["memory"]["used_bytes"], 4 << 20);
    assert_eq!(runs[2]["memory"]["used_bytes"], 2 * (4 << 20));
}

#[test]
fn a_worker_yields_to_a_foreign_process_or_reports_it_as_it_was_assigned() {
    let node = Node::healthy("h200x1");
    let gpus = uuids(&node);
    let gpu = gpus[0].as_str();
    let newcomer = || {
        // Not a child of this process, as another user's job is none of the validator's.
        let assignment = json!({
            "id": {"workload": "memory", "gpus": [gpu], "ordinal": 9},
            "devices": [gpu],
            "memory": {"bytes": 1 << 20},
            "requested": {"seconds": 30.0, "passes": null},
            "on_foreign_process": "report",
            "task": {"memory": {"seed": 1}},
        });
        let shell = format!(
            "'{}' worker workload --assignment '{assignment}' >/dev/null & echo $!; wait",
            crate::node::executable().display()
        );
        let command = node.validator();
        crate::node::in_place_of(&command, "/bin/sh")
            .args(["-c", &shell])
            .env("CUDA_VISIBLE_DEVICES", gpu)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("sh starts")
    };
    for (on_foreign, limit) in [("yield", 60.0), ("report", 4.0)] {
        let own = worker(&node, &[gpu], 0, limit, on_foreign);
        let used = || node.state().state().gpu(0).memory_used();
        eventually("the worker's memory", || used() >= 4 << 20);
        let began = Instant::now();
        let mut foreign = newcomer();
        let run = run_of(own);
        let took = began.elapsed();
        let text = run.to_string();
        if on_foreign == "yield" {
            let reason = run["end"]["value"]["busy"].as_str().expect(&text);
            assert!(reason.starts_with("yielded to "), "{reason}");
            assert!(took < Duration::from_secs(30), "{took:?}");
        } else {
            assert_eq!(run["end"], json!({"value": "finished"}), "{text}");
            assert!(text.contains("used the GPU at the same time"), "{text}");
        }
        let mut pid = String::new();
        let mut stdout = std::io::BufReader::new(foreign.stdout.take().expect("a pipe"));
        std::io::BufRead::read_line(&mut stdout, &mut pid).expect("a line");
        signal(pid.trim().parse().expect("a process"), "KILL");
        let _ = foreign.wait();
    }
}

#[test]
fn a_worker_that_is_stopped_reports_and_frees() {
    let node = Node::healthy("h200x1");
    let gpus = uuids(&node);
    let own = worker(&node, &[&gpus[0]], 0, 60.0, "report");
    let used = || node.state().state().gpu(0).memory_used();
    eventually("the worker's memory", || used() >= 4 << 20);
    signal(own.id(), "TERM");
    let began = Instant::now();
    let run = run_of(own);
    assert!(began.elapsed() < Duration::from_secs(10));
    assert_eq!(run["end"], json!({"value": "finished"}));
    assert_eq!(used(), 0);
    let bad = said(
        node.validator()
            .args(["worker", "workload", "--assignment", "{}"]),
    );
    assert!(bad.1.contains("the assignment cannot be read"), "{}", bad.1);
}
