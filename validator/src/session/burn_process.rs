//! The worker that burns one GPU: its messages become the state of the burn, the check kernel's
//! result and the burn's run.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Instant;

use super::burn_state::State;
use super::devices::device_to_use;
use super::workload_process::{Follower, WorkloadProcess, start_of, workload_terms};
use crate::interrupt::Interrupt;
use crate::plan::BurnOptions;
use crate::probe::ProbeOptions;
use crate::worker::clock;
use crate::worker::listener::{ReportEnd, Reported};
use crate::worker::protocol::{LOAD_BEGAN, Message, RUN};
use crate::workload::contention::busy_if_others_have_it;
use crate::workload::gemm::burn::{BurnTask, DETAIL, KERNEL};
use crate::workload::{Assignment, OnForeignProcess, Task};
use validator_core::facts::{
    BurnRun, GpuFacts, KernelRun, Reading, RequestedWork, WorkerEnd, WorkloadRun,
};
use validator_core::worker_id::WorkerId;

/// JSON has no infinity.
const UNLIMITED_SECONDS: f64 = 1e9;

/// The one worker that burns the GPU with this UUID.
pub(super) fn burn_id(uuid: &str) -> WorkerId {
    WorkerId::new("burn", &[uuid], 0)
}

/// The assignment of this GPU's worker.
pub(super) fn assignment_for(
    options: &BurnOptions,
    (uuid, gpu): (&str, &GpuFacts),
    seed: u64,
    check_kernel: bool,
) -> Result<Assignment, String> {
    Ok(Assignment {
        id: burn_id(uuid),
        devices: vec![device_to_use(gpu, uuid)?.to_owned()],
        memory: options.memory,
        // One pass over its precisions, which keep to the burn's time themselves: suspended time
        // does not count.
        requested: RequestedWork {
            seconds: UNLIMITED_SECONDS,
            passes: Some(1),
        },
        on_foreign_process: OnForeignProcess::ReadOnRefusal,
        stands_by: true,
        task: Task::Burn(BurnTask {
            seconds: options.duration.as_secs_f64(),
            precisions: options.precisions.clone(),
            inject: options.inject,
            seed,
            engine: options.engine,
            check_kernel,
        }),
    })
}

/// A worker that prepares, stands by, or burns.
pub(super) struct BurnProcess {
    process: WorkloadProcess<BurnRun>,
    kernel: Option<Receiver<Reading<KernelRun>>>,
}

impl BurnProcess {
    /// Starts the worker `id` of this GPU. It prepares, announces that it stands by, and waits for
    /// its release.
    pub(super) fn start(
        assignment: &Assignment,
        probe: &ProbeOptions,
        gpu: &GpuFacts,
        interrupt: &Interrupt,
        state: &Arc<State>,
    ) -> Result<Self, String> {
        let checks = matches!(&assignment.task, Task::Burn(task) if task.check_kernel);
        let (send_kernel, kernel) = sync_channel(1);
        let start = start_of(assignment, gpu, probe, workload_terms(&probe.deadlines))?;
        let follower = BurnFollower {
            id: assignment.id.clone(),
            gpu: gpu.clone(),
            state: Arc::clone(state),
            started: Instant::now(),
            send_kernel: checks.then_some(send_kernel),
            interrupt: interrupt.clone(),
        };
        Ok(Self {
            process: WorkloadProcess::start(start, follower, interrupt)?,
            kernel: checks.then_some(kernel),
        })
    }

    /// The channel of the check kernel's result, which arrives once.
    pub(super) fn kernel(&mut self) -> Option<Receiver<Reading<KernelRun>>> {
        self.kernel.take()
    }

    pub(super) fn go(&mut self) {
        self.process.go();
    }

    pub(super) fn dismiss(&self) {
        self.process.dismiss();
    }

    pub(super) fn has_ended(&self) -> bool {
        self.process.has_ended()
    }

    pub(super) fn join(self) -> Reading<BurnRun> {
        let panicked = || Reading::NotRead("the thread of this GPU panicked".to_owned());
        self.process.join().map_or_else(panicked, Reading::Value)
    }
}

