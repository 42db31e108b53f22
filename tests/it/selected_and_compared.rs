//! Runs of some checks and GPUs only, runs that are compared, with one another or with a history,
//! and input that configures nothing.

use crate::node::{Node, said};

#[test]
fn checks_that_are_left_out_are_named_and_no_pass() {
    let node = Node::with_fault("h200x1", "kernel-log-unreadable");
    let ran = node.run(&["--level", "quick", "--skip", "persistence_mode", "-v"]);
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    let finding = ran.report.finding("persistence_mode");
    assert_eq!(finding["verdict"], "skip");
    assert_eq!(finding["summary"], "left out by --only or --skip");
    let says = "persistence_mode left out by --only or --skip";
    assert_eq!(ran.report.0["incomplete"], says);
    assert!(ran.stdout.contains(says), "{}", ran.stdout);
    assert!(
        ran.stdout.contains("persistence_mode: left out by"),
        "the coverage names it: {}",
        ran.stdout
    );

    // The only objection is left out, and a pass is out of reach all the same.
    let ran = node.run(&["--level", "quick", "--only", "persistence_mode,ecc_mode"]);
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    assert_eq!(ran.report.finding("ecc_mode")["verdict"], "pass");
    assert_eq!(ran.report.finding("kernel_log_xid")["verdict"], "skip");

    let wrong = said(&mut node.run_command(&["--only", "ecc_mod"]));
    assert_eq!(wrong.0, 3);
    assert!(wrong.2.contains("did you mean `ecc_mode`?"), "{}", wrong.2);
}

#[test]
fn only_named_gpus_are_worked_and_the_others_are_named_as_left_out() {
    let node = Node::healthy("h100-pcie-4-no-bridge");
    let facts = node.out.path("facts.json");
    let run = |level: &str, gpus: &str| {
        let mut run = node.run_command(&["--level", level, "--gpu", gpus, "-v", "--facts"]);
        node.finish(run.arg(&facts))
    };
    let read = || -> serde_json::Value {
        let text = std::fs::read(&facts).expect("facts");
        serde_json::from_slice(&text).expect("JSON")
    };
    // An index, and an address without its domain.
    let address = |facts: &serde_json::Value, index: usize| {
        let address = facts["gpus"][index]["pci_address"]["value"].as_str();
        address.expect("an address").to_owned()
    };
    run("quick", "0");
    let short = address(&read(), 2).trim_start_matches("0000:").to_owned();
    let ran = run("standard", &format!("0,{short}"));
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    let facts = read();
    let uuid = |index: usize| {
        facts["gpus"][index]["uuid"]["value"]
            .as_str()
            .expect("a UUID")
    };
    for worked in ["burn", "cuda_kernel"] {
        let gpus = facts["load"][worked].as_object().expect("by UUID");
        let mut expected = [uuid(0), uuid(2)];
        expected.sort_unstable();
        assert!(gpus.keys().eq(expected), "{worked}: {gpus:?}");
    }
    let says = format!(
        "GPU 1 ({}), GPU 3 ({}) left out by --gpu",
        address(&facts, 1),
        address(&facts, 3)
    );
    assert_eq!(ran.report.0["incomplete"], says);
    assert!(
        ran.stdout.contains("on 2 GPUs: left out by --gpu"),
        "the coverage names them: {}",
        ran.stdout
    );

    // All that there are: nothing is left out.
    assert_eq!(run("quick", "0,1,2,3").code, 0);
    let (code, _, stderr) = said(&mut node.run_command(&["--level", "quick", "--gpu", "9"]));
    assert_eq!(code, 3, "{stderr}");
    assert!(
        stderr.contains("no GPU 9; expected an index, PCI address or UUID of: GPU 0 (0000:"),
        "{stderr}"
    );
}

#[test]
fn a_failure_fails_whatever_else_is_left_out() {
    let node = Node::with("h200x1", &[], &["gpu.persistence_mode=false"]);
    let ran = node.run(&["--level", "quick", "--only", "persistence_mode"]);
    assert_eq!(ran.code, 1, "{}", ran.stdout);
}

