//! Listens to a child process until its end. [`converse`] is the only loop that reads a process:
//! [`listen`] reads the messages of [`super::protocol`] with it, [`follow`] a stream of other
//! messages, [`read_output`] what a program prints.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
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
const ORDER_POLL: Duration = Duration::from_millis(10);

/// One side of [`converse`]: what a process is ordered, how long it may be silent, and the use of
/// its lines.
pub(crate) trait Conversation {
    fn order(&mut self) -> Order {
        Order::Continue
    }

    /// The time by which the process must have written its next line.
    fn deadline(&mut self, now: Instant) -> Instant;

    fn hear(&mut self, line: &str, now: Instant) -> Heard;
}

/// An order to the process of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Continue,
    /// SIGTERM, and this time to report and to end.
    Stop(Duration),
    Kill,
}

/// Whether a line was the last of interest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    Part,
    Everything,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ConversationEnd {
    /// Everything of interest was heard. The process may still run.
    Complete,
    /// Killed by order.
    Dismissed,
    /// Killed, since the run is stopped.
    Interrupted,
    /// Killed after its deadline.
    TimedOut {
        /// The process cannot be killed.
        is_stuck: bool,
        /// It had the order to stop.
        was_stopping: bool,
    },
    /// It closed its output, and ended so.
    Closed(ProcessEnd),
}

/// Reads the lines of a process until its end, an order or its deadline. Time in which this process
/// is suspended does not count.
pub(crate) fn converse(
    worker: &mut WorkerProcess,
    on_interrupt: OnInterrupt,
    interrupt: &Interrupt,
    conversation: &mut dyn Conversation,
) -> ConversationEnd {
    let never = Interrupt::default();
    let mut end_of_stop = None;
    loop {
        let now = worker.now();
        match conversation.order() {
            Order::Kill => {
                worker.kill();
                return ConversationEnd::Dismissed;
            }
            Order::Stop(time_to_stop) if end_of_stop.is_none() => {
                worker.terminate();
                end_of_stop = Some(now + time_to_stop);
            }
            Order::Stop(_) | Order::Continue => {}
        }
        let deadline = end_of_stop.unwrap_or_else(|| conversation.deadline(now));
        let heeded = if end_of_stop.is_some() {
            &never
        } else {
            interrupt
        };
        match worker.next_event(deadline.min(now + ORDER_POLL), heeded) {
            WorkerEvent::Line(line) => {
                if conversation.hear(&line, worker.now()) == Heard::Everything {
                    return ConversationEnd::Complete;
                }
            }
            WorkerEvent::Interrupted if on_interrupt == OnInterrupt::Kill => {
                worker.kill();
                return ConversationEnd::Interrupted;
            }
            WorkerEvent::Interrupted => {
                worker.terminate();
                end_of_stop = Some(worker.now() + TIME_TO_STOP);
            }
            WorkerEvent::TimedOut if worker.now() < deadline => {}
            WorkerEvent::TimedOut => {
                return ConversationEnd::TimedOut {
                    is_stuck: worker.kill() == ProcessEnd::Stuck,
                    was_stopping: end_of_stop.is_some(),
                };
            }
            WorkerEvent::Closed => return ConversationEnd::Closed(worker.finish(TIME_TO_END)),
        }
    }
}

/// Reads messages of type `M` from a process that reports until it is stopped and is never silent
/// for longer than `silence`. Lines that are no such message are left out: a library may print.
pub(crate) fn follow<M: DeserializeOwned>(
    worker: &mut WorkerProcess,
    silence: Duration,
    interrupt: &Interrupt,
    order: &dyn Fn() -> Order,
    take: &mut dyn FnMut(M) -> Heard,
) -> ConversationEnd {
    let deadline = worker.now() + silence;
    let mut stream = Stream {
        silence,
        deadline,
        order,
        take,
    };
    converse(worker, OnInterrupt::Kill, interrupt, &mut stream)
}

struct Stream<'s, M> {
    silence: Duration,
    deadline: Instant,
    order: &'s dyn Fn() -> Order,
    take: &'s mut dyn FnMut(M) -> Heard,
}

impl<M: DeserializeOwned> Conversation for Stream<'_, M> {
    fn order(&mut self) -> Order {
        (self.order)()
    }

    fn deadline(&mut self, _now: Instant) -> Instant {
        self.deadline
    }

    fn hear(&mut self, line: &str, now: Instant) -> Heard {
        let Ok(message) = serde_json::from_str(line) else {
            return Heard::Part;
        };
        self.deadline = now + self.silence;
        (self.take)(message)
    }
}

/// Reads what a program prints, line by line, until its end.
pub(crate) fn read_output(
    process: &mut WorkerProcess,
    limit: Duration,
    interrupt: &Interrupt,
    on_line: &mut dyn FnMut(&str),
) -> ConversationEnd {
    let deadline = process.now() + limit;
    let mut text = Text { deadline, on_line };
    converse(process, OnInterrupt::Kill, interrupt, &mut text)
}

struct Text<'t> {
    deadline: Instant,
    on_line: &'t mut dyn FnMut(&str),
}

