//! Clocks are not limited by a setting.
//!
//! ## Why
//! Locked or lowered clocks (`nvidia-smi --lock-memory-clocks`, a profiler that was killed, a
//! vendor's tool) make every job slower and outlive the process that set them.
//!
//! ## How it is judged
//! - In performance state P0 the memory clock must be at least 95 % of its maximum: `warn` below.
//!   In other states it is rightly low. (The SM clock of an idle GPU is low in every state, so it
//!   is judged under load, not here.)
//! - During the burn the median of the memory clock must be as high: `warn` below. Consumer cards
//!   are not judged there, which compute in P2 with a lower memory clock by design.
//! - During a burn of five seconds or more, the median of the SM clock must be half of its maximum
//!   or more: `warn` below, unless the power limit holds the clock down (power of 75 % of the limit
//!   or more, or the reason `sw_power_cap` in most samples); `error` where the GPU worked at 0 MHz.
//! - The greatest SM and memory clocks must be those of the other GPUs of the same name in this
//!   machine: `warn` below.
//!
//! Skipped where GPU and driver report no maximum and there is no other GPU.
//!
//! ## What to do
//! `nvidia-smi --reset-memory-clocks --reset-gpu-clocks` and
//! `nvidia-smi --reset-applications-clocks` on the GPU; find out who sets them.
//!
//! ## Source
//! `nvmlDeviceGetClockInfo` and `nvmlDeviceGetMaxClockInfo`,
//! <https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html>. On an idle H200 in P0
//! the memory clock is exactly its maximum; the 5 % are room for the few MHz by which other models
//! differ (a T4 runs at 5000 of 5001).

use crate::burned;
use crate::check::{Check, Judge, JudgeGpu};
use crate::expect;
use crate::facts::{BurnRun, Clocks, ClocksEventReasons, Facts, GpuFacts, SensorLog, SensorSample};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::siblings::Greatest;
use crate::tally::worst_of;

pub(crate) const CHECK: Check = Check {
    id: "clocks",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpuAmongAll(among_all),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html",
};

/// Of the maximum, in P0; see Source above.
const MEMORY_CLOCK_MINIMUM: f64 = 0.95;

/// Of the maximum, under load below the power limit. This project's own choice: H100 and H200 keep
/// 65 % and more even at their power limit (BENCHMARKS.md); a GPU that was ill kept 17 %.
const SM_CLOCK_MINIMUM: f64 = 0.5;
/// Of the power limit, as in `burn_power`: from here on power holds the clock down.
const AT_THE_POWER_LIMIT: f64 = 0.75;
/// Power is averaged over a second and clocks follow it, as in `burn_power`.
const MEASURED_MINIMUM_S: f64 = 5.0;

const REMEDY: &str = "nvidia-smi --reset-gpu-clocks, --reset-memory-clocks and --reset-applications-clocks on this GPU, and find out who sets them";

/// The greatest clock of a kind, by product name.
type GreatestClock<'f> = Greatest<'f, &'f str, u32>;

fn among_all<'f>(facts: &'f Facts, profile: &'f Profile) -> JudgeGpu<'f> {
    let greatest = |maximum: Maximum| {
        Greatest::of(facts, |it| {
            let mhz = maximum(it.clocks.value()?)?;
            Some((it.name.value()?.as_str(), mhz))
        })
    };
    let (sm, memory) = (greatest(max_sm_mhz), greatest(max_memory_mhz));
    Box::new(move |gpu| judge(gpu, facts, profile, (&sm, &memory)))
}

type Maximum = fn(&Clocks) -> Option<u32>;

fn max_sm_mhz(clocks: &Clocks) -> Option<u32> {
    clocks.max_sm_mhz
}

fn max_memory_mhz(clocks: &Clocks) -> Option<u32> {
    clocks.max_memory_mhz
}

