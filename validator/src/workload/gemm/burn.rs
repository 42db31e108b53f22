//! The burn as a workload: products at the power limit over all of the memory, by the better of two
//! engines, for a share of the time in each precision.
//!
//! A step is a whole precision, which reports twice a second and heeds SIGTERM itself.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use validator_core::plan::EngineChoice;

use super::images::{Family, Image, no_kernels};
use super::kernels::{Gemm, Support, families, operand_type};
use super::operand_proof::prove_copies;
use super::product::GemmGpu;
use super::shape::Layout;
use super::sizing::{Pace, choose_layout};
use super::sweep::{Progress, Sweep, Sweeps};
use super::trial::{Trial, try_out};
use super::{arena, cublaslt};
use crate::cuda::{Cublaslt, CudaFailure, DeviceMemory, Module};
use crate::plan::MemoryShare;
use crate::probe::PowerKind;
use crate::probe::with_power_meter;
use crate::worker::clock;
use crate::worker::protocol::{LOAD_BEGAN, RUN, Reporter};
use crate::workload::check::check;
use crate::workload::contention::{NO_ROOM, ROOM_BYTES};
use crate::workload::start::{FIRST_USE_OF_CONTEXT, exited};
use crate::workload::{Prepared, Step, WorkerGpu, Workload};
use validator_core::facts::{BurnEngine, BurnRun, Precision, PrecisionRun, WorkerEnd, WorkloadRun};

/// The burn as an assignment has it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct BurnTask {
    pub(crate) seconds: f64,
    /// Empty: the hottest.
    pub(crate) precisions: Vec<Precision>,
    pub(crate) inject: u32,
    pub(crate) seed: u64,
    #[serde(default)]
    pub(crate) engine: EngineChoice,
    /// Runs the check kernel first.
    #[serde(default)]
    pub(crate) check_kernel: bool,
}

/// Name of the detail that holds the [`BurnRun`]. Its end, its notes on the start, and the time of
/// its stop are those of the [`WorkloadRun`].
pub(crate) const DETAIL: &str = "burn";
/// The field that holds the result of the check kernel.
pub(crate) const KERNEL: &str = "kernel";

/// The step in which engines are tried.
pub(crate) const TRYING_ENGINES: &str = "trying both engines";

/// What cuBLASLt may use besides: what NVIDIA recommends for Hopper, and more than others need.
// Source: cuBLAS documentation, cublasSetWorkspace.
const WORKSPACE_BYTES: u64 = 32 << 20;
/// Interval between two reports.
const REPORT_INTERVAL: Duration = Duration::from_millis(500);
/// How long each of two engines is tried.
const TRIAL: Duration = Duration::from_secs(1);
/// The parts of a trial: which engine multiplies, and whether that counts. The first part warms the
/// GPU up to its power limit; after that none comes before the other on the whole.
const TRIAL_PARTS: [(usize, bool); 5] = [(0, false), (1, true), (0, true), (0, true), (1, true)];
/// Powers that differ by less are the same. Engines that both reach the power limit differ in their
/// rate alone.
// Source: BENCHMARKS.md: both engines of one H200 and of others drew 690 to 696 W, 0.9 %; twice
// that.
const SAME_POWER: f64 = 0.02;
/// And so are powers that differ by less than so many standard errors of their difference: under
/// the power limit single readings lie up to a third from their mean.
// Source: BENCHMARKS.md, power readings of an H200; three standard errors is the usual bound, one
// in 370 by chance.
const SAME_POWER_ERRORS: f64 = 3.0;
/// cuBLASLt is taken for its rate from this lead on: GPUs of one node should choose alike, since
/// they are compared with one another bit by bit.
// Source: BENCHMARKS.md: in trials of BF16 the rates differed by up to 4.4 % (667.3 and 696.5
// TFLOP/s) where longer burns saw no difference; twice that. Where cuBLASLt is faster it is so by
// far: on GPUs older than Hopper, by what NOTES.md has for the sm_80 kernels.
const CLEAR_LEAD: f64 = 0.09;

