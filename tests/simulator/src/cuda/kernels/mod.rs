//! The kernels that the simulator can run, by name. They compute on the CPU what the GPU computes,
//! bit for bit wherever the GPU's arithmetic is specified
//! (`validator/src/workload/gemm/KERNELS.md`).

mod check;
mod freivalds;
mod gemm;
mod memory;
mod operand;
pub mod tensor_map;
mod verify;

use super::result::{ILLEGAL_ADDRESS, INVALID_VALUE, Outcome};
use crate::gpu::Gpu;
use std::ffi::c_void;

/// A launch, as a kernel sees it.
#[derive(Debug)]
pub struct Launch<'launch> {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    parameters: *const *const c_void,
    gpu: &'launch Gpu,
    how: How,
}

/// What is odd about a launch.
#[derive(Debug, Default)]
pub struct How {
    /// The multiprocessor that the first block runs on.
    pub first_sm: u64,
    /// Nothing that the kernel writes reaches memory.
    pub is_stale: bool,
}

/// What a kernel wrote, so that a fault can spoil it, and how long a GPU would have taken.
#[derive(Debug, Default)]
pub struct Done {
    pub outputs: Vec<Output>,
    pub gpu_time_ns: u64,
}

/// A result in device memory, row after row.
#[derive(Clone, Debug)]
pub struct Output {
    pub address: u64,
    /// Bytes of one element.
    pub element_size: usize,
    pub elements: u64,
    pub row_length: u64,
    pub blocks: Blocks,
}

/// Which part of a result each thread block computes.
#[derive(Clone, Debug)]
pub enum Blocks {
    /// So many elements in a row, blocks dealt to multiprocessors in turn.
    InOrder { elements: u64 },
    /// One tile after another.
    Tiles(Tiles),
}

/// A result cut into tiles.
#[derive(Clone, Debug)]
pub struct Tiles {
    pub rows: u64,
    pub columns: u64,
    /// The multiprocessor that computes each tile, row of tiles by row of tiles; empty where they
    /// are dealt in turn.
    pub sm: Vec<u32>,
}

type Run = fn(&Launch<'_>) -> Outcome<Done>;

const KERNELS: &[(&str, Run)] = &[
    ("gpu_validator_check", check::run),
    ("gpu_validator_memory_write", memory::write),
    ("gpu_validator_memory_verify", memory::verify),
    ("generate_operand", operand::run),
    ("verify_strips", verify::strips),
    ("compare_elements", verify::elements),
    ("multiply_rows", freivalds::rows),
    ("multiply_columns", freivalds::columns),
    ("flip_bit", flip_bit),
    ("gemm_sm70_f64", |launch| gemm::run(launch, gemm::SM70_F64)),
    ("gemm_sm70_f32", |launch| gemm::run(launch, gemm::SM70_F32)),
    ("gemm_sm70_bf16", |launch| {
        gemm::run(launch, gemm::SM70_BF16)
    }),
    ("gemm_sm70_f16", |launch| gemm::run(launch, gemm::SM70_F16)),
    ("gemm_sm70_s8", |launch| gemm::run(launch, gemm::SM70_S8)),
    ("gemm_sm80_bf16", |launch| {
        gemm::run(launch, gemm::SM80_BF16)
    }),
    ("gemm_sm80_f16", |launch| gemm::run(launch, gemm::SM80_F16)),
    ("gemm_sm80_tf32", |launch| {
        gemm::run(launch, gemm::SM80_TF32)
    }),
    ("gemm_sm80_s8", |launch| gemm::run(launch, gemm::SM80_S8)),
    ("gemm_sm80_f64", |launch| gemm::run(launch, gemm::SM80_F64)),
    ("gemm_sm89_e4m3", |launch| {
        gemm::run(launch, gemm::SM89_E4M3)
    }),
    ("gemm_sm90a_bf16", |launch| {
        gemm::run(launch, gemm::SM90A_BF16)
    }),
    ("gemm_sm90a_f16", |launch| {
        gemm::run(launch, gemm::SM90A_F16)
    }),
    ("gemm_sm90a_tf32", |launch| {
        gemm::run(launch, gemm::SM90A_TF32)
    }),
    ("gemm_sm90a_e4m3", |launch| {
        gemm::run(launch, gemm::SM90A_E4M3)
    }),
    ("gemm_sm90a_s8", |launch| gemm::run(launch, gemm::SM90A_S8)),
    ("gemm_sm90a_f64", |launch| {
        gemm::run(launch, gemm::SM90A_F64)
    }),
    ("gemm_sm90a_f32", |launch| {
        gemm::run(launch, gemm::SM90A_F32)
    }),
];

/// The kernels of cuBLASLt's products, whatever their names are in the real library.
pub(crate) const CUBLASLT_PRODUCT: &str = "cublasLtMatmul";

/// Every kernel's name, those of cuBLASLt's products as one.
pub(crate) fn names() -> impl Iterator<Item = &'static str> + Clone {
    KERNELS
        .iter()
        .map(|(name, _)| *name)
        .chain([CUBLASLT_PRODUCT])
}

/// The CPU's version of this kernel.
pub(super) fn find(name: &str) -> Option<Run> {
    KERNELS
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, run)| *run)
}

/// Time of a launch that does next to nothing, in nanoseconds.
const LAUNCH_NS: u64 = 2_000;

