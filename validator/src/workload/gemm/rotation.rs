//! Verified products of all precisions in turn, in slices short enough for a GPU that is yielded at
//! any moment.
//!
//! A turn has operands and a reference of its own, and verifies every product, as the burn does.
//! The precision that was verified least comes next, so that a worker that is interrupted often
//! covers all of them, too.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use validator_core::facts::{
    GemmDetail, Precision, PrecisionCoverage, PrecisionRun, VerifiedProducts, WorkerEnd,
    WorkloadRun,
};
use validator_core::wrong_products;

use super::arena;
use super::images::{Family, no_kernels};
use super::kernels::{Gemm, Support, families, operand_type};
use super::operand_proof::prove_copies;
use super::product::GemmGpu;
use super::shape::Layout;
use super::sizing::{Pace, choose_layout};
use super::sweep::{Progress, Sweep, Sweeps};
use crate::cuda::Module;
use crate::plan::MemoryShare;
use crate::worker::protocol::Reporter;
use crate::workload::start::{FIRST_USE_OF_CONTEXT, exited};
use crate::workload::{Prepared, Step, WorkerGpu, Workload};

/// Time of one turn: long enough that the proof of its reference, some 30 ms, is a small part, and
/// short enough that a quarter of a minute covers all precisions; this project's choice.
const TURN: Duration = Duration::from_secs(2);
/// Interval in which the coverage is written into the run, which is reported less often.
const DETAIL_INTERVAL: Duration = Duration::from_millis(100);
/// Added to the seed of each turn, so that no two have the same operands; after a silence the seed
/// differs by the products that were verified.
const SEED_STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// Products of all precisions as an assignment has them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct GemmTask {
    pub(crate) seed: u64,
    /// What earlier workers have verified on this GPU.
    #[serde(default)]
    pub(crate) covered: PrecisionCoverage,
}

impl GemmTask {
    /// Holds the smallest products of every precision.
    pub(crate) const MEMORY_MINIMUM_BYTES: u64 = 4 << 20;
}

impl Workload for GemmTask {
    type Prepared<'g> = PreparedGemm<'g>;

    fn prepare<'g>(
        &self,
        gpus: &'g [WorkerGpu],
        budget: MemoryShare,
        reporter: &'g Reporter,
        run: &mut WorkloadRun,
    ) -> Result<PreparedGemm<'g>, WorkerEnd> {
        let [gpu] = gpus else {
            let count = gpus.len();
            return Err(exited(format!(
                "the worker has {count} GPUs instead of one"
            )));
        };
        let device = &gpu.device;
        let capability = device.compute_capability()?;
        reporter.step(FIRST_USE_OF_CONTEXT);
        let support = Family::Support.load(&gpu.context, capability)?;
        let (support, _) = support.ok_or_else(|| exited(no_kernels(capability)))?;
        // All before the first product: later a step would take as long as a translation by the
        // driver, and memory of the kernels would look like that of another process.
        let kernels = kernels(gpu, capability, reporter)?;
        reporter.step("cuMemAlloc");
        let (free_bytes, _) = gpu.context.memory_bytes()?;
        let arena = arena::allocate(&gpu.context, budget, free_bytes)?;
        run.memory.free_bytes += free_bytes;
        run.memory.used_bytes += arena.memory.bytes();
        run.notes.extend(arena.note);
        let gpu = Rc::new(GemmGpu {
            context: &gpu.context,
            support: Support::of(&support, device.multiprocessors()?)?,
            arena: arena.memory,
            stop: Arc::new(AtomicBool::new(false)),
        });
        reporter.step("copying to the GPU and back");
        let copies = prove_copies(&gpu.support, &gpu.arena)?;
        let engines = engines(&gpu, kernels, reporter)?;
        let earlier = earlier_detail(run).unwrap_or_else(|| GemmDetail {
            coverage: self.covered.clone(),
            ..GemmDetail::default()
        });
        let of_gpu = |engine: &Engine<'_>| {
            let covered = earlier.coverage.get(&engine.precision).copied();
            (engine.precision, covered.unwrap_or_default())
        };
        Ok(PreparedGemm {
            detail: GemmDetail {
                coverage: engines.iter().map(of_gpu).collect(),
                copies,
                wrong: earlier.wrong,
            },
            seed: self.seed.wrapping_add(products_of(&earlier.coverage)),
            gpu,
            engines,
            reporter,
            turn: None,
            turns: 0,
            errors: copies.map_or(0, |it| {
                u64::from(wrong_products::wrong_copies(&it).is_some())
            }),
            bytes_verified: 0,
            detail_written: None,
        })
    }
}

