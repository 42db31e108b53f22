//! An idle GPU draws about as much power as its idle neighbours.
//!
//! ## Why
//! A GPU that draws far more than the others of its model without any work has a fault in its power delivery, clocks that do
//! not fall, or work that no process list shows. It heats its neighbours, and its own jobs meet the power limit early.
//!
//! ## How it is judged
//! Against the median of the other idle GPUs of this model in the node, three at least: `warn` where it is more than 100 W above
//! it, and more than six times what their spread explains. A GPU is idle without a process, without work, and with an SM clock of
//! at most half of its greatest. Skipped where fewer are idle, where the GPU itself is not, and where NVML has no power draw.
//!
//! ## What to do
//! Look for work in containers and on the host, reset the GPU, and compare again. Where it stays, have its board inspected; on a
//! cloud machine, replace the instance.
//!
//! ## Source
//! `nvmlDeviceGetPowerUsage`, <https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html>. The 100 W are this
//! project's own choice: of four idle H100s the one that had just worked was 54 W above the others' median, of eight idle H200s
//! the highest 7 W (`tests/facts`).

use crate::check::{Check, Judge};
use crate::facts::{Facts, GpuFacts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::neighbours::{idle_neighbours, median_below};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "idle_power",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html",
};

/// Healthy boards differ by less: see the source above.
const DIFFERENCE_MINIMUM_W: f64 = 100.0;

fn judge(gpu: &GpuFacts, facts: &Facts, _: &Profile) -> Judgement {
    let watts = |it: &GpuFacts| Some(f64::from(it.power.value()?.draw_mw?) / 1000.0);
    let skip = |reason: &str| Outcome::skip(reason.to_owned());
    let own = watts(gpu).ok_or_else(|| skip("the power draw of this GPU is not known"))?;
    let others: Vec<f64> = idle_neighbours(gpu, facts)
        .into_iter()
        .filter_map(watts)
        .collect();
    if others.len() < 3 {
        return Err(skip(
            "fewer than three other GPUs of this model are idle at the same time",
        ));
    }
    Ok(match median_below(own, others, DIFFERENCE_MINIMUM_W) {
        None => Outcome::pass(format!("the idle GPU draws {own:.0} W")),
        Some(median) => Outcome::warn(format!(
            "the idle GPU draws {own:.0} W, its idle neighbours {median:.0} W in the median"
        ))
        .expected(format!("at most {:.0} W", median + DIFFERENCE_MINIMUM_W))
        .observed(format!("{own:.0} W"))
        .remedy(
            "look for work that no process list shows, reset the GPU, and compare again; have the board inspected where it stays",
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{Clocks, GpuFacts, Power, Reading, Utilization};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        healthy_node, healthy_t4, judge_check, judge_only_gpu, python_process,
    };

    fn idle(gpu: &mut GpuFacts, watts: u32) {
        gpu.processes = Reading::Value(Vec::new());
        gpu.utilization = Reading::Value(Utilization::default());
        gpu.clocks = Reading::Value(Clocks {
            sm_mhz: 345,
            max_sm_mhz: Some(1980),
            ..Clocks::default()
        });
        gpu.power = Reading::Value(Power {
            draw_mw: Some(watts * 1000),
            limit_mw: 700_000,
            ..Power::default()
        });
    }

    /// The finding of GPU 3, and the others' verdicts, where that one draws so much.
    fn judge(watts: u32, change: impl FnOnce(&mut GpuFacts)) -> Finding {
        let mut facts = healthy_node();
        for gpu in &mut facts.gpus {
            idle(gpu, 80);
        }
        idle(&mut facts.gpus[3], watts);
        change(&mut facts.gpus[3]);
        let mut findings = judge_check(&CHECK, &facts, "{}");
        let others = findings.iter().enumerate().filter(|(at, _)| *at != 3);
        assert!(
            others
                .map(|(_, it)| it.verdict)
                .all(|it| it == Verdict::Pass)
        );
        findings.swap_remove(3)
    }

    #[test]
    fn warns_of_a_gpu_that_draws_far_more_than_its_neighbours() {
        assert_eq!(judge(180, |_| {}).verdict, Verdict::Pass);
        let finding = judge(320, |_| {});
        assert_eq!(finding.verdict, Verdict::Warn);
        assert!(finding.summary.contains("320 W"), "{}", finding.summary);
    }

    #[test]
    fn a_gpu_at_work_or_alone_is_not_compared() {
        let at_work =
            |gpu: &mut GpuFacts| gpu.processes = Reading::Value(vec![python_process(400)]);
        assert_eq!(judge(320, at_work).verdict, Verdict::Skip);
        let just_worked = |gpu: &mut GpuFacts| {
            gpu.clocks = Reading::Value(Clocks {
                sm_mhz: 1980,
                max_sm_mhz: Some(1980),
                ..Clocks::default()
            });
        };
        assert_eq!(judge(320, just_worked).verdict, Verdict::Skip);
        let mut alone = healthy_t4();
        idle(&mut alone, 320);
        assert_eq!(judge_only_gpu(&CHECK, "{}", alone).verdict, Verdict::Skip);
    }
}