impl Workload for BurnTask {
    type Prepared<'g> = PreparedBurn<'g>;

    fn prepare<'g>(
        &self,
        gpus: &'g [WorkerGpu],
        budget: MemoryShare,
        reporter: &'g Reporter,
        run: &mut WorkloadRun,
    ) -> Result<PreparedBurn<'g>, WorkerEnd> {
        let [gpu] = gpus else {
            let count = gpus.len();
            return Err(exited(format!(
                "the worker has {count} GPUs instead of one"
            )));
        };
        let mut burn = BurnRun {
            seed: self.seed,
            requested_s: self.seconds,
            ..BurnRun::empty(WorkerEnd::Finished)
        };
        let resources = self.take(gpu, budget, reporter, &mut burn);
        write_detail(&burn, run);
        let (gemm_gpu, library, workspace) = resources?;
        run.memory.free_bytes = burn.memory_free_bytes;
        run.memory.used_bytes = gemm_gpu.arena.bytes();
        let mut prepared = PreparedBurn {
            task: self.clone(),
            worker_gpu: gpu,
            gpu: gemm_gpu,
            library,
            workspace,
            reporter,
            precisions: VecDeque::new(),
            share_s: self.seconds,
            run: burn,
            first_step: None,
            had_no_room: false,
            injected_found: 0,
            load_was_told: false,
        };
        let precisions = prepared.precisions_for(gpu.device.compute_capability()?);
        #[expect(clippy::cast_precision_loss, reason = "at most seven")]
        if !precisions.is_empty() {
            prepared.share_s /= precisions.len() as f64;
        }
        prepared.precisions = precisions.into();
        write_detail(&prepared.run, run);
        Ok(prepared)
    }
}

/// The GPU with its memory, cuBLASLt where there is one, and memory that it may use.
type Resources<'g> = (
    Rc<GemmGpu<'g, 'static>>,
    Option<Rc<Cublaslt>>,
    Option<DeviceMemory<'g, 'static>>,
);

impl BurnTask {
    fn take<'g>(
        &self,
        gpu: &'g WorkerGpu,
        budget: MemoryShare,
        reporter: &Reporter,
        burn: &mut BurnRun,
    ) -> Result<Resources<'g>, WorkerEnd> {
        let (device, context) = (&gpu.device, &gpu.context);
        let capability = device.compute_capability()?;
        if self.check_kernel {
            let kernel = check(gpu, reporter)?;
            reporter.field(KERNEL, &kernel);
        }
        reporter.step(FIRST_USE_OF_CONTEXT);
        let (module, _) = Family::Support
            .load(context, capability)?
            .ok_or_else(|| exited(no_kernels(capability)))?;
        let support = Support::of(&module, device.multiprocessors()?)?;
        let library = self.library(reporter, burn)?;
        reporter.step("cuMemAlloc");
        let workspace = match &library {
            Some(_) => context.allocate(WORKSPACE_BYTES).ok(),
            None => None,
        };
        let (free, _) = context.memory_bytes()?;
        burn.memory_free_bytes = free;
        let arena = arena::allocate(context, budget, free)?;
        burn.notes.extend(arena.note);
        reporter.step("copying to the GPU and back");
        burn.copies = prove_copies(&support, &arena.memory)?;
        let gpu = GemmGpu {
            context,
            support,
            arena: arena.memory,
            stop: Arc::new(AtomicBool::new(false)),
        };
        Ok((Rc::new(gpu), library, workspace))
    }

    /// cuBLASLt, where it is wanted and works.
    fn library(
        &self,
        reporter: &Reporter,
        burn: &mut BurnRun,
    ) -> Result<Option<Rc<Cublaslt>>, WorkerEnd> {
        if self.engine == EngineChoice::Ptx {
            "the embedded kernels were requested".clone_into(&mut burn.engine_choice);
            return Ok(None);
        }
        reporter.step("loading cuBLASLt");
        match cublaslt::find() {
            Ok(library) => {
                if self.engine == EngineChoice::Cublaslt {
                    "cuBLASLt was requested".clone_into(&mut burn.engine_choice);
                }
                Ok(Some(library))
            }
            Err(reason) if self.engine == EngineChoice::Cublaslt => {
                Err(exited(format!("cuBLASLt was requested: {reason}")))
            }
            Err(reason) => {
                burn.engine_choice = format!("the embedded kernels serve: {reason}");
                Ok(None)
            }
        }
    }
}

