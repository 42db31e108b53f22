//! Persistence mode is on.
//!
//! ## Why
//! Without persistence mode the driver unloads a GPU's state when its last client ends: the next
//! job pays seconds of initialisation, counters and modes are lost between jobs, and a GPU that no
//! process uses cannot be monitored.
//!
//! ## How it is judged
//! NVML's persistence mode of each GPU must equal the profile's (`gpus.persistence_mode`), on by
//! default; without a profile off is a warning on consumer cards, which workstations use without
//! the daemon. GPUs that know no persistence mode are skipped, an `error` where the profile states
//! it.
//!
//! ## What to do
//! Enable and start `nvidia-persistenced` (`systemctl enable --now nvidia-persistenced`).
//!
//! ## Source
//! NVIDIA Driver Persistence, <https://docs.nvidia.com/deploy/driver-persistence/>; DCGM's
//! deployment check warns of it.

use crate::check::{Check, Judge};
use crate::expect::is_consumer_card;
use crate::facts::{Facts, GpuFacts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "persistence_mode",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/driver-persistence/",
};

fn judge(gpu: &GpuFacts, _: &Facts, profile: &Profile) -> Judgement {
    let is_on = *gpu
        .persistence_mode
        .required_if(profile.gpus.persistence_mode.is_some(), "persistence mode")?;
    let wanted = profile.gpus.persistence_mode.unwrap_or(true);
    let word = |on| if on { "on" } else { "off" };
    if is_on == wanted {
        return Ok(Outcome::pass(format!(
            "persistence mode is {}",
            word(is_on)
        )));
    }
    let text = format!(
        "persistence mode is {}, {} is expected",
        word(is_on),
        word(wanted)
    );
    let outcome = if profile.gpus.persistence_mode.is_none() && is_consumer_card(gpu) {
        Outcome::warn(text)
    } else {
        Outcome::fail(text)
    };
    Ok(outcome
        .expected(word(wanted))
        .observed(word(is_on))
        .remedy(if wanted {
            "enable the daemon: systemctl enable --now nvidia-persistenced"
        } else {
            "disable the daemon: systemctl disable --now nvidia-persistenced"
        }))
}

#[cfg(test)]
mod tests {
    use crate::facts::Reading;
    use crate::findings::Verdict;
    use crate::test_machine::{healthy_node, judge_check};

    #[test]
    fn passes_when_on() {
        let findings = judge_check(&super::CHECK, &healthy_node(), "{}");
        assert!(
            findings.iter().all(|it| it.verdict == Verdict::Pass),
            "{findings:#?}"
        );
    }

    #[test]
    fn fails_on_the_gpu_where_it_is_off() {
        let mut facts = healthy_node();
        facts.gpus[3].persistence_mode = Reading::Value(false);
        let findings = judge_check(&super::CHECK, &facts, "{}");
        assert_eq!(findings[3].verdict, Verdict::Fail);
        assert_eq!(
            findings[3].summary,
            "persistence mode is off, on is expected"
        );
        assert_eq!(
            findings
                .iter()
                .filter(|it| it.verdict == Verdict::Pass)
                .count(),
            7
        );
    }

    #[test]
    fn a_profile_may_want_it_off() {
        let findings = judge_check(
            &super::CHECK,
            &healthy_node(),
            "gpus: {persistence_mode: false}",
        );
        assert!(findings.iter().all(|it| it.verdict == Verdict::Fail));
    }

    #[test]
    fn errs_when_it_was_not_read() {
        let mut facts = healthy_node();
        facts.gpus[0].persistence_mode = Reading::NotRead("unknown error".to_owned());
        assert_eq!(
            judge_check(&super::CHECK, &facts, "{}")[0].verdict,
            Verdict::Error
        );
    }

    #[test]
    fn skips_where_the_gpu_has_none() {
        let mut facts = healthy_node();
        facts.gpus[0].persistence_mode = Reading::NotSupported;
        assert_eq!(
            judge_check(&super::CHECK, &facts, "{}")[0].verdict,
            Verdict::Skip
        );
        let stated = "gpus: {persistence_mode: true}";
        assert_eq!(
            judge_check(&super::CHECK, &facts, stated)[0].verdict,
            Verdict::Error
        );
    }

    #[test]
    fn a_consumer_card_without_it_warns() {
        let mut facts = healthy_node();
        for gpu in &mut facts.gpus {
            gpu.name = Reading::Value("NVIDIA GeForce RTX 4090".to_owned());
            gpu.persistence_mode = Reading::Value(false);
        }
        let verdict = |profile| judge_check(&super::CHECK, &facts, profile)[0].verdict;
        assert_eq!(verdict("{}"), Verdict::Warn);
        assert_eq!(verdict("gpus: {persistence_mode: true}"), Verdict::Fail);
    }
}
