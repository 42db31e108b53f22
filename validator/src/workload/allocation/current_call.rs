//! The driver call in which a worker is, so that one that hangs is ended with its name.
//!
//! A report for each call would cost more than the call. A thread reports the call only when it has
//! lasted for a while.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::worker::protocol::Reporter;

/// Longer than any call of an operation takes on a healthy GPU, and shorter than the silence after
/// which the parent takes a worker for hung, also in tests that scale it down.
const LONG: Duration = Duration::from_millis(250);
const CALLS: [&str; 4] = [
    "cuMemAlloc_v2",
    "cuMemcpyDtoH_v2",
    "cuCtxSynchronize",
    "cuMemFree_v2",
];

/// A part of an operation, by the call that takes longest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Allocate = 0,
    Copy = 1,
    Compute = 2,
    Free = 3,
}

/// The call that is under way.
pub(super) struct CurrentCall {
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    /// Calls so far times the number of calls, plus the current one.
    current: AtomicUsize,
    is_over: AtomicBool,
}

impl CurrentCall {
    pub(super) fn watch() -> Self {
        let state = Arc::new(State::default());
        let watched = Arc::clone(&state);
        let watch = move || {
            // The worker's own reporter may be in the hands of the thread that hangs.
            let reporter = Reporter::new();
            report_long_calls(&watched, &mut |call| reporter.step(call));
        };
        // Where the host refuses a thread a hang is reported without its call.
        let thread = std::thread::Builder::new().spawn(watch).ok();
        Self { state, thread }
    }

    pub(super) fn begin(&self, call: Call) {
        let before = self.state.current.load(Ordering::Relaxed);
        let count = before / CALLS.len() + 1;
        let current = count.wrapping_mul(CALLS.len()) + call as usize;
        self.state.current.store(current, Ordering::Relaxed);
    }
}

fn report_long_calls(state: &State, report: &mut dyn FnMut(&str)) {
    let (mut last, mut reported) = (0, 0);
    while !state.is_over.load(Ordering::Relaxed) {
        std::thread::park_timeout(LONG);
        let current = state.current.load(Ordering::Relaxed);
        if current == last && current != reported {
            reported = current;
            report(CALLS[current % CALLS.len()]);
        }
        last = current;
    }
}

impl Drop for CurrentCall {
    fn drop(&mut self) {
        self.state.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic there has cost the names of calls alone.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_call_that_lasts_is_reported_and_only_once() {
        let calls = CurrentCall {
            state: Arc::default(),
            thread: None,
        };
        let state = Arc::clone(&calls.state);
        let watcher = std::thread::spawn(move || {
            let mut reported = Vec::new();
            report_long_calls(&state, &mut |call| reported.push(call.to_owned()));
            reported
        });
        for _ in 0..20 {
            calls.begin(Call::Allocate);
            std::thread::sleep(LONG / 10);
            calls.begin(Call::Copy);
            std::thread::sleep(LONG / 10);
        }
        calls.begin(Call::Free);
        std::thread::sleep(LONG * 6);
        drop(calls);
        let reported = watcher.join().expect("no panic");
        // A loaded machine may stretch a short one.
        assert_eq!(
            reported.iter().filter(|it| *it == "cuMemFree_v2").count(),
            1
        );
        assert_eq!(reported.last().map(String::as_str), Some("cuMemFree_v2"));
    }
}
