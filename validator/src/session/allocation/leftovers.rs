//! What the allocation test found before its first worker, and what is left after its last.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use super::host_state::{shared_memory, uvm_references};
use super::view::View;
use crate::process_stat;
use validator_core::allocation::leftovers;
use validator_core::facts::{AllocationSnapshot, AllocationWorker, Reading};

const POLL: Duration = Duration::from_millis(20);

/// The state now, `since` the last worker ended.
pub(super) fn snapshot(
    view: &View,
    workers: &[AllocationWorker],
    sysroot: Option<&Path>,
    since: Duration,
) -> Reading<AllocationSnapshot> {
    if let Some(trouble) = view.trouble() {
        return Reading::NotRead(trouble);
    }
    let descriptors = match std::fs::read_dir("/proc/self/fd") {
        Ok(entries) => entries.count() as u64,
        Err(error) => return Reading::NotRead(format!("/proc/self/fd: {error}")),
    };
    let pids = workers.iter().filter_map(|it| it.pid);
    let own = std::process::id();
    let processes: BTreeSet<u32> = pids
        .filter(|pid| process_stat::parent(*pid) == Some(own))
        .collect();
    let is_zombie = |pid: &u32| process_stat::field::<char>(*pid, 3) == Some('Z');
    Reading::Value(AllocationSnapshot {
        seconds: since.as_secs_f64(),
        gpus: view.gpus(),
        descriptors,
        zombies: processes.iter().copied().filter(is_zombie).collect(),
        processes,
        shared_memory: shared_memory(sysroot),
        uvm_references: uvm_references(sysroot),
    })
}

/// The first state in which nothing is left of the test, or the one at the end of the time limit.
pub(super) fn await_nothing_left(
    view: &View,
    workers: &[AllocationWorker],
    sysroot: Option<&Path>,
    before: Option<&AllocationSnapshot>,
    limit: Duration,
) -> Reading<AllocationSnapshot> {
    let began = Instant::now();
    let pids: BTreeSet<u32> = workers.iter().filter_map(|it| it.pid).collect();
    loop {
        let state = snapshot(view, workers, sysroot, began.elapsed());
        let is_clean = match (&state, before) {
            (Reading::Value(after), Some(before)) => leftovers(before, after, &pids).is_empty(),
            _ => true,
        };
        if is_clean || began.elapsed() >= limit {
            return state;
        }
        std::thread::sleep(POLL);
    }
}
