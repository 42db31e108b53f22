//! The GPU that multiplies, and the product that it computes again and again.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::kernels::{Gemm, Operands, Support};
use super::operand::OperandMode;
use super::proof;
use super::shape::Layout;
use crate::cuda::{Context, CudaFailure, DeviceMemory};

type CudaResult<T> = Result<T, CudaFailure>;

/// One GPU with its memory, ready to multiply.
pub(crate) struct GemmGpu<'c, 'a> {
    pub(crate) context: &'c Context<'a>,
    pub(crate) support: Support<'c, 'a>,
    pub(crate) arena: DeviceMemory<'c, 'a>,
    /// Set when the products shall end.
    pub(crate) stop: Arc<AtomicBool>,
}

impl GemmGpu<'_, '_> {
    pub(crate) fn shall_stop(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Both operands, by the seed.
    pub(super) fn generate_operands(
        &self,
        layout: &Layout,
        (mode, seed): (OperandMode, u64),
    ) -> CudaResult<()> {
        let (elements, operand) = (layout.shape.operand_elements(), layout.shape.operand);
        for (offset, seed) in [(layout.a, seed), (layout.b, proof::seed_of_b(seed))] {
            let address = self.arena.address() + offset;
            self.support
                .generate(address, elements, seed, operand, mode)?;
        }
        Ok(())
    }
}

/// What is multiplied, by what, and where it lies.
pub(super) struct Product<'c, 'a> {
    pub(super) gpu: Rc<GemmGpu<'c, 'a>>,
    pub(super) gemm: Rc<Gemm<'c, 'a>>,
    pub(super) layout: Layout,
    pub(super) operands: Operands,
}
