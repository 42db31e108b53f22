//! The workers of a sentinel: one process a GPU, which works, falls silent and ends as it is
//! ordered to.

use std::ffi::OsString;
use std::sync::mpsc::Sender;
use std::time::Instant;

use super::super::devices::own_node;
use super::super::workload_process::{Follower, Start, WorkloadProcess, workload_terms};
use super::{Event, SentinelOptions};
use crate::interrupt::Interrupt;
use crate::process_stat;
use crate::worker::device_isolation::cuda_environment;
use crate::worker::listener::{ReportEnd, Reported};
use crate::worker::process::worker_program;
use crate::worker::protocol::{Message, RUN};
use crate::workload::orders::Order;
use crate::workload::{Assignment, CHANGE, Change, OnForeignProcess, Task};
use validator_core::facts::{GpuFacts, RequestedWork, WorkerEnd, WorkloadRun};
use validator_core::sentinel::policy::WorkerOutcome;
use validator_core::worker_id::WorkerId;

/// A worker ends when it is ordered to; JSON has no infinity.
const UNLIMITED_SECONDS: f64 = 1e9;
/// A folder in which no MPS daemon listens: the parent does not exist by convention.
// Source: Debian Policy 9.2.3.
const NO_MPS: &str = "/nonexistent/nvidia-mps";

/// Starts the worker of a GPU for this task.
pub(super) fn start(
    gpu: &GpuFacts,
    uuid: &str,
    task: Task,
    options: &SentinelOptions,
    events: &Sender<Event>,
    interrupt: &Interrupt,
) -> Result<WorkloadProcess<()>, String> {
    let id = WorkerId::new(task.name(), &[uuid], 0);
    let assignment = Assignment {
        id: id.clone(),
        devices: vec![uuid.to_owned()],
        memory: options.memory,
        requested: RequestedWork {
            seconds: UNLIMITED_SECONDS,
            passes: None,
        },
        on_foreign_process: OnForeignProcess::AwaitOrders,
        stands_by: false,
        task,
    };
    let text = serde_json::to_string(&assignment).map_err(|error| error.to_string())?;
    let mut arguments = ["worker", "workload", "--assignment", &text]
        .map(OsString::from)
        .to_vec();
    arguments.extend(own_node(gpu, &options.probe));
    let mut environment = cuda_environment(uuid);
    // A client of MPS would make users of other accounts wait for its end.
    // Source: nvidia-cuda-mps-control(1).
    environment.push(("CUDA_MPS_PIPE_DIRECTORY", Some(NO_MPS.to_owned())));
    let start = Start {
        id,
        program: worker_program(options.probe.worker_program.as_ref()),
        arguments,
        environment,
        terms: workload_terms(&options.probe.deadlines),
    };
    let follower = WorkerFollower {
        uuid: uuid.to_owned(),
        events: events.clone(),
        pid: 0,
        has_worked: false,
    };
    WorkloadProcess::start(start, follower, interrupt)
}

/// Sends an order to a worker. One that is gone does not receive it, and its end is an event.
pub(super) fn order(worker: &mut WorkloadProcess<()>, order: Order) {
    worker.write_line(order.line());
}

struct WorkerFollower {
    uuid: String,
    events: Sender<Event>,
    pid: u32,
    has_worked: bool,
}

impl Follower for WorkerFollower {
    type Run = ();

    fn started(&mut self, pid: u32, _at: Instant) {
        self.pid = pid;
        let uuid = self.uuid.clone();
        let _ = self.events.send(Event::WorkerStarted { uuid, pid });
    }

    fn hear(&mut self, message: &Message) {
        let Message::Field { name, value } = message else {
            return;
        };
        let uuid = self.uuid.clone();
        let event = match name.as_str() {
            CHANGE => serde_json::from_value::<Change>(value.clone())
                .ok()
                .map(|change| Event::WorkerChanged { uuid, change }),
            RUN => serde_json::from_value::<WorkloadRun>(value.clone())
                .ok()
                .map(|run| Event::WorkerRun {
                    uuid,
                    run: Box::new(run),
                }),
            _ => None,
        };
        if let Some(event) = event {
            self.has_worked |= matches!(event, Event::WorkerChanged { .. });
            let _ = self.events.send(event);
        }
    }

    fn conclude(self, reported: Reported) {
        let outcome = if is_stuck(self.pid) {
            let step = &reported.step;
            WorkerOutcome::Failed(format!(
                "its worker cannot be killed: uninterruptible sleep in the driver, in step {step}"
            ))
        } else {
            outcome_of(&reported, self.has_worked)
        };
        let uuid = self.uuid;
        let _ = self.events.send(Event::WorkerEnded { uuid, outcome });
    }
}

/// A process that was waited for in vain is still there, and is no zombie.
fn is_stuck(pid: u32) -> bool {
    process_stat::field::<char>(pid, 3).is_some_and(|it| it == 'D')
}

/// The evidence about a GPU from the end of its worker.
fn outcome_of(reported: &Reported, has_worked: bool) -> WorkerOutcome {
    let run = reported.fields.get(RUN).cloned();
    let run = run.and_then(|it| serde_json::from_value::<WorkloadRun>(it).ok());
    let own_end = run.and_then(|it| it.end.value().cloned());
    let end = match &reported.end {
        ReportEnd::Interrupted | ReportEnd::Dismissed => return WorkerOutcome::Obeyed,
        ReportEnd::Finished => own_end.unwrap_or(WorkerEnd::Finished),
        ReportEnd::Ended(end) => match own_end {
            Some(own) if reported.is_done && own != WorkerEnd::Finished => own,
            _ => end.clone(),
        },
    };
    let failed = |text: String| {
        if has_worked {
            WorkerOutcome::Failed(text)
        } else {
            WorkerOutcome::NotStarted(text)
        }
    };
    match end {
        WorkerEnd::Finished => WorkerOutcome::Obeyed,
        WorkerEnd::Busy(reason) => WorkerOutcome::Busy(reason),
        WorkerEnd::CudaError { call, name, .. } if name == "CUDA_ERROR_OUT_OF_MEMORY" => {
            WorkerOutcome::Busy(format!("{call} returned {name}"))
        }
        WorkerEnd::CudaError { call, name, code } => {
            failed(format!("{call} returned {name} ({code})"))
        }
        // An epilog that ends leftover processes is no fault of the GPU.
        WorkerEnd::Killed { signal: 9 | 15 } => {
            WorkerOutcome::Busy("its worker was killed by another process".to_owned())
        }
        WorkerEnd::Killed { signal } => failed(format!("its worker was ended by signal {signal}")),
        WorkerEnd::TimedOut { step, seconds } => {
            WorkerOutcome::Failed(format!("{step} did not return within {seconds} s"))
        }
        WorkerEnd::Exited { status, stderr } => {
            let last = stderr.lines().last().unwrap_or_default().to_owned();
            failed(format!("its worker exited with status {status}: {last}"))
        }
    }
}
