//! The reference of a precision: one product, proved apart from the kernel that made it.

use super::kernels::Gemm;
use super::operand::OperandMode;
use super::operand_proof::{OperandChecksums, operand_checksums};
use super::product::Product;
use super::proof::{self, HOST_ROWS, SampledRows};
use super::report;
use crate::cuda::CudaFailure;
use crate::threads::{Deferrable, spawn_or_defer};
use validator_core::facts::{PrecisionRun, ReferenceProof};

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

type CudaResult<T> = Result<T, CudaFailure>;

/// What the host compares while the GPU multiplies: rows of a reference, and the operands that it
/// was made of.
struct Established {
    rows: SampledRows,
    operands: OperandChecksums,
}

/// Makes the reference and proves it: first with exact operands, which the second engine
/// multiplies, too, then with the random ones that are used from then on. One part at a time, each
/// of which takes a few products' time.
pub(super) struct Establishing<'c, 'a> {
    second: Option<Rc<Gemm<'c, 'a>>>,
    seed: u64,
    next: Part,
    proof: ReferenceProof,
    exact: Option<Established>,
    random: Option<(Established, Vec<u64>)>,
}

#[derive(Clone, Copy)]
enum Part {
    Exact,
    ExactProof,
    SecondEngine,
    Random,
    /// Freivalds' check with the vector of this number, from 1.
    Vector(u32),
}

impl<'c, 'a> Establishing<'c, 'a> {
    pub(super) fn new(second: Option<Rc<Gemm<'c, 'a>>>, seed: u64) -> Self {
        Self {
            second,
            seed,
            next: Part::Exact,
            proof: ReferenceProof::default(),
            exact: None,
            random: None,
        }
    }

    /// Does the next part, and writes what is proved so far into `run`. After the last one the host
    /// compares.
    pub(super) fn step(
        &mut self,
        product: &Product<'c, 'a>,
        run: &mut PrecisionRun,
    ) -> CudaResult<Option<HostComparison>> {
        let seed = self.seed;
        let reference = product.layout.reference;
        let next = match self.next {
            Part::Exact => {
                let (exact, checksums) = product.multiply_once((OperandMode::Exact, seed))?;
                self.proof.exact_checksum = proof::checksum_text(&checksums);
                self.exact = Some(exact);
                Some(Part::ExactProof)
            }
            Part::ExactProof => {
                let is_right = product.is_right(reference, seed)?;
                self.proof.exact_mismatches += u64::from(!is_right);
                Some(Part::SecondEngine)
            }
            Part::SecondEngine => {
                if let Some(second) = &self.second {
                    product.compare_engines(second, seed, &mut self.proof)?;
                }
                Some(Part::Random)
            }
            Part::Random => {
                let random = product.multiply_once((OperandMode::Random, seed))?;
                self.proof.checksum = proof::checksum_text(&random.1);
                self.random = Some(random);
                Some(Part::Vector(1))
            }
            Part::Vector(vector) => {
                let seed = seed.wrapping_add(u64::from(vector));
                let worst = product.freivalds(reference, OperandMode::Random, seed)?;
                self.proof.freivalds_worst = self.proof.freivalds_worst.max(worst);
                self.proof.freivalds_vectors = vector;
                (vector < proof::FREIVALDS_VECTORS).then_some(Part::Vector(vector + 1))
            }
        };
        let host = match next {
            Some(next) => {
                self.next = next;
                None
            }
            None => self.conclude(product, run)?,
        };
        run.reference.clone_from(&self.proof);
        Ok(host)
    }

    fn conclude(
        &mut self,
        product: &Product<'_, '_>,
        run: &mut PrecisionRun,
    ) -> CudaResult<Option<HostComparison>> {
        let (Some(exact), Some((random, checksums))) = (self.exact.take(), self.random.take())
        else {
            return Ok(None);
        };
        if !random.rows.checksums_agree(&checksums) {
            // A checksum that the host cannot confirm proves nothing; it counts as a wrong
            // reference.
            self.proof.exact_mismatches += 1;
        }
        let mut nonfinite = [0; 8];
        let gpu = &product.gpu;
        gpu.arena.read(product.layout.nonfinite, &mut nonfinite)?;
        run.nonfinite += u64::from_le_bytes(nonfinite);
        Ok(Some(HostComparison::start(exact, random)))
    }
}

/// The host's own rows and operands, compared while the GPU multiplies.
pub(super) struct HostComparison {
    stop: Arc<AtomicBool>,
    elements: u64,
    strips: u64,
    compared: Deferrable<Compared>,
}