#[test]
fn two_runs_are_compared_by_facts_verdicts_and_figures() {
    let facts = |node: &Node| {
        let path = node.out.path("facts.json");
        let mut run = node.run_command(&["--level", "quick", "--facts"]);
        let (_, _, stderr) = said(run.arg(&path));
        assert!(path.exists(), "{stderr}");
        path
    };
    let healthy = Node::healthy("h200x8");
    let faulty = Node::with("h200x8", &[], &["gpus.3.persistence_mode=false"]);
    let (before, after) = (facts(&healthy), facts(&faulty));
    let diff = |one: &std::path::Path, other: &std::path::Path, more: &[&str]| {
        said(
            healthy
                .validator()
                .arg("diff")
                .arg(one)
                .arg(other)
                .args(more),
        )
    };
    let (code, stdout, stderr) = diff(&before, &before, &[]);
    assert_eq!(code, 0, "{stdout}{stderr}");
    assert_eq!(stdout, "0 verdicts, 0 facts, 0 figures differ\n");
    let (code, stdout, _) = diff(&before, &after, &[]);
    assert_eq!(code, 1, "{stdout}");
    let says = "verdict  GPU 3 (0000:";
    let line = stdout.lines().find(|it| it.starts_with(says));
    let line = line.unwrap_or_else(|| panic!("{stdout}"));
    assert!(line.contains("persistence_mode: pass -> fail"), "{line}");
    let (code, stdout, _) = diff(&after, &before, &["--json"]);
    let comparison: serde_json::Value = serde_json::from_str(&stdout).expect("JSON");
    assert_eq!(
        (code, &comparison["is_worse"]),
        (0, &false.into()),
        "{stdout}"
    );
    let (code, _, stderr) = diff(&before, &healthy.out.path("none.json"), &[]);
    assert_eq!(code, 3, "{stderr}");
}

#[test]
fn rows_that_are_remapped_after_earlier_runs_are_a_trend() {
    let healthy = Node::healthy("h200x1");
    let degraded = Node::with("h200x1", &[], &["gpu.row_remapping.correctable=6"]);
    let folder = healthy.out.path("history");
    let trend = |node: &Node| {
        let mut run = node.run_command(&["--level", "quick", "--history"]);
        let ran = node.finish(run.arg(&folder));
        ran.report.finding("trend").clone()
    };
    assert_eq!(
        trend(&healthy)["verdict"],
        "skip",
        "there is no earlier run"
    );
    assert_eq!(trend(&healthy)["verdict"], "pass");
    let finding = trend(&degraded);
    assert_eq!(finding["verdict"], "warn", "{finding}");
    let summary = finding["summary"].as_str().unwrap_or_default();
    assert!(
        summary.starts_with("6 rows were remapped since 20"),
        "{summary}"
    );
    assert_eq!(
        trend(&degraded)["verdict"],
        "pass",
        "none since the last run"
    );
    let kept = std::fs::read_dir(&folder).expect("the history").count();
    assert_eq!(kept, 4);
}

#[test]
fn an_empty_profile_and_an_unknown_variable_are_warned_of() {
    let node = Node::healthy("h200x1");
    let profile = node.out.write("empty.yaml", "{}\n");
    let mut run = node.run_command(&["--level", "quick", "--profile"]);
    run.arg(&profile).env("GPU_VALIDATOR_PROFIL", "node.yaml");
    let ran = node.finish(&mut run);
    assert_eq!(ran.code, 0, "{}", ran.stdout);
    for says in [
        "is empty and requires nothing",
        "GPU_VALIDATOR_PROFIL is no variable of gpu-validator and has no effect; did you mean GPU_VALIDATOR_PROFILE?",
    ] {
        assert!(ran.stderr.contains(says), "{says}: {}", ran.stderr);
    }
}
