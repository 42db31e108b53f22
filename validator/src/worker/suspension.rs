//! How long this process has stood still: a paused container, a job that was stopped, a virtual
//! machine that is moved.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How often it is noted that the process runs.
const TICK: Duration = Duration::from_millis(100);
/// A process that noted nothing for so long stood still: on a host that is merely busy a thread
/// that slept runs again within milliseconds. This project's choice.
const STAND_STILL: Duration = Duration::from_secs(1);

/// A watch that goes on only while this process does.
#[derive(Clone, Debug)]
pub(crate) struct SuspensionWatch(Arc<Mutex<Noted>>);

#[derive(Debug)]
struct Noted {
    /// When it was noted last that the process runs.
    ran: Instant,
    stood_still: Duration,
}

impl Noted {
    fn note(&mut self, now: Instant) -> Duration {
        let gap = now.saturating_duration_since(self.ran);
        if gap >= STAND_STILL {
            self.stood_still += gap;
        }
        self.ran = self.ran.max(now);
        self.stood_still
    }
}

impl SuspensionWatch {
    /// Starts a thread that ends soon after the watch is dropped.
    pub(crate) fn start() -> Self {
        let noted = Arc::new(Mutex::new(Noted {
            ran: Instant::now(),
            stood_still: Duration::ZERO,
        }));
        let watched = Arc::downgrade(&noted);
        // Without the thread every long wait would look like standing still.
        let started = std::thread::Builder::new().spawn(move || {
            while note(&watched).is_some() {
                std::thread::sleep(TICK);
            }
        });
        if started.is_err() {
            lock(&noted).ran = Instant::now() + Duration::from_secs(u64::from(u32::MAX));
        }
        Self(noted)
    }

    /// So far, since the start. Whoever asks right after the process goes on has it counted.
    pub(crate) fn stood_still(&self) -> Duration {
        lock(&self.0).note(Instant::now())
    }
}

fn note(watched: &Weak<Mutex<Noted>>) -> Option<Duration> {
    let noted = watched.upgrade()?;
    Some(lock(&noted).note(Instant::now()))
}

fn lock(noted: &Mutex<Noted>) -> std::sync::MutexGuard<'_, Noted> {
    noted.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_long_gaps_count() {
        let began = Instant::now();
        let mut noted = Noted {
            ran: began,
            stood_still: Duration::ZERO,
        };
        let at = |milliseconds| began + Duration::from_millis(milliseconds);
        assert_eq!(noted.note(at(100)), Duration::ZERO);
        assert_eq!(noted.note(at(1099)), Duration::ZERO);
        assert_eq!(noted.note(at(7099)), Duration::from_secs(6));
        // Another thread asked a moment before.
        assert_eq!(noted.note(at(7098)), Duration::from_secs(6));
        assert_eq!(noted.note(at(8099)), Duration::from_secs(7));
    }

    #[test]
    fn a_thread_that_waits_for_long_is_no_process_that_stands_still() {
        let watch = SuspensionWatch::start();
        std::thread::sleep(STAND_STILL * 2);
        assert_eq!(watch.stood_still(), Duration::ZERO);
    }
}
