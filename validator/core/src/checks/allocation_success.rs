//! Many processes that share the GPUs all succeed.
//!
//! ## Why
//! Schedulers, device plugins, time-slicing and launchers of experiments put several processes on a
//! GPU, and many processes on a node. A GPU that works well for one process may refuse memory to
//! the third, hang in a free, or return a wrong result under contention.
//!
//! ## How it is judged
//! Worker processes share the GPUs, in turn. Each allocates memory, writes a pattern that no other
//! worker has, compares every word on the device, frees, and repeats. A worker succeeds when its
//! process ended well, at least one operation was verified, and no operation failed. All workers
//! must succeed, or the share that `--minimum-success` gives; one wrong result always fails. Where
//! the workers of a GPU together need more memory than was free, refused allocations do not count.
//! Workers that were killed on purpose, and those of the oversubscription, are judged by other
//! checks. A GPU that others use is busy. Judged at level `extended` and by
//! `gpu-validator allocation`; skipped where no such test was requested.
//!
//! ## What to do
//! Out of memory: fewer workers, less memory for each, and no processes left by earlier jobs
//! (`nvidia-smi`). A CUDA error or a hang: read the kernel log for Xids (`dmesg | grep NVRM`) and
//! reset the GPU. A wrong result: take the node out of service.
//!
//! ## Source
//! The test is part of this project; NVIDIA's documentation of time-slicing, which isolates neither
//! memory nor faults,
//! <https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/gpu-sharing.html>.

use crate::allocation::{TestedWorker, is_oversubscribed, newcomers, phase_name, workers_of};
use crate::cause::{CauseKind, RecommendedAction};
use crate::check::{Check, Judge};
use crate::facts::{
    AllocationFacts, AllocationPhase, ComputeMode, Facts, GpuFacts, Reading, WorkerEnd, WorkloadRun,
};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;

pub(crate) const CHECK: Check = Check {
    id: "allocation_success",
    stage: Stage::Load,
    level: Level::Extended,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/gpu-sharing.html",
};

/// Failures that a finding lists.
const LISTED_MAXIMUM: usize = 16;

/// Those whose workers must succeed unless they are killed.
const PHASES: [AllocationPhase; 4] = [
    AllocationPhase::Steady,
    AllocationPhase::ScalingOne,
    AllocationPhase::ScalingAll,
    AllocationPhase::Killing,
];

fn judge(gpu: &GpuFacts, facts: &Facts, profile: &Profile) -> Judgement {
    let uuid = gpu.uuid.required("UUID of the GPU")?;
    let runs: Vec<&WorkloadRun> = match &facts.load.allocation {
        Some(_) => facts.load.runs_of(crate::facts::ALLOCATION, uuid).collect(),
        None => Vec::new(),
    };
    // A wrong value is wrong, however the test ended.
    if let Some(outcome) = wrong_results(&runs) {
        return Ok(outcome);
    }
    let allocation = queries::allocation_test(facts, profile)?;
    if runs.is_empty() {
        let is_exclusive = gpu.compute_mode.value() == Some(&ComputeMode::ExclusiveProcess);
        return Ok(Outcome::skip(if is_exclusive {
            "compute mode EXCLUSIVE_PROCESS lets no two processes use this GPU"
        } else {
            "no worker was assigned to this GPU"
        }));
    }
    if !allocation.plan.gpus.contains(uuid) {
        return Ok(refused(runs[0]));
    }
    let workers: Vec<TestedWorker<'_>> = PHASES
        .iter()
        .flat_map(|phase| workers_of(facts, *phase))
        .filter(|it| it.worker.gpu() == uuid && !it.worker.killed)
        .collect();
    Ok(judge_workers(&workers, allocation, uuid))
}

fn wrong_results(runs: &[&WorkloadRun]) -> Option<Outcome> {
    let wrong = |run: &&&WorkloadRun| {
        let detail = run.allocation().unwrap_or_default();
        detail.failures.wrong_result > 0 || run.mismatches > 0
    };
    let first = *runs.iter().find(wrong)?;
    let count = runs.iter().filter(wrong).count();
    let example = first.first_mismatches.first();
    let example = example.map_or(String::new(), |it| {
        format!(
            ", first at address {}: {} instead of {}",
            it.address, it.observed, it.expected
        )
    });
    Some(
        Outcome::fail(format!(
            "{count} of {} had wrong results{example}",
            queries::counted(runs.len(), "worker")
        ))
        .expected("every word as the worker wrote it")
        .observed(&first.id)
        .remedy("take the node out of service and have the GPU inspected; keep this report")
        .caused_by(CauseKind::WrongResults)
        .recommends(RecommendedAction::Rma),
    )
}