/// The kernels of every precision that this GPU and its driver have.
fn kernels<'g>(
    gpu: &'g WorkerGpu,
    capability: (u32, u32),
    reporter: &Reporter,
) -> Result<Vec<(Precision, Gemm<'g, 'static>)>, WorkerEnd> {
    let mut modules: Vec<(Family, Option<Module<'g, 'static>>)> = Vec::new();
    let mut kernels = Vec::new();
    for precision in Precision::ALL {
        for family in families(operand_type(precision), capability) {
            if !modules.iter().any(|(it, _)| *it == family) {
                reporter.step(&format!("loading the {} kernels", family.name()));
                let loaded = family.load(&gpu.context, capability)?;
                modules.push((family, loaded.map(|(module, _)| module)));
            }
            let module = modules.iter().find(|(it, _)| *it == family);
            let Some((_, Some(module))) = module else {
                continue;
            };
            let operand = operand_type(precision);
            if let Some(gemm) = Gemm::of(module, family, operand, &gpu.device)? {
                kernels.push((precision, gemm));
                break;
            }
        }
    }
    if kernels.is_empty() {
        return Err(exited(no_kernels(capability)));
    }
    Ok(kernels)
}

/// What multiplies in one precision, how large, and how long that takes, in seconds.
struct Engine<'g> {
    precision: Precision,
    gemm: Rc<Gemm<'g, 'static>>,
    layout: (Layout, f64),
}

fn engines<'g>(
    gpu: &GemmGpu<'g, 'static>,
    kernels: Vec<(Precision, Gemm<'g, 'static>)>,
    reporter: &Reporter,
) -> Result<Vec<Engine<'g>>, WorkerEnd> {
    let mut engines = Vec::new();
    for (precision, gemm) in kernels {
        reporter.step(&format!("sizing {precision} products"));
        if let Some(layout) = choose_layout(gpu, &gemm, Pace::SLICES)? {
            engines.push(Engine {
                precision,
                gemm: Rc::new(gemm),
                layout,
            });
        }
    }
    if engines.is_empty() {
        // Memory that the driver did not give is another process's.
        return Err(WorkerEnd::Busy(format!(
            "{} bytes of memory are too few for products",
            gpu.arena.bytes()
        )));
    }
    Ok(engines)
}

/// The memory and kernels of one GPU, and the turn of a precision.
pub(crate) struct PreparedGemm<'g> {
    gpu: Rc<GemmGpu<'g, 'static>>,
    engines: Vec<Engine<'g>>,
    reporter: &'g Reporter,
    seed: u64,
    turn: Option<Turn<'g>>,
    turns: usize,
    detail: GemmDetail,
    /// Of the turns that ended, and of the copies.
    errors: u64,
    bytes_verified: u64,
    detail_written: Option<Instant>,
}

struct Turn<'g> {
    sweep: Sweep<'g, 'static>,
    products: PrecisionRun,
    result_bytes: u64,
    /// Coverage of its precision before.
    covered: VerifiedProducts,
    is_announced: bool,
}

impl PreparedGemm<'_> {
    /// Begins the turn of the precision that was verified least.
    fn begin_turn(&mut self) -> Result<(), WorkerEnd> {
        let next = least_covered(&self.detail.coverage);
        let engine = self.engines.iter().find(|it| Some(it.precision) == next);
        let engine =
            engine.ok_or_else(|| exited("there is no precision to multiply".to_owned()))?;
        let precision = engine.precision;
        self.reporter
            .step(&format!("proving a reference of {precision}"));
        self.seed = self.seed.wrapping_add(SEED_STEP);
        let asked = Sweeps {
            duration: TURN,
            seed: self.seed,
            inject: 0,
            pace: Pace::SLICES,
        };
        let mut products = PrecisionRun::empty(precision, engine.gemm.kernels_name());
        let engines = (Rc::clone(&engine.gemm), None);
        let sweep = Sweep::new(&self.gpu, engines, engine.layout, asked, &mut products)?;
        let sweep = sweep.ok_or_else(|| {
            exited(format!(
                "products of {precision} of the chosen size have no plan"
            ))
        })?;
        let covered = self.detail.coverage.get(&precision).copied();
        self.turn = Some(Turn {
            sweep,
            products,
            result_bytes: engine.layout.0.shape.result_bytes(),
            covered: covered.unwrap_or_default(),
            is_announced: false,
        });
        Ok(())
    }

    /// Takes a step of the turn; true where it ended.
    fn step_turn(&mut self, run: &mut WorkloadRun) -> Result<bool, WorkerEnd> {
        let Some(turn) = &mut self.turn else {
            return Ok(true);
        };
        let progress = turn.sweep.step(&mut turn.products)?;
        let products = &turn.products;
        if progress == Progress::Sweeping && !turn.is_announced {
            turn.is_announced = true;
            self.reporter
                .step(&format!("{} products", products.precision));
        }
        let verified = VerifiedProducts {
            products: turn.covered.products + products.products_verified,
            seconds: turn.covered.seconds + products.gpu_time_s,
        };
        let bytes = products.products_verified * turn.result_bytes;
        let errors = wrong_products::errors(products);
        if errors > 0 && self.errors == 0 {
            self.detail.wrong = Some(Box::new(products.clone()));
        }
        self.detail.coverage.insert(products.precision, verified);
        run.mismatches = self.errors + errors;
        run.measured.bytes_verified = self.bytes_verified + bytes;
        let has_ended = progress == Progress::Done;
        if has_ended {
            self.errors += errors;
            self.bytes_verified += bytes;
            self.turn = None;
        }
        let is_due = |it: Instant| it.elapsed() >= DETAIL_INTERVAL;
        if errors > 0 || has_ended || self.detail_written.is_none_or(is_due) {
            self.write_detail(run);
        }
        Ok(has_ended)
    }

    fn write_detail(&mut self, run: &mut WorkloadRun) {
        self.detail_written = Some(Instant::now());
        if let Ok(detail) = serde_json::to_value(&self.detail) {
            run.detail.insert(GemmDetail::NAME.to_owned(), detail);
        }
    }
}

