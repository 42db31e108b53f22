//! `gpu-validator allocation`: many processes on simulated GPUs.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::node::{Node, Ran, said, set, texts};
use crate::processes::{eventually, signal};

/// Every check of the allocation test.
const CHECKS: [&str; 6] = [
    "allocation_balance",
    "allocation_isolation",
    "allocation_leaks",
    "allocation_oversubscription",
    "allocation_scaling",
    "allocation_success",
];

fn command(node: &Node, arguments: &[&str]) -> Command {
    let mut command = node.validator();
    command
        .args(["allocation", "--simulated-ok", "--deadline-scale", "0.2"])
        .arg("--sysroot")
        .arg(node.sysroot())
        .arg("--json")
        .arg(node.out.path("report.json"))
        .arg("--facts")
        .arg(node.out.path("facts.json"))
        .args(arguments);
    if !arguments.contains(&"--duration") {
        command.args(["--duration", "0.5s"]);
    }
    command
}

fn run(node: &Node, arguments: &[&str]) -> Ran {
    node.finish(&mut command(node, arguments))
}

fn facts_of(node: &Node) -> Value {
    serde_json::from_str(&node.out.read("facts.json")).expect("facts")
}

/// The workers of a phase, each with its run.
fn workers<'f>(facts: &'f Value, phase: &str) -> Vec<(&'f Value, &'f Value)> {
    let list = |value: &'f Value| value.as_array().expect("a list");
    let runs = list(&facts["load"]["runs"]);
    let of_phase = list(&facts["load"]["allocation"]["workers"]);
    let of_phase = of_phase.iter().filter(|it| it["phase"] == phase);
    of_phase
        .map(|worker| {
            let run = runs.iter().find(|it| it["id"] == worker["id"]);
            (worker, run.expect("a run"))
        })
        .collect()
}

fn detail(run: &Value) -> &Value {
    &run["detail"]["allocation"]
}

/// Whether no process and no memory is on any of the node's GPUs.
fn is_empty(node: &Node, gpus: usize) -> bool {
    let node = node.state();
    (0..gpus).all(|gpu| {
        let gpu = node.state().gpu(gpu);
        gpu.processes().is_empty() && gpu.memory_used() == 0
    })
}

#[test]
fn workers_share_two_gpus_in_turn_and_leave_nothing() {
    let node = Node::healthy("h100-pcie-2");
    let ran = run(&node, &["--workers", "3", "--memory", "1MiB"]);
    let of_test = |it: &String| it.starts_with("allocation");
    let objections: Vec<_> = ran.report.not_green().into_iter().filter(of_test).collect();
    assert_eq!(objections, [""; 0], "{}{}", ran.stdout, ran.stderr);
    assert!(is_empty(&node, 2));
    let facts = facts_of(&node);
    let allocation = &facts["load"]["allocation"];
    let gpus = allocation["plan"]["gpus"].as_array().expect("GPUs");
    let steady = workers(&facts, "steady");
    let on: Vec<&Value> = steady.iter().map(|it| &it.0["id"]["gpus"][0]).collect();
    assert_eq!(on, [&gpus[0], &gpus[1], &gpus[0]]);
    for (worker, run) in &steady {
        assert_eq!(run["end"], json!({"value": "finished"}), "{run}");
        assert!(detail(run)["operations"].as_u64() >= Some(1), "{run}");
        assert_eq!(detail(run)["peak_memory_bytes"], 1 << 20);
        assert_eq!(detail(run)["visible_devices"], worker["id"]["gpus"]);
        assert_eq!(run["mismatches"], 0);
    }
    assert_eq!(workers(&facts, "scaling_one").len(), 1);
    assert_eq!(workers(&facts, "scaling_all").len(), 2);
    // NVML listed each steady worker on its own GPU, and on no other.
    for (worker, _) in &steady {
        for gpu in gpus {
            let listed = &allocation["listed"][gpu.as_str().expect("a UUID")];
            let is_listed = listed
                .as_array()
                .is_some_and(|it| it.contains(&worker["pid"]));
            assert_eq!(is_listed, *gpu == worker["id"]["gpus"][0], "{allocation}");
        }
    }
    // Half of three, rounded up, were killed; the others went on.
    let killing = workers(&facts, "killing");
    let killed = killing.iter().filter(|it| it.0["killed"] == true);
    assert_eq!(killed.count(), 2);
    for (worker, run) in killing {
        let expected = if worker["killed"] == true {
            json!({"value": {"killed": {"signal": 9}}})
        } else {
            json!({"value": "finished"})
        };
        assert_eq!(run["end"], expected);
    }
    // One of the two workers requested too much, and was refused.
    let request = &allocation["oversubscription"]["value"];
    for (worker, run) in workers(&facts, "oversubscription") {
        let refused = detail(run)["failures"]["out_of_memory"].as_u64();
        let is_asker = worker["id"] == request["worker"];
        assert_eq!(refused, Some(if is_asker { 3 } else { 0 }), "{run}");
        assert_eq!(run["end"], json!({"value": "finished"}));
    }
    assert!(request["requested_bytes"].as_u64() > request["free_bytes"].as_u64());
    assert!(ran.stderr.contains("2 GPUs are "), "{}", ran.stderr);
    assert!(ran.stderr.contains("fairness"), "{}", ran.stderr);
}

