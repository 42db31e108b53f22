//! `gpu_validator_memory_write` and `gpu_validator_memory_verify`: a pattern of 64-bit words.

use super::{Blocks, Done, LAUNCH_NS, Launch, Output, memory_time_ns};
use crate::cuda::result::{INVALID_VALUE, Outcome};

const THREADS: u64 = 256;
/// Mismatches whose addresses are kept.
const EXAMPLES: u64 = 8;
/// Mismatches, words compared, and three words for each example.
const RESULT_WORDS: usize = 2 + 3 * 8;

/// The parameters that both kernels begin with.
struct Pattern {
    words: u64,
    count: usize,
    first: u64,
    seed: u64,
    mask: u64,
}

impl Pattern {
    fn of(launch: &Launch<'_>) -> Outcome<Self> {
        if launch.threads_per_block() != THREADS {
            return Err(INVALID_VALUE);
        }
        // SAFETY: both kernels begin with (words: *mut u64, count: u64, first: u64, seed: u64,
        // mask: u64).
        let [words, count, first, seed, mask] = unsafe {
            [
                launch.parameter::<u64>(0)?,
                launch.parameter::<u64>(1)?,
                launch.parameter::<u64>(2)?,
                launch.parameter::<u64>(3)?,
                launch.parameter::<u64>(4)?,
            ]
        };
        Ok(Self {
            words,
            count: usize::try_from(count).map_err(|_| INVALID_VALUE)?,
            first,
            seed,
            mask,
        })
    }

    /// The word of the kernel's PTX, apart from the validator's own reference.
    fn word(&self, index: u64) -> u64 {
        let mut x = (index.wrapping_add(self.first))
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .wrapping_add(self.seed);
        for (shift, factor) in [(30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB)] {
            x = (x ^ x >> shift).wrapping_mul(factor);
        }
        x ^ x >> 31 ^ self.mask
    }

    fn gpu_time_ns(&self) -> u64 {
        LAUNCH_NS + memory_time_ns(self.count as u64 * 8)
    }
}

pub(super) fn write(launch: &Launch<'_>) -> Outcome<Done> {
    let pattern = Pattern::of(launch)?;
    // SAFETY: the words are the kernel's own while it runs, and any bits are a u64.
    let words = unsafe { launch.device_slice::<u64>(pattern.words, pattern.count)? };
    for (index, word) in (0..).zip(words) {
        *word = pattern.word(index);
    }
    let elements = pattern.count as u64;
    Ok(Done {
        outputs: vec![Output {
            address: pattern.words,
            element_size: 8,
            elements,
            row_length: elements,
            blocks: Blocks::InOrder { elements: THREADS },
        }],
        gpu_time_ns: pattern.gpu_time_ns(),
    })
}

pub(super) fn verify(launch: &Launch<'_>) -> Outcome<Done> {
    let pattern = Pattern::of(launch)?;
    // SAFETY: the sixth parameter is result: *mut u64.
    let result = unsafe { launch.parameter::<u64>(5)? };
    // SAFETY: nothing writes the words meanwhile, and any bits are a u64.
    let words = unsafe { launch.device_read::<u64>(pattern.words, pattern.count)? };
    // SAFETY: the result is the kernel's own while it runs, and apart from the words.
    let result = unsafe { launch.device_slice::<u64>(result, RESULT_WORDS)? };
    for (index, observed) in (0..).zip(words) {
        let expected = pattern.word(index);
        if *observed == expected {
            continue;
        }
        let number = result[0];
        result[0] += 1;
        if number < EXAMPLES {
            let at = usize::try_from(2 + number * 3).map_err(|_| INVALID_VALUE)?;
            let example = [pattern.words + index * 8, expected, *observed];
            result[at..at + 3].copy_from_slice(&example);
        }
    }
    result[1] += pattern.count as u64;
    Ok(Done {
        outputs: Vec::new(),
        gpu_time_ns: pattern.gpu_time_ns(),
    })
}
