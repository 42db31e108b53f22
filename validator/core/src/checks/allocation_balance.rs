//! Processes that share a GPU get equal shares of it.
//!
//! ## Why
//! Without MPS the driver gives processes on a GPU time slices in turn. Where one of them gets more
//! than the others, jobs on shared GPUs take longer than planned, and one may starve.
//!
//! ## How it is judged
//! The workers of a GPU all do the same in the same time. Their verified operations a second are
//! compared by Jain's index, which is 1 for equal shares. Below 0.95, or where the slowest worker
//! has less than half of the fastest one's share, this warns. A worker without any operation has
//! failed (`allocation_success`). Where the host has fewer processors than processes the shares
//! show the host's scheduler, and this is skipped, as it is on a GPU with one worker. Judged at
//! level `extended` and by `gpu-validator allocation`.
//!
//! ## What to do
//! Check for other load on the host and for limits of the workers' cgroups. Read the time slice:
//! `nvidia-smi compute-policy --list`.
//!
//! ## Source
//! R. Jain, D. Chiu, W. Hawe, A Quantitative Measure of Fairness and Discrimination,
//! DEC-TR-301, 1984. The limits are this project's choice: equal workers in time slices are
//! expected to reach 0.99, and 0.95 lets one of twenty starve.

use crate::allocation::{TestedWorker, has_processors_for, jain_index, workers_of};
use crate::check::{Check, Judge};
use crate::facts::{AllocationPhase, Facts, GpuFacts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;

pub(crate) const CHECK: Check = Check {
    id: "allocation_balance",
    stage: Stage::Load,
    level: Level::Extended,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/gpu-sharing.html",
};

/// See "Source".
const JAIN_MINIMUM: f64 = 0.95;
/// The slowest worker's rate as a part of the fastest one's. This project's choice.
const SLOWEST_MINIMUM: f64 = 0.5;

fn judge(gpu: &GpuFacts, facts: &Facts, profile: &Profile) -> Judgement {
    let allocation = queries::allocation_test(facts, profile)?;
    let uuid = gpu.uuid.required("UUID of the GPU")?;
    let all = workers_of(facts, AllocationPhase::Steady);
    let count_of_all = all.len();
    let workers: Vec<TestedWorker<'_>> = all
        .into_iter()
        .filter(|it| it.worker.gpu() == uuid)
        .collect();
    if workers.len() < 2 {
        return Ok(Outcome::skip("fewer than two workers shared this GPU"));
    }
    if workers.iter().any(|it| it.failure(false).is_some()) {
        let reason = "not every worker of this GPU succeeded";
        return Err(queries::workers_failed(reason, profile));
    }
    if !has_processors_for(allocation, count_of_all) {
        return Ok(Outcome::skip(format!(
            "{} on {}: the shares would show the host's scheduler",
            queries::counted(count_of_all, "worker"),
            queries::counted(allocation.plan.processors as usize, "processor")
        )));
    }
    let rates: Vec<f64> = workers.iter().map(TestedWorker::operations_per_s).collect();
    Ok(judge_rates(&rates))
}

fn judge_rates(rates: &[f64]) -> Outcome {
    let Some(index) = jain_index(rates) else {
        return Outcome::error("no worker of this GPU has a rate");
    };
    let slowest = rates.iter().copied().fold(f64::INFINITY, f64::min);
    let fastest = rates.iter().copied().fold(0.0, f64::max);
    let text = format!(
        "{} share the GPU with a Jain's index of {index:.3}, {slowest:.1} to {fastest:.1} operations a second",
        queries::counted(rates.len(), "worker")
    );
    if index >= JAIN_MINIMUM && slowest >= SLOWEST_MINIMUM * fastest {
        return Outcome::pass(text);
    }
    Outcome::warn(text)
        .expected(format!(
            "an index of {JAIN_MINIMUM} at least, and no worker with less than half of another one's rate"
        ))
        .observed(format!("{index:.3}"))
        .remedy("check for other load on the host, limits of cgroups, and the GPU's time slice: nvidia-smi compute-policy --list")
}

#[cfg(test)]
mod tests {
    use crate::facts::{Facts, Reading, WorkerEnd};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        allocated_node, allocated_node_with, allocated_node_with_run, healthy_node, judge_check,
        set_detail,
    };

    fn judge(facts: &Facts) -> Vec<Finding> {
        judge_check(&super::CHECK, facts, "{}")
    }

    #[test]
    fn equal_shares_pass() {
        let findings = judge(&allocated_node());
        assert!(findings.iter().all(|it| it.verdict == Verdict::Pass));
        assert_eq!(
            findings[2].summary,
            "2 workers share the GPU with a Jain's index of 1.000, 50.0 to 50.0 operations a second"
        );
    }

    #[test]
    fn a_worker_with_less_than_half_of_the_others_share_is_a_warning() {
        for (operations, verdict) in [
            (1500, Verdict::Warn),
            (1499, Verdict::Warn),
            (2400, Verdict::Pass),
        ] {
            let facts = allocated_node_with_run(|run| {
                set_detail(run, |it| it.operations = operations);
            });
            let findings = judge(&facts);
            assert_eq!(findings[2].verdict, verdict, "{operations}");
            assert_eq!(findings[1].verdict, Verdict::Pass);
        }
    }

    #[test]
    fn a_host_with_few_processors_is_not_judged() {
        let few = allocated_node_with(|it| it.plan.processors = 17);
        assert!(judge(&few).iter().all(|it| it.verdict == Verdict::Skip));
        let enough = allocated_node_with(|it| it.plan.processors = 18);
        assert!(judge(&enough).iter().all(|it| it.verdict == Verdict::Pass));
    }

    #[test]
    fn is_skipped_where_workers_failed_or_none_ran() {
        let failed = allocated_node_with_run(|run| {
            run.end = Reading::Value(WorkerEnd::Killed { signal: 11 });
        });
        assert_eq!(judge(&failed)[2].verdict, Verdict::Skip);
        assert!(
            judge(&healthy_node())
                .iter()
                .all(|it| it.verdict == Verdict::Skip)
        );
    }
}
