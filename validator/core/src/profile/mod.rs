//! What a node must be: the profile, as written by a person and after `extends` was resolved.
//!
//! Everything is optional. What a profile leaves open is derived by `expect.rs` from the EC2
//! instance type, from the GPU model, and from the machine's own consistency. An empty file expects
//! nothing.

mod contradictions;
mod error;
mod init;
mod kubernetes;
mod load;
mod merge;
#[cfg(test)]
mod shipped_tests;
mod source;

use std::collections::BTreeMap;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use error::ProfileError;
pub use init::init;
pub use kubernetes::*;
pub use load::{ProfileFiles, SIZE_LIMIT_BYTES, load, parse, too_large};

use crate::facts::{ComputeMode, KernelModuleFlavor, Precision};
use crate::level::Level;
use crate::plan::EngineChoice;
use crate::reference::DriverVersion;

pub use crate::reference::{CudaVersion, VersionRequirement};

/// Node requirements (profile).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Profile {
    /// A name for reports: `p5.48xlarge`.
    pub name: Option<String>,
    pub description: Option<String>,
    /// Another profile, relative to this file, whose values hold where this one has none; no deeper
    /// than three. Scalars override, mappings merge key by key, lists replace, `null` clears.
    pub extends: Option<String>,
    pub driver: DriverProfile,
    pub cuda: CudaProfile,
    pub gpus: GpusProfile,
    /// systemd services by unit name without `.service`.
    pub services: BTreeMap<String, ServiceRequirement>,
    pub environment: EnvironmentProfile,
    /// Python environments that the machine must have, and that level standard starts.
    pub python: Vec<PythonRequirement>,
    pub container_runtime: ContainerRuntimeProfile,
    /// What the kubelet and the API server must say of the node.
    pub kubernetes: KubernetesProfile,
    pub policy: Policy,
    pub levels: BTreeMap<Level, LevelProfile>,
    pub image: ImageProfile,
    pub firstboot: FirstBootProfile,
    /// Per-check severity, by check id.
    pub checks: BTreeMap<String, CheckSetting>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DriverProfile {
    /// The oldest driver that will do: `580.65.06`.
    pub minimum: Option<DriverVersion>,
    /// The only branch that will do: `580`.
    pub branch: Option<u32>,
    pub kernel_module: Option<KernelModuleFlavor>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CudaProfile {
    /// The oldest CUDA version that the driver must offer: `"12.8"`.
    pub driver_minimum: Option<CudaVersion>,
    /// Toolkits that must be on the machine, by version prefix: `"12.8"` is met by 12.8.1.
    pub toolkits: Vec<CudaVersion>,
    /// Whether a `cuda-compat` package must, may or must not be there. The default is that it may
    /// where it applies.
    pub compat_package: Option<Requirement>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GpusProfile {
    /// The product name that NVML gives, or the name of a model of the reference table:
    /// `NVIDIA H200`.
    pub model: Option<String>,
    pub count: Option<u32>,
    /// The least total memory of each GPU.
    pub memory_minimum_mib: Option<u64>,
    pub persistence_mode: Option<bool>,
    pub ecc: Option<bool>,
    pub mig: Option<bool>,
    /// MIG devices on each GPU, when `mig` is true.
    pub mig_devices: Option<u32>,
    pub compute_mode: Option<ComputeMode>,
    /// The power limit in force, exactly.
    pub power_limit_w: Option<u32>,
    pub pcie: PcieProfile,
    /// Active NVLinks of each GPU.
    pub nvlinks: Option<u32>,
    /// VBIOS versions of which each GPU must have one.
    pub vbios: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PcieProfile {
    /// The least link generation that GPU and slot can reach together.
    pub generation: Option<u32>,
    /// The link's width in lanes.
    pub width: Option<u32>,
}

/// What a service must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ServiceRequirement {
    Active,
    Enabled,
    Installed,
    /// It must not be active.
    Inactive,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Requirement {
    Required,
    Allowed,
    Forbidden,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EnvironmentProfile {
    /// Variables that may be set although `injected_environment` would object.
    pub allowed: Vec<String>,
    /// Variables that must have exactly this value.
    pub required: BTreeMap<String, String>,
}

/// A Python environment that the machine must have. What is not named is not demanded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PythonRequirement {
    /// The environment's folder, or its interpreter: `/opt/venv`.
    pub path: String,
    /// Version of the interpreter: `">=3.10"`.
    #[serde(default)]
    pub python: Option<VersionRequirement>,
    #[serde(default)]
    pub torch: Option<VersionRequirement>,
    #[serde(default)]
    pub jax: Option<VersionRequirement>,
    #[serde(default)]
    pub tensorflow: Option<VersionRequirement>,
    #[serde(default)]
    pub cupy: Option<VersionRequirement>,
    /// The CUDA version that the frameworks were built for: `"12.8"`.
    #[serde(default)]
    pub cuda: Option<CudaVersion>,
}

impl PythonRequirement {
    /// That there is an environment, whatever its versions.
    pub fn at(path: String) -> Self {
        Self {
            path,
            python: None,
            torch: None,
            jax: None,
            tensorflow: None,
            cupy: None,
            cuda: None,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ContainerRuntimeProfile {
    /// Docker or containerd knows the `nvidia` runtime.
    pub nvidia_runtime: Option<Requirement>,
    /// A CDI specification lists as many `nvidia.com/gpu` devices as there are GPUs.
    pub cdi: Option<Requirement>,
}

/// Numbers that judge. What is `None` has the default that the check's documentation names with its
/// source.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    pub xid: XidPolicy,
    pub temperature_maximum_c: Option<i32>,
    pub memory_temperature_maximum_c: Option<i32>,
    /// Uncorrectable errors since the driver was loaded; 0 by default.
    pub ecc_volatile_uncorrectable_maximum: Option<u64>,
    pub ecc_aggregate_uncorrectable_maximum: Option<u64>,
    pub ecc_volatile_correctable_maximum: Option<u64>,
    pub remapped_rows_uncorrectable_maximum: Option<u32>,
    pub retired_pages_maximum: Option<u32>,
    pub pcie_replays_maximum: Option<u64>,
    pub nvlink_errors_maximum: Option<u64>,
    /// Memory in use on an idle GPU, without what the driver reserves.
    pub idle_memory_maximum_mib: Option<u64>,
    /// Processes by other users or jobs may use the GPUs.
    pub foreign_processes: Option<Requirement>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct XidPolicy {
    /// Only messages of the last so many hours are judged; without it, all since boot.
    pub window_hours: Option<f64>,
    /// Xids whose default class is changed: they fail.
    pub fail: Vec<u32>,
    pub warn: Vec<u32>,
    pub ignore: Vec<u32>,
}

/// What a profile makes of an Xid, whatever its default class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum XidSeverity {
    Fail,
    Warn,
    Ignore,
}

impl XidPolicy {
    /// `None` where the profile leaves this number to its class.
    pub(crate) fn severity(&self, number: u32) -> Option<XidSeverity> {
        [
            (&self.fail, XidSeverity::Fail),
            (&self.warn, XidSeverity::Warn),
            (&self.ignore, XidSeverity::Ignore),
        ]
        .into_iter()
        .find_map(|(numbers, severity)| numbers.contains(&number).then_some(severity))
    }
}

/// What a level does, where the defaults do not fit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LevelProfile {
    /// Seconds that the check kernel may take on one GPU, start of the process included. A burn may
    /// say nothing for as long.
    pub kernel_deadline_s: Option<f64>,
    /// Seconds that the whole run may take. What has not ended by then is stopped, and the run is
    /// not judged.
    pub deadline_s: Option<f64>,
    /// Level standard burns for 10 s, level extended for 60 s, level quick never.
    pub burn: BurnProfile,
}

/// The burn: every GPU at once multiplies matrices at its power limit, every product verified.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BurnProfile {
    /// `false`: no burn at this level.
    pub enabled: Option<bool>,
    /// Seconds that are multiplied, all precisions together.
    pub duration_s: Option<f64>,
    /// One after another; empty: the one that heats a GPU most. What a GPU does not have is left
    /// out.
    pub precisions: Vec<Precision>,
    /// GEMM implementation; `auto` by default.
    pub engine: Option<EngineChoice>,
    /// Share of the free memory that is filled with results; 95 by default.
    pub memory_percent: Option<f64>,
    /// Burns a GPU although other processes use it.
    pub share: Option<bool>,
}

/// Range of a burn's requested seconds; more than a week is a typing error.
pub const BURN_SECONDS: std::ops::RangeInclusive<f64> = 0.1..=604_800.0;

impl BurnProfile {
    /// How long this level burns; `None` where it does not.
    pub fn duration(&self, level: Level) -> Option<Duration> {
        let default = match level {
            Level::Quick | Level::Image => return None,
            // gpu-fryer's shortest run; what a GPU that sits idle hides shows within seconds.
            Level::Standard => 10.0,
            Level::Extended => 60.0,
        };
        if self.enabled == Some(false) {
            return None;
        }
        Duration::try_from_secs_f64(self.duration_s.unwrap_or(default)).ok()
    }

    /// What this level multiplies; empty: what heats a GPU most.
    pub fn precisions(&self, level: Level) -> Vec<Precision> {
        if self.precisions.is_empty() && level == Level::Extended {
            // One of each kind of arithmetic unit and width: a right result of one is little
            // evidence about the others.
            return vec![
                Precision::Bf16,
                Precision::Fp8,
                Precision::Tf32,
                Precision::Fp32,
                Precision::Fp64,
            ];
        }
        self.precisions.clone()
    }
}

/// What an image must have on its disk, judged at level image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ImageProfile {
    /// systemd services that start at boot, by unit name without `.service`.
    pub enabled_services: Vec<String>,
    /// Files that must be there and not empty, by absolute path.
    pub files: Vec<String>,
    /// Files that may stay although `image_leftovers` would object, by absolute path.
    pub leftovers_allowed: Vec<String>,
    /// The least free part of the root file system, in percent; 15 by default.
    pub free_disk_minimum_percent: Option<u32>,
}

/// What the first boot of an instance does; the image's build reads it
/// (`gpu-validator profile show`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct FirstBootProfile {
    pub on_failure: FirstBootFailure,
}

/// What becomes of a node that does not pass at boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FirstBootFailure {
    /// kubelet is not started, so that the node never joins its cluster.
    #[default]
    WithholdKubelet,
    /// kubelet registers the node with the taint `gpu-bringup.dev/unvalidated`.
    TaintNode,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CheckSetting {
    pub severity: Severity,
    /// Why; readers of the report need it.
    pub reason: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// A warning of this check becomes a failure.
    Fail,
    /// A failure of this check becomes a warning.
    Warn,
    /// The check is skipped.
    Off,
}
