//! Figures of earlier runs of this node, with which a run is compared.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The figures of one earlier run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EarlierRun {
    /// When its collection began, RFC 3339 in UTC.
    pub collected_at: String,
    pub driver_version: Option<String>,
    /// Since boot, in seconds.
    pub uptime_s: Option<f64>,
    /// Simulated driver libraries answered: no figure of a real GPU.
    pub simulated: bool,
    /// By UUID.
    pub gpus: BTreeMap<String, GpuFigures>,
}

/// Figures of one GPU; those that were not read are absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GpuFigures {
    pub power_limit_mw: Option<u32>,
    /// TFLOP/s by precision and kernels (`bf16 sm_90a`), of a burn that ended well.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tflops: BTreeMap<String, f64>,
    /// Rows that were remapped for correctable and uncorrectable errors.
    pub remapped_rows: Option<u32>,
    /// Correctable ECC errors in the lifetime of the GPU.
    pub correctable_errors: Option<u64>,
    /// Time for which heat or power supply held the clocks down since the driver was loaded.
    pub slowdown_ns: Option<u64>,
}
