//! What workers with one thread say: the step that they are in, then what they saw.

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
    /// A thread that tells what nobody waits for, once there is such.
    newest: OnceLock<Arc<Newest>>,
}

impl Teller {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Tells of something of which only the newest matters, and does not wait until somebody listens: the parent may be
    /// stopped, and its pipe full.
    pub(crate) fn newest(&self, name: &str, value: &impl Serialize) {
        let newest = self.newest.get_or_init(Newest::start);
        if let Ok(value) = serde_json::to_value(value) {
            let name = name.to_owned();
            newest.tell(Message::Field { name, value });
        }
    }

    pub(crate) fn step(&self, step: &str) {
        self.send(&Message::Step(step.to_owned()));
    }

    pub(crate) fn field(&self, name: &str, value: &impl Serialize) {
        if let Ok(value) = serde_json::to_value(value) {
            let name = name.to_owned();
            self.send(&Message::Field { name, value });
        }
    }

    pub(crate) fn done(&self) {
        self.send(&Message::Done {});
    }

    /// Behind everything that was told before.
    fn send(&self, message: &Message) {
        if let Some(newest) = self.newest.get() {
            newest.settle();
        }
        write(message);
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

/// The message that is to be told next by a thread of its own; a newer one takes its place.
#[derive(Default)]
struct Newest {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    message: Option<Message>,
    /// The one before it is being written.
    writing: bool,
}

impl Newest {
    fn start() -> Arc<Self> {
        let newest = Arc::new(Self::default());
        let told = Arc::clone(&newest);
        std::thread::spawn(move || {
            loop {
                write(&told.take());
            }
        });
        newest
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, message: Message) {
        self.lock().message = Some(message);
        self.changed.notify_all();
    }

    /// The next message; the one before it is written then.
    fn take(&self) -> Message {
        let mut waiting = self.lock();
        waiting.writing = false;
        self.changed.notify_all();
        loop {
            if let Some(message) = waiting.message.take() {
                waiting.writing = true;
                return message;
            }
            waiting = wait(&self.changed, waiting);
        }
    }

    /// Waits until everything is written.
    fn settle(&self) {
        let mut waiting = self.lock();
        while waiting.message.is_some() || waiting.writing {
            waiting = wait(&self.changed, waiting);
        }
    }
}

fn wait<'w>(changed: &Condvar, waiting: MutexGuard<'w, Waiting>) -> MutexGuard<'w, Waiting> {
    changed
        .wait(waiting)
        .unwrap_or_else(PoisonError::into_inner)
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
    fn the_newest_is_told_and_nobody_waits_for_it_but_who_says_more() {
        let newest = Arc::new(Newest::default());
        let field = |value: u64| Message::Field {
            name: "run".to_owned(),
            value: value.into(),
        };
        // Nobody listens: nothing blocks.
        for value in 0..1000 {
            newest.tell(field(value));
        }
        assert_eq!(newest.take(), field(999));
        newest.tell(field(1000));
        let settled = {
            let newest = Arc::clone(&newest);
            std::thread::spawn(move || newest.settle())
        };
        std::thread::sleep(Duration::from_millis(20));
        assert!(!settled.is_finished(), "one is written, one waits");
        assert_eq!(newest.take(), field(1000));
        std::thread::sleep(Duration::from_millis(20));
        assert!(!settled.is_finished(), "one is written");
        let writer = std::thread::spawn(move || newest.take());
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
