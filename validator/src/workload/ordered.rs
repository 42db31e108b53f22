//! A worker that works, falls silent and ends as it is ordered to.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use validator_core::facts::{MeasuredWork, WorkerEnd, WorkloadRun};

use super::orders::{Order, Orders};
use super::start::exited;
use super::{Prepared, Step, WorkerGpu, Workload};
use crate::plan::MemoryShare;
use crate::worker::clock;
use crate::worker::protocol::{RUN, Reporter};

/// Interval between two reports, also of a worker that is silent; the parent takes it for hung
/// after ten of them.
const REPORT_INTERVAL: Duration = Duration::from_millis(500);
/// The field in which such a worker reports each change.
pub(crate) const CHANGE: &str = "change";

/// A change of the worker, with times of [`clock::now_s`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Change {
    /// It has its memory and computes.
    Working { bytes: u64 },
    /// Its last kernel has ended, and its memory is freed.
    Silent { last_kernel_s: f64, freed_s: f64 },
}

/// Prepares and works, frees and waits, until the order to end.
pub(super) fn work<W: Workload>(
    workload: &W,
    gpus: &[WorkerGpu],
    memory: MemoryShare,
    reporter: &Reporter,
    run: &mut WorkloadRun,
) -> Result<WorkerEnd, WorkerEnd> {
    let orders = Orders::listen().map_err(|error| exited(error.to_string()))?;
    // From the first report on the parent expects the next; a first one makes the reporter's queue.
    reporter.newest(RUN, run);
    loop {
        while orders.order() == Order::Silence {
            reporter.newest(RUN, run);
            orders.wait_while(Order::Silence, REPORT_INTERVAL);
        }
        if orders.order() == Order::End {
            return Ok(WorkerEnd::Finished);
        }
        let earlier = (run.measured, run.mismatches);
        let mut part = WorkloadRun::empty(run.id.clone(), run.requested, run.end.clone());
        // What a workload knows of its time before a silence.
        part.detail.clone_from(&run.detail);
        let mut prepared = workload.prepare(gpus, memory, reporter, &mut part)?;
        let bytes = part.memory.used_bytes;
        let working = Change::Working { bytes };
        reporter.field(CHANGE, &working);
        let worked = work_until_ordered(&mut prepared, &orders, &mut part, |part| {
            merge(run, &earlier, part);
            reporter.newest(RUN, run);
        });
        let settled = worked.and_then(|()| prepared.settle(&mut part));
        let last_kernel_s = clock::now_s();
        let finished = prepared.finish(&mut part);
        let freed_s = clock::now_s();
        merge(run, &earlier, &part);
        settled.and(finished)?;
        let silent = Change::Silent {
            last_kernel_s,
            freed_s,
        };
        reporter.field(CHANGE, &silent);
    }
}

/// Takes steps for as long as the order is to work. `report` is called twice a second.
fn work_until_ordered(
    prepared: &mut impl Prepared,
    orders: &Orders,
    part: &mut WorkloadRun,
    mut report: impl FnMut(&WorkloadRun),
) -> Result<(), WorkerEnd> {
    let began = Instant::now();
    let mut last_report = began;
    while orders.order() == Order::Work {
        let step_began = Instant::now();
        let step = prepared.step(part)?;
        part.measured.passes += u64::from(step == Step::EndOfPass);
        part.measured.seconds = began.elapsed().as_secs_f64();
        if last_report.elapsed() >= REPORT_INTERVAL {
            last_report = Instant::now();
            report(part);
        }
        orders.rest(step_began.elapsed());
    }
    Ok(())
}

/// The sum of what was measured before this part, and of this part.
fn merge(run: &mut WorkloadRun, (measured, mismatches): &(MeasuredWork, u64), part: &WorkloadRun) {
    run.measured.seconds = measured.seconds + part.measured.seconds;
    run.measured.passes = measured.passes + part.measured.passes;
    run.measured.bytes_verified = measured.bytes_verified + part.measured.bytes_verified;
    run.mismatches = mismatches + part.mismatches;
    run.memory = part.memory;
    if run.first_mismatches.is_empty() {
        run.first_mismatches.clone_from(&part.first_mismatches);
    }
    run.detail.clone_from(&part.detail);
}
