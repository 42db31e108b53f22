//! The processes that this one started, so that none of them is taken for a foreign process.
//!
//! A process is known by its number in this process's PID namespace and by its start time: numbers
//! are reused.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::process_stat::start_ticks;
use validator_core::worker_id::WorkerId;

/// Number and start time, in this process's namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ProcessKey {
    pid: u32,
    start_ticks: u64,
}

static REGISTERED: Mutex<BTreeMap<ProcessKey, Option<WorkerId>>> = Mutex::new(BTreeMap::new());

fn lock() -> MutexGuard<'static, BTreeMap<ProcessKey, Option<WorkerId>>> {
    REGISTERED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registers a child that was started and not yet reaped, so that its number is its own.
pub(super) fn register(pid: u32, id: Option<WorkerId>) -> Option<ProcessKey> {
    let start_ticks = start_ticks(pid)?;
    let key = ProcessKey { pid, start_ticks };
    lock().insert(key, id);
    Some(key)
}

/// Forgets a child that is gone.
pub(super) fn remove(key: ProcessKey) {
    lock().remove(&key);
}

/// Whether the process with this number is this one or one that it started, workers included.
pub(crate) fn contains(pid: u32) -> bool {
    pid == std::process::id() || key_of(pid).is_some_and(|it| lock().contains_key(&it))
}

/// Sends a signal to the process groups that these processes lead, each with what it started.
pub(crate) fn signal_groups(signal: Signal) {
    for key in lock().keys() {
        // A number that was given back belongs to a stranger.
        let own = key_of(key.pid).filter(|it| it == key);
        let pid = own.and_then(|it| Pid::from_raw(i32::try_from(it.pid).ok()?));
        if let Some(pid) = pid {
            // It may have ended in this moment.
            let _ = kill_process_group(pid, signal);
        }
    }
}

fn key_of(pid: u32) -> Option<ProcessKey> {
    let start_ticks = start_ticks(pid)?;
    Some(ProcessKey { pid, start_ticks })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_own_until_it_is_gone_and_a_reused_number_is_not() {
        let mut child = std::process::Command::new("/bin/sleep")
            .arg("600")
            .spawn()
            .expect("sleep starts");
        let pid = child.id();
        assert!(!contains(pid));
        let key = register(pid, None).expect("it runs");
        assert!(contains(pid));
        // Another process with the same number started at another time.
        let reused = ProcessKey {
            start_ticks: key.start_ticks + 1,
            ..key
        };
        assert_ne!(key_of(pid), Some(reused));
        remove(key);
        assert!(!contains(pid));
        child.kill().expect("it is killed");
        child.wait().expect("it is reaped");
        assert!(contains(std::process::id()));
    }
}
