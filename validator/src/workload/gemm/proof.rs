//! How it is known that the reference is right, apart from the kernel that made it.
//!
//! Exact operands: Freivalds' check in FP64 without any tolerance, and whole rows that the host
//! computes. Random operands: Freivalds' check within the rounding, and whole rows within the
//! rounding. The checksums themselves are computed by the host, too, where it has the rows.

use std::sync::atomic::{AtomicBool, Ordering};

use super::kernels::{Matrix, Support};
use super::operand::{OperandMode, OperandType, operand_bits};
use super::shape::{Layout, Shape};
use super::strip::{STRIP_ROWS, STRIP_WORDS, strip_checksum};
use crate::cuda::{CudaFailure, DeviceMemory};
use crate::threads::spawn_scoped;

/// Rows of which the host computes elements.
pub(super) const HOST_ROWS: usize = 2;
/// Elements that it computes of each: of a long row one in so many, from a place that the seed
/// chooses. Whole rows of 8192 would cost two seconds of a processor, which a burn of ten seconds
/// should leave to others.
const HOST_COLUMNS: u32 = 256;
/// Vectors of Freivalds' check of random operands: a wrong element that the first hides is seen by
/// the second.
pub(super) const FREIVALDS_VECTORS: u32 = 2;
/// Added to the seed for B, so that the operands differ.
const SEED_OF_B: u64 = 0x5851_F42D_4C95_7F2D;

/// The seed of the second operand.
pub(super) fn seed_of_b(seed: u64) -> u64 {
    seed ^ SEED_OF_B
}

/// The rounding that Freivalds' check allows, as a part of the sum of absolute values.
// Source: measured on an H200, see the table in KERNELS.md.
fn freivalds_tolerance(operand: OperandType, mode: OperandMode) -> f64 {
    match (operand, mode) {
        (OperandType::F64, _) => 1e-15,
        (OperandType::S8, _) | (_, OperandMode::Exact) => 0.0,
        (OperandType::E4m3, _) => 2e-5,
        _ => 1e-7,
    }
}

/// The rounding that one element may have, as a part of the sum of its products' absolute values.
///
/// Wider than Freivalds', which averages over a row.
fn element_tolerance(operand: OperandType) -> f64 {
    match operand {
        OperandType::S8 => 0.0,
        OperandType::F64 => 1e-14,
        OperandType::E4m3 => 1e-3,
        _ => 1e-5,
    }
}

/// Freivalds' check of the result at offset `result` = A · Bᵀ with the signs of `seed`: the largest
/// residual as a multiple of what is allowed; infinite where nothing is allowed, or nothing is
/// finite.
pub(super) fn freivalds(
    support: &Support<'_, '_>,
    arena: &DeviceMemory<'_, '_>,
    (layout, result): (&Layout, u64),
    mode: OperandMode,
    seed: u64,
) -> Result<f64, CudaFailure> {
    let Layout { shape, .. } = *layout;
    let at = |offset: u64| arena.address() + offset;
    let operand = |offset| Matrix {
        address: at(offset),
        type_code: shape.operand as u32,
        rows: shape.side,
        columns: shape.k(),
    };
    let (a, b) = (operand(layout.a), operand(layout.b));
    let result = Matrix {
        address: at(result),
        type_code: result_type(shape.operand),
        rows: shape.side,
        columns: shape.side,
    };
    let [expected, observed, allowed] = layout.rows;
    let (signs, t) = (at(layout.signs), at(layout.product_of_b));
    support.generate(
        signs,
        u64::from(shape.side),
        seed,
        OperandType::F64,
        OperandMode::Sign,
    )?;
    support.columns_times(b, signs, t, false)?;
    support.rows_times(a, t, at(expected), false)?;
    support.columns_times(b, signs, t, true)?;
    support.rows_times(a, t, at(allowed), true)?;
    support.rows_times(result, signs, at(observed), false)?;
    let rows = |offset| doubles(arena, offset, shape.side as usize);
    let tolerance = freivalds_tolerance(shape.operand, mode);
    Ok(worst(
        &rows(expected)?,
        &rows(observed)?,
        &rows(allowed)?,
        tolerance,
    ))
}

/// The largest difference as a multiple of `tolerance` times the bound.
fn worst(expected: &[f64], observed: &[f64], bounds: &[f64], tolerance: f64) -> f64 {
    expected
        .iter()
        .zip(observed)
        .zip(bounds)
        .map(|((expected, observed), bound)| {
            multiple((observed - expected).abs(), bound * tolerance)
        })
        .fold(0.0, f64::max)
}

/// How many times what is allowed a difference is. NaN is never allowed.
fn multiple(difference: f64, allowed: f64) -> f64 {
    if difference == 0.0 {
        return 0.0;
    }
    let multiple = difference / allowed;
    if multiple.is_nan() {
        f64::INFINITY
    } else {
        multiple
    }
}

