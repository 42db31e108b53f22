//! GPU and memory are cool enough.
//!
//! ## Why
//! Near its limits a GPU slows down, beyond them it shuts itself off. A GPU that is hot while idle
//! has a cooling fault that the first job will turn into an outage.
//!
//! ## How it is judged
//! - With `policy.temperature_maximum_c` or `policy.memory_temperature_maximum_c`: `fail` above it.
//! - GPUs that report limits in degrees: `fail` from the slowdown temperature on, `warn` from the
//!   greatest operating temperature on (of the GPU, of its memory).
//! - GPUs that report the margin to slowdown (T.Limit, Hopper and newer): `fail` when no degree is
//!   left, `warn` below 5.
//! - A temperature that no GPU can have is an `error`, and so is none at all where the profile
//!   limits it.
//! - Where neither GPU nor profile names a limit (Hopper with drivers before 565) the check is
//!   skipped; `throttle_reasons` still sees thermal slowdown.
//!
//! ## What to do
//! Check fans, air flow, heat sinks and liquid cooling, and the temperature of the room and of the
//! neighbours. On a cloud machine, replace the instance.
//!
//! ## Source
//! `nvmlTemperatureThresholds_t` and `nvmlDeviceGetMarginTemperature`,
//! <https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html>.

use crate::check::{Check, Judge};
use crate::expect::model_has;
use crate::facts::{Facts, GpuFacts, Temperature};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::{Policy, Profile};
use crate::reference::{GPU_TEMPERATURES_C, MEMORY_TEMPERATURES_C};
use crate::tally::worst_of;

pub(crate) const CHECK: Check = Check {
    id: "temperature",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html",
};

/// This project's own choice: the margin of an idle H200 is about 50 degrees.
const TLIMIT_WARN_BELOW_C: i32 = 5;

const REMEDY: &str =
    "check fans, air flow, heat sinks and the neighbours; on a cloud machine, replace the instance";

fn judge(gpu: &GpuFacts, _: &Facts, profile: &Profile) -> Judgement {
    let policy = &profile.policy;
    let by_profile =
        policy.temperature_maximum_c.is_some() || policy.memory_temperature_maximum_c.is_some();
    let temperature = gpu
        .temperature
        .required_if(model_has(gpu, |_| true) || by_profile, "temperature")?;
    worst_of([
        judge_gpu(temperature, policy),
        judge_memory(temperature, policy),
    ])
}

fn judge_gpu(temperature: &Temperature, policy: &Policy) -> Judgement {
    let degrees = plausible("GPU", temperature.gpu_c, &GPU_TEMPERATURES_C)?;
    let mut parts = Vec::new();
    if let Some(maximum) = policy.temperature_maximum_c {
        parts.push(at_most("GPU", degrees, maximum));
    }
    if let Some(slowdown) = temperature.slowdown_c {
        parts.push(slows_down(degrees, slowdown));
    }
    if let Some(maximum) = temperature.gpu_max_c {
        parts.push(operates("GPU", degrees, maximum));
    }
    if let Some(margin) = temperature.tlimit_c {
        parts.push(margin_left(degrees, margin));
    }
    if parts.is_empty() {
        return Ok(Outcome::skip(format!(
            "the GPU is at {degrees} °C, and no limit is known from it or from the profile (policy.temperature_maximum_c)"
        )));
    }
    worst_of(parts.into_iter().map(Ok))
}

fn judge_memory(temperature: &Temperature, policy: &Policy) -> Judgement {
    let Some(degrees) = temperature.memory_c else {
        if policy.memory_temperature_maximum_c.is_some() {
            return Err(Outcome::error(
                "the memory's temperature could not be read, the profile limits it",
            ));
        }
        return Ok(Outcome::skip("the memory reports no temperature"));
    };
    let degrees = plausible("memory", degrees, &MEMORY_TEMPERATURES_C)?;
    let by_policy = policy
        .memory_temperature_maximum_c
        .map(|maximum| at_most("memory", degrees, maximum));
    let by_card = temperature
        .memory_max_c
        .map(|maximum| operates("memory", degrees, maximum));
    // Without a limit there is nothing to judge by.
    let seen = Outcome::skip(format!("memory is at {degrees} °C, no limit is known"));
    worst_of(
        [Some(seen), by_policy, by_card]
            .into_iter()
            .flatten()
            .map(Ok),
    )
}

fn plausible(
    what: &str,
    degrees: i32,
    range: &std::ops::RangeInclusive<i32>,
) -> Result<i32, Outcome> {
    if range.contains(&degrees) {
        return Ok(degrees);
    }
    Err(Outcome::error(format!(
        "the {what} temperature could not be read: {degrees} °C is no temperature that a GPU can have"
    )))
}

fn at_most(what: &str, degrees: i32, maximum: i32) -> Outcome {
    if degrees > maximum {
        return Outcome::fail(format!(
            "{what} is at {degrees} °C, the profile allows {maximum} °C"
        ))
        .expected(format!("at most {maximum} °C"))
        .observed(format!("{degrees} °C"))
        .remedy(REMEDY);
    }
    Outcome::pass(format!("{what} is at {degrees} °C"))
}

fn slows_down(degrees: i32, slowdown: i32) -> Outcome {
    if degrees >= slowdown {
        return Outcome::fail(format!(
            "GPU is at {degrees} °C, it slows down from {slowdown} °C on"
        ))
        .expected(format!("below {slowdown} °C"))
        .observed(format!("{degrees} °C"))
        .remedy(REMEDY);
    }
    Outcome::pass(format!("GPU is at {degrees} °C"))
}