fn write_detail(burn: &BurnRun, run: &mut WorkloadRun) {
    if let Ok(burn) = serde_json::to_value(burn) {
        run.detail.insert(DETAIL.to_owned(), burn);
    }
}

/// A GPU with its memory, and the precisions that are left.
pub(crate) struct PreparedBurn<'g> {
    task: BurnTask,
    worker_gpu: &'g WorkerGpu,
    gpu: Rc<GemmGpu<'g, 'static>>,
    workspace: Option<DeviceMemory<'g, 'static>>,
    library: Option<Rc<Cublaslt>>,
    reporter: &'g Reporter,
    precisions: VecDeque<Precision>,
    /// Time of each.
    share_s: f64,
    run: BurnRun,
    first_step: Option<Instant>,
    /// Hardly any memory was free, too little for products.
    had_no_room: bool,
    injected_found: u64,
    load_was_told: bool,
}

impl Prepared for PreparedBurn<'_> {
    /// The next precision.
    fn step(&mut self, run: &mut WorkloadRun) -> Result<Step, WorkerEnd> {
        if self.first_step.is_none() {
            self.first_step = Some(Instant::now());
            // Until now SIGTERM ends the process wherever it is, since nothing is measured that
            // would be lost. Without the handler it still does, and earlier reports count.
            let stop = Arc::clone(&self.gpu.stop);
            let _ = signal_hook::flag::register(signal_hook::consts::SIGTERM, stop);
        }
        let burned = match self.precisions.pop_front() {
            Some(precision) if !self.gpu.shall_stop() => self.burn_precision(precision, run),
            _ => Ok(()),
        };
        write_detail(&self.run, run);
        burned?;
        if self.precisions.is_empty() || self.gpu.shall_stop() {
            return Ok(Step::EndOfPass);
        }
        Ok(Step::WithinPass)
    }

    fn finish(mut self, run: &mut WorkloadRun) -> Result<(), WorkerEnd> {
        if self.task.inject > 0 {
            self.run.notes.push(format!(
                "{} bits were flipped on purpose, {} of them were found at their element and bit",
                self.run.injected, self.injected_found
            ));
        }
        write_detail(&self.run, run);
        let is_stopped = self.first_step.is_none() || self.gpu.shall_stop();
        if self.run.precisions.is_empty() && !is_stopped {
            if self.had_no_room {
                run.detail.insert(NO_ROOM.to_owned(), true.into());
            }
            return Err(exited(format!(
                "nothing could be multiplied: {}",
                self.run.notes.join("; ")
            )));
        }
        Ok(())
    }
}

impl<'g> PreparedBurn<'g> {
    /// Reports the burn's progress. The burn goes on with or without a reader.
    fn tell(&mut self, run: &mut WorkloadRun) {
        if self.run.measured_s > 0.0 && !self.load_was_told {
            self.load_was_told = true;
            let began_s = clock::now_s() - self.run.load_s();
            self.reporter.field(LOAD_BEGAN, &began_s);
        }
        write_detail(&self.run, run);
        self.reporter.newest(RUN, run);
    }

    /// Since the start of the process, less what it waited for its release.
    fn elapsed(&self, run: &WorkloadRun) -> Duration {
        let before = Duration::try_from_secs_f64(run.measured.start_ms / 1000.0);
        let since = self.first_step.map(|it| it.elapsed());
        before.unwrap_or_default() + since.unwrap_or_default()
    }

