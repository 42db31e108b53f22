//! Only the power limit throttles clocks during the burn.
//!
//! ## Why
//! A GPU under full load is meant to run at its power limit. Heat, a power brake or the hardware's
//! own protection take away more than that, and a node that slows down makes every other node of a
//! job wait.
//!
//! ## How it is judged
//! NVML's clocks event reasons of every sample under load. `fail`: `hw_thermal_slowdown`,
//! `hw_power_brake_slowdown` or `hw_slowdown` in more than one sample and more than 1 % of them.
//! `warn`: one of these for shorter, or `sw_thermal_slowdown` in any sample. The driver's violation
//! times before and after, where it keeps them: `fail` when hardware thermal slowdown or the power
//! brake grew by more than 1 % of the burn's time, and a tenth of a second; `warn` when thermal
//! limits did. The power cap is normal. `warn` where a setting of the clocks
//! (`applications_clocks_setting`) held the SM clock below 90 % of its maximum in most samples: all
//! GPUs of a fleet may share it, and no comparison with other GPUs shows it. `error` where no sample has reasons or the times were not
//! read. Skipped where no burn was requested, and where a burn of less than a second has no sample.
//!
//! ## What to do
//! Thermal: check cooling, fans, air filters and neighbours. Power brake: check power supplies and
//! their cables. On a cloud machine, replace the instance.
//!
//! ## Source
//! `nvmlClocksEventReasons`,
//! <https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html>; DCGM objects to
//! the bits 0xE8. That a single sample is no fault is what DCGM's users request
//! (<https://github.com/NVIDIA/DCGM/issues/242>).

use std::collections::BTreeMap;

use crate::burned;
use crate::check::{Check, Judge};
use crate::facts::{BurnRun, ClocksEventReasons, Facts, GpuFacts, SensorLog};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::tally::worst_of;

pub(crate) const CHECK: Check = Check {
    id: "burn_throttling",
    stage: Stage::Load,
    level: Level::Standard,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html",
};

const WRONG: u64 = ClocksEventReasons::HW_THERMAL_SLOWDOWN
    | ClocksEventReasons::HW_POWER_BRAKE_SLOWDOWN
    | ClocksEventReasons::HW_SLOWDOWN;
const DOUBTFUL: u64 = ClocksEventReasons::SW_THERMAL_SLOWDOWN;
/// Of the burn's time, by the driver's counters or the samples. This project's own choice: a
/// hundredth is lost in the spread between GPUs.
const SHARE_MAXIMUM: f64 = 0.01;
/// Of the greatest SM clock. This project's own choice, as `gemm_throughput` warns below 90 % of its
/// reference.
const SETTING_SHARE_MINIMUM: f64 = 0.9;
/// The counters move in steps of this order, whatever the reason (this project's own choice).
const SECONDS_MINIMUM: f64 = 0.1;

fn judge(gpu: &GpuFacts, facts: &Facts, profile: &Profile) -> Judgement {
    let (run, log) = burned::sensors_of(gpu, facts, profile)?;
    worst_of([
        reasons(run, log),
        violation_times(run, log),
        held_by_a_setting(gpu, run, log),
    ])
}

/// Clocks that were locked or lowered, in most samples.
fn held_by_a_setting(gpu: &GpuFacts, run: &BurnRun, log: &SensorLog) -> Judgement {
    let samples = burned::samples_under_load(run, log)?;
    let maximum_mhz = gpu.clocks.value().and_then(|it| it.max_sm_mhz);
    let maximum_mhz = maximum_mhz.ok_or_else(|| Outcome::skip("the GPU has no maximum clock"))?;
    let held_by = |reasons: u64| {
        reasons & ClocksEventReasons::APPLICATIONS_CLOCKS_SETTING != 0
            && reasons & (ClocksEventReasons::SW_POWER_CAP | WRONG | DOUBTFUL) == 0
    };
    let mut held: Vec<f64> = samples
        .iter()
        .filter(|it| it.reasons.is_some_and(held_by))
        .filter_map(|it| it.sm_mhz)
        .map(f64::from)
        .collect();
    let count = held.len();
    let Some(clock_mhz) = burned::median(&mut held).filter(|_| 2 * count > samples.len()) else {
        return Ok(Outcome::pass("no setting held the clocks down"));
    };
    let minimum_mhz = f64::from(maximum_mhz) * SETTING_SHARE_MINIMUM;
    if clock_mhz >= minimum_mhz {
        return Ok(Outcome::pass("no setting held the clocks down"));
    }
    Ok(Outcome::warn(format!(
        "a setting held the SM clock at {clock_mhz:.0} MHz, {maximum_mhz} MHz is its maximum"
    ))
    .expected(format!("at least {minimum_mhz:.0} MHz, or another reason"))
    .observed(format!("{clock_mhz:.0} MHz"))
    .remedy("nvidia-smi --reset-gpu-clocks and --reset-applications-clocks on this GPU, and find out who sets them"))
}

