//! A process that requests more memory than is free fails cleanly and affects no other process.
//!
//! ## Why
//! Time-slicing isolates no memory: one job that requests too much may take others down with it,
//! hang, or be given memory that the GPU does not have.
//!
//! ## How it is judged
//! One worker of the allocation test works on a GPU. Another one on that GPU requests more memory
//! than NVML reports as free. Each of its requests must be refused with `CUDA_ERROR_OUT_OF_MEMORY`,
//! its process must end well, and the first worker must go on without any failure. Judged on one
//! GPU, at level `extended` and by `gpu-validator allocation`; skipped where no such test was
//! requested.
//!
//! ## What to do
//! Read the kernel log for Xids (`dmesg | grep NVRM`). Where the request was granted, check for
//! software that replaces the driver's allocation by managed memory (`LD_PRELOAD`, a vGPU
//! scheduler).
//!
//! ## Source
//! CUDA Driver API, `cuMemAlloc`:
//! <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html>.

use crate::allocation::{TestedWorker, newcomers, workers_of};
use crate::check::{Check, Judge};
use crate::facts::{AllocationFacts, AllocationPhase, Facts, Oversubscription, Reading, WorkerEnd};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;

pub(crate) const CHECK: Check = Check {
    id: "allocation_oversubscription",
    stage: Stage::Load,
    level: Level::Extended,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html",
};

const REMEDY: &str = "search the kernel log for Xids: dmesg | grep NVRM; check for software that replaces cuMemAlloc (LD_PRELOAD)";

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let allocation = queries::allocation_test(facts, profile)?;
    let workers = workers_of(facts, AllocationPhase::Oversubscription);
    if workers.is_empty() {
        let reason = "no GPU worked well enough to be oversubscribed";
        return Err(queries::workers_failed(reason, profile));
    }
    let request = allocation
        .oversubscription
        .required("request for too much memory")?;
    let (asker, neighbours): (Vec<_>, Vec<_>) = workers
        .iter()
        .partition(|it| it.worker.id == request.worker);
    let (Some(asker), [neighbour]) = (asker.first(), &neighbours[..]) else {
        return Ok(Outcome::error("not both workers reported"));
    };
    Ok(judge_pair(asker, neighbour, request, allocation))
}

fn judge_pair(
    asker: &TestedWorker<'_>,
    neighbour: &TestedWorker<'_>,
    request: &Oversubscription,
    allocation: &AllocationFacts,
) -> Outcome {
    let requested = format!(
        "a request of {} MiB where {} MiB were free",
        request.requested_bytes >> 20,
        request.free_bytes >> 20
    );
    let expected =
        "CUDA_ERROR_OUT_OF_MEMORY for the worker that requested it, and nothing for the other one";
    let fail = |text: String| {
        let outcome = Outcome::fail(text).expected(expected).remedy(REMEDY);
        if newcomers(allocation, asker.worker.gpu()).is_empty() {
            outcome
        } else {
            Outcome::busy("others came to the GPU while it was oversubscribed")
        }
    };
    let detail = asker.detail.clone().unwrap_or_default();
    if detail.operations > 0 {
        return fail(format!("{requested} was granted"));
    }
    match &asker.run.end {
        Reading::NotRead(reason) => {
            return Outcome::error(format!("the request was not made: {reason}"));
        }
        Reading::NotSupported => return Outcome::error("the request was not made"),
        Reading::Value(WorkerEnd::Finished) if asker.was_only_refused() => {}
        Reading::Value(_) => {
            let reason = asker
                .failure(true)
                .unwrap_or_else(|| "no answer".to_owned());
            return fail(format!("{requested} did not fail cleanly: {reason}"));
        }
    }
    match neighbour.failure(false) {
        Some(reason) => fail(format!("{requested} harmed another worker: {reason}")),
        None => Outcome::pass(format!(
            "{requested} was refused {} times, and another worker went on",
            detail.failures.out_of_memory
        )),
    }
}

#[cfg(test)]
mod tests {
    use crate::facts::{AllocationPhase, Facts, Reading, WorkerEnd, WorkloadRun};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        allocated_node, allocated_node_with, healthy_node, judge_host_check, set_detail,
    };

    fn judge(facts: &Facts) -> Finding {
        judge_host_check(&super::CHECK, facts, "{}")
    }

    /// The test, but for the worker that requested too much or the other one.
    fn with(asker: bool, change: impl FnOnce(&mut WorkloadRun)) -> Facts {
        let mut facts = allocated_node();
        let allocation = facts.load.allocation.clone().expect("a test");
        let of_asker = &allocation
            .oversubscription
            .value()
            .expect("a request")
            .worker;
        let worker = allocation.workers.iter().find(|it| {
            it.phase == AllocationPhase::Oversubscription && (it.id == *of_asker) == asker
        });
        let id = worker.map(|it| it.id.clone()).expect("a worker");
        let run = facts.load.runs.iter_mut().find(|it| it.id == id);
        change(run.expect("a run"));
        facts
    }

    #[test]
    fn a_clean_refusal_passes() {
        let finding = judge(&allocated_node());
        assert_eq!(finding.verdict, Verdict::Pass);
        assert_eq!(
            finding.summary,
            "a request of 144384 MiB where 143360 MiB were free was refused 3 times, and another worker went on"
        );
    }

    #[test]
    fn memory_that_is_not_there_must_not_be_granted() {
        let finding = judge(&with(true, |run| set_detail(run, |it| it.operations = 1)));
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(finding.summary.ends_with("was granted"));
    }

    #[test]
    fn neither_worker_may_end_badly() {
        let killed = Reading::Value(WorkerEnd::Killed { signal: 6 });
        for (asker, words) in [
            (true, "did not fail cleanly"),
            (false, "harmed another worker"),
        ] {
            let finding = judge(&with(asker, |run| run.end = killed.clone()));
            assert_eq!(finding.verdict, Verdict::Fail);
            assert!(finding.summary.contains(words), "{}", finding.summary);
        }
        let refused = with(false, |run| {
            set_detail(run, |it| it.failures.out_of_memory = 1);
        });
        assert_eq!(judge(&refused).verdict, Verdict::Fail);
    }

    #[test]
    fn a_request_that_was_not_made_is_an_error() {
        let unread = |reason: &str| Reading::NotRead(reason.to_owned());
        let not_started = with(true, |run| run.end = unread("no process"));
        assert_eq!(judge(&not_started).verdict, Verdict::Error);
        let no_memory = allocated_node_with(|it| {
            it.oversubscription = Reading::NotRead("no NVML".to_owned());
        });
        assert_eq!(judge(&no_memory).verdict, Verdict::Error);
    }

    #[test]
    fn is_skipped_where_it_did_not_come_to_it() {
        let failed = allocated_node_with(|it| {
            it.workers.retain(|it| it.phase == AllocationPhase::Steady);
        });
        for facts in [failed, healthy_node()] {
            assert_eq!(judge(&facts).verdict, Verdict::Skip);
        }
    }
}