    /// What was requested and this GPU has; what it does not have is noted.
    fn precisions_for(&mut self, capability: (u32, u32)) -> Vec<Precision> {
        // Tensor cores heat a GPU most: BF16 drew the power limit of every GPU that has it
        // (NOTES.md).
        let hottest = if capability >= (8, 0) {
            Precision::Bf16
        } else {
            Precision::Fp32
        };
        if self.task.precisions.is_empty() {
            return vec![hottest];
        }
        let mut precisions = Vec::new();
        for precision in &self.task.precisions {
            if families(operand_type(*precision), capability)
                .next()
                .is_none()
            {
                let (major, minor) = capability;
                self.run.notes.push(format!(
                    "{precision} was left out: there are no kernels of it for compute capability {major}.{minor}"
                ));
            } else if !precisions.contains(precision) {
                precisions.push(*precision);
            }
        }
        precisions
    }

    /// Multiplies in one precision, by the engine that is requested or that is better.
    fn burn_precision(
        &mut self,
        precision: Precision,
        run: &mut WorkloadRun,
    ) -> Result<(), WorkerEnd> {
        let operand = operand_type(precision);
        let gpu = Rc::clone(&self.gpu);
        let loaded = self.kernels(precision)?;
        let device = &self.worker_gpu.device;
        let kernels = match &loaded {
            Some((family, module, _)) => Gemm::of(module, *family, operand, device)?.map(Rc::new),
            None => None,
        };
        let workspace = self.workspace.as_ref();
        let workspace = workspace.map_or((0, 0), |it| (it.address(), it.bytes()));
        let found = self.library.clone();
        let library = found
            .as_ref()
            .map(|library| Rc::new(Gemm::by_cublaslt(library, operand, workspace)));
        let requested = Sweeps {
            duration: Duration::try_from_secs_f64(self.share_s).unwrap_or_default(),
            seed: self.task.seed,
            inject: self.task.inject,
            pace: Pace::BURN,
        };
        let offered = [kernels.as_deref(), library.as_deref()];
        let Some(chosen) = self.choose(&gpu, offered, precision, run)? else {
            return Ok(());
        };
        if gpu.shall_stop() {
            return Ok(());
        }
        let (engine, both) = match (chosen.engine, &loaded, &found) {
            (EngineChoice::Cublaslt, _, Some(found)) => (by_library(found), (library, kernels)),
            (_, Some((family, _, image)), _) => {
                let note = format!("kernels {} as {image}", family.name());
                if !self.run.notes.contains(&note) {
                    self.run.notes.push(note);
                }
                (by_kernels(*family), (kernels, library))
            }
            _ => return Ok(()),
        };
        self.name_engine(&engine);
        if let (Some(first), second) = both {
            self.reporter.step(&format!("{precision} products"));
            let products = PrecisionRun {
                engine: Some(engine),
                ..PrecisionRun::empty(precision, first.kernels_name())
            };
            self.sweep((first, second), chosen.layout, requested, (products, run))?;
        }
        Ok(())
    }

    /// The fastest embedded kernels of this precision that the driver takes.
    fn kernels(
        &mut self,
        precision: Precision,
    ) -> Result<Option<(Family, Module<'g, 'static>, Image)>, WorkerEnd> {
        let context = self.gpu.context;
        let capability = self.worker_gpu.device.compute_capability()?;
        for family in families(operand_type(precision), capability) {
            self.reporter
                .step(&format!("loading the {} kernels", family.name()));
            if let Some((module, image)) = family.load(context, capability)? {
                return Ok(Some((family, module, image)));
            }
            self.run.notes.push(format!(
                "the driver refuses the {} kernels of {precision}",
                family.name()
            ));
        }
        Ok(None)
    }