/// The objections of a run of the test on a node with these changes.
fn objections(node: &str, changes: &[&str], arguments: &[&str]) -> (Node, Ran) {
    let node = Node::with(node, &[], changes);
    let ran = run(&node, arguments);
    (node, ran)
}

#[test]
fn a_process_on_another_gpu_than_its_own_is_found_by_nvml() {
    let change = "gpus.1.cuda_lands_on=0";
    let (node, ran) = objections("h100-pcie-2", &[change], &["--workers", "2"]);
    assert!(
        ran.report
            .not_green()
            .contains("allocation_isolation: fail")
    );
    let facts = facts_of(&node);
    let other = facts["gpus"][0]["uuid"]["value"].as_str().expect("a UUID");
    let findings: Vec<_> = ran.report.of_check("allocation_isolation").collect();
    for (finding, verdict) in findings.iter().zip(["pass", "fail"]) {
        assert_eq!(finding["verdict"], verdict, "{finding}");
    }
    let summary = findings[1]["summary"].as_str().expect("a summary");
    assert!(summary.contains(other), "{summary}");
}

#[test]
fn a_worker_that_hangs_in_free_is_ended_and_named_with_the_call() {
    let change = "gpu.free_fault={kind: hang, first: 20}";
    let (node, ran) = objections(
        "h200x1",
        &[change],
        &["--duration", "60s", "--memory", "4KiB"],
    );
    assert_eq!(ran.report.not_green(), set(&["allocation_success: fail"]));
    let finding = ran.report.finding("allocation_success");
    let summary = finding["summary"].as_str().expect("a summary");
    assert!(
        summary.starts_with("0 of 2 workers succeeded: worker 0 (steady): hung in cuMemFree_v2"),
        "{summary}"
    );
    assert!(is_empty(&node, 1));
    // A GPU that hung is not tried again.
    assert!(workers(&facts_of(&node), "killing").is_empty());
}

#[test]
fn memory_that_is_not_given_back_is_found_after_the_last_worker() {
    let change = "gpu.free_fault={kind: keep, first: 2, count: 40}";
    let (node, ran) = objections(
        "h200x1",
        &[change],
        &["--duration", "3s", "--memory", "4KiB"],
    );
    assert_eq!(
        ran.report.not_green(),
        set(&["allocation_leaks: fail"]),
        "{}",
        ran.stderr
    );
    let finding = ran.report.finding("allocation_leaks");
    let observed = finding["observed"].as_str().expect("what was left");
    assert!(observed.contains("MiB of memory (GPU-"), "{observed}");
    assert!(node.state().state().gpu(0).memory_used() > 64 << 20);
}

