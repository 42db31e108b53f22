//! The checksum of a strip of a result, as the kernels compute it.

/// Rows of a strip.
pub(crate) const STRIP_ROWS: usize = 16;
/// 32-bit words in a row of a strip.
pub(crate) const STRIP_WORDS: usize = 256;
/// Odd, so that a wrong word in any row changes its column's polynomial.
const ROW_FACTOR: u32 = 0x9E37_79B1;

/// Checksum of the strip that starts at `words[0]`, whose rows lie `pitch_words` apart.
///
/// A single wrong word always changes it; KERNELS.md says why.
///
/// # Panics
/// When `words` ends before the strip does.
#[must_use]
pub(crate) fn strip_checksum(words: &[u32], pitch_words: usize) -> u64 {
    let mut polynomials = [0_u32; STRIP_WORDS];
    for row in 0..STRIP_ROWS {
        let start = row * pitch_words;
        for (polynomial, word) in polynomials
            .iter_mut()
            .zip(&words[start..start + STRIP_WORDS])
        {
            *polynomial = polynomial.wrapping_mul(ROW_FACTOR).wrapping_add(*word);
        }
    }
    (0..)
        .zip(polynomials)
        .fold(0, |sum: u64, (column, polynomial)| {
            sum.wrapping_add(u64::from(polynomial) * u64::from(weight(column)))
        })
}

/// Odd and hashed from the column, so that regular patterns of wrong words do not cancel.
fn weight(column: u32) -> u32 {
    let mut weight = (column + 1).wrapping_mul(0x9E37_79B9);
    weight ^= weight >> 15;
    weight = weight.wrapping_mul(0x2C1B_3C6D);
    weight ^= weight >> 12;
    weight | 1
}

#[cfg(test)]
mod tests {
    use super::super::operand::{OperandMode, OperandType, operand_bits};
    use super::*;

    /// 16 rows of 256 random FP32 from seed 77.
    fn strip() -> Vec<u32> {
        (0..4096)
            .map(|index| operand_bits(OperandType::F32, OperandMode::Random, 77, index))
            .map(|bits| u32::try_from(bits).unwrap())
            .collect()
    }

    #[test]
    fn equals_what_a_gpu_computed() {
        // Written by `verify_strips` on an NVIDIA H200.
        assert_eq!(strip_checksum(&strip(), STRIP_WORDS), 0xF470_8A7D_0D7A_5633);
    }

    #[test]
    fn every_single_flipped_bit_changes_it() {
        let mut words = strip();
        let clean = strip_checksum(&words, STRIP_WORDS);
        for place in 0..words.len() {
            // Three bits a word, all 32 over the strip.
            for bit in [place % 32, (place / 32) % 32, 31] {
                words[place] ^= 1 << bit;
                assert_ne!(
                    strip_checksum(&words, STRIP_WORDS),
                    clean,
                    "word {place}, bit {bit}"
                );
                words[place] ^= 1 << bit;
            }
        }
    }

    #[test]
    fn swapped_rows_and_columns_and_constant_results_change_it() {
        let words = strip();
        let clean = strip_checksum(&words, STRIP_WORDS);
        let mut swapped_rows = words.clone();
        for column in 0..STRIP_WORDS {
            swapped_rows.swap(column, STRIP_WORDS + column);
        }
        let mut swapped_columns = words.clone();
        swapped_columns.swap(0, 1);
        let constant = vec![0x7FC0_0000; words.len()];
        for wrong in [
            swapped_rows,
            swapped_columns,
            constant,
            vec![0; words.len()],
        ] {
            assert_ne!(strip_checksum(&wrong, STRIP_WORDS), clean);
        }
    }

    #[test]
    fn rows_are_found_by_the_pitch() {
        let words = strip();
        let mut spread = vec![0xFFFF_FFFF; STRIP_ROWS * 1000];
        for row in 0..STRIP_ROWS {
            spread[row * 1000..row * 1000 + STRIP_WORDS]
                .copy_from_slice(&words[row * STRIP_WORDS..(row + 1) * STRIP_WORDS]);
        }
        assert_eq!(
            strip_checksum(&spread, 1000),
            strip_checksum(&words, STRIP_WORDS)
        );
    }
}
