//! One line on a terminal that says what is being looked at, and for how long already.

use std::io::IsTerminal as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::terminal::to_stderr;
use crate::level::Stage;

/// The line; nothing at all where standard error is no terminal. It is removed when dropped.
pub(crate) struct Progress {
    stage: Arc<Mutex<Stage>>,
    done: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Progress {
    pub(crate) fn start() -> Self {
        let stage = Arc::new(Mutex::new(Stage::Host));
        let done = Arc::new(AtomicBool::new(false));
        let thread = std::io::stderr().is_terminal().then(|| {
            let (stage, done) = (Arc::clone(&stage), Arc::clone(&done));
            std::thread::spawn(move || show(&stage, &done))
        });
        Self {
            stage,
            done,
            thread,
        }
    }

    pub(crate) fn begin(&self, stage: Stage) {
        *self.stage.lock().unwrap_or_else(PoisonError::into_inner) = stage;
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic there has only cost the line.
            let _ = thread.join();
        }
    }
}

fn show(stage: &Mutex<Stage>, done: &AtomicBool) {
    const BETWEEN: Duration = Duration::from_millis(100);
    const ERASE_LINE: &str = "\r\u{1b}[2K";
    let started = Instant::now();
    while !done.load(Ordering::Relaxed) {
        // A run that ends at once shows no flicker.
        std::thread::park_timeout(BETWEEN);
        if done.load(Ordering::Relaxed) {
            break;
        }
        let stage = *stage.lock().unwrap_or_else(PoisonError::into_inner);
        let (number, what) = match stage {
            Stage::Host => (1, "reading the host"),
            Stage::Gpu => (2, "asking NVML and CUDA"),
            Stage::Load => (3, "GPUs at work"),
        };
        let seconds = started.elapsed().as_secs_f64();
        to_stderr(&format!("{ERASE_LINE}[{number}/3] {what}, {seconds:.1} s"));
    }
    to_stderr(ERASE_LINE);
}