#[test]
fn shared_memory_and_references_of_the_driver_that_stay_are_a_warning() {
    let node = Node::healthy("h200x1");
    let references = node.sysroot().join("sys/module/nvidia_uvm/refcnt");
    let segments = node.sysroot().join("dev/shm");
    std::fs::create_dir_all(references.parent().expect("a folder")).expect("made");
    std::fs::create_dir_all(&segments).expect("made");
    std::fs::write(&references, "2\n").expect("written");
    std::fs::write(segments.join("of_before"), "x").expect("written");
    let child = command(&node, &["--duration", "3s", "--memory", "4KiB"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    eventually("a worker with memory", || {
        let state = node.state();
        let processes = state.state().gpu(0).processes();
        processes.iter().any(|it| it.contexts > 0)
    });
    // The check kernel has a context, too, before the workers.
    std::thread::sleep(Duration::from_secs(2));
    std::fs::write(&references, "4\n").expect("written");
    std::fs::write(segments.join("psm_1234"), "x").expect("written");
    let said = texts(child.wait_with_output().expect("it ends"));
    let ran = Ran::ended(said, Duration::ZERO, &node.out.read("report.json"));
    let finding = ran.report.finding("allocation_leaks");
    assert_eq!(finding["verdict"], "warn", "{finding}");
    let summary = finding["summary"].as_str().expect("a summary");
    assert!(
        summary.ends_with("shared memory psm_1234; 2 references to nvidia_uvm"),
        "{summary}"
    );
}

#[test]
fn one_wrong_word_fails_whatever_share_must_succeed() {
    let change = "gpu.wrong_results={kind: bit, kernel: memory_write, every_launches: 1000000}";
    let (node, ran) = objections("h200x1", &[change], &["--minimum-success", "0"]);
    assert_eq!(ran.report.not_green(), set(&["allocation_success: fail"]));
    let facts = facts_of(&node);
    let wrong: u64 = workers(&facts, "steady")
        .iter()
        .filter_map(|(_, run)| detail(run)["failures"]["wrong_result"].as_u64())
        .sum();
    assert_eq!(wrong, 1);
}

#[test]
fn ctrl_c_ends_the_test_with_what_was_measured_and_leaves_nothing() {
    let node = Node::healthy("h200x1");
    let child = command(&node, &["--duration", "120s"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    // Both workers have been at work for a while.
    eventually("two workers with memory", || {
        let state = node.state();
        let processes = state.state().gpu(0).processes();
        processes.iter().filter(|it| it.contexts > 0).count() >= 2
    });
    std::thread::sleep(Duration::from_millis(700));
    let began = Instant::now();
    signal(child.id(), "INT");
    let said = texts(child.wait_with_output().expect("it ends"));
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "{:?}",
        began.elapsed()
    );
    let ran = Ran::ended(said, began.elapsed(), &node.out.read("report.json"));
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert_eq!(ran.report.0["incomplete"], "signal 2 (SIGINT)");
    assert_eq!(ran.report.not_green(), set(&["run_complete: error"]));
    eventually("an empty GPU", || is_empty(&node, 1));
    let facts = facts_of(&node);
    assert_eq!(workers(&facts, "steady").len(), 2);
}

#[test]
fn a_gpu_that_others_use_is_busy() {
    let others = "processes.training-job={gpu: 0, pid: 4000001, memory: 20GiB}";
    let (node, ran) = objections("h200x1", &[others], &[]);
    assert_eq!(ran.code, 4, "{}", ran.stdout);
    let finding = ran.report.finding("allocation_success");
    assert_eq!(
        (&finding["verdict"], &finding["busy"]),
        (&json!("error"), &json!(true))
    );
    assert!(
        workers(&facts_of(&node), "steady")
            .iter()
            .all(|it| it.0["pid"].is_null())
    );
}

#[test]
fn bad_input_is_refused_with_what_was_expected() {
    let node = Node::healthy("h200x1");
    for (arguments, expected) in [
        (["--workers", "0"], "1..=950"),
        (
            ["--memory", "80%"],
            "the memory of a worker is a size: 256MiB",
        ),
        (
            ["--minimum-success", "101"],
            "a share is a number from 0 to 100",
        ),
        (
            ["--gpu", "GPU-x"],
            "no GPU GPU-x; expected an index, PCI address or UUID of: GPU 0",
        ),
    ] {
        let (code, _, stderr) = said(&mut command(&node, &arguments));
        assert_eq!(code, 3, "{stderr}");
        assert!(stderr.contains(expected), "{stderr}");
    }
}

#[test]
fn a_run_of_level_extended_has_the_test_and_one_of_level_standard_has_not() {
    let node = Node::healthy("h200x1");
    let ran = node.run(&["--level", "extended", "--burn-precision", "bf16"]);
    assert_eq!(ran.report.not_green(), set(&[]), "{}", ran.stdout);
    for check in [
        "allocation_success",
        "allocation_isolation",
        "allocation_leaks",
    ] {
        assert_eq!(ran.report.finding(check)["verdict"], "pass");
    }
    let ran = node.run(&[]);
    for check in CHECKS {
        let finding = ran.report.finding(check);
        assert_eq!(finding["verdict"], "skip");
        assert_eq!(
            finding["summary"],
            "judged at level extended and above, this run is standard"
        );
    }
}
