//! The kernels of `KERNELS.md` as functions: which there are for a GPU, and how each is launched.

use std::ffi::CStr;
use std::rc::Rc;

use super::images::Family;
use super::operand::{OperandMode, OperandType};
use super::shape::{Layout, Shape};
use super::strip::{STRIP_ROWS, STRIP_WORDS};
use crate::cuda::{
    Argument, ComputeType, Context, Cublaslt, CudaFailure, DataType, Device, DeviceMemory, Kernel,
    LaunchShape, Module, ProductPlan, ProductTypes, TensorMap,
};
use validator_core::facts::Precision;

type CudaResult<T> = Result<T, CudaFailure>;

/// Blocks a multiprocessor of kernels that stride over their data (KERNELS.md).
const STRIDING_BLOCKS: u32 = 8;
const HOPPER_SHARED_BYTES: u32 = 197_632;
const SM80_SHARED_BYTES: [u32; 2] = [147_456, 98_304];
const SM80_F64_SHARED_BYTES: u32 = 73_728;

/// The operands of a precision.
pub(crate) fn operand_type(precision: Precision) -> OperandType {
    match precision {
        Precision::Fp64 => OperandType::F64,
        Precision::Fp32 => OperandType::F32,
        Precision::Tf32 => OperandType::Tf32,
        Precision::Bf16 => OperandType::Bf16,
        Precision::Fp16 => OperandType::F16,
        Precision::Int8 => OperandType::S8,
        Precision::Fp8 => OperandType::E4m3,
    }
}

/// The kernel of a precision in a family.
fn entry(family: Family, operand: OperandType) -> Option<&'static CStr> {
    use OperandType::{Bf16, E4m3, F16, F32, F64, S8, Tf32};
    Some(match (family, operand) {
        (Family::Sm70, F64) => c"gemm_sm70_f64",
        (Family::Sm70, F32) => c"gemm_sm70_f32",
        (Family::Sm70, Bf16) => c"gemm_sm70_bf16",
        (Family::Sm70, F16) => c"gemm_sm70_f16",
        (Family::Sm70, S8) => c"gemm_sm70_s8",
        (Family::Sm80, Bf16) => c"gemm_sm80_bf16",
        (Family::Sm80, F16) => c"gemm_sm80_f16",
        (Family::Sm80, Tf32) => c"gemm_sm80_tf32",
        (Family::Sm80, S8) => c"gemm_sm80_s8",
        (Family::Sm80, F64) => c"gemm_sm80_f64",
        (Family::Sm89, E4m3) => c"gemm_sm89_e4m3",
        (Family::Sm90a, Bf16) => c"gemm_sm90a_bf16",
        (Family::Sm90a, F16) => c"gemm_sm90a_f16",
        (Family::Sm90a, Tf32) => c"gemm_sm90a_tf32",
        (Family::Sm90a, E4m3) => c"gemm_sm90a_e4m3",
        (Family::Sm90a, S8) => c"gemm_sm90a_s8",
        (Family::Sm90a, F64) => c"gemm_sm90a_f64",
        (Family::Sm90a, F32) => c"gemm_sm90a_f32",
        _ => return None,
    })
}

/// The families that multiply this precision on such a GPU, the fastest first.
pub(crate) fn families(
    operand: OperandType,
    capability: (u32, u32),
) -> impl Iterator<Item = Family> {
    [Family::Sm90a, Family::Sm89, Family::Sm80, Family::Sm70]
        .into_iter()
        .filter(move |family| family.runs_on(capability) && entry(*family, operand).is_some())
}

/// The kernels that make operands and verify results.
pub(crate) struct Support<'c, 'a> {
    generate_operand: Kernel<'c, 'a>,
    verify_strips: Kernel<'c, 'a>,
    compare_elements: Kernel<'c, 'a>,
    multiply_rows: Kernel<'c, 'a>,
    multiply_columns: Kernel<'c, 'a>,
    flip_bit: Kernel<'c, 'a>,
    striding: LaunchShape,
}

/// A matrix in the device's memory.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub(super) address: u64,
    /// The kernels' code of its type.
    pub(super) type_code: u32,
    pub(super) rows: u32,
    pub(super) columns: u32,
}

