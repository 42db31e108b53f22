//! The check kernel on every GPU: a small embedded PTX program whose every result word is compared
//! with the host's own.
//!
//! It needs nothing on the machine but the driver. Each GPU has a process of its own, to which
//! `CUDA_VISIBLE_DEVICES=<UUID>` shows that GPU alone: no number crosses from NVML to CUDA, and no
//! other GPU has to be initialised. On a GPU in MIG mode the kernel runs on its first MIG device,
//! which stands for the GPU.

use std::collections::BTreeMap;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use super::SessionOptions;
use super::devices::device_to_use;
use super::standby::Standby;
use super::worked_gpus::cuda_does_not_work;
use super::workload_process::{Follower, RunFollower, WorkloadProcess, start_of};
use crate::interrupt::Interrupt;
use crate::plan::MemoryShare;
use crate::probe::ProbeOptions;
use crate::worker::listener::{AfterDone, OnInterrupt, Reported, Terms, TimeLimit};
use crate::worker::protocol::Message;
use crate::workload::check::{CheckTask, DETAIL};
use crate::workload::contention::busy_if_others_have_it;
use crate::workload::{Assignment, OnForeignProcess, Task};
use validator_core::facts::{
    Facts, GpuFacts, KernelRun, Reading, RequestedWork, WorkerEnd, WorkloadRun,
};
use validator_core::gpu_names::is_named;
use validator_core::queries::is_hidden;
use validator_core::worker_id::WorkerId;

/// GPUs at a time; more processes than this compete for the host's memory bandwidth and locks.
const WORKERS_MAXIMUM: usize = 16;

/// Runs the kernel on every GPU of `facts` that may be worked, and notes the reason for each that
/// could not run it. What stands by for a burn runs it itself. GPUs that the request leaves out
/// have no entry.
pub(crate) fn run_on_all_gpus(
    session: &SessionOptions,
    interrupt: &Interrupt,
    standby: Option<&Standby>,
    facts: &Facts,
) -> BTreeMap<String, Reading<KernelRun>> {
    let options = &session.probe;
    let mut runs = BTreeMap::new();
    let may_be_worked = |gpu: &GpuFacts| {
        let requested = session.standby.as_ref();
        let index = facts.gpus.iter().position(|it| std::ptr::eq(it, gpu));
        let is_named = |name: &String| is_named(gpu, index, name);
        (session.gpus.is_empty() || session.gpus.iter().any(is_named))
            && requested.is_none_or(|it| it.is_for((gpu, index), || is_hidden(gpu, facts)))
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
        let workers: Vec<(&String, CheckWorker)> = some
            .iter()
            .map(|(gpu, uuid)| {
                let ready = standby.and_then(|it| it.kernel(uuid));
                let start = || CheckWorker::start(options, interrupt, gpu, uuid);
                (*uuid, ready.map_or_else(start, CheckWorker::StandsBy))
            })
            .collect();
        runs.extend(
            workers
                .into_iter()
                .map(|(uuid, it)| (uuid.clone(), it.join())),
        );
    }
    runs
}

/// What runs the kernel on one GPU.
enum CheckWorker {
    /// A worker that stands by for the burn.
    StandsBy(Receiver<Reading<KernelRun>>),
    Own(WorkloadProcess<Reading<KernelRun>>),
    /// None, for this reason.
    Missing(String),
}

impl CheckWorker {
    fn start(options: &ProbeOptions, interrupt: &Interrupt, gpu: &GpuFacts, uuid: &str) -> Self {
        start_on(options, interrupt, gpu, uuid).map_or_else(Self::Missing, Self::Own)
    }

    fn join(self) -> Reading<KernelRun> {
        let run = match self {
            Self::StandsBy(result) => result.recv().ok(),
            Self::Own(process) => process.join(),
            Self::Missing(reason) => Some(Reading::NotRead(reason)),
        };
        run.unwrap_or_else(|| Reading::NotRead("the thread of this GPU panicked".to_owned()))
    }
}

