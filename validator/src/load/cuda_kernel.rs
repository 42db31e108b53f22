//! The check kernel on every GPU: a small embedded PTX program whose every result word is compared with the host's own.
//!
//! It needs nothing on the machine but the driver. Each GPU has a process of its own, to which
//! `CUDA_VISIBLE_DEVICES=<UUID>` shows that GPU alone: no number crosses from NVML to CUDA, and no other GPU has to be
//! initialised. On a GPU in MIG mode the kernel runs on its first MIG device, which stands for the GPU.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::{Duration, Instant};

use super::burn_worker::FIRST_USE_OF_CONTEXT;
use super::check_kernel::{CHECK_KERNEL_BLOCK_THREADS, check_kernel_expected};
use super::driver::{Context, CudaFailure, CudaLibrary, Device, c_text};
use super::others::{busy_if_others_came, busy_if_others_have_it};
use super::standby::Standby;
use crate::facts::{Facts, GpuFacts, KernelRun, Reading, ValueMismatch, WorkerEnd};
use crate::machine::is_hidden;
use crate::probe::{Interrupt, ProbeOptions};
use crate::worker::Nodes;
use crate::worker::conversation::{AfterDone, ConversationEnd, Teller, Told, listen};
use crate::worker::one_gpu::{Then, cuda_environment};
use crate::worker::process::{WorkerProcess, worker_program};

const PTX: &str = include_str!("kernels/check.ptx");
const KERNEL: &str = "gpu_validator_check";
/// Blocks for each SM: with 256 threads each, eight fill an SM, so that every SM gets work even if others are quicker.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 16;
/// What the memory holds before, so that a kernel that wrote nothing is seen to have written nothing.
const POISON: u32 = 0xdead_beef;
const EXAMPLES_MAXIMUM: usize = 8;
/// GPUs at a time; more processes than this compete for the host's memory bandwidth and locks.
const WORKERS_MAXIMUM: usize = 16;

/// Runs the kernel on every GPU of `facts` that may be worked, and says for each that it could not why. What stands by for a
/// burn runs it itself. Where somebody asked for a burn and no more, the GPUs that it leaves out are left alone: they have no
/// entry.
pub(crate) fn run_on_all_gpus(
    options: &ProbeOptions,
    interrupt: &Interrupt,
    standby: Option<&Standby>,
    facts: &Facts,
) -> BTreeMap<String, Reading<KernelRun>> {
    let mut runs = BTreeMap::new();
    let may_be_worked = |gpu: &GpuFacts| {
        let asked_for = options.standby.as_ref();
        asked_for.is_none_or(|it| it.is_for(gpu, || is_hidden(gpu, facts)))
    };
    let gpus: Vec<(&GpuFacts, &String)> = facts
        .gpus
        .iter()
        .filter(|gpu| may_be_worked(gpu))
        .filter_map(|gpu| Some((gpu, gpu.uuid.value()?)))
        .collect();
    let no_cuda = match standby {
        Some(standby) => standby.no_cuda(facts),
        None => cuda_does_not_work(facts),
    };
    if let Some(reason) = no_cuda {
        let reading = || Reading::NotRead(reason.clone());
        runs.extend(gpus.iter().map(|(_, uuid)| ((*uuid).clone(), reading())));
        return runs;
    }
    for some in gpus.chunks(WORKERS_MAXIMUM) {
        std::thread::scope(|scope| {
            let workers: Vec<_> = some
                .iter()
                .map(|(gpu, uuid)| {
                    let ready = || standby.and_then(|it| it.kernel(uuid));
                    let run =
                        move || ready().unwrap_or_else(|| run_on(options, interrupt, gpu, uuid));
                    (*uuid, scope.spawn(run))
                })
                .collect();
            for (uuid, worker) in workers {
                let panicked = || Reading::NotRead("the thread of this GPU panicked".to_owned());
                let run = worker.join().unwrap_or_else(|_| panicked());
                runs.insert(uuid.clone(), run);
            }
        });
    }
    runs
}

