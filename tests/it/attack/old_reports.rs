//! An old green report must not outlive a new run that is not green (threat model: T1).

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::node::{Node, Scratch, said};

const GREEN: &str = r#"{"exit_code": 0, "verdict": "pass", "incomplete": null}"#;

/// An output that an earlier run left.
pub(super) fn old_report(out: &Scratch) -> PathBuf {
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

/// Whether the report of the earlier run is still there; one that is there is whole.
pub(super) fn is_old(path: &Path) -> bool {
    let Ok(text) = std::fs::read_to_string(path) else {
        return false;
    };
    let report: Result<Value, _> = serde_json::from_str(&text);
    assert!(report.is_ok(), "a torn report: {text:?}");
    text == GREEN
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
