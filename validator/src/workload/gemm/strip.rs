//! The checksum of a strip of a result, as the kernels compute it.

/// Rows of a strip.
pub(crate) const STRIP_ROWS: usize = 16;
/// 32-bit words in a row of a strip.
pub(crate) const STRIP_WORDS: usize = 256;
/// Odd, so that a wrong word in any row changes its column's polynomial.
const ROW_FACTOR: u32 = 0xD68C_F43B;
/// Byte k of all rows is a Golomb ruler, shuffled: no two pairs of rows have the same difference,
/// so that pairs of wrong words whose top bits cancel in the polynomial do not cancel here, too.
const ROW_WEIGHTS: [u32; STRIP_ROWS] = [
    0x7E83_826A,
    0xF0F5_F482,
    0xD74E_52ED,
    0xEDF2_F1BD,
    0xADD6_F58E,
    0x7C70_444E,
    0xB9BE_BD55,
    0xE6B2_6F4B,
    0x6BEB_EAD0,
    0xA5DC_B1BF,
    0xF181_DBFB,
    0x4E53_4DE0,
    0x49AA_5F64,
    0x5BF6_8096,
    0x4060_D54A,
    0xD145_A9F2,
];

/// Checksum of the strip that starts at `words[0]`, whose rows lie `pitch_words` apart.
///
/// One or two wrong bits anywhere always change it, and so do three in a column; KERNELS.md lists
/// the others.
///
/// # Panics
/// When `words` ends before the strip does.
#[must_use]
pub(crate) fn strip_checksum(words: &[u32], pitch_words: usize) -> u64 {
    let mut columns = [Column::default(); STRIP_WORDS];
    for (row, row_weights) in ROW_WEIGHTS.into_iter().enumerate() {
        let start = row * pitch_words;
        for (column, word) in columns.iter_mut().zip(&words[start..start + STRIP_WORDS]) {
            column.add(*word, row_weights);
        }
    }
    (0..).zip(columns).fold(0, |sum: u64, (place, column)| {
        let [polynomial, bytes] = weights(place);
        sum.wrapping_add(u64::from(column.polynomial) * u64::from(polynomial))
            .wrapping_add(u64::from(column.bytes) * u64::from(bytes))
    })
}

/// What the words of one column come to.
#[derive(Clone, Copy, Debug, Default)]
struct Column {
    /// The sum of word * `ROW_FACTOR` ^ (15 - row), modulo 2^32.
    polynomial: u32,
    /// The sum of bytes weighed by their row: below 2^23.
    bytes: u32,
}

impl Column {
    fn add(&mut self, word: u32, row_weights: u32) {
        self.polynomial = self.polynomial.wrapping_mul(ROW_FACTOR).wrapping_add(word);
        let byte = |of: u32, shift: u32| (of >> shift) & 0xFF;
        self.bytes += byte(word, 0) * byte(row_weights, 0)
            + byte(word, 8) * byte(row_weights, 8)
            + byte(word, 16) * byte(row_weights, 16)
            + byte(word, 24) * byte(row_weights, 24);
    }
}

