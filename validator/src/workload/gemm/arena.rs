//! The one allocation in which operands and results of products lie.

use validator_core::facts::WorkerEnd;

use crate::cuda::{CUDA_ERROR_OUT_OF_MEMORY, Context, CudaFailure, DeviceMemory};
use crate::plan::MemoryShare;

/// What is taken less at a time when memory is short.
const SHRINK_BYTES: u64 = 64 << 20;
/// Attempts to get memory, each 2 % smaller.
const ALLOCATIONS_MAXIMUM: u32 = 25;

pub(super) struct Arena<'c, 'a> {
    pub(super) memory: DeviceMemory<'c, 'a>,
    /// How much less the driver gave than was requested.
    pub(super) note: Option<String>,
}

/// As much of `free_bytes` of free memory as is requested; where the driver does not give it, less.
pub(super) fn allocate<'c, 'a>(
    context: &'c Context<'a>,
    share: MemoryShare,
    free_bytes: u64,
) -> Result<Arena<'c, 'a>, WorkerEnd> {
    let wanted = share.of(free_bytes);
    let arena = |memory: DeviceMemory<'c, 'a>| {
        let bytes = memory.bytes();
        let less = || format!("the driver allocated {bytes} of {wanted} bytes of memory");
        Arena {
            memory,
            note: (bytes < wanted).then(less),
        }
    };
    // On a GPU without any free memory a byte is requested, so that the driver returns its error.
    let mut bytes = wanted.min(free_bytes).max(1);
    for _ in 0..ALLOCATIONS_MAXIMUM {
        match context.allocate(bytes) {
            Ok(memory) => return Ok(arena(memory)),
            Err(CudaFailure::Status {
                code: CUDA_ERROR_OUT_OF_MEMORY,
                ..
            }) if bytes > SHRINK_BYTES => {
                bytes -= (bytes / 50).max(SHRINK_BYTES).min(bytes / 2);
            }
            Err(failure) => return Err(failure.into()),
        }
    }
    Ok(arena(context.allocate(bytes)?))
}
