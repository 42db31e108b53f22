//! The kernels that the simulator can run, by name. They compute on the CPU what the GPU computes, bit for bit.

mod check;

use super::driver::Outcome;
use super::result::{ILLEGAL_ADDRESS, INVALID_VALUE};
use crate::gpu::Gpu;
use std::ffi::c_void;

/// A launch, as a kernel sees it.
#[derive(Debug)]
pub struct Launch<'launch> {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    parameters: *const *const c_void,
    gpu: &'launch Gpu,
}

/// What a kernel wrote, so that a fault can spoil it, and how long a GPU would have taken.
#[derive(Debug, Default)]
pub struct Done {
    pub outputs: Vec<Output>,
    pub gpu_time_ns: u64,
}

/// A result in device memory, row after row.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    pub address: u64,
    /// Bytes of one element.
    pub element_size: usize,
    pub elements: u64,
    pub row_length: u64,
    /// Elements that one thread block computes, in a row.
    pub elements_per_block: u64,
}

type Run = fn(&Launch<'_>) -> Outcome<Done>;

const KERNELS: &[(&str, Run)] = &[("gpu_validator_check", check::run)];

/// The CPU's version of this kernel.
pub(super) fn find(name: &str) -> Option<Run> {
    KERNELS
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, run)| *run)
}

impl<'launch> Launch<'launch> {
    pub(super) fn new(
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        parameters: *const *const c_void,
        gpu: &'launch Gpu,
    ) -> Self {
        Self {
            grid,
            block,
            shared_bytes,
            parameters,
            gpu,
        }
    }

    pub fn gpu(&self) -> &Gpu {
        self.gpu
    }

    pub fn blocks(&self) -> u64 {
        self.grid.iter().map(|it| u64::from(*it)).product()
    }

    pub fn threads_per_block(&self) -> u64 {
        self.block.iter().map(|it| u64::from(*it)).product()
    }

    /// The kernel's parameter at this position.
    ///
    /// # Safety
    /// The kernel has that many parameters, and this one is a `T`.
    pub unsafe fn parameter<T: Copy>(&self, position: usize) -> Outcome<T> {
        if self.parameters.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: `cuLaunchKernel` asks for a pointer to each parameter.
        let value = unsafe { *self.parameters.add(position) };
        if value.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller names the parameter's type; alignment is not promised.
        Ok(unsafe { value.cast::<T>().read_unaligned() })
    }

    /// Device memory as a slice of `length` elements.
    ///
    /// # Safety
    /// Nothing else uses this memory while the kernel runs, and any bits are a `T`.
    pub unsafe fn device_slice<T>(&self, address: u64, length: usize) -> Outcome<&'launch mut [T]> {
        let bytes = (length as u64)
            .checked_mul(size_of::<T>() as u64)
            .ok_or(ILLEGAL_ADDRESS)?;
        if !address.is_multiple_of(align_of::<T>() as u64) || !super::memory::holds(address, bytes)
        {
            return Err(ILLEGAL_ADDRESS);
        }
        // SAFETY: the allocation holds all of it, it is aligned, and the caller answers for the rest.
        Ok(unsafe { std::slice::from_raw_parts_mut(address as *mut T, length) })
    }
}
