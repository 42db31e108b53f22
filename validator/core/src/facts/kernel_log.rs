//! Lines of the kernel log that speak of NVIDIA devices or of the PCIe bus.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The kernel log, as far as it speaks of NVIDIA devices or PCIe errors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KernelLog {
    pub source: KernelLogSource,
    /// The log reaches back to boot. The kernel's ring buffer forgets its oldest records; what it
    /// forgot was not looked at.
    pub since_boot: bool,
    /// Age of the oldest record that was read, seconds before collection; `None` for an empty log.
    pub oldest_record_age_s: Option<f64>,
    /// Time stamp of the oldest record that was read, by the clock of [`KernelLogRecord::at_s`].
    pub oldest_record_at_s: Option<f64>,
    /// Time stamp of the newest record that was read.
    pub newest_record_at_s: Option<f64>,
    /// Time stamp before which records between the oldest and the newest are missing: overwritten
    /// before they were read.
    pub gap_until_s: Option<f64>,
    /// The records that matter, oldest first: at most [`KERNEL_LOG_RECORDS_KEPT`].
    pub records: Vec<KernelLogRecord>,
    /// Messages about a GPU that were dropped over that limit, and of which there is no other
    /// record.
    pub records_dropped: u64,
    /// Other messages that were dropped over that limit.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub others_dropped: u64,
}

/// How many records that matter are kept in the facts.
pub const KERNEL_LOG_RECORDS_KEPT: usize = 2_000;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KernelLogSource {
    #[default]
    Kmsg,
    Journal,
    Dmesg,
}

/// One record of the kernel log.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KernelLogRecord {
    /// Seconds before collection; `None` where the source does not say. The kernel stamps records
    /// by a clock that is never corrected, so that after months of uptime an age may be wrong by
    /// minutes.
    pub age_s: Option<f64>,
    /// The time stamp itself, seconds since boot: comparable among records of one source only, and
    /// with no other clock.
    pub at_s: Option<f64>,
    /// The text without its time stamp; anything may be in it.
    pub text: String,
    /// How many messages of the same kind and place came before it that are not kept.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub repeats: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "required by serde")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Where a log ended when it was read, so that new records can be distinguished from old ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KernelLogEnd {
    pub source: KernelLogSource,
    /// [`KernelLog::newest_record_at_s`].
    pub newest_record_at_s: Option<f64>,
}

impl KernelLog {
    pub fn end(&self) -> KernelLogEnd {
        KernelLogEnd {
            source: self.source,
            newest_record_at_s: self.newest_record_at_s,
        }
    }

    /// The same log, read again, without what was there before; `None` if it does not have all of
    /// what came since.
    ///
    /// By the kernel's time stamps alone: no other clock is comparable with theirs.
    pub fn since(&self, end: KernelLogEnd) -> Option<Self> {
        let is_new = |at_s: f64| end.newest_record_at_s.is_none_or(|newest| at_s > newest);
        let reaches_back = self.since_boot || !self.oldest_record_at_s.is_some_and(is_new);
        let has_gap = self.gap_until_s.is_some_and(is_new);
        let complete = self.source == end.source && reaches_back && !has_gap;
        let records = self.records.iter().filter(|it| it.at_s.is_none_or(is_new));
        complete.then(|| Self {
            records: records.cloned().collect(),
            ..self.clone()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(stamps: &[f64]) -> KernelLog {
        let record = |at_s: &f64| KernelLogRecord {
            // A clock that is minutes away from that of the stamps.
            age_s: Some(400.0),
            at_s: Some(*at_s),
            text: at_s.to_string(),
            repeats: 0,
        };
        KernelLog {
            oldest_record_at_s: stamps.first().copied(),
            newest_record_at_s: stamps.last().copied(),
            records: stamps.iter().map(record).collect(),
            ..KernelLog::default()
        }
    }

    fn since(before: &[f64], after: &KernelLog) -> Option<Vec<String>> {
        let new = after.since(log(before).end())?;
        Some(new.records.into_iter().map(|it| it.text).collect())
    }

    #[test]
    fn what_came_since_is_told_by_time_stamps_and_not_by_age() {
        let texts = |stamps: &[&str]| Some(stamps.iter().map(|&it| it.to_owned()).collect());
        let after = log(&[1.0, 2.0, 2.000_001, 9.0]);
        assert_eq!(since(&[1.0, 2.0], &after), texts(&["2.000001", "9"]));
        assert_eq!(since(&[1.0, 9.0], &after), texts(&[]));
        let all = KernelLog {
            since_boot: true,
            ..after.clone()
        };
        assert_eq!(since(&[], &all).map(|it| it.len()), Some(4));
    }

    #[test]
    fn a_log_that_lost_some_of_it_tells_nothing() {
        let after = log(&[5.0, 6.0, 7.0]);
        assert!(since(&[4.0], &after).is_none());
        assert!(since(&[5.0], &after).is_some());
        let with_gap = KernelLog {
            gap_until_s: Some(6.0),
            ..after.clone()
        };
        assert!(since(&[5.0], &with_gap).is_none());
        assert!(since(&[6.0], &with_gap).is_some());
        let other = KernelLog {
            source: KernelLogSource::Journal,
            ..after
        };
        assert!(since(&[5.0], &other).is_none());
    }
}