impl<'c, 'a> Support<'c, 'a> {
    pub(crate) fn of(module: &Module<'c, 'a>, multiprocessors: u32) -> CudaResult<Self> {
        Ok(Self {
            generate_operand: module.kernel(c"generate_operand", 0)?,
            verify_strips: module.kernel(c"verify_strips", 0)?,
            compare_elements: module.kernel(c"compare_elements", 0)?,
            multiply_rows: module.kernel(c"multiply_rows", 0)?,
            multiply_columns: module.kernel(c"multiply_columns", 0)?,
            flip_bit: module.kernel(c"flip_bit", 0)?,
            striding: LaunchShape {
                grid: (multiprocessors * STRIDING_BLOCKS, 1),
                block: 256,
                shared_bytes: 0,
            },
        })
    }

    pub(super) fn generate(
        &self,
        address: u64,
        elements: u64,
        seed: u64,
        operand: OperandType,
        mode: OperandMode,
    ) -> CudaResult<()> {
        let arguments = [
            Argument::Pointer(address),
            Argument::U64(elements),
            Argument::U64(seed),
            Argument::U32(operand as u32),
            Argument::U32(mode as u32),
        ];
        self.generate_operand.launch(self.striding, &arguments)
    }

    /// Writes the checksums of a result's strips and adds its NaNs and infinities to the count.
    pub(super) fn write_checksums(
        &self,
        arena: u64,
        layout: &Layout,
        result: u64,
    ) -> CudaResult<()> {
        let shape = layout.shape;
        let arguments = [
            Argument::Pointer(arena + result),
            Argument::U32(shape.side),
            Argument::U32(shape.row_words()),
            Argument::U32(result_kind(shape)),
            Argument::Pointer(arena + layout.checksums),
            Argument::Pointer(arena + layout.nonfinite),
            Argument::Pointer(0),
            Argument::U32(0),
        ];
        self.verify_strips.launch(self.striding, &arguments)
    }

    /// Writes the checksums of `strips` strips of memory, taken as rows of 256 words, to
    /// `checksums`.
    pub(super) fn checksums_of_memory(
        &self,
        address: u64,
        strips: u64,
        checksums: u64,
    ) -> CudaResult<()> {
        let rows = strips * STRIP_ROWS as u64;
        let number = |it: u64| u32::try_from(it).unwrap_or(u32::MAX);
        let arguments = [
            Argument::Pointer(address),
            Argument::U32(number(rows)),
            Argument::U32(number(STRIP_WORDS as u64)),
            // KERNELS.md: kind 0 counts no NaN.
            Argument::U32(0),
            Argument::Pointer(checksums),
            Argument::Pointer(0),
            Argument::Pointer(0),
            Argument::U32(0),
        ];
        self.verify_strips.launch(self.striding, &arguments)
    }

    /// Compares a result's strips with the checksums.
    pub(super) fn verify(
        &self,
        arena: u64,
        layout: &Layout,
        product: u64,
        report: u64,
    ) -> CudaResult<()> {
        let shape = layout.shape;
        let arguments = [
            Argument::Pointer(arena + layout.result(product)),
            Argument::U32(shape.side),
            Argument::U32(shape.row_words()),
            Argument::U32(result_kind(shape)),
            Argument::Pointer(arena + layout.checksums),
            Argument::Pointer(0),
            Argument::Pointer(arena + report),
            Argument::U32(cut(product)),
        ];
        self.verify_strips.launch(self.striding, &arguments)
    }

    /// Compares the strip at `row` and `word` of a result with the reference, element by element.
    pub(super) fn compare_strip(
        &self,
        arena: u64,
        layout: &Layout,
        product: u64,
        (row, word): (u32, u32),
        gemm: &Gemm<'_, '_>,
    ) -> CudaResult<()> {
        let shape = layout.shape;
        let arguments = [
            Argument::Pointer(arena + layout.result(product)),
            Argument::Pointer(arena + layout.reference),
            Argument::U32(shape.row_words()),
            Argument::U32(row),
            Argument::U32(u32::try_from(STRIP_ROWS).unwrap_or(16)),
            Argument::U32(word),
            Argument::U32(u32::try_from(STRIP_WORDS).unwrap_or(256)),
            Argument::U32(result_kind(shape)),
            Argument::Pointer(if gemm.notes_multiprocessors() {
                arena + layout.map(product)
            } else {
                0
            }),
            Argument::U32(gemm.tile.0),
            Argument::U32(gemm.tile.1 * shape.words_per_element()),
            Argument::Pointer(arena + layout.strip_report),
            Argument::U32(cut(product)),
        ];
        self.compare_elements.launch(self.striding, &arguments)
    }