/// The kernels' code of the type of a result.
fn result_type(operand: OperandType) -> u32 {
    match operand {
        OperandType::F64 => OperandType::F64 as u32,
        // KERNELS.md: 7 is a 32-bit integer.
        OperandType::S8 => 7,
        _ => OperandType::F32 as u32,
    }
}

fn doubles(
    arena: &DeviceMemory<'_, '_>,
    offset: u64,
    count: usize,
) -> Result<Vec<f64>, CudaFailure> {
    let mut bytes = vec![0; count * 8];
    arena.read(offset, &mut bytes)?;
    Ok(bytes
        .as_chunks::<8>()
        .0
        .iter()
        .map(|bytes| f64::from_le_bytes(*bytes))
        .collect())
}

/// The reference's first strips of rows at `first_row`, and their checksums as the device has them.
#[derive(Debug)]
pub(super) struct SampledRows {
    pub(super) shape: Shape,
    pub(super) mode: OperandMode,
    pub(super) seed: u64,
    first_row: u32,
    words: Vec<u32>,
}

/// Reads one row of strips, chosen by the seed, from the reference.
pub(super) fn sample_rows(
    arena: &DeviceMemory<'_, '_>,
    layout: &Layout,
    mode: OperandMode,
    seed: u64,
) -> Result<SampledRows, CudaFailure> {
    let shape = layout.shape;
    let strip_rows = u64::from(shape.side) / STRIP_ROWS as u64;
    let first_row = u32::try_from((seed >> 7) % strip_rows * STRIP_ROWS as u64).unwrap_or_default();
    let row_bytes = u64::from(shape.row_words()) * 4;
    let mut bytes = vec![0; STRIP_ROWS * shape.row_words() as usize * 4];
    arena.read(
        layout.reference + u64::from(first_row) * row_bytes,
        &mut bytes,
    )?;
    let words = bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|bytes| u32::from_le_bytes(*bytes))
        .collect();
    Ok(SampledRows {
        shape,
        mode,
        seed,
        first_row,
        words,
    })
}

impl SampledRows {
    /// Whether the device's checksums of these rows are the host's own.
    pub(super) fn checksums_agree(&self, checksums: &[u64]) -> bool {
        let pitch = self.shape.row_words() as usize;
        let strips_a_row = pitch / STRIP_WORDS;
        let first = self.first_row as usize / STRIP_ROWS * strips_a_row;
        (0..strips_a_row).all(|strip| {
            let own = strip_checksum(&self.words[strip * STRIP_WORDS..], pitch);
            checksums.get(first + strip) == Some(&own)
        })
    }

    /// Computes elements of the first rows on the host, unless stopped. Elements compared, those
    /// that differ beyond the rounding, and the largest difference as a multiple of it.
    pub(super) fn compare(&self, stop: &AtomicBool) -> HostComparison {
        let shape = self.shape;
        let k = shape.k() as usize;
        let rows: Vec<Vec<f64>> = (0..HOST_ROWS as u64)
            .map(|row| self.operand_row(self.seed, u64::from(self.first_row) + row, k))
            .collect();
        let threads = std::thread::available_parallelism().map_or(1, |it| it.get().min(2));
        let columns = self.sampled_columns();
        let part = columns.len().div_ceil(threads);
        std::thread::scope(|scope| {
            let workers: Vec<_> = columns
                .chunks(part)
                .map(|columns| {
                    let rows = &rows;
                    spawn_scoped(scope, move || self.compare_columns(columns, rows, stop))
                })
                .collect();
            workers
                .into_iter()
                .map(|worker| worker.join().unwrap_or_default())
                .fold(HostComparison::default(), HostComparison::and)
        })
    }

    /// Elements that a comparison to the end compares.
    pub(super) fn elements(&self) -> u64 {
        (HOST_ROWS * self.sampled_columns().len()) as u64
    }

    fn sampled_columns(&self) -> Vec<u32> {
        let side = self.shape.side;
        let step = (side / HOST_COLUMNS).max(1);
        let first = u32::try_from((self.seed >> 29) % u64::from(step)).unwrap_or_default();
        (first..side).step_by(step as usize).collect()
    }

    fn compare_columns(
        &self,
        columns: &[u32],
        rows: &[Vec<f64>],
        stop: &AtomicBool,
    ) -> HostComparison {
        let mut comparison = HostComparison::default();
        for column in columns {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let b = self.operand_row(seed_of_b(self.seed), u64::from(*column), rows[0].len());
            for (row, a) in rows.iter().enumerate() {
                let (mut sum, mut absolute) = (0.0, 0.0);
                for (a, b) in a.iter().zip(&b) {
                    sum = a.mul_add(*b, sum);
                    absolute += (a * b).abs();
                }
                let tolerance = match self.mode {
                    OperandMode::Random => element_tolerance(self.shape.operand),
                    _ => 0.0,
                };
                let difference = (self.element(row, *column) - sum).abs();
                comparison.add(multiple(difference, tolerance * absolute));
            }
        }
        comparison
    }

