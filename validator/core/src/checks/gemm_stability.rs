//! The throughput is constant for the duration of the burn.
//!
//! ## Why
//! A GPU whose rate comes and goes makes every other GPU of a job wait, although its mean may
//! appear right. Heat that builds up, power that is taken away and a part that drops out and
//! returns all show in time first.
//!
//! ## How it is judged
//! The rates of the intervals of half a second, the first second of each precision left out. `warn`
//! when one in twenty or more lies more than 10 % below the median, which names other users of the
//! GPU if there were any. `error` where a rate is no number. Skipped where there are fewer than six
//! intervals, for MIG devices, whose GPU may have other guests, and where no burn was requested.
//!
//! ## What to do
//! See `burn_throttling` and `burn_temperature` for that time; check for other users of the
//! GPU, and for what else the host does.
//!
//! ## Source
//! The bound is gpu-fryer's for a GPU that is below the others,
//! <https://github.com/huggingface/gpu-fryer>; on one H200 the rates of a minute lie within 2 %.

use crate::burned;
use crate::check::{Check, Judge};
use crate::facts::{Facts, GpuFacts, PrecisionRun};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::tally::worst_of;

pub(crate) const CHECK: Check = Check {
    id: "gemm_stability",
    stage: Stage::Load,
    level: Level::Standard,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://github.com/huggingface/gpu-fryer",
};

/// gpu-fryer's bound, here of an interval against the median.
const SHARE_MINIMUM: f64 = 0.90;
/// One interval in twenty may be slow: a host that is busy for a moment delays a launch (this
/// project's own choice).
const SLOW_INTERVALS_IN: usize = 20;
/// Fewer say nothing of time (this project's own choice).
const INTERVALS_MINIMUM: usize = 6;

fn judge(gpu: &GpuFacts, facts: &Facts, profile: &Profile) -> Judgement {
    let run = burned::run_of(gpu, facts, profile)?;
    if gpu.mig.value().is_some_and(|mig| mig.current) {
        return Ok(Outcome::skip("a MIG device shares its GPU with others"));
    }
    if run.precisions.is_empty() {
        return Ok(Outcome::skip(
            "nothing was multiplied, which gemm_numerics reports",
        ));
    }
    let worst = worst_of(run.precisions.iter().map(judge_products));
    burned::unless_others_use_it(worst, gpu, facts)
}

fn judge_products(products: &PrecisionRun) -> Judgement {
    let precision = products.precision;
    let rates = burned::rates_after_warm_up(products);
    if rates.len() < INTERVALS_MINIMUM {
        return Err(Outcome::skip(format!(
            "{precision}: the burn was too short to judge the spread over time"
        )));
    }
    if let Some(rate) = rates.iter().find(|it| !it.is_finite()) {
        return Ok(Outcome::error(format!("{precision}: a rate is {rate}")));
    }
    let Some(median) = burned::median(&mut rates.clone()) else {
        return Ok(Outcome::error(format!("{precision}: there are no rates")));
    };
    let slow = rates
        .iter()
        .filter(|it| **it < median * SHARE_MINIMUM)
        .count();
    let (least, most) = rates
        .iter()
        .fold((f64::INFINITY, 0.0_f64), |(least, most), it| {
            (least.min(*it), most.max(*it))
        });
    let text = format!(
        "{precision}: {least:.1} to {most:.1} TFLOP/s over {} intervals, median {median:.1}",
        rates.len()
    );
    if slow * SLOW_INTERVALS_IN >= rates.len() && slow > 0 {
        return Ok(Outcome::warn(format!(
            "{text}; {slow} lie more than {:.0} % below the median",
            (1.0 - SHARE_MINIMUM) * 100.0
        ))
        .expected(format!(
            "at least {:.1} TFLOP/s in nearly every interval",
            median * SHARE_MINIMUM
        ))
        .remedy("see burn_throttling and burn_temperature; check for other users of the GPU"));
    }
    Ok(Outcome::pass(text))
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::findings::Verdict;
    use crate::test_machine::{burned_node, burned_node_with, healthy_node, judge_check};

    fn judge(intervals: Vec<f32>) -> Verdict {
        let facts = burned_node_with(|run| run.precisions[0].tflops_intervals = intervals);
        judge_check(&CHECK, &facts, "{}")[2].verdict
    }

    #[test]
    fn passes_on_every_gpu_and_skips_without_a_burn() {
        let findings = judge_check(&CHECK, &burned_node(), "{}");
        assert!(findings.iter().all(|it| it.verdict == Verdict::Pass));
        let findings = judge_check(&CHECK, &healthy_node(), "{}");
        assert!(findings.iter().all(|it| it.verdict == Verdict::Skip));
        let facts = burned_node_with(|run| run.precisions.clear());
        assert_eq!(judge_check(&CHECK, &facts, "{}")[2].verdict, Verdict::Skip);
    }

    #[test]
    fn one_in_twenty_may_be_slow() {
        let with_slow = |count: usize, slow: usize, rate: f32| {
            let mut intervals = vec![660.0; 2 + count];
            intervals[10..10 + slow].fill(rate);
            judge(intervals)
        };
        assert_eq!(with_slow(41, 2, 593.0), Verdict::Pass);
        assert_eq!(with_slow(40, 2, 593.0), Verdict::Warn);
        assert_eq!(with_slow(40, 2, 595.0), Verdict::Pass);
    }

    #[test]
    fn the_warm_up_is_left_out_and_few_intervals_are_skipped() {
        let mut intervals = vec![100.0, 300.0];
        intervals.extend([660.0; 6]);
        assert_eq!(judge(intervals.clone()), Verdict::Pass);
        intervals.pop();
        assert_eq!(judge(intervals), Verdict::Skip);
    }

    #[test]
    fn a_rate_that_is_no_number_is_an_error() {
        let mut intervals = vec![660.0; 20];
        intervals[10] = f32::NAN;
        assert_eq!(judge(intervals), Verdict::Error);
    }
}