impl Conversation for Text<'_> {
    fn deadline(&mut self, _now: Instant) -> Instant {
        self.deadline
    }

    fn hear(&mut self, line: &str, _now: Instant) -> Heard {
        (self.on_line)(line);
        Heard::Part
    }
}

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
    /// The reason for missing reports, as a lowercase fragment.
    pub(crate) fn reason(&self) -> String {
        let step = &self.step;
        match &self.end {
            ReportEnd::Finished => "not reported by its probe".to_owned(),
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

/// Lines of a worker, as [`crate::fuzzing`] makes them: whatever they hold, the step and the fields
/// are those of the messages among them.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn hear_any(bytes: &[u8]) -> Map<String, Value> {
    let mut messages = Vec::new();
    let mut on_message = |it: &Message| messages.push(it.clone());
    let mut report = Report {
        terms: Terms {
            time_limit: TimeLimit::Silence {
                step: TIME_TO_END,
                report: TIME_TO_END,
            },
            after_done: AfterDone::ExitWell,
            on_interrupt: OnInterrupt::Kill,
        },
        orders: &Orders::default(),
        on_message: &mut on_message,
        silence: TIME_TO_END,
        deadline: Instant::now(),
        fields: Map::new(),
        step: String::new(),
        is_done: false,
    };
    for line in String::from_utf8_lossy(bytes).lines() {
        report.hear(line, Instant::now());
    }
    let (fields, is_done) = (report.fields, report.is_done);
    assert_eq!(is_done, messages.contains(&Message::Done {}));
    for message in messages {
        let line = serde_json::to_string(&message).expect("a message can be written");
        assert_eq!(serde_json::from_str::<Message>(&line).ok(), Some(message));
    }
    fields
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
    let silence = terms.time_limit.at_start();
    let mut report = Report {
        terms,
        orders,
        on_message,
        silence,
        deadline: worker.now() + silence,
        fields: Map::new(),
        step: "start".to_owned(),
        is_done: false,
    };
    let end = converse(&mut worker, terms.on_interrupt, interrupt, &mut report);
    let Report {
        silence,
        fields,
        step,
        is_done,
        ..
    } = report;
    let end = match end {
        ConversationEnd::Complete => {
            worker.leave();
            ReportEnd::Finished
        }
        ConversationEnd::Dismissed => ReportEnd::Dismissed,
        ConversationEnd::Interrupted => ReportEnd::Interrupted,
        ConversationEnd::TimedOut {
            is_stuck,
            was_stopping,
        } => {
            let limit = if was_stopping { TIME_TO_STOP } else { silence };
            ReportEnd::Ended(timed_out(&step, is_stuck, limit))
        }
        ConversationEnd::Closed(ProcessEnd::Exited(0)) if is_done => ReportEnd::Finished,
        ConversationEnd::Closed(end) => ReportEnd::Ended(worker.end_without_result(&end)),
    };
    Reported {
        fields,
        end,
        step,
        is_done,
    }
}

/// The report of a worker so far.
struct Report<'r> {
    terms: Terms,
    orders: &'r Orders,
    on_message: &'r mut dyn FnMut(&Message),
    silence: Duration,
    deadline: Instant,
    fields: Map<String, Value>,
    step: String,
    is_done: bool,
}

impl Conversation for Report<'_> {
    fn order(&mut self) -> Order {
        if self.orders.dismissed.load(Ordering::Acquire) {
            Order::Kill
        } else if self.orders.stop.load(Ordering::Acquire) {
            Order::Stop(TIME_TO_STOP)
        } else {
            Order::Continue
        }
    }

    fn deadline(&mut self, now: Instant) -> Instant {
        if self.step == STANDING_BY && !self.orders.released.load(Ordering::Acquire) {
            self.deadline = now + self.silence;
        }
        self.deadline
    }

    fn hear(&mut self, line: &str, now: Instant) -> Heard {
        // A library may print on stdout, which harms nothing.
        let Ok(message) = serde_json::from_str::<Message>(line) else {
            return Heard::Part;
        };
        (self.on_message)(&message);
        if let Some(limit) = self.terms.time_limit.after(&message) {
            self.silence = limit;
        }
        match message {
            Message::Step(name) => self.step = name,
            Message::Field { name, value } => {
                self.fields.insert(name, value);
            }
            Message::Done {} => self.is_done = true,
        }
        if self.is_done && self.terms.after_done == AfterDone::Leave {
            return Heard::Everything;
        }
        if matches!(self.terms.time_limit, TimeLimit::Silence { .. }) {
            self.deadline = now + self.silence;
        }
        Heard::Part
    }
}

fn timed_out(step: &str, is_stuck: bool, limit: Duration) -> WorkerEnd {
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
    fn a_stream_renews_its_deadline_by_messages_alone() {
        let followed = |script: &str, order: &dyn Fn(u32) -> Order| {
            let mut worker = started(script);
            let sum = std::cell::Cell::new(0);
            let mut take = |number: u32| {
                sum.set(sum.get() + number);
                Heard::Part
            };
            let order = || order(sum.get());
            let interrupt = Interrupt::default();
            let end = follow(&mut worker, LIMIT, &interrupt, &order, &mut take);
            (end, sum.get())
        };
        let always = |_| Order::Continue;
        let steady = "for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.1; done; exit 4";
        let closed = ConversationEnd::Closed(ProcessEnd::Exited(4));
        assert_eq!(followed(steady, &always), (closed, 36));
        let noisy = "echo 1; while :; do echo noise; sleep 0.1; done";
        let silent = |was_stopping| ConversationEnd::TimedOut {
            is_stuck: false,
            was_stopping,
        };
        assert_eq!(followed(noisy, &always), (silent(false), 1));
        let ordered = |order| move |sum| if sum > 0 { order } else { Order::Continue };
        let kill = ordered(Order::Kill);
        assert_eq!(followed(noisy, &kill), (ConversationEnd::Dismissed, 1));
        let stop = ordered(Order::Stop(LIMIT));
        let last = "trap 'echo 41; exit 0' TERM; echo 1; while :; do sleep 0.01; done";
        let closed = ConversationEnd::Closed(ProcessEnd::Exited(0));
        assert_eq!(followed(last, &stop), (closed, 42));
        let deaf = "trap '' TERM; echo 1; while :; do echo 0; sleep 0.1; done";
        assert_eq!(followed(deaf, &stop), (silent(true), 1));
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
