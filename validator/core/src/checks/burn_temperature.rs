//! The GPU stays cool enough during the burn.
//!
//! ## Why
//! Cooling shows its faults under full load. Near its limits a GPU slows down, beyond them it shuts
//! itself off.
//!
//! ## How it is judged
//! The hottest sample under load: `fail` above `policy.temperature_maximum_c` or from the slowdown
//! temperature on, `warn` from the greatest operating temperature on; of the memory by its own
//! limits likewise. `warn`, too, of a GPU more than 20 °C above the median of at least three other
//! GPUs of its model that were burned. `error` where no temperature was read, skipped where the GPU has none (a
//! virtual GPU). Where no limit is known the temperature is reported and skipped; `burn_throttling`
//! still sees thermal slowdown. Skipped where no burn was requested, and where a burn of less than
//! a second has no sample.
//!
//! ## What to do
//! Check fans, air flow, heat sinks and liquid cooling, and the neighbours. On a cloud machine,
//! replace the instance.
//!
//! ## Source
//! `nvmlTemperatureThresholds_t`,
//! <https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html>. The 20 °C are this
//! project's own choice: four healthy H100s of one machine reached 62 to 73 °C, four H200s 60 to 68
//! (`tests/facts`).

use std::ops::RangeInclusive;

use crate::burned;
use crate::check::{Check, Judge, JudgeGpu};
use crate::facts::{Facts, GpuFacts, Reading};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::reference::{GPU_TEMPERATURES_C, MEMORY_TEMPERATURES_C};
use crate::siblings::Sorted;
use crate::tally::worst_of;

pub(crate) const CHECK: Check = Check {
    id: "burn_temperature",
    stage: Stage::Load,
    level: Level::Standard,
    judge: Judge::EachGpuAmongAll(among_all),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html",
};

const REMEDY: &str =
    "check fans, air flow, heat sinks and the neighbours; on a cloud machine, replace the instance";

/// Healthy GPUs of one machine differ by up to 11 °C; see Source above.
const ABOVE_THE_OTHERS_MAXIMUM_C: f64 = 20.0;
/// The median of fewer is no measure of what is common.
const OTHERS_MINIMUM: usize = 3;

fn among_all<'f>(facts: &'f Facts, profile: &'f Profile) -> JudgeGpu<'f> {
    let hottest = Sorted::of(facts, |gpu| {
        let (run, log) = burned::sensors_of(gpu, facts, profile).ok()?;
        let samples = burned::samples_under_load(run, log).ok()?;
        samples.iter().filter_map(|it| it.gpu_c).max()
    });
    Box::new(move |gpu| judge(gpu, facts, profile, &hottest))
}

fn judge(
    gpu: &GpuFacts,
    facts: &Facts,
    profile: &Profile,
    hottest_of_all: &Sorted<'_, i32>,
) -> Judgement {
    let (run, log) = burned::sensors_of(gpu, facts, profile)?;
    let samples = burned::samples_under_load(run, log)?;
    let limits = gpu.temperature.value();
    let policy = &profile.policy;
    let gpu_c = samples.iter().filter_map(|it| it.gpu_c).max();
    let memory_c = samples.iter().filter_map(|it| it.memory_c).max();
    if gpu_c.is_none() && gpu.temperature == Reading::NotSupported {
        return Ok(Outcome::skip(
            "this GPU has no temperature, as a virtual GPU has none",
        ));
    }
    let Some(gpu_c) = gpu_c else {
        return Ok(Outcome::error(
            "the temperature was not read during the burn",
        ));
    };
    worst_of([
        Ok(hottest(
            "GPU",
            (gpu_c, &GPU_TEMPERATURES_C),
            [
                policy.temperature_maximum_c.map(|it| it + 1),
                limits.and_then(|it| it.slowdown_c),
            ],
            limits.and_then(|it| it.gpu_max_c),
        )),
        Ok(memory_c.map_or_else(
            || Outcome::skip("the memory reports no temperature"),
            |degrees| {
                hottest(
                    "memory",
                    (degrees, &MEMORY_TEMPERATURES_C),
                    [policy.memory_temperature_maximum_c.map(|it| it + 1), None],
                    limits.and_then(|it| it.memory_max_c),
                )
            },
        )),
        against_the_others(gpu_c, gpu, hottest_of_all),
    ])
}