    /// An element of the reference, by its row among the sampled ones.
    fn element(&self, row: usize, column: u32) -> f64 {
        let at = row * self.shape.row_words() as usize
            + column as usize * self.shape.words_per_element() as usize;
        match self.shape.operand {
            OperandType::F64 => {
                f64::from_bits(u64::from(self.words[at]) | u64::from(self.words[at + 1]) << 32)
            }
            OperandType::S8 => f64::from(self.words[at].cast_signed()),
            _ => f64::from(f32::from_bits(self.words[at])),
        }
    }

    fn operand_row(&self, seed: u64, row: u64, k: usize) -> Vec<f64> {
        let first = row * k as u64;
        (first..first + k as u64)
            .map(|index| {
                let bits = operand_bits(self.shape.operand, self.mode, seed, index);
                operand_value(self.shape.operand, bits)
            })
            .collect()
    }
}

/// What the host's own rows say.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct HostComparison {
    pub(super) elements: u64,
    pub(super) mismatches: u64,
    /// The largest difference as a multiple of what is allowed.
    pub(super) worst: f64,
}

impl HostComparison {
    fn add(&mut self, multiple: f64) {
        self.elements += 1;
        self.mismatches += u64::from(multiple > 1.0);
        self.worst = self.worst.max(multiple);
    }

    fn and(self, other: Self) -> Self {
        Self {
            elements: self.elements + other.elements,
            mismatches: self.mismatches + other.mismatches,
            worst: self.worst.max(other.worst),
        }
    }
}

/// The number that an operand's bits mean.
fn operand_value(operand: OperandType, bits: u64) -> f64 {
    let [b0, b1, b2, b3, ..] = bits.to_le_bytes();
    match operand {
        OperandType::F64 => f64::from_bits(bits),
        OperandType::F32 | OperandType::Tf32 => {
            f64::from(f32::from_bits(u32::from_le_bytes([b0, b1, b2, b3])))
        }
        OperandType::Bf16 => f64::from(f32::from_bits(u32::from_le_bytes([0, 0, b0, b1]))),
        OperandType::F16 => small_float(bits, 10, 15),
        OperandType::E4m3 => small_float(bits, 3, 7),
        OperandType::S8 => f64::from(b0.cast_signed()),
    }
}

/// A finite number of fewer than 17 bits: sign, exponent with this bias, and this many bits of
/// mantissa. Subnormal numbers but zero do not occur in operands.
fn small_float(encoded: u64, mantissa_bits: u32, bias: u64) -> f64 {
    let exponent_bits = if mantissa_bits == 10 { 5 } else { 4 };
    let sign = (encoded >> (mantissa_bits + exponent_bits)) & 1;
    let exponent = (encoded >> mantissa_bits) & ((1 << exponent_bits) - 1);
    let mantissa = encoded & ((1 << mantissa_bits) - 1);
    if exponent == 0 {
        return 0.0;
    }
    f64::from_bits(sign << 63 | (exponent + 1023 - bias) << 52 | mantissa << (52 - mantissa_bits))
}

