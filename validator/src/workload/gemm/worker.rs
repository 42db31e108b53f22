//! `gpu-validator worker burn`: burns one GPU and reports twice a second.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use validator_core::plan::EngineChoice;

use super::cublaslt;
use super::images::{Family, Image};
use super::kernels::{Gemm, Support, families, operand_type};
use super::operand_proof::prove_copies;
use super::sweep::{BurningGpu, Moment, Sweeps, Trial, choose_layout, run, try_out};
use crate::cuda::{
    CUDA_ERROR_OUT_OF_MEMORY, Context, Cublaslt, CudaFailure, Device, DeviceMemory, Module,
};
use crate::plan::MemoryShare;
use crate::probe::PowerKind;
use crate::probe::with_power_meter;
use crate::worker::clock;
use crate::worker::device_isolation::Attempt;
use crate::worker::protocol::{GO, LOAD_BEGAN, RUN, Reporter, STANDING_BY};
use crate::workload::WorkerGpu;
use crate::workload::check::check;
use crate::workload::contention::{ROOM_BYTES, busy_if_others_came};
use crate::workload::start::{FIRST_USE_OF_CONTEXT, device_with, exited, retry_with_all_nodes};
use validator_core::facts::{
    BurnEngine, BurnRun, KernelRun, Precision, PrecisionRun, ReferenceProof, WorkerEnd,
};

/// The assignment of one worker, as its command line carries it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct BurnTask {
    /// UUID of the GPU or MIG device.
    pub(crate) device: String,
    pub(crate) seconds: f64,
    /// Empty: the hottest.
    pub(crate) precisions: Vec<Precision>,
    pub(crate) memory: MemoryShare,
    pub(crate) inject: u32,
    pub(crate) seed: u64,
    #[serde(default)]
    pub(crate) engine: EngineChoice,
    /// Gets ready, and waits on standard input for the word to begin.
    #[serde(default)]
    pub(crate) standby: bool,
    /// Runs the check kernel first.
    #[serde(default)]
    pub(crate) check_kernel: bool,
}

/// The step in which engines are tried.
pub(crate) const TRYING_ENGINES: &str = "trying both engines";

/// What is taken less at a time when memory is short.
const SHRINK_BYTES: u64 = 64 << 20;
/// Attempts to get memory, each 2 % smaller.
const ALLOCATIONS_MAXIMUM: u32 = 25;
/// What cuBLASLt may use besides: what NVIDIA recommends for Hopper, and more than others need.
// Source: cuBLAS documentation, cublasSetWorkspace.
const WORKSPACE_BYTES: u64 = 32 << 20;
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

/// `gpu-validator worker burn --task JSON`. If it `is_alone` it can open no other GPU's device
/// node; what came of an attempt to work so is `alone_failed`.
pub(crate) fn run_worker(task: &str, is_alone: bool, alone_failed: Option<String>) -> Attempt {
    let reporter = Reporter::new();
    let mut worker = Worker::new(&reporter);
    worker.run.notes.extend(alone_failed.map(|reason| {
        format!("CUDA did not start while only this GPU's device node could be opened: {reason}")
    }));
    let end = match serde_json::from_str::<BurnTask>(task) {
        Ok(task) => match (worker.device(&task), is_alone) {
            (Err(end), true) => return retry_with_all_nodes(end),
            (device, _) => device
                .and_then(|device| worker.burn(&task, device))
                .map_err(|end| {
                    busy_if_others_came(end, worker.had_no_room, &task.device, &reporter)
                }),
        },
        Err(error) => Err(exited(format!("the task cannot be read: {error}"))),
    };
    if let (true, Err(end)) = (worker.owes_kernel, &end) {
        reporter.field("kernel", &KernelRun::without_result(end.clone()));
    }
    worker.run.end = end.err().unwrap_or(WorkerEnd::Finished);
    worker.tell();
    reporter.done();
    Attempt::Completed
}

struct Worker<'t> {
    reporter: &'t Reporter,
    started: Instant,
    /// Of that, waited for the word to begin.
    waited: Duration,
    run: BurnRun,
    /// The check kernel was requested and not reported yet.
    owes_kernel: bool,
    /// Hardly any memory was free, too little for products.
    had_no_room: bool,
    stop: Arc<AtomicBool>,
    injected_found: u64,
    load_was_told: Cell<bool>,
}

impl<'t> Worker<'t> {
    fn new(reporter: &'t Reporter) -> Self {
        Self {
            reporter,
            started: Instant::now(),
            waited: Duration::ZERO,
            run: BurnRun::empty(WorkerEnd::Finished),
            owes_kernel: false,
            had_no_room: false,
            stop: Arc::default(),
            injected_found: 0,
            load_was_told: Cell::new(false),
        }
    }