/// Without a driver library that initialises, no GPU can be asked to work. A probe that hung or crashed is no such
/// answer: each GPU is still tried on its own.
pub(super) fn cuda_does_not_work(facts: &Facts) -> Option<String> {
    if let Reading::NotRead(reason) = &facts.cuda.library {
        return Some(format!("libcuda could not be loaded: {reason}"));
    }
    let init = facts.cuda.init.value().filter(|it| it.code != 0)?;
    Some(format!(
        "CUDA does not initialise: cuInit answered {} ({})",
        init.name, init.code
    ))
}

fn run_on(
    options: &ProbeOptions,
    interrupt: &Interrupt,
    gpu: &GpuFacts,
    uuid: &str,
) -> Reading<KernelRun> {
    if let Some(lost) = &gpu.lost {
        return Reading::NotRead(format!("the GPU is lost: {lost}"));
    }
    let device = match device_to_use(gpu, uuid) {
        Ok(device) => device,
        Err(reason) => return Reading::NotRead(reason),
    };
    let started = Instant::now();
    let program = worker_program(options.worker_program.as_ref());
    let mut arguments = ["worker", "cuda-kernel", "--gpu", device]
        .map(OsString::from)
        .to_vec();
    arguments.extend(own_node(gpu, options));
    let environment = cuda_environment(device);
    let worker = match WorkerProcess::start(&program, &arguments, &environment) {
        Ok(worker) => worker,
        Err(error) => {
            return Reading::NotRead(format!("cannot start {}: {error}", program.display()));
        }
    };
    let told = listen(
        worker,
        options.deadlines.cuda_kernel,
        AfterDone::ExitWell,
        interrupt,
    );
    kernel_run(told, gpu, started.elapsed())
}

/// Arguments that keep a worker to this GPU's device node.
pub(super) fn own_node(gpu: &GpuFacts, options: &ProbeOptions) -> Vec<OsString> {
    let minor = gpu.minor_number.value();
    minor.map_or_else(Vec::new, |it| Nodes::of(*it, options.sysroot.as_deref()))
}

/// The GPU itself, or its first MIG device.
pub(super) fn device_to_use<'a>(gpu: &'a GpuFacts, uuid: &'a str) -> Result<&'a str, String> {
    if !gpu.mig.value().is_some_and(|mig| mig.current) {
        return Ok(uuid);
    }
    match &gpu.mig_devices {
        Reading::Value(devices) => devices
            .first()
            .map(|device| device.uuid.as_str())
            .ok_or_else(|| "the GPU is in MIG mode and has no MIG devices".to_owned()),
        Reading::NotRead(reason) => Err(format!("its MIG devices could not be read: {reason}")),
        Reading::NotSupported => Err("its MIG devices could not be read".to_owned()),
    }
}

fn kernel_run(told: Told, gpu: &GpuFacts, wall: Duration) -> Reading<KernelRun> {
    let wall_ms = wall.as_secs_f64() * 1000.0;
    let without_result = |end| {
        Reading::Value(KernelRun {
            wall_ms,
            ..KernelRun::without_result(end)
        })
    };
    let Told {
        mut fields, end, ..
    } = told;
    match end {
        ConversationEnd::Interrupted => Reading::NotRead("the run was interrupted".to_owned()),
        ConversationEnd::Ended(end) => without_result(end),
        ConversationEnd::Finished => {
            let run = fields
                .remove("run")
                .and_then(|run| serde_json::from_value::<KernelRun>(run).ok());
            let Some(run) = run else {
                return Reading::NotRead("the worker ended without a result".to_owned());
            };
            let end = busy_if_others_have_it(run.end, gpu);
            Reading::Value(KernelRun {
                end,
                wall_ms,
                ..run
            })
        }
    }
}

/// `gpu-validator worker cuda-kernel --gpu UUID`. If it `is_alone` it can open no other GPU's device node.
pub(crate) fn run_worker(uuid: &str, is_alone: bool) -> Then {
    let teller = Teller::new();
    let device = match (device_with(uuid, &teller), is_alone) {
        (Err(end), true) => return again_with_all_nodes(end),
        (device, _) => device,
    };
    let run = device.and_then(|device| compute_and_compare(&device, &teller));
    let run = run.map_err(|end| busy_if_others_came(end, false, uuid, &teller));
    teller.field("run", &run.unwrap_or_else(KernelRun::without_result));
    teller.done();
    Then::Done
}