/// What each look says of that moment.
fn reasons(run: &BurnRun, log: &SensorLog) -> Judgement {
    let seen = looks_under_load(run, log)?;
    let looks: u64 = seen.values().sum();
    if looks == 0 {
        return Ok(Outcome::error(
            "the clocks event reasons were not read during the burn",
        ));
    }
    let all = seen.keys().fold(0, |all, it| all | it);
    let count = |bits: u64| -> u64 {
        let with = seen.iter().filter(|(reasons, _)| **reasons & bits != 0);
        with.map(|(_, count)| count).sum()
    };
    let held = || {
        let bits = WRONG | DOUBTFUL;
        format!(
            "clocks were held down by {} in {} of {looks} samples",
            ClocksEventReasons(all & bits).names().join(", "),
            count(bits),
        )
    };
    let outcome = if is_too_many(count(WRONG), looks) {
        Outcome::fail(held())
    } else if all & (WRONG | DOUBTFUL) != 0 {
        Outcome::warn(held())
    } else {
        return Ok(Outcome::pass(format!(
            "neither heat nor power supply held the clocks down in {looks} samples"
        )));
    };
    Ok(with_remedy(outcome))
}

/// How many looks found which reasons. Facts of older versions have the samples alone.
fn looks_under_load(run: &BurnRun, log: &SensorLog) -> Result<BTreeMap<u64, u64>, Outcome> {
    let samples = burned::samples_under_load(run, log)?;
    if !log.reasons_seen.is_empty() {
        return Ok(log.reasons_seen.clone());
    }
    let mut seen = BTreeMap::new();
    for reasons in samples.iter().filter_map(|it| it.reasons) {
        *seen.entry(reasons).or_default() += 1;
    }
    Ok(seen)
}

/// One sample is a moment, whatever part of a short burn that is.
#[expect(clippy::cast_precision_loss, reason = "a share needs no last digit")]
fn is_too_many(samples: u64, of: u64) -> bool {
    samples > 1 && samples as f64 > SHARE_MAXIMUM * of as f64
}

/// What the driver counted between two samples, too.
fn violation_times(run: &BurnRun, log: &SensorLog) -> Judgement {
    let before = log
        .before
        .violations
        .applicable("clock violation times before the burn")?;
    let after = log
        .after
        .violations
        .applicable("clock violation times after the burn")?;
    let causes = [
        (
            "hardware thermal slowdown",
            before.hw_thermal_ns,
            after.hw_thermal_ns,
            Verdict::Fail,
        ),
        (
            "a power brake",
            before.hw_power_brake_ns,
            after.hw_power_brake_ns,
            Verdict::Fail,
        ),
        (
            "thermal limits",
            before.thermal_ns,
            after.thermal_ns,
            Verdict::Warn,
        ),
    ];
    worst_of(causes.map(|(cause, before, after, verdict)| {
        let (Some(before), Some(after)) = (before, after) else {
            return Err(Outcome::skip(format!(
                "the driver keeps no time for {cause}"
            )));
        };
        #[expect(clippy::cast_precision_loss, reason = "a share needs no last digit")]
        let seconds = after.saturating_sub(before) as f64 / 1e9;
        let text =
            format!("{cause} held the clocks down for {seconds:.1} s by the driver's counter");
        if seconds <= SECONDS_MINIMUM || seconds <= SHARE_MAXIMUM * run.measured_s {
            return Ok(Outcome::pass(text));
        }
        Ok(with_remedy(match verdict {
            Verdict::Fail => Outcome::fail(text),
            _ => Outcome::warn(text),
        }))
    }))
}

fn with_remedy(outcome: Outcome) -> Outcome {
    outcome
        .expected("no slowdown by heat, power brake or hardware protection")
        .remedy("check cooling, fans, neighbours and power supplies; on a cloud machine, replace the instance")
}

#[cfg(test)]
mod tests {
    use super::{CHECK, is_too_many};
    use crate::facts::{Reading, SensorLog, ViolationTimes};
    use crate::findings::Verdict;
    use crate::test_machine::{burned_node, burned_node_with_sensors, healthy_node, judge_check};

    fn judge(change: impl FnOnce(&mut SensorLog)) -> Verdict {
        judge_check(&CHECK, &burned_node_with_sensors(change), "{}")[2].verdict
    }

    #[test]
    fn passes_on_every_gpu_and_skips_without_a_burn() {
        let findings = judge_check(&CHECK, &burned_node(), "{}");
        assert!(findings.iter().all(|it| it.verdict == Verdict::Pass));
        let findings = judge_check(&CHECK, &healthy_node(), "{}");
        assert!(findings.iter().all(|it| it.verdict == Verdict::Skip));
    }

