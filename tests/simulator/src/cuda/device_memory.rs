//! Device memory as the driver hands it out: charged to this process's share of a GPU.

use super::driver::Driver;
use super::memory;
use super::result::{INVALID_VALUE, OUT_OF_MEMORY, Outcome};
use crate::gpu::FreeFaultKind;
use crate::node::hang;
use std::sync::atomic::{AtomicU64, Ordering};

/// What the real driver rounds allocations up to.
const GRANULARITY: u64 = 2 << 20;

/// Calls that freed device memory, in this process.
static FREES: AtomicU64 = AtomicU64::new(0);

/// `cuMemAlloc`.
pub(super) fn allocate(driver: &Driver, gpu: usize, context: usize, length: u64) -> Outcome<u64> {
    let reserved = length
        .div_ceil(GRANULARITY)
        .checked_mul(GRANULARITY)
        .ok_or(INVALID_VALUE)?;
    if length == 0 {
        return Err(INVALID_VALUE);
    }
    let slot = driver.slot(gpu)?;
    if !slot.take_memory(driver.state_of(gpu), reserved, driver.memory_capacity(gpu)) {
        return Err(OUT_OF_MEMORY);
    }
    memory::map_allocation((gpu, context), length, reserved, false).ok_or_else(|| {
        slot.release_memory(reserved);
        OUT_OF_MEMORY
    })
}

/// `cuMemFree` and `cuMemFreeHost`.
pub(super) fn free(driver: &Driver, base: u64) -> Outcome {
    let allocation = memory::unmap_at(base)?;
    if allocation.host {
        return Ok(());
    }
    let number = FREES.fetch_add(1, Ordering::Relaxed);
    let fault = driver.with_gpu(allocation.gpu, |gpu| gpu.free_fault.clone());
    match fault.filter(|it| it.strikes(number)).map(|it| it.kind) {
        Some(FreeFaultKind::Hang) => hang(),
        Some(FreeFaultKind::Keep) => driver
            .state_of(allocation.gpu)
            .keep_memory(allocation.reserved),
        None => {}
    }
    driver
        .slot(allocation.gpu)?
        .release_memory(allocation.reserved);
    Ok(())
}
