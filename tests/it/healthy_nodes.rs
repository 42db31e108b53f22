//! Healthy nodes pass, and every report states that they are simulated.

use crate::node::{Node, Ran, set};

/// Report options, the files they write, and the mark in each that the run is simulated.
const REPORTS: [(&str, &str, &str); 5] = [
    ("--junit", "report.xml", "name=\"SIMULATED host\""),
    ("--markdown", "report.md", "SIMULATED PASS"),
    ("--html", "report.html", "SIMULATED"),
    ("--metrics", "report.prom", "simulated=\"true\""),
    ("--facts", "facts.json", "\"simulated\": \"h200x"),
];

fn run_with_all_reports(node: &Node, arguments: &[&str]) -> Ran {
    let mut command = node.run_command(arguments);
    for (option, name, _) in REPORTS {
        command.arg(option).arg(node.out.path(name));
    }
    node.finish(&mut command)
}

#[test]
fn healthy_nodes_pass_at_standard_level_and_every_report_says_simulated() {
    for (name, gpus) in [("h200x1", 1), ("h200x8", 8)] {
        let node = Node::healthy(name);
        let ran = run_with_all_reports(&node, &["--level", "standard"]);
        assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
        assert_eq!(ran.report.not_green(), set(&[]));
        assert_eq!(ran.stderr, "");
        assert!(
            ran.stdout.starts_with("SIMULATED PASS: node is ready"),
            "{}",
            ran.stdout
        );
        assert!(ran.stdout.contains("\nSIMULATED: "), "{}", ran.stdout);
        assert!(ran.stdout.lines().count() <= 24, "{}", ran.stdout);
        let verdict = ran.stdout.lines().last().expect("a verdict");
        assert!(verdict.starts_with("SIMULATED PASS: "), "{verdict}");
        assert_eq!(ran.report.0["simulated"], name);
        for (_, file, says) in REPORTS {
            assert!(
                node.out.read(file).contains(says),
                "{file} does not say {says}"
            );
        }
        let kernels: Vec<_> = ran.report.of_check("cuda_kernel").collect();
        assert_eq!(kernels.len(), gpus, "every GPU ran the check kernel");
        assert!(kernels.iter().all(|it| it["verdict"] == "pass"));
    }
}

#[test]
fn the_coverage_statement_counts_what_the_findings_are() {
    let ran = Node::with_fault("h200x8", "kernel-log-unreadable").run(&["--level", "quick", "-v"]);
    let counts = &ran.report.0["counts"];
    let count = |verdict: &str| counts[verdict].as_u64().expect("a count");
    let judged = count("pass") + count("warn") + count("fail");
    let all = judged + count("error") + count("skip");
    assert_eq!(all, ran.report.findings().len() as u64);
    assert_eq!(count("error"), 1);
    let statement = format!(
        "Coverage: {judged} of {all} test cases were judged, 1 could not be judged, {} skipped",
        count("skip")
    );
    assert!(ran.stdout.contains(&statement), "{}", ran.stdout);
    let after = ran.stdout.split("Coverage: ").nth(1).expect("a statement");
    assert!(
        after.contains("ERROR  kernel_log_xid: cannot read /dev/kmsg"),
        "what was not judged is named: {after}"
    );
}

#[test]
fn a_simulated_node_is_not_judged_where_simulation_is_forbidden() {
    let node = Node::healthy("h200x1");
    // --forbid-simulated wins over --simulated-ok, which the helper gives.
    let ran = run_with_all_reports(&node, &["--level", "quick", "--forbid-simulated"]);
    assert_eq!(ran.code, 2);
    assert_eq!(ran.report.not_green(), set(&["run_complete: error"]));
    let says = "the driver libraries are simulated, which only --simulated-ok accepts";
    assert!(ran.stdout.contains(says), "{}", ran.stdout);
    assert!(node.out.read("report.xml").contains(says));
    let ran = node.finish(
        node.run_command(&["--level", "quick"])
            .env("GPU_VALIDATOR_FORBID_SIMULATED", "true"),
    );
    assert_eq!(ran.code, 2, "the variable does what the option does");
}
