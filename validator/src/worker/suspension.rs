//! How long this process has stood still: a paused container, a job that was stopped, a virtual
//! machine that is moved. Deadlines of children and measured times exclude it.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How often it is noted that the process runs.
const TICK: Duration = Duration::from_millis(100);
/// A process that noted nothing for so long stood still: on a host that is merely busy a thread
/// that slept runs again within milliseconds. This project's choice.
const STAND_STILL: Duration = Duration::from_secs(1);

/// What every watch of this process shares.
static SHARED: Mutex<Weak<Mutex<Noted>>> = Mutex::new(Weak::new());

/// Counts the suspended time since it was started.
#[derive(Debug)]
pub(crate) struct SuspensionWatch {
    noted: Arc<Mutex<Noted>>,
    /// Suspended before.
    before: Duration,
}

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
    /// Starts to count. The thread that it needs is shared with every other watch, and ends soon
    /// after the last one is dropped.
    pub(crate) fn start() -> Self {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        let noted = shared.upgrade().unwrap_or_else(|| {
            let noted = start_to_note();
            *shared = Arc::downgrade(&noted);
            noted
        });
        Self::of(noted)
    }

    fn of(noted: Arc<Mutex<Noted>>) -> Self {
        let before = lock(&noted).note(Instant::now());
        Self { noted, before }
    }

    /// One with a thread of its own.
    #[cfg(test)]
    pub(super) fn unshared() -> Self {
        Self::of(start_to_note())
    }

    /// As if the process had been suspended for so long.
    #[cfg(test)]
    pub(super) fn suspend_for(&self, duration: Duration) {
        let mut noted = lock(&self.noted);
        noted.ran = noted.ran.checked_sub(duration).expect("a time");
    }

    /// So far, since the start. A reading right after the process goes on includes it.
    pub(crate) fn stood_still(&self) -> Duration {
        let all = lock(&self.noted).note(Instant::now());
        all.saturating_sub(self.before)
    }
}

/// Starts a thread that notes that the process runs, for as long as what it returns is kept.
fn start_to_note() -> Arc<Mutex<Noted>> {
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
    noted
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
        // Another thread read it a moment before.
        assert_eq!(noted.note(at(7098)), Duration::from_secs(6));
        assert_eq!(noted.note(at(8099)), Duration::from_secs(7));
    }

    #[test]
    fn a_watch_counts_from_its_own_start() {
        let early = SuspensionWatch::unshared();
        early.suspend_for(Duration::from_secs(3));
        let late = SuspensionWatch::of(Arc::clone(&early.noted));
        assert!(early.stood_still() >= Duration::from_secs(3));
        assert_eq!(late.stood_still(), Duration::ZERO);
        early.suspend_for(Duration::from_secs(2));
        assert!(late.stood_still() >= Duration::from_secs(2));
        assert!(early.stood_still() >= Duration::from_secs(5));
    }

    #[test]
    fn a_thread_that_waits_for_long_is_no_process_that_stands_still() {
        let watch = SuspensionWatch::start();
        std::thread::sleep(STAND_STILL * 2);
        assert_eq!(watch.stood_still(), Duration::ZERO);
    }
}