fn against_the_others(degrees: i32, gpu: &GpuFacts, hottest: &Sorted<'_, i32>) -> Judgement {
    let objection = median_of_others(hottest.alike(gpu), degrees)
        .filter(|(_, median)| f64::from(degrees) - median > ABOVE_THE_OTHERS_MAXIMUM_C);
    let Some((count, median)) = objection else {
        return Err(Outcome::skip(
            "other GPUs of this model are not much cooler",
        ));
    };
    Ok(Outcome::warn(format!(
        "GPU reached {degrees} °C, the median of {count} other GPUs of this model {median:.0} °C"
    ))
    .expected(format!(
        "at most {:.0} °C",
        median + ABOVE_THE_OTHERS_MAXIMUM_C
    ))
    .observed(format!("{degrees} °C"))
    .remedy(REMEDY))
}

/// Number and median of sorted temperatures without one of `own`; `None` of too few.
fn median_of_others(sorted: &[i32], own: i32) -> Option<(usize, f64)> {
    let place = sorted.binary_search(&own).unwrap_or(sorted.len());
    let count = sorted.len() - usize::from(place < sorted.len());
    let other = |index: usize| sorted.get(index + usize::from(index >= place));
    let [lower, upper] = [count.checked_sub(1)? / 2, count / 2].map(other);
    let median = f64::midpoint(f64::from(*lower?), f64::from(*upper?));
    (count >= OTHERS_MINIMUM).then_some((count, median))
}

/// `fails_from` and `warns_from` are the first degrees that are too many.
fn hottest(
    what: &str,
    (degrees, plausible): (i32, &RangeInclusive<i32>),
    fails_from: [Option<i32>; 2],
    warns_from: Option<i32>,
) -> Outcome {
    let text = format!("{what} reached {degrees} °C");
    if !plausible.contains(&degrees) {
        return Outcome::error(format!(
            "{text}, which is no temperature that a GPU can have"
        ));
    }
    let first_failing = fails_from.into_iter().flatten().min();
    if let Some(limit) = first_failing.filter(|it| degrees >= *it) {
        return Outcome::fail(text)
            .expected(format!("below {limit} °C"))
            .remedy(REMEDY);
    }
    if let Some(limit) = warns_from.filter(|it| degrees >= *it) {
        return Outcome::warn(text)
            .expected(format!("below {limit} °C"))
            .remedy(REMEDY);
    }
    if first_failing.or(warns_from).is_none() {
        return Outcome::skip(format!("{text}, no limit is known"));
    }
    Outcome::pass(text)
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::SensorLog;
    use crate::findings::Verdict;
    use crate::test_machine::{burned_node, burned_node_with_sensors, healthy_node, judge_check};

    const PROFILE: &str = "policy: {temperature_maximum_c: 80, memory_temperature_maximum_c: 95}";

    fn judge(change: impl FnOnce(&mut SensorLog)) -> Verdict {
        judge_check(&CHECK, &burned_node_with_sensors(change), PROFILE)[2].verdict
    }

    #[test]
    fn passes_below_its_limits_and_skips_without_a_burn() {
        let findings = judge_check(&CHECK, &burned_node(), PROFILE);
        assert!(findings.iter().all(|it| it.verdict == Verdict::Pass));
        let findings = judge_check(&CHECK, &healthy_node(), PROFILE);
        assert!(findings.iter().all(|it| it.verdict == Verdict::Skip));
    }

    #[test]
    fn a_gpu_far_above_its_neighbours_warns() {
        let judge_at = |degrees: i32, others: usize| {
            let mut facts = burned_node_with_sensors(|log| {
                for sample in &mut log.samples {
                    sample.gpu_c = Some(degrees);
                }
            });
            facts.gpus.truncate(others + 1);
            judge_check(&CHECK, &facts, "{}").swap_remove(2)
        };
        let finding = judge_at(83, 7);
        assert_eq!(finding.verdict, Verdict::Warn, "{}", finding.summary);
        assert_eq!(judge_at(82, 7).verdict, Verdict::Skip);
        // Of fewer than three others the median is no measure.
        assert_eq!(judge_at(83, 3).verdict, Verdict::Warn);
        assert_eq!(judge_at(83, 2).verdict, Verdict::Skip);
    }

    #[test]
    fn one_hot_sample_fails_and_nonsense_errs() {
        assert_eq!(judge(|log| log.samples[9].gpu_c = Some(81)), Verdict::Fail);
        assert_eq!(judge(|log| log.samples[9].gpu_c = Some(80)), Verdict::Pass);
        assert_eq!(
            judge(|log| log.samples[9].memory_c = Some(96)),
            Verdict::Fail
        );
        assert_eq!(
            judge(|log| log.samples[9].gpu_c = Some(i32::MAX)),
            Verdict::Error
        );
        assert_eq!(
            judge(|log| log.samples.iter_mut().for_each(|it| it.gpu_c = None)),
            Verdict::Error
        );
    }
}
