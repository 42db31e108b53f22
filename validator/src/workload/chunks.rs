//! Memory of a GPU in chunks.

use validator_core::facts::{WorkerEnd, WorkloadRun};

use super::WorkerGpu;
use crate::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CudaFailure, DeviceMemory};
use crate::plan::MemoryShare;

pub(super) const WORD_BYTES: u64 = 8;
/// Memory of one allocation. Written in under 1 ms by an H200 (4 TB/s), so that a stop is not
/// delayed; no larger, so that fragmented memory is used, too.
const CHUNK_BYTES: u64 = 512 << 20;

/// Allocates this share of the free memory of a GPU whose context is current, and notes in `run`
/// how much the driver gave.
pub(super) fn allocate_chunks<'g>(
    gpu: &'g WorkerGpu,
    budget: MemoryShare,
    run: &mut WorkloadRun,
) -> Result<Vec<DeviceMemory<'g, 'static>>, WorkerEnd> {
    let (free, _) = gpu.context.memory_bytes()?;
    let asked = budget.of(free).min(free);
    let mut chunks = Vec::new();
    let mut used = 0;
    // Where nothing is free one word is requested, so that the driver returns the reason.
    while used < asked.max(WORD_BYTES) {
        let bytes = (asked - used.min(asked)).clamp(WORD_BYTES, CHUNK_BYTES) / WORD_BYTES;
        match gpu.context.allocate(bytes * WORD_BYTES) {
            Ok(chunk) => {
                used += chunk.bytes();
                chunks.push(chunk);
            }
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
