//! What workers with one thread say: the step that they are in, then what they saw.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::process::{ProcessEnd, WorkerEvent, WorkerProcess};
use crate::facts::WorkerEnd;
use crate::probe::Interrupt;

/// One line on the worker's stdout.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Message {
    /// This is about to be done; if nothing follows, it hung or crashed.
    Step(String),
    Field {
        name: String,
        value: Value,
    },
    /// Everything is told.
    Done {},
}

/// The worker's end of the conversation.
#[derive(Default)]
pub(crate) struct Teller {
    /// What a thread tells, once there is something that nobody waits for.
    queue: OnceLock<Arc<Queue>>,
}

/// How long it is waited until a step is told. The parent takes what is told at once, unless it is stopped or starved: then
/// the work goes on.
const TIME_TO_TELL: Duration = Duration::from_millis(100);

impl Teller {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Tells of something of which only the newest matters, and does not wait until somebody listens: the parent may be
    /// stopped, and its pipe full.
    pub(crate) fn newest(&self, name: &str, value: &impl Serialize) {
        let queue = self.queue.get_or_init(Queue::start);
        if let Ok(value) = serde_json::to_value(value) {
            let name = name.to_owned();
            queue.push_newest(Message::Field { name, value });
        }
    }

    pub(crate) fn step(&self, step: &str) {
        self.send(Message::Step(step.to_owned()));
    }

    pub(crate) fn field(&self, name: &str, value: &impl Serialize) {
        if let Ok(value) = serde_json::to_value(value) {
            let name = name.to_owned();
            self.send(Message::Field { name, value });
        }
    }

    pub(crate) fn done(&self) {
        self.send(Message::Done {});
        // The process ends behind this, and what is not written then is lost.
        if let Some(queue) = self.queue.get() {
            queue.settle(Duration::MAX);
        }
    }

    /// Behind everything that was told before.
    fn send(&self, message: Message) {
        match self.queue.get() {
            None => write(&message),
            Some(queue) => {
                queue.push(message);
                queue.settle(TIME_TO_TELL);
            }
        }
    }
}

/// When the parent is gone there is nobody to tell, and the worker dies with it.
fn write(message: &Message) {
    let Ok(mut line) = serde_json::to_vec(message) else {
        return;
    };
    line.push(b'\n');
    let mut stdout = std::io::stdout().lock();
    if stdout.write_all(&line).is_err() || stdout.flush().is_err() {
        std::process::exit(1);
    }
}

/// Messages that a thread of its own tells, in their order.
#[derive(Default)]
struct Queue {
    state: Mutex<Untold>,
    changed: Condvar,
}

#[derive(Default)]
struct Untold {
    waiting: VecDeque<Message>,
    /// The one before them is being written.
    writing: bool,
}

impl Queue {
    fn start() -> Arc<Self> {
        let queue = Arc::new(Self::default());
        let told = Arc::clone(&queue);
        std::thread::spawn(move || {
            loop {
                write(&told.take());
            }
        });
        queue
    }

