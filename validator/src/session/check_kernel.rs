//! The check kernel on every GPU: a small embedded PTX program whose every result word is compared
//! with the host's own.
//!
//! It needs nothing on the machine but the driver. Each GPU has a process of its own, to which
//! `CUDA_VISIBLE_DEVICES=<UUID>` shows that GPU alone: no number crosses from NVML to CUDA, and no
//! other GPU has to be initialised. On a GPU in MIG mode the kernel runs on its first MIG device,
//! which stands for the GPU.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::{Duration, Instant};

use super::SessionOptions;
use super::devices::{device_to_use, own_node};
use super::standby::Standby;
use crate::interrupt::Interrupt;
use crate::probe::ProbeOptions;
use crate::threads::spawn_scoped;
use crate::worker::device_isolation::cuda_environment;
use crate::worker::listener::{
    AfterDone, OnInterrupt, Orders, ReportEnd, Reported, Terms, TimeLimit, listen,
};
use crate::worker::process::{WorkerProcess, worker_program};
use crate::workload::contention::busy_if_others_have_it;
use validator_core::facts::{Facts, GpuFacts, KernelRun, Reading};
use validator_core::queries::is_hidden;

/// GPUs at a time; more processes than this compete for the host's memory bandwidth and locks.
const WORKERS_MAXIMUM: usize = 16;

/// Runs the kernel on every GPU of `facts` that may be worked, and says for each that it could not
/// why. What stands by for a burn runs it itself. Where somebody asked for a burn and no more, the
/// GPUs that it leaves out are left alone: they have no entry.
pub(crate) fn run_on_all_gpus(
    session: &SessionOptions,
    interrupt: &Interrupt,
    standby: Option<&Standby>,
    facts: &Facts,
) -> BTreeMap<String, Reading<KernelRun>> {
    let options = &session.probe;
    let mut runs = BTreeMap::new();
    let may_be_worked = |gpu: &GpuFacts| {
        let asked_for = session.standby.as_ref();
        let index = facts.gpus.iter().position(|it| std::ptr::eq(it, gpu));
        asked_for.is_none_or(|it| it.is_for((gpu, index), || is_hidden(gpu, facts)))
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
                    (*uuid, spawn_scoped(scope, run))
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

/// Without a driver library that initialises, no GPU can be asked to work. A probe that hung or
/// crashed is no such answer: each GPU is still tried on its own.
pub(crate) fn cuda_does_not_work(facts: &Facts) -> Option<String> {
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
    let terms = Terms {
        time_limit: TimeLimit::Total(options.deadlines.cuda_kernel),
        after_done: AfterDone::ExitWell,
        on_interrupt: OnInterrupt::Kill,
    };
    let told = listen(worker, terms, &Orders::default(), interrupt, &mut |_| {});
    kernel_run(told, gpu, started.elapsed())
}

fn kernel_run(told: Reported, gpu: &GpuFacts, wall: Duration) -> Reading<KernelRun> {
    let wall_ms = wall.as_secs_f64() * 1000.0;
    let without_result = |end| {
        Reading::Value(KernelRun {
            wall_ms,
            ..KernelRun::without_result(end)
        })
    };
    let Reported {
        mut fields, end, ..
    } = told;
    match end {
        ReportEnd::Interrupted | ReportEnd::Dismissed => {
            Reading::NotRead("the run was interrupted".to_owned())
        }
        ReportEnd::Ended(end) => without_result(end),
        ReportEnd::Finished => {
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

#[cfg(test)]
mod tests {
    use super::*;
    use validator_core::facts::CudaResult;

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
            &ProbeOptions::default().into(),
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
