//! No active clock throttling.
//!
//! ## Why
//! Heat, a power brake from the power supply, or the hardware's own protection can halve a GPU's
//! clocks. Jobs still run, and are slow for no visible reason.
//!
//! ## How it is judged
//! NVML's clocks event reasons are a bit mask; every bit is judged by itself.
//! - `fail`: `hw_thermal_slowdown`, `hw_power_brake_slowdown`; `hw_slowdown` while the GPU is at
//!   work.
//! - `warn`: `sw_thermal_slowdown`; `hw_slowdown` on an idle GPU (it may show for a moment while
//!   clocks change); `sw_power_cap` on an idle GPU (a limit that binds without work is too low);
//!   bits that this version does not know.
//! - Pass: `gpu_idle`, `sw_power_cap` at work (a GPU under full load is meant to run at its power
//!   limit), and the reasons that a setting causes: `applications_clocks_setting`, `sync_boost`,
//!   `display_clocks_setting`.
//!
//! This is one moment; `throttle_history` judges the time since the driver was loaded.
//!
//! ## What to do
//! Thermal: check cooling, fans, air filters and neighbours. Power brake: check power supplies and
//! their cables. On a cloud machine, replace the instance.
//!
//! ## Source
//! `nvmlClocksEventReasons`,
//! <https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html>; DCGM objects to
//! the bits 0xE8.

use crate::check::{Check, Judge};
use crate::facts::{ClocksEventReasons, Facts, GpuFacts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "throttle_reasons",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html",
};

/// Wrong whatever the GPU does.
const ALWAYS_WRONG: u64 =
    ClocksEventReasons::HW_THERMAL_SLOWDOWN | ClocksEventReasons::HW_POWER_BRAKE_SLOWDOWN;
/// Wrong at work; an idle GPU may show it while its performance state changes (nvml.h says so).
const WRONG_AT_WORK: u64 = ClocksEventReasons::HW_SLOWDOWN;
/// Too warm, but the driver still has it in hand.
const DOUBTFUL: u64 = ClocksEventReasons::SW_THERMAL_SLOWDOWN;
/// Right at work, strange when idle.
const DOUBTFUL_WHEN_IDLE: u64 = ClocksEventReasons::SW_POWER_CAP;
/// Idle, or configured by somebody.
const RIGHT: u64 = ClocksEventReasons::GPU_IDLE
    | ClocksEventReasons::APPLICATIONS_CLOCKS_SETTING
    | ClocksEventReasons::SYNC_BOOST
    | ClocksEventReasons::DISPLAY_CLOCKS_SETTING;
const UNKNOWN: u64 = !(ALWAYS_WRONG | WRONG_AT_WORK | DOUBTFUL | DOUBTFUL_WHEN_IDLE | RIGHT);

fn judge(gpu: &GpuFacts, _: &Facts, _: &Profile) -> Judgement {
    let reasons = *gpu
        .clocks_event_reasons
        .applicable("clocks event reasons")?;
    let is_idle = reasons.contains(ClocksEventReasons::GPU_IDLE);
    let (wrong, doubtful) = if is_idle {
        (
            ALWAYS_WRONG,
            WRONG_AT_WORK | DOUBTFUL | DOUBTFUL_WHEN_IDLE | UNKNOWN,
        )
    } else {
        (ALWAYS_WRONG | WRONG_AT_WORK, DOUBTFUL | UNKNOWN)
    };
    let all = names(reasons.0);
    let objection = |bits: u64| format!("clocks are held down by {}", names(reasons.0 & bits));
    let outcome = if reasons.contains(wrong) {
        Outcome::fail(objection(wrong | doubtful))
    } else if reasons.contains(doubtful) {
        let idle = if is_idle {
            " although the GPU is idle"
        } else {
            ""
        };
        Outcome::warn(format!("{}{idle}", objection(doubtful)))
    } else {
        return Ok(Outcome::pass(format!("clocks event reasons: {all}")));
    };
    Ok(outcome
        .expected("no slowdown by heat, power brake or hardware protection")
        .observed(format!("{all} ({:#x})", reasons.0))
        .remedy(remedy(reasons)))
}

fn names(bits: u64) -> String {
    let names = ClocksEventReasons(bits).names();
    if names.is_empty() {
        return "none".to_owned();
    }
    names.join(", ")
}

