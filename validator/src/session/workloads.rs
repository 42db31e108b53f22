//! Runs workloads in worker processes and collects their runs.

use std::ffi::OsString;

use super::burn::{is_worked, why_not_worked};
use super::devices::{device_to_use, own_node};
use super::standby::Standby;
use super::workload_process::{Follower, Start, WorkloadProcess};
use crate::interrupt::Interrupt;
use crate::plan::BurnOptions;
use crate::probe::ProbeOptions;
use crate::worker::device_isolation::cuda_environment;
use crate::worker::listener::{ReportEnd, Reported};
use crate::worker::process::worker_program;
use crate::worker::protocol::{Message, RUN};
use crate::workload::memory::MemoryTask;
use crate::workload::{Assignment, OnForeignProcess, Task};
use validator_core::facts::{Facts, GpuFacts, Reading, RequestedWork, WorkerEnd, WorkloadRun};
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
            seed: options.seed.unwrap_or_else(super::burn::random_seed),
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

/// Starts the worker of an assignment with one GPU.
pub(super) fn start_worker<F: Follower<Run = WorkloadRun>>(
    assignment: &Assignment,
    gpu: &GpuFacts,
    probe: &ProbeOptions,
    follower: F,
    interrupt: &Interrupt,
) -> Result<WorkloadProcess<WorkloadRun>, String> {
    let text = serde_json::to_string(assignment).map_err(|error| error.to_string())?;
    let mut arguments = ["worker", "workload", "--assignment", &text]
        .map(OsString::from)
        .to_vec();
    arguments.extend(own_node(gpu, probe));
    let start = Start {
        id: assignment.id.clone(),
        program: worker_program(probe.worker_program.as_ref()),
        arguments,
        environment: cuda_environment(&assignment.devices.join(",")),
        deadlines: probe.deadlines,
    };
    WorkloadProcess::start(start, follower, interrupt)
}

/// Keeps the last report of a worker.
pub(super) struct RunFollower {
    id: WorkerId,
    requested: RequestedWork,
}

impl RunFollower {
    pub(super) fn of(assignment: &Assignment) -> Self {
        Self {
            id: assignment.id.clone(),
            requested: assignment.requested,
        }
    }
}

impl Follower for RunFollower {
    type Run = WorkloadRun;

    fn hear(&mut self, _message: &Message) {}

    /// The last report of the worker, with the end of its process where that was no good one.
    fn conclude(self, mut reported: Reported) -> WorkloadRun {
        let last = reported.fields.remove(RUN);
        let last = last.and_then(|it| serde_json::from_value::<WorkloadRun>(it).ok());
        let is_done = reported.is_done;
        let end = match reported.end {
            ReportEnd::Ended(end) => Some(Reading::Value(end)),
            ReportEnd::Finished => None,
            ReportEnd::Interrupted | ReportEnd::Dismissed => {
                Some(Reading::NotRead("the run was interrupted".to_owned()))
            }
        };
        let has_own_end = |run: &WorkloadRun| {
            let end = run.end.value();
            is_done && end.is_some_and(|it| *it != WorkerEnd::Finished)
        };
        match (last, end) {
            (Some(run), Some(_)) if has_own_end(&run) => run,
            (Some(run), Some(end)) => WorkloadRun { end, ..run },
            (Some(run), None) => run,
            (None, end) => {
                let nothing = || Reading::NotRead("the worker ended without a result".to_owned());
                WorkloadRun::empty(self.id, self.requested, end.unwrap_or_else(nothing))
            }
        }
    }
}
