//! Memory of a GPU in chunks.

use std::rc::Rc;

use validator_core::facts::{WorkerEnd, WorkloadRun};

use super::WorkerGpu;
use crate::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CudaFailure, CudaResult, DeviceMemory};
use crate::plan::MemoryShare;

pub(super) const WORD_BYTES: u64 = 8;
/// Memory of one launch. Written in under 1 ms by an H200 (4 TB/s), so that a stop is not delayed.
const CHUNK_BYTES: u64 = 512 << 20;
/// Memory of one allocation, where so much is free in one piece. Each free waits for the driver's
/// locks, which a newcomer's `cuInit` holds: 88 % of an H100 was free after 150 to 176 ms in
/// allocations of 512 MiB, after 57 to 76 ms in allocations of this size (BENCHMARKS.md,
/// "Freeing memory").
const BLOCK_BYTES: u64 = 8 << 30;

/// A part of an allocation, which is freed with the last of its chunks.
pub(super) struct Chunk<'g> {
    block: Rc<DeviceMemory<'g, 'static>>,
    offset: u64,
    bytes: u64,
}

impl Chunk<'_> {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn extent(&self) -> Extent<'_> {
        Extent {
            memory: &self.block,
            offset: self.offset,
            bytes: self.bytes,
        }
    }
}

/// The part of an allocation that one launch works.
#[derive(Clone, Copy)]
pub(super) struct Extent<'m> {
    memory: &'m DeviceMemory<'m, 'm>,
    offset: u64,
    bytes: u64,
}

impl<'m> Extent<'m> {
    /// All of an allocation.
    pub(super) fn of(memory: &'m DeviceMemory<'m, 'm>) -> Self {
        Self {
            memory,
            offset: 0,
            bytes: memory.bytes(),
        }
    }

    pub(super) fn address(self) -> u64 {
        self.memory.address() + self.offset
    }

    pub(super) fn bytes(self) -> u64 {
        self.bytes
    }

    /// The bytes from `offset` on, after everything in the stream before.
    pub(super) fn read(self, offset: u64, host: &mut [u8]) -> CudaResult<()> {
        self.memory.read(self.offset + offset, host)
    }
}

/// Allocates this share of the free memory of a GPU whose context is current, and notes in `run`
/// how much the driver gave.
pub(super) fn allocate_chunks<'g>(
    gpu: &'g WorkerGpu,
    budget: MemoryShare,
    run: &mut WorkloadRun,
) -> Result<Vec<Chunk<'g>>, WorkerEnd> {
    let (free, _) = gpu.context.memory_bytes()?;
    let asked = budget.of(free).min(free);
    let mut chunks = Vec::new();
    let (mut used, mut block_bytes) = (0, BLOCK_BYTES);
    // Where nothing is free one word is requested, so that the driver returns the reason.
    while used < asked.max(WORD_BYTES) {
        let bytes = (asked - used.min(asked)).clamp(WORD_BYTES, block_bytes) / WORD_BYTES;
        match gpu.context.allocate(bytes * WORD_BYTES) {
            Ok(block) => {
                used += block.bytes();
                chunks.extend(split(block));
            }
            Err(CudaFailure::Status {
                code: CUDA_ERROR_OUT_OF_MEMORY,
                ..
            }) if block_bytes > CHUNK_BYTES => block_bytes /= 2,
            Err(CudaFailure::Status {
                code: CUDA_ERROR_OUT_OF_MEMORY,
                ..
            }) if used > 0 => {
                run.notes.push(format!(
                    "{asked} bytes of memory were requested, the driver gave {used}"
                ));
                break;
            }
            Err(failure) => return Err(failure.into()),
        }
    }
    run.memory.free_bytes += free;
    run.memory.used_bytes += used;
    Ok(chunks)
}

fn split<'g>(block: DeviceMemory<'g, 'static>) -> impl Iterator<Item = Chunk<'g>> {
    let bytes = block.bytes();
    let block = Rc::new(block);
    parts(bytes).map(move |(offset, bytes)| Chunk {
        block: Rc::clone(&block),
        offset,
        bytes,
    })
}

/// Offset and size of each chunk of so many bytes.
fn parts(bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..bytes.div_ceil(CHUNK_BYTES)).map(move |number| {
        let offset = number * CHUNK_BYTES;
        (offset, CHUNK_BYTES.min(bytes - offset))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_of_a_block_are_all_of_it_and_none_is_larger_than_a_launch() {
        for bytes in [
            8,
            CHUNK_BYTES - 8,
            CHUNK_BYTES,
            CHUNK_BYTES + 8,
            BLOCK_BYTES,
        ] {
            let parts: Vec<_> = parts(bytes).collect();
            let mut end = 0;
            for (offset, part) in &parts {
                assert_eq!(*offset, end, "{bytes}");
                assert!((1..=CHUNK_BYTES).contains(part), "{bytes}: {part}");
                end += part;
            }
            assert_eq!(end, bytes);
        }
    }
}
