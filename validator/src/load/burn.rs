//! The burn: every GPU multiplies matrices at its power limit, and every element of every product is compared.
//!
//! Each GPU has a worker process of its own, to which `CUDA_VISIBLE_DEVICES=<UUID>` shows that GPU alone; one more process
//! reads NVML's sensors meanwhile. Whatever happens to one of them, the others go on.

use std::time::Duration;

use crate::facts::{Facts, Precision, SensorSample};
use crate::probe::Interrupt;

/// What is asked of a burn.
#[derive(Clone, Debug)]
pub(crate) struct BurnOptions {
    pub(crate) duration: Duration,
    /// Empty: the one of each GPU that heats it most.
    pub(crate) precisions: Vec<Precision>,
    /// UUIDs; empty: every GPU.
    pub(crate) gpus: Vec<String>,
    pub(crate) memory: MemoryShare,
    pub(crate) engine: EngineChoice,
    /// Burns a GPU although others use it.
    pub(crate) share: bool,
    /// How many bits to flip on purpose in each GPU's results.
    pub(crate) inject: u32,
    pub(crate) seed: Option<u64>,
}

/// How much of a GPU's memory is written and read back every sweep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum MemoryShare {
    /// Of the memory that is free when the burn begins.
    Percent(f64),
    Bytes(u64),
}

/// Who multiplies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum EngineChoice {
    /// Whichever draws more power.
    #[default]
    Auto,
    Cublaslt,
    Ptx,
}

/// How far the burn of one GPU is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BurnProgress {
    pub(crate) uuid: String,
    pub(crate) state: BurnState,
    pub(crate) precision: Option<Precision>,
    pub(crate) tflops_now: f64,
    pub(crate) tflops_mean: f64,
    pub(crate) products_verified: u64,
    pub(crate) mismatches: u64,
    pub(crate) elapsed_s: f64,
    pub(crate) remaining_s: f64,
    pub(crate) memory_bytes: u64,
    pub(crate) sensors: Option<SensorSample>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BurnState {
    Starting,
    Running,
    Ended,
}
