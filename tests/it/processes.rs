//! The validator's processes, inspected and disturbed from outside.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

/// A `gpu-validator worker …`.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) pid: u32,
    /// `nvml`, `burn` and their like.
    pub(crate) task: String,
    pub(crate) arguments: Vec<String>,
}

impl Worker {
    pub(crate) fn is_gone(&self) -> bool {
        // A zombie runs no more; who reaps it, when its parent was killed, is not the validator's
        // to say.
        arguments(self.pid).is_empty()
    }
}

fn arguments(pid: u32) -> Vec<String> {
    texts(pid, "cmdline")
}

/// The environment with which this process was started.
pub(crate) fn environment_of(pid: u32) -> BTreeMap<String, String> {
    let variables = texts(pid, "environ");
    let pairs = variables.iter().filter_map(|it| it.split_once('='));
    pairs
        .map(|(name, value)| (name.into(), value.into()))
        .collect()
}

/// A file of texts in `/proc` of a process, of which each ends with a zero; nothing of one that is
/// gone.
fn texts(pid: u32, file: &str) -> Vec<String> {
    let text = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let text = String::from_utf8_lossy(&text).into_owned();
    text.split_terminator('\0').map(str::to_owned).collect()
}

/// The workers that this process started and that still run.
pub(crate) fn workers_of(parent: u32) -> Vec<Worker> {
    let processes = std::fs::read_dir("/proc").expect("/proc is mounted");
    let pids = processes.filter_map(|it| it.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let is_child = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // The name in parentheses may hold anything; state and parent follow the last of them.
        let parent_of = stat
            .rsplit_once(") ")
            .and_then(|(_, it)| it.split(' ').nth(1));
        parent_of == Some(parent.to_string().as_str())
    };
    let workers = pids.filter(is_child).filter_map(|pid| {
        let arguments = arguments(pid);
        let at = arguments.iter().position(|it| it == "worker")?;
        let burns = |it: &String| it.contains(r#""task":{"burn":"#);
        let task = match arguments.get(at + 1)?.as_str() {
            "workload" if arguments.iter().any(burns) => "burn",
            task => task,
        };
        let task = task.to_owned();
        Some(Worker {
            pid,
            task,
            arguments,
        })
    });
    workers.collect()
}

pub(crate) fn signal(pid: u32, name: &str) {
    let sent = Command::new("kill")
        .args(["-s", name, &pid.to_string()])
        .status();
    assert!(sent.is_ok_and(|it| it.success()), "kill -s {name} {pid}");
}

/// Has these processes stand still for so long, as when a job is suspended or a virtual machine
/// paused.
pub(crate) fn suspend(pids: &[u32], time: Duration) {
    for pid in pids {
        signal(*pid, "STOP");
    }
    std::thread::sleep(time);
    for pid in pids {
        signal(*pid, "CONT");
    }
}

/// Waits for something that takes moments.
pub(crate) fn eventually(what: &str, mut happened: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_mins(1);
    while !happened() {
        assert!(Instant::now() < deadline, "waited a minute for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
