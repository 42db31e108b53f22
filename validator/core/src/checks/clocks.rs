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

use crate::check::{Check, Judge};
use crate::facts::{Clocks, Facts, GpuFacts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::tally::worst_of;

pub(crate) const CHECK: Check = Check {
    id: "clocks",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html",
};

/// Of the maximum, in P0; see Source above.
const MEMORY_CLOCK_MINIMUM_PERCENT: u64 = 95;

const REMEDY: &str = "nvidia-smi --reset-gpu-clocks, --reset-memory-clocks and --reset-applications-clocks on this GPU, and find out who sets them";

fn judge(gpu: &GpuFacts, facts: &Facts, _: &Profile) -> Judgement {
    let clocks = gpu.clocks.applicable("clocks")?;
    worst_of([
        judge_memory_clock(clocks, gpu),
        Ok(judge_maximum("SM", gpu, facts, |it| it.max_sm_mhz)),
        Ok(judge_maximum("memory", gpu, facts, |it| it.max_memory_mhz)),
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
    let minimum_mhz = u64::from(maximum_mhz) * MEMORY_CLOCK_MINIMUM_PERCENT / 100;
    if u64::from(current_mhz) < minimum_mhz {
        return Ok(Outcome::warn(format!(
            "the memory clock is {current_mhz} MHz in P0, {maximum_mhz} MHz is its maximum"
        ))
        .expected(format!("at least {minimum_mhz} MHz"))
        .observed(format!("{current_mhz} MHz"))
        .remedy(REMEDY));
    }
    Ok(Outcome::pass(format!(
        "the memory clock is {current_mhz} of {maximum_mhz} MHz"
    )))
}

fn judge_maximum(
    what: &str,
    gpu: &GpuFacts,
    facts: &Facts,
    maximum: fn(&Clocks) -> Option<u32>,
) -> Outcome {
    let siblings = facts.gpus.iter().filter(|it| {
        it.uuid != gpu.uuid && it.name.value().is_some() && it.name.value() == gpu.name.value()
    });
    let of = |it: &GpuFacts| maximum(it.clocks.value()?);
    let (Some(own_mhz), Some(greatest_mhz)) = (of(gpu), siblings.filter_map(of).max()) else {
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
    use crate::test_machine::{healthy_t4, judge_gpu, judge_healthy, judge_only_gpu};

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