struct Compared {
    rows_of_exact: proof::HostComparison,
    rows_of_random: proof::HostComparison,
    strips: u64,
    operand_mismatches: u64,
}

impl HostComparison {
    fn start(exact: Established, random: Established) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        Self {
            stop,
            elements: exact.rows.elements(),
            strips: exact.operands.strips() + random.operands.strips(),
            compared: spawn_or_defer(move || {
                let rows_of_exact = exact.rows.compare(&stopped);
                let rows_of_random = random.rows.compare(&stopped);
                let of_exact = exact.operands.compare(&stopped);
                let of_random = random.operands.compare(&stopped);
                Compared {
                    rows_of_exact,
                    rows_of_random,
                    strips: of_exact.strips + of_random.strips,
                    operand_mismatches: of_exact.mismatches + of_random.mismatches,
                }
            }),
        }
    }

    pub(super) fn is_finished(&self) -> bool {
        self.compared.is_finished()
    }

    /// Ends it early.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Waits for the comparison, and adds its result to the proof.
    pub(super) fn add_to(self, proof: &mut ReferenceProof) {
        let Ok(compared) = self.compared.join() else {
            return;
        };
        let is_complete = compared.strips == self.strips;
        proof.operand_blocks = Some(if is_complete { compared.strips } else { 0 });
        proof.operand_mismatches = compared.operand_mismatches;
        if compared.rows_of_exact.elements == self.elements {
            proof.exact_rows = u32::try_from(HOST_ROWS).unwrap_or_default();
        }
        proof.exact_mismatches += compared.rows_of_exact.mismatches;
        proof.sampled_elements = compared.rows_of_random.elements;
        proof.sampled_worst = compared.rows_of_random.worst;
    }
}

impl Product<'_, '_> {
    fn freivalds(&self, result: u64, mode: OperandMode, seed: u64) -> CudaResult<f64> {
        let (support, arena) = (&self.gpu.support, &self.gpu.arena);
        proof::freivalds(support, arena, (&self.layout, result), mode, seed)
    }

    /// Freivalds' check of a product of exact operands, which allows no difference.
    fn is_right(&self, result: u64, seed: u64) -> CudaResult<bool> {
        Ok(self.freivalds(result, OperandMode::Exact, seed)? <= 1.0)
    }

    /// Has the second engine multiply the same exact operands: its product must have the
    /// reference's bits.
    fn compare_engines(
        &self,
        second: &Gemm<'_, '_>,
        seed: u64,
        proof: &mut ReferenceProof,
    ) -> CudaResult<()> {
        let (gpu, layout) = (&self.gpu, &self.layout);
        let Some(operands) = second.operands(gpu.context, &gpu.arena, layout)? else {
            return Ok(());
        };
        // No product of the sweeps is there yet.
        let result = layout.result(0);
        let arena = gpu.arena.address();
        second.multiply(&operands, arena, layout, (result, None), None)?;
        report::clear(&gpu.arena, layout.strip_report)?;
        gpu.support.compare_all(arena, layout, result)?;
        let counts = report::read(&gpu.arena, layout.strip_report)?.counts;
        let side = u64::from(layout.shape.side);
        // What was not compared counts as different.
        let unseen = (side * side).saturating_sub(counts.checked);
        proof.second_engine_mismatches = Some(counts.mismatches + unseen);
        proof.second_engine_is_right = Some(self.is_right(result, seed)?);
        Ok(())
    }

    /// One product into the reference, with its checksums. NaNs are counted for this product alone.
    fn multiply_once(
        &self,
        (mode, seed): (OperandMode, u64),
    ) -> CudaResult<(Established, Vec<u64>)> {
        let (gpu, layout) = (&self.gpu, &self.layout);
        let arena = gpu.arena.address();
        gpu.generate_operands(layout, (mode, seed))?;
        gpu.arena.write(layout.nonfinite, &[0; 8])?;
        let place = (layout.reference, None);
        self.gemm
            .multiply(&self.operands, arena, layout, place, None)?;
        gpu.support
            .write_checksums(arena, layout, layout.reference)?;
        let mut bytes = vec![0; usize::try_from(layout.shape.strips() * 8).unwrap_or_default()];
        gpu.arena.read(layout.checksums, &mut bytes)?;
        let words = bytes.as_chunks::<8>().0;
        let checksums = words.iter().map(|it| u64::from_le_bytes(*it)).collect();
        let established = Established {
            rows: proof::sample_rows(&gpu.arena, layout, mode, seed)?,
            operands: operand_checksums(&gpu.support, &gpu.arena, layout, (mode, seed))?,
        };
        Ok((established, checksums))
    }
}
