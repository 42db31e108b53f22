//! The worker that burns one GPU: started, told to begin or sent away, and followed to its end.

use std::ffi::OsString;
use std::io::Write as _;
use std::process::ChildStdin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::burn_state::State;
use super::burn_worker::{BurnTask, GO, LOAD_BEGAN, STANDING_BY, empty_run};
use super::cuda_kernel::own_node;
use super::others::busy_if_others_have_it;
use crate::facts::{BurnRun, GpuFacts, KernelRun, Reading, WorkerEnd};
use crate::probe::{Deadlines, Interrupt, ProbeOptions};
use crate::worker::clock;
use crate::worker::conversation::Message;
use crate::worker::one_gpu::cuda_environment;
use crate::worker::process::{ProcessEnd, WorkerEvent, WorkerProcess, worker_program};

/// How long a worker may take to stop before it is killed: less than the second that a person waits.
const TIME_TO_STOP: Duration = Duration::from_millis(800);
/// How long a worker may take to be gone after it said its last.
const TIME_TO_END: Duration = Duration::from_secs(2);
/// How often a listener looks whether its worker was sent away.
const LOOK: Duration = Duration::from_millis(50);

/// How long a worker may say nothing.
#[derive(Clone, Copy, Debug)]
struct Patience {
    /// In a step that it announced.
    step: Duration,
    /// While it multiplies, when it promises reports.
    report: Duration,
}

impl From<&Deadlines> for Patience {
    fn from(deadlines: &Deadlines) -> Self {
        Self {
            step: deadlines.cuda_kernel,
            report: deadlines.burn_report,
        }
    }
}

/// What the parent wishes of a worker besides a good end.
#[derive(Debug, Default)]
struct Orders {
    went: AtomicBool,
    dismissed: AtomicBool,
}

/// A worker that gets ready, stands by, or burns.
pub(super) struct BurnProcess {
    input: Option<ChildStdin>,
    orders: Arc<Orders>,
    kernel: Option<Receiver<Reading<KernelRun>>>,
    thread: JoinHandle<BurnRun>,
}

impl BurnProcess {
    /// Starts the worker. It gets ready, says so, and waits for its word.
    pub(super) fn start(
        task: &BurnTask,
        probe: &ProbeOptions,
        (uuid, gpu): (&str, &GpuFacts),
        interrupt: &Interrupt,
        state: &Arc<State>,
    ) -> Result<Self, String> {
        let device = task.device.clone();
        let checks = task.check_kernel;
        let task = serde_json::to_string(task).map_err(|error| error.to_string())?;
        let program = worker_program(probe.worker_program.as_ref());
        let mut arguments = ["worker", "burn", "--task", &task]
            .map(OsString::from)
            .to_vec();
        arguments.extend(own_node(gpu, probe));
        let patience = Patience::from(&probe.deadlines);
        let orders = Arc::new(Orders::default());
        let (send_input, input) = sync_channel(1);
        let (send_kernel, kernel) = sync_channel(1);
        let (uuid, gpu) = (uuid.to_owned(), gpu.clone());
        let (interrupt, state, heard) = (interrupt.clone(), Arc::clone(state), Arc::clone(&orders));
        // The kernel kills a worker when the thread that started it ends, so that it is the one that listens.
        let thread = std::thread::spawn(move || {
            let environment = cuda_environment(&device);
            let started = Instant::now();
            let worker = match WorkerProcess::start_with_input(&program, &arguments, &environment) {
                Ok((worker, input)) => {
                    let _ = send_input.send(Ok(input));
                    worker
                }
                Err(error) => {
                    let reason = format!("cannot start {}: {error}", program.display());
                    let _ = send_input.send(Err(reason.clone()));
                    return empty_run(exited(reason));
                }
            };
            state.change(&uuid, |it| it.times.spawned = Some(started));
            let mut kernel = checks.then_some(KernelListener {
                gpu: &gpu,
                started,
                send: &send_kernel,
            });
            let run = follow(
                worker,
                patience,
                &heard,
                &interrupt,
                &mut |word| match word {
                    Word::Step(step) => state.change(&uuid, |it| it.times.note_step(step)),
                    Word::Kernel(run) => {
                        if let Some(kernel) = kernel.take() {
                            kernel.tell(run);
                        }
                    }
                    Word::LoadBegan(at) => state.change(&uuid, |it| it.load_began = Some(at)),
                    Word::Run(run) => state.change(&uuid, |it| it.note(run)),
                },
            );
            if let Some(kernel) = kernel.take() {
                kernel.tell_end(&run.end, &interrupt);
            }
            state.change(&uuid, |it| it.ended = true);
            BurnRun {
                end: busy_if_others_have_it(run.end, &gpu),
                ..run
            }
        });
        let input = input.recv().map_err(|error| error.to_string())??;
        Ok(Self {
            input,
            orders,
            kernel: checks.then_some(kernel),
            thread,
        })
    }

