//! `multiply_rows` and `multiply_columns`: a matrix by a vector in FP64, in the order of the GPU's
//! lanes.

use super::operand::Element;
use super::{Blocks, Done, Launch, Output, memory_time_ns};
use crate::cuda::result::{INVALID_VALUE, Outcome};

const LANES: usize = 32;

/// The parameters of both kernels:
/// `(matrix, type: u32, rows: u32, columns: u32, x: *const f64, y: *mut f64, absolute: u32)`.
struct Factors<'launch> {
    kind: Element,
    columns: usize,
    matrix: &'launch [u8],
    x: &'launch [f64],
    y: &'launch mut [f64],
    absolute: bool,
    done: Done,
}

impl<'launch> Factors<'launch> {
    /// `x_length` and `y_length` of `[rows, columns]`; a block computes `elements_per_block` of
    /// `y`.
    fn of(
        launch: &Launch<'launch>,
        lengths: fn([usize; 2]) -> [usize; 2],
        elements_per_block: u64,
    ) -> Outcome<Self> {
        // SAFETY: both kernels have these parameters.
        let (matrix, code, rows, columns, x, y, absolute) = unsafe {
            (
                launch.parameter::<u64>(0)?,
                launch.parameter::<u32>(1)?,
                launch.parameter::<u32>(2)?,
                launch.parameter::<u32>(3)?,
                launch.parameter::<u64>(4)?,
                launch.parameter::<u64>(5)?,
                launch.parameter::<u32>(6)?,
            )
        };
        let kind = Element::from_code(code).ok_or(INVALID_VALUE)?;
        let [x_length, y_length] = lengths([rows as usize, columns as usize]);
        let bytes = rows as usize * columns as usize * kind.bytes();
        let output = Output {
            address: y,
            element_size: 8,
            elements: y_length as u64,
            row_length: y_length as u64,
            blocks: Blocks::InOrder {
                elements: elements_per_block,
            },
        };
        // SAFETY: the operands are only read, the result is the kernel's own, and any bits are
        // numbers.
        unsafe {
            Ok(Self {
                kind,
                columns: columns as usize,
                matrix: launch.device_read::<u8>(matrix, bytes)?,
                x: launch.device_read::<f64>(x, x_length)?,
                y: launch.device_slice::<f64>(y, y_length)?,
                absolute: absolute != 0,
                done: Done {
                    outputs: vec![output],
                    gpu_time_ns: memory_time_ns(bytes as u64),
                },
            })
        }
    }

    fn rows(&self) -> impl Iterator<Item = Vec<f64>> + use<'launch> {
        let (kind, absolute) = (self.kind, self.absolute);
        let row_bytes = (self.columns * kind.bytes()).max(1);
        self.matrix.chunks_exact(row_bytes).map(move |row| {
            let mut values = kind.values(row);
            if absolute {
                for it in &mut values {
                    *it = it.abs();
                }
            }
            values
        })
    }

    fn x(&self) -> Vec<f64> {
        let sign = |it: &f64| if self.absolute { it.abs() } else { *it };
        self.x.iter().map(sign).collect()
    }
}

pub(super) fn rows(launch: &Launch<'_>) -> Outcome<Done> {
    if launch.threads_per_block() != 256 {
        return Err(INVALID_VALUE);
    }
    let mut factors = Factors::of(launch, |[rows, columns]| [columns, rows], 8)?;
    let x = factors.x();
    let rows = factors.rows();
    for (y, row) in factors.y.iter_mut().zip(rows) {
        *y = sum_across_lanes(&row, &x);
    }
    Ok(std::mem::take(&mut factors.done))
}

/// Each lane sums every 32nd term; then lanes add each other's sums crosswise, distances 16 to 1.
fn sum_across_lanes(row: &[f64], x: &[f64]) -> f64 {
    let mut sums = [0f64; LANES];
    for (row, x) in row.chunks(LANES).zip(x.chunks(LANES)) {
        for (sum, (element, factor)) in sums.iter_mut().zip(row.iter().zip(x)) {
            *sum = element.mul_add(*factor, *sum);
        }
    }
    for distance in [16, 8, 4, 2, 1] {
        sums = std::array::from_fn(|lane| sums[lane] + sums[lane ^ distance]);
    }
    sums[0]
}

pub(super) fn columns(launch: &Launch<'_>) -> Outcome<Done> {
    if launch.threads_per_block() != 64 {
        return Err(INVALID_VALUE);
    }
    let mut factors = Factors::of(launch, |[rows, columns]| [rows, columns], 64)?;
    // A thread a column: without one, a column stays as it is.
    if launch.blocks() * 64 < factors.columns as u64 {
        return Err(INVALID_VALUE);
    }
    let mut sums = vec![0f64; factors.columns];
    for (row, factor) in factors.rows().zip(factors.x()) {
        for (sum, element) in sums.iter_mut().zip(&row) {
            *sum = element.mul_add(factor, *sum);
        }
    }
    factors.y.copy_from_slice(&sums);
    Ok(std::mem::take(&mut factors.done))
}