/// What a column's polynomial and its bytes count in the sum: hashed, so that regular patterns of
/// wrong words do not cancel. The first is odd and at least 2^30.
fn weights(column: u32) -> [u32; 2] {
    let mut hash = (column + 1).wrapping_mul(0x9E37_79B9);
    hash ^= hash >> 15;
    hash = hash.wrapping_mul(0x2C1B_3C6D);
    hash ^= hash >> 12;
    let weight = hash >> 2 | 1 << 30 | 1;
    [weight, weight.rotate_left(16) | 1]
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashMap};

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
        assert_eq!(strip_checksum(&strip(), STRIP_WORDS), 0x50A8_7F00_E8BF_07A3);
    }

    /// What a flip of each bit of a column does to its polynomial (modulo 2^32) and to its bytes,
    /// when the bit was 0. A bit that was 1 does the opposite.
    fn single_flips() -> Vec<(u32, i64)> {
        let mut flips = Vec::new();
        for row in 0..STRIP_ROWS {
            for bit in 0..32 {
                let mut column = Column::default();
                for (other, row_weights) in ROW_WEIGHTS.into_iter().enumerate() {
                    column.add(u32::from(other == row) << bit, row_weights);
                }
                flips.push((column.polynomial, i64::from(column.bytes)));
            }
        }
        flips
    }

    type Flip = (u32, i64);

    fn sum(a: Flip, b: Flip) -> Flip {
        (a.0.wrapping_add(b.0), a.1 + b.1)
    }

    fn opposite(flip: Flip) -> Flip {
        (flip.0.wrapping_neg(), -flip.1)
    }

    /// Every two flips of one column: both places, and the sum for both signs of the second.
    fn double_flips(flips: &[Flip]) -> Vec<([usize; 2], Flip)> {
        let mut pairs = Vec::new();
        for (second, b) in flips.iter().enumerate() {
            for (first, a) in flips[..second].iter().enumerate() {
                pairs.push(([first, second], sum(*a, *b)));
                pairs.push(([first, second], sum(*a, opposite(*b))));
            }
        }
        pairs
    }

    /// All 131,000 pairs and 22 million triples of bits of a column, whatever the bits were.
    #[test]
    fn two_and_three_flipped_bits_of_a_column_never_cancel() {
        let flips = single_flips();
        let mut places: HashMap<Flip, Vec<usize>> = HashMap::default();
        for (place, flip) in flips.iter().enumerate() {
            places.entry(*flip).or_default().push(place);
            places.entry(opposite(*flip)).or_default().push(place);
        }
        for (pair, both) in double_flips(&flips) {
            assert_ne!(both, (0, 0), "{pair:?}");
            let third = places.get(&both).into_iter().flatten();
            for place in third {
                assert!(pair.contains(place), "{pair:?} and {place}");
            }
        }
    }

    /// Of all 2.8 thousand million ways to flip four bits of a column, 125 cancel, each for some of
    /// the bits' values only.
    #[test]
    fn few_four_flipped_bits_of_a_column_cancel() {
        let flips = single_flips();
        let mut pairs = double_flips(&flips);
        let negative: Vec<_> = pairs
            .iter()
            .map(|(it, both)| (*it, opposite(*both)))
            .collect();
        pairs.extend(negative);
        pairs.sort_unstable_by_key(|(_, both)| *both);
        let mut cancelling = BTreeSet::new();
        for same in pairs.chunk_by(|(_, a), (_, b)| a == b) {
            for (index, (a, _)) in same.iter().enumerate() {
                for (b, _) in &same[..index] {
                    let mut four = [a[0], a[1], b[0], b[1]];
                    four.sort_unstable();
                    if four.windows(2).all(|it| it[0] != it[1]) {
                        cancelling.insert(four);
                    }
                }
            }
        }
        assert_eq!(cancelling.len(), 125);
    }

    /// A column whose polynomial or bytes changed always changes the sum: |dp * w1 + dq * w2| <
    /// 2^64 with |dp| < 2^32,
    /// |dq| < 2^23 and w1 < 2^31, so it is 0 modulo 2^64 only where w1 / gcd divides dq, which is smaller.
    #[test]
    fn one_changed_column_changes_the_sum() {
        let gcd = |mut a: u32, mut b: u32| {
            while b != 0 {
                (a, b) = (b, a % b);
            }
            a
        };
        let greatest_bytes: u32 = ROW_WEIGHTS
            .into_iter()
            .flat_map(u32::to_le_bytes)
            .map(|weight| 255 * u32::from(weight))
            .sum();
        assert!(greatest_bytes < 1 << 23);
        for column in 0..256 {
            let [polynomial, bytes] = weights(column);
            assert!((1 << 30..1 << 31).contains(&polynomial));
            assert!(polynomial / gcd(polynomial, bytes) > 1 << 23, "{column}");
        }
    }

    /// All 8.6 thousand million pairs of bits in different columns.
    #[test]
    fn flipped_bits_of_two_columns_never_cancel() {
        let mut seen = HashMap::new();
        let flips = single_flips();
        for column in 0..256 {
            let [weight, bytes_weight] = weights(column).map(i128::from);
            for (polynomial, bytes) in flips.iter().flat_map(|it| [*it, opposite(*it)]) {
                // As a difference of two numbers of 32 bits a polynomial's change has one of two
                // values.
                let change = i128::from(polynomial);
                for change in [change, change - (1 << 32)] {
                    let sum = change * weight + i128::from(bytes) * bytes_weight;
                    seen.insert(sum.rem_euclid(1 << 64), column);
                }
            }
        }
        assert_eq!(seen.len(), 256 * 512 * 4, "two flips change the sum alike");
        for (sum, column) in &seen {
            let other = seen.get(&((1 << 64) - sum));
            assert!(
                other.is_none_or(|it| it == column),
                "{column} and {other:?}"
            );
        }
    }

    /// The same bit of two words of a column, as the sign bits of two rows: every pair of rows, and
    /// the bits that a polynomial alone would lose.
    #[test]
    fn the_same_bit_of_two_rows_changes_it() {
        let mut words = strip();
        let clean = strip_checksum(&words, STRIP_WORDS);
        for second in 1..STRIP_ROWS {
            for first in 0..second {
                for bit in [23, 27, 28, 29, 30, 31] {
                    let column = (first * 97 + second * 31 + bit) % STRIP_WORDS;
                    let places = [first, second].map(|row| row * STRIP_WORDS + column);
                    for place in places {
                        words[place] ^= 1 << bit;
                    }
                    assert_ne!(
                        strip_checksum(&words, STRIP_WORDS),
                        clean,
                        "{places:?} bit {bit}"
                    );
                    for place in places {
                        words[place] ^= 1 << bit;
                    }
                }
            }
        }
    }

    /// What broken hardware does: the same bits in all of several rows or columns, stuck bits,
    /// random words.
    #[test]
    fn wrong_rows_columns_and_blocks_change_it() {
        let words = strip();
        let clean = strip_checksum(&words, STRIP_WORDS);
        for round in 0..500 {
            let random = |index| operand_bits(OperandType::F64, OperandMode::Random, round, index);
            let pick = |index, below: usize| usize::try_from(random(index) % below as u64).unwrap();
            let rows = pick(0, STRIP_ROWS)..STRIP_ROWS;
            let columns = pick(1, STRIP_WORDS)..STRIP_WORDS;
            let rows = if round % 3 == 0 { 0..STRIP_ROWS } else { rows };
            let columns = if round % 3 == 1 {
                0..STRIP_WORDS
            } else {
                columns
            };
            let kind = round % 5;
            let mask = match pick(2, 3) {
                0 => 1 << 31,
                1 => 1 << pick(3, 32),
                _ => u32::try_from(random(4) & 0xFFFF_FFFF).unwrap() | 1,
            };
            let mut wrong = words.clone();
            for row in rows.step_by(1 + pick(5, 4)) {
                for column in columns.clone() {
                    let place = row * STRIP_WORDS + column;
                    wrong[place] = match kind {
                        0 | 1 => words[place] ^ mask,
                        2 => words[place] | mask,
                        3 => words[place] & !mask,
                        _ => u32::try_from(random(10 + place as u64) >> 32).unwrap(),
                    };
                }
            }
            if wrong != words {
                assert_ne!(strip_checksum(&wrong, STRIP_WORDS), clean, "round {round}");
            }
        }
    }

    #[test]
    fn every_single_flipped_bit_changes_it() {
        let mut words = strip();
        let clean = strip_checksum(&words, STRIP_WORDS);
        // Every fifth word, all bits over the strip.
        for place in (0..words.len()).step_by(5) {
            let bit = (place / 5) % 32;
            words[place] ^= 1 << bit;
            assert_ne!(
                strip_checksum(&words, STRIP_WORDS),
                clean,
                "word {place}, bit {bit}"
            );
            words[place] ^= 1 << bit;
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
