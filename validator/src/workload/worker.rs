//! `gpu-validator worker workload`: runs any workload on the GPUs of its assignment, and reports
//! twice a second.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use validator_core::facts::{Reading, RequestedWork, WorkerEnd, WorkloadRun};
use validator_core::worker_id::WorkerId;

use super::allocation;
use super::contention::{NO_ROOM, busy_if_others_came};
use super::foreign_processes::ForeignProcessWatch;
use super::start::{device_with, exited, retry_with_all_nodes};
use super::{Assignment, OnForeignProcess, Prepared, Step, Task, WorkerGpu, Workload};
use crate::cuda::Device;
use crate::worker::device_isolation::Attempt;
use crate::worker::protocol::{GO, RUN, Reporter, STANDING_BY};

/// Interval between two reports; the parent takes a worker for hung after ten of them.
const REPORT_INTERVAL: Duration = Duration::from_millis(500);

/// `gpu-validator worker workload --assignment JSON`. If it `is_alone` it can open no other GPU's
/// device node; the reason for which an attempt to work so failed is `alone_failed`.
pub(crate) fn run_worker(
    assignment: &str,
    is_alone: bool,
    alone_failed: Option<String>,
) -> Attempt {
    let started = Instant::now();
    let reporter = Reporter::new();
    let assignment: Assignment = match serde_json::from_str(assignment) {
        Ok(assignment) => assignment,
        Err(error) => {
            let end = exited(format!("the assignment cannot be read: {error}"));
            let id = WorkerId::new("", &[], 0);
            let run = WorkloadRun::empty(id, RequestedWork::default(), Reading::Value(end));
            return report(&reporter, &run);
        }
    };
    let not_ended = Reading::NotRead("the worker did not end".to_owned());
    let mut run = WorkloadRun::empty(assignment.id.clone(), assignment.requested, not_ended);
    run.notes.extend(alone_failed.map(|reason| {
        format!("CUDA did not start while only this GPU's device node could be opened: {reason}")
    }));
    let devices = match (devices_of(&assignment, &reporter), is_alone) {
        (Err(end), true) => return retry_with_all_nodes(end),
        (devices, _) => devices,
    };
    let gpus = devices.and_then(|it| gpus_of(it, &assignment, &reporter));
    if matches!(assignment.task, Task::Allocation(_)) {
        allocation::note_visible_devices(&assignment.devices, &reporter, &mut run);
    }
    let mut stopped = None;
    let end = gpus.and_then(|gpus| {
        let start = Start {
            started,
            reporter: &reporter,
            stopped: &mut stopped,
        };
        match &assignment.task {
            Task::Check(task) => work(task, &gpus, &assignment, start, &mut run),
            Task::Memory(task) => work(task, &gpus, &assignment, start, &mut run),
            Task::Gemm(task) => work(task, &gpus, &assignment, start, &mut run),
            Task::Burn(task) => work(task, &gpus, &assignment, start, &mut run),
            Task::Reserve(task) => work(task, &gpus, &assignment, start, &mut run),
            Task::Allocation(task) => work(task, &gpus, &assignment, start, &mut run),
        }
    });
    // The contexts are gone, too.
    let stop_ms = |it: Instant| it.elapsed().as_secs_f64() * 1000.0;
    run.measured.stop_ms = stopped.map(stop_ms);
    let has_no_room = run.detail.remove(NO_ROOM).is_some();
    let end = end.unwrap_or_else(|end| {
        // The parent, which knows every process on the GPU, judges what was refused.
        if assignment.on_foreign_process == OnForeignProcess::Ignore {
            return end;
        }
        // NVML lists who uses a GPU and not who uses a MIG device: a burn of one is not busy for
        // processes on its neighbours.
        let uuids = match &assignment.task {
            Task::Burn(_) => &assignment.devices,
            _ => &assignment.id.gpus,
        };
        uuids.iter().fold(end, |end, uuid| {
            busy_if_others_came(end, has_no_room, uuid, &reporter)
        })
    });
    run.end = Reading::Value(end);
    report(&reporter, &run)
}

fn report(reporter: &Reporter, run: &WorkloadRun) -> Attempt {
    reporter.newest(RUN, run);
    reporter.done();
    Attempt::Completed
}