    /// Reports the burn's progress. The burn goes on with or without a reader.
    fn tell(&self) {
        if self.run.measured_s > 0.0 && !self.load_was_told.replace(true) {
            let began_s = clock::now_s() - self.run.load_s();
            self.reporter.field(LOAD_BEGAN, &began_s);
        }
        self.reporter.newest(RUN, &self.run);
    }

    /// The GPU to burn, with CUDA started.
    fn device(&mut self, task: &BurnTask) -> Result<Device<'static>, WorkerEnd> {
        self.run.seed = task.seed;
        self.run.requested_s = task.seconds;
        self.owes_kernel = task.check_kernel;
        device_with(&task.device, self.reporter)
    }

    fn burn(&mut self, task: &BurnTask, device: Device<'static>) -> Result<(), WorkerEnd> {
        let gpu = WorkerGpu::of(&task.device, device, self.reporter)?;
        let (device, context) = (&gpu.device, &gpu.context);
        let capability = device.compute_capability()?;
        if task.check_kernel {
            let run = check(&gpu, self.reporter)?;
            self.reporter.field("kernel", &run);
            self.owes_kernel = false;
        }
        self.reporter.step(FIRST_USE_OF_CONTEXT);
        let (module, _) = Family::Support
            .load(context, capability)?
            .ok_or_else(|| exited(no_kernels(capability)))?;
        let support = Support::of(&module, device.multiprocessors()?)?;
        let library = self.library(task)?;
        self.reporter.step("cuMemAlloc");
        let workspace = match &library {
            Some(_) => context.allocate(WORKSPACE_BYTES).ok(),
            None => None,
        };
        let arena = self.allocate(context, task.memory)?;
        self.reporter.step("copying to the GPU and back");
        self.run.copies = prove_copies(&support, &arena)?;
        let stop = Arc::clone(&self.stop);
        let burning = BurningGpu {
            context,
            support: &support,
            arena: &arena,
            stop: &stop,
        };
        let precisions = self.precisions_for(task, capability);
        let mut share_s = task.seconds;
        #[expect(clippy::cast_precision_loss, reason = "at most seven")]
        if !precisions.is_empty() {
            share_s /= precisions.len() as f64;
        }
        let engines = Engines {
            library: library.as_ref(),
            workspace: workspace
                .as_ref()
                .map_or((0, 0), |it| (it.address(), it.bytes())),
        };
        if !self.may_begin(task.standby) {
            return Ok(());
        }
        for precision in &precisions {
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
            self.burn_precision(&burning, device, &engines, *precision, task, share_s)?;
        }
        let stopped = Instant::now();
        drop(arena);
        drop(workspace);
        drop(library);
        drop(module);
        drop(gpu);
        self.run.stop_ms = Some(stopped.elapsed().as_secs_f64() * 1000.0);
        if task.inject > 0 {
            self.run.notes.push(format!(
                "{} bits were flipped on purpose, {} of them were found at their element and bit",
                self.run.injected, self.injected_found
            ));
        }
        if self.run.precisions.is_empty() && !self.stop.load(Ordering::Relaxed) {
            return Err(exited(format!(
                "nothing could be multiplied: {}",
                self.run.notes.join("; ")
            )));
        }
        Ok(())
    }

    /// Waits for the order to begin, if requested. Until then SIGTERM ends the process wherever it
    /// is, since nothing is measured that would be lost; from then on it requests the end.
    fn may_begin(&mut self, standby: bool) -> bool {
        if standby {
            self.reporter.step(STANDING_BY);
            let since = Instant::now();
            let mut line = String::new();
            if std::io::stdin().read_line(&mut line).is_err() || line.trim() != GO {
                return false;
            }
            self.waited = since.elapsed();
        }
        // Without the handler SIGTERM still ends the process, and earlier reports count.
        let _ = signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&self.stop));
        true
    }

    /// Since the start, less what was waited.
    fn elapsed(&self) -> Duration {
        self.started.elapsed().saturating_sub(self.waited)
    }

    /// What was requested and this GPU has; what it does not have is noted.
    fn precisions_for(&mut self, task: &BurnTask, capability: (u32, u32)) -> Vec<Precision> {
        // Tensor cores heat a GPU most: BF16 drew the power limit of every GPU that has it
        // (NOTES.md).
        let hottest = if capability >= (8, 0) {
            Precision::Bf16
        } else {
            Precision::Fp32
        };
        if task.precisions.is_empty() {
            return vec![hottest];
        }
        let mut precisions = Vec::new();
        for precision in &task.precisions {
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

    /// As much memory as is requested; where the driver does not give it, less.
    fn allocate<'c, 'a>(
        &mut self,
        context: &'c Context<'a>,
        share: MemoryShare,
    ) -> Result<DeviceMemory<'c, 'a>, WorkerEnd> {
        let (free, _) = context.memory_bytes()?;
        self.run.memory_free_bytes = free;
        let asked = share.of(free);
        // On a GPU without any free memory a byte is requested, so that the driver returns its
        // error.
        let mut bytes = asked.min(free).max(1);
        for _ in 0..ALLOCATIONS_MAXIMUM {
            match context.allocate(bytes) {
                Ok(memory) => {
                    if bytes < asked {
                        self.run.notes.push(format!(
                            "{asked} bytes of memory were requested, the driver gave {bytes}"
                        ));
                    }
                    return Ok(memory);
                }
                Err(CudaFailure::Status {
                    code: CUDA_ERROR_OUT_OF_MEMORY,
                    ..
                }) if bytes > SHRINK_BYTES => {
                    bytes -= (bytes / 50).max(SHRINK_BYTES).min(bytes / 2);
                }
                Err(failure) => return Err(failure.into()),
            }
        }
        Ok(context.allocate(bytes)?)
    }

    /// cuBLASLt, where it is wanted and works.
    fn library(&mut self, task: &BurnTask) -> Result<Option<Rc<Cublaslt>>, WorkerEnd> {
        if task.engine == EngineChoice::Ptx {
            "the embedded kernels were requested".clone_into(&mut self.run.engine_choice);
            return Ok(None);
        }
        self.reporter.step("loading cuBLASLt");
        match cublaslt::find() {
            Ok(library) => {
                if task.engine == EngineChoice::Cublaslt {
                    "cuBLASLt was requested".clone_into(&mut self.run.engine_choice);
                }
                Ok(Some(library))
            }
            Err(reason) if task.engine == EngineChoice::Cublaslt => {
                Err(exited(format!("cuBLASLt was requested: {reason}")))
            }
            Err(reason) => {
                self.run.engine_choice = format!("the embedded kernels serve: {reason}");
                Ok(None)
            }
        }
    }

    /// Multiplies in one precision, by the engine that is requested or that is better.
    fn burn_precision(
        &mut self,
        gpu: &BurningGpu<'_, '_, '_, '_>,
        device: &Device<'_>,
        engines: &Engines<'_>,
        precision: Precision,
        task: &BurnTask,
        share_s: f64,
    ) -> Result<(), WorkerEnd> {
        let operand = operand_type(precision);
        let loaded = self.kernels(gpu, device, precision)?;
        let kernels = match &loaded {
            Some((family, module, _)) => Gemm::of(module, *family, operand, device)?,
            None => None,
        };
        let library = engines
            .library
            .map(|library| Gemm::by_cublaslt(library, operand, engines.workspace));
        let asked = Sweeps {
            duration: Duration::try_from_secs_f64(share_s).unwrap_or_default(),
            seed: task.seed,
            inject: task.inject,
        };
        let Some(chosen) =
            self.choose(gpu, [kernels.as_ref(), library.as_ref()], precision, task)?
        else {
            return Ok(());
        };
        if gpu.shall_stop() {
            return Ok(());
        }
        let (engine, both) = match (chosen.engine, &loaded, engines.library) {
            (EngineChoice::Cublaslt, _, Some(found)) => {
                (by_library(found), (library.as_ref(), kernels.as_ref()))
            }
            (_, Some((family, _, image)), _) => {
                let note = format!("kernels {} as {image}", family.name());
                if !self.run.notes.contains(&note) {
                    self.run.notes.push(note);
                }
                (by_kernels(*family), (kernels.as_ref(), library.as_ref()))
            }
            _ => return Ok(()),
        };
        self.name_engine(&engine);
        if let (Some(first), second) = both {
            self.reporter.step(&format!("{precision} products"));
            let products = PrecisionRun {
                engine: Some(engine),
                ..empty_products(precision, first.kernels_name())
            };
            self.sweep(gpu, (first, second), chosen.layout, asked, products)?;
        }
        Ok(())
    }

    /// The fastest embedded kernels of this precision that the driver takes.
    fn kernels<'c, 'a>(
        &mut self,
        gpu: &BurningGpu<'_, '_, 'c, 'a>,
        device: &Device<'_>,
        precision: Precision,
    ) -> Result<Option<(Family, Module<'c, 'a>, Image)>, WorkerEnd> {
        let capability = device.compute_capability()?;
        for family in families(operand_type(precision), capability) {
            self.reporter
                .step(&format!("loading the {} kernels", family.name()));
            if let Some((module, image)) = family.load(gpu.context, capability)? {
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
        gpu: &BurningGpu<'_, '_, '_, '_>,
        [kernels, library]: [Option<&Gemm<'_, '_, '_>>; 2],
        precision: Precision,
        task: &BurnTask,
    ) -> Result<Option<Chosen>, WorkerEnd> {
        if let (EngineChoice::Auto, Some(kernels), Some(library)) = (task.engine, kernels, library)
            && let Some(chosen) = self.better(gpu, [kernels, library], precision, task)?
        {
            return Ok(Some(chosen));
        }
        let by_library = (library, EngineChoice::Cublaslt);
        let by_kernels = (kernels, EngineChoice::Ptx);
        let in_order = match task.engine {
            EngineChoice::Cublaslt => [by_library, by_kernels],
            _ => [by_kernels, by_library],
        };
        self.reporter.step(&format!("sizing {precision} products"));
        for (gemm, engine) in in_order {
            let layout = match gemm {
                Some(gemm) => choose_layout(gpu, gemm)?,
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
            if task.engine == engine && task.engine == EngineChoice::Cublaslt {
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
        gpu: &BurningGpu<'_, '_, '_, '_>,
        engines: [&Gemm<'_, '_, '_>; 2],
        precision: Precision,
        task: &BurnTask,
    ) -> Result<Option<Chosen>, WorkerEnd> {
        self.reporter.step(&format!("sizing {precision} products"));
        let [kernels, library] = engines.map(|gemm| choose_layout(gpu, gemm));
        let (Some(kernels), Some(library)) = (kernels?, library?) else {
            return Ok(None);
        };
        let layouts = [kernels, library];
        // A burn must not be mostly trials.
        #[expect(clippy::cast_precision_loss, reason = "at most seven")]
        let precisions = task.precisions.len().max(1) as f64;
        let share_s = task.seconds / 20.0 / precisions;
        let duration = TRIAL.min(Duration::try_from_secs_f64(share_s).unwrap_or(TRIAL)) / 2;
        let mut trials: [Option<Trial>; 2] = [None; 2];
        let mut began = Duration::ZERO;
        let kind = with_power_meter(&task.device, |power| {
            began = self.elapsed();
            for (index, counts) in TRIAL_PARTS {
                if gpu.shall_stop() {
                    break;
                }
                self.reporter.step(TRYING_ENGINES);
                let how = (task.seed, duration);
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
        gpu: &BurningGpu<'_, '_, '_, '_>,
        engines: (&Gemm<'_, '_, '_>, Option<&Gemm<'_, '_, '_>>),
        layout: (super::shape::Layout, f64),
        asked: Sweeps,
        mut products: PrecisionRun,
    ) -> Result<(), WorkerEnd> {
        let (burned_before_s, stood_before_s) = (self.run.measured_s, self.run.stood_still_s);
        let (injected_before, found_before) = (self.run.injected, self.injected_found);
        self.run.precisions.push(products.clone());
        let result = run(gpu, engines, layout, asked, &mut products, &mut |moment| {
            if self.run.start_to_load_ms <= 0.0 {
                let since_load = moment.elapsed + moment.stood_still;
                let to_load = self.elapsed().saturating_sub(since_load);
                self.run.start_to_load_ms = to_load.as_secs_f64() * 1000.0;
            }
            self.run.measured_s = burned_before_s + moment.elapsed.as_secs_f64();
            self.run.stood_still_s = stood_before_s + moment.stood_still.as_secs_f64();
            self.run.injected = injected_before + moment.injected;
            self.injected_found = found_before + moment.injected_found;
            if moment.is_due {
                self.listen(&moment);
            }
            if moment.is_last {
                // On a host with little time for this process that takes longer than reports may.
                self.reporter.step("comparing rows with the host's");
            }
            !self.stop.load(Ordering::Relaxed)
        });
        if let Some(last) = self.run.precisions.last_mut() {
            *last = products;
        }
        Ok(result?)
    }

    fn listen(&mut self, moment: &Moment<'_>) {
        if let Some(last) = self.run.precisions.last_mut() {
            last.clone_from(moment.run);
        }
        self.run.memory_used_bytes = self.run.memory_used_bytes.max(moment.memory_used_bytes);
        self.tell();
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

/// What there is besides the embedded kernels.
struct Engines<'l> {
    library: Option<&'l Rc<Cublaslt>>,
    /// Address and bytes of memory that the library may use.
    workspace: (u64, u64),
}

/// GEMM implementation, and how large.
struct Chosen {
    engine: EngineChoice,
    layout: (super::shape::Layout, f64),
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

fn empty_products(precision: Precision, kernels: &str) -> PrecisionRun {
    PrecisionRun {
        precision,
        kernels: kernels.to_owned(),
        engine: None,
        m: 0,
        n: 0,
        k: 0,
        products: 0,
        products_verified: 0,
        gpu_time_s: 0.0,
        tflops: 0.0,
        tflops_intervals: Vec::new(),
        reference: ReferenceProof::default(),
        mismatches: 0,
        nonfinite: 0,
        examples: Vec::new(),
    }
}

fn no_kernels((major, minor): (u32, u32)) -> String {
    format!("the driver takes none of the embedded kernels for compute capability {major}.{minor}")
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