fn judge(
    gpu: &GpuFacts,
    facts: &Facts,
    profile: &Profile,
    (sm, memory): (&GreatestClock<'_>, &GreatestClock<'_>),
) -> Judgement {
    let clocks = gpu.clocks.applicable("clocks")?;
    worst_of([
        judge_memory_clock(clocks, gpu),
        judge_memory_clock_under_load(clocks, gpu, facts, profile),
        judge_sm_clock_under_load(clocks, gpu, facts, profile),
        Ok(judge_maximum("SM", gpu, max_sm_mhz, sm)),
        Ok(judge_maximum("memory", gpu, max_memory_mhz, memory)),
    ])
}

fn judge_memory_clock(clocks: &Clocks, gpu: &GpuFacts) -> Judgement {
    let Some(maximum_mhz) = clocks.max_memory_mhz else {
        return Ok(Outcome::skip("the GPU reports no maximum memory clock"));
    };
    let state = *gpu.performance_state.applicable("performance state")?;
    let current_mhz = clocks.memory_mhz;
    if state != 0 {
        return Ok(Outcome::pass(format!(
            "the memory clock is {current_mhz} MHz in P{state}"
        )));
    }
    let minimum_mhz = minimum_of(maximum_mhz);
    if f64::from(current_mhz) < minimum_mhz {
        return Ok(Outcome::warn(format!(
            "the memory clock is {current_mhz} MHz in P0, {maximum_mhz} MHz is its maximum"
        ))
        .expected(format!("at least {minimum_mhz:.0} MHz"))
        .observed(format!("{current_mhz} MHz"))
        .remedy(REMEDY));
    }
    Ok(Outcome::pass(format!(
        "the memory clock is {current_mhz} of {maximum_mhz} MHz"
    )))
}

fn minimum_of(maximum_mhz: u32) -> f64 {
    (f64::from(maximum_mhz) * MEMORY_CLOCK_MINIMUM).floor()
}

fn judge_memory_clock_under_load(
    clocks: &Clocks,
    gpu: &GpuFacts,
    facts: &Facts,
    profile: &Profile,
) -> Judgement {
    let maximum_mhz = clocks
        .max_memory_mhz
        .filter(|_| expect::model_has(gpu, |model| model.data_center))
        .ok_or_else(|| Outcome::skip("what the memory clock is under load is not known"))?;
    let (run, log) = burned::sensors_of(gpu, facts, profile)
        .map_err(|_| Outcome::skip("the memory clock was not read under load"))?;
    let mut seen: Vec<f64> = log
        .samples
        .iter()
        .filter(|it| it.t >= 0.0 && f64::from(it.t) <= run.load_s())
        .filter_map(|it| it.memory_mhz)
        .map(f64::from)
        .collect();
    let median_mhz = burned::median(&mut seen)
        .ok_or_else(|| Outcome::skip("the memory clock was not read under load"))?;
    let minimum_mhz = minimum_of(maximum_mhz);
    if median_mhz < minimum_mhz {
        return Ok(Outcome::warn(format!(
            "the memory clock was {median_mhz:.0} MHz under load, {maximum_mhz} MHz is its maximum"
        ))
        .expected(format!("at least {minimum_mhz:.0} MHz"))
        .observed(format!("{median_mhz:.0} MHz"))
        .remedy(REMEDY));
    }
    Ok(Outcome::pass(format!(
        "the memory clock was {median_mhz:.0} of {maximum_mhz} MHz under load"
    )))
}

