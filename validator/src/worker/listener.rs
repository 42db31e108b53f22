//! Listens to a worker until its end: the only place that reads the messages of [`super::protocol`]
//! from a process.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Map, Value};

use super::process::{ProcessEnd, WorkerEvent, WorkerProcess};
use super::protocol::{Message, RUN, STANDING_BY};
use crate::interrupt::Interrupt;
use validator_core::facts::WorkerEnd;

/// Time to stop before a worker is killed: less than the second that a person waits.
const TIME_TO_STOP: Duration = Duration::from_millis(800);
/// Time from the end of a worker's output to the end of its process.
const TIME_TO_END: Duration = Duration::from_secs(2);
/// Poll interval for orders.
const ORDER_POLL: Duration = Duration::from_millis(50);

/// What a worker reported, and how it ended.
#[derive(Debug)]
pub(crate) struct Reported {
    /// The last value of each field.
    pub(crate) fields: Map<String, Value>,
    pub(crate) end: ReportEnd,
    /// The step that was announced last.
    pub(crate) step: String,
    /// It reported everything, however its process ended then.
    pub(crate) is_done: bool,
}

#[derive(Debug, PartialEq)]
pub(crate) enum ReportEnd {
    /// It reported everything and exited with 0.
    Finished,
    /// The run is stopped, and the worker was killed for it.
    Interrupted,
    /// It was not needed any more.
    Dismissed,
    /// It did not finish, and this is how it ended.
    Ended(WorkerEnd),
}

impl Reported {
    /// Why what was not told is missing, as a lowercase fragment.
    pub(crate) fn reason(&self) -> String {
        let step = &self.step;
        match &self.end {
            ReportEnd::Finished => "not told by its probe".to_owned(),
            ReportEnd::Interrupted => "the run was interrupted".to_owned(),
            ReportEnd::Dismissed => "the worker was not needed".to_owned(),
            ReportEnd::Ended(WorkerEnd::TimedOut { seconds, .. }) => {
                format!("{step} did not return within {seconds} s")
            }
            ReportEnd::Ended(WorkerEnd::Killed { signal }) => {
                format!("the probe process was ended by signal {signal} in {step}")
            }
            ReportEnd::Ended(WorkerEnd::Exited { status, stderr }) => format!(
                "the probe process exited with status {status} in {step}: {}",
                stderr.lines().last().unwrap_or_default()
            ),
            ReportEnd::Ended(other) => {
                format!("the probe process ended in {step}: {other:?}")
            }
        }
    }
}

/// What a worker that has reported everything still owes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterDone {
    /// Nothing.
    Leave,
    /// A good end: it worked a GPU, and a driver that fails to let go of it has failed.
    ExitWell,
}

/// How long a worker may take.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TimeLimit {
    /// For everything together.
    Total(Duration),
    /// From one message to the next.
    Silence {
        /// In a step that it announced.
        step: Duration,
        /// After a report, which promises the next.
        report: Duration,
    },
}

impl TimeLimit {
    fn at_start(self) -> Duration {
        match self {
            Self::Total(limit) => limit,
            Self::Silence { step, .. } => step,
        }
    }

    /// The silence that is allowed after `message`; `None` where that makes no difference.
    fn after(self, message: &Message) -> Option<Duration> {
        match (self, message) {
            (Self::Total(_), _) | (_, Message::Done {}) => None,
            (Self::Silence { step, .. }, Message::Step(_)) => Some(step),
            (Self::Silence { report, .. }, Message::Field { name, .. }) => {
                (name == RUN).then_some(report)
            }
        }
    }
}

/// What happens to a worker when the run is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnInterrupt {
    Kill,
    /// SIGTERM, so that it reports what it has; SIGKILL if it does not end.
    Terminate,
}

/// Orders of the parent to the thread that listens.
#[derive(Debug, Default)]
pub(crate) struct Orders {
    /// The worker was released from standing by.
    pub(crate) released: AtomicBool,
    /// It is not needed any more.
    pub(crate) dismissed: AtomicBool,
    /// It is to stop, free everything and report.
    pub(crate) stop: AtomicBool,
}

