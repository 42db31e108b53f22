//! GEMM throughput matches the reference and the other GPUs.
//!
//! ## Why
//! In a job over many GPUs all wait for the slowest. A GPU that is slow and right shows in no other
//! check.
//!
//! ## How it is judged
//! The median rate of each precision, the first second left out.
//! - Against the reference of the model, where one was measured: `fail` below 75 % of it, `warn`
//!   below 90 %. Elsewhere against a floor far below the data sheet's dense peak: `fail` below it.
//!   Where the power limit in force is below the default one, both are lowered in proportion.
//!   Products of less than a millisecond do not fill a GPU and are not held against either.
//! - Against the median of the other GPUs of the same model that multiplied the same: `fail` more
//!   than 10 % below, `warn` more than 5 % below.
//!
//! Where others used the GPU meanwhile (`--share`, or a process that came in the middle), a GPU
//! that would fail is busy instead: an `error`, and exit code 4.
//!
//! `error` where the rate is no number, and where it is more than 125 % of the data sheet's dense
//! peak or of the measured reference: then the clock is wrong or the work was not done. Skipped
//! where there is neither reference nor another GPU, where the burn lasted less than two seconds,
//! where no product was verified (`gemm_numerics` reports that), for MIG devices, and where no burn
//! was requested.
//!
//! ## What to do
//! The finding names what held the clocks down, if anything did: see `burn_throttling`,
//! `burn_power`, `power_limit` and `burn_temperature`. A GPU that is slow at full clocks and power
//! belongs to its vendor.
//!
//! ## Source
//! DCGM requires 75 % of its reference; gpu-fryer objects to 10 % below the others
//! (<https://github.com/huggingface/gpu-fryer>), `SuperBench` to 5 %. The rates:
//! `validator/core/data/gemm_rates.yaml`.

use crate::burned;
use crate::check::{Check, Judge};
use crate::facts::{BurnRun, ClocksEventReasons, Facts, GpuFacts, PrecisionRun};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;
use crate::reference::GemmRate;
use crate::tally::worst_of;

pub(crate) const CHECK: Check = Check {
    id: "gemm_throughput",
    stage: Stage::Load,
    level: Level::Standard,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://github.com/huggingface/gpu-fryer",
};

/// DCGM's share of its reference.
const REFERENCE_SHARE_MINIMUM: f64 = 0.75;
/// This project's own choice: eight healthy H200s lie within 4 % (BENCHMARKS.md).
const REFERENCE_SHARE_WANTED: f64 = 0.90;
/// gpu-fryer's bound.
const OTHERS_SHARE_MINIMUM: f64 = 0.90;
/// `SuperBench`'s bound.
const OTHERS_SHARE_WANTED: f64 = 0.95;
/// Data sheets state the peak at the boost clock; the highest clock of an H100 SXM is 8 % above it
/// (1980 and 1830 MHz), and vendors raise the clocks of consumer cards by up to a tenth. Eight
/// healthy H200s lie within 4 % (BENCHMARKS.md).
const BOUND_MAXIMUM: f64 = 1.25;
/// Clocks rise for a moment and the power limit takes a second to bind.
const MEASURED_MINIMUM_S: f64 = 2.0;
/// Shorter products leave multiprocessors idle at their ends (this project's own choice).
const PRODUCT_MINIMUM_S: f64 = 1e-3;

fn judge(gpu: &GpuFacts, facts: &Facts, profile: &Profile) -> Judgement {
    let run = burned::run_of(gpu, facts, profile)?;
    if gpu.mig.value().is_some_and(|mig| mig.current) {
        return Ok(Outcome::skip("a MIG device is a part of its GPU"));
    }
    if run.measured_s < MEASURED_MINIMUM_S {
        return Ok(Outcome::skip("the burn was too short to judge throughput"));
    }
    if run.precisions.is_empty() {
        return Err(queries::reported_by(
            "gemm_numerics",
            "no product was verified",
            profile,
        ));
    }
    let precisions = run.precisions.iter();
    let worst =
        worst_of(precisions.map(|products| judge_products(products, run, gpu, facts, profile)));
    burned::unless_others_use_it(worst, gpu, facts)
}

