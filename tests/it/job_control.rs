//! Ctrl-Z and `fg`, typed on a terminal.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::node::{Node, in_place_of};
use crate::processes::{Worker, eventually, workers_of};

/// A shell whose foreground job is the validator.
struct Shell {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    job: u32,
}

impl Shell {
    fn start(command: &std::process::Command) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/shell_with_jobs.py");
        let mut shell = in_place_of(command, "python3");
        shell.arg(script).arg(command.get_program());
        shell.args(command.get_args());
        shell.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = shell.spawn().expect("python3");
        let input = child.stdin.take().expect("a pipe");
        let output = child.stdout.take().expect("a pipe");
        let mut shell = Self {
            child,
            input,
            output: BufReader::new(output),
            job: 0,
        };
        shell.job = shell.line().parse().expect("a process id");
        shell
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    fn order(&mut self, order: &str) {
        writeln!(self.input, "{order}").expect("it reads");
    }
}

/// A test that fails leaves no validator that works the machine.
impl Drop for Shell {
    fn drop(&mut self) {
        let has_ended = matches!(self.child.try_wait(), Ok(Some(_)));
        let _ = self.child.kill();
        let _ = self.child.wait();
        if !has_ended {
            crate::processes::signal(self.job, "KILL");
        }
    }
}

fn state_of(pid: u32) -> char {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, it)| it.chars().next());
    state.unwrap_or('-')
}

/// The signal was sent before the validator stopped; a thread in a system call stops on its return.
fn await_stopped(workers: &[Worker]) {
    for worker in workers {
        // Stopped, or ended meanwhile.
        let is_stopped = || ['T', 'Z', '-'].contains(&state_of(worker.pid));
        eventually(&format!("the stop of {worker:?}"), is_stopped);
    }
}

#[test]
fn ctrl_z_stops_a_burn_with_its_workers_and_fg_continues_them() {
    let node = Node::healthy("h100-pcie-2");
    let command = node.burn_command(&["--duration", "3s"]);
    let mut shell = Shell::start(&command);
    let launches = || node.state().state().gpu(1).launches();
    eventually("the load", || launches() > 20);
    let workers = workers_of(shell.job);
    assert!(workers.iter().any(|it| it.task == "sensors"), "{workers:?}");
    shell.order("ctrl-z");
    assert_eq!(shell.line(), "stopped");
    assert_eq!(state_of(shell.job), 'T');
    await_stopped(&workers);
    let before = launches();
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(launches(), before, "the GPUs are at work");
    shell.order("fg");
    let status = shell.child.wait().expect("it ends");
    assert_eq!(status.code(), Some(0), "{}", node.out.read("report.json"));
    assert!(launches() > before);
    // What stood still is no burn time.
    let facts: Value = serde_json::from_str(&node.out.read("facts.json")).expect("JSON");
    for run in facts["load"]["burn"].as_object().expect("by UUID").values() {
        let seconds = run["value"]["measured_s"].as_f64().expect("a time");
        assert!((2.9..3.9).contains(&seconds), "{run}");
        assert!(run["value"]["precisions"][0]["products_verified"].as_u64() > Some(0));
    }
}

#[test]
fn ctrl_z_stops_a_sentinel_with_its_workers_and_fg_continues_them() {
    let node = Node::healthy("h200x1");
    let mut sentinel = node.validator();
    sentinel.args(["sentinel", "--simulated-ok", "--grace", "0.1s", "--sysroot"]);
    sentinel.arg(node.sysroot());
    sentinel.env("GPU_VALIDATOR_SENTINEL_MEMORY", "4MiB");
    let mut shell = Shell::start(&sentinel);
    let launches = || node.state().state().gpu(0).launches();
    eventually("work", || launches() > 5);
    let workers = workers_of(shell.job);
    shell.order("ctrl-z");
    assert_eq!(shell.line(), "stopped");
    await_stopped(&workers);
    let before = launches();
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(launches(), before, "the GPU is at work");
    shell.order("fg");
    eventually("more work", || launches() > before + 5);
    crate::processes::signal(shell.job, "TERM");
    assert_eq!(shell.child.wait().expect("it ends").code(), Some(0));
}