fn judge_sm_clock_under_load(
    clocks: &Clocks,
    gpu: &GpuFacts,
    facts: &Facts,
    profile: &Profile,
) -> Judgement {
    let not_read = || Outcome::skip("the SM clock was not read under load");
    let maximum_mhz = clocks.max_sm_mhz.ok_or_else(not_read)?;
    let (run, log) = burned::sensors_of(gpu, facts, profile).map_err(|_| not_read())?;
    if run.measured_s < MEASURED_MINIMUM_S || gpu.mig.value().is_some_and(|mig| mig.current) {
        return Err(not_read());
    }
    let samples = burned::samples_under_load(run, log).map_err(|_| not_read())?;
    let clock = |it: &&SensorSample| it.sm_mhz.map(f64::from);
    let mut seen: Vec<f64> = samples.iter().filter_map(clock).collect();
    let median_mhz = burned::median(&mut seen).ok_or_else(not_read)?;
    let text = format!("the SM clock was {median_mhz:.0} of {maximum_mhz} MHz under load");
    if median_mhz <= 0.0 {
        return Ok(Outcome::error(text).remedy("a GPU that computes has a clock: reset the GPU"));
    }
    let minimum_mhz = f64::from(maximum_mhz) * SM_CLOCK_MINIMUM;
    if median_mhz >= minimum_mhz || is_at_its_power_limit(run, log, &samples) {
        return Ok(Outcome::pass(text));
    }
    let outcome = Outcome::warn(format!("{text}, below the power limit"))
        .expected(format!("at least {minimum_mhz:.0} MHz"))
        .observed(format!("{median_mhz:.0} MHz"))
        .remedy(REMEDY);
    burned::unless_others_use_it(Ok(outcome), gpu, facts)
}

/// Also where it is not known.
fn is_at_its_power_limit(run: &BurnRun, log: &SensorLog, samples: &[&SensorSample]) -> bool {
    let is_capped = |it: &&&SensorSample| {
        let reasons = ClocksEventReasons(it.reasons.unwrap_or(0));
        reasons.contains(ClocksEventReasons::SW_POWER_CAP)
    };
    if samples.iter().filter(is_capped).count() * 2 > samples.len() {
        return true;
    }
    let mean_mw = burned::power_in_second_half_mw(run, samples);
    let (Some(mean_mw), Some(limit_mw)) = (mean_mw, log.power_limit_mw) else {
        return true;
    };
    mean_mw >= f64::from(limit_mw) * AT_THE_POWER_LIMIT
}

