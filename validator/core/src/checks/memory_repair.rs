//! No memory repair is pending, and no memory is beyond repair.
//!
//! ## Why
//! Newer GPUs repair a memory channel or switch off a faulty processing cluster (TPC) at the next
//! reset. Until then the faulty part is in use. Memory that the driver calls unrepairable stays
//! faulty for good.
//!
//! ## How it is judged
//! `fail` when the driver reports that memory is unrepairable, or that a channel or TPC repair
//! waits for a reset. Skipped where GPU or driver know neither.
//!
//! ## What to do
//! Pending: drain the node and reset the GPU or reboot. Unrepairable: return the GPU.
//!
//! ## Source
//! `nvmlDeviceGetRepairStatus`,
//! <https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html>; DCGM's deployment check
//! fails on unrepairable memory.

use crate::check::{Check, Judge};
use crate::diagnosis::RecommendedAction;
use crate::facts::{Facts, GpuFacts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::tally::worst_of;

pub(crate) const CHECK: Check = Check {
    id: "memory_repair",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html",
};

fn judge(gpu: &GpuFacts, _: &Facts, _: &Profile) -> Judgement {
    worst_of([judge_unrepairable(gpu), judge_pending(gpu)])
}

fn judge_unrepairable(gpu: &GpuFacts) -> Judgement {
    if *gpu
        .unrepairable_memory
        .applicable("flag for unrepairable memory")?
    {
        return Ok(
            Outcome::fail("the driver found memory that it cannot repair")
                .expected("no unrepairable memory")
                .observed("unrepairable memory")
                .remedy("return the GPU")
                .recommends(RecommendedAction::Rma),
        );
    }
    Ok(Outcome::pass("no memory is unrepairable"))
}

fn judge_pending(gpu: &GpuFacts) -> Judgement {
    let status = gpu.repair_status.applicable("memory repair status")?;
    let pending: Vec<&str> = [
        (status.channel_repair_pending, "a memory channel repair"),
        (status.tpc_repair_pending, "a TPC repair"),
    ]
    .into_iter()
    .filter_map(|(is_pending, repair)| is_pending.then_some(repair))
    .collect();
    if pending.is_empty() {
        return Ok(Outcome::pass("no repair is pending"));
    }
    let pending = pending.join(", ");
    Ok(
        Outcome::fail(format!("waiting for a reset of the GPU: {pending}"))
            .expected("no pending repair")
            .observed(format!("{pending} pending"))
            .remedy("drain the node and reset the GPU (nvidia-smi --gpu-reset) or reboot"),
    )
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{Reading, RepairStatus};
    use crate::findings::Verdict;
    use crate::test_machine::{healthy_t4, judge_gpu, judge_healthy, judge_only_gpu};

    #[test]
    fn passes_when_nothing_is_to_be_repaired() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Pass)
        );
    }

    #[test]
    fn fails_on_each_pending_repair_and_names_it() {
        for (channel, tpc, summary) in [
            (
                true,
                false,
                "waiting for a reset of the GPU: a memory channel repair",
            ),
            (false, true, "waiting for a reset of the GPU: a TPC repair"),
            (
                true,
                true,
                "waiting for a reset of the GPU: a memory channel repair, a TPC repair",
            ),
        ] {
            let finding = judge_gpu(&CHECK, "{}", |gpu| {
                gpu.repair_status = Reading::Value(RepairStatus {
                    channel_repair_pending: channel,
                    tpc_repair_pending: tpc,
                });
            });
            assert_eq!(finding.verdict, Verdict::Fail);
            assert_eq!(finding.summary, summary);
        }
    }

    #[test]
    fn fails_on_unrepairable_memory() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.unrepairable_memory = Reading::Value(true);
        });
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(finding.remedy.as_deref(), Some("return the GPU"));
    }

    #[test]
    fn errs_when_either_was_not_read() {
        let repair = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.repair_status = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(repair.verdict, Verdict::Error);
        let memory = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.unrepairable_memory = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(memory.verdict, Verdict::Error);
    }

    #[test]
    fn judges_one_where_the_driver_does_not_know_the_other() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.repair_status = Reading::NotSupported;
        });
        assert_eq!(finding.verdict, Verdict::Pass);
    }

    #[test]
    fn skips_where_neither_is_known() {
        assert_eq!(
            judge_only_gpu(&CHECK, "{}", healthy_t4()).verdict,
            Verdict::Skip
        );
    }
}
