//! Reference data: what NVIDIA, AWS and others say of their products, embedded as data files, each row with its source.

mod cuda_errors;
mod cuda_toolkits;
mod driver_version;
mod ec2_instances;
mod gpu_models;
mod xids;

pub use cuda_errors::{CudaErrorExplanation, explain_cuda_error};
pub use cuda_toolkits::{
    CompatVerdict, CudaToolkitRow, DriverBranchRow, compat_verdict, cuda_toolkit, driver_branch,
    minor_version_minimum,
};
pub use driver_version::DriverVersion;
pub use ec2_instances::{Ec2InstanceRow, ec2_instance};
pub use gpu_models::{GpuModel, KernelModuleSupport, PcieFloor, gpu_model, gpu_models};
pub use xids::{Xid, XidClass, xid};