fn judge_products(
    products: &PrecisionRun,
    run: &BurnRun,
    gpu: &GpuFacts,
    facts: &Facts,
    profile: &Profile,
) -> Judgement {
    let precision = products.precision;
    if products.products_verified == 0 {
        return Err(queries::reported_by(
            "gemm_numerics",
            &format!("{precision}: no product was verified"),
            profile,
        ));
    }
    let rate = burned::rate(products);
    // Written so that NaN is no rate.
    let is_rate = rate > 0.0 && rate.is_finite();
    if !is_rate {
        return Ok(Outcome::error(format!("{precision}: the rate is {rate}")));
    }
    if let Some(outcome) = above_what_hardware_can_do(products, rate, gpu) {
        return Ok(outcome);
    }
    let held = what_held_it(run, gpu, facts);
    worst_of([
        against_the_reference(products, rate, gpu, facts, &held),
        against_the_others(products, rate, run, gpu, facts, profile, &held),
    ])
}

/// A rate that no such GPU reaches was not measured: the clock is wrong, or not all of the work was
/// done.
fn above_what_hardware_can_do(
    products: &PrecisionRun,
    rate: f64,
    gpu: &GpuFacts,
) -> Option<Outcome> {
    let precision = products.precision;
    let peak = crate::expect::gpu_model(gpu)
        .and_then(|model| model.peak_tflops.get(precision.name()))
        .map(|peak| (*peak, "the dense peak of its data sheet"));
    let measured = match burned::reference(products, gpu) {
        Some(GemmRate::Measured { tflops, .. }) => {
            Some((tflops, "what this model was measured to reach"))
        }
        _ => None,
    };
    let (bound, source) = [peak, measured]
        .into_iter()
        .flatten()
        .filter(|(bound, _)| rate > bound * BOUND_MAXIMUM)
        .min_by(|one, other| one.0.total_cmp(&other.0))?;
    Some(
        Outcome::error(format!(
            "{precision}: {rate:.1} TFLOP/s is {:.0} % of {source}, more than this GPU can do",
            rate / bound * 100.0
        ))
        .expected(format!("at most {:.1} TFLOP/s", bound * BOUND_MAXIMUM))
        .observed(format!("{rate:.1} TFLOP/s"))
        .remedy("the clock or the work is wrong: keep the report, and validate on other hardware"),
    )
}

fn against_the_reference(
    products: &PrecisionRun,
    rate: f64,
    gpu: &GpuFacts,
    facts: &Facts,
    held: &str,
) -> Judgement {
    let (precision, kernels) = (products.precision, &products.kernels);
    let Some(reference) = burned::reference(products, gpu) else {
        return Err(Outcome::skip(format!(
            "{precision}: {rate:.1} TFLOP/s with {kernels} kernels; no reference throughput for this model"
        )));
    };
    #[expect(clippy::cast_precision_loss, reason = "a time")]
    let seconds_each = products.gpu_time_s / products.products.max(1) as f64;
    if seconds_each < PRODUCT_MINIMUM_S {
        return Err(Outcome::skip(format!(
            "{precision}: {rate:.1} TFLOP/s; products of {} x {} x {} are too small for the reference",
            products.m, products.n, products.k
        )));
    }
    let power = power_share(gpu, facts);
    let lowered = if power < 1.0 {
        format!(
            ", at a power limit of {:.0} % of the default",
            power * 100.0
        )
    } else {
        String::new()
    };
    let (minimum, wanted, text, source) = match reference {
        GemmRate::Measured { tflops, source } => (
            tflops * power * REFERENCE_SHARE_MINIMUM,
            tflops * power * REFERENCE_SHARE_WANTED,
            format!(
                "{precision}: {rate:.1} TFLOP/s, {:.0} % of the {tflops:.0} that this model reaches{lowered}",
                rate / tflops * 100.0
            ),
            source,
        ),
        GemmRate::Floor { tflops, source } => (
            tflops * power,
            0.0,
            format!(
                "{precision}: {rate:.1} TFLOP/s, the least of this model is {tflops:.0}{lowered}"
            ),
            source,
        ),
    };
    let objection = |outcome: Outcome, least: f64| {
        outcome
            .expected(format!("at least {least:.1} TFLOP/s ({source})"))
            .observed(format!("{rate:.1} TFLOP/s"))
            .remedy(REMEDY)
    };
    Ok(if rate < minimum {
        objection(Outcome::fail(format!("{text}{held}")), minimum)
    } else if rate < wanted {
        objection(Outcome::warn(format!("{text}{held}")), wanted)
    } else {
        Outcome::pass(text)
    })
}

