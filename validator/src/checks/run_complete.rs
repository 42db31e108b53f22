//! The run looked at everything it meant to.
//!
//! ## Why
//! A run that was stopped, or that found no GPU to look at, has no failures to report; an empty test would read as a
//! green one in every tool that counts failures.
//!
//! ## How it is judged
//! The facts must say that collection was not interrupted, and every GPU that NVML counts, at least one, must have told
//! its UUID or PCI address.
//!
//! ## What to do
//! Run again and let it finish. Where no GPU is listed, the other findings say which layer is missing.
//!
//! ## Source
//! This project's own rule: what was not looked at never passes.

use crate::check::{Check, Judge};
use crate::facts::Facts;
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "run_complete",
    stage: Stage::Host,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: concat!(
        env!("CARGO_PKG_REPOSITORY"),
        "/blob/main/CHECKS.md#run_complete"
    ),
};

fn judge(facts: &Facts, _: &Profile) -> Judgement {
    if let Some(reason) = &facts.interrupted {
        return Ok(Outcome::error(format!("the run ended early: {reason}")).remedy("run it again"));
    }
    facts.nvml.initialized.required("the list of GPUs")?;
    let named = facts
        .gpus
        .iter()
        .filter(|gpu| gpu.uuid.value().is_some() || gpu.pci_address.value().is_some())
        .count();
    if named == 0 {
        return Ok(Outcome::error("no GPU was looked at: NVML names none"));
    }
    let counted = facts
        .nvml
        .gpu_count
        .value()
        .map_or(facts.gpus.len(), |count| *count as usize)
        .max(facts.gpus.len());
    if counted > named {
        return Ok(Outcome::error(format!(
            "NVML counts {counted} GPUs, and {named} of them could be looked at"
        )));
    }
    let plural = if named == 1 { "" } else { "s" };
    Ok(Outcome::pass(format!(
        "every stage ended, {named} GPU{plural} looked at"
    )))
}

#[cfg(test)]
mod tests {
    use crate::facts::Reading;
    use crate::findings::Verdict;
    use crate::test_machine::{healthy_node, judge_check};

    #[test]
    fn passes_when_every_stage_ended() {
        let findings = judge_check(&super::CHECK, &healthy_node(), "{}");
        assert_eq!(findings[0].verdict, Verdict::Pass);
        assert_eq!(findings[0].summary, "every stage ended, 8 GPUs looked at");
    }

    #[test]
    fn errs_when_the_run_was_stopped() {
        let mut facts = healthy_node();
        facts.interrupted = Some("signal 15 (SIGTERM)".to_owned());
        let findings = judge_check(&super::CHECK, &facts, "{}");
        assert_eq!(findings[0].verdict, Verdict::Error);
        assert_eq!(
            findings[0].summary,
            "the run ended early: signal 15 (SIGTERM)"
        );
    }

    #[test]
    fn errs_without_a_gpu() {
        let mut facts = healthy_node();
        facts.gpus.clear();
        let findings = judge_check(&super::CHECK, &facts, "{}");
        assert_eq!(findings[0].verdict, Verdict::Error);
    }

    #[test]
    fn errs_when_a_gpu_was_not_reached() {
        let mut facts = healthy_node();
        facts.gpus[2].uuid = Reading::NotRead("GPU is lost".to_owned());
        facts.gpus[2].pci_address = Reading::NotRead("GPU is lost".to_owned());
        let findings = judge_check(&super::CHECK, &facts, "{}");
        assert_eq!(
            findings[0].summary,
            "NVML counts 8 GPUs, and 7 of them could be looked at"
        );
        let mut facts = healthy_node();
        facts.gpus.pop();
        let findings = judge_check(&super::CHECK, &facts, "{}");
        assert_eq!(findings[0].verdict, Verdict::Error);
    }
}
