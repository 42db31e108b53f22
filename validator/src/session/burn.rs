//! The burn: every GPU multiplies matrices at its power limit, and every element of every product
//! is compared.
//!
//! Each GPU has a worker process of its own, to which `CUDA_VISIBLE_DEVICES=<UUID>` shows that GPU
//! alone; one more process reads NVML's sensors meanwhile. Whatever happens to one of them, the
//! others go on.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use super::burn_process::{BurnProcess, assignment_for, burn_id};
use super::sensors::Sensors;
use super::standby::Standby;
use super::worked_gpus::{is_worked, why_not_worked};
use crate::interrupt::Interrupt;
use crate::plan::{BurnOptions, BurnProgress};
use crate::probe::ProbeOptions;
use crate::worker::process::worker_program;
use validator_core::facts::{BurnPlan, BurnRun, Facts, GpuFacts, KernelRun, Reading, XidOfOthers};
use validator_core::kernel_log_events::{KernelEvent, events};
use validator_core::worker_id::WorkerId;

const PROGRESS_PERIOD: Duration = Duration::from_millis(100);

/// Burns the requested GPUs, all in parallel, and puts the results into `facts.load`.
///
/// Needs the facts of stage gpu, and adds those of the deferred probes that stand by. A GPU that others
/// use is not burned unless requested. Workers in standby get the order to begin; for GPUs without
/// one they are started.
pub(crate) fn burn(
    options: &BurnOptions,
    probe: &ProbeOptions,
    standby: &Standby,
    facts: &mut Facts,
    interrupt: &Interrupt,
    on_progress: &mut dyn FnMut(&[BurnProgress]),
) {
    facts.load.burn_plan = Some(BurnPlan::On {
        duration_s: options.duration.as_secs_f64(),
        precisions: options.precisions.clone(),
        gpus: options.gpus.clone(),
    });
    let asked: Vec<(String, GpuFacts)> = facts
        .gpus
        .iter()
        .filter_map(|gpu| Some((gpu.uuid.value()?.clone(), gpu.clone())))
        .filter(|(uuid, _)| is_worked(uuid, options))
        .collect();
    let no_cuda = standby.no_cuda(facts);
    let refusals: Vec<Option<Reading<BurnRun>>> = asked
        .iter()
        .map(|(uuid, gpu)| {
            let kernel = facts.load.cuda_kernel.get(uuid);
            refusal(gpu, options, no_cuda.as_deref(), kernel)
        })
        .collect();
    let uuids: Vec<String> = asked
        .iter()
        .zip(&refusals)
        .filter(|(_, refusal)| refusal.is_none())
        .map(|((uuid, _), _)| uuid.clone())
        .collect();
    let sensors = (!uuids.is_empty()).then(|| {
        let ready = standby.take_sensors(&uuids);
        ready.unwrap_or_else(|| Sensors::start(probe, uuids.clone(), &standby.state))
    });
    let mut workers = BTreeMap::new();
    for ((uuid, gpu), refusal) in asked.iter().zip(refusals) {
        let id = burn_id(uuid);
        let worker = match refusal {
            Some(refusal) => Err(refusal),
            None => worker_of((&id, uuid, gpu), options, probe, standby, interrupt)
                .map_err(Reading::NotRead),
        };
        match worker {
            Ok(worker) => {
                workers.insert(id, (uuid, worker));
            }
            Err(reading) => {
                facts.load.burn.insert(uuid.clone(), reading);
            }
        }
    }
    // Workers that no burn took would hold memory until the end.
    standby.dismiss();
    if let Some(sensors) = &sensors {
        sensors.await_first_look(interrupt);
    }
    for (id, (_, worker)) in &mut workers {
        standby.state.change(id, |it| {
            it.burns = true;
            it.times.go = Some(Instant::now());
        });
        worker.go();
    }
    while !workers.values().all(|(_, it)| it.has_ended()) {
        on_progress(&standby.state.progress(options.duration));
        std::thread::sleep(PROGRESS_PERIOD);
    }
    for (id, (uuid, worker)) in workers {
        let run = match worker.join() {
            Reading::Value(run) => Reading::Value(BurnRun {
                startup: standby.state.startup(&id, standby.began),
                ..run
            }),
            other => other,
        };
        facts.load.burn.insert(uuid.clone(), run);
    }
    if let Some(sensors) = sensors {
        facts.load.sensors = sensors.finish();
    }
    standby.add_deferred_probes(facts, interrupt);
    for uuid in &options.gpus {
        facts
            .load
            .burn
            .entry(uuid.clone())
            .or_insert_with(|| Reading::NotRead("no GPU with this UUID was found".to_owned()));
    }
    add_xids(probe, interrupt, facts);
    facts.interrupted = facts.interrupted.take().or(interrupt.reason());
}

/// Why a GPU is not burned at all.
fn refusal(
    gpu: &GpuFacts,
    options: &BurnOptions,
    no_cuda: Option<&str>,
    kernel: Option<&Reading<KernelRun>>,
) -> Option<Reading<BurnRun>> {
    let refusal = why_not_worked(gpu, options, no_cuda, kernel)?;
    Some(match refusal {
        Reading::Value(end) => Reading::Value(BurnRun::empty(end)),
        Reading::NotRead(reason) => Reading::NotRead(reason),
        Reading::NotSupported => Reading::NotSupported,
    })
}

