//! `gpu-validator worker burn`: burns one GPU and tells what it sees twice a second.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::burn::MemoryShare;
use super::driver::{
    CUDA_ERROR_OUT_OF_MEMORY, Context, CudaFailure, CudaLibrary, Device, DeviceMemory,
};
use super::gemm::images::Family;
use super::gemm::kernels::{Gemm, Support, families, operand_type};
use super::gemm::sweep::{BurningGpu, Moment, Sweeps, choose_layout, run};
use crate::facts::{BurnEngine, BurnRun, Precision, PrecisionRun, ReferenceProof, WorkerEnd};
use crate::worker::conversation::Teller;

/// What one worker is asked to do, as its command line carries it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct BurnTask {
    /// UUID of the GPU or MIG device.
    pub(super) device: String,
    pub(super) seconds: f64,
    /// Empty: the hottest.
    pub(super) precisions: Vec<Precision>,
    pub(super) memory: MemoryShare,
    pub(super) inject: u32,
    pub(super) seed: u64,
}

/// What is taken less at a time when memory is short.
const SHRINK_BYTES: u64 = 64 << 20;
/// Attempts to get memory, each 2 % smaller.
const ALLOCATIONS_MAXIMUM: u32 = 25;

/// `gpu-validator worker burn --task JSON`.
pub(crate) fn run_worker(task: &str) {
    let teller = Teller::new();
    let mut worker = Worker::new(&teller);
    let end = match serde_json::from_str::<BurnTask>(task) {
        Ok(task) => worker.burn(&task),
        Err(error) => Err(exited(format!("the task cannot be read: {error}"))),
    };
    worker.run.end = end.err().unwrap_or(WorkerEnd::Finished);
    worker.tell();
    teller.done();
}

/// A burn of which nothing is known yet.
pub(super) fn empty_run(end: WorkerEnd) -> BurnRun {
    BurnRun {
        end,
        engine: BurnEngine::Ptx {
            kernels: String::new(),
        },
        engine_choice: String::new(),
        seed: 0,
        requested_s: 0.0,
        measured_s: 0.0,
        start_to_load_ms: 0.0,
        stop_ms: None,
        memory_free_bytes: 0,
        memory_used_bytes: 0,
        notes: Vec::new(),
        precisions: Vec::new(),
        injected: 0,
    }
}

fn exited(stderr: String) -> WorkerEnd {
    WorkerEnd::Exited { status: 1, stderr }
}

struct Worker<'t> {
    teller: &'t Teller,
    started: Instant,
    run: BurnRun,
    stop: Arc<AtomicBool>,
    injected_found: u64,
}