fn compute_and_compare(device: &Device<'_>, teller: &Teller) -> Result<KernelRun, WorkerEnd> {
    teller.step("cuDevicePrimaryCtxRetain");
    let context = device.context()?;
    check(device, &context, teller)
}

/// For a worker that may be without its GPU only because others' nodes were kept from it.
pub(super) fn again_with_all_nodes(end: WorkerEnd) -> Then {
    Then::AgainWithAllNodes(match end {
        WorkerEnd::CudaError { call, code, name } => format!("{call} answered {name} ({code})"),
        WorkerEnd::Exited { stderr, .. } => stderr,
        other => format!("{other:?}"),
    })
}

/// The driver, ready to be asked for devices; it stays loaded as long as the process lives.
fn started_cuda(teller: &Teller) -> Result<&'static CudaLibrary, WorkerEnd> {
    teller.step("dlopen of libcuda.so.1");
    let cuda = CudaLibrary::load().map_err(exited)?;
    teller.step("cuInit");
    match cuda.initialize()? {
        0 => Ok(Box::leak(Box::new(cuda))),
        code => Err(WorkerEnd::CudaError {
            call: "cuInit".to_owned(),
            code,
            name: cuda.result_name(code),
        }),
    }
}

/// Runs the kernel and compares every word that it wrote.
pub(super) fn check(
    device: &Device<'_>,
    context: &Context<'_>,
    teller: &Teller,
) -> Result<KernelRun, WorkerEnd> {
    let blocks = device.multiprocessors()? * BLOCKS_PER_MULTIPROCESSOR;
    let count = blocks * CHECK_KERNEL_BLOCK_THREADS;
    // Another seed for each run, so that words which a former run left in memory are wrong.
    let seed = seed();
    teller.step(FIRST_USE_OF_CONTEXT);
    let ptx = c_text(PTX).ok_or_else(|| exited("the embedded PTX holds a NUL".to_owned()))?;
    let kernel =
        c_text(KERNEL).ok_or_else(|| exited("the kernel's name holds a NUL".to_owned()))?;
    let module = context.load_module(&ptx)?;
    teller.step("cuMemAlloc");
    let words = context.words(count as usize, POISON)?;
    teller.step("cuLaunchKernel");
    module.launch_words_kernel(&kernel, blocks, CHECK_KERNEL_BLOCK_THREADS, &words, seed)?;
    // The host computes while the GPU does.
    let expected = expected_words(count, seed);
    teller.step("cuCtxSynchronize");
    context.synchronize()?;
    teller.step("cuMemcpyDtoH");
    let observed = words.copy_to_host()?;
    Ok(compare(&expected, &observed))
}

/// Starts CUDA and finds the GPU or MIG device with this UUID.
pub(super) fn device_with(uuid: &str, teller: &Teller) -> Result<Device<'static>, WorkerEnd> {
    let mut seen = Vec::new();
    for device in started_cuda(teller)?.devices()? {
        let its_uuid = device.uuid()?;
        // A driver may spell a MIG device's UUID with either prefix; the rest is what identifies it.
        if its_uuid[4..] == uuid[4.min(uuid.len())..] {
            return Ok(device);
        }
        seen.push(its_uuid);
    }
    Err(exited(format!(
        "CUDA does not show GPU {uuid}, it shows {}",
        if seen.is_empty() {
            "none".to_owned()
        } else {
            seen.join(", ")
        }
    )))
}

fn exited(stderr: String) -> WorkerEnd {
    WorkerEnd::Exited { status: 1, stderr }
}

fn seed() -> u32 {
    let since_epoch = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    since_epoch.subsec_nanos() ^ std::process::id().rotate_left(16)
}