    /// Which of the two engines multiplies, and how large. `None` where neither can, which is
    /// noted.
    fn choose(
        &mut self,
        gpu: &GemmGpu<'_, '_>,
        [kernels, library]: [Option<&Gemm<'_, '_>>; 2],
        precision: Precision,
        run: &WorkloadRun,
    ) -> Result<Option<Chosen>, WorkerEnd> {
        let wanted = self.task.engine;
        if let (EngineChoice::Auto, Some(kernels), Some(library)) = (wanted, kernels, library)
            && let Some(chosen) = self.better(gpu, [kernels, library], precision, run)?
        {
            return Ok(Some(chosen));
        }
        let by_library = (library, EngineChoice::Cublaslt);
        let by_kernels = (kernels, EngineChoice::Ptx);
        let in_order = match wanted {
            EngineChoice::Cublaslt => [by_library, by_kernels],
            _ => [by_kernels, by_library],
        };
        self.reporter.step(&format!("sizing {precision} products"));
        for (gemm, engine) in in_order {
            let layout = match gemm {
                Some(gemm) => choose_layout(gpu, gemm, Pace::BURN)?,
                None => None,
            };
            if let Some(layout) = layout {
                return Ok(Some(Chosen { engine, layout }));
            }
            if gemm.is_some() && engine == EngineChoice::Cublaslt {
                self.run.notes.push(format!(
                    "cuBLASLt has no way to multiply {precision} with these types"
                ));
            }
            if wanted == engine && wanted == EngineChoice::Cublaslt {
                return Ok(None);
            }
        }
        self.had_no_room = self.run.memory_free_bytes < ROOM_BYTES;
        self.run.notes.push(format!(
            "{} bytes of memory are too few for products of {precision}",
            gpu.arena.bytes()
        ));
        Ok(None)
    }

    /// Tries both engines for a second each. `None` where one of them cannot multiply.
    fn better(
        &mut self,
        gpu: &GemmGpu<'_, '_>,
        engines: [&Gemm<'_, '_>; 2],
        precision: Precision,
        run: &WorkloadRun,
    ) -> Result<Option<Chosen>, WorkerEnd> {
        self.reporter.step(&format!("sizing {precision} products"));
        let [kernels, library] = engines.map(|gemm| choose_layout(gpu, gemm, Pace::BURN));
        let (Some(kernels), Some(library)) = (kernels?, library?) else {
            return Ok(None);
        };
        let layouts = [kernels, library];
        // A burn must not be mostly trials.
        #[expect(clippy::cast_precision_loss, reason = "at most seven")]
        let precisions = self.task.precisions.len().max(1) as f64;
        let share_s = self.task.seconds / 20.0 / precisions;
        let duration = TRIAL.min(Duration::try_from_secs_f64(share_s).unwrap_or(TRIAL)) / 2;
        let mut trials: [Option<Trial>; 2] = [None; 2];
        let mut began = Duration::ZERO;
        let seed = self.task.seed;
        let kind = with_power_meter(&self.worker_gpu.device.uuid()?, |power| {
            began = self.elapsed(run);
            for (index, counts) in TRIAL_PARTS {
                if gpu.shall_stop() {
                    break;
                }
                self.reporter.step(TRYING_ENGINES);
                let how = (seed, duration);
                let part = try_out(gpu, engines[index], &layouts[index], how, power)?;
                if let Some(part) = part.filter(|_| counts) {
                    trials[index] = Some(trials[index].map_or(part, |it| it.and(part)));
                }
            }
            Ok::<_, CudaFailure>(power.kind())
        })?;
        let [Some(kernels), Some(library)] = trials else {
            return Ok(None);
        };
        if self.run.start_to_load_ms <= 0.0 {
            self.run.start_to_load_ms = began.as_secs_f64() * 1000.0;
        }
        let (engine, why) = better_of(&kernels, &library);
        let (name, layout) = match engine {
            EngineChoice::Cublaslt => ("cuBLASLt", layouts[1]),
            _ => ("the embedded kernels", layouts[0]),
        };
        let choice = format!(
            "{precision} by {name}, {why}: embedded kernels {}, cuBLASLt {} ({})",
            trial_text(&kernels),
            trial_text(&library),
            power_text(kind, kernels.power_readings.min(library.power_readings))
        );
        if !self.run.engine_choice.is_empty() {
            self.run.engine_choice.push_str("; ");
        }
        self.run.engine_choice.push_str(&choice);
        Ok(Some(Chosen { engine, layout }))
    }