impl<'t> Worker<'t> {
    fn new(teller: &'t Teller) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        // Without the handler SIGTERM ends the process at once, and what was told before counts.
        let _ = signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&stop));
        Self {
            teller,
            started: Instant::now(),
            run: empty_run(WorkerEnd::Finished),
            stop,
            injected_found: 0,
        }
    }

    fn tell(&self) {
        self.teller.field("run", &self.run);
    }

    fn burn(&mut self, task: &BurnTask) -> Result<(), WorkerEnd> {
        self.run.seed = task.seed;
        self.run.requested_s = task.seconds;
        self.teller.step("dlopen of libcuda.so.1");
        let cuda = CudaLibrary::load().map_err(exited)?;
        self.teller.step("cuInit");
        match cuda.initialize()? {
            0 => {}
            code => {
                return Err(WorkerEnd::CudaError {
                    call: "cuInit".to_owned(),
                    code,
                    name: cuda.result_name(code),
                });
            }
        }
        let device = super::cuda_kernel::device_with(&cuda, &task.device)?;
        self.teller.step("cuDevicePrimaryCtxRetain");
        let context = device.context()?;
        let capability = device.compute_capability()?;
        self.teller.step("cuModuleLoadData");
        let module = Family::Support
            .load(&context, capability)?
            .ok_or_else(|| exited(no_kernels(capability)))?;
        let support = Support::of(&module, device.multiprocessors()?)?;
        self.teller.step("cuMemAlloc");
        let arena = self.allocate(&context, task.memory)?;
        let gpu = BurningGpu {
            context: &context,
            support: &support,
            arena: &arena,
        };
        let precisions = self.precisions_for(task, capability);
        let mut share_s = task.seconds;
        #[expect(clippy::cast_precision_loss, reason = "at most seven")]
        if !precisions.is_empty() {
            share_s /= precisions.len() as f64;
        }
        for precision in &precisions {
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
            self.burn_precision(&gpu, &device, *precision, task, share_s)?;
        }
        let stopped = Instant::now();
        drop(arena);
        drop(module);
        drop(context);
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

    /// What was asked for and this GPU has; what it does not have is noted.
    fn precisions_for(&mut self, task: &BurnTask, capability: (u32, u32)) -> Vec<Precision> {
        // Tensor cores heat a GPU most: BF16 drew the power limit of every GPU that has it (NOTES.md).
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

    /// As much memory as is asked for; where the driver does not give it, less.
    fn allocate<'c, 'a>(
        &mut self,
        context: &'c Context<'a>,
        share: MemoryShare,
    ) -> Result<DeviceMemory<'c, 'a>, WorkerEnd> {
        let (free, _) = context.memory_bytes()?;
        self.run.memory_free_bytes = free;
        let asked = share.of(free);
        let mut bytes = asked.min(free);
        for _ in 0..ALLOCATIONS_MAXIMUM {
            match context.allocate(bytes) {
                Ok(memory) => {
                    if bytes < asked {
                        self.run.notes.push(format!(
                            "{asked} bytes of memory were asked for, the driver gave {bytes}"
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

    fn burn_precision(
        &mut self,
        gpu: &BurningGpu<'_, '_, '_, '_>,
        device: &Device<'_>,
        precision: Precision,
        task: &BurnTask,
        share_s: f64,
    ) -> Result<(), WorkerEnd> {
        let capability = device.compute_capability()?;
        let operand = operand_type(precision);
        for family in families(operand, capability) {
            self.teller
                .step(&format!("loading the {} kernels", family.name()));
            let Some(module) = family.load(gpu.context, capability)? else {
                self.run.notes.push(format!(
                    "the driver refuses the {} kernels of {precision}",
                    family.name()
                ));
                continue;
            };
            let Some(gemm) = Gemm::of(&module, family, operand, device)? else {
                continue;
            };
            self.teller.step(&format!("sizing {precision} products"));
            let Some(layout) = choose_layout(gpu, &gemm)? else {
                self.run.notes.push(format!(
                    "{} bytes of memory are too few for products of {precision}",
                    gpu.arena.bytes()
                ));
                return Ok(());
            };
            self.name_engine(family);
            self.teller.step(&format!("{precision} products"));
            let asked = Sweeps {
                duration: Duration::try_from_secs_f64(share_s).unwrap_or_default(),
                seed: task.seed,
                inject: task.inject,
            };
            return self.sweep(gpu, &gemm, layout, asked, precision);
        }
        Ok(())
    }

    fn sweep(
        &mut self,
        gpu: &BurningGpu<'_, '_, '_, '_>,
        gemm: &Gemm<'_, '_, '_>,
        layout: (super::gemm::Layout, f64),
        asked: Sweeps,
        precision: Precision,
    ) -> Result<(), WorkerEnd> {
        let mut products = empty_products(precision, gemm.family.name());
        let burned_before_s = self.run.measured_s;
        let (injected_before, found_before) = (self.run.injected, self.injected_found);
        self.run.precisions.push(products.clone());
        let result = run(gpu, gemm, layout, asked, &mut products, &mut |moment| {
            if self.run.start_to_load_ms <= 0.0 {
                let to_load = self.started.elapsed().saturating_sub(moment.elapsed);
                self.run.start_to_load_ms = to_load.as_secs_f64() * 1000.0;
            }
            self.run.measured_s = burned_before_s + moment.elapsed.as_secs_f64();
            self.run.injected = injected_before + moment.injected;
            self.injected_found = found_before + moment.injected_found;
            if moment.is_due {
                self.listen(&moment);
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

    fn name_engine(&mut self, family: Family) {
        let BurnEngine::Ptx { kernels } = &mut self.run.engine else {
            return;
        };
        if !kernels.split(", ").any(|it| it == family.name()) {
            if !kernels.is_empty() {
                kernels.push_str(", ");
            }
            kernels.push_str(family.name());
        }
        self.run.engine_choice =
            format!("the embedded {kernels} kernels, which need the driver alone");
    }
}

fn empty_products(precision: Precision, kernels: &str) -> PrecisionRun {
    PrecisionRun {
        precision,
        kernels: kernels.to_owned(),
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
