//! What `check.ptx` must write: the same arithmetic on the host, bit for bit.

/// Threads of one block of `gpu_validator_check`; a thread takes a value from another thread of its
/// block.
pub(crate) const CHECK_KERNEL_BLOCK_THREADS: u32 = 256;

/// The value that `gpu_validator_check(out, n, seed)` leaves in `out[index]`.
///
/// The kernel computes whole blocks, also where `n` ends inside one, so the value does not depend
/// on `n`.
#[must_use]
pub(crate) fn check_kernel_expected(index: u32, seed: u32) -> u32 {
    let own = after_shared_memory(index, seed);
    let partner = after_shared_memory(index ^ 5, seed);
    let shuffled = own.wrapping_add(partner) ^ index;
    shuffled.wrapping_mul(0x297A_2D39).wrapping_add(seed)
}

/// Integer, FP32 and FP64 units: what a thread knows before it talks to another.
fn before_shared_memory(index: u32, seed: u32) -> u32 {
    let hash = murmur3_finaliser(index.wrapping_mul(0x9E37_79B9).wrapping_add(seed));
    // 24 bits, so the conversion is exact.
    #[allow(clippy::cast_precision_loss)]
    let single = (hash >> 8) as f32;
    let scaled = single.mul_add(f32::from_bits(0x3F8C_CCCD), f32::from_bits(0x3EAA_AAAB));
    let word = hash ^ scaled.mul_add(scaled, single).to_bits();
    let double = f64::from(word);
    let scaled = double.mul_add(
        f64::from_bits(0x3FF1_9999_9999_999A),
        f64::from_bits(0x3FD5_5555_5555_5555),
    );
    let bits = scaled.mul_add(scaled, double).to_bits();
    #[allow(clippy::cast_possible_truncation)]
    let (low, high) = (bits as u32, (bits >> 32) as u32);
    (word ^ low).wrapping_add(high)
}

/// The exchange through shared memory: thread t of a block adds the value of thread (5 t + 17)
/// mod 256.
fn after_shared_memory(index: u32, seed: u32) -> u32 {
    let thread = index % CHECK_KERNEL_BLOCK_THREADS;
    let block_start = index - thread;
    let neighbour = block_start + (5 * thread + 17) % CHECK_KERNEL_BLOCK_THREADS;
    before_shared_memory(index, seed)
        .wrapping_mul(0x2C1B_3C6D)
        .wrapping_add(before_shared_memory(neighbour, seed))
}

/// The last steps of `MurmurHash3`: every input bit reaches every output bit.
fn murmur3_finaliser(value: u32) -> u32 {
    let mut value = value;
    value ^= value >> 16;
    value = value.wrapping_mul(0x85EB_CA6B);
    value ^= value >> 13;
    value = value.wrapping_mul(0xC2B2_AE35);
    value ^ (value >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Read back from `check.ptx` running on an NVIDIA H200 (driver 580.159.04).
    const SEEN_ON_H200: [(u32, u32, u32); 15] = [
        (0, 0, 0xE49F_6F01),
        (1, 0, 0x856F_9E2A),
        (255, 0, 0x6C09_318D),
        (256, 0, 0xCB89_368C),
        (99_999, 0, 0x45A3_8636),
        (0, 0x7, 0xF915_95D9),
        (1, 0x7, 0x160D_5713),
        (255, 0x7, 0x3F34_263E),
        (256, 0x7, 0xBD17_B25F),
        (99_999, 0x7, 0xC203_A27E),
        (0, 0xDEAD_BEEF, 0x8BA2_6527),
        (1, 0xDEAD_BEEF, 0xC9F4_EAD1),
        (255, 0xDEAD_BEEF, 0x7A40_979C),
        (256, 0xDEAD_BEEF, 0x80BA_8305),
        (99_999, 0xDEAD_BEEF, 0xEA8E_3611),
    ];

    #[test]
    fn equals_what_a_gpu_wrote() {
        for (index, seed, value) in SEEN_ON_H200 {
            assert_eq!(
                check_kernel_expected(index, seed),
                value,
                "index {index}, seed {seed}"
            );
        }
    }

    #[test]
    fn values_differ_by_index_and_by_seed() {
        let mut values: Vec<u32> = (0..4096)
            .map(|index| check_kernel_expected(index, 7))
            .collect();
        values.extend((0..4096).map(|index| check_kernel_expected(index, 8)));
        values.sort_unstable();
        let before = values.len();
        values.dedup();
        // 8192 random words collide among themselves less than once in a hundred draws.
        assert!(
            before - values.len() <= 1,
            "{} collisions",
            before - values.len()
        );
    }
}
