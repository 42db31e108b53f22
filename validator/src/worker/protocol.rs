//! The messages of a worker to its parent: the step that it begins, then its results.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

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

/// The order to begin, on the standard input of a worker that stands by; where that ends without
/// it, the worker ends, too.
pub(crate) const GO: &str = "go";
/// The step in which a worker waits for it.
pub(crate) const STANDING_BY: &str = "standing by";
/// The field that holds a worker's result so far; a worker that has sent one promises the next.
pub(crate) const RUN: &str = "run";
/// The field in which a worker reports when its load began, by [`super::clock::now_s`].
pub(crate) const LOAD_BEGAN: &str = "load_began_s";

/// The worker's end of the conversation.
#[derive(Default)]
pub(crate) struct Reporter {
    /// Messages of a thread, once there is one that is not awaited.
    queue: OnceLock<Option<Arc<Queue>>>,
}

/// Time-out for the report of a step. The parent reads reports at once, unless it is stopped or
/// starved: then the work goes on.
const TIME_TO_TELL: Duration = Duration::from_millis(100);

impl Reporter {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Reports a value of which only the newest matters, and does not wait for a reader: the parent
    /// may be stopped, and its pipe full.
    pub(crate) fn newest(&self, name: &str, value: &impl Serialize) {
        let queue = self.queue.get_or_init(Queue::start);
        if let Ok(value) = serde_json::to_value(value) {
            let name = name.to_owned();
            let message = Message::Field { name, value };
            match queue {
                Some(queue) => queue.push_newest(message),
                None => write(&message),
            }
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
        // The process ends after this, and reports that are not written then are lost.
        if let Some(Some(queue)) = self.queue.get() {
            queue.settle(Duration::MAX);
        }
    }

    /// After all earlier reports.
    fn send(&self, message: Message) {
        match self.queue.get() {
            None | Some(None) => write(&message),
            Some(Some(queue)) => {
                queue.push(message);
                queue.settle(TIME_TO_TELL);
            }
        }
    }
}

/// When the parent is gone there is no reader, and the worker dies with it.
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

/// Messages that a thread of its own writes, in their order.
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
    /// `None` where the host refuses a thread: messages are then written by the sending thread.
    fn start() -> Option<Arc<Self>> {
        let queue = Arc::new(Self::default());
        let told = Arc::clone(&queue);
        let write_all = move || {
            loop {
                write(&told.take());
            }
        };
        std::thread::Builder::new().spawn(write_all).ok()?;
        Some(queue)
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
}