fn operates(what: &str, degrees: i32, maximum: i32) -> Outcome {
    if degrees >= maximum {
        return Outcome::warn(format!(
            "{what} is at {degrees} °C, its greatest operating temperature is {maximum} °C"
        ))
        .expected(format!("below {maximum} °C"))
        .observed(format!("{degrees} °C"))
        .remedy(REMEDY);
    }
    Outcome::pass(format!("{what} is at {degrees} °C"))
}

fn margin_left(degrees: i32, margin: i32) -> Outcome {
    let text = format!("GPU is at {degrees} °C, {margin} degrees before it slows down");
    let outcome = if margin <= 0 {
        Outcome::fail(text)
    } else if margin < TLIMIT_WARN_BELOW_C {
        Outcome::warn(text)
    } else {
        return Outcome::pass(text);
    };
    outcome
        .expected(format!("at least {TLIMIT_WARN_BELOW_C} degrees of margin"))
        .observed(format!("{margin} degrees"))
        .remedy(REMEDY)
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{GpuFacts, Reading, Temperature};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        healthy_t4, judge_gpu, judge_healthy, judge_only_gpu, make_model_unknown,
    };

    fn change(gpu: &mut GpuFacts, change: impl FnOnce(&mut Temperature)) {
        let Reading::Value(temperature) = &mut gpu.temperature else {
            panic!("the healthy GPU has a temperature")
        };
        change(temperature);
    }

    fn h200(profile: &str, set: impl FnOnce(&mut Temperature)) -> Finding {
        judge_gpu(&CHECK, profile, |gpu| change(gpu, set))
    }

    fn t4(profile: &str, gpu_c: i32) -> Finding {
        let mut gpu = healthy_t4();
        change(&mut gpu, |it| it.gpu_c = gpu_c);
        judge_only_gpu(&CHECK, profile, gpu)
    }

    #[test]
    fn passes_when_cool() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Pass)
        );
        assert_eq!(t4("{}", 31).verdict, Verdict::Pass);
    }

    #[test]
    fn judges_by_the_margin() {
        let verdict = |margin| h200("{}", |it| it.tlimit_c = Some(margin)).verdict;
        assert_eq!(verdict(5), Verdict::Pass);
        assert_eq!(verdict(4), Verdict::Warn);
        assert_eq!(verdict(1), Verdict::Warn);
        assert_eq!(verdict(0), Verdict::Fail);
        assert_eq!(verdict(-3), Verdict::Fail);
    }

    #[test]
    fn judges_by_the_limits_of_the_card() {
        assert_eq!(t4("{}", 84).verdict, Verdict::Pass);
        assert_eq!(t4("{}", 85).verdict, Verdict::Warn);
        assert_eq!(t4("{}", 92).verdict, Verdict::Warn);
        assert_eq!(t4("{}", 93).verdict, Verdict::Fail);
    }

    #[test]
    fn judges_by_the_profile() {
        let profile = "policy: {temperature_maximum_c: 60}";
        assert_eq!(t4(profile, 60).verdict, Verdict::Pass);
        let finding = t4(profile, 61);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(finding.summary, "GPU is at 61 °C, the profile allows 60 °C");
    }

    #[test]
    fn judges_memory() {
        let profile = "policy: {memory_temperature_maximum_c: 95}";
        let memory = |profile, degrees| h200(profile, |it| it.memory_c = Some(degrees)).verdict;
        assert_eq!(memory(profile, 95), Verdict::Pass);
        assert_eq!(memory(profile, 96), Verdict::Fail);
        assert_eq!(memory("{}", 96), Verdict::Pass);
        let by_card = h200("{}", |it| {
            it.memory_c = Some(95);
            it.memory_max_c = Some(95);
        });
        assert_eq!(by_card.verdict, Verdict::Warn);
        let not_told = h200(profile, |it| it.memory_c = None);
        assert_eq!(not_told.verdict, Verdict::Error);
    }

    #[test]
    fn errs_when_it_was_not_read_or_cannot_be() {
        let not_read = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.temperature = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(not_read.verdict, Verdict::Error);
        assert_eq!(h200("{}", |it| it.gpu_c = 0).verdict, Verdict::Error);
        for nonsense in [i32::MAX, 151, -1] {
            assert_eq!(
                h200("{}", |it| it.gpu_c = nonsense).verdict,
                Verdict::Error,
                "{nonsense}"
            );
            assert_eq!(
                h200("{}", |it| it.memory_c = Some(nonsense)).verdict,
                Verdict::Error,
                "{nonsense}"
            );
        }
    }

    #[test]
    fn errs_when_the_profile_limits_what_the_driver_does_not_tell() {
        let silent = |profile: &str| {
            let mut gpu = healthy_t4();
            make_model_unknown(&mut gpu);
            gpu.temperature = Reading::NotSupported;
            judge_only_gpu(&CHECK, profile, gpu).verdict
        };
        assert_eq!(silent("{}"), Verdict::Skip);
        for key in ["temperature_maximum_c", "memory_temperature_maximum_c"] {
            let limited = format!("policy: {{{key}: 80}}");
            assert_eq!(silent(&limited), Verdict::Error, "{key}");
        }
    }

    #[test]
    fn skips_when_nobody_names_a_limit() {
        let finding = h200("{}", |it| {
            it.tlimit_c = None;
            it.memory_c = None;
        });
        assert_eq!(finding.verdict, Verdict::Skip);
        let finding = h200("policy: {temperature_maximum_c: 60}", |it| {
            it.tlimit_c = None;
        });
        assert_eq!(finding.verdict, Verdict::Pass);
    }
}
