//! `libcuda.so.1`: the CUDA driver API on a simulated node.
//!
//! Device memory is memory of this process, mapped lazily, so that cards of 80 GB fit where nothing
//! is written. Kernels are executed by name on the CPU, at launch, with the same bits as on a GPU;
//! streams have a clock of their own that launches move by the time that the GPU model would take,
//! and events read that clock.

#![allow(unsafe_code, reason = "the CUDA driver's C interface")]
#![allow(non_snake_case, reason = "NVIDIA's names")]
#![allow(
    clippy::missing_safety_doc,
    reason = "the functions! macro writes the section for all of them"
)]

use std::ffi::c_void;

pub mod api;
mod corruption;
mod device_memory;
mod driver;
mod image;
pub mod kernels;
pub mod library;
mod memory;
mod memory_faults;
mod objects;
mod proc_address;
pub mod result;
pub mod unsupported;

/// A function that the library exports.
pub(crate) struct Exported {
    name: &'static str,
    address: *const c_void,
}

// SAFETY: the address of a function, which nothing writes to.
unsafe impl Sync for Exported {}

macro_rules! exported {
    ($($name:ident)*) => {
        &[$($crate::cuda::Exported { name: stringify!($name), address: $name as *const std::ffi::c_void }),*]
    };
}
pub(crate) use exported;

/// The function of this exact name, if the driver API has it.
pub(crate) fn function(name: &str) -> Option<*mut c_void> {
    let lists = [
        api::FUNCTIONS_BY_NAME,
        api::BEFORE_INIT,
        library::FUNCTIONS_BY_NAME,
        unsupported::FUNCTIONS_BY_NAME,
    ];
    let mut functions = lists.into_iter().flatten();
    functions
        .find(|it| it.name == name)
        .map(|it| it.address.cast_mut())
}

/// Device memory that the allocation holds completely, for the other libraries of this node.
pub(crate) fn device_bytes(address: u64, length: u64) -> Option<&'static mut [u8]> {
    let size = usize::try_from(length).ok()?;
    // SAFETY: the allocation holds all of it; a program that frees it during a product breaks
    // CUDA's own contract.
    memory::holds(address, length)
        .then(|| unsafe { std::slice::from_raw_parts_mut(address as *mut u8, size) })
}
