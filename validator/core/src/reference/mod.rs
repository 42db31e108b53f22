//! Reference data: what NVIDIA, AWS and others say of their products, embedded as data files, each
//! row with its source.

mod cuda_errors;
mod cuda_toolkits;
mod cuda_version;
mod driver_version;
mod ec2_instances;
mod gemm_rates;
mod gpu_models;
mod injected_variables;
mod version_requirement;
mod xids;

pub use cuda_errors::{CudaErrorExplanation, explain_cuda_error};
pub use cuda_toolkits::{
    ArchitectureSupport, CompatVerdict, CudaToolkitRow, DriverBranchRow, architecture_support,
    compat_verdict, cuda_toolkit, cuda_toolkits, driver_branch, driver_branches,
    minor_version_minimum, oldest_driver_branch,
};
pub use cuda_version::CudaVersion;
pub use driver_version::DriverVersion;
pub use ec2_instances::{Ec2InstanceRow, ec2_instance, ec2_instances};
pub use gemm_rates::{GemmRate, gemm_rate, gemm_tile};
pub use gpu_models::{GpuModel, KernelModuleSupport, PcieFloor, gpu_model, gpu_models};
pub use injected_variables::INJECTED_VARIABLES;
pub use version_requirement::VersionRequirement;
pub use xids::{Xid, XidClass, cause_of_xid, xid, xids};

use serde::Deserialize;

use crate::facts::ComputeCapability;

/// Degrees that a GPU in operation can have; anything else is a broken sensor or a broken answer
/// (gpu-fryer issue 10: a card at `usize::MAX` degrees was called healthy).
// Source: boards for data centers operate in air of 0 to 50 °C (NVIDIA's product briefs of T4 and
// L40S), and are warmer than the air.
pub(crate) const GPU_TEMPERATURES_C: std::ops::RangeInclusive<i32> = 1..=150;
/// The same of its memory, for which some boards without a sensor return 0.
pub(crate) const MEMORY_TEMPERATURES_C: std::ops::RangeInclusive<i32> = 0..=150;

/// Tables write a compute capability as people do: `"9.0"`.
fn compute_capability<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<ComputeCapability, D::Error> {
    let text = String::deserialize(deserializer)?;
    let parse = || {
        let (major, minor) = text.split_once('.')?;
        Some(ComputeCapability {
            major: major.parse().ok()?,
            minor: minor.parse().ok()?,
        })
    };
    parse().ok_or_else(|| {
        serde::de::Error::custom(format!("`{text}` is not a compute capability like 9.0"))
    })
}

#[cfg(test)]
mod tests;
