//! A node that passed and falls ill must not stay open (threat model: T3).

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use cluster::api_server::Fault;
use serde_json::{Value, json};

use crate::kubernetes::{Cluster, NODE, UNVALIDATED};
use crate::node::{said, validator};

/// How long an ill node may stay open.
const LIMIT: Duration = Duration::from_mins(1);
const XID_79: &[u8] =
    b"NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.";

/// The gate of a node that it has opened.
fn open_gate(cluster: &Cluster) -> Child {
    let state = cluster.node.out.path("state");
    let mut gate = cluster.gate(&["--simulated-ok", "--stay", "--state"]);
    gate.arg(state)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = gate.spawn().expect("the validator starts");
    until(Duration::from_mins(1), "the node is open", || {
        !cluster.taints().contains(&UNVALIDATED.to_owned())
    });
    child
}

fn until(limit: Duration, what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < limit, "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn is_closed(cluster: &Cluster) -> bool {
    cluster.taints().contains(&UNVALIDATED.to_owned())
}

#[test]
fn an_xid_79_closes_an_open_node_although_the_api_server_is_slow_and_others_change_the_node() {
    let cluster = Cluster::healthy("h200x1");
    let _kubelet = cluster.kubelet(|_| {});
    let gate = open_gate(&cluster);
    let path = format!("/api/v1/nodes/{NODE}");
    let slow = Fault::Slow(Duration::from_secs(12));
    cluster.server.fail("PATCH", &path, 1, slow);
    cluster.server.conflict(3);
    cluster.node.append_to_kernel_log(&[XID_79]);
    until(LIMIT, "the node is closed", || is_closed(&cluster));
    let output = gate.wait_with_output().expect("it ends");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{stdout}");
    assert_eq!(cluster.condition()["status"], "False");
    let message = cluster.condition()["message"].to_string();
    assert!(message.contains("kernel_log_xid"), "{message}");
    let report = cluster.node.out.read("report.json");
    let report: Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!(report["exit_code"], 1, "the report is of the ill node");
}

#[test]
fn a_driver_that_stops_answering_closes_an_open_node() {
    let cluster = Cluster::healthy("h200x1");
    let _kubelet = cluster.kubelet(|_| {});
    let gate = open_gate(&cluster);
    // As a driver that was replaced below the running node: every new process fails.
    let library = cluster.node.sysroot().join("dev/kmsg");
    std::fs::remove_file(&library).expect("removed");
    until(LIMIT, "the node is closed", || is_closed(&cluster));
    let output = gate.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(cluster.condition()["reason"], "HealthNotJudged");
}

#[test]
fn a_closure_that_was_not_heard_is_kept_over_a_restart() {
    let cluster = Cluster::healthy("h200x1");
    let _kubelet = cluster.kubelet(|_| {});
    let mut gate = open_gate(&cluster);
    let path = format!("/api/v1/nodes/{NODE}");
    cluster
        .server
        .fail("PATCH", &path, 1000, Fault::CutBeforeAnswer);
    cluster.node.append_to_kernel_log(&[XID_79]);
    let kept = cluster.node.out.path("state/closure.json");
    until(LIMIT, "the closure is kept", || kept.exists());
    assert!(!is_closed(&cluster));
    // The node reboots.
    gate.kill().expect("killed");
    gate.wait().expect("reaped");
    cluster.server.heal();
    let mut again = cluster.gate(&["--simulated-ok", "--state"]);
    again.arg(cluster.node.out.path("state"));
    let before = cluster.server.requests().len();
    let (code, stdout, stderr) = said(&mut again);
    assert_eq!(code, 1, "the Xid is still in the log: {stdout}{stderr}");
    assert!(stdout.contains("(kept from before)"), "{stdout}");
    assert!(is_closed(&cluster));
    assert!(cluster.server.requests().len() > before);
    assert!(!kept.exists(), "it was heard");
}

#[test]
fn facts_of_another_machine_or_boot_open_no_node() {
    let cluster = Cluster::healthy("h200x1");
    let gate = |change: &dyn Fn(&mut Value)| {
        let mut facts = cluster.facts.clone();
        // As if they were of real GPUs.
        facts["simulated"] = Value::Null;
        change(&mut facts);
        let path = cluster.node.out.write("facts.json", facts.to_string());
        let mut gate = validator();
        gate.args(["kubernetes", "gate", "--dry-run", "--node-name", NODE])
            .args(["--profile", &cluster.profile(""), "--judge"])
            .arg(path);
        said(&mut gate)
    };
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("read");
    let own = json!({"boot_id": boot_id.trim(), "machine_id": null});
    let foreign = json!({"boot_id": "11111111-2222-3333-4444-555555555555", "machine_id": null});
    let (code, _, stderr) = gate(&|facts| facts["host"]["identity"] = foreign.clone());
    assert_eq!(code, 3);
    assert!(
        stderr.contains("another machine, or this one before"),
        "{stderr}"
    );
    let (code, _, stderr) = gate(&|facts| {
        facts["host"]
            .as_object_mut()
            .expect("host")
            .remove("identity");
    });
    assert_eq!(code, 3);
    assert!(stderr.contains("do not name their machine"), "{stderr}");
    let (code, stdout, stderr) = gate(&|facts| facts["host"]["identity"] = own.clone());
    assert_ne!(code, 3, "{stdout}{stderr}");
    let (code, _, stderr) = gate(&|facts| {
        facts["host"]["identity"] = own.clone();
        facts["collected_at"] = "2020-01-01T00:00:00Z".into();
    });
    assert_eq!(code, 3);
    assert!(stderr.contains("s old"), "{stderr}");
}