struct BurnFollower {
    id: WorkerId,
    gpu: GpuFacts,
    state: Arc<State>,
    started: Instant,
    /// Until the check kernel's result is sent.
    send_kernel: Option<SyncSender<Reading<KernelRun>>>,
    interrupt: Interrupt,
}

impl BurnFollower {
    fn send_kernel(&mut self, run: KernelRun) {
        let Some(send) = self.send_kernel.take() else {
            return;
        };
        let run = KernelRun {
            end: busy_if_others_have_it(run.end, &self.gpu),
            wall_ms: self.started.elapsed().as_secs_f64() * 1000.0,
            ..run
        };
        // The receiver is gone when the run is being given up.
        let _ = send.send(Reading::Value(run));
    }

    /// The worker ended before it reported the kernel.
    fn send_kernels_end(&mut self, end: &WorkerEnd) {
        if self.interrupt.signal().is_none() {
            self.send_kernel(KernelRun::without_result(end.clone()));
        } else if let Some(send) = self.send_kernel.take() {
            let reason = "the run was interrupted".to_owned();
            let _ = send.send(Reading::NotRead(reason));
        }
    }
}

impl Follower for BurnFollower {
    type Run = BurnRun;

    fn started(&mut self, _pid: u32, at: Instant) {
        self.started = at;
        self.state
            .change(&self.id, |it| it.times.spawned = Some(at));
    }

    fn hear(&mut self, message: &Message) {
        match message {
            Message::Step(step) => self.state.change(&self.id, |it| it.times.note_step(step)),
            Message::Field { name, value } if name == KERNEL => {
                if let Ok(run) = serde_json::from_value(value.clone()) {
                    self.send_kernel(run);
                }
            }
            Message::Field { name, value } if name == LOAD_BEGAN => {
                if let Some(at_s) = value.as_f64() {
                    let at = Some(clock::instant_of(at_s));
                    self.state.change(&self.id, |it| it.load_began = at);
                }
            }
            Message::Field { name, value } if name == RUN => {
                let run = serde_json::from_value(value.clone()).ok();
                // One that stands by has nothing to show.
                let run = run.and_then(burn_of).filter(|it| !it.precisions.is_empty());
                if let Some(run) = run {
                    self.state.change(&self.id, |it| it.note(&run));
                }
            }
            Message::Field { .. } | Message::Done {} => {}
        }
    }

    fn conclude(mut self, reported: Reported) -> BurnRun {
        let run = burn_run(reported);
        self.send_kernels_end(&run.end);
        self.state.change(&self.id, |it| it.ended = true);
        BurnRun {
            end: busy_if_others_have_it(run.end, &self.gpu),
            ..run
        }
    }
}

/// The burn in the report of its worker, whose end is that of the run.
fn burn_of(mut run: WorkloadRun) -> Option<BurnRun> {
    let burn = run.detail.remove(DETAIL);
    let burn = burn.map_or_else(
        || Ok(BurnRun::empty(WorkerEnd::Finished)),
        serde_json::from_value,
    );
    let burn: BurnRun = burn.ok()?;
    let end = match run.end {
        Reading::Value(end) => end,
        Reading::NotRead(_) | Reading::NotSupported => WorkerEnd::Finished,
    };
    Some(BurnRun {
        end,
        notes: run.notes.into_iter().chain(burn.notes).collect(),
        stop_ms: run.measured.stop_ms,
        ..burn
    })
}