    /// Where the check kernel's result comes, once.
    pub(super) fn kernel(&mut self) -> Option<Receiver<Reading<KernelRun>>> {
        self.kernel.take()
    }

    /// The word to begin. A worker that ended meanwhile does not hear it, and how it ended says why.
    pub(super) fn go(&mut self) {
        self.orders.went.store(true, Ordering::Release);
        if let Some(input) = &mut self.input {
            let _ = writeln!(input, "{GO}");
        }
    }

    /// Sends a worker away that is not needed.
    pub(super) fn dismiss(&self) {
        self.orders.dismissed.store(true, Ordering::Release);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for the end. The worker is gone then, unless the driver keeps it.
    pub(super) fn join(self) -> Reading<BurnRun> {
        let panicked = || Reading::NotRead("the thread of this GPU panicked".to_owned());
        self.thread
            .join()
            .map_or_else(|_| panicked(), Reading::Value)
    }
}

fn exited(stderr: String) -> WorkerEnd {
    WorkerEnd::Exited { status: 1, stderr }
}

/// Where the check kernel's result goes.
struct KernelListener<'l> {
    gpu: &'l GpuFacts,
    started: Instant,
    send: &'l SyncSender<Reading<KernelRun>>,
}

impl KernelListener<'_> {
    fn tell(&self, run: KernelRun) {
        let run = KernelRun {
            end: busy_if_others_have_it(run.end, self.gpu),
            wall_ms: self.started.elapsed().as_secs_f64() * 1000.0,
            ..run
        };
        // Nobody listens any more when the run is being given up.
        let _ = self.send.send(Reading::Value(run));
    }

    /// The worker ended before it told of the kernel.
    fn tell_end(&self, end: &WorkerEnd, interrupt: &Interrupt) {
        if interrupt.signal().is_some() {
            let reason = "the run was interrupted".to_owned();
            let _ = self.send.send(Reading::NotRead(reason));
            return;
        }
        self.tell(KernelRun::without_result(end.clone()));
    }
}