    /// Compares the whole result at offset `result` with the reference, element by element.
    pub(super) fn compare_all(&self, arena: u64, layout: &Layout, result: u64) -> CudaResult<()> {
        let shape = layout.shape;
        let arguments = [
            Argument::Pointer(arena + result),
            Argument::Pointer(arena + layout.reference),
            Argument::U32(shape.row_words()),
            Argument::U32(0),
            Argument::U32(shape.side),
            Argument::U32(0),
            Argument::U32(shape.row_words()),
            Argument::U32(result_kind(shape)),
            Argument::Pointer(0),
            Argument::U32(1),
            Argument::U32(1),
            Argument::Pointer(arena + layout.strip_report),
            Argument::U32(0),
        ];
        self.compare_elements.launch(self.striding, &arguments)
    }

    /// y = M x, or |M| |x|, in FP64.
    pub(super) fn rows_times(
        &self,
        matrix: Matrix,
        x: u64,
        y: u64,
        absolute: bool,
    ) -> CudaResult<()> {
        self.multiply_rows
            .launch(self.striding, &product_arguments(matrix, x, y, absolute))
    }

    /// y = Mᵀ x, or |M|ᵀ |x|, in FP64.
    pub(super) fn columns_times(
        &self,
        matrix: Matrix,
        x: u64,
        y: u64,
        absolute: bool,
    ) -> CudaResult<()> {
        let shape = LaunchShape {
            grid: (matrix.columns.div_ceil(64), 1),
            block: 64,
            shared_bytes: 0,
        };
        self.multiply_columns
            .launch(shape, &product_arguments(matrix, x, y, absolute))
    }

    /// Flips one bit of the word at `address`.
    pub(super) fn flip(&self, address: u64, bit: u32) -> CudaResult<()> {
        let shape = LaunchShape {
            grid: (1, 1),
            block: 32,
            shared_bytes: 0,
        };
        self.flip_bit
            .launch(shape, &[Argument::Pointer(address), Argument::U32(bit)])
    }
}

fn product_arguments(matrix: Matrix, x: u64, y: u64, absolute: bool) -> [Argument; 7] {
    [
        Argument::Pointer(matrix.address),
        Argument::U32(matrix.type_code),
        Argument::U32(matrix.rows),
        Argument::U32(matrix.columns),
        Argument::Pointer(x),
        Argument::Pointer(y),
        Argument::U32(u32::from(absolute)),
    ]
}

/// The kernels' code of what a result holds.
fn result_kind(shape: Shape) -> u32 {
    match shape.operand {
        OperandType::S8 => 0,
        OperandType::F64 => 2,
        _ => 1,
    }
}

/// Kernels number products in 32 bits.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the host compares the low 32 bits"
)]
pub(super) fn cut(product: u64) -> u32 {
    product as u32
}

/// What multiplies.
pub(crate) struct Gemm<'c, 'a> {
    by: Multiplier<'c, 'a>,
    pub(crate) operand: OperandType,
    /// Rows and columns of a tile, in elements; where no multiprocessors are noted it is empty.
    pub(super) tile: (u32, u32),
}

enum Multiplier<'c, 'a> {
    Kernel(GemmKernel<'c, 'a>),
    Cublaslt {
        library: Rc<Cublaslt>,
        /// Address and size of memory that the library may use.
        workspace: (u64, u64),
    },
}

/// One of the embedded kernels.
struct GemmKernel<'c, 'a> {
    kernel: Kernel<'c, 'a>,
    family: Family,
    block: u32,
    shared_bytes: u32,
    multiprocessors: u32,
}

/// The operands of one shape, as what multiplies takes them.
pub(super) enum Operands {
    Pointers(u64, u64),
    /// Boxed: 256 bytes.
    Maps(Box<[TensorMap; 2]>),
    Plan([u64; 2], Box<ProductPlan>),
}

