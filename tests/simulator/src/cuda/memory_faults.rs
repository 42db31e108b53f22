//! Device memory that does not keep what was written, and copies that do not bring it.

use super::memory;
use crate::gpu::{Gpu, MemoryFault, MemoryFaultKind};
use crate::threads::lock;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::{LazyLock, Mutex};

/// What reads or writes device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Launch,
    /// To this address, so many bytes.
    Copy {
        direction: Direction,
        to: u64,
        bytes: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    ToDevice,
    ToHost,
    OnDevice,
}

/// Operations so far that a fault could have hit, by GPU and place of the fault in the scenario.
static COUNTS: LazyLock<Mutex<HashMap<(usize, usize), u64>>> = LazyLock::new(Mutex::default);
/// Pairs of addresses that are one memory by now.
static ALIASED: LazyLock<Mutex<HashSet<(u64, u64)>>> = LazyLock::new(Mutex::default);

/// What must be done to memory when the operation has ended.
#[derive(Debug, Default)]
pub(super) struct Pending {
    restore: Vec<(u64, Vec<u8>)>,
    flip: Vec<(u64, u32)>,
}

/// Lets the faults strike that come before an operation, and notes those that come after it.
pub(super) fn begin(values: &Gpu, gpu: usize, operation: Operation) -> Pending {
    let mut pending = Pending::default();
    for (number, fault) in values.memory_faults.iter().enumerate() {
        if is_meant(fault, operation) && strikes(fault, (gpu, number)) {
            strike(fault, gpu, operation, &mut pending);
        }
    }
    pending
}

impl Pending {
    pub(super) fn end(self) {
        for (address, bytes) in self.restore {
            // SAFETY: read from there when the operation began; a program that freed it meanwhile
            // breaks CUDA's own contract.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len());
            }
        }
        for (address, bit) in self.flip {
            flip(address, bit);
        }
    }
}

fn is_meant(fault: &MemoryFault, operation: Operation) -> bool {
    let Operation::Copy {
        direction, bytes, ..
    } = operation
    else {
        return matches!(
            fault.kind,
            MemoryFaultKind::AtRest | MemoryFaultKind::LostStores | MemoryFaultKind::Aliased
        );
    };
    match fault.kind {
        MemoryFaultKind::AtRest | MemoryFaultKind::Aliased => true,
        MemoryFaultKind::LostStores => direction != Direction::ToHost,
        kind => {
            let wanted = match kind {
                MemoryFaultKind::CopyToDevice => Direction::ToDevice,
                MemoryFaultKind::CopyToHost => Direction::ToHost,
                _ => Direction::OnDevice,
            };
            direction == wanted && bytes > 0 && bytes >= fault.copies_from.0
        }
    }
}

/// Counts the operation, and returns whether it is one of those that are hit.
fn strikes(fault: &MemoryFault, key: (usize, usize)) -> bool {
    let mut counts = lock(&COUNTS);
    let count = counts.entry(key).or_insert(0);
    let number = *count;
    *count += 1;
    number
        .checked_sub(fault.first)
        .is_some_and(|since| since.is_multiple_of(fault.every.max(1)))
}

fn strike(fault: &MemoryFault, gpu: usize, operation: Operation, pending: &mut Pending) {
    match (fault.kind, operation) {
        (MemoryFaultKind::AtRest, _) => {
            if let Some(address) = place(gpu, fault.offset.0) {
                flip(address, fault.bit);
            }
        }
        (MemoryFaultKind::LostStores, _) => {
            if let Some(range) = pages(gpu, fault) {
                // SAFETY: device memory of this process.
                let bytes = unsafe { memory_at(&range) }.to_vec();
                pending.restore.push((range.start, bytes));
            }
        }
        (MemoryFaultKind::Aliased, _) => alias(fault, gpu),
        (_, Operation::Copy { to, bytes, .. }) => {
            pending.flip.push((to + fault.offset.0 % bytes, fault.bit));
        }
        (_, Operation::Launch) => {}
    }
}

/// The GPU's memory that this process has, the largest allocation first.
fn allocations(gpu: usize) -> Vec<memory::Allocation> {
    let mut list = memory::of_gpu(gpu);
    list.sort_by_key(|it| (std::cmp::Reverse(it.length), it.base));
    list
}

/// The address of a place that is counted through all of it.
fn place(gpu: usize, offset: u64) -> Option<u64> {
    let list = allocations(gpu);
    let total: u64 = list.iter().map(|it| it.length).sum();
    let mut left = offset.checked_rem(total)?;
    for allocation in list {
        if left < allocation.length {
            return Some(allocation.base + left);
        }
        left -= allocation.length;
    }
    None
}

const PAGE: u64 = 4096;

/// The pages that a fault is about, as far as they lie in one allocation.
fn pages(gpu: usize, fault: &MemoryFault) -> Option<Range<u64>> {
    pages_at(place(gpu, fault.offset.0)?, fault.length.0)
}

fn pages_at(address: u64, length: u64) -> Option<Range<u64>> {
    let start = address / PAGE * PAGE;
    let length = length.div_ceil(PAGE).max(1) * PAGE;
    memory::holds(start, length).then_some(start..start + length)
}

/// # Safety
/// The range is device memory that no thread writes meanwhile.
unsafe fn memory_at(range: &Range<u64>) -> &[u8] {
    let length = usize::try_from(range.end - range.start).unwrap_or(0);
    // SAFETY: as the caller promises.
    unsafe { std::slice::from_raw_parts(range.start as *const u8, length) }
}

/// Makes two ranges of addresses one memory, for good: the same pages of a file are mapped at both.
fn alias(fault: &MemoryFault, gpu: usize) {
    let onto = fault.onto.and_then(|it| place(gpu, it.0));
    let Some((first, second)) =
        pages(gpu, fault).zip(onto.and_then(|it| pages_at(it, fault.length.0)))
    else {
        return;
    };
    if first.start == second.start || !lock(&ALIASED).insert((first.start, second.start)) {
        return;
    }
    // SAFETY: device memory of this process.
    let kept = unsafe { memory_at(&first) }.to_vec();
    // SAFETY: makes a file without a name.
    let file = unsafe { libc::memfd_create(c"aliased".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: the file is this function's own.
    if file < 0 || unsafe { libc::ftruncate(file, kept.len().cast_signed() as libc::off_t) } != 0 {
        return;
    }
    for range in [&first, &second] {
        // SAFETY: replaces whole pages of an anonymous mapping that `memory` made and unmaps with
        // the rest.
        unsafe {
            libc::mmap(
                range.start as *mut libc::c_void,
                kept.len(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED,
                file,
                0,
            )
        };
    }
    // SAFETY: as above; the mappings keep the file.
    unsafe {
        std::ptr::copy_nonoverlapping(kept.as_ptr(), first.start as *mut u8, kept.len());
        libc::close(file);
    }
}

fn flip(address: u64, bit: u32) {
    let byte = address as *mut u8;
    // SAFETY: device memory that `place` found, or the end of a copy that has just been written.
    unsafe { byte.write(byte.read() ^ 1u8.wrapping_shl(bit)) }
}
