//! Reads the machine and fills the facts; nothing else does.
//!
//! A probe never fails: what could not be read is recorded as not read, with the reason. The driver
//! is queried in child processes only (see [`crate::worker`]), so that a call which hangs or
//! crashes costs its own reading and no more.

pub(crate) mod cuda;
pub(crate) mod environment;
pub(crate) mod host;
pub(crate) mod https;
pub(crate) mod json;
pub(crate) mod kubernetes;
pub(crate) mod nvml;
mod options;

pub(crate) use cuda::run_worker as run_cuda_worker;
pub(crate) use nvml::{
    Condition, LOOK_CLOSELY, NO_WORKERS, NvmlWorker, Part, PowerKind, PowerMeter, SensorMessage,
    UsersMessage, WORKERS, WatchMessage, run_sensors_worker, run_users_worker, run_watch_worker,
    users_of, watch_processes_of_others, with_power_meter,
};
pub(crate) use options::{Deadlines, ProbeOptions};

use validator_core::facts::{
    Facts, GpuFacts, KernelLog, KernelLogEnd, MachineIdentity, NodeState, Reading,
};

use crate::interrupt::Interrupt;
use crate::threads::spawn_scoped;
use crate::timed::timed;
use nvml::NvmlOutcome;

/// The GPUs' present state, as NVML reports it; nothing else is queried.
pub(crate) fn gpus(options: &ProbeOptions, interrupt: &Interrupt) -> Facts {
    let mut facts = Facts::default();
    let (outcome, milliseconds) = timed(|| nvml::probe(options, interrupt, Part::All, &|_| {}));
    add_nvml(&mut facts, Ok((outcome, milliseconds)));
    facts
}

/// Which machine this is, and which boot of it.
pub(crate) fn machine_identity() -> Option<MachineIdentity> {
    host::identity()
}

/// The part of the node's state that load can change, as it is now. InfoROM checksums take 70 ms a
/// GPU and are left out. Without `nvml_works` the GPUs are not attempted, so that the first reading
/// stands.
pub(crate) fn state(options: &ProbeOptions, interrupt: &Interrupt, nvml_works: bool) -> NodeState {
    std::thread::scope(|scope| {
        let read_gpus = || nvml::probe(options, interrupt, Part::AllButInforom, &|_| {});
        let gpus = nvml_works.then(|| spawn_scoped(scope, read_gpus));
        let kernel_log = host::kernel_log_of(options, interrupt);
        let pci_devices = host::pci_devices_of(options);
        let (gpu_count, gpus) = gpus.map_or_else(Default::default, |gpus| {
            gpus.join().map_or_else(
                |_| {
                    let reason = "the thread that reads NVML panicked".to_owned();
                    (Reading::default(), Reading::NotRead(reason))
                },
                gpus_now,
            )
        });
        NodeState {
            gpu_count,
            gpus,
            pci_devices,
            kernel_log,
            ..NodeState::default()
        }
    })
}

/// How many GPUs NVML counts and lists now.
fn gpus_now(outcome: NvmlOutcome) -> (Reading<u32>, Reading<Vec<GpuFacts>>) {
    let reason = match outcome.nvml.initialized {
        Reading::Value(true) => {
            let mut gpus = outcome.gpus;
            for gpu in &mut gpus {
                // Not attempted, so that the first reading stands.
                gpu.inforom_valid = Reading::default();
            }
            return (outcome.nvml.gpu_count, Reading::Value(gpus));
        }
        Reading::NotRead(reason) => reason,
        Reading::Value(false) | Reading::NotSupported => {
            "NVML did not initialize after the load".to_owned()
        }
    };
    (Reading::default(), Reading::NotRead(reason))
}

/// The kernel log as it is now.
pub(crate) fn kernel_log(options: &ProbeOptions, interrupt: &Interrupt) -> Reading<KernelLog> {
    host::kernel_log_of(options, interrupt)
}

/// What the kernel log gained since it ended at `end`; not read if some of that was written over.
pub(crate) fn kernel_log_since(
    end: KernelLogEnd,
    options: &ProbeOptions,
    interrupt: &Interrupt,
) -> Reading<KernelLog> {
    host::kernel_log_since(end, options, interrupt)
}

pub(crate) fn add_nvml(facts: &mut Facts, result: std::thread::Result<(NvmlOutcome, f64)>) {
    match result {
        Ok((outcome, milliseconds)) => {
            facts.nvml = outcome.nvml;
            facts.gpus = outcome.gpus;
            facts.simulated = facts.simulated.take().or(outcome.simulated);
            facts.timings_ms.insert("nvml".to_owned(), milliseconds);
        }
        Err(_) => facts
            .nvml
            .probe_trouble
            .push("the thread of the NVML probe panicked".to_owned()),
    }
}

pub(crate) fn add_cuda(facts: &mut Facts, result: std::thread::Result<(cuda::CudaOutcome, f64)>) {
    match result {
        Ok((outcome, milliseconds)) => outcome.add_to(milliseconds, facts),
        Err(_) => facts
            .cuda
            .probe_trouble
            .push("the thread of the CUDA probe panicked".to_owned()),
    }
}
