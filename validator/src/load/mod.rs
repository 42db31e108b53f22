//! Probes that work the GPUs; what they see is facts like any other.

pub(crate) mod burn;
mod burn_process;
mod burn_samples;
mod burn_sensors;
mod burn_state;
pub(crate) mod burn_worker;
#[path = "kernels/check.rs"]
mod check_kernel;
pub(crate) mod cuda_kernel;
pub(crate) mod driver;
mod gemm;
mod others;
pub(crate) mod standby;
