//! A kill at a random moment of each command leaves no torn report, no stale green and no orphan
//! (threat model: T1).
//!
//! Each test prints its seed. `GPU_BRINGUP_ATTACK_TRIALS` is the number of kills of each command.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use super::old_reports::{is_old, old_report};
use super::{Random, seed, trials};
use crate::kubernetes::Cluster;
use crate::node::Node;
use crate::processes::{Worker, eventually, workers_of};

/// Before its first instructions a process can do nothing about an old report; after so much time
/// on a processor it has read its arguments.
const START: Duration = Duration::from_millis(60);

struct Killed {
    /// It had not ended by itself.
    at_work: bool,
    /// Its main thread had had [`START`].
    had_begun: bool,
}

/// Kills `command` after `moment`. Its workers end.
fn kill(command: &mut Command, moment: Duration) -> Killed {
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut child = child.expect("the validator starts");
    std::thread::sleep(moment);
    let workers = workers_of(child.id());
    let on_processor = time_on_processor(child.id());
    // It may have ended in this moment.
    let _ = child.kill();
    let status = child.wait().expect("it ends");
    eventually("the end of the workers", || {
        workers.iter().all(Worker::is_gone)
    });
    Killed {
        at_work: status.code().is_none(),
        had_begun: on_processor >= START,
    }
}

/// Of the main thread.
// Source: sched-stats(7): the first number of /proc/PID/schedstat, in nanoseconds.
fn time_on_processor(pid: u32) -> Duration {
    let text = std::fs::read_to_string(format!("/proc/{pid}/schedstat"));
    let text = text.unwrap_or_default();
    let nanoseconds = text.split(' ').next().and_then(|it| it.parse().ok());
    Duration::from_nanos(nanoseconds.unwrap_or_default())
}

/// Kills a command that writes `report.json` of the node, over an old green one.
fn kill_over_a_green_report(node: &Node, limit_ms: u64, mut command: impl FnMut() -> Command) {
    let seed = seed();
    println!("GPU_BRINGUP_ATTACK_SEED={seed}");
    let mut random = Random::new(seed);
    for trial in 0..trials(4) {
        let moment = Duration::from_millis(random.below(limit_ms));
        let report = old_report(&node.out);
        let killed = kill(&mut command(), moment);
        // Read after each kill: a torn report is none at any moment.
        let is_old = is_old(&report);
        assert!(
            !(killed.at_work && killed.had_begun && is_old),
            "trial {trial}: the old report is there after a kill at {moment:?}"
        );
    }
}

#[test]
fn a_killed_run() {
    let node = Node::healthy("h200x1");
    kill_over_a_green_report(&node, 1200, || node.run_command(&["--level", "standard"]));
}

#[test]
fn a_killed_burn() {
    let node = Node::healthy("h200x1");
    kill_over_a_green_report(&node, 1200, || node.burn_command(&["--duration", "1s"]));
}

#[test]
fn a_killed_hook() {
    let node = Node::healthy("h200x1");
    kill_over_a_green_report(&node, 800, || {
        let mut hook = node.validator();
        hook.args(["hook", "pre-job", "--simulated-ok", "--burn", "200ms"])
            .args(["--burn-memory", "8MiB", "--sysroot"])
            .arg(node.sysroot())
            .arg("--state")
            .arg(node.out.path("state"))
            .arg("--json")
            .arg(node.out.path("report.json"));
        hook
    });
}

#[test]
fn a_killed_allocation_test() {
    let node = Node::healthy("h200x1");
    kill_over_a_green_report(&node, 1500, || {
        let mut test = node.validator();
        test.args(["allocation", "--simulated-ok", "--duration", "0.5s"])
            .args(["--deadline-scale", "0.2", "--sysroot"])
            .arg(node.sysroot())
            .arg("--json")
            .arg(node.out.path("report.json"));
        test
    });
}

#[test]
fn a_killed_gate() {
    let cluster = Cluster::healthy("h200x1");
    let _kubelet = cluster.kubelet(|_| {});
    let state = cluster.node.out.path("state");
    kill_over_a_green_report(&cluster.node, 1500, || {
        let mut gate = cluster.gate(&["--simulated-ok", "--state"]);
        gate.arg(&state);
        gate
    });
}

/// The text of a file that is replaced while the sentinel runs: it is absent or whole.
fn assert_whole(path: &Path) {
    if let Ok(text) = std::fs::read_to_string(path) {
        let status: Result<Value, _> = serde_json::from_str(&text);
        assert!(status.is_ok(), "{}: {text:?}", path.display());
    }
}

#[test]
fn a_killed_sentinel() {
    let node = Node::healthy("h200x1");
    let seed = seed();
    println!("GPU_BRINGUP_ATTACK_SEED={seed}");
    let mut random = Random::new(seed);
    let copy = node.out.path("status.json");
    for trial in 0..trials(4) {
        let mut sentinel = node.validator();
        sentinel
            .args(["sentinel", "--simulated-ok", "--grace", "0.1s", "--sysroot"])
            .arg(node.sysroot())
            .arg("--status-file")
            .arg(&copy)
            .env("GPU_VALIDATOR_SENTINEL_MEMORY", "4MiB");
        kill(&mut sentinel, Duration::from_millis(random.below(1500)));
        assert_whole(&copy);
        assert_whole(&node.folder().join("run/sentinel.json"));
        // The status of a sentinel that is gone is no statement on the GPUs.
        let status = node.validator().args(["sentinel", "status"]).output();
        let status = status.expect("the validator starts");
        assert_eq!(status.status.code(), Some(2), "trial {trial}: {status:?}");
        eventually("the memory of its worker", || {
            node.state().state().gpu(0).memory_used() == 0
        });
    }
}
