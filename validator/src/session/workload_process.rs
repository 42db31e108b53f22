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

use crate::interrupt::Interrupt;
use crate::probe::Deadlines;
use crate::worker::listener::{AfterDone, OnInterrupt, Orders, Reported, Terms, TimeLimit, listen};
use crate::worker::process::WorkerProcess;
use crate::worker::protocol::{GO, Message};
use validator_core::worker_id::WorkerId;

/// How a worker is started.
#[derive(Debug)]
pub(super) struct Start {
    /// Keys the process in [`crate::worker::own_processes`].
    pub(super) id: WorkerId,
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<OsString>,
    pub(super) environment: Vec<(&'static str, Option<String>)>,
    pub(super) deadlines: Deadlines,
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
                deadlines,
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
            let terms = Terms {
                time_limit: TimeLimit::Silence {
                    step: deadlines.cuda_kernel,
                    report: deadlines.burn_report,
                },
                after_done: AfterDone::ExitWell,
                on_interrupt: OnInterrupt::Terminate,
            };
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