fn remedy(reasons: ClocksEventReasons) -> &'static str {
    let heat = ClocksEventReasons::HW_THERMAL_SLOWDOWN | ClocksEventReasons::SW_THERMAL_SLOWDOWN;
    if reasons.contains(ClocksEventReasons::HW_POWER_BRAKE_SLOWDOWN) {
        "check power supplies and their cables; on a cloud machine, replace the instance"
    } else if reasons.contains(heat) {
        "check cooling, fans and neighbours; on a cloud machine, replace the instance"
    } else if reasons.contains(ClocksEventReasons::SW_POWER_CAP) {
        "see power_limit: a limit that binds an idle GPU is too low"
    } else {
        "run again in a minute; if it stays, check power and cooling"
    }
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{ClocksEventReasons as Bits, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{judge_gpu, judge_healthy};

    fn with(bits: u64) -> Finding {
        judge_gpu(&CHECK, "{}", |gpu| {
            gpu.clocks_event_reasons = Reading::Value(Bits(bits));
        })
    }

    #[test]
    fn passes_when_idle() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Pass)
        );
        assert_eq!(with(0).verdict, Verdict::Pass);
    }

    #[test]
    fn a_power_cap_is_right_at_work_and_doubtful_when_idle() {
        assert_eq!(with(Bits::SW_POWER_CAP).verdict, Verdict::Pass);
        assert_eq!(
            with(Bits::SW_POWER_CAP | Bits::GPU_IDLE).verdict,
            Verdict::Warn
        );
    }

    #[test]
    fn what_somebody_configured_passes() {
        for bit in [
            Bits::APPLICATIONS_CLOCKS_SETTING,
            Bits::SYNC_BOOST,
            Bits::DISPLAY_CLOCKS_SETTING,
        ] {
            assert_eq!(with(bit).verdict, Verdict::Pass, "{bit:#x}");
        }
    }

    #[test]
    fn fails_on_each_hardware_reason_alone_and_in_company() {
        for bit in [
            Bits::HW_SLOWDOWN,
            Bits::HW_THERMAL_SLOWDOWN,
            Bits::HW_POWER_BRAKE_SLOWDOWN,
        ] {
            for company in [0, Bits::SW_POWER_CAP, Bits::SYNC_BOOST, 0x1000] {
                assert_eq!(with(bit | company).verdict, Verdict::Fail, "{bit:#x}");
            }
        }
    }

    #[test]
    fn heat_and_brake_fail_on_an_idle_gpu_too() {
        for bit in [Bits::HW_THERMAL_SLOWDOWN, Bits::HW_POWER_BRAKE_SLOWDOWN] {
            assert_eq!(
                with(bit | Bits::GPU_IDLE | Bits::HW_SLOWDOWN).verdict,
                Verdict::Fail
            );
        }
        assert_eq!(
            with(Bits::HW_SLOWDOWN | Bits::GPU_IDLE).verdict,
            Verdict::Warn
        );
    }

    #[test]
    fn combined_bits_are_all_named() {
        let finding = with(Bits::HW_SLOWDOWN | Bits::HW_THERMAL_SLOWDOWN | Bits::SW_POWER_CAP);
        assert_eq!(
            finding.summary,
            "clocks are held down by hw_slowdown, hw_thermal_slowdown"
        );
        assert_eq!(
            finding.observed.as_deref(),
            Some("sw_power_cap, hw_slowdown, hw_thermal_slowdown (0x4c)")
        );
        assert!(finding.remedy.unwrap().contains("cooling"));
    }

    #[test]
    fn warns_of_software_thermal_slowdown_and_of_unknown_bits() {
        assert_eq!(with(Bits::SW_THERMAL_SLOWDOWN).verdict, Verdict::Warn);
        let unknown = with(0x1000);
        assert_eq!(unknown.verdict, Verdict::Warn);
        assert!(unknown.summary.contains("0x1000"));
    }

    #[test]
    fn errs_when_they_were_not_read_and_skips_where_there_are_none() {
        let not_read = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.clocks_event_reasons = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(not_read.verdict, Verdict::Error);
        let none = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.clocks_event_reasons = Reading::NotSupported;
        });
        assert_eq!(none.verdict, Verdict::Skip);
    }
}