/// The terms of one conversation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) time_limit: TimeLimit,
    pub(crate) after_done: AfterDone,
    pub(crate) on_interrupt: OnInterrupt,
}

/// Listens to a worker until it is done or its time is over, and sees to its end. Its last report
/// is kept, however it ends. A worker that stands by may be silent.
pub(crate) fn listen(
    mut worker: WorkerProcess,
    terms: Terms,
    orders: &Orders,
    interrupt: &Interrupt,
    on_message: &mut dyn FnMut(&Message),
) -> Reported {
    let never = Interrupt::default();
    let mut fields = Map::new();
    let mut step = "start".to_owned();
    let (mut is_done, mut stopping) = (false, false);
    let mut silence = terms.time_limit.at_start();
    let mut deadline = worker.now() + silence;
    let end = loop {
        let now = worker.now();
        if orders.dismissed.load(Ordering::Acquire) {
            worker.kill();
            break ReportEnd::Dismissed;
        }
        if orders.stop.load(Ordering::Acquire) && !stopping {
            stopping = true;
            worker.terminate();
            deadline = now + TIME_TO_STOP;
        }
        let waits = step == STANDING_BY && !orders.released.load(Ordering::Acquire);
        if waits && !stopping {
            deadline = now + silence;
        }
        let heeded = if stopping { &never } else { interrupt };
        match worker.next_event(deadline.min(now + ORDER_POLL), heeded) {
            WorkerEvent::Line(line) => {
                // A library may print on stdout, which harms nothing.
                let Ok(message) = serde_json::from_str::<Message>(&line) else {
                    continue;
                };
                on_message(&message);
                if let Some(limit) = terms.time_limit.after(&message) {
                    silence = limit;
                }
                match message {
                    Message::Step(name) => step = name,
                    Message::Field { name, value } => {
                        fields.insert(name, value);
                    }
                    Message::Done {} => is_done = true,
                }
                if is_done && terms.after_done == AfterDone::Leave {
                    worker.leave();
                    break ReportEnd::Finished;
                }
                if !stopping && matches!(terms.time_limit, TimeLimit::Silence { .. }) {
                    deadline = worker.now() + silence;
                }
            }
            WorkerEvent::Interrupted if terms.on_interrupt == OnInterrupt::Kill => {
                worker.kill();
                break ReportEnd::Interrupted;
            }
            WorkerEvent::Interrupted => {
                stopping = true;
                worker.terminate();
                deadline = worker.now() + TIME_TO_STOP;
            }
            WorkerEvent::TimedOut if worker.now() < deadline => {}
            WorkerEvent::TimedOut => {
                let limit = if stopping { TIME_TO_STOP } else { silence };
                break ReportEnd::Ended(killed_at_time_out(&mut worker, &step, limit));
            }
            WorkerEvent::Closed => {
                let end = worker.finish(TIME_TO_END);
                break if is_done && end == ProcessEnd::Exited(0) {
                    ReportEnd::Finished
                } else {
                    ReportEnd::Ended(worker.end_without_result(&end))
                };
            }
        }
    };
    Reported {
        fields,
        end,
        step,
        is_done,
    }
}