    fn sweep(
        &mut self,
        engines: Engines<'g>,
        layout: (Layout, f64),
        requested: Sweeps,
        (mut products, run): (PrecisionRun, &mut WorkloadRun),
    ) -> Result<(), WorkerEnd> {
        let before = SweptBefore {
            burned_s: self.run.measured_s,
            stood_s: self.run.stood_still_s,
            injected: self.run.injected,
            found: self.injected_found,
        };
        self.run.precisions.push(products.clone());
        let sweep = Sweep::new(&self.gpu, engines, layout, requested, &mut products)?;
        let swept = sweep.map_or(Ok(()), |sweep| {
            self.follow(sweep, &before, &mut products, run)
        });
        if let Some(last) = self.run.precisions.last_mut() {
            *last = products;
        }
        swept
    }

    /// Steps the products to their end, and reports twice a second.
    fn follow(
        &mut self,
        mut sweep: Sweep<'_, '_>,
        before: &SweptBefore,
        products: &mut PrecisionRun,
        run: &mut WorkloadRun,
    ) -> Result<(), WorkerEnd> {
        let mut reported: Option<Instant> = None;
        let mut is_swept = false;
        loop {
            let progress = sweep.step(products)?;
            if progress == Progress::Done {
                return Ok(());
            }
            // The first report follows the first batch: the parent expects the next one soon.
            let is_news = progress != Progress::Proving && !is_swept;
            let Some(moment) = sweep.moment(products).filter(|_| is_news) else {
                continue;
            };
            is_swept = progress == Progress::Swept;
            if self.run.start_to_load_ms <= 0.0 {
                let since_load = moment.elapsed + moment.stood_still;
                let to_load = self.elapsed(run).saturating_sub(since_load);
                self.run.start_to_load_ms = to_load.as_secs_f64() * 1000.0;
            }
            self.run.measured_s = before.burned_s + moment.elapsed.as_secs_f64();
            self.run.stood_still_s = before.stood_s + moment.stood_still.as_secs_f64();
            self.run.injected = before.injected + moment.injected;
            self.injected_found = before.found + moment.injected_found;
            if is_swept || reported.is_none_or(|it| it.elapsed() >= REPORT_INTERVAL) {
                reported = Some(Instant::now());
                if let Some(last) = self.run.precisions.last_mut() {
                    last.clone_from(products);
                }
                self.run.memory_used_bytes =
                    self.run.memory_used_bytes.max(moment.memory_used_bytes);
                self.tell(run);
            }
            if is_swept {
                // On a host with little time for this process that takes longer than reports may.
                self.reporter.step("comparing rows with the host's");
            }
        }
    }

    /// The run's engine is that of its first precision; kernels of further families are added to
    /// it.
    fn name_engine(&mut self, engine: &BurnEngine) {
        if self.run.precisions.is_empty() {
            self.run.engine.clone_from(engine);
        } else if let (BurnEngine::Ptx { kernels: all }, BurnEngine::Ptx { kernels }) =
            (&mut self.run.engine, engine)
            && !all.split(", ").any(|it| it == kernels)
        {
            all.push_str(", ");
            all.push_str(kernels);
        }
        if self.run.engine_choice.is_empty() {
            "the only engine that multiplies this".clone_into(&mut self.run.engine_choice);
        }
    }
}

fn by_kernels(family: Family) -> BurnEngine {
    BurnEngine::Ptx {
        kernels: family.name().to_owned(),
    }
}

fn by_library(library: &Cublaslt) -> BurnEngine {
    BurnEngine::Cublaslt {
        library: library.path().display().to_string(),
        version: library.version(),
    }
}

/// The state of the run before the products of a precision.
struct SweptBefore {
    burned_s: f64,
    stood_s: f64,
    injected: u64,
    found: u64,
}

/// What multiplies, and what multiplies exact operands once, too.
type Engines<'g> = (Rc<Gemm<'g, 'static>>, Option<Rc<Gemm<'g, 'static>>>);

/// GEMM implementation, and how large.
struct Chosen {
    engine: EngineChoice,
    layout: (Layout, f64),
}

