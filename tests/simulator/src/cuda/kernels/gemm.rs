//! The matrix products `gemm_*`: C = A x B-transposed on the CPU.
//!
//! `gemm_sm70_*`, FP32 and INT8 have the bits of a GPU. So have the tensor cores' products of exact
//! operands. For random operands the order of a tensor core's sums is not known; here they are
//! summed in chunks of K, each family in chunks of its own, so that a program which expects two
//! families to agree on random operands is found out here, too.

use super::operand::Element;
use super::tensor_map::TensorMap;
use super::verify::{Report, Strips, words_of_element};
use super::{Blocks, Done, Launch, Output, Tiles, product_time_ns};
use crate::cuda::result::{ILLEGAL_INSTRUCTION, INVALID_VALUE, Outcome};
use crate::product::{Products, Sizes, fingerprint, multiply_by_transposed};
use std::sync::Arc;

/// How tiles are dealt to blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Grid {
    /// Two dimensions, a block a tile.
    Plane,
    /// One dimension, a block a tile, in bands of 1024 rows.
    Bands,
    /// Clusters of two blocks that take one pair of tiles after another, in bands of 2048 rows.
    Persistent,
}

/// One kernel, as in KERNELS.md.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    element: Element,
    grid: Grid,
    threads: u64,
    shared_bytes: u32,
    tile: [u64; 2],
    /// Bytes of K whose products are summed apart; 0 is all of them in one chain.
    chunk_bytes: usize,
    /// Operations in a nanosecond on an H200, see the validator's load/gemm/NOTES.md.
    operations_per_ns: f64,
}

const fn sm70(element: Element, side: u64, operations_per_ns: f64) -> Kernel {
    Kernel {
        element,
        grid: Grid::Plane,
        threads: 256,
        shared_bytes: 0,
        tile: [side, side],
        chunk_bytes: 0,
        operations_per_ns,
    }
}

const fn sm80(element: Element, operations_per_ns: f64) -> Kernel {
    Kernel {
        element,
        grid: Grid::Bands,
        threads: 256,
        shared_bytes: 98_304,
        tile: [128, 256],
        chunk_bytes: 32,
        operations_per_ns,
    }
}

const fn sm90a(element: Element, operations_per_ns: f64) -> Kernel {
    Kernel {
        element,
        grid: Grid::Persistent,
        threads: 384,
        shared_bytes: 197_632,
        tile: [
            128,
            if matches!(element, Element::F64) {
                128
            } else {
                256
            },
        ],
        chunk_bytes: 128,
        operations_per_ns,
    }
}

pub(super) const SM70_F64: Kernel = sm70(Element::F64, 64, 15_000.0);
pub(super) const SM70_F32: Kernel = sm70(Element::F32, 128, 44_500.0);
pub(super) const SM70_BF16: Kernel = sm70(Element::Bf16, 128, 43_000.0);
pub(super) const SM70_F16: Kernel = sm70(Element::F16, 128, 44_000.0);
pub(super) const SM70_S8: Kernel = sm70(Element::S8, 128, 121_000.0);
pub(super) const SM80_BF16: Kernel = sm80(Element::Bf16, 330_000.0);
pub(super) const SM80_F16: Kernel = sm80(Element::F16, 319_000.0);
pub(super) const SM80_TF32: Kernel = sm80(Element::Tf32, 177_000.0);
pub(super) const SM80_S8: Kernel = sm80(Element::S8, 690_000.0);
pub(super) const SM80_F64: Kernel = Kernel {
    threads: 128,
    shared_bytes: 73_728,
    tile: [64, 128],
    ..sm80(Element::F64, 29_800.0)
};
pub(super) const SM89_E4M3: Kernel = sm80(Element::E4m3, 294_000.0);
pub(super) const SM90A_BF16: Kernel = sm90a(Element::Bf16, 660_000.0);
pub(super) const SM90A_F16: Kernel = sm90a(Element::F16, 633_000.0);
pub(super) const SM90A_TF32: Kernel = sm90a(Element::Tf32, 351_000.0);
pub(super) const SM90A_E4M3: Kernel = sm90a(Element::E4m3, 1_281_000.0);
pub(super) const SM90A_S8: Kernel = sm90a(Element::S8, 1_360_000.0);
pub(super) const SM90A_F64: Kernel = sm90a(Element::F64, 54_000.0);
pub(super) const SM90A_F32: Kernel = Kernel {
    chunk_bytes: 0,
    ..sm90a(Element::F32, 50_000.0)
};

/// The operands and sizes of one launch.
struct Job<'launch> {
    a: &'launch [u8],
    b: &'launch [u8],
    c: u64,
    m: u64,
    n: u64,
    k_bytes: u64,
    tile_sm: u64,
}

