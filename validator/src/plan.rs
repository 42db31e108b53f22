//! What a burn is to do and how far it is: types that commands, session and workloads share.

use std::ffi::OsString;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use validator_core::facts::{AllocationPhase, Layout, Precision, SensorSample};
use validator_core::plan::EngineChoice;

/// The request to a burn.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BurnOptions {
    /// All precisions together.
    pub duration: Duration,
    /// Empty: the one of each GPU that heats it most.
    pub precisions: Vec<Precision>,
    /// UUIDs; empty: every GPU.
    pub gpus: Vec<String>,
    pub memory: MemoryShare,
    /// Burns a GPU although others use it.
    pub share: bool,
    /// How many bits to flip on purpose in each GPU's results.
    pub inject: u32,
    /// `None`: another one each time.
    pub seed: Option<u64>,
    /// GEMM implementation.
    pub engine: EngineChoice,
}

impl BurnOptions {
    /// Every GPU for as long, at what heats it most, over nearly all of its free memory.
    pub(crate) fn lasting(duration: Duration) -> Self {
        Self {
            duration,
            precisions: Vec::new(),
            gpus: Vec::new(),
            memory: MemoryShare::DEFAULT,
            share: false,
            inject: 0,
            seed: None,
            engine: EngineChoice::Auto,
        }
    }
}

/// The request for an allocation test.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AllocationOptions {
    /// UUIDs; empty: every GPU.
    pub gpus: Vec<String>,
    /// On all GPUs together; `None`: two a GPU.
    pub workers: Option<u32>,
    /// Of the steady phase.
    pub duration: Duration,
    /// Of each worker.
    pub memory_bytes: u64,
    /// Share of the workers that must succeed.
    pub minimum_success_percent: f64,
    /// Tests a GPU although others use it.
    pub share: bool,
}

impl AllocationOptions {
    /// Two workers on every GPU, all of which must succeed.
    pub(crate) fn lasting(duration: Duration, memory_bytes: u64, share: bool) -> Self {
        Self {
            gpus: Vec::new(),
            workers: None,
            duration,
            memory_bytes,
            minimum_success_percent: 100.0,
            share,
        }
    }
}

/// The request for a user's command under layouts of GPUs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LayoutOptions {
    /// The program and its arguments.
    pub command: Vec<OsString>,
    pub layouts: Vec<Layout>,
    /// UUIDs; empty: every GPU.
    pub gpus: Vec<String>,
    /// Of each layout.
    pub time_limit: Duration,
    /// Gives the command a GPU although others use it.
    pub share: bool,
}

/// How far the allocation test is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AllocationProgress {
    pub phase: AllocationPhase,
    /// Those that have not ended.
    pub workers: usize,
    pub operations: u64,
    pub failures: u64,
    /// Of the phase.
    pub left: Duration,
}

/// How much of a GPU's memory is written and read back every sweep.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum MemoryShare {
    /// Of the memory that is free when the burn begins.
    Percent(f64),
    Bytes(u64),
}

impl MemoryShare {
    /// What is left is for the driver and for the context of the process.
    pub(crate) const DEFAULT: Self = Self::Percent(95.0);

    /// Bytes to take of `free` ones.
    pub(crate) fn of(self, free: u64) -> u64 {
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of the memory, to the page"
        )]
        match self {
            Self::Percent(percent) => (free as f64 * percent / 100.0) as u64,
            Self::Bytes(bytes) => bytes,
        }
    }
}

/// The seed of a run that none was requested for.
pub(crate) fn random_seed() -> u64 {
    let since_epoch = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    u64::from(since_epoch.subsec_nanos()) << 32 ^ since_epoch.as_secs()
}

/// How far the burn of one GPU is.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct BurnProgress {
    pub uuid: String,
    pub state: BurnState,
    pub precision: Option<Precision>,
    /// The kernels that multiply: `sm_90a`, `cublaslt`.
    pub kernels: String,
    pub tflops_now: f64,
    pub tflops_mean: f64,
    pub products_verified: u64,
    pub mismatches: u64,
    pub elapsed_s: f64,
    pub remaining_s: f64,
    pub memory_bytes: u64,
    pub power_limit_mw: Option<u32>,
    pub sensors: Option<SensorSample>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum BurnState {
    #[default]
    Starting,
    Running,
    Ended,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_memory() {
        assert_eq!(MemoryShare::Percent(50.0).of(1000), 500);
        assert_eq!(MemoryShare::Bytes(7).of(1000), 7);
    }
}
