//! The clock that a worker and its parent share, so that a worker's times are right however late
//! they are read: the parent may be starved, or stopped by job control.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Seconds of the clock of [`Instant`], which on Linux is `CLOCK_MONOTONIC`.
pub(crate) fn now_s() -> f64 {
    let now = clock_gettime(ClockId::Monotonic);
    #[expect(clippy::cast_precision_loss, reason = "seconds since boot")]
    let seconds = now.tv_sec as f64 + now.tv_nsec as f64 / 1e9;
    seconds
}

/// When that clock showed this; now, for a time that is yet to come.
pub(crate) fn instant_of(at_s: f64) -> Instant {
    let now = Instant::now();
    let ago = Duration::try_from_secs_f64(now_s() - at_s).unwrap_or_default();
    now.checked_sub(ago).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_the_same_however_late_it_is_heard() {
        let (at_s, at) = (now_s(), Instant::now());
        std::thread::sleep(Duration::from_millis(30));
        let heard = instant_of(at_s);
        let apart = at.saturating_duration_since(heard) + heard.saturating_duration_since(at);
        assert!(apart < Duration::from_millis(10), "{apart:?}");
        assert!(instant_of(at_s + 1e6) >= at);
        assert!(instant_of(f64::NAN) >= at);
    }
}
