//! The process of a worker: started, released or dismissed, and followed to its end.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ChildStdin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::Instant;

use super::devices::own_node;
use crate::interrupt::Interrupt;
use crate::probe::{Deadlines, ProbeOptions};
use crate::worker::device_isolation::cuda_environment;
use crate::worker::listener::{
    AfterDone, OnInterrupt, Orders, ReportEnd, Reported, Terms, TimeLimit, listen,
};
use crate::worker::process::{WorkerProcess, worker_program};
use crate::worker::protocol::{GO, Message, RUN};
use crate::workload::Assignment;
use validator_core::facts::{GpuFacts, Reading, RequestedWork, WorkerEnd, WorkloadRun};
use validator_core::worker_id::WorkerId;

/// How a worker is started.
#[derive(Debug)]
pub(super) struct Start {
    /// Keys the process in [`crate::worker::own_processes`].
    pub(super) id: WorkerId,
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<OsString>,
    pub(super) environment: Vec<(&'static str, Option<String>)>,
    pub(super) terms: Terms,
}

/// The terms of a worker that reports twice a second, and may report once more when it is stopped.
pub(super) fn workload_terms(deadlines: &Deadlines) -> Terms {
    Terms {
        time_limit: TimeLimit::Silence {
            step: deadlines.cuda_kernel,
            report: deadlines.burn_report,
        },
        after_done: AfterDone::ExitWell,
        on_interrupt: OnInterrupt::Terminate,
    }
}

/// Receives the messages of one worker, on a thread of its own.
pub(super) trait Follower: Send + 'static {
    /// What the worker's reports come to.
    type Run: Send;

    fn started(&mut self, _pid: u32, _at: Instant) {}

    fn hear(&mut self, message: &Message);

    fn conclude(self, reported: Reported) -> Self::Run;
}

/// A worker that prepares, stands by or works.
pub(super) struct WorkloadProcess<R> {
    input: Option<ChildStdin>,
    orders: Arc<Orders>,
    thread: JoinHandle<Option<R>>,
}

impl<R: Send + 'static> WorkloadProcess<R> {
    /// Starts the process, and a thread that listens to it.
    pub(super) fn start<F: Follower<Run = R>>(
        start: Start,
        mut follower: F,
        interrupt: &Interrupt,
    ) -> Result<Self, String> {
        let orders = Arc::new(Orders::default());
        let (send_input, input) = sync_channel(1);
        let (interrupt, heeded) = (interrupt.clone(), Arc::clone(&orders));
        // The kernel kills a worker when the thread that started it ends, so that it is the one
        // that listens.
        let follow = move || {
            let Start {
                id,
                program,
                arguments,
                environment,
                terms,
            } = start;
            let started = Instant::now();
            let worker = match WorkerProcess::start_with_input(&program, &arguments, &environment) {
                Ok((mut worker, input)) => {
                    worker.register_as(id);
                    let _ = send_input.send(Ok(input));
                    worker
                }
                Err(error) => {
                    let reason = format!("cannot start {}: {error}", program.display());
                    let _ = send_input.send(Err(reason));
                    return None;
                }
            };
            follower.started(worker.pid(), started);
            let mut hear = |message: &Message| follower.hear(message);
            let reported = listen(worker, terms, &heeded, &interrupt, &mut hear);
            Some(follower.conclude(reported))
        };
        let thread = std::thread::Builder::new()
            .spawn(follow)
            .map_err(|error| format!("no thread for a worker could be started: {error}"))?;
        let input = input.recv().map_err(|error| error.to_string())??;
        Ok(Self {
            input,
            orders,
            thread,
        })
    }

    /// Releases it from standing by. A worker that has ended does not receive it, and its end holds
    /// the reason.
    pub(super) fn go(&mut self) {
        self.orders.released.store(true, Ordering::Release);
        if let Some(input) = &mut self.input {
            let _ = writeln!(input, "{GO}");
        }
    }

    /// Sends an order to a worker that reads its standard input all the time.
    pub(super) fn write_line(&mut self, line: &str) {
        if let Some(input) = &mut self.input {
            // A pipe holds thousands of orders; a worker that is gone does not need this one.
            let _ = writeln!(input, "{line}");
        }
    }

    /// Kills a worker that is not needed.
    pub(super) fn dismiss(&self) {
        self.orders.dismissed.store(true, Ordering::Release);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for the end; `None` where the listening thread panicked. The worker is gone then,
    /// unless the driver keeps it.
    pub(super) fn join(self) -> Option<R> {
        self.thread.join().ok().flatten()
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
    let start = start_of(assignment, gpu, probe, workload_terms(&probe.deadlines))?;
    WorkloadProcess::start(start, follower, interrupt)
}

/// How the worker of an assignment with one GPU is started.
pub(super) fn start_of(
    assignment: &Assignment,
    gpu: &GpuFacts,
    probe: &ProbeOptions,
    terms: Terms,
) -> Result<Start, String> {
    let text = serde_json::to_string(assignment).map_err(|error| error.to_string())?;
    let mut arguments = ["worker", "workload", "--assignment", &text]
        .map(OsString::from)
        .to_vec();
    arguments.extend(own_node(gpu, probe));
    Ok(Start {
        id: assignment.id.clone(),
        program: worker_program(probe.worker_program.as_ref()),
        arguments,
        environment: cuda_environment(&assignment.devices.join(",")),
        terms,
    })
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