    fn lock(&self) -> MutexGuard<'_, Untold> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, message: Message) {
        self.lock().waiting.push_back(message);
        self.changed.notify_all();
    }

    /// In the place of the field of this name, if that is the last one that waits.
    fn push_newest(&self, message: Message) {
        let name = |message: &Message| match message {
            Message::Field { name, .. } => Some(name.clone()),
            Message::Step(_) | Message::Done {} => None,
        };
        let mut untold = self.lock();
        if untold.waiting.back().and_then(name) == name(&message) {
            untold.waiting.pop_back();
        }
        untold.waiting.push_back(message);
        self.changed.notify_all();
    }

    /// The next message; the one before it is written then.
    fn take(&self) -> Message {
        let mut untold = self.lock();
        untold.writing = false;
        self.changed.notify_all();
        loop {
            if let Some(message) = untold.waiting.pop_front() {
                untold.writing = true;
                return message;
            }
            untold = self
                .changed
                .wait(untold)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until everything is written, or for so long.
    fn settle(&self, limit: Duration) {
        let untold = self.lock();
        let is_busy = |untold: &mut Untold| !untold.waiting.is_empty() || untold.writing;
        let waited = self.changed.wait_timeout_while(untold, limit, is_busy);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

/// What a worker told, and how it ended.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) fields: Map<String, Value>,
    pub(crate) end: ConversationEnd,
    /// The step that was announced last.
    pub(crate) step: String,
}

#[derive(Debug, PartialEq)]
pub(crate) enum ConversationEnd {
    /// It told everything and exited with 0.
    Finished,
    Interrupted,
    /// It did not finish, and this is how it ended.
    Ended(WorkerEnd),
}

impl Told {
    /// Why what was not told is missing, as a lowercase fragment.
    pub(crate) fn reason(&self) -> String {
        let step = &self.step;
        match &self.end {
            ConversationEnd::Finished => "not told by its probe".to_owned(),
            ConversationEnd::Interrupted => "the run was interrupted".to_owned(),
            ConversationEnd::Ended(WorkerEnd::TimedOut { seconds, .. }) => {
                format!("{step} did not return within {seconds} s")
            }
            ConversationEnd::Ended(WorkerEnd::Killed { signal }) => {
                format!("the probe process was ended by signal {signal} in {step}")
            }
            ConversationEnd::Ended(WorkerEnd::Exited { status, stderr }) => format!(
                "the probe process exited with status {status} in {step}: {}",
                stderr.lines().last().unwrap_or_default()
            ),
            ConversationEnd::Ended(other) => {
                format!("the probe process ended in {step}: {other:?}")
            }
        }
    }
}

/// What a worker that has told everything still owes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterDone {
    /// Nothing.
    Leave,
    /// A good end: it worked a GPU, and a driver that fails to let go of it has failed.
    ExitWell,
}

/// Listens to a worker until it is done or `patience` is at its end, and sees to its end.
pub(crate) fn listen(
    mut worker: WorkerProcess,
    patience: Duration,
    after_done: AfterDone,
    interrupt: &Interrupt,
) -> Told {
    let deadline = Instant::now() + patience;
    let mut fields = Map::new();
    let mut step = "start".to_owned();
    let mut is_done = false;
    let end = loop {
        match worker.next_event(deadline, interrupt) {
            WorkerEvent::Line(line) => match serde_json::from_str(&line) {
                Ok(Message::Step(name)) => step = name,
                Ok(Message::Field { name, value }) => {
                    fields.insert(name, value);
                }
                Ok(Message::Done {}) if after_done == AfterDone::Leave => {
                    worker.leave();
                    let end = ConversationEnd::Finished;
                    return Told { fields, end, step };
                }
                Ok(Message::Done {}) => is_done = true,
                // A library may print on stdout, which harms nothing.
                Err(_) => {}
            },
            WorkerEvent::Interrupted => {
                worker.kill();
                break ConversationEnd::Interrupted;
            }
            WorkerEvent::TimedOut => {
                let stuck = worker.kill() == ProcessEnd::Stuck;
                let step = if stuck {
                    format!("{step} (and cannot be killed: uninterruptible sleep in the driver)")
                } else {
                    step.clone()
                };
                let seconds = patience.as_secs_f64();
                break ConversationEnd::Ended(WorkerEnd::TimedOut { step, seconds });
            }
            WorkerEvent::Closed => {
                let end = worker.finish(Duration::from_secs(2));
                break if is_done && end == ProcessEnd::Exited(0) {
                    ConversationEnd::Finished
                } else {
                    ConversationEnd::Ended(worker.end_without_result(&end))
                };
            }
        }
    };
    Told { fields, end, step }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_waits_for_a_parent_that_does_not_listen() {
        let queue = Arc::new(Queue::default());
        let field = |value: u64| Message::Field {
            name: "run".to_owned(),
            value: value.into(),
        };
        let step = || Message::Step("products".to_owned());
        for value in 0..1000 {
            queue.push_newest(field(value));
        }
        queue.push(step());
        queue.settle(Duration::from_millis(1));
        for value in 1000..2000 {
            queue.push_newest(field(value));
        }
        // The newest of each, in order.
        assert_eq!(queue.take(), field(999));
        assert_eq!(queue.take(), step());
        let settled = {
            let queue = Arc::clone(&queue);
            std::thread::spawn(move || queue.settle(Duration::MAX))
        };
        assert_eq!(queue.take(), field(1999));
        std::thread::sleep(Duration::from_millis(20));
        assert!(!settled.is_finished(), "the last is being written");
        let writer = std::thread::spawn(move || queue.take());
        settled.join().expect("everything is written");
        assert!(!writer.is_finished(), "it waits for the next");
    }

    fn told(script: &str) -> Told {
        let program = std::path::PathBuf::from("/bin/sh");
        let arguments = ["-c".into(), script.into()];
        let worker = WorkerProcess::start(&program, &arguments, &[]).expect("sh starts");
        listen(
            worker,
            Duration::from_millis(500),
            AfterDone::ExitWell,
            &Interrupt::default(),
        )
    }

    #[test]
    fn a_worker_that_finishes() {
        let told = told(
            r#"echo noise; echo '{"step":"a"}'; echo '{"field":{"name":"x","value":3}}'; echo '{"done":{}}'"#,
        );
        assert_eq!(told.end, ConversationEnd::Finished);
        assert_eq!(told.fields["x"], 3);
    }

    #[test]
    fn one_that_hangs_is_killed_in_its_step() {
        let told = told(r#"trap '' TERM; echo '{"step":"cuInit"}'; sleep 600"#);
        assert_eq!(
            told.end,
            ConversationEnd::Ended(WorkerEnd::TimedOut {
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
        assert_eq!(
            told.end,
            ConversationEnd::Ended(WorkerEnd::Killed { signal: 6 })
        );
    }
}
