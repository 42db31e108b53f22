//! All GPUs of the machine are of one model.
//!
//! ## Why
//! Work that is spread over the GPUs of a node takes them to be alike. A card of another model
//! among them was put there by mistake, or the job that lands on it is surprised.
//!
//! ## How it is judged
//! The names that NVML gives must be the same; more than one is a warning, since workstations mix
//! cards on purpose. Where profile or EC2 instance type name the model, `gpu_model` judges each GPU
//! against it and this check is skipped.
//!
//! ## What to do
//! Replace the odd card, or name what is wanted in a profile.
//!
//! ## Source
//! NVML `nvmlDeviceGetName`, <https://docs.nvidia.com/deploy/nvml-api/>

use std::collections::BTreeMap;

use crate::check::{Check, Judge};
use crate::expect;
use crate::facts::Facts;
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;

pub(crate) const CHECK: Check = Check {
    id: "gpus_uniform",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    if facts.gpus.is_empty() {
        return Err(queries::reported_by(
            "gpu_count",
            "NVML lists no GPU",
            profile,
        ));
    }
    if let Some(expected) = expect::gpu_model_name(facts, profile) {
        return Ok(Outcome::skip(format!(
            "{} names the model {}, by which gpu_model judges each GPU",
            expected.source, expected.value
        )));
    }
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for gpu in facts.gpus.iter().filter(|gpu| gpu.lost.is_none()) {
        *counts
            .entry(gpu.name.required("name of a GPU")?.as_str())
            .or_default() += 1;
    }
    let list: Vec<String> = counts
        .iter()
        .map(|(name, count)| format!("{count} {name}"))
        .collect();
    Ok(match &list[..] {
        [] => queries::reported_by("gpu_count", "NVML lists only lost GPUs", profile),
        [all] => Outcome::pass(format!("all GPUs are of one model: {all}")),
        _ => Outcome::warn(format!("GPUs are of different models: {}", list.join(", ")))
            .expected("one model")
            .observed(list.join(", "))
            .remedy("replace the odd card, or name the model that is wanted in a profile: gpus: {model: …}"),
    })
}

#[cfg(test)]
mod tests {
    use crate::facts::{Facts, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check};

    fn judge(facts: &Facts, profile: &str) -> Finding {
        judge_host_check(&super::CHECK, facts, profile)
    }

    fn node() -> Facts {
        let mut facts = healthy_node();
        facts.host.ec2 = Reading::NotSupported;
        facts
    }

    #[test]
    fn passes_with_one_model() {
        let finding = judge(&node(), "{}");
        assert_eq!(finding.verdict, Verdict::Pass);
        assert_eq!(finding.summary, "all GPUs are of one model: 8 NVIDIA H200");
    }

    #[test]
    fn warns_of_a_mixture() {
        let mut facts = node();
        facts.gpus[1].name = Reading::Value("NVIDIA L4".to_owned());
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Warn);
        assert_eq!(
            finding.summary,
            "GPUs are of different models: 7 NVIDIA H200, 1 NVIDIA L4"
        );
        assert_eq!(
            judge(&facts, "gpus: {model: NVIDIA H200}").verdict,
            Verdict::Skip
        );
    }

    #[test]
    fn errs_when_a_name_was_not_read() {
        let mut facts = node();
        facts.gpus[1].name = Reading::NotRead("unknown error".to_owned());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
    }

    #[test]
    fn skips_without_gpus() {
        let mut facts = node();
        facts.gpus.clear();
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Skip);
    }
}
