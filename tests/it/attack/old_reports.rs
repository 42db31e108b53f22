//! An old green report must not outlive a new run that is not green (threat model: T1).

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use super::{Random, seed, trials};
use crate::node::{Node, Scratch, said};
use crate::processes::workers_of;

const GREEN: &str = r#"{"exit_code": 0, "verdict": "pass", "incomplete": null}"#;

/// An output that an earlier run left.
fn old_report(out: &Scratch) -> PathBuf {
    out.write("report.json", GREEN)
}

/// Nothing is there, or a report that is not green.
fn is_not_green(path: &Path) -> bool {
    let Ok(text) = std::fs::read_to_string(path) else {
        return true;
    };
    let report: Value = match serde_json::from_str(&text) {
        Ok(report) => report,
        Err(error) => panic!("a torn report: {error}: {text:?}"),
    };
    report["exit_code"] != 0
}

fn facts_of(node: &Node) -> PathBuf {
    let path = node.out.path("input.json");
    let mut collect = node.validator();
    collect.args(["collect", "--level", "quick", "--sysroot"]);
    collect.arg(node.sysroot()).arg("-o").arg(&path);
    assert_eq!(said(&mut collect).0, 0);
    path
}

#[test]
fn a_refused_command_leaves_no_old_report() {
    let node = Node::healthy("h200x1");
    let facts = facts_of(&node);
    let bad = node.out.write("bad.yaml", "gpus:\n  cuont: 8\n");
    let (facts, bad) = (facts.to_str().expect("UTF-8"), bad.to_str().expect("UTF-8"));
    let report = node.out.path("report.json");
    for command in [
        vec!["run"],
        vec!["burn"],
        vec!["judge", facts],
        vec!["hook", "pre-job"],
        vec!["kubernetes", "gate"],
    ] {
        for wrong in [
            vec!["--no-such-option"],
            vec!["--profile", "/nonexistent.yaml"],
            vec!["--profile", bad],
        ] {
            for by_variable in [false, true] {
                if by_variable && command[0] == "hook" {
                    // A job's environment does not reach the hook.
                    continue;
                }
                old_report(&node.out);
                let mut refused = node.validator();
                refused.args(&command).args(&wrong);
                if by_variable {
                    refused.env("GPU_VALIDATOR_JSON", &report);
                } else {
                    refused.arg("--json").arg(&report);
                }
                let (code, _, stderr) = said(&mut refused);
                assert_eq!(code, 3, "{command:?} {wrong:?}: {stderr}");
                assert!(is_not_green(&report), "{command:?} {wrong:?}");
            }
        }
    }
    old_report(&node.out);
    let mut collect = node.validator();
    collect
        .args(["collect", "--profile", bad, "-o"])
        .arg(&report);
    assert_eq!(said(&mut collect).0, 3);
    assert!(is_not_green(&report), "collect");
}

#[test]
fn a_quarantined_pre_job_leaves_no_old_report() {
    let node = Node::healthy("h200x1");
    let report = old_report(&node.out);
    node.out.write("state/quarantine", "GPU 3 is replaced\n");
    let mut hook = node.validator();
    hook.args(["hook", "pre-job", "--state"])
        .arg(node.out.path("state"))
        .arg("--json")
        .arg(&report);
    let (code, _, stderr) = said(&mut hook);
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains("GPU 3 is replaced"), "{stderr}");
    assert!(is_not_green(&report));
}

#[test]
fn an_old_report_that_cannot_be_removed_is_refused_by_its_name() {
    // Root may write anywhere, but not to a file system that is mounted read-only.
    let node = Node::healthy("h200x1");
    let report = old_report(&node.out);
    let mut run = node.validator();
    run.args(["run", "--simulated-ok", "--level", "quick", "--sysroot"]);
    run.arg(node.sysroot()).arg("--json").arg(&report);
    let folder = report.parent().expect("a folder");
    let script = "mount --bind \"$0\" \"$0\" && mount -o remount,bind,ro \"$0\" && exec \"$@\"";
    let mut command = crate::node::in_place_of(&run, "unshare");
    command
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", script])
        .arg(folder)
        .arg(run.get_program())
        .args(run.get_args());
    let (code, stdout, stderr) = said(&mut command);
    assert_eq!(code, 3, "{stdout}{stderr}");
    assert!(
        stderr.contains("of an earlier run and cannot be removed"),
        "{stderr}"
    );
    assert!(stderr.contains("report.json"), "{stderr}");
}

#[test]
fn a_report_never_replaces_what_is_judged() {
    let node = Node::healthy("h200x1");
    let facts = facts_of(&node);
    let before = std::fs::read(&facts).expect("read");
    let mut judge = node.validator();
    judge.arg("judge").arg(&facts).arg("--json").arg(&facts);
    let (code, _, stderr) = said(&mut judge);
    assert_eq!(code, 3);
    assert!(stderr.contains("is both read and written"), "{stderr}");
    assert_eq!(std::fs::read(&facts).expect("read"), before);
}

/// A command that writes `report.json`, killed at any moment.
fn killed(node: &Node, command: &mut Command, moment: Duration) {
    let report = old_report(&node.out);
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut child = child.expect("the validator starts");
    std::thread::sleep(moment);
    let workers = workers_of(child.id());
    // It may have ended in this moment.
    let _ = child.kill();
    let status = child.wait().expect("it ends");
    if status.code().is_none() {
        // Before its first instruction nothing can be done about an old report.
        let began = moment > Duration::from_millis(100);
        assert!(!began || is_not_green(&report), "killed after {moment:?}");
    }
    crate::processes::eventually("the end of the workers", || {
        workers.iter().all(crate::processes::Worker::is_gone)
    });
}

#[test]
fn a_kill_at_a_random_moment_leaves_no_torn_report_no_stale_green_and_no_orphan() {
    let node = Node::healthy("h200x1");
    let seed = seed();
    let mut random = Random::new(seed);
    println!("GPU_BRINGUP_ATTACK_SEED={seed}");
    for _ in 0..trials(4) {
        let moment = Duration::from_millis(random.below(1200));
        killed(
            &node,
            &mut node.run_command(&["--level", "standard"]),
            moment,
        );
        let burn = &mut node.burn_command(&["--duration", "1s"]);
        killed(&node, burn, Duration::from_millis(random.below(1200)));
        let mut hook = node.validator();
        hook.args(["hook", "pre-job", "--simulated-ok", "--burn", "200ms"])
            .args(["--burn-memory", "8MiB", "--sysroot"])
            .arg(node.sysroot())
            .arg("--state")
            .arg(node.out.path("state"))
            .arg("--json")
            .arg(node.out.path("report.json"));
        killed(&node, &mut hook, Duration::from_millis(random.below(800)));
    }
}