/// The last report of a worker, with the end of its process where that was no good one.
fn burn_run(mut reported: Reported) -> BurnRun {
    let last = reported.fields.remove(RUN);
    let last = last.and_then(|it| burn_of(serde_json::from_value(it).ok()?));
    let end = match reported.end {
        ReportEnd::Ended(end) => Some(end),
        ReportEnd::Finished | ReportEnd::Interrupted | ReportEnd::Dismissed => None,
    };
    match (last, end) {
        // The worker's own account of its end is more precise than its exit status.
        (Some(run), Some(_)) if reported.is_done && run.end != WorkerEnd::Finished => run,
        (Some(run), Some(end)) => BurnRun { end, ..run },
        (Some(run), None) => run,
        (None, Some(end)) => BurnRun::empty(end),
        (None, None) => BurnRun::empty(WorkerEnd::Exited {
            status: 0,
            stderr: "the worker ended without a result".to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use validator_core::facts::RequestedWork;

    use super::*;
    use crate::worker::listener::{AfterDone, OnInterrupt, Orders, Terms, TimeLimit, listen};
    use crate::worker::process::WorkerProcess;

    fn run_within(script: &str, silence: Duration, interrupt: &Interrupt) -> BurnRun {
        let program = std::path::PathBuf::from("/bin/sh");
        let arguments = ["-c".into(), script.into()];
        let worker = WorkerProcess::start(&program, &arguments, &[]).expect("sh starts");
        let terms = Terms {
            time_limit: TimeLimit::Silence {
                step: silence,
                report: silence,
            },
            after_done: AfterDone::ExitWell,
            on_interrupt: OnInterrupt::Terminate,
        };
        let orders = Orders::default();
        burn_run(listen(worker, terms, &orders, interrupt, &mut |_| {}))
    }

    fn told(script: &str) -> BurnRun {
        run_within(script, Duration::from_millis(500), &Interrupt::default())
    }

    fn line(measured_s: f64) -> String {
        let burn = BurnRun {
            measured_s,
            ..BurnRun::empty(WorkerEnd::Finished)
        };
        let not_ended = Reading::NotRead("it did not end".to_owned());
        let mut run = WorkloadRun::empty(burn_id("GPU-a"), RequestedWork::default(), not_ended);
        let burn = serde_json::to_value(&burn).expect("a run is JSON");
        run.detail.insert(DETAIL.to_owned(), burn);
        let run = serde_json::to_string(&run).expect("a run is JSON");
        format!(r#"echo '{{"field":{{"name":"run","value":{run}}}}}'"#)
    }

    #[test]
    fn a_worker_that_finishes() {
        let run = told(&format!(r#"{}; echo '{{"done":{{}}}}'"#, line(1.5)));
        assert_eq!(run.end, WorkerEnd::Finished);
        assert!((run.measured_s - 1.5).abs() < 1e-9);
    }

    #[test]
    fn what_a_killed_worker_told_is_kept() {
        let run = told(&format!("{}; kill -9 $$", line(0.5)));
        assert_eq!(run.end, WorkerEnd::Killed { signal: 9 });
        assert!((run.measured_s - 0.5).abs() < 1e-9);
    }

    #[test]
    fn a_worker_that_hangs_is_killed_in_its_step() {
        let run = told(r#"trap '' TERM; echo '{"step":"bf16 products"}'; sleep 600"#);
        let expected = WorkerEnd::TimedOut {
            step: "bf16 products".to_owned(),
            seconds: 0.5,
        };
        assert_eq!(run.end, expected);
    }

    #[test]
    fn nothing_told_is_no_result() {
        assert!(matches!(
            told(r#"echo '{"done":{}}'"#).end,
            WorkerEnd::Exited { .. }
        ));
    }

    #[test]
    fn a_signal_stops_a_worker_that_listens_and_kills_one_that_does_not() {
        for (script, listens) in [
            (
                "trap 'exit 0' TERM; echo x; while :; do sleep 0.01; done",
                true,
            ),
            ("trap '' TERM; echo x; sleep 600", false),
        ] {
            let interrupt = Interrupt::default();
            let stop = interrupt.clone();
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(200));
                stop.request(2);
            });
            let began = Instant::now();
            let run = run_within(script, Duration::from_mins(1), &interrupt);
            assert!(began.elapsed() < Duration::from_secs(3));
            assert_eq!(
                matches!(run.end, WorkerEnd::Exited { status: 0, .. }),
                listens
            );
        }
    }
}
