//! Nothing but the power limit holds the clocks down during the burn.
//!
//! ## Why
//! A GPU under full load is meant to run at its power limit. Heat, a power brake or the hardware's own protection take away
//! more than that, and a node that slows down makes every other node of a job wait.
//!
//! ## How it is judged
//! NVML's clocks event reasons of every sample under load. `fail`: `hw_thermal_slowdown`, `hw_power_brake_slowdown` or
//! `hw_slowdown` in any sample. `warn`: `sw_thermal_slowdown` in any sample. The power cap is normal. `error` where no sample
//! has reasons. Skipped where no burn was asked for.
//!
//! ## What to do
//! Thermal: check cooling, fans, air filters and neighbours. Power brake: check power supplies and their cables. On a cloud
//! machine, replace the instance.
//!
//! ## Source
//! `nvmlClocksEventReasons`, <https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html>; DCGM objects to
//! the bits 0xE8.

use crate::burned;
use crate::check::{Check, Judge};
use crate::facts::{ClocksEventReasons, Facts, GpuFacts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;

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

fn judge(gpu: &GpuFacts, facts: &Facts, _: &Profile) -> Judgement {
    let (run, log) = burned::sensors_of(gpu, facts)?;
    let samples = burned::samples_under_load(run, log)?;
    let reasons: Vec<u64> = samples.iter().filter_map(|it| it.reasons).collect();
    if reasons.is_empty() {
        return Ok(Outcome::error(
            "the clocks event reasons were not read during the burn",
        ));
    }
    let all = reasons.iter().fold(0, |all, it| all | it);
    let held = |bits: u64| {
        let count = reasons.iter().filter(|it| **it & bits != 0).count();
        format!(
            "clocks were held down by {} in {count} of {} samples",
            ClocksEventReasons(all & bits).names().join(", "),
            reasons.len()
        )
    };
    let outcome = if all & WRONG != 0 {
        Outcome::fail(held(WRONG | DOUBTFUL))
    } else if all & DOUBTFUL != 0 {
        Outcome::warn(held(DOUBTFUL))
    } else {
        return Ok(Outcome::pass(format!(
            "neither heat nor power supply held the clocks down in {} samples",
            reasons.len()
        )));
    };
    Ok(outcome
        .expected("no slowdown by heat, power brake or hardware protection")
        .remedy("check cooling, fans, neighbours and power supplies; on a cloud machine, replace the instance"))
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::SensorLog;
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
    fn each_reason_is_judged_also_beside_others() {
        for (reasons, verdict) in [
            (0x4 | 0x40, Verdict::Fail),
            (0x80, Verdict::Fail),
            (0x8, Verdict::Fail),
            (0x4 | 0x20, Verdict::Warn),
            (0x4, Verdict::Pass),
        ] {
            let judged = judge(|log| log.samples[20].reasons = Some(reasons));
            assert_eq!(judged, verdict, "{reasons:#x}");
        }
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