pub(super) fn run(launch: &Launch<'_>, kernel: Kernel) -> Outcome<Done> {
    let job = job(launch, kernel)?;
    if launch.threads_per_block() != kernel.threads
        || launch.shared_bytes < kernel.shared_bytes
        || !job.m.is_multiple_of(256)
        || !job.n.is_multiple_of(256)
        || !job.k_bytes.is_multiple_of(128)
    {
        return Err(INVALID_VALUE);
    }
    let schedule = Schedule::of(launch, kernel, &job)?;
    if kernel.grid == Grid::Persistent {
        verify_earlier(launch, kernel, &job, &schedule)?;
    }
    let words = job.m * job.n * words_of_element(kernel.element) as u64;
    let length = usize::try_from(words).map_err(|_| INVALID_VALUE)?;
    // SAFETY: the result is the kernel's own while it runs, and any bits are words.
    let c = unsafe { launch.device_slice::<u32>(job.c, length)? };
    c.copy_from_slice(&product(kernel, &job));
    let gpu_time_ns = gpu_time_ns(kernel, &job, &schedule, launch.gpu().sm_count);
    if job.tile_sm != 0 {
        // SAFETY: as above.
        let map = unsafe { launch.device_slice::<u32>(job.tile_sm, schedule.sm.len())? };
        map.copy_from_slice(&schedule.sm);
    }
    let output = Output {
        address: job.c,
        element_size: 4 * words_of_element(kernel.element),
        elements: job.m * job.n,
        row_length: job.n,
        blocks: Blocks::Tiles(Tiles {
            rows: kernel.tile[0],
            columns: kernel.tile[1],
            sm: schedule.sm,
        }),
    };
    Ok(Done {
        outputs: vec![output],
        gpu_time_ns,
    })
}

fn job<'launch>(launch: &Launch<'launch>, kernel: Kernel) -> Outcome<Job<'launch>> {
    // SAFETY: parameters 3 to 6 are the same in every kernel, 2 is the result's address.
    let (c, m, n, k_bytes, tile_sm) = unsafe {
        (
            launch.parameter::<u64>(2)?,
            u64::from(launch.parameter::<u32>(3)?),
            u64::from(launch.parameter::<u32>(4)?),
            u64::from(launch.parameter::<u32>(5)?),
            launch.parameter::<u64>(6)?,
        )
    };
    let operand = |position: usize, rows: u64, tile_rows: u16| {
        let address = if kernel.grid == Grid::Persistent {
            // SAFETY: the kernel takes tensor maps here; any bits are one, and its contents are
            // checked.
            let map = unsafe { launch.parameter::<TensorMap>(position)? };
            if !map.is_operand(rows, k_bytes, tile_rows) {
                return Err(ILLEGAL_INSTRUCTION);
            }
            map.address
        } else {
            // SAFETY: the kernel takes an address here.
            unsafe { launch.parameter::<u64>(position)? }
        };
        let length = usize::try_from(rows * k_bytes).map_err(|_| INVALID_VALUE)?;
        // SAFETY: operands are only read.
        unsafe { launch.device_read::<u8>(address, length) }
    };
    let half_columns = u16::try_from(kernel.tile[1] / 2).unwrap_or(0);
    Ok(Job {
        a: operand(0, m, 128)?,
        b: operand(1, n, half_columns)?,
        c,
        m,
        n,
        k_bytes,
        tile_sm,
    })
}

/// Which multiprocessor computes each tile, and which one verifies the same place meanwhile; row of
/// tiles by row of tiles.
struct Schedule {
    sm: Vec<u32>,
    verifying_sm: Vec<u32>,
}

impl Schedule {
    fn of(launch: &Launch<'_>, kernel: Kernel, job: &Job<'_>) -> Outcome<Self> {
        let (rows, columns) = (job.m / kernel.tile[0], job.n / kernel.tile[1]);
        let tiles = usize::try_from(rows * columns).map_err(|_| INVALID_VALUE)?;
        let mut schedule = Self {
            sm: vec![0; tiles],
            verifying_sm: vec![0; tiles],
        };
        let (band, group) = match kernel.grid {
            Grid::Plane => (u64::MAX, 1),
            Grid::Bands => (1024 / kernel.tile[0], 1),
            Grid::Persistent => (8, 2),
        };
        let blocks = launch.blocks();
        let right = match kernel.grid {
            Grid::Plane => launch.grid.map(u64::from) == [columns, rows, 1],
            Grid::Bands => launch.grid.map(u64::from) == [rows * columns, 1, 1],
            Grid::Persistent => blocks.is_multiple_of(2) && u64::from(launch.grid[0]) == blocks,
        };
        if !right {
            return Err(INVALID_VALUE);
        }
        let count = rows / group * columns;
        for index in 0..count {
            for rank in 0..group {
                let sm = launch.sm_of_block((index * group + rank) % blocks);
                let place = |index: u64| {
                    let (row, column) = if kernel.grid == Grid::Plane {
                        (index / columns, index % columns)
                    } else {
                        banded(index, band, rows / group, columns)
                    };
                    usize::try_from((row * group + rank) * columns + column).unwrap_or(0)
                };
                schedule.sm[place(index)] = sm;
                schedule.verifying_sm[place((index + count / 2) % count)] = sm;
            }
        }
        Ok(schedule)
    }
}

