//! The CUDA driver library, queried by a child process: what any CUDA program on this machine would
//! see.
//!
//! The child inherits the environment, `CUDA_VISIBLE_DEVICES` and `LD_LIBRARY_PATH` included, since
//! these decide what programs see.

use std::ffi::OsString;
use std::path::Path;

use serde_json::Value;

use super::ProbeOptions;
use super::host::Sysroot;
use crate::cuda::{CudaFailure, CudaLibrary, Device};
use crate::interrupt::Interrupt;
use crate::worker::Nodes;
use crate::worker::device_isolation::gpu_nodes;
use crate::worker::listener::{
    AfterDone, OnInterrupt, Orders, ReportEnd, Terms, TimeLimit, listen,
};
use crate::worker::process::{Variables, WorkerProcess, worker_program};
use crate::worker::protocol::Reporter;
use validator_core::facts::{ComputeCapability, CudaDevice, CudaFacts, CudaResult, Facts, Reading};
use validator_core::level::Level;

/// The library's facts, and the scenario if it is a simulated one.
#[derive(Debug, Default)]
pub(crate) struct CudaOutcome {
    pub(crate) cuda: CudaFacts,
    simulated: Option<String>,
}

impl CudaOutcome {
    /// Puts it into the facts, with the time that it took.
    pub(crate) fn add_to(self, milliseconds: f64, facts: &mut Facts) {
        facts.cuda = self.cuda;
        facts.simulated = facts.simulated.take().or(self.simulated);
        facts.timings_ms.insert("cuda".to_owned(), milliseconds);
    }
}

pub(crate) fn probe(options: &ProbeOptions, interrupt: &Interrupt) -> CudaOutcome {
    if options.level <= Level::Quick
        && let Some(minor) = first_of_several(options)
        && !variable_is_set()
    {
        let node = Nodes::of(minor, options.sysroot.as_deref());
        let first = [(VISIBLE_DEVICES, Some("0".to_owned()))];
        let mut outcome = ask(options, interrupt, node, &first);
        // CUDA's first GPU may be one that it cannot use, in MIG mode without an instance for
        // example, and another be well. A worker that hung or died is not started again.
        let failed = outcome.cuda.init.value().is_some_and(|init| init.code != 0);
        if !failed {
            outcome.cuda.first_gpu_only = true;
            return outcome;
        }
    }
    ask(options, interrupt, Vec::new(), &[])
}

fn ask(
    options: &ProbeOptions,
    interrupt: &Interrupt,
    node: Vec<OsString>,
    environment: &Variables<'_>,
) -> CudaOutcome {
    let program = worker_program(options.worker_program.as_ref());
    let mut arguments = vec!["worker".into(), "cuda".into()];
    arguments.extend(node);
    let worker = match WorkerProcess::start(&program, &arguments, environment) {
        Ok(worker) => worker,
        Err(error) => {
            let reason = format!("cannot start {}: {error}", program.display());
            return nothing_read(&reason);
        }
    };
    let terms = Terms {
        time_limit: TimeLimit::Total(options.deadlines.cuda),
        after_done: AfterDone::Leave,
        on_interrupt: OnInterrupt::Kill,
    };
    let mut told = listen(worker, terms, &Orders::default(), interrupt, &mut |_| {});
    let simulated = told
        .fields
        .remove("simulated")
        .and_then(|scenario| serde_json::from_value(scenario).ok());
    let mut outcome = nothing_read(&told.reason());
    outcome.simulated = simulated;
    for (name, value) in std::mem::take(&mut told.fields) {
        take_field(&mut outcome.cuda, &name, value);
    }
    if let Reading::Value(path) = &mut outcome.cuda.library {
        *path = Sysroot::new(options.sysroot.clone()).inside(path);
    }
    if told.end != ReportEnd::Finished {
        outcome.cuda.probe_trouble.push(told.reason());
    }
    outcome
}

const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";

/// The variable decides what programs see, also when it is empty.
fn variable_is_set() -> bool {
    std::env::var_os(VISIBLE_DEVICES).is_some()
}