fn start_on(
    options: &ProbeOptions,
    interrupt: &Interrupt,
    gpu: &GpuFacts,
    uuid: &str,
) -> Result<WorkloadProcess<Reading<KernelRun>>, String> {
    if let Some(lost) = &gpu.lost {
        return Err(format!("the GPU is lost: {lost}"));
    }
    let limit = options.deadlines.cuda_kernel;
    let task = Task::Check(CheckTask::default());
    let assignment = Assignment {
        id: WorkerId::new(task.name(), &[uuid], 0),
        devices: vec![device_to_use(gpu, uuid)?.to_owned()],
        memory: MemoryShare::Percent(100.0),
        requested: RequestedWork {
            seconds: limit.as_secs_f64(),
            passes: Some(1),
        },
        on_foreign_process: OnForeignProcess::ReadOnRefusal,
        stands_by: false,
        task,
    };
    let terms = Terms {
        time_limit: TimeLimit::Total(limit),
        after_done: AfterDone::ExitWell,
        on_interrupt: OnInterrupt::Kill,
    };
    let follower = CheckFollower {
        run: RunFollower::of(&assignment),
        gpu: gpu.clone(),
        started: Instant::now(),
    };
    let start = start_of(&assignment, gpu, options, terms)?;
    WorkloadProcess::start(start, follower, interrupt)
}

struct CheckFollower {
    run: RunFollower,
    gpu: GpuFacts,
    started: Instant,
}

impl Follower for CheckFollower {
    type Run = Reading<KernelRun>;

    fn started(&mut self, _pid: u32, at: Instant) {
        self.started = at;
    }

    fn hear(&mut self, _message: &Message) {}

    fn conclude(self, reported: Reported) -> Reading<KernelRun> {
        let wall_ms = self.started.elapsed().as_secs_f64() * 1000.0;
        let kernel = kernel_run(self.run.conclude(reported));
        kernel.map(|kernel| KernelRun {
            end: busy_if_others_have_it(kernel.end, &self.gpu),
            wall_ms,
            ..kernel
        })
    }
}

/// The kernel's result in the report of its worker.
fn kernel_run(mut run: WorkloadRun) -> Reading<KernelRun> {
    let end = match run.end {
        Reading::Value(end) => end,
        Reading::NotRead(reason) => return Reading::NotRead(reason),
        Reading::NotSupported => return Reading::NotSupported,
    };
    if end != WorkerEnd::Finished {
        return Reading::Value(KernelRun::without_result(end));
    }
    let kernel = run.detail.remove(DETAIL);
    let kernel = kernel.and_then(|it| serde_json::from_value(it).ok());
    kernel.map_or_else(
        || Reading::NotRead("the worker ended without a result".to_owned()),
        Reading::Value,
    )
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
                "CUDA does not initialise: cuInit returned CUDA_ERROR_SYSTEM_NOT_READY (802)"
                    .to_owned()
            )
        );
    }

    #[test]
    fn a_result_counts_only_where_its_worker_finished() {
        let result = KernelRun {
            values_compared: 4096,
            ..KernelRun::without_result(WorkerEnd::Finished)
        };
        let run = |end: Reading<WorkerEnd>| {
            let id = WorkerId::new("check", &["GPU-a"], 0);
            let mut run = WorkloadRun::empty(id, RequestedWork::default(), end);
            let detail = serde_json::to_value(&result).expect("JSON");
            run.detail.insert(DETAIL.to_owned(), detail);
            run
        };
        let finished = || Reading::Value(WorkerEnd::Finished);
        assert_eq!(kernel_run(run(finished())), Reading::Value(result.clone()));
        let killed = WorkerEnd::Killed { signal: 11 };
        let lost = KernelRun::without_result(killed.clone());
        assert_eq!(
            kernel_run(run(Reading::Value(killed))),
            Reading::Value(lost)
        );
        let interrupted = "the run was interrupted".to_owned();
        let not_read = kernel_run(run(Reading::NotRead(interrupted.clone())));
        assert_eq!(not_read, Reading::NotRead(interrupted));
        let mut without = run(finished());
        without.detail.clear();
        assert!(matches!(kernel_run(without), Reading::NotRead(_)));
    }
}
