//! Ctrl-C, SIGTERM and SIGHUP do not end a task at once: they ask its current child to stop, so
//! that reports are still fetched and the remote machine is left clean. A second signal stops the
//! child the hard way. Threads that work side by side each have a child of their own, and a signal
//! is for all of them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context as _;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// How often the user has requested a stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Finish early, but in order.
    Stop,
    /// Give up on the child.
    Kill,
}

type Action = Box<dyn FnMut(Request) + Send>;

#[derive(Default)]
struct State {
    signals: usize,
    /// Of each child that is waited for, under a number of its own.
    actions: BTreeMap<u64, Action>,
    last_number: u64,
}

/// Catches the signals for the rest of the process.
#[derive(Clone)]
pub struct Interrupts {
    state: Arc<Mutex<State>>,
}

impl std::fmt::Debug for Interrupts {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Interrupts({} received)", self.lock().signals)
    }
}

impl Interrupts {
    pub fn catch() -> anyhow::Result<Interrupts> {
        let interrupts = Interrupts {
            state: Arc::default(),
        };
        let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP])?;
        let receiver = interrupts.clone();
        let receive = move || signals.forever().for_each(|_| receiver.received());
        let started = std::thread::Builder::new().spawn(receive);
        started.context("no thread could be started to receive signals")?;
        Ok(interrupts)
    }

    /// Whether the user has requested a stop.
    pub fn requested(&self) -> bool {
        self.lock().signals > 0
    }

    /// Runs `wait`; a signal that comes meanwhile, or came before, calls `action`.
    pub fn while_waiting<T>(
        &self,
        action: impl FnMut(Request) + Send + 'static,
        wait: impl FnOnce() -> T,
    ) -> T {
        let mut action: Action = Box::new(action);
        let number = {
            let mut state = self.lock();
            if state.signals > 0 {
                action(Request::Stop);
            }
            state.last_number += 1;
            let number = state.last_number;
            state.actions.insert(number, action);
            number
        };
        let result = wait();
        self.lock().actions.remove(&number);
        result
    }

    fn received(&self) {
        let mut state = self.lock();
        state.signals += 1;
        let request = if state.signals == 1 {
            Request::Stop
        } else {
            Request::Kill
        };
        for action in state.actions.values_mut() {
            action(request);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::{Arc, Interrupts, Request};

    #[test]
    fn a_signal_reaches_every_child_that_is_waited_for_and_no_other() {
        let interrupts = Interrupts {
            state: Arc::default(),
        };
        let (told, heard) = mpsc::channel();
        let action = |name: &'static str| {
            let told = told.clone();
            move |request| {
                let _ = told.send((name, request));
            }
        };
        interrupts.while_waiting(action("ended"), || ());
        interrupts.while_waiting(action("first"), || {
            interrupts.while_waiting(action("second"), || interrupts.received());
            interrupts.received();
        });
        interrupts.while_waiting(action("late"), || ());
        let told: Vec<_> = heard.try_iter().collect();
        assert_eq!(
            told,
            [
                ("first", Request::Stop),
                ("second", Request::Stop),
                ("first", Request::Kill),
                ("late", Request::Stop)
            ]
        );
    }
}
