//! Matrix products on the CPU, and the memory of products that were computed before.

#![allow(unsafe_code, reason = "instructions that not every x86-64 has")]
#![allow(
    clippy::inline_always,
    reason = "one instruction of the innermost loop each"
)]

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use crate::threads::in_parallel;

/// Rows of a tile whose sums are held in registers: six rows of two AVX2 registers, and three for
/// the factors.
const TILE_ROWS: usize = 6;

/// What is multiplied.
pub(crate) trait Factor: Copy + Default + Send + Sync {
    /// `self * other + sum`, rounded once.
    fn multiply_add(self, other: Self, sum: Self) -> Self;

    /// The sums of one chunk of a tile, in registers.
    #[cfg(target_arch = "x86_64")]
    fn sums_with_fma<const TILE_COLUMNS: usize>(
        left: &[[Self; TILE_ROWS]],
        right: &[[Self; TILE_COLUMNS]],
    ) -> Option<Sums<Self, TILE_COLUMNS>>;
}

type Sums<T, const TILE_COLUMNS: usize> = [[T; TILE_COLUMNS]; TILE_ROWS];

macro_rules! factor {
    ($type:ty, $kernel:ident, $load:ident, $store:ident, $broadcast:ident, $fma:ident, $zero:ident) => {
        impl Factor for $type {
            #[inline(always)]
            fn multiply_add(self, other: Self, sum: Self) -> Self {
                self.mul_add(other, sum)
            }

            #[cfg(target_arch = "x86_64")]
            fn sums_with_fma<const TILE_COLUMNS: usize>(
                left: &[[Self; TILE_ROWS]],
                right: &[[Self; TILE_COLUMNS]],
            ) -> Option<Sums<Self, TILE_COLUMNS>> {
                use std::arch::is_x86_feature_detected;
                let possible = size_of::<[Self; TILE_COLUMNS]>() == 2 * AVX2_BYTES
                    && is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma");
                // SAFETY: the processor has both, and a row of the panel is two registers wide.
                possible.then(|| unsafe { $kernel(left, right) })
            }
        }

        /// # Safety
        /// `TILE_COLUMNS` elements are 64 bytes.
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        unsafe fn $kernel<const TILE_COLUMNS: usize>(
            left: &[[$type; TILE_ROWS]],
            right: &[[$type; TILE_COLUMNS]],
        ) -> Sums<$type, TILE_COLUMNS> {
            use std::arch::x86_64::{$broadcast, $fma, $load, $store, $zero};
            let mut sums = [[$zero(); 2]; TILE_ROWS];
            for (left, right) in left.iter().zip(right) {
                // SAFETY: each half of the row is one register long.
                let halves = unsafe {
                    [
                        $load(right.as_ptr()),
                        $load(right.as_ptr().add(TILE_COLUMNS / 2)),
                    ]
                };
                for row in 0..TILE_ROWS {
                    let factor = $broadcast(left[row]);
                    sums[row][0] = $fma(factor, halves[0], sums[row][0]);
                    sums[row][1] = $fma(factor, halves[1], sums[row][1]);
                }
            }
            let mut stored = [[<$type>::default(); TILE_COLUMNS]; TILE_ROWS];
            for (stored, sums) in stored.iter_mut().zip(sums) {
                // SAFETY: as above.
                unsafe {
                    $store(stored.as_mut_ptr(), sums[0]);
                    $store(stored.as_mut_ptr().add(TILE_COLUMNS / 2), sums[1]);
                }
            }
            stored
        }
    };
}

#[cfg(target_arch = "x86_64")]
const AVX2_BYTES: usize = 32;

factor!(
    f32,
    sums_of_f32,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_set1_ps,
    _mm256_fmadd_ps,
    _mm256_setzero_ps
);
factor!(
    f64,
    sums_of_f64,
    _mm256_loadu_pd,
    _mm256_storeu_pd,
    _mm256_set1_pd,
    _mm256_fmadd_pd,
    _mm256_setzero_pd
);

/// What the sums of chunks of `T` are added to.
pub(crate) trait Total<T>: Copy + Default + Send {
    fn add(self, part: T) -> Self;
}

impl Total<Self> for f32 {
    #[inline(always)]
    fn add(self, part: Self) -> Self {
        self + part
    }
}

impl Total<Self> for f64 {
    #[inline(always)]
    fn add(self, part: Self) -> Self {
        self + part
    }
}

/// Sums of integers that FP32 holds exactly, added up as the integers they are.
impl Total<f32> for i32 {
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the part is an integer")]
    fn add(self, part: f32) -> Self {
        self.wrapping_add(part as Self)
    }
}

