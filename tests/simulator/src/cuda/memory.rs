//! Device memory: anonymous memory of this process that is mapped lazily, so that unwritten bytes
//! cost nothing.

use super::driver::{Driver, Outcome, lock};
use super::result::{INVALID_VALUE, OUT_OF_MEMORY};
use crate::gpu::FreeFaultKind;
use crate::node::hang;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// What the real driver rounds allocations up to.
const GRANULARITY: u64 = 2 << 20;

#[derive(Clone, Copy, Debug)]
pub(super) struct Allocation {
    pub(super) base: u64,
    /// Requested bytes.
    pub(super) length: u64,
    /// What it takes from the GPU.
    reserved: u64,
    pub(super) gpu: usize,
    context: usize,
    /// Page-locked host memory takes nothing from the GPU.
    pub(super) host: bool,
}

/// Calls that freed device memory, in this process.
static FREES: AtomicU64 = AtomicU64::new(0);

static ALLOCATIONS: Mutex<BTreeMap<u64, Allocation>> = Mutex::new(BTreeMap::new());

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
    let Some(base) = map(reserved) else {
        slot.release_memory(reserved);
        return Err(OUT_OF_MEMORY);
    };
    let allocation = Allocation {
        base,
        length,
        reserved,
        gpu,
        context,
        host: false,
    };
    lock(&ALLOCATIONS).insert(base, allocation);
    Ok(base)
}

/// `cuMemAllocHost`.
pub(super) fn allocate_host(gpu: usize, context: usize, length: u64) -> Outcome<u64> {
    let reserved = length
        .max(1)
        .div_ceil(4096)
        .checked_mul(4096)
        .ok_or(INVALID_VALUE)?;
    let base = map(reserved).ok_or(OUT_OF_MEMORY)?;
    let allocation = Allocation {
        base,
        length,
        reserved,
        gpu,
        context,
        host: true,
    };
    lock(&ALLOCATIONS).insert(base, allocation);
    Ok(base)
}

/// `cuMemFree` and `cuMemFreeHost`.
pub(super) fn free(driver: &Driver, base: u64) -> Outcome {
    let allocation = lock(&ALLOCATIONS).remove(&base).ok_or(INVALID_VALUE)?;
    unmap(&allocation);
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

/// Frees the leftovers of a context, and returns their bytes of the GPU's memory.
pub(super) fn free_all(context: usize) -> u64 {
    let mut allocations = lock(&ALLOCATIONS);
    let left: Vec<Allocation> = allocations
        .values()
        .filter(|it| it.context == context && !it.host)
        .copied()
        .collect();
    for allocation in &left {
        allocations.remove(&allocation.base);
        unmap(allocation);
    }
    left.iter().map(|it| it.reserved).sum()
}

/// What this process has of a GPU's memory.
pub(super) fn of_gpu(gpu: usize) -> Vec<Allocation> {
    let allocations = lock(&ALLOCATIONS);
    let of_gpu = |it: &&Allocation| it.gpu == gpu && !it.host;
    allocations.values().filter(of_gpu).copied().collect()
}

/// The allocation that holds this address.
pub(super) fn find(address: u64) -> Option<Allocation> {
    let allocations = lock(&ALLOCATIONS);
    let (_, allocation) = allocations.range(..=address).next_back()?;
    (address < allocation.base + allocation.reserved).then_some(*allocation)
}

/// Whether all these bytes are memory that `cuMemAlloc` gave.
pub(super) fn holds(address: u64, length: u64) -> bool {
    find(address).is_some_and(|it| {
        address
            .checked_add(length)
            .is_some_and(|end| end <= it.base + it.length.max(it.reserved))
    })
}

fn map(length: u64) -> Option<u64> {
    let length = usize::try_from(length).ok()?;
    // SAFETY: a new private mapping; the result is checked.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    (address != libc::MAP_FAILED).then(|| address.addr() as u64)
}

fn unmap(allocation: &Allocation) {
    if let Ok(length) = usize::try_from(allocation.reserved) {
        // SAFETY: `map` made this mapping with this length and the table no longer hands it out.
        unsafe { libc::munmap(allocation.base as *mut libc::c_void, length) };
    }
}