/// Bands of `band` rows, each walked column by column.
fn banded(index: u64, band: u64, rows: u64, columns: u64) -> (u64, u64) {
    let number = index / (band * columns);
    let inside = index % (band * columns);
    let band_rows = band.min(rows - number * band);
    (number * band + inside % band_rows, inside / band_rows)
}

/// What the Hopper kernels do while they multiply: they compare the strips of an earlier result.
fn verify_earlier(
    launch: &Launch<'_>,
    kernel: Kernel,
    job: &Job<'_>,
    schedule: &Schedule,
) -> Outcome {
    // SAFETY: the kernel has these parameters: three addresses and a number.
    let (result, checksums, report, sweep) = unsafe {
        (
            launch.parameter::<u64>(7)?,
            launch.parameter::<u64>(8)?,
            launch.parameter::<u64>(9)?,
            launch.parameter::<u32>(10)?,
        )
    };
    if result == 0 {
        return Ok(());
    }
    let size = |length: u64| usize::try_from(length).map_err(|_| INVALID_VALUE);
    let pitch = size(job.n)? * words_of_element(kernel.element);
    let strips = Strips::of(launch, result, size(job.m)?, pitch)?;
    let mut report = Report::at(launch, report, sweep)?;
    let (tile_rows, tile_words) = (size(kernel.tile[0])?, 256);
    strips.compare(launch, checksums, &mut report, |_, row, word| {
        schedule.verifying_sm[row / tile_rows * (pitch / tile_words) + word / tile_words]
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    element: Element,
    chunk_bytes: usize,
    sizes: Sizes,
    a: u64,
    b: u64,
}

static PRODUCTS: Products<Key, Arc<Vec<u32>>> = Products::new();

/// The words of the result.
fn product(kernel: Kernel, job: &Job<'_>) -> Arc<Vec<u32>> {
    let size = |length: u64| usize::try_from(length).unwrap_or(0);
    let sizes = Sizes {
        rows: size(job.m),
        columns: size(job.n),
        depth: size(job.k_bytes) / kernel.element.bytes(),
    };
    let key = Key {
        element: kernel.element,
        chunk_bytes: kernel.chunk_bytes,
        sizes,
        a: fingerprint(job.a),
        b: fingerprint(job.b),
    };
    PRODUCTS.get(key, || Arc::new(multiply(kernel, job, sizes)))
}

fn multiply(kernel: Kernel, job: &Job<'_>, sizes: Sizes) -> Vec<u32> {
    /// |a * b| is at most 2^14, so that this many products stay within the 24 bits of FP32.
    const EXACT_S8_CHUNK: usize = 512;
    let chunk = match kernel.chunk_bytes / kernel.element.bytes() {
        0 => sizes.depth,
        chunk => chunk,
    };
    let elements = sizes.rows * sizes.columns;
    match kernel.element {
        Element::F64 => {
            let (a, b) = (kernel.element.values(job.a), kernel.element.values(job.b));
            let mut c = vec![0f64; elements];
            multiply_by_transposed::<f64, f64, 8>(&a, &b, sizes, chunk, &mut c);
            c.into_iter()
                .flat_map(|it| low_and_high(it.to_bits()))
                .collect()
        }
        Element::S8 => {
            let (a, b) = (
                kernel.element.values_f32(job.a),
                kernel.element.values_f32(job.b),
            );
            let mut c = vec![0i32; elements];
            multiply_by_transposed::<f32, i32, 16>(&a, &b, sizes, EXACT_S8_CHUNK, &mut c);
            c.into_iter().map(i32::cast_unsigned).collect()
        }
        _ => {
            let (a, b) = (
                kernel.element.values_f32(job.a),
                kernel.element.values_f32(job.b),
            );
            let mut c = vec![0f32; elements];
            multiply_by_transposed::<f32, f32, 16>(&a, &b, sizes, chunk, &mut c);
            c.into_iter().map(f32::to_bits).collect()
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the halves of a word")]
fn low_and_high(bits: u64) -> [u32; 2] {
    [bits as u32, (bits >> 32) as u32]
}

/// The figure of an H200 at its power limit.
#[expect(clippy::cast_precision_loss, reason = "model time")]
fn gpu_time_ns(kernel: Kernel, job: &Job<'_>, schedule: &Schedule, sm_count: u32) -> u64 {
    let depth = job.k_bytes / kernel.element.bytes() as u64;
    let operations = 2.0 * (job.m * job.n * depth) as f64;
    let mut tiles_of_sm = vec![0_u64; sm_count.max(1) as usize];
    for sm in &schedule.sm {
        if let Some(tiles) = tiles_of_sm.get_mut(*sm as usize) {
            *tiles += 1;
        }
    }
    let rounds = tiles_of_sm.iter().copied().max().unwrap_or(1);
    let tiles = schedule.sm.len() as u64;
    product_time_ns(
        operations / kernel.operations_per_ns,
        tiles,
        rounds,
        sm_count,
    )
}