/// The sizes of C = A x B-transposed: A is `rows` x `depth`, B is `columns` x `depth`, C is `rows`
/// x `columns`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) depth: usize,
}

/// C = A x B-transposed, all row-major. Every element is the sum of chunks of `chunk` products;
/// within a chunk each product is added by one fused multiply-add, in order, starting from zero.
/// The bits do not depend on the number of threads.
pub(crate) fn multiply_by_transposed<T: Factor, S: Total<T>, const TILE_COLUMNS: usize>(
    a: &[T],
    b: &[T],
    sizes: Sizes,
    chunk: usize,
    c: &mut [S],
) {
    let Sizes {
        rows,
        columns,
        depth,
    } = sizes;
    if rows == 0 || columns == 0 {
        return;
    }
    let chunk = chunk.clamp(1, depth.max(1));
    let right = panels::<T, TILE_COLUMNS>(b, depth);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    // Threads cost more than they save below some ten million products.
    let threads = if rows * columns * depth < 1 << 23 {
        1
    } else {
        threads
    };
    let rows_each = rows.div_ceil(threads).next_multiple_of(TILE_ROWS);
    let parts = a
        .chunks(rows_each * depth.max(1))
        .zip(c.chunks_mut(rows_each * columns));
    in_parallel(threads, parts, |(a, c)| {
        let left = panels::<T, TILE_ROWS>(a, depth);
        rows_of_tiles::<T, S, TILE_COLUMNS>(&left, &right, depth, columns, chunk, c);
    });
}

/// The matrix in panels of `WIDTH` rows, each of them transposed, the last one filled up with
/// zeros: what a tile reads lies in order.
fn panels<T: Factor, const WIDTH: usize>(matrix: &[T], depth: usize) -> Vec<[T; WIDTH]> {
    let rows = matrix.len().checked_div(depth).unwrap_or(0);
    let mut packed = vec![[T::default(); WIDTH]; rows.div_ceil(WIDTH) * depth];
    for (row, values) in matrix.chunks_exact(depth.max(1)).enumerate() {
        let panel = &mut packed[row / WIDTH * depth..][..depth];
        for (place, value) in panel.iter_mut().zip(values) {
            place[row % WIDTH] = *value;
        }
    }
    packed
}

/// Column panel by column panel, so that one of B stays in the cache while those of A pass.
fn rows_of_tiles<T: Factor, S: Total<T>, const TILE_COLUMNS: usize>(
    left: &[[T; TILE_ROWS]],
    right: &[[T; TILE_COLUMNS]],
    depth: usize,
    columns: usize,
    chunk: usize,
    c: &mut [S],
) {
    let depth = depth.max(1);
    for (panel_column, right) in right.chunks_exact(depth).enumerate() {
        let column = panel_column * TILE_COLUMNS;
        let width = TILE_COLUMNS.min(columns - column);
        for (left, c) in left
            .chunks_exact(depth)
            .zip(c.chunks_mut(TILE_ROWS * columns))
        {
            let totals = tile::<T, S, TILE_COLUMNS>(left, right, chunk);
            for (line, totals) in c.chunks_exact_mut(columns).zip(&totals) {
                line[column..column + width].copy_from_slice(&totals[..width]);
            }
        }
    }
}

fn tile<T: Factor, S: Total<T>, const TILE_COLUMNS: usize>(
    left: &[[T; TILE_ROWS]],
    right: &[[T; TILE_COLUMNS]],
    chunk: usize,
) -> Sums<S, TILE_COLUMNS> {
    let mut totals = [[S::default(); TILE_COLUMNS]; TILE_ROWS];
    for (left, right) in left.chunks(chunk).zip(right.chunks(chunk)) {
        #[cfg(target_arch = "x86_64")]
        let sums = T::sums_with_fma(left, right).unwrap_or_else(|| sums(left, right));
        #[cfg(not(target_arch = "x86_64"))]
        let sums = sums(left, right);
        for (totals, sums) in totals.iter_mut().zip(sums) {
            for (total, sum) in totals.iter_mut().zip(sums) {
                *total = total.add(sum);
            }
        }
    }
    totals
}

/// On any processor.
fn sums<T: Factor, const TILE_COLUMNS: usize>(
    left: &[[T; TILE_ROWS]],
    right: &[[T; TILE_COLUMNS]],
) -> Sums<T, TILE_COLUMNS> {
    let mut sums = [[T::default(); TILE_COLUMNS]; TILE_ROWS];
    for (left, right) in left.iter().zip(right) {
        for (sums, left) in sums.iter_mut().zip(left) {
            for (sum, right) in sums.iter_mut().zip(right) {
                *sum = left.multiply_add(*right, *sum);
            }
        }
    }
    sums
}

