//! One line on a terminal with the current step and its duration.

use std::io::IsTerminal as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::terminal::to_stderr;
use crate::plan::BurnProgress;
use crate::plan::BurnState;
use validator_core::level::Stage;

/// The text of the line.
struct Shown {
    stage: Stage,
    /// Of the burn, once it began.
    burn: String,
}

/// The line; nothing at all where standard error is no terminal. It is removed when dropped.
pub(crate) struct ProgressLine {
    shown: Arc<Mutex<Shown>>,
    done: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl ProgressLine {
    pub(crate) fn start() -> Self {
        let shown = Arc::new(Mutex::new(Shown {
            stage: Stage::Host,
            burn: String::new(),
        }));
        let done = Arc::new(AtomicBool::new(false));
        let thread = std::io::stderr().is_terminal().then(|| {
            let (shown, done) = (Arc::clone(&shown), Arc::clone(&done));
            std::thread::Builder::new().spawn(move || show(&shown, &done))
        });
        // A host that refuses the thread shows no progress.
        let thread = thread.and_then(Result::ok);
        Self {
            shown,
            done,
            thread,
        }
    }

    pub(crate) fn begin(&self, stage: Stage) {
        self.change(|shown| shown.stage = stage);
    }

    pub(crate) fn burn(&self, gpus: &[BurnProgress]) {
        self.change(|shown| shown.burn = burn_in_words(gpus));
    }

    fn change(&self, change: impl FnOnce(&mut Shown)) {
        change(&mut self.shown.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic there has only cost the line.
            let _ = thread.join();
        }
    }
}

fn show(shown: &Mutex<Shown>, done: &AtomicBool) {
    const BETWEEN: Duration = Duration::from_millis(100);
    const ERASE_LINE: &str = "\r\u{1b}[2K";
    let started = Instant::now();
    while !done.load(Ordering::Relaxed) {
        // A run that ends at once shows no flicker.
        std::thread::park_timeout(BETWEEN);
        if done.load(Ordering::Relaxed) {
            break;
        }
        let shown = shown.lock().unwrap_or_else(PoisonError::into_inner);
        let (number, what) = match shown.stage {
            Stage::Host => (1, "reading the host"),
            Stage::Gpu => (2, "reading NVML and CUDA"),
            Stage::Load => (3, "GPUs at work"),
        };
        let seconds = started.elapsed().as_secs_f64();
        to_stderr(&format!(
            "{ERASE_LINE}[{number}/3] {what}{}, {seconds:.1} s",
            shown.burn
        ));
    }
    to_stderr(ERASE_LINE);
}

/// `: 8 multiply, 5280 TFLOP/s, 0 mismatches, 4 s left`, in the width of a narrow terminal.
fn burn_in_words(gpus: &[BurnProgress]) -> String {
    let running = gpus.iter().filter(|it| it.state == BurnState::Running);
    let count = running.clone().count();
    if count == 0 {
        return String::new();
    }
    let tflops: f64 = running.clone().map(|it| it.tflops_now).sum();
    let left = running.map(|it| it.remaining_s).fold(0.0, f64::max);
    let mismatches: u64 = gpus.iter().map(|it| it.mismatches).sum();
    format!(": {count} multiply, {tflops:.0} TFLOP/s, {mismatches} mismatches, {left:.0} s left")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_sums_up_what_the_gpus_do() {
        let gpu = |uuid: &str, state, mismatches| BurnProgress {
            uuid: uuid.to_owned(),
            state,
            tflops_now: 600.0,
            mismatches,
            remaining_s: 7.0,
            ..BurnProgress::default()
        };
        assert_eq!(burn_in_words(&[gpu("GPU-a", BurnState::Starting, 0)]), "");
        let gpus = [
            gpu("GPU-a", BurnState::Running, 0),
            gpu("GPU-b", BurnState::Running, 0),
            gpu("GPU-c", BurnState::Ended, 2),
        ];
        assert_eq!(
            burn_in_words(&gpus),
            ": 2 multiply, 1200 TFLOP/s, 2 mismatches, 7 s left"
        );
    }
}
