//! Ctrl-Z. Workers have process groups of their own, so that the terminal's signal reaches this
//! process alone: it stops them before itself, and continues them when it goes on.

use std::io::{IsTerminal as _, Write as _};

use rustix::process::Signal;
use signal_hook::consts::{SIGSTOP, SIGTSTP};
use signal_hook::iterator::Signals;

use crate::process_stat;
use crate::worker::own_processes;

/// From now on SIGTSTP stops the workers, too. Where the host refuses a thread it stops this
/// process alone, as the kernel does by itself.
pub(crate) fn stop_with_workers() {
    let follow = || {
        if let Ok(mut signals) = Signals::new([SIGTSTP]) {
            signals.forever().for_each(|_| stop());
        }
    };
    // Without the thread there is no handler either.
    let _ = crate::threads::spawn("for Ctrl-Z", follow);
}

fn stop() {
    // The kernel does the same: with no shell that could continue it, a job would stand still for
    // ever.
    if is_orphaned(std::process::id()) {
        return;
    }
    if std::io::stderr().is_terminal() {
        let text =
            "stopped, and all workers with it: they keep their GPU memory until `fg` or the end";
        let _ = writeln!(std::io::stderr(), "{text}");
    }
    own_processes::signal_groups(Signal::STOP);
    // To this thread, which stops in the call, and all others with it. A signal to the process may
    // be taken by another thread, and the workers were continued before this one stood still.
    let _ = signal_hook::low_level::raise(SIGSTOP);
    own_processes::signal_groups(Signal::CONT);
}

/// Whether no process of the session that is outside of the process group started it.
// Source: credentials(7), setpgid(2): the terminal does not stop an orphaned process group.
fn is_orphaned(pid: u32) -> bool {
    let Some(own) = Place::of(pid) else {
        return true;
    };
    let mut ancestor = process_stat::parent(pid);
    while let Some((pid, place)) = ancestor.and_then(|it| Some((it, Place::of(it)?))) {
        if place.session != own.session {
            return true;
        }
        if place.group != own.group {
            return false;
        }
        ancestor = process_stat::parent(pid);
    }
    true
}

struct Place {
    group: i32,
    session: i32,
}

impl Place {
    fn of(pid: u32) -> Option<Self> {
        Some(Self {
            group: process_stat::field(pid, 5)?,
            session: process_stat::field(pid, 6)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_session_of_its_own_is_orphaned_and_a_group_below_this_process_is_not() {
        use std::os::unix::process::CommandExt as _;
        let sleeps = |command: &mut Command| {
            let mut child = command.arg("600").spawn().expect("it starts");
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
            // It has its place once it is another program.
            while std::fs::read(format!("/proc/{}/comm", child.id()))
                .ok()
                .as_deref()
                != Some(b"sleep\n")
            {
                assert!(std::time::Instant::now() < deadline, "no sleep");
                std::thread::yield_now();
            }
            let is_orphaned = is_orphaned(child.id());
            child.kill().expect("killed");
            child.wait().expect("reaped");
            is_orphaned
        };
        assert!(!sleeps(Command::new("sleep").process_group(0)));
        assert!(sleeps(Command::new("setsid").arg("sleep")));
    }
}