const REMEDY: &str = "see burn_throttling, burn_power, burn_temperature and power_limit for what holds it back; a GPU that is slow at full clocks and power belongs to its vendor";

fn against_the_others(
    products: &PrecisionRun,
    rate: f64,
    run: &BurnRun,
    gpu: &GpuFacts,
    facts: &Facts,
    profile: &Profile,
    held: &str,
) -> Judgement {
    let precision = products.precision;
    let others = facts
        .gpus
        .iter()
        .filter(|other| other.name == gpu.name && other.uuid != gpu.uuid)
        .filter_map(|other| burned::run_of(other, facts, profile).ok())
        .filter(|its_run| its_run.engine == run.engine)
        .filter_map(|its_run| {
            its_run.precisions.iter().find(|it| {
                let same = (it.precision, it.m, it.n, it.k, &it.kernels);
                same == (
                    precision,
                    products.m,
                    products.n,
                    products.k,
                    &products.kernels,
                )
            })
        });
    let mut rates: Vec<f64> = others
        .map(burned::rate)
        .filter(|it| it.is_finite() && *it > 0.0)
        .collect();
    let Some(median) = burned::median(&mut rates) else {
        return Err(Outcome::skip(format!(
            "{precision}: no other GPU of this model multiplied the same"
        )));
    };
    let count = queries::counted(rates.len(), "other GPU");
    let share = rate / median;
    let objection = |outcome: Outcome, least: f64| {
        outcome
            .expected(format!(
                "at least {:.1} TFLOP/s, {:.0} % of the median of {count}",
                median * least,
                least * 100.0
            ))
            .observed(format!("{rate:.1} TFLOP/s"))
            .remedy(REMEDY)
    };
    let text = format!(
        "{precision}: {rate:.1} TFLOP/s, {:.0} % of the median of {count} of this model ({median:.1})",
        share * 100.0
    );
    Ok(if share < OTHERS_SHARE_MINIMUM {
        objection(Outcome::fail(format!("{text}{held}")), OTHERS_SHARE_MINIMUM)
    } else if share < OTHERS_SHARE_WANTED {
        objection(Outcome::warn(format!("{text}{held}")), OTHERS_SHARE_WANTED)
    } else {
        Outcome::pass(text)
    })
}

/// The power limit in force as a share of the default one, at most 1.
fn power_share(gpu: &GpuFacts, facts: &Facts) -> f64 {
    let limit_mw = sensors(gpu, facts).and_then(|log| log.power_limit_mw);
    let default_w = crate::expect::gpu_model(gpu).and_then(|it| it.power_limit_w);
    match (limit_mw, default_w) {
        (Some(limit_mw), Some(default_w)) => {
            (f64::from(limit_mw) / 1000.0 / f64::from(default_w)).min(1.0)
        }
        _ => 1.0,
    }
}

fn sensors<'f>(gpu: &GpuFacts, facts: &'f Facts) -> Option<&'f crate::facts::SensorLog> {
    facts.load.sensors.get(gpu.uuid.value()?)
}