/// What a product takes beside its sums, in nanoseconds: launches, filling and draining of the
/// multiprocessors. What `gemm_throughput` of the validator allows a healthy GPU: 17 µs were measured
/// on an H100, see its BENCHMARKS.md.
const PRODUCT_NS: f64 = 20_000.0;

/// Time of a product whose sums take `sums_ns` on a full GPU, and whose tiles the multiprocessors
/// compute in so many rounds: those without a tile are idle.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "model time"
)]
pub(crate) fn product_time_ns(sums_ns: f64, tiles: u64, rounds: u64, sm_count: u32) -> u64 {
    let occupied = tiles as f64 / (rounds.max(1) as f64 * f64::from(sm_count.max(1)));
    (sums_ns / occupied.clamp(1e-6, 1.0) + PRODUCT_NS) as u64
}

/// Bytes in a nanosecond: what an H200 copies, see the validator's load/gemm/NOTES.md.
const MEMORY_BYTES_PER_NS: u64 = 4_300;

/// What a kernel takes that is bound by reading or writing so many bytes.
fn memory_time_ns(bytes: u64) -> u64 {
    bytes / MEMORY_BYTES_PER_NS
}

/// `flip_bit(address: *mut u32, bit: u32)`.
fn flip_bit(launch: &Launch<'_>) -> Outcome<Done> {
    // SAFETY: as above.
    let (address, bit) = unsafe { (launch.parameter::<u64>(0)?, launch.parameter::<u32>(1)?) };
    // SAFETY: the word is the kernel's own while it runs.
    let word = unsafe { launch.device_slice::<u32>(address, 1)? };
    word[0] ^= 1u32.wrapping_shl(bit);
    Ok(Done {
        outputs: Vec::new(),
        gpu_time_ns: LAUNCH_NS,
    })
}

impl<'launch> Launch<'launch> {
    pub(super) fn new(
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        parameters: *const *const c_void,
        gpu: &'launch Gpu,
        how: How,
    ) -> Self {
        Self {
            grid,
            block,
            shared_bytes,
            parameters,
            gpu,
            how,
        }
    }

    pub fn gpu(&self) -> &Gpu {
        self.gpu
    }

    pub fn blocks(&self) -> u64 {
        self.grid.iter().map(|it| u64::from(*it)).product()
    }

    pub fn threads_per_block(&self) -> u64 {
        self.block.iter().map(|it| u64::from(*it)).product()
    }

    /// The kernel's parameter at this position.
    ///
    /// # Safety
    /// The kernel has that many parameters, and this one is a `T`.
    pub unsafe fn parameter<T: Copy>(&self, position: usize) -> Outcome<T> {
        if self.parameters.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: `cuLaunchKernel` requires a pointer to each parameter.
        let value = unsafe { *self.parameters.add(position) };
        if value.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller names the parameter's type; alignment is not promised.
        Ok(unsafe { value.cast::<T>().read_unaligned() })
    }

    /// The multiprocessor on which a block runs: they are dealt in turn.
    pub fn sm_of_block(&self, block: u64) -> u32 {
        let place = self.how.first_sm.wrapping_add(block);
        u32::try_from(place % u64::from(self.gpu.sm_count.max(1))).unwrap_or(0)
    }

    /// Device memory that a kernel only reads; several of its parameters may name the same.
    ///
    /// # Safety
    /// Nothing writes this memory while the kernel reads it, and any bits are a `T`.
    pub unsafe fn device_read<T>(&self, address: u64, length: usize) -> Outcome<&'launch [T]> {
        Self::check::<T>(address, length)?;
        // SAFETY: the allocation holds all of it, it is aligned, and the caller answers for the
        // rest.
        Ok(unsafe { std::slice::from_raw_parts(address as *const T, length) })
    }

    /// Device memory as a slice of `length` elements.
    ///
    /// # Safety
    /// Nothing else uses this memory while the kernel runs, and any bits are a `T`.
    pub unsafe fn device_slice<T>(&self, address: u64, length: usize) -> Outcome<&'launch mut [T]> {
        Self::check::<T>(address, length)?;
        // SAFETY: the allocation holds all of it, it is aligned, and the caller answers for the
        // rest.
        let memory = unsafe { std::slice::from_raw_parts_mut(address as *mut T, length) };
        if !self.how.is_stale {
            return Ok(memory);
        }
        // A copy takes what the kernel writes. It is not freed: a launch that is lost comes rarely,
        // and the slice may live on.
        let words = size_of_val(memory).div_ceil(size_of::<u64>());
        let copy = vec![0u64; words].leak();
        // SAFETY: as long as the memory, aligned for every `T` of a kernel, and any bits are a `T`.
        unsafe {
            let copy = copy.as_mut_ptr().cast::<T>();
            std::ptr::copy_nonoverlapping(memory.as_ptr(), copy, length);
            Ok(std::slice::from_raw_parts_mut(copy, length))
        }
    }

    fn check<T>(address: u64, length: usize) -> Outcome {
        let bytes = (length as u64)
            .checked_mul(size_of::<T>() as u64)
            .ok_or(ILLEGAL_ADDRESS)?;
        let is_aligned = address.is_multiple_of(align_of::<T>() as u64);
        if !is_aligned || !super::memory::holds(address, bytes) {
            return Err(ILLEGAL_ADDRESS);
        }
        Ok(())
    }
}
