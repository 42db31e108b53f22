//! Device memory: anonymous memory of this process that is mapped lazily, so that unwritten bytes
//! cost nothing.

use super::result::{INVALID_VALUE, OUT_OF_MEMORY, Outcome};
use crate::threads::lock;
use std::collections::BTreeMap;
use std::sync::Mutex;

#[derive(Clone, Copy, Debug)]
pub(super) struct Allocation {
    pub(super) base: u64,
    /// Requested bytes.
    pub(super) length: u64,
    /// What it takes from the GPU.
    pub(super) reserved: u64,
    pub(super) gpu: usize,
    context: usize,
    /// Page-locked host memory takes nothing from the GPU.
    pub(super) host: bool,
}

static ALLOCATIONS: Mutex<BTreeMap<u64, Allocation>> = Mutex::new(BTreeMap::new());

/// Maps memory for an allocation; its address.
pub(super) fn map_allocation(
    (gpu, context): (usize, usize),
    length: u64,
    reserved: u64,
    host: bool,
) -> Option<u64> {
    let base = map(reserved)?;
    let allocation = Allocation {
        base,
        length,
        reserved,
        gpu,
        context,
        host,
    };
    lock(&ALLOCATIONS).insert(base, allocation);
    Some(base)
}

/// `cuMemAllocHost`.
pub(super) fn allocate_host(gpu: usize, context: usize, length: u64) -> Outcome<u64> {
    let reserved = length
        .max(1)
        .div_ceil(4096)
        .checked_mul(4096)
        .ok_or(INVALID_VALUE)?;
    map_allocation((gpu, context), length, reserved, true).ok_or(OUT_OF_MEMORY)
}

/// Unmaps the allocation that begins at this address.
pub(super) fn unmap_at(base: u64) -> Outcome<Allocation> {
    let allocation = lock(&ALLOCATIONS).remove(&base).ok_or(INVALID_VALUE)?;
    unmap(&allocation);
    Ok(allocation)
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
