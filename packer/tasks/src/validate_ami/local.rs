//! A run on this machine.

use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use harness::simulate::PreparedNode;
use validator_remote::command::{Ending, Run, Streams};
use validator_remote::interrupts::Request;
use xtask::workspace;

pub(crate) fn run(run: &Run<'_>, node: Option<&PreparedNode>) -> anyhow::Result<Ending> {
    let sudo = run.sudo && !rustix::process::geteuid().is_root();
    let mut command = if sudo {
        through_sudo(run)?
    } else {
        Command::new(run.binary)
    };
    command.args(run.arguments(run.reports.path(), run.profile));
    // The validator reports on the library path, and must see the user's.
    workspace::without_cargos_library_path(&mut command);
    if let Some(node) = node {
        node.apply(&mut command);
    }
    // In a group of its own the validator hears of Ctrl-C once, from us, and not a second time from
    // the terminal.
    command
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .with_context(|| format!("{} could not be started", run.binary.display()))?;
    let streams = Streams::follow(&mut child, run)?;
    let child_id = Pid::from_child(&child);
    let status = run.interrupts.while_waiting(
        move |request| send(request, child_id, sudo),
        || child.wait(),
    )?;
    streams.finish();
    Ok(Ending::of(status))
}

/// Signals the validator alone, so that it can end its workers in order; kills the whole group.
/// Failing is no trouble: it may have ended in this very moment.
fn send(request: Request, child: Pid, sudo: bool) {
    let id = child.as_raw_nonzero();
    if sudo {
        // What sudo runs belongs to root; sudo passes TERM on.
        let arguments = match request {
            Request::Stop => ["-TERM".to_owned(), id.to_string()],
            Request::Kill => ["-KILL".to_owned(), format!("-{id}")],
        };
        let _ = Command::new("sudo")
            .args(["-n", "kill"])
            .args(arguments)
            .status();
    } else {
        let _ = match request {
            Request::Stop => kill_process(child, Signal::TERM),
            Request::Kill => kill_process_group(child, Signal::KILL),
        };
    }
}

/// sudo answers 1 when it refuses, which would read as a failed check: so it is queried beforehand.
fn through_sudo(run: &Run<'_>) -> anyhow::Result<Command> {
    let allowed = Command::new("sudo")
        .args(["-n", "true"])
        .output()
        .context("sudo could not be started")?;
    ensure!(
        allowed.status.success(),
        "sudo asks for a password here ({}); run `sudo -v` first, or leave --sudo out",
        String::from_utf8_lossy(&allowed.stderr).trim()
    );
    let mut command = Command::new("sudo");
    command.args(["-n", "--"]).arg(run.binary);
    Ok(command)
}
