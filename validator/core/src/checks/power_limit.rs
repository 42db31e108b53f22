//! The power limit is as expected.
//!
//! ## Why
//! A lowered power limit makes a GPU slower under load and leaves no other trace: the GPU works as
//! configured.
//!
//! ## How it is judged
//! The limit in force must equal the profile's (`gpus.power_limit_w`), to the watt: `fail`
//! otherwise. Where the profile has no value, a limit below the GPU's own default is a `warn`, and
//! so is one below that of another GPU of the same name in this machine. GPUs whose power cannot be
//! limited are skipped, an `error` where the profile states a limit.
//!
//! ## What to do
//! `nvidia-smi --power-limit=<watts>` on the GPU, and find out who lowers it at boot (a service,
//! the BMC, the provider). If the lower limit is wanted, state it in the profile.
//!
//! ## Source
//! `nvmlDeviceGetEnforcedPowerLimit`,
//! <https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html>; DCGM counts a low power
//! limit as a configuration error.

use crate::check::{Check, Judge, JudgeGpu};
use crate::expect;
use crate::facts::{Facts, GpuFacts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::siblings::Greatest;

pub(crate) const CHECK: Check = Check {
    id: "power_limit",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpuAmongAll(among_all),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html",
};

/// Limits are set in watts; drivers answer in milliwatts, some a few of them off.
const TOLERANCE_MW: u32 = 999;

/// The highest power limit in milliwatts, by product name.
type Highest<'f> = Greatest<'f, &'f str, u32>;

fn among_all<'f>(facts: &'f Facts, profile: &'f Profile) -> JudgeGpu<'f> {
    let highest = Highest::of(facts, |it| {
        Some((it.name.value()?.as_str(), it.power.value()?.limit_mw))
    });
    Box::new(move |gpu| judge(gpu, &highest, profile))
}

fn judge(gpu: &GpuFacts, highest: &Highest<'_>, profile: &Profile) -> Judgement {
    let limit_mw = gpu
        .power
        .required_if(profile.gpus.power_limit_w.is_some(), "power limit")?
        .limit_mw;
    let expected = expect::power_limit_mw(gpu, profile);
    let is_exact = profile.gpus.power_limit_w.is_some();
    if let Some(expected) = &expected {
        let wanted_mw = expected.value;
        let is_wrong = if is_exact {
            limit_mw.abs_diff(wanted_mw) > TOLERANCE_MW
        } else {
            limit_mw.saturating_add(TOLERANCE_MW) < wanted_mw
        };
        if is_wrong {
            let text = format!(
                "the power limit is {}, {} is {}",
                watts(limit_mw),
                expected.source,
                watts(wanted_mw)
            );
            let outcome = if is_exact {
                Outcome::fail(text)
            } else {
                Outcome::warn(text)
            };
            return Ok(with_values(outcome, wanted_mw, limit_mw));
        }
    }
    let name = gpu.name.value().map(String::as_str);
    let highest_mw = name.and_then(|it| highest.of_others(&it, &gpu.uuid));
    if let Some(highest_mw) = highest_mw.filter(|it| limit_mw.saturating_add(TOLERANCE_MW) < *it) {
        let outcome = Outcome::warn(format!(
            "the power limit is {}, another GPU of this model here has {}",
            watts(limit_mw),
            watts(highest_mw)
        ));
        return Ok(with_values(outcome, highest_mw, limit_mw));
    }
    if expected.is_none() && highest_mw.is_none() {
        return Ok(Outcome::skip(format!(
            "the power limit is {}; neither profile, driver nor another GPU gives the expected limit",
            watts(limit_mw)
        )));
    }
    Ok(Outcome::pass(format!(
        "the power limit is {}",
        watts(limit_mw)
    )))
}

fn with_values(outcome: Outcome, wanted_mw: u32, limit_mw: u32) -> Outcome {
    outcome
        .expected(watts(wanted_mw))
        .observed(watts(limit_mw))
        .remedy(format!(
            "nvidia-smi --power-limit={} on this GPU, or state the wanted limit in the profile (gpus.power_limit_w)",
            wanted_mw / 1000
        ))
}

fn watts(milliwatts: u32) -> String {
    if milliwatts.is_multiple_of(1000) {
        return format!("{} W", milliwatts / 1000);
    }
    format!("{:.1} W", f64::from(milliwatts) / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{GpuFacts, Power, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_t4, judge_gpu, judge_healthy, judge_only_gpu};

    fn t4(profile: &str, limit_mw: u32, default_limit_mw: Option<u32>) -> Finding {
        let gpu = GpuFacts {
            power: Reading::Value(Power {
                limit_mw,
                default_limit_mw,
                ..Power::default()
            }),
            ..healthy_t4()
        };
        judge_only_gpu(&CHECK, profile, gpu)
    }

    #[test]
    fn passes_at_the_default() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Pass)
        );
    }

    #[test]
    fn warns_a_watt_below_the_default() {
        assert_eq!(t4("{}", 69_001, Some(70_000)).verdict, Verdict::Pass);
        let finding = t4("{}", 69_000, Some(70_000));
        assert_eq!(finding.verdict, Verdict::Warn);
        assert_eq!(
            finding.summary,
            "the power limit is 69 W, the GPU's own default is 70 W"
        );
        assert_eq!(t4("{}", 75_000, Some(70_000)).verdict, Verdict::Pass);
    }

    #[test]
    fn fails_when_it_is_not_what_the_profile_says() {
        let profile = "gpus: {power_limit_w: 60}";
        assert_eq!(t4(profile, 60_000, Some(70_000)).verdict, Verdict::Pass);
        assert_eq!(t4(profile, 70_000, Some(70_000)).verdict, Verdict::Fail);
        assert_eq!(t4(profile, 50_000, Some(70_000)).verdict, Verdict::Fail);
    }

    #[test]
    fn warns_below_its_siblings() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.power = Reading::Value(Power {
                limit_mw: 500_000,
                ..Power::default()
            });
        });
        assert_eq!(finding.verdict, Verdict::Warn);
        assert_eq!(finding.expected.as_deref(), Some("700 W"));
    }

    #[test]
    fn skips_where_nobody_says_what_it_should_be() {
        assert_eq!(t4("{}", 70_000, None).verdict, Verdict::Skip);
        let finding = judge_gpu(&CHECK, "{}", |gpu| gpu.power = Reading::NotSupported);
        assert_eq!(finding.verdict, Verdict::Skip);
        let stated = judge_gpu(&CHECK, "gpus: {power_limit_w: 700}", |gpu| {
            gpu.power = Reading::NotSupported;
        });
        assert_eq!(stated.verdict, Verdict::Error);
    }

    #[test]
    fn errs_when_it_was_not_read() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.power = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(finding.verdict, Verdict::Error);
    }
}
