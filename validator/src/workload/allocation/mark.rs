//! Marks that a worker leaves in memory that it frees, by which other workers know its data.

use super::AllocationTask;
use crate::cuda::{CudaResult, DeviceMemory};

/// `gpualloc` in ASCII: random data does not begin so.
const MAGIC: u64 = u64::from_le_bytes(*b"gpualloc");
const WORDS: usize = 3;
const BYTES: usize = WORDS * size_of::<u64>();
/// Places in an allocation that are marked and read: few, since each is a copy of some 10 µs.
const PLACES: u64 = 32;
/// The driver's own granularity of device memory, below which an allocation has one owner.
// Source: cuMemGetAllocationGranularity returns 2 MiB on every GPU since Pascal.
const PAGE_BYTES: u64 = 2 << 20;

/// A worker of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) test: u64,
    pub(super) worker: u32,
}

impl Mark {
    /// Whether memory that was just allocated holds the mark of another worker of the same test.
    pub(super) fn another_is_in(self, memory: &DeviceMemory<'_, '_>) -> CudaResult<bool> {
        for offset in places(memory.bytes()) {
            let mut bytes = [0; BYTES];
            memory.read(offset, &mut bytes)?;
            if Self::read(bytes).is_some_and(|it| it.test == self.test && it != self) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(super) fn write_to(self, memory: &DeviceMemory<'_, '_>) -> CudaResult<()> {
        for offset in places(memory.bytes()) {
            memory.write(offset, &self.bytes())?;
        }
        Ok(())
    }

    fn bytes(self) -> [u8; BYTES] {
        let words = [MAGIC, self.test, u64::from(self.worker)];
        let mut bytes = [0; BYTES];
        for (place, word) in bytes.chunks_exact_mut(size_of::<u64>()).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn read(bytes: [u8; BYTES]) -> Option<Self> {
        let mut words = bytes
            .chunks_exact(size_of::<u64>())
            .map(|it| it.try_into().map_or(0, u64::from_le_bytes));
        let (magic, test, worker) = (words.next()?, words.next()?, words.next()?);
        let worker = u32::try_from(worker).ok()?;
        (magic == MAGIC).then_some(Self { test, worker })
    }
}

/// Offsets of the marks in an allocation: at page boundaries, spread evenly.
fn places(bytes: u64) -> impl Iterator<Item = u64> {
    let pages = bytes.div_ceil(PAGE_BYTES);
    let count = pages.min(PLACES);
    (0..count)
        .map(move |place| place * pages / count * PAGE_BYTES)
        .filter(move |offset| offset + BYTES as u64 <= bytes)
}

/// Seed of the pattern of one operation: no other worker or operation of the test has it.
pub(super) fn seed_of(task: &AllocationTask, step: u64) -> u64 {
    let worker = u64::from(task.number) << 40;
    task.seed ^ (worker | (step & 0xff_ffff_ffff)).rotate_left(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_read_as_it_was_written_and_other_data_is_none() {
        let mark = Mark {
            test: 7,
            worker: 11,
        };
        assert_eq!(Mark::read(mark.bytes()), Some(mark));
        assert_eq!(Mark::read([0; BYTES]), None);
        assert_eq!(Mark::read([0xff; BYTES]), None);
    }

    #[test]
    fn marks_lie_within_the_allocation_at_page_boundaries() {
        let list = |bytes| places(bytes).collect::<Vec<_>>();
        assert_eq!(list(8), [0; 0]);
        assert_eq!(list(1 << 20), [0]);
        assert_eq!(list(6 << 20), [0, 2 << 20, 4 << 20]);
        let many = list(1 << 30);
        assert_eq!(many.len(), 32);
        assert!(many.iter().all(|it| it % PAGE_BYTES == 0));
        assert_eq!(many[31], 31 * (32 << 20));
    }

    #[test]
    fn no_two_operations_have_the_same_seed() {
        let mut seeds = std::collections::BTreeSet::new();
        for number in 0..100 {
            let task = AllocationTask { seed: 5, number };
            seeds.extend((0..100).map(|step| seed_of(&task, step)));
        }
        assert_eq!(seeds.len(), 10_000);
    }
}
