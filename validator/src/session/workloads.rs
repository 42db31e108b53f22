//! Runs workloads in worker processes and collects their runs.

use super::devices::device_to_use;
use super::standby::Standby;
use super::worked_gpus::{is_worked, why_not_worked};
use super::workload_process::{RunFollower, start_worker};
use crate::interrupt::Interrupt;
use crate::plan::{BurnOptions, random_seed};
use crate::probe::ProbeOptions;
use crate::workload::memory::MemoryTask;
use crate::workload::{Assignment, OnForeignProcess, Task};
use validator_core::facts::{Facts, Reading, RequestedWork, WorkloadRun};
use validator_core::worker_id::WorkerId;

/// Time limit of the memory test. Its one pass writes and reads the memory twice, 0.14 s for 128
/// GiB of an H200; a GPU that is not through by then is slower by two orders of magnitude, and the
/// check reports how much was verified.
// Source: BENCHMARKS.md, "Memory test".
const MEMORY_TEST_SECONDS: f64 = 30.0;

/// The memory test on every GPU that the burn works, all at once; one run for each in
/// `facts.load.runs`.
pub(super) fn test_memory(
    options: &BurnOptions,
    probe: &ProbeOptions,
    standby: &Standby,
    facts: &mut Facts,
    interrupt: &Interrupt,
) {
    let no_cuda = standby.no_cuda(facts);
    let requested = RequestedWork {
        seconds: MEMORY_TEST_SECONDS,
        passes: Some(1),
    };
    let mut started = Vec::new();
    let gpus = facts.gpus.iter();
    for (uuid, gpu) in gpus.filter_map(|gpu| Some((gpu.uuid.value()?, gpu))) {
        if !is_worked(uuid, options) {
            continue;
        }
        let task = Task::Memory(MemoryTask {
            seed: options.seed.unwrap_or_else(random_seed),
        });
        let id = WorkerId::new(task.name(), &[uuid], 0);
        let kernel = facts.load.cuda_kernel.get(uuid);
        let refusal = why_not_worked(gpu, options, no_cuda.as_deref(), kernel);
        let worker = match refusal {
            Some(refusal) => Err(refusal),
            None => device_to_use(gpu, uuid)
                .and_then(|device| {
                    let assignment = Assignment {
                        id: id.clone(),
                        devices: vec![device.to_owned()],
                        memory: options.memory,
                        requested,
                        on_foreign_process: if options.share {
                            OnForeignProcess::Report
                        } else {
                            OnForeignProcess::Yield
                        },
                        stands_by: false,
                        task,
                    };
                    let follower = RunFollower::of(&assignment);
                    start_worker(&assignment, gpu, probe, follower, interrupt)
                })
                .map_err(Reading::NotRead),
        };
        started.push((id, worker));
    }
    for (id, worker) in started {
        let run = match worker {
            Ok(worker) => worker.join().unwrap_or_else(|| {
                let panicked = "the thread of this worker panicked".to_owned();
                WorkloadRun::empty(id, requested, Reading::NotRead(panicked))
            }),
            Err(refusal) => WorkloadRun::empty(id, requested, refusal),
        };
        facts.load.runs.push(run);
    }
}
