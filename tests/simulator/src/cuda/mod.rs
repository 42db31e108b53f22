//! `libcuda.so.1`: the CUDA driver API on a simulated node.
//!
//! Device memory is memory of this process, mapped lazily, so that cards of 80 GB fit where nothing is written. Kernels are
//! executed by name on the CPU, at launch, with the same bits as on a GPU; streams have a clock of their own that
//! launches move by the time that the GPU model would take, and events read that clock.

#![allow(unsafe_code, reason = "the CUDA driver's C interface")]
#![allow(non_snake_case, reason = "NVIDIA's names")]
#![allow(
    clippy::missing_safety_doc,
    reason = "the functions! macro writes the section for all of them"
)]

pub mod api;
mod corruption;
mod driver;
mod image;
pub mod kernels;
mod memory;
mod objects;
mod proc_address;
pub mod result;
pub mod unsupported;

/// Device memory that the allocation holds completely, for the libraries beside this one.
pub(crate) fn device_bytes(address: u64, length: u64) -> Option<&'static mut [u8]> {
    let size = usize::try_from(length).ok()?;
    // SAFETY: the allocation holds all of it; a program that frees it during a product breaks CUDA's own contract.
    memory::holds(address, length)
        .then(|| unsafe { std::slice::from_raw_parts_mut(address as *mut u8, size) })
}
