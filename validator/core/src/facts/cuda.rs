//! Facts from the CUDA driver library.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ComputeCapability, Reading};

/// Facts from `libcuda.so.1`, read in a process of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CudaFacts {
    /// The library was loaded, from this path (links resolved).
    pub library: Reading<String>,
    /// The loader does not find `libcuda.so.1` by its name, as programs ask for it; it was loaded
    /// by this path instead.
    #[serde(default)]
    pub loaded_by_path: Option<String>,
    /// The loader's error for that name, where it found a file that cannot be loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unloadable: Option<String>,
    /// What `cuInit` answered.
    pub init: Reading<CudaResult>,
    /// `cuDriverGetVersion`: 1000 x major + 10 x minor.
    pub driver_version: Reading<u32>,
    /// CUDA's devices, by UUID; the order is CUDA's own and means nothing elsewhere.
    pub devices: Reading<Vec<CudaDevice>>,
    /// CUDA was started on its first GPU only, so that [`Self::devices`] lists no other: at level
    /// quick on several GPUs, because `cuInit` takes a quarter of a second for each GPU that it may
    /// use.
    #[serde(default)]
    pub first_gpu_only: bool,
    /// How the probe process ended, when it did not end well.
    pub probe_trouble: Vec<String>,
}

/// A `CUresult`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CudaResult {
    /// 0 is success.
    pub code: u32,
    /// `CUDA_ERROR_SYSTEM_NOT_READY`.
    pub name: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CudaDevice {
    /// `GPU-…` (or `MIG-…`), in NVML's spelling.
    pub uuid: String,
    pub name: String,
    pub pci_address: Option<String>,
    pub compute_capability: ComputeCapability,
    pub total_memory_bytes: u64,
    pub multiprocessors: u32,
}
