//! Lines of the kernel log that speak of NVIDIA devices or of the PCIe bus.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The kernel log, as far as it speaks of NVIDIA devices or PCIe errors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KernelLog {
    pub source: KernelLogSource,
    /// The log reaches back to boot. The kernel's ring buffer forgets its oldest records; what it forgot was not looked at.
    pub since_boot: bool,
    /// Age of the oldest record that was read, seconds before collection; `None` for an empty log.
    pub oldest_record_age_s: Option<f64>,
    /// The records that matter, oldest first: at most [`KERNEL_LOG_RECORDS_KEPT`].
    pub records: Vec<KernelLogRecord>,
    /// Records that matter but were dropped over that limit (from the middle: the first and last are kept).
    pub records_dropped: u64,
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
    /// Seconds before collection; `None` where the source does not say.
    pub age_s: Option<f64>,
    /// The text without its time stamp; anything may be in it.
    pub text: String,
}
