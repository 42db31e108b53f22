//! The words that `memory.ptx` writes: the same arithmetic on the host, bit for bit.

/// 2^64 divided by the golden ratio: neighbouring numbers get words that have nothing in common.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The word with this number, in a pass with this seed whose words are combined with `mask`.
pub(super) fn word(number: u64, seed: u64, mask: u64) -> u64 {
    let mut x = number.wrapping_mul(GOLDEN).wrapping_add(seed);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31) ^ mask
}

#[cfg(test)]
mod tests {
    use super::word;

    #[test]
    fn is_splitmix64_and_its_inverse_has_no_bit_in_common() {
        // Source: the reference implementation's first outputs for seed 0,
        // <https://prng.di.unimi.it/splitmix64.c>.
        assert_eq!(word(1, 0, 0), 0xE220_A839_7B1D_CDAF);
        assert_eq!(word(2, 0, 0), 0x6E78_9E6A_A1B9_65F4);
        assert_eq!(word(3, 0, 0), 0x06C4_5D18_8009_454F);
        assert_eq!(word(7, 11, 0) ^ word(7, 11, u64::MAX), u64::MAX);
    }

    #[test]
    fn no_two_words_are_alike() {
        let mut words: Vec<u64> = (0..10_000).map(|number| word(number, 5, 0)).collect();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), 10_000);
    }
}
