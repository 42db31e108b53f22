//! `gpu_validator_check`: one value a thread, through integer, FP32 and FP64 units, shared memory
//! and a warp shuffle.

use super::{Blocks, Done, LAUNCH_NS, Launch, Output};
use crate::cuda::result::{INVALID_VALUE, Outcome};

const THREADS: u64 = 256;

/// Values a GPU computes in a nanosecond; the kernel is far too small for its exact speed to
/// matter.
const VALUES_PER_NS: u64 = 20;

pub(super) fn run(launch: &Launch<'_>) -> Outcome<Done> {
    // SAFETY: gpu_validator_check(out: *mut u32, n: u32, seed: u32).
    let (out, count, seed) = unsafe {
        (
            launch.parameter::<u64>(0)?,
            launch.parameter::<u32>(1)?,
            launch.parameter::<u32>(2)?,
        )
    };
    if launch.threads_per_block() != THREADS {
        return Err(INVALID_VALUE);
    }
    // Threads past the grid do not exist: what they should have written stays as it was.
    let written = u64::from(count).min(launch.blocks() * THREADS);
    let length = usize::try_from(written).map_err(|_| INVALID_VALUE)?;
    // SAFETY: the output is the kernel's own while it runs, and any bits are a u32.
    let values = unsafe { launch.device_slice::<u32>(out, length)? };
    for (index, value) in (0u32..).zip(values.iter_mut()) {
        *value = expected(index, seed);
    }
    let output = Output {
        address: out,
        element_size: 4,
        elements: written,
        row_length: written,
        blocks: Blocks::InOrder { elements: THREADS },
    };
    Ok(Done {
        outputs: vec![output],
        gpu_time_ns: LAUNCH_NS + written / VALUES_PER_NS,
    })
}

/// The value of thread `index`. This is written from the kernel's PTX, apart from the validator's
/// own reference, so that a mistake in one shows against the other.
fn expected(index: u32, seed: u32) -> u32 {
    let block = index / 256 * 256;
    let thread = index % 256;
    let value_of = |thread: u32| {
        let neighbour = (thread * 5 + 17) & 255;
        let own = arithmetic(block + thread, seed);
        own.wrapping_mul(0x2C1B_3C6D)
            .wrapping_add(arithmetic(block + neighbour, seed))
    };
    // shfl.bfly 5 within a warp of 32 lanes: bits 0 and 2 of the lane change, never the warp.
    let own = value_of(thread);
    let sum = own.wrapping_add(value_of(thread ^ 5)) ^ index;
    sum.wrapping_mul(0x297A_2D39).wrapping_add(seed)
}

fn arithmetic(index: u32, seed: u32) -> u32 {
    let mut x = index.wrapping_mul(0x9E37_79B9).wrapping_add(seed);
    x = (x ^ x >> 16).wrapping_mul(0x85EB_CA6B);
    x = (x ^ x >> 13).wrapping_mul(0xC2B2_AE35);
    x ^= x >> 16;
    #[expect(clippy::cast_precision_loss, reason = "24 bits convert exactly")]
    let f0 = (x >> 8) as f32;
    let f1 = f0.mul_add(f32::from_bits(0x3F8C_CCCD), f32::from_bits(0x3EAA_AAAB));
    let word = x ^ f1.mul_add(f1, f0).to_bits();
    let d0 = f64::from(word);
    let d1 = d0.mul_add(
        f64::from_bits(0x3FF1_9999_9999_999A),
        f64::from_bits(0x3FD5_5555_5555_5555),
    );
    let bits = d1.mul_add(d1, d0).to_bits();
    let low = u32::try_from(bits & 0xFFFF_FFFF).unwrap_or(0);
    let high = u32::try_from(bits >> 32).unwrap_or(0);
    (word ^ low).wrapping_add(high)
}