/// The better of two engines, and by what. The embedded kernels need nothing but the driver, so
/// that they are taken where the other is not clearly better.
fn better_of(kernels: &Trial, library: &Trial) -> (EngineChoice, &'static str) {
    let error_w = kernels.power_error_w().hypot(library.power_error_w());
    if let (Some(of_kernels), Some(of_library)) = (kernels.power_w(), library.power_w())
        && (of_kernels - of_library).abs()
            > (SAME_POWER * of_kernels.max(of_library)).max(SAME_POWER_ERRORS * error_w)
    {
        let engine = if of_kernels > of_library {
            EngineChoice::Ptx
        } else {
            EngineChoice::Cublaslt
        };
        return (engine, "for its power");
    }
    if library.tflops() > kernels.tflops() * (1.0 + CLEAR_LEAD) {
        return (EngineChoice::Cublaslt, "for its speed");
    }
    (EngineChoice::Ptx, "since cuBLASLt is not clearly better")
}

fn trial_text(trial: &Trial) -> String {
    let power = trial
        .power_w()
        .map_or(String::new(), |watts| format!(" at {watts:.1} W"));
    format!("{:.1} TFLOP/s{power}", trial.tflops())
}

/// How the powers of a trial were read.
fn power_text(kind: Option<PowerKind>, readings: u32) -> String {
    match kind {
        Some(PowerKind::Instant) => format!("{readings} instantaneous readings of power"),
        Some(PowerKind::Averaged) => format!(
            "{readings} readings of power that the driver averages over time, since it has no instantaneous ones"
        ),
        None => "power could not be read".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(kernels: (f64, &[f64]), library: (f64, &[f64])) -> EngineChoice {
        let trial = |(tflops, powers_w): (f64, &[f64])| Trial::of(tflops, powers_w);
        better_of(&trial(kernels), &trial(library)).0
    }

    #[test]
    fn the_hotter_engine_is_taken_whatever_its_rate() {
        let (cool, hot) = (&[600.0, 601.0, 599.0][..], &[700.0, 701.0, 699.0][..]);
        assert_eq!(chosen((700.0, cool), (500.0, hot)), EngineChoice::Cublaslt);
        assert_eq!(chosen((500.0, hot), (700.0, cool)), EngineChoice::Ptx);
    }

    /// What was seen on H200s: at the limit both draw the same, and noise decides nothing.
    #[test]
    fn at_the_same_power_cublaslt_needs_a_clear_lead() {
        let steady = |watts: f64| [watts, watts + 1.0, watts - 1.0];
        for (kernels_w, library_w) in [(690.0, 696.0), (696.0, 690.0), (693.0, 693.0)] {
            let of = |kernels, library| {
                chosen((kernels, &steady(kernels_w)), (library, &steady(library_w)))
            };
            assert_eq!(of(662.0, 676.0), EngineChoice::Ptx);
            assert_eq!(of(679.8, 701.8), EngineChoice::Ptx);
            assert_eq!(of(676.0, 662.0), EngineChoice::Ptx);
            assert_eq!(of(667.3, 696.5), EngineChoice::Ptx);
            assert_eq!(of(48.0, 52.8), EngineChoice::Cublaslt);
            assert_eq!(of(365.0, 346.0), EngineChoice::Ptx);
        }
    }

    /// Both are of one second of the same load on an H200, whose means differ by 8 %.
    #[test]
    fn powers_that_jump_are_not_told_apart_by_their_means() {
        let (jumping, calm) = (
            &[692.0, 504.3, 632.6, 748.7, 714.6, 437.6, 743.2][..],
            &[723.6, 742.0, 732.2, 620.6, 602.7, 696.0, 740.9][..],
        );
        assert_eq!(chosen((660.0, jumping), (661.0, calm)), EngineChoice::Ptx);
        assert_eq!(chosen((660.0, calm), (661.0, jumping)), EngineChoice::Ptx);
    }

    #[test]
    fn a_power_that_was_not_read_decides_nothing() {
        assert_eq!(
            chosen((600.0, &[]), (610.0, &[700.0, 701.0, 699.0])),
            EngineChoice::Ptx
        );
        assert_eq!(chosen((600.0, &[]), (660.0, &[])), EngineChoice::Cublaslt);
    }
}
