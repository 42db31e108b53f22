//! When a run began and ended, by its facts: reports read no clock.

use jiff::{SignedDuration, Timestamp};

use crate::facts::Facts;

/// The begin and the end of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct TimeSpan {
    pub(super) start: Timestamp,
    pub(super) stop: Timestamp,
}

impl TimeSpan {
    /// 1970 where the facts have no time of collection; no duration where none was measured.
    pub(super) fn of(facts: &Facts) -> Self {
        let start: Timestamp = facts.collected_at.parse().unwrap_or(Timestamp::UNIX_EPOCH);
        let total = facts.timings_ms.get("total").copied().unwrap_or_default();
        let stop = SignedDuration::try_from_secs_f64(total.max(0.0) / 1000.0)
            .ok()
            .and_then(|it| start.checked_add(it).ok());
        Self {
            start,
            stop: stop.unwrap_or(start),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::TimeSpan;
    use crate::facts::Facts;

    #[test]
    fn the_end_follows_from_the_duration() {
        let mut facts = Facts {
            collected_at: "2026-11-20T03:04:05Z".to_owned(),
            ..Facts::default()
        };
        assert_eq!(TimeSpan::of(&facts).start, TimeSpan::of(&facts).stop);
        facts.timings_ms.insert("total".to_owned(), 1500.0);
        let stop = TimeSpan::of(&facts).stop.to_string();
        assert_eq!(stop, "2026-11-20T03:04:06.5Z");
        for wrong in [f64::NAN, f64::INFINITY, -1.0, 1e300] {
            facts.timings_ms.insert("total".to_owned(), wrong);
            let span = TimeSpan::of(&facts);
            assert_eq!(span.start, span.stop, "{wrong}");
        }
        facts.collected_at = "yesterday".to_owned();
        assert_eq!(TimeSpan::of(&facts).start.as_second(), 0);
    }
}