/// One number for all checksums, as hex; FNV-1a over their words.
// Source of the constants: the FNV hash, http://www.isthe.com/chongo/tech/comp/fnv/.
pub(super) fn checksum_text(checksums: &[u64]) -> String {
    let hash = checksums.iter().fold(0xCBF2_9CE4_8422_2325, |hash, word| {
        (hash ^ word).wrapping_mul(0x0000_0100_0000_01B3_u64)
    });
    format!("{hash:#018x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampled(operand: OperandType, mode: OperandMode) -> SampledRows {
        let shape = Shape {
            operand,
            side: 256,
            k_bytes: 256,
        };
        let mut rows = SampledRows {
            shape,
            mode,
            seed: 7,
            first_row: 32,
            words: vec![0; STRIP_ROWS * shape.row_words() as usize],
        };
        for row in 0..HOST_ROWS {
            for column in 0..shape.side {
                fill(&mut rows, row, column);
            }
        }
        rows
    }

    /// Stores the product that the host computes, rounded once.
    fn fill(rows: &mut SampledRows, row: usize, column: u32) {
        let k = rows.shape.k() as usize;
        let a = rows.operand_row(rows.seed, 32 + row as u64, k);
        let b = rows.operand_row(seed_of_b(rows.seed), u64::from(column), k);
        let sum: f64 = a.iter().zip(&b).fold(0.0, |sum, (a, b)| a.mul_add(*b, sum));
        let words = rows.shape.words_per_element() as usize;
        let at = row * rows.shape.row_words() as usize + column as usize * words;
        match rows.shape.operand {
            OperandType::F64 => {
                let bits = sum.to_bits().to_le_bytes();
                rows.words[at] = u32::from_le_bytes(std::array::from_fn(|it| bits[it]));
                rows.words[at + 1] = u32::from_le_bytes(std::array::from_fn(|it| bits[4 + it]));
            }
            #[expect(clippy::cast_possible_truncation, reason = "integers of 24 bits")]
            OperandType::S8 => rows.words[at] = (sum as i32).cast_unsigned(),
            #[expect(clippy::cast_possible_truncation, reason = "rounded on purpose")]
            _ => rows.words[at] = (sum as f32).to_bits(),
        }
    }

    const OPERANDS: [OperandType; 7] = [
        OperandType::F64,
        OperandType::F32,
        OperandType::Tf32,
        OperandType::Bf16,
        OperandType::F16,
        OperandType::E4m3,
        OperandType::S8,
    ];

    #[test]
    fn right_rows_agree_in_every_type() {
        let stop = AtomicBool::new(false);
        for operand in OPERANDS {
            for mode in [OperandMode::Exact, OperandMode::Random] {
                let comparison = sampled(operand, mode).compare(&stop);
                assert_eq!(comparison.elements, 512, "{operand:?} {mode:?}");
                assert_eq!(comparison.mismatches, 0, "{operand:?} {mode:?}");
            }
        }
    }

    #[test]
    fn of_long_rows_a_part_is_compared_that_the_seed_chooses() {
        let mut rows = sampled(OperandType::S8, OperandMode::Exact);
        assert_eq!(rows.elements(), 512);
        rows.shape.side = 8192;
        assert_eq!(rows.elements(), 512);
        let columns = rows.sampled_columns();
        assert!(columns.iter().all(|it| *it < 8192));
        rows.seed ^= 1 << 29;
        assert_ne!(rows.sampled_columns(), columns);
    }

    #[test]
    fn a_wrong_element_and_nan_are_seen_in_every_type() {
        let stop = AtomicBool::new(false);
        for operand in OPERANDS {
            let mut rows = sampled(operand, OperandMode::Exact);
            rows.words[11] ^= 1 << 20;
            assert_eq!(rows.compare(&stop).mismatches, 1, "{operand:?}");
        }
        let mut rows = sampled(OperandType::Bf16, OperandMode::Random);
        rows.words[300] = 0x7FC0_0000;
        let comparison = rows.compare(&stop);
        assert_eq!(comparison.mismatches, 1);
        assert!(comparison.worst.is_infinite());
    }

    #[test]
    fn what_was_not_compared_is_not_counted() {
        let comparison =
            sampled(OperandType::Bf16, OperandMode::Exact).compare(&AtomicBool::new(true));
        assert_eq!(comparison, HostComparison::default());
    }

    #[test]
    fn a_residual_is_judged_by_what_is_allowed() {
        let same = [1.0, -2.0];
        assert!(worst(&same, &same, &[1.0, 1.0], 0.0) <= 0.0);
        assert!(worst(&same, &[1.0, -2.5], &[1.0, 1.0], 0.0).is_infinite());
        assert!(worst(&same, &[1.0, f64::NAN], &[1.0, 1.0], 1.0).is_infinite());
        let half = worst(&same, &[1.0, -2.5], &[1.0, 1.0], 1.0);
        assert!((half - 0.5).abs() < 1e-12);
        // Nothing read is nothing right: a NaN in the bound does not hide a difference.
        assert!(worst(&same, &[1.0, -2.5], &[1.0, f64::NAN], 1.0).is_infinite());
    }

    #[test]
    fn operands_mean_what_their_formats_say() {
        let value = operand_value;
        assert!((value(OperandType::F16, 0x3C00) - 1.0).abs() < 1e-12);
        assert!((value(OperandType::F16, 0xC500) + 5.0).abs() < 1e-12);
        assert!((value(OperandType::E4m3, 0x38) - 1.0).abs() < 1e-12);
        assert!((value(OperandType::E4m3, 0xC0) + 2.0).abs() < 1e-12);
        assert!((value(OperandType::Bf16, 0x4000) - 2.0).abs() < 1e-12);
        assert!((value(OperandType::S8, 0x80) + 128.0).abs() < 1e-12);
    }

    #[test]
    fn checksums_of_the_rows_are_compared_in_place() {
        let rows = sampled(OperandType::Bf16, OperandMode::Random);
        let own = strip_checksum(&rows.words, 256);
        let mut checksums = vec![0; 16];
        checksums[2] = own;
        assert!(rows.checksums_agree(&checksums));
        checksums[2] ^= 1;
        assert!(!rows.checksums_agree(&checksums));
        assert!(!rows.checksums_agree(&[]));
    }
}
