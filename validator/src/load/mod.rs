//! Probes that work the GPUs; what they see is facts like any other.

#[path = "kernels/check.rs"]
#[expect(unreachable_pub, reason = "its items are the interface of the kernel")]
mod check_kernel;
pub(crate) mod cuda_kernel;
pub(crate) mod driver;