impl<'c, 'a> Gemm<'c, 'a> {
    /// GEMM implementation, as the table of reference rates names it.
    pub(in crate::workload) fn kernels_name(&self) -> &'static str {
        match &self.by {
            Multiplier::Kernel(kernel) => kernel.family.name(),
            Multiplier::Cublaslt { .. } => "cublaslt",
        }
    }

    /// The embedded kernel of this family.
    pub(crate) fn of(
        module: &Module<'c, 'a>,
        family: Family,
        operand: OperandType,
        device: &Device<'_>,
    ) -> CudaResult<Option<Self>> {
        let Some(name) = entry(family, operand) else {
            return Ok(None);
        };
        let is_f64 = operand == OperandType::F64;
        let (tile, block, shared_bytes) = match family {
            Family::Support => return Ok(None),
            Family::Sm70 if is_f64 => ((64, 64), 256, 0),
            Family::Sm70 => ((128, 128), 256, 0),
            Family::Sm80 if is_f64 => ((64, 128), 128, SM80_F64_SHARED_BYTES),
            Family::Sm80 | Family::Sm89 => {
                // The smaller size fits every GPU that these run on.
                let limit = device.shared_memory_per_block_optin().unwrap_or(0);
                let [large, small] = SM80_SHARED_BYTES;
                ((128, 256), 256, if limit >= large { large } else { small })
            }
            Family::Sm90a if is_f64 => ((128, 128), 384, HOPPER_SHARED_BYTES),
            Family::Sm90a => ((128, 256), 384, HOPPER_SHARED_BYTES),
        };
        let kernel = GemmKernel {
            kernel: module.kernel(name, shared_bytes)?,
            family,
            block,
            shared_bytes,
            multiprocessors: device.multiprocessors()?,
        };
        Ok(Some(Self {
            by: Multiplier::Kernel(kernel),
            operand,
            tile,
        }))
    }

    /// cuBLASLt, which may use the memory at `workspace`.
    pub(crate) fn by_cublaslt(
        library: &Rc<Cublaslt>,
        operand: OperandType,
        workspace: (u64, u64),
    ) -> Self {
        Self {
            by: Multiplier::Cublaslt {
                library: Rc::clone(library),
                workspace,
            },
            operand,
            tile: (128, 128),
        }
    }

    fn is_hopper_kernel(&self) -> bool {
        matches!(
            &self.by,
            Multiplier::Kernel(GemmKernel {
                family: Family::Sm90a,
                ..
            })
        )
    }

    /// The kernel verifies the product before while it multiplies.
    pub(super) fn verifies(&self) -> bool {
        self.is_hopper_kernel()
    }

    /// It notes which multiprocessor computes which tile.
    pub(super) fn notes_multiprocessors(&self) -> bool {
        matches!(self.by, Multiplier::Kernel(_))
    }

    /// `None` where products of this shape cannot be computed.
    pub(super) fn operands(
        &self,
        context: &Context<'_>,
        arena: &DeviceMemory<'_, '_>,
        layout: &Layout,
    ) -> CudaResult<Option<Operands>> {
        let (a, b) = (arena.address() + layout.a, arena.address() + layout.b);
        let Shape { side, k_bytes, .. } = layout.shape;
        if let Multiplier::Cublaslt { library, workspace } = &self.by {
            let sizes = [side, side, layout.shape.k()];
            let plan = library.plan(product_types(self.operand), sizes, *workspace)?;
            return Ok(plan.map(|plan| Operands::Plan([a, b], Box::new(plan))));
        }
        if !self.is_hopper_kernel() {
            return Ok(Some(Operands::Pointers(a, b)));
        }
        let box_rows_of_b = if self.operand == OperandType::F64 {
            64
        } else {
            128
        };
        Ok(Some(Operands::Maps(Box::new([
            context.tensor_map(a, side, k_bytes, 128)?,
            context.tensor_map(b, side, k_bytes, box_rows_of_b)?,
        ]))))
    }

    /// Multiplies into the memory at offset `result`. `map` is the offset where the multiprocessors
    /// are noted. A kernel that verifies compares the result of product `verified` meanwhile.
    pub(super) fn multiply(
        &self,
        operands: &Operands,
        arena: u64,
        layout: &Layout,
        (result, map): (u64, Option<u64>),
        verified: Option<u64>,
    ) -> CudaResult<()> {
        let shape = layout.shape;
        let (a, b) = match operands {
            Operands::Pointers(a, b) => (Argument::Pointer(*a), Argument::Pointer(*b)),
            Operands::Maps(maps) => (Argument::TensorMap(maps[0]), Argument::TensorMap(maps[1])),
            Operands::Plan(addresses, plan) => return plan.multiply(*addresses, arena + result),
        };
        let Multiplier::Kernel(kernel) = &self.by else {
            unreachable!("cuBLASLt's operands are a plan");
        };
        let mut arguments = vec![
            a,
            b,
            Argument::Pointer(arena + result),
            Argument::U32(shape.side),
            Argument::U32(shape.side),
            Argument::U32(shape.k_bytes),
            Argument::Pointer(map.map_or(0, |map| arena + map)),
        ];
        if self.verifies() {
            let address = verified.map_or(0, |product| arena + layout.result(product));
            arguments.extend([
                Argument::Pointer(address),
                Argument::Pointer(arena + layout.checksums),
                Argument::Pointer(arena + layout.report),
                Argument::U32(cut(verified.unwrap_or(0))),
            ]);
        }
        let launch_shape = kernel.launch_shape(shape, self.tile);
        kernel.kernel.launch(launch_shape, &arguments)
    }
}