/// What a worker told.
enum Word<'w> {
    Step(&'w str),
    Kernel(KernelRun),
    LoadBegan(Instant),
    Run(&'w BurnRun),
}

/// Listens to a worker to its end. What it told last is what is known, however it ends. A worker that says nothing for too
/// long hangs; one that waits for its word may be silent.
fn follow(
    mut worker: WorkerProcess,
    patience: Patience,
    orders: &Orders,
    interrupt: &Interrupt,
    on_word: &mut dyn FnMut(Word<'_>),
) -> BurnRun {
    let deaf = Interrupt::default();
    let mut last = None;
    let mut step = "start".to_owned();
    let mut is_done = false;
    let mut stopping = false;
    let mut silence = patience.step;
    let mut deadline = worker.now() + silence;
    let abnormal = loop {
        let looked = worker.now();
        if orders.dismissed.load(Ordering::Acquire) {
            worker.kill();
            break None;
        }
        if step == STANDING_BY && !orders.went.load(Ordering::Acquire) && !stopping {
            deadline = looked + silence;
        }
        let heard = if stopping { &deaf } else { interrupt };
        match worker.next_event(deadline.min(looked + LOOK), heard) {
            WorkerEvent::Line(line) => {
                match serde_json::from_str(&line) {
                    Ok(Message::Step(name)) => {
                        silence = patience.step;
                        on_word(Word::Step(&name));
                        step = name;
                    }
                    Ok(Message::Field { name, value }) if name == "kernel" => {
                        if let Ok(run) = serde_json::from_value(value) {
                            on_word(Word::Kernel(run));
                        }
                    }
                    Ok(Message::Field { name, value }) if name == LOAD_BEGAN => {
                        if let Some(at_s) = value.as_f64() {
                            on_word(Word::LoadBegan(clock::instant_of(at_s)));
                        }
                    }
                    Ok(Message::Field { value, .. }) => {
                        if let Ok(run) = serde_json::from_value::<BurnRun>(value) {
                            silence = patience.report;
                            on_word(Word::Run(&run));
                            last = Some(run);
                        }
                    }
                    Ok(Message::Done {}) => is_done = true,
                    // A library may print on stdout, which harms nothing.
                    Err(_) => continue,
                }
                if !stopping {
                    deadline = worker.now() + silence;
                }
            }
            WorkerEvent::Interrupted => {
                stopping = true;
                worker.terminate();
                deadline = worker.now() + TIME_TO_STOP;
            }
            WorkerEvent::TimedOut if worker.now() < deadline => {}
            WorkerEvent::TimedOut => {
                let stuck = worker.kill() == ProcessEnd::Stuck;
                if stuck {
                    step.push_str(" (and cannot be killed: uninterruptible sleep in the driver)");
                }
                let seconds = if stopping { TIME_TO_STOP } else { silence }.as_secs_f64();
                break Some(WorkerEnd::TimedOut { step, seconds });
            }
            WorkerEvent::Closed => {
                let end = worker.finish(TIME_TO_END);
                let well = is_done && end == ProcessEnd::Exited(0);
                break (!well).then(|| worker.end_without_result(&end));
            }
        }
    };
    let Some(end) = abnormal else {
        return last.unwrap_or_else(|| {
            empty_run(WorkerEnd::Exited {
                status: 0,
                stderr: "the worker ended without a result".to_owned(),
            })
        });
    };
    match last {
        // What it said of its own end says more than how the process went.
        Some(run) if is_done && run.end != WorkerEnd::Finished => run,
        Some(run) => BurnRun { end, ..run },
        None => empty_run(end),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patience(silence: Duration) -> Patience {
        Patience {
            step: silence,
            report: silence,
        }
    }

    fn told(script: &str) -> BurnRun {
        let program = std::path::PathBuf::from("/bin/sh");
        let arguments = ["-c".into(), script.into()];
        let worker = WorkerProcess::start(&program, &arguments, &[]).expect("sh starts");
        let silence = Duration::from_millis(500);
        follow(
            worker,
            patience(silence),
            &Orders::default(),
            &Interrupt::default(),
            &mut |_| {},
        )
    }

    fn line(measured_s: f64) -> String {
        let run = BurnRun {
            measured_s,
            ..empty_run(WorkerEnd::Finished)
        };
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
            let program = std::path::PathBuf::from("/bin/sh");
            let arguments = ["-c".into(), script.into()];
            let worker = WorkerProcess::start(&program, &arguments, &[]).expect("sh starts");
            let interrupt = Interrupt::default();
            std::thread::sleep(Duration::from_millis(100));
            interrupt.request(2);
            let began = Instant::now();
            let run = follow(
                worker,
                patience(Duration::from_mins(1)),
                &Orders::default(),
                &interrupt,
                &mut |_| {},
            );
            assert!(began.elapsed() < Duration::from_secs(3));
            assert_eq!(
                matches!(run.end, WorkerEnd::Exited { status: 0, .. }),
                listens
            );
        }
    }
}