impl Prepared for PreparedGemm<'_> {
    /// The beginning of a turn, a part of its proof, or a batch of products, with another batch
    /// under way.
    fn step(&mut self, run: &mut WorkloadRun) -> Result<Step, WorkerEnd> {
        if self.turn.is_none() {
            run.mismatches = self.errors;
            self.begin_turn()?;
            return Ok(Step::WithinPass);
        }
        if !self.step_turn(run)? {
            return Ok(Step::WithinPass);
        }
        self.turns += 1;
        if self.turns.is_multiple_of(self.engines.len()) {
            return Ok(Step::EndOfPass);
        }
        Ok(Step::WithinPass)
    }

    /// Awaits the products that are under way, and verifies them.
    fn settle(&mut self, run: &mut WorkloadRun) -> Result<(), WorkerEnd> {
        self.gpu.stop.store(true, Ordering::Relaxed);
        while !self.step_turn(run)? {}
        self.write_detail(run);
        Ok(())
    }

    fn finish(self, _run: &mut WorkloadRun) -> Result<(), WorkerEnd> {
        Ok(())
    }
}

/// The detail that an earlier part of the worker's time left in its run.
fn earlier_detail(run: &WorkloadRun) -> Option<GemmDetail> {
    let detail = run.detail.get(GemmDetail::NAME)?;
    serde_json::from_value(detail.clone()).ok()
}

fn products_of(coverage: &PrecisionCoverage) -> u64 {
    coverage.values().map(|it| it.products).sum()
}

/// The precision that was verified for the shortest time; the first of several.
fn least_covered(coverage: &PrecisionCoverage) -> Option<Precision> {
    let seconds = |it: &(&Precision, &VerifiedProducts)| it.1.seconds;
    let least = coverage
        .iter()
        .min_by(|one, other| seconds(one).total_cmp(&seconds(other)));
    least.map(|(precision, _)| *precision)
}

#[cfg(test)]
mod tests {
    use super::super::shape::{LADDER, Shape};
    use super::*;

    #[test]
    fn every_precision_has_its_turn_also_where_most_turns_are_cut_short() {
        let zero = VerifiedProducts::default();
        let mut coverage: PrecisionCoverage = Precision::ALL.map(|it| (it, zero)).into();
        let mut turns = Vec::new();
        for turn in 0..70 {
            let precision = least_covered(&coverage).expect("there are seven");
            let verified = coverage.entry(precision).or_default();
            // Two of three turns are yielded early.
            verified.seconds += if turn % 3 == 0 { 2.0 } else { 0.1 };
            turns.push(precision);
        }
        let seconds = coverage.values().map(|it| it.seconds);
        let (least, most) = seconds.fold((f64::MAX, 0.0_f64), |(least, most), it| {
            (least.min(it), most.max(it))
        });
        assert!(most - least <= 2.1, "{coverage:?}");
        let first: Vec<Precision> = turns.into_iter().take(7).collect();
        assert_eq!(first, Precision::ALL);
    }

    #[test]
    fn smallest_products_of_every_precision_fit_into_the_least_memory() {
        let (side, k_bytes) = LADDER[0];
        for precision in Precision::ALL {
            let operand = operand_type(precision);
            let shape = Shape {
                operand,
                side,
                k_bytes,
            };
            assert!(Layout::new(shape, GemmTask::MEMORY_MINIMUM_BYTES).is_some());
        }
    }

    #[test]
    fn without_kernels_there_is_no_turn() {
        assert_eq!(least_covered(&PrecisionCoverage::new()), None);
    }
}