fn judge_maximum(
    what: &str,
    gpu: &GpuFacts,
    maximum: Maximum,
    greatest: &GreatestClock<'_>,
) -> Outcome {
    let own_mhz = gpu.clocks.value().and_then(maximum);
    let name = gpu.name.value().map(String::as_str);
    let greatest_mhz = name.and_then(|it| greatest.of_others(&it, &gpu.uuid));
    let (Some(own_mhz), Some(greatest_mhz)) = (own_mhz, greatest_mhz) else {
        return Outcome::skip(format!(
            "there is no other GPU to compare the greatest {what} clock with"
        ));
    };
    if own_mhz < greatest_mhz {
        return Outcome::warn(format!(
            "the greatest {what} clock is {own_mhz} MHz, another GPU of this model here has {greatest_mhz} MHz"
        ))
        .expected(format!("{greatest_mhz} MHz"))
        .observed(format!("{own_mhz} MHz"))
        .remedy(REMEDY);
    }
    Outcome::pass(format!("the greatest {what} clock is {own_mhz} MHz"))
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{Clocks, GpuFacts, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        burned_node_with_sensors, healthy_t4, judge_check, judge_gpu, judge_healthy,
        judge_only_gpu, make_model_unknown,
    };

    fn change(gpu: &mut GpuFacts, change: impl FnOnce(&mut Clocks)) {
        let Reading::Value(clocks) = &mut gpu.clocks else {
            panic!("the healthy GPU has clocks")
        };
        change(clocks);
    }

    fn with(set: impl FnOnce(&mut Clocks)) -> Finding {
        judge_gpu(&CHECK, "{}", |gpu| change(gpu, set))
    }

    #[test]
    fn passes_idle_in_p0_and_in_p8() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Pass)
        );
        assert_eq!(
            judge_only_gpu(&CHECK, "{}", healthy_t4()).verdict,
            Verdict::Pass
        );
    }

    #[test]
    fn warns_of_a_low_memory_clock_in_p0() {
        // 95 % of 3201 MHz, rounded down.
        assert_eq!(with(|it| it.memory_mhz = 3040).verdict, Verdict::Pass);
        let finding = with(|it| it.memory_mhz = 3039);
        assert_eq!(finding.verdict, Verdict::Warn);
        let locked = with(|it| it.memory_mhz = 2201);
        assert_eq!(
            locked.summary,
            "the memory clock is 2201 MHz in P0, 3201 MHz is its maximum"
        );
    }

    #[test]
    fn warns_of_a_low_memory_clock_under_load() {
        for (memory_mhz, verdict) in [
            (3040, Verdict::Pass),
            (3039, Verdict::Warn),
            (1600, Verdict::Warn),
        ] {
            let facts = burned_node_with_sensors(|log| {
                for sample in &mut log.samples {
                    sample.memory_mhz = Some(memory_mhz);
                }
            });
            let finding = judge_check(&CHECK, &facts, "{}").swap_remove(2);
            assert_eq!(finding.verdict, verdict, "{}", finding.summary);
        }
    }

    #[test]
    fn a_card_that_computes_in_another_state_by_design_passes() {
        let mut facts = burned_node_with_sensors(|log| {
            for sample in &mut log.samples {
                sample.memory_mhz = Some(2900);
            }
        });
        make_model_unknown(&mut facts.gpus[2]);
        let finding = judge_check(&CHECK, &facts, "{}").swap_remove(2);
        assert_eq!(finding.verdict, Verdict::Pass, "{}", finding.summary);
    }

    #[test]
    fn a_low_sm_clock_under_load_warns_below_the_power_limit() {
        let judge = |mhz: u32, power_mw: u32, reasons: u64| {
            let facts = burned_node_with_sensors(|log| {
                for sample in &mut log.samples {
                    sample.sm_mhz = Some(mhz);
                    sample.power_mw = Some(power_mw);
                    sample.reasons = Some(reasons);
                }
            });
            judge_check(&CHECK, &facts, "{}").swap_remove(2)
        };
        for (mhz, power_mw, reasons, verdict) in [
            (345, 200_000, 0, Verdict::Warn),
            (989, 200_000, 0, Verdict::Warn),
            (991, 200_000, 0, Verdict::Pass),
            (345, 600_000, 0, Verdict::Pass),
            (345, 200_000, 0x4, Verdict::Pass),
            (0, 600_000, 0x4, Verdict::Error),
        ] {
            let finding = judge(mhz, power_mw, reasons);
            assert_eq!(finding.verdict, verdict, "{}", finding.summary);
        }
    }

    #[test]
    fn an_absurd_maximum_does_not_overflow() {
        let finding = with(|it| it.max_memory_mhz = Some(u32::MAX));
        assert_eq!(finding.verdict, Verdict::Warn);
    }

    #[test]
    fn warns_of_a_lower_maximum_than_its_siblings() {
        let finding = with(|it| it.max_sm_mhz = Some(1755));
        assert_eq!(finding.verdict, Verdict::Warn);
        let finding = with(|it| {
            it.max_memory_mhz = Some(2619);
            it.memory_mhz = 2619;
        });
        assert_eq!(finding.verdict, Verdict::Warn);
    }

    #[test]
    fn errs_when_clocks_or_state_were_not_read() {
        let clocks = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.clocks = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(clocks.verdict, Verdict::Error);
        let state = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.performance_state = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(state.verdict, Verdict::Error);
    }

    #[test]
    fn skips_where_there_is_nothing_to_compare() {
        let mut gpu = healthy_t4();
        change(&mut gpu, |it| {
            it.max_sm_mhz = None;
            it.max_memory_mhz = None;
        });
        assert_eq!(judge_only_gpu(&CHECK, "{}", gpu).verdict, Verdict::Skip);
        let finding = judge_gpu(&CHECK, "{}", |gpu| gpu.clocks = Reading::NotSupported);
        assert_eq!(finding.verdict, Verdict::Skip);
    }
}