    #[test]
    fn a_setting_that_lowers_the_clocks_warns() {
        for (reasons, sm_mhz, count, verdict) in [
            (0x2, 1005, 50, Verdict::Warn),
            (0x2, 1005, 26, Verdict::Warn),
            // In half of the samples, and near the maximum of 1980 MHz.
            (0x2, 1005, 25, Verdict::Pass),
            (0x2, 1782, 50, Verdict::Pass),
            (0x2, 1781, 50, Verdict::Warn),
            // The power limit binds first.
            (0x2 | 0x4, 1005, 50, Verdict::Pass),
        ] {
            let judged = judge(|log| {
                for sample in &mut log.samples[..count] {
                    sample.reasons = Some(reasons);
                    sample.sm_mhz = Some(sm_mhz);
                }
            });
            assert_eq!(judged, verdict, "{reasons:#x} {sm_mhz} {count}");
        }
    }

    #[test]
    fn each_reason_is_judged_also_beside_others() {
        for (reasons, once, twice) in [
            (0x4 | 0x40, Verdict::Warn, Verdict::Fail),
            (0x80, Verdict::Warn, Verdict::Fail),
            (0x8, Verdict::Warn, Verdict::Fail),
            (0x4 | 0x20, Verdict::Warn, Verdict::Warn),
            (0x4, Verdict::Pass, Verdict::Pass),
        ] {
            for (count, verdict) in [(1, once), (2, twice)] {
                let judged = judge(|log| {
                    for sample in &mut log.samples[20..20 + count] {
                        sample.reasons = Some(reasons);
                    }
                });
                assert_eq!(judged, verdict, "{reasons:#x} {count} times");
            }
        }
    }

    #[test]
    fn a_moment_in_a_long_burn_is_a_moment() {
        // Two looks in two hours, each in a sample that stands for seven hundred.
        let judged = |wrong_looks| {
            judge(|log| {
                for sample in &mut log.samples[20..22] {
                    sample.reasons = Some(0x4 | 0x40);
                }
                log.reasons_seen = [(0x4, 72_000 - wrong_looks), (0x4 | 0x40, wrong_looks)].into();
            })
        };
        assert_eq!(judged(2), Verdict::Warn);
        assert_eq!(judged(720), Verdict::Warn);
        assert_eq!(judged(721), Verdict::Fail);
    }

    #[test]
    fn a_hundredth_of_the_samples_is_no_fault_and_more_is() {
        for (samples, of, expected) in [
            (0, 0, false),
            (1, 2, false),
            (2, 2, true),
            (2, 200, false),
            (3, 200, true),
        ] {
            assert_eq!(is_too_many(samples, of), expected, "{samples} of {of}");
        }
    }

    #[test]
    fn time_between_samples_is_judged_by_the_drivers_counters() {
        type Change = fn(&mut ViolationTimes, u64);
        let causes: [(Change, Verdict); 4] = [
            (|it, ns| it.hw_thermal_ns = Some(ns), Verdict::Fail),
            (|it, ns| it.hw_power_brake_ns = Some(ns), Verdict::Fail),
            (|it, ns| it.thermal_ns = Some(ns), Verdict::Warn),
            (|it, ns| it.power_ns = Some(ns), Verdict::Pass),
        ];
        for (set, verdict) in causes {
            // A burn of 10 s, in which a hundredth are 0.1 s.
            for (grown_ns, verdict) in [(100_000_000, Verdict::Pass), (100_000_001, verdict)] {
                let judged = judge(|log| {
                    let mut times = ViolationTimes::default();
                    set(&mut times, 5);
                    log.before.violations = Reading::Value(times);
                    set(&mut times, 5 + grown_ns);
                    log.after.violations = Reading::Value(times);
                });
                assert_eq!(judged, verdict);
            }
        }
        let unread = judge(|log| log.after.violations = Reading::default());
        assert_eq!(unread, Verdict::Error);
    }

    #[test]
    fn a_burn_that_is_too_short_for_a_sample_is_skipped() {
        let mut facts = burned_node_with_sensors(|log| log.samples.clear());
        let uuid = facts.gpus[2].uuid.value().cloned().unwrap_or_default();
        let mut judge_after = |measured_s| {
            if let Some(Reading::Value(run)) = facts.load.burn.get_mut(&uuid) {
                run.measured_s = measured_s;
            }
            judge_check(&CHECK, &facts, "{}")[2].verdict
        };
        assert_eq!(judge_after(0.2), Verdict::Skip);
        assert_eq!(judge_after(1.0), Verdict::Error);
    }

    #[test]
    fn nothing_sampled_is_an_error() {
        assert_eq!(judge(|log| log.samples.clear()), Verdict::Error);
        assert_eq!(
            judge(|log| log.samples.iter_mut().for_each(|it| it.reasons = None)),
            Verdict::Error
        );
    }
}