/// The worker that stands by for this GPU, or one that is started now.
fn worker_of(
    (id, uuid, gpu): (&WorkerId, &str, &GpuFacts),
    options: &BurnOptions,
    probe: &ProbeOptions,
    standby: &Standby,
    interrupt: &Interrupt,
) -> Result<BurnProcess, String> {
    if let Some(worker) = standby.take_worker(id) {
        return Ok(worker);
    }
    let assignment = assignment_for(options, (uuid, gpu), standby.seed, false)?;
    BurnProcess::start(&assignment, probe, gpu, interrupt, &standby.state)
}

/// Xids that the kernel log gained since the host's stage read it, by the GPU that they name.
fn add_xids(probe: &ProbeOptions, interrupt: &Interrupt, facts: &mut Facts) {
    let before = match &facts.host.kernel_log {
        Reading::Value(log) => Ok(log.end()),
        Reading::NotRead(reason) => Err(reason.clone()),
        Reading::NotSupported => Err("there is no kernel log".to_owned()),
    };
    let gained =
        before.and_then(
            |end| match crate::probe::kernel_log_since(end, probe, interrupt) {
                Reading::Value(log) => Ok(log),
                Reading::NotRead(reason) => Err(reason),
                Reading::NotSupported => Err("there is no kernel log".to_owned()),
            },
        );
    let log = match gained {
        Ok(log) => log,
        // Who stops a run does not wait for its log, and one stop is one finding.
        Err(_) if interrupt.signal().is_some() => return,
        Err(reason) => {
            for log in facts.load.sensors.values_mut() {
                log.xids_trouble = Some(reason.clone());
            }
            return;
        }
    };
    let worker = kernels_name(&worker_program(probe.worker_program.as_ref()));
    for timed in events(&log.records) {
        let KernelEvent::Xid(xid) = &timed.event else {
            continue;
        };
        let gpu = facts
            .gpus
            .iter()
            .find(|gpu| gpu.pci_address.value().map(String::as_str) == timed.event.pci_address());
        if let Some(uuid) = gpu.and_then(|gpu| gpu.uuid.value()) {
            // An Xid counts although the sensors were not read.
            let log = facts.load.sensors.entry(uuid.clone()).or_default();
            match xid.process.as_ref().filter(|it| **it != worker) {
                Some(process) => log.xids_of_others.push(XidOfOthers {
                    number: xid.number,
                    process: process.clone(),
                    pid: xid.pid,
                }),
                None => log.xids.push(xid.number),
            }
        }
    }
}

/// What the kernel calls a process of this program, in every namespace.
// Source: proc_pid_comm(5): the file's name, cut to 15 bytes.
fn kernels_name(program: &Path) -> String {
    let name = program.file_name().unwrap_or_default().as_encoded_bytes();
    String::from_utf8_lossy(name.get(..15).unwrap_or(name)).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use validator_core::facts::WorkerEnd;

    #[test]
    fn the_kernel_cuts_names() {
        let own = std::env::current_exe().expect("this test's program");
        let told = std::fs::read_to_string("/proc/self/comm").expect("proc");
        // The test runner's threads have names of their own, its first one has the program's.
        let first = std::fs::read_to_string(format!("/proc/{}/comm", std::process::id()));
        assert_eq!(first.expect("proc"), told);
        assert_eq!(kernels_name(&own), told.trim_end());
        assert_eq!(
            kernels_name(Path::new("/usr/bin/gpu-validator")),
            "gpu-validator"
        );
    }

    #[test]
    fn a_gpu_of_others_is_busy_unless_it_is_shared() {
        let mut gpu = GpuFacts {
            processes: Reading::Value(vec![validator_core::facts::GpuProcess::default()]),
            ..GpuFacts::default()
        };
        let mut options = BurnOptions::lasting(Duration::from_secs(1));
        let busy = refusal(&gpu, &options, None, None);
        assert!(matches!(
            busy,
            Some(Reading::Value(BurnRun {
                end: WorkerEnd::Busy(_),
                ..
            }))
        ));
        options.share = true;
        assert_eq!(refusal(&gpu, &options, None, None), None);
        gpu.lost = Some("nvmlDeviceGetUUID returned NVML_ERROR_GPU_IS_LOST".to_owned());
        assert!(matches!(
            refusal(&gpu, &options, None, None),
            Some(Reading::NotRead(_))
        ));
    }

    #[test]
    fn a_gpu_on_which_the_check_kernel_did_not_end_well_is_not_burned() {
        let options = BurnOptions::lasting(Duration::from_secs(1));
        let kernel = |end| {
            Reading::Value(KernelRun {
                end,
                values_compared: 0,
                mismatches: 0,
                examples: Vec::new(),
                wall_ms: 1.0,
            })
        };
        let gpu = GpuFacts::default();
        let refused = |kernel: &Reading<KernelRun>| refusal(&gpu, &options, None, Some(kernel));
        assert_eq!(refused(&kernel(WorkerEnd::Finished)), None);
        for kernel in [
            kernel(WorkerEnd::Killed { signal: 9 }),
            Reading::NotRead("no answer".to_owned()),
        ] {
            assert!(matches!(refused(&kernel), Some(Reading::NotRead(_))));
        }
    }
}