/// The host's own words, by as many threads as there are processors, since there are some 100,000 to a million.
fn expected_words(count: u32, seed: u32) -> Vec<u32> {
    let threads = std::thread::available_parallelism().map_or(1, |it| it.get().min(4));
    let mut words = vec![0; count as usize];
    let part = words.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        for (number, words) in words.chunks_mut(part).enumerate() {
            scope.spawn(move || {
                for (index, word) in (number * part..).zip(words) {
                    let index = u32::try_from(index).unwrap_or(u32::MAX);
                    *word = check_kernel_expected(index, seed);
                }
            });
        }
    });
    words
}

fn compare(expected: &[u32], observed: &[u32]) -> KernelRun {
    let mut mismatches = 0;
    let mut examples = Vec::new();
    for (index, (expected, observed)) in expected.iter().zip(observed).enumerate() {
        if expected == observed {
            continue;
        }
        mismatches += 1;
        if examples.len() < EXAMPLES_MAXIMUM {
            examples.push(ValueMismatch {
                index: index as u64,
                expected: format!("{expected:#010x}"),
                observed: format!("{observed:#010x}"),
            });
        }
    }
    KernelRun {
        end: WorkerEnd::Finished,
        values_compared: expected.len().min(observed.len()) as u64,
        mismatches,
        examples,
        wall_ms: 0.0,
    }
}

impl From<CudaFailure> for WorkerEnd {
    fn from(failure: CudaFailure) -> Self {
        match failure {
            CudaFailure::Status { call, code, name } => Self::CudaError {
                call: call.to_owned(),
                code,
                name,
            },
            CudaFailure::MissingFunction { .. } => exited(failure.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{CudaResult, MigDevice, MigMode};

    #[test]
    fn every_wrong_word_is_counted_and_the_first_are_shown() {
        let expected = expected_words(4096, 9);
        let mut observed = expected.clone();
        assert_eq!(compare(&expected, &observed).mismatches, 0);
        observed[4095] ^= 1;
        for word in &mut observed[100..120] {
            *word = POISON;
        }
        let run = compare(&expected, &observed);
        assert_eq!(
            (run.values_compared, run.mismatches, run.examples.len()),
            (4096, 21, 8)
        );
        assert_eq!(run.examples[0].index, 100);
        assert_eq!(run.examples[0].observed, "0xdeadbeef");
    }

    #[test]
    fn threads_compute_the_same_words_as_one() {
        let words = expected_words(1000, 3);
        assert!((0..1000).all(|index| words[index as usize] == check_kernel_expected(index, 3)));
    }

    #[test]
    fn a_gpu_in_mig_mode_is_worked_through_its_first_device() {
        let mut gpu = GpuFacts::default();
        assert_eq!(device_to_use(&gpu, "GPU-a"), Ok("GPU-a"));
        gpu.mig = Reading::Value(MigMode {
            current: true,
            pending: true,
        });
        assert!(device_to_use(&gpu, "GPU-a").is_err());
        gpu.mig_devices = Reading::Value(vec![MigDevice {
            uuid: "MIG-b".to_owned(),
            ..MigDevice::default()
        }]);
        assert_eq!(device_to_use(&gpu, "GPU-a"), Ok("MIG-b"));
    }

    #[test]
    fn without_cuda_every_gpu_says_why() {
        let mut facts = Facts {
            gpus: vec![GpuFacts {
                uuid: Reading::Value("GPU-a".to_owned()),
                ..GpuFacts::default()
            }],
            ..Facts::default()
        };
        facts.cuda.library = Reading::Value("/usr/lib64/libcuda.so.1".to_owned());
        facts.cuda.init = Reading::Value(CudaResult {
            code: 802,
            name: "CUDA_ERROR_SYSTEM_NOT_READY".to_owned(),
        });
        let runs = run_on_all_gpus(
            &ProbeOptions::default(),
            &Interrupt::default(),
            None,
            &facts,
        );
        assert_eq!(
            runs["GPU-a"],
            Reading::NotRead(
                "CUDA does not initialise: cuInit answered CUDA_ERROR_SYSTEM_NOT_READY (802)"
                    .to_owned()
            )
        );
    }
}