/// How many products are remembered; a burn uses one or two pairs of operands a precision.
const REMEMBERED: usize = 4;

/// Products by what they are made of.
#[derive(Debug)]
pub(crate) struct Products<K, V> {
    known: Mutex<VecDeque<(K, V)>>,
}

impl<K: PartialEq, V: Clone> Products<K, V> {
    pub(crate) const fn new() -> Self {
        Self {
            known: Mutex::new(VecDeque::new()),
        }
    }

    /// The product of this key, computed if it is not remembered.
    pub(crate) fn get(&self, key: K, compute: impl FnOnce() -> V) -> V {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, product)) = known.iter().find(|(it, _)| *it == key) {
            return product.clone();
        }
        let product = compute();
        known.push_front((key, product.clone()));
        known.truncate(REMEMBERED);
        product
    }
}

/// A hash of memory at the speed of memory. One changed word always changes it.
pub(crate) fn fingerprint(memory: &[u8]) -> u64 {
    const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
    let mut lanes = [0x243F_6A88_85A3_08D3_u64; 8];
    let (blocks, rest) = memory.as_chunks::<64>();
    let mut take = |block: &[u8; 64]| {
        for (lane, word) in lanes.iter_mut().zip(block.as_chunks::<8>().0) {
            *lane = (*lane ^ u64::from_le_bytes(*word))
                .wrapping_mul(FACTOR)
                .rotate_left(29);
        }
    };
    blocks.iter().for_each(&mut take);
    let mut last = [0; 64];
    last[..rest.len()].copy_from_slice(rest);
    take(&last);
    lanes.into_iter().fold(memory.len() as u64, |sum, lane| {
        (sum ^ lane).wrapping_mul(FACTOR).rotate_left(31)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(count: usize, seed: usize) -> Vec<f32> {
        #[expect(clippy::cast_precision_loss, reason = "small")]
        (0..count)
            .map(|i| ((i * 7919 + seed) % 1009) as f32 / 97.0 - 5.0)
            .collect()
    }

    #[test]
    fn sums_are_fused_and_in_order_whatever_the_shape() {
        for (rows, columns, depth) in [(1, 1, 1), (7, 17, 33), (64, 48, 5), (301, 300, 100)] {
            let sizes = Sizes {
                rows,
                columns,
                depth,
            };
            let (a, b) = (matrix(rows * depth, 1), matrix(columns * depth, 5));
            let mut c = vec![0f32; rows * columns];
            multiply_by_transposed::<f32, f32, 16>(&a, &b, sizes, depth, &mut c);
            for (place, got) in c.iter().enumerate() {
                let (row, column) = (place / columns, place % columns);
                let expected = (0..depth).fold(0f32, |sum, k| {
                    a[row * depth + k].mul_add(b[column * depth + k], sum)
                });
                assert_eq!(got.to_bits(), expected.to_bits(), "{sizes:?} {place}");
            }
        }
    }

    #[test]
    fn chunks_are_summed_apart() {
        let sizes = Sizes {
            rows: 1,
            columns: 1,
            depth: 4,
        };
        let mut c = [0f32];
        // 1 is lost when added to 2^24 in one chain, and kept where both ones are summed first.
        let (a, b) = ([16_777_216.0, 0.0, 1.0, 1.0], [1.0f32; 4]);
        multiply_by_transposed::<f32, f32, 16>(&a, &b, sizes, 4, &mut c);
        assert_eq!(c[0].to_bits(), 16_777_216f32.to_bits());
        multiply_by_transposed::<f32, f32, 16>(&a, &b, sizes, 2, &mut c);
        assert_eq!(c[0].to_bits(), 16_777_218f32.to_bits());
    }

    #[test]
    fn every_flipped_bit_and_every_length_has_another_fingerprint() {
        let mut memory = vec![7u8; 200];
        let clean = fingerprint(&memory);
        for bit in 0..1600 {
            memory[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(fingerprint(&memory), clean, "bit {bit}");
            memory[bit / 8] ^= 1 << (bit % 8);
        }
        assert_ne!(fingerprint(&memory[..199]), clean);
        assert_ne!(fingerprint(&[0; 64]), fingerprint(&[0; 128]));
    }

    #[test]
    fn a_product_is_computed_once() {
        let products = Products::new();
        assert_eq!(products.get(1, || "one"), "one");
        assert_eq!(products.get(1, || panic!("known")), "one");
        for key in 2..6 {
            products.get(key, || "other");
        }
        assert_eq!(products.get(1, || "again"), "again");
    }
}