fn killed_at_time_out(worker: &mut WorkerProcess, step: &str, limit: Duration) -> WorkerEnd {
    let is_stuck = worker.kill() == ProcessEnd::Stuck;
    let step = if is_stuck {
        format!("{step} (and cannot be killed: uninterruptible sleep in the driver)")
    } else {
        step.to_owned()
    };
    let seconds = limit.as_secs_f64();
    WorkerEnd::TimedOut { step, seconds }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn started(script: &str) -> WorkerProcess {
        let program = std::path::PathBuf::from("/bin/sh");
        let arguments = ["-c".into(), script.into()];
        WorkerProcess::start(&program, &arguments, &[]).expect("sh starts")
    }

    const LIMIT: Duration = Duration::from_millis(500);

    /// Terms of a workload, with this much silence.
    fn silence(limit: Duration) -> Terms {
        Terms {
            time_limit: TimeLimit::Silence {
                step: limit,
                report: limit,
            },
            after_done: AfterDone::ExitWell,
            on_interrupt: OnInterrupt::Terminate,
        }
    }

    fn told(script: &str) -> Reported {
        let terms = Terms {
            time_limit: TimeLimit::Total(LIMIT),
            on_interrupt: OnInterrupt::Kill,
            ..silence(LIMIT)
        };
        let (orders, interrupt) = Default::default();
        listen(started(script), terms, &orders, &interrupt, &mut |_| {})
    }

    #[test]
    fn a_worker_that_finishes() {
        let told = told(
            r#"echo noise; echo '{"step":"a"}'; echo '{"field":{"name":"x","value":3}}'; echo '{"done":{}}'"#,
        );
        assert_eq!(told.end, ReportEnd::Finished);
        assert_eq!(told.fields["x"], 3);
    }

    #[test]
    fn one_that_hangs_is_killed_in_its_step() {
        let told = told(r#"trap '' TERM; echo '{"step":"cuInit"}'; sleep 600"#);
        assert_eq!(
            told.end,
            ReportEnd::Ended(WorkerEnd::TimedOut {
                step: "cuInit".to_owned(),
                seconds: 0.5
            })
        );
        assert_eq!(told.reason(), "cuInit did not return within 0.5 s");
    }

    #[test]
    fn one_that_panics_says_why() {
        let told = told(r#"echo '{"step":"cuInit"}'; echo 'thread panicked' >&2; exit 101"#);
        assert_eq!(
            told.reason(),
            "the probe process exited with status 101 in cuInit: thread panicked"
        );
    }

    #[test]
    fn done_without_a_good_end_is_not_finished() {
        let told = told(r#"echo '{"done":{}}'; kill -ABRT $$"#);
        assert_eq!(told.end, ReportEnd::Ended(WorkerEnd::Killed { signal: 6 }));
    }

    #[test]
    fn a_worker_that_stands_by_may_be_silent_until_it_is_released() {
        let script = r#"echo '{"step":"standing by"}'; sleep 600"#;
        let (orders, interrupt) = <(Orders, Interrupt)>::default();
        let began = Instant::now();
        let reported = std::thread::scope(|scope| {
            let listener = scope.spawn(|| {
                let terms = silence(Duration::from_millis(100));
                listen(started(script), terms, &orders, &interrupt, &mut |_| {})
            });
            std::thread::sleep(LIMIT);
            orders.released.store(true, Ordering::Release);
            listener.join().expect("it returns")
        });
        assert!(began.elapsed() >= LIMIT);
        let expected = WorkerEnd::TimedOut {
            step: STANDING_BY.to_owned(),
            seconds: 0.1,
        };
        assert_eq!(reported.end, ReportEnd::Ended(expected));
    }

    #[test]
    fn a_total_limit_is_not_extended_by_messages_and_a_silence_is() {
        let script = r#"for i in 1 2 3 4 5 6 7 8; do echo '{"step":"x"}'; sleep 0.1; done; echo '{"done":{}}'"#;
        assert!(matches!(told(script).end, ReportEnd::Ended(_)));
        let (orders, interrupt) = Default::default();
        let worker = started(script);
        let reported = listen(worker, silence(LIMIT), &orders, &interrupt, &mut |_| {});
        assert_eq!(reported.end, ReportEnd::Finished);
    }

    #[test]
    fn the_order_to_stop_leaves_time_to_report_and_a_dismissal_none() {
        let script = r#"trap 'echo "{\"field\":{\"name\":\"run\",\"value\":7}}"; echo "{\"done\":{}}"; exit 0' TERM; echo '{"step":"x"}'; while :; do sleep 0.01; done"#;
        for dismiss in [false, true] {
            let (orders, interrupt) = <(Orders, Interrupt)>::default();
            let mut order = |message: &Message| {
                assert!(matches!(message, Message::Step(_)) || !dismiss);
                orders.dismissed.store(dismiss, Ordering::Release);
                orders.stop.store(!dismiss, Ordering::Release);
            };
            let terms = silence(Duration::from_mins(1));
            let reported = listen(started(script), terms, &orders, &interrupt, &mut order);
            if dismiss {
                assert_eq!(reported.end, ReportEnd::Dismissed);
            } else {
                assert_eq!(reported.end, ReportEnd::Finished);
                assert_eq!(reported.fields[RUN], 7);
            }
        }
    }
}
