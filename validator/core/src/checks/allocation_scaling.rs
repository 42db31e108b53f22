//! All GPUs together do as many times the work of one as there are GPUs.
//!
//! ## Why
//! Processes on different GPUs share locks of the driver, the host's memory and PCIe switches.
//! Where eight GPUs do the work of three, launchers that start one process for each GPU waste the
//! others.
//!
//! ## How it is judged
//! One worker on one GPU, then one on each GPU at the same time. Their verified operations a second
//! must together be 1.8 times those of one GPU on two, 3.5 on four, 6 on eight; less is a warning.
//! Skipped on a single GPU, on GPUs of different models, and where the host has fewer processors
//! than processes, which would then limit the work. Judged at level `extended` and by
//! `gpu-validator allocation`.
//!
//! ## What to do
//! Check for other load on the host, limits of cgroups, and processors in power-saving states.
//! Compare with larger `--memory`: the driver's calls to allocate and free weigh less then.
//!
//! ## Source
//! The limits are this project's requirement.

use std::collections::BTreeSet;

use crate::allocation::{expected_factor, has_processors_for, scaling};
use crate::check::{Check, Judge};
use crate::facts::Facts;
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;

pub(crate) const CHECK: Check = Check {
    id: "allocation_scaling",
    stage: Stage::Load,
    level: Level::Extended,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/#scaling",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let allocation = queries::allocation_test(facts, profile)?;
    let gpus = &allocation.plan.gpus;
    if gpus.len() < 2 {
        return Ok(Outcome::skip("fewer than two GPUs were tested"));
    }
    let tested = gpus.iter().filter_map(|uuid| facts.gpu(uuid));
    let models: BTreeSet<&String> = tested.filter_map(|gpu| gpu.name.value()).collect();
    if models.len() > 1 {
        return Ok(Outcome::skip("the GPUs are of different models"));
    }
    let Some(scaling) = scaling(facts) else {
        let reason = "fewer than two GPUs had workers that all ended well";
        return Err(queries::workers_failed(reason, profile));
    };
    if !has_processors_for(allocation, scaling.gpus) {
        return Ok(Outcome::skip(format!(
            "{} on {}: the host would limit the work",
            queries::counted(scaling.gpus, "worker"),
            queries::counted(allocation.plan.processors as usize, "processor")
        )));
    }
    let (factor, expected) = (scaling.factor(), expected_factor(scaling.gpus));
    let text = format!(
        "{} GPUs do {factor:.2} times the work of one, {:.1} operations a second after {:.1}",
        scaling.gpus, scaling.all, scaling.one
    );
    if factor >= expected {
        return Ok(Outcome::pass(text));
    }
    Ok(Outcome::warn(text)
        .expected(format!("{expected:.2} times at least"))
        .observed(format!("{factor:.2}"))
        .remedy("check for other load on the host and limits of cgroups, and compare with larger --memory"))
}

#[cfg(test)]
mod tests {
    use crate::facts::{AllocationPhase, Facts, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        allocated_node, allocated_node_with, healthy_node, judge_host_check, set_detail,
    };

    fn judge(facts: &Facts) -> Finding {
        judge_host_check(&super::CHECK, facts, "{}")
    }

    /// Eight GPUs, each with so many operations in a minute, where one alone did 6000.
    fn with_operations(operations: u64) -> Facts {
        let mut facts = allocated_node();
        let allocation = facts.load.allocation.clone().expect("a test");
        for worker in allocation.workers {
            let run = facts.load.runs.iter_mut().find(|it| it.id == worker.id);
            if let Some(run) = run.filter(|_| worker.phase == AllocationPhase::ScalingAll) {
                set_detail(run, |it| it.operations = operations);
            }
        }
        facts
    }

    #[test]
    fn six_times_the_work_of_one_gpu_is_enough_for_eight() {
        let finding = judge(&with_operations(4500));
        assert_eq!(finding.verdict, Verdict::Pass);
        assert_eq!(
            finding.summary,
            "8 GPUs do 6.00 times the work of one, 600.0 operations a second after 100.0"
        );
        assert_eq!(judge(&with_operations(4499)).verdict, Verdict::Warn);
    }

    #[test]
    fn is_skipped_where_the_figure_would_not_be_of_the_gpus() {
        let few_processors = allocated_node_with(|it| it.plan.processors = 9);
        let one_gpu = allocated_node_with(|it| it.plan.gpus.truncate(1));
        let no_phase = allocated_node_with(|it| {
            it.workers.retain(|it| it.phase == AllocationPhase::Steady);
        });
        let mut mixed = allocated_node();
        mixed.gpus[0].name = Reading::Value("Tesla T4".to_owned());
        for facts in [few_processors, one_gpu, no_phase, mixed, healthy_node()] {
            assert_eq!(judge(&facts).verdict, Verdict::Skip);
        }
    }
}