/// What the sensors say of the clocks:
/// `; clocks held down by hw_thermal_slowdown, 1005 MHz, 350 W`. Empty without sensors.
fn what_held_it(run: &BurnRun, gpu: &GpuFacts, facts: &Facts) -> String {
    use std::fmt::Write as _;
    let samples = sensors(gpu, facts).and_then(|log| burned::samples_under_load(run, log).ok());
    let Some(samples) = samples else {
        return String::new();
    };
    let all = samples
        .iter()
        .filter_map(|it| it.reasons)
        .fold(0, |all, it| all | it);
    let names = ClocksEventReasons(all & !ClocksEventReasons::GPU_IDLE).names();
    let mut text = if names.is_empty() {
        "; nothing held the clocks down".to_owned()
    } else {
        format!("; clocks held down by {}", names.join(", "))
    };
    let last = samples.last();
    // Writing to a string does not fail.
    if let Some(clock) = last.and_then(|it| it.sm_mhz) {
        let _ = write!(text, ", {clock} MHz");
    }
    if let Some(power) = last.and_then(|it| it.power_mw) {
        let _ = write!(text, ", {} W", power / 1000);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{BurnRun, Facts, PrecisionRun, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        burned_node, burned_node_with, healthy_node, judge_check, make_model_unknown,
        python_process,
    };

    /// Each of eight H200s as `rates` says, in the order of their UUIDs, which is that of the GPUs.
    fn node(change: impl Fn(usize, &mut PrecisionRun)) -> Facts {
        let mut facts = burned_node();
        for (index, run) in facts.load.burn.values_mut().enumerate() {
            let Reading::Value(run) = run else { continue };
            change(index, &mut run.precisions[0]);
        }
        facts
    }

    fn set_rate(products: &mut PrecisionRun, tflops: f64) {
        products.tflops = tflops;
        #[expect(clippy::cast_possible_truncation, reason = "a rate")]
        products.tflops_intervals.fill(tflops as f32);
    }

    fn all_at(tflops: f64) -> Verdict {
        let facts = node(|_, products| set_rate(products, tflops));
        judge_check(&CHECK, &facts, "{}")[0].verdict
    }

    fn third_at(tflops: f64) -> Vec<Finding> {
        let facts =
            node(|index, products| set_rate(products, if index == 2 { tflops } else { 660.0 }));
        judge_check(&CHECK, &facts, "{}")
    }

    #[test]
    fn passes_on_every_gpu_and_skips_without_a_burn() {
        let findings = judge_check(&CHECK, &burned_node(), "{}");
        assert!(findings.iter().all(|it| it.verdict == Verdict::Pass));
        assert!(
            findings[0].summary.contains("100 % of the 663"),
            "{}",
            findings[0].summary
        );
        let findings = judge_check(&CHECK, &healthy_node(), "{}");
        assert!(findings.iter().all(|it| it.verdict == Verdict::Skip));
    }

    #[test]
    fn a_slow_gpu_that_others_use_is_busy() {
        let with_others = |tflops, during: usize, before: usize, trouble: Option<&str>| {
            let mut facts =
                node(|index, products| set_rate(products, if index == 2 { tflops } else { 660.0 }));
            let uuid = facts.gpus[2].uuid.value().cloned().expect("it has one");
            let log = facts.load.sensors.get_mut(&uuid).expect("they were read");
            log.other_processes = vec![python_process(600); during];
            log.trouble = trouble.map(str::to_owned);
            facts.gpus[2].processes = Reading::Value(vec![python_process(500); before]);
            judge_check(&CHECK, &facts, "{}").swap_remove(2)
        };
        // Those who had left before the load took nothing of it.
        for before in [0, 1] {
            let alone = with_others(330.0, 0, before, None);
            assert_eq!((alone.verdict, alone.busy), (Verdict::Fail, false));
        }
        let killed = Some("killed");
        for (during, before, trouble, memory) in [
            (1, 0, None, "600 MiB"),
            (1, 1, killed, "600 MiB"),
            (0, 1, killed, "500 MiB"),
        ] {
            let finding = with_others(330.0, during, before, trouble);
            assert_eq!((finding.verdict, finding.busy), (Verdict::Error, true));
            let end = format!("others used the GPU meanwhile: python3 (pid 4242, {memory})");
            assert!(finding.summary.ends_with(&end), "{}", finding.summary);
            assert!(finding.observed.is_some() && finding.expected.is_some());
        }
        // Between 90 and 95 % of the others; who was there is said.
        let finding = with_others(610.0, 1, 0, None);
        assert_eq!(finding.verdict, Verdict::Warn);
        assert!(finding.summary.contains("python3"), "{}", finding.summary);
        let finding = with_others(660.0, 1, 0, None);
        assert_eq!(finding.verdict, Verdict::Pass);
        assert!(!finding.summary.contains("python3"), "{}", finding.summary);
    }

    #[test]
    fn the_reference_is_judged_where_all_gpus_are_alike() {
        // 90 % and 75 % of 663.
        assert_eq!(all_at(597.0), Verdict::Pass);
        assert_eq!(all_at(596.0), Verdict::Warn);
        assert_eq!(all_at(498.0), Verdict::Warn);
        assert_eq!(all_at(497.0), Verdict::Fail);
    }

    #[test]
    fn the_outlier_is_named_and_the_others_pass() {
        // 95 % and 90 % of 660.
        assert_eq!(third_at(627.5)[2].verdict, Verdict::Pass);
        assert_eq!(third_at(626.5)[2].verdict, Verdict::Warn);
        assert_eq!(third_at(594.5)[2].verdict, Verdict::Warn);
        let findings = third_at(593.5);
        let failing: Vec<usize> = (0..8)
            .filter(|it| findings[*it].verdict == Verdict::Fail)
            .collect();
        assert_eq!(failing, [2]);
        assert!(
            findings[2]
                .summary
                .contains("90 % of the median of 7 other GPUs"),
            "{}",
            findings[2].summary
        );
        assert!(
            findings[2]
                .summary
                .contains("clocks held down by sw_power_cap, 1455 MHz, 694 W"),
            "{}",
            findings[2].summary
        );
        assert!(
            findings
                .iter()
                .enumerate()
                .all(|(index, it)| index == 2 || it.verdict == Verdict::Pass)
        );
    }

    #[test]
    fn a_lower_power_limit_lowers_what_is_asked() {
        let mut facts = node(|_, products| set_rate(products, 480.0));
        assert_eq!(judge_check(&CHECK, &facts, "{}")[0].verdict, Verdict::Fail);
        for log in facts.load.sensors.values_mut() {
            log.power_limit_mw = Some(500_000);
        }
        let finding = judge_check(&CHECK, &facts, "{}").swap_remove(0);
        assert_eq!(finding.verdict, Verdict::Pass, "{}", finding.summary);
    }

    #[test]
    fn without_a_reference_the_others_judge() {
        let unknown = |third: f64| {
            let mut facts = node(|index, products| {
                set_rate(products, if index == 2 { third } else { 100.0 });
            });
            facts.gpus.iter_mut().for_each(make_model_unknown);
            judge_check(&CHECK, &facts, "{}").swap_remove(2)
        };
        assert_eq!(unknown(99.0).verdict, Verdict::Pass);
        assert_eq!(unknown(80.0).verdict, Verdict::Fail);
        let mut alone = node(|_, _| {});
        alone.gpus.truncate(1);
        alone.gpus.iter_mut().for_each(make_model_unknown);
        assert_eq!(judge_check(&CHECK, &alone, "{}")[0].verdict, Verdict::Skip);
    }

    #[test]
    fn small_products_are_held_against_the_others_only() {
        let facts = node(|_, products| {
            set_rate(products, 50.0);
            products.gpu_time_s = 2.9;
        });
        let finding = judge_check(&CHECK, &facts, "{}").swap_remove(0);
        assert_eq!(finding.verdict, Verdict::Pass, "{}", finding.summary);
        assert!(finding.summary.contains("of the median"));
    }

    #[test]
    fn what_is_no_rate_or_was_not_verified_never_passes() {
        let judge = |change: fn(&mut BurnRun)| {
            judge_check(&CHECK, &burned_node_with(change), "{}").swap_remove(2)
        };
        for rate in [f64::NAN, 0.0, f64::INFINITY] {
            let facts = node(|_, products| set_rate(products, rate));
            assert_eq!(judge_check(&CHECK, &facts, "{}")[0].verdict, Verdict::Error);
        }
        assert_eq!(
            judge(|run| run.precisions[0].products_verified = 0).verdict,
            Verdict::Skip
        );
        assert_eq!(judge(|run| run.precisions.clear()).verdict, Verdict::Skip);
        assert_eq!(judge(|run| run.measured_s = 1.9).verdict, Verdict::Skip);
    }

    #[test]
    fn a_rate_that_no_gpu_reaches_is_an_error() {
        let of = |rate: f32| {
            let facts = burned_node_with(|run| {
                run.precisions[0].tflops = f64::from(rate);
                run.precisions[0].tflops_intervals = vec![rate; 20];
            });
            judge_check(&CHECK, &facts, "{}").swap_remove(2)
        };
        let finding = of(1_500.0);
        assert_eq!(finding.verdict, Verdict::Error, "{}", finding.summary);
        assert_eq!(of(660.0).verdict, Verdict::Pass);
    }
}
