//! What GPUs did under work: every worker's result, by GPU.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Reading;

/// Results of load probes, by GPU UUID.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LoadFacts {
    /// The small verified kernel, by GPU UUID.
    pub cuda_kernel: BTreeMap<String, Reading<KernelRun>>,
}

/// How a worker process ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WorkerEnd {
    /// It sent its result and exited with 0.
    Finished,
    /// A driver call failed.
    CudaError {
        call: String,
        code: u32,
        name: String,
    },
    /// The GPU was in use by others, so no load was put on it.
    Busy(String),
    /// It exited early; the text holds the end of what it said on stderr.
    Exited { status: i32, stderr: String },
    /// A signal ended it.
    Killed { signal: i32 },
    /// It did not answer in time and was killed; the text names the step it was in.
    TimedOut { step: String, seconds: f64 },
}

/// One run of the embedded check kernel on one GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KernelRun {
    pub end: WorkerEnd,
    /// Values that were compared with the host's own.
    pub values_compared: u64,
    pub mismatches: u64,
    /// The first mismatches, at most eight.
    pub examples: Vec<ValueMismatch>,
    /// Wall time from start of the process to its result, in milliseconds.
    pub wall_ms: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ValueMismatch {
    pub index: u64,
    /// Bits as hex: `0x3f800000`.
    pub expected: String,
    pub observed: String,
}