/// The lowest minor number, where there are several GPUs: by their device nodes, which cost nothing
/// to count.
fn first_of_several(options: &ProbeOptions) -> Option<u32> {
    let root = options.sysroot.as_deref().unwrap_or(Path::new("/"));
    let mut minors = gpu_nodes(&root.join("dev")).into_keys();
    let first = minors.next()?;
    minors.next().map(|_| first)
}

pub(crate) fn nothing_read(reason: &str) -> CudaOutcome {
    let reason = reason.to_owned();
    CudaOutcome {
        cuda: CudaFacts {
            library: Reading::NotRead(reason.clone()),
            loaded_by_path: None,
            unloadable: None,
            init: Reading::NotRead(reason.clone()),
            driver_version: Reading::NotRead(reason.clone()),
            devices: Reading::NotRead(reason),
            first_gpu_only: false,
            probe_trouble: Vec::new(),
        },
        simulated: None,
    }
}

fn take_field(facts: &mut CudaFacts, name: &str, value: Value) {
    let taken = match name {
        "library" => serde_json::from_value(value).map(|it| facts.library = it),
        "loaded_by_path" => serde_json::from_value(value).map(|it| facts.loaded_by_path = it),
        "unloadable" => serde_json::from_value(value).map(|it| facts.unloadable = it),
        "init" => serde_json::from_value(value).map(|it| facts.init = it),
        "driver_version" => serde_json::from_value(value).map(|it| facts.driver_version = it),
        "devices" => serde_json::from_value(value).map(|it| facts.devices = it),
        _ => Ok(()),
    };
    if let Err(error) = taken {
        facts
            .probe_trouble
            .push(format!("field {name} cannot be used: {error}"));
    }
}

/// `gpu-validator worker cuda`.
pub(crate) fn run_worker() {
    let reporter = Reporter::new();
    reporter.step("dlopen of libcuda.so.1");
    match CudaLibrary::load() {
        Ok(cuda) => read(&cuda, &reporter),
        Err(error) => {
            let reason = format!("libcuda does not load: {error}");
            reporter.field("library", &Reading::<String>::NotRead(error));
            reporter.field("init", &Reading::<CudaResult>::NotRead(reason.clone()));
            reporter.field("driver_version", &Reading::<u32>::NotRead(reason.clone()));
            reporter.field("devices", &Reading::<Vec<CudaDevice>>::NotRead(reason));
        }
    }
    reporter.done();
}

fn read(cuda: &CudaLibrary, reporter: &Reporter) {
    let path = CudaLibrary::path().unwrap_or_else(|| "libcuda.so.1".to_owned());
    reporter.field("library", &Reading::Value(path));
    reporter.field("loaded_by_path", &cuda.loaded_by_path());
    reporter.field("unloadable", &cuda.unloadable());
    if let Some(scenario) = cuda.simulator_scenario() {
        reporter.field("simulated", &scenario);
    }
    reporter.step("cuDriverGetVersion");
    reporter.field("driver_version", &reading(cuda.driver_version()));
    reporter.step("cuInit");
    let init = cuda.initialize().map(|code| CudaResult {
        code,
        name: cuda.result_name(code),
    });
    let devices = match &init {
        Ok(result) if result.code == 0 => {
            reporter.field("init", &Reading::Value(result.clone()));
            reporter.step("reading the devices");
            reading(devices(cuda))
        }
        Ok(result) => {
            Reading::NotRead(format!("cuInit returned {} ({})", result.name, result.code))
        }
        Err(failure) => Reading::NotRead(failure.to_string()),
    };
    reporter.field("init", &reading(init));
    reporter.field("devices", &devices);
}

fn devices(cuda: &CudaLibrary) -> Result<Vec<CudaDevice>, CudaFailure> {
    cuda.devices()?.iter().map(device).collect()
}

fn device(device: &Device<'_>) -> Result<CudaDevice, CudaFailure> {
    let (major, minor) = device.compute_capability()?;
    Ok(CudaDevice {
        uuid: device.uuid()?,
        name: device.name()?,
        pci_address: device.pci_address().ok(),
        compute_capability: ComputeCapability { major, minor },
        total_memory_bytes: device.total_memory_bytes()?,
        multiprocessors: device.multiprocessors()?,
    })
}

fn reading<T>(result: Result<T, CudaFailure>) -> Reading<T> {
    result.into()
}