fn devices_of(
    assignment: &Assignment,
    reporter: &Reporter,
) -> Result<Vec<Device<'static>>, WorkerEnd> {
    let devices = assignment.devices.iter();
    devices.map(|it| device_with(it, reporter)).collect()
}

fn gpus_of(
    devices: Vec<Device<'static>>,
    assignment: &Assignment,
    reporter: &Reporter,
) -> Result<Vec<WorkerGpu>, WorkerEnd> {
    let gpus = devices.into_iter().zip(&assignment.id.gpus);
    gpus.map(|(device, uuid)| WorkerGpu::of(uuid, device, reporter))
        .collect()
}

/// What a worker knows before it works.
struct Start<'s> {
    /// When the process began.
    started: Instant,
    reporter: &'s Reporter,
    /// When the last step ended.
    stopped: &'s mut Option<Instant>,
}

/// Prepares, and takes step after step until the work is through, its time is over, SIGTERM or a
/// foreign process comes.
fn work<W: Workload>(
    workload: &W,
    gpus: &[WorkerGpu],
    assignment: &Assignment,
    start: Start<'_>,
    run: &mut WorkloadRun,
) -> Result<WorkerEnd, WorkerEnd> {
    let Start {
        started,
        reporter,
        stopped,
    } = start;
    if assignment.on_foreign_process == OnForeignProcess::AwaitOrders {
        return super::ordered::work(workload, gpus, assignment.memory, reporter, run);
    }
    let mut prepared = workload.prepare(gpus, assignment.memory, reporter, run)?;
    let is_watched = matches!(
        assignment.on_foreign_process,
        OnForeignProcess::Report | OnForeignProcess::Yield
    );
    let watch = is_watched.then(|| ForeignProcessWatch::start(&assignment.id.gpus));
    let watch = watch.transpose();
    let watch = watch.map_err(|error| exited(error.to_string()))?;
    run.measured.start_ms = started.elapsed().as_secs_f64() * 1000.0;
    if assignment.stands_by && !may_begin(reporter) {
        prepared.finish(run)?;
        return Ok(WorkerEnd::Finished);
    }
    let is_terminated = Arc::new(AtomicBool::new(false));
    // Without the handler SIGTERM still ends the process, as it ends one that stands by, and the
    // last report counts.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&is_terminated));
    let began = Instant::now();
    let requested = &assignment.requested;
    reporter.step(assignment.task.name());
    reporter.newest(RUN, run);
    let mut last_report = began;
    let mut foreign = None;
    let is_through = |run: &WorkloadRun| {
        let passes = requested.passes;
        passes.is_some_and(|it| run.measured.passes >= it)
            || run.measured.seconds >= requested.seconds
    };
    let failure = loop {
        if is_terminated.load(Ordering::Relaxed) || is_through(run) {
            break None;
        }
        if foreign.is_none() {
            foreign = watch.as_ref().and_then(ForeignProcessWatch::seen);
            if foreign.is_some() && assignment.on_foreign_process == OnForeignProcess::Yield {
                break None;
            }
        }
        let step = match prepared.step(run) {
            Ok(step) => step,
            Err(end) => break Some(end),
        };
        run.measured.passes += u64::from(step == Step::EndOfPass);
        run.measured.seconds = began.elapsed().as_secs_f64();
        if last_report.elapsed() >= REPORT_INTERVAL {
            last_report = Instant::now();
            reporter.newest(RUN, run);
        }
    };
    if let Some(end) = failure {
        return Err(end);
    }
    prepared.settle(run)?;
    *stopped = Some(Instant::now());
    reporter.step("freeing memory");
    prepared.finish(run)?;
    drop(watch);
    match (foreign, assignment.on_foreign_process) {
        (Some(processes), OnForeignProcess::Yield) => {
            Ok(WorkerEnd::Busy(format!("yielded to {processes}")))
        }
        (Some(processes), OnForeignProcess::Report) => {
            run.notes
                .push(format!("{processes} used the GPU at the same time"));
            Ok(WorkerEnd::Finished)
        }
        (None, _)
        | (
            _,
            OnForeignProcess::Ignore
            | OnForeignProcess::ReadOnRefusal
            | OnForeignProcess::AwaitOrders,
        ) => Ok(WorkerEnd::Finished),
    }
}

/// Waits for the order to begin; false where standard input ends without it.
fn may_begin(reporter: &Reporter) -> bool {
    reporter.step(STANDING_BY);
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).is_ok() && line.trim() == GO
}