/// The outcome for a GPU on which no worker was started.
fn refused(run: &WorkloadRun) -> Outcome {
    match &run.end {
        Reading::Value(WorkerEnd::Busy(reason)) => {
            Outcome::busy(format!("the GPU is in use, so it was not tested: {reason}"))
                .remedy("run again when the GPU is free")
        }
        Reading::NotRead(reason) => {
            Outcome::error(format!("the allocation test did not run: {reason}"))
        }
        other => Outcome::error(format!("the allocation test did not run: {other:?}")),
    }
}

fn judge_workers(
    workers: &[TestedWorker<'_>],
    allocation: &AllocationFacts,
    uuid: &str,
) -> Outcome {
    if workers.is_empty() {
        return Outcome::error("no worker of this GPU reported");
    }
    let refusable = is_oversubscribed(allocation, uuid) == Some(true);
    let failures: Vec<String> = workers
        .iter()
        .filter_map(|it| {
            let phase = phase_name(it.worker.phase);
            let reason = it.failure(refusable)?;
            Some(format!(
                "worker {} ({phase}): {reason}",
                it.worker.id.ordinal
            ))
        })
        .collect();
    if refusable && workers.iter().all(TestedWorker::was_only_refused) {
        return Outcome::error("every worker was refused memory, so that nothing was tested");
    }
    let (count, minimum) = (workers.len(), allocation.plan.minimum_success_percent);
    #[expect(clippy::cast_precision_loss, reason = "a percentage of workers")]
    let percent = (count - failures.len()) as f64 / count as f64 * 100.0;
    let text = format!(
        "{} of {} succeeded",
        count - failures.len(),
        queries::counted(count, "worker")
    );
    let Some(first) = failures.first() else {
        return Outcome::pass(text);
    };
    if percent >= minimum {
        return Outcome::pass(format!("{text}, at least {minimum} % were required"))
            .observed(failures.join("\n"));
    }
    let others = newcomers(allocation, uuid);
    if !others.is_empty() {
        return Outcome::busy(format!(
            "{text}, and others came to the GPU meanwhile: {first}"
        ));
    }
    Outcome::fail(format!("{text}: {first}"))
        .expected(format!("{minimum} % of the workers"))
        .observed(failures[..failures.len().min(LISTED_MAXIMUM)].join("\n"))
        .remedy(
            "out of memory: use fewer workers or less memory; else search the kernel log for Xids: dmesg | grep NVRM",
        )
}

#[cfg(test)]
mod tests {
    use crate::facts::{Facts, MemoryMismatch, Reading, WorkerEnd};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        allocated_node, allocated_node_with, allocated_node_with_run, healthy_node, judge_check,
        set_detail,
    };

    fn judge(facts: &Facts) -> Vec<Finding> {
        judge_check(&super::CHECK, facts, "{}")
    }

    #[test]
    fn passes_where_every_worker_succeeded() {
        let findings = judge(&allocated_node());
        assert_eq!(findings.len(), 8);
        assert!(findings.iter().all(|it| it.verdict == Verdict::Pass));
        // Two steady ones, one beside those of the other GPUs, and one that was not killed.
        assert_eq!(findings[2].summary, "4 of 4 workers succeeded");
    }

    #[test]
    fn a_worker_that_fails_is_named_with_its_reason() {
        let ends = [
            (
                WorkerEnd::TimedOut {
                    step: "cuMemFree_v2".to_owned(),
                    seconds: 30.0,
                },
                "hung in cuMemFree_v2: no answer within 30.0 s",
            ),
            (WorkerEnd::Killed { signal: 11 }, "ended by signal 11"),
            (
                WorkerEnd::CudaError {
                    call: "cuMemFree_v2".to_owned(),
                    code: 700,
                    name: "CUDA_ERROR_ILLEGAL_ADDRESS".to_owned(),
                },
                "cuMemFree_v2 returned CUDA_ERROR_ILLEGAL_ADDRESS (700)",
            ),
        ];
        for (end, reason) in ends {
            let findings = judge(&allocated_node_with_run(|run| {
                run.end = Reading::Value(end);
            }));
            assert_eq!(findings[2].verdict, Verdict::Fail);
            assert_eq!(
                findings[2].summary,
                format!("3 of 4 workers succeeded: worker 0 (steady): {reason}")
            );
            assert_eq!(findings[1].verdict, Verdict::Pass);
        }
        let idle = allocated_node_with_run(|run| set_detail(run, |it| it.operations = 0));
        assert_eq!(judge(&idle)[2].verdict, Verdict::Fail);
    }

    #[test]
    fn refused_memory_fails_unless_more_was_requested_than_was_free() {
        let mut facts = allocated_node_with_run(|run| {
            set_detail(run, |it| it.failures.out_of_memory = 7);
        });
        let finding = &judge(&facts)[2];
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(
            finding
                .summary
                .ends_with("7 allocations refused: out of memory")
        );
        let allocation = facts.load.allocation.as_mut().expect("a test");
        allocation.plan.memory_bytes = 100 << 30;
        assert_eq!(judge(&facts)[2].verdict, Verdict::Pass);
    }

    #[test]
    fn the_share_that_must_succeed_can_be_lower_but_no_result_may_be_wrong() {
        let mut facts = allocated_node_with_run(|run| {
            run.end = Reading::Value(WorkerEnd::Killed { signal: 11 });
        });
        let set_minimum = |facts: &mut Facts, percent| {
            let allocation = facts.load.allocation.as_mut().expect("a test");
            allocation.plan.minimum_success_percent = percent;
        };
        set_minimum(&mut facts, 75.0);
        assert_eq!(judge(&facts)[2].verdict, Verdict::Pass);
        set_minimum(&mut facts, 80.0);
        assert_eq!(judge(&facts)[2].verdict, Verdict::Fail);
        let mut facts = allocated_node_with_run(|run| {
            run.mismatches = 1;
            run.first_mismatches = vec![MemoryMismatch {
                address: "0x7f00".to_owned(),
                expected: "0x1".to_owned(),
                observed: "0x3".to_owned(),
                ..MemoryMismatch::default()
            }];
            set_detail(run, |it| it.failures.wrong_result = 1);
        });
        set_minimum(&mut facts, 0.0);
        facts.interrupted = Some("SIGINT".to_owned());
        let finding = &judge(&facts)[2];
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "1 of 5 workers had wrong results, first at address 0x7f00: 0x3 instead of 0x1"
        );
    }

    #[test]
    fn failures_beside_newcomers_are_no_fault_of_the_gpu() {
        let mut facts = allocated_node_with_run(|run| {
            set_detail(run, |it| it.failures.out_of_memory = 7);
        });
        let uuid = facts.gpus[2].uuid.value().cloned().expect("a UUID");
        let allocation = facts.load.allocation.as_mut().expect("a test");
        allocation.listed.entry(uuid).or_default().insert(4711);
        let finding = &judge(&facts)[2];
        assert_eq!((finding.verdict, finding.busy), (Verdict::Error, true));
    }

    #[test]
    fn a_gpu_that_was_not_tested_is_no_pass() {
        let untested = |end: Reading<WorkerEnd>| {
            let mut facts = allocated_node_with(|it| {
                it.plan.gpus.remove(2);
            });
            let uuid = facts.gpus[2].uuid.value().cloned().expect("a UUID");
            for run in facts.load.runs.iter_mut().filter(|it| it.id.has_gpu(&uuid)) {
                run.end = end.clone();
            }
            judge(&facts).swap_remove(2)
        };
        let busy = untested(Reading::Value(WorkerEnd::Busy("a job".to_owned())));
        assert_eq!((busy.verdict, busy.busy), (Verdict::Error, true));
        let error = untested(Reading::NotRead("no CUDA".to_owned()));
        assert_eq!((error.verdict, error.busy), (Verdict::Error, false));
    }

    #[test]
    fn a_gpu_for_one_process_alone_is_not_shared() {
        let mut facts = allocated_node();
        let uuid = facts.gpus[2].uuid.value().cloned().expect("a UUID");
        facts.load.runs.retain(|it| !it.id.has_gpu(&uuid));
        facts.gpus[2].compute_mode = Reading::Value(crate::facts::ComputeMode::ExclusiveProcess);
        let finding = &judge(&facts)[2];
        assert_eq!(finding.verdict, Verdict::Skip);
        assert!(finding.summary.contains("EXCLUSIVE_PROCESS"));
    }

    #[test]
    fn is_skipped_where_it_was_not_requested_or_was_stopped() {
        let mut stopped = allocated_node();
        stopped.interrupted = Some("SIGINT".to_owned());
        for facts in [healthy_node(), stopped] {
            let findings = judge(&facts);
            assert!(findings.iter().all(|it| it.verdict == Verdict::Skip));
        }
    }
}