impl GemmKernel<'_, '_> {
    fn launch_shape(&self, shape: Shape, tile: (u32, u32)) -> LaunchShape {
        let rows = shape.side / tile.0;
        let columns = shape.side / tile.1;
        let grid = match self.family {
            Family::Sm70 => (columns, rows),
            // Pairs of blocks share their columns; as many pairs as there is room for, each doing
            // tile after tile.
            Family::Sm90a => {
                let pairs = (shape.side / 256) * columns;
                (2 * (self.multiprocessors / 2).min(pairs).max(1), 1)
            }
            _ => (rows * columns, 1),
        };
        LaunchShape {
            grid,
            block: self.block,
            shared_bytes: self.shared_bytes,
        }
    }
}

/// How cuBLASLt names what the kernels compute: results have the type of the accumulator.
fn product_types(operand: OperandType) -> ProductTypes {
    use OperandType::{Bf16, E4m3, F16, F32, F64, S8, Tf32};
    let (operand, result, compute) = match operand {
        F64 => (DataType::F64, DataType::F64, ComputeType::F64),
        F32 => (DataType::F32, DataType::F32, ComputeType::F32),
        Tf32 => (DataType::F32, DataType::F32, ComputeType::F32FastTf32),
        Bf16 => (DataType::Bf16, DataType::F32, ComputeType::F32),
        F16 => (DataType::F16, DataType::F32, ComputeType::F32),
        E4m3 => (DataType::E4m3, DataType::F32, ComputeType::F32),
        S8 => (DataType::S8, DataType::S32, ComputeType::S32),
    };
    ProductTypes {
        operand,
        result,
        compute,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(operand: OperandType, capability: (u32, u32)) -> Vec<&'static str> {
        families(operand, capability).map(Family::name).collect()
    }

    #[test]
    fn each_gpu_has_its_newest_kernels_first() {
        assert_eq!(
            names(OperandType::Bf16, (9, 0)),
            ["sm_90a", "sm_80", "sm_70"]
        );
        assert_eq!(names(OperandType::Bf16, (10, 0)), ["sm_80", "sm_70"]);
        assert_eq!(names(OperandType::F16, (7, 5)), ["sm_70"]);
        assert_eq!(names(OperandType::E4m3, (9, 0)), ["sm_90a", "sm_89"]);
        assert_eq!(names(OperandType::E4m3, (8, 9)), ["sm_89"]);
        assert_eq!(names(OperandType::F32, (9, 0)), ["sm_90a", "sm_70"]);
        assert_eq!(names(OperandType::F32, (10, 0)), ["sm_70"]);
    }

    #[test]
    fn what_a_gpu_does_not_have_has_no_kernels() {
        assert!(names(OperandType::E4m3, (8, 0)).is_empty());
        assert!(names(OperandType::Tf32, (7, 5)).is_empty());
        assert!(names(OperandType::F64, (6, 1)).is_empty());
    }
}
