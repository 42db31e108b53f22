//! How large the products are.

use super::kernels::Gemm;
use super::product::GemmGpu;
use super::shape::{K_MAXIMUM, LADDER, Layout, Shape};
use crate::cuda::CudaFailure;

/// How long the GPU works between two looks of the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// A product that takes longer is as large as it gets: the next one takes eight times as long
    /// or more.
    product_to_grow_s: f64,
    /// Launched at a time; two of these are under way, so that the GPU never waits for the host.
    pub(super) batch_s: f64,
}

impl Pace {
    /// A burn must stop within a second.
    pub(crate) const BURN: Self = Self {
        product_to_grow_s: 0.01,
        batch_s: 0.1,
    };
    /// A newcomer on the GPU waits for two batches and a product: 12 ms at most where its goal is 20
    /// ms (docs/sentinel.md), 5 ms where products are short.
    pub(crate) const SLICES: Self = Self {
        product_to_grow_s: 0.000_25,
        batch_s: 0.0025,
    };

    /// Products of one batch, of which `most` fit into the memory twice.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a number of products"
    )]
    pub(super) fn batch(self, product_s: f64, most: u64) -> u64 {
        ((self.batch_s / product_s.max(1e-6)) as u64).clamp(1, most)
    }
}

/// The largest product that the memory holds and the GPU computes quickly, and how long it takes,
/// in seconds.
pub(crate) fn choose_layout(
    gpu: &GemmGpu<'_, '_>,
    gemm: &Gemm<'_, '_>,
    pace: Pace,
) -> Result<Option<(Layout, f64)>, CudaFailure> {
    let (begin, end) = (gpu.context.event()?, gpu.context.event()?);
    let mut chosen = None;
    for (side, k_bytes) in LADDER {
        let shape = Shape {
            operand: gemm.operand,
            side,
            k_bytes,
        };
        if shape.k() > K_MAXIMUM || (chosen.is_some() && gpu.shall_stop()) {
            break;
        }
        let Some(layout) = Layout::new(shape, gpu.arena.bytes()) else {
            break;
        };
        let Some(operands) = gemm.operands(gpu.context, &gpu.arena, &layout)? else {
            continue;
        };
        let mut product_s = f64::INFINITY;
        // The first launch of a kernel also loads it.
        for _ in 0..2 {
            begin.record()?;
            let result = (layout.reference, None);
            gemm.multiply(&operands, gpu.arena.address(), &layout, result, None)?;
            end.record()?;
            end.wait()?;
            product_s = product_s.min(end.seconds_since(&begin)?);
            if product_s < pace.product_to_grow_s {
                break;
            }
        }
        chosen = Some((layout, product_s));
        if product_s >= pace.product_to_grow_s {
            break;
        }
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Operations of one product of a rung, relative to those of the one before.
    fn growths() -> Vec<f64> {
        let operations =
            |(side, k_bytes): (u32, u32)| f64::from(side) * f64::from(side) * f64::from(k_bytes);
        let pairs = LADDER.windows(2);
        pairs
            .map(|it| operations(it[1]) / operations(it[0]))
            .collect()
    }

    #[test]
    fn newcomer_waits_for_less_than_20_ms() {
        let pace = Pace::SLICES;
        let growth = growths().into_iter().fold(0.0, f64::max);
        let longest_product_s = pace.product_to_grow_s * growth;
        // A batch has one product at least.
        let batch_s = pace.batch_s.max(longest_product_s);
        let wait_s = 2.0 * batch_s + longest_product_s;
        assert!(wait_s < 0.02, "{wait_s}");
    }

    #[test]
    fn batch_has_as_many_products_as_its_time_and_the_memory_allow() {
        assert_eq!(Pace::BURN.batch(0.01, 100), 10);
        assert_eq!(Pace::BURN.batch(0.01, 3), 3);
        assert_eq!(Pace::SLICES.batch(0.01, 100), 1);
        assert_eq!(Pace::SLICES.batch(0.0, 100), 100);
    }
}
