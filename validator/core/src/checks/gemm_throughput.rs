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
//!   Products that should take less than a millisecond do not fill a GPU: for them, both are lowered
//!   to the share of the multiprocessors that their tiles occupy, and by 20 µs and the time of
//!   reading the result once for each product. Where that overhead is more than the sums, no floor
//!   is judged: the overhead differs from host to host.
//! - Against the median of the other GPUs of the same model that multiplied the same: `fail` more
//!   than 10 % below, `warn` more than 5 % below.
//!
//! Where others used the GPU meanwhile (`--share`, or a process that came in the middle), a GPU
//! that would fail is busy instead: an `error`, and exit code 4.
//!
//! `error` where the rate is no number, and where it is more than 125 % of the data sheet's dense
//! peak or of the measured reference: then the clock is wrong or the work was not done. Where no
//! reference throughput exists for the model with these kernels, the finding reports that: a fault
//! that all GPUs share is not seen there. Skipped where there is neither reference nor another GPU,
//! where the burn lasted less than two seconds,
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

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

use crate::burned;
use crate::check::{Check, Judge, JudgeGpu};
use crate::facts::{
    BurnEngine, BurnRun, ClocksEventReasons, Facts, GpuFacts, Precision, PrecisionRun, Reading,
};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;
use crate::reference::{self, GemmRate};
use crate::tally::worst_of;

pub(crate) const CHECK: Check = Check {
    id: "gemm_throughput",
    stage: Stage::Load,
    level: Level::Standard,
    judge: Judge::EachGpuAmongAll(among_all),
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
/// What a short product takes beside its sums and the reading of its result: launches, and filling
/// and draining of the multiprocessors. This project's own choice, more than was measured: an H100
/// took 429 µs for products of 4096 x 4096 x 8192 (BENCHMARKS.md), of which 412 are its sums at the
/// reference rate.
const PRODUCT_OVERHEAD_S: f64 = 20e-6;
/// An element of a result, but for FP64, whose products are long.
const RESULT_BYTES: u32 = 4;

/// The rates of all GPUs that multiplied the same.
struct Node<'f> {
    facts: &'f Facts,
    profile: &'f Profile,
    rates: HashMap<Product<'f>, Rates<'f>>,
}

/// What GPUs multiplied whose rates are comparable.
#[derive(PartialEq, Eq, Hash)]
struct Product<'f> {
    name: &'f Reading<String>,
    engine: &'f BurnEngine,
    precision: Precision,
    size: (u32, u32, u32),
    kernels: &'f str,
}

fn among_all<'f>(facts: &'f Facts, profile: &'f Profile) -> JudgeGpu<'f> {
    let mut rates: HashMap<Product<'f>, Vec<(f64, &'f Reading<String>)>> = HashMap::new();
    for gpu in &facts.gpus {
        let Ok(run) = burned::run_of(gpu, facts, profile) else {
            continue;
        };
        // Of several products of one kind the first counts.
        let mut seen = HashSet::new();
        for products in &run.precisions {
            let rate = burned::rate(products);
            let is_first = seen.insert(product(products, run, gpu));
            if is_first && rate.is_finite() && rate > 0.0 {
                let rates = rates.entry(product(products, run, gpu)).or_default();
                rates.push((rate, &gpu.uuid));
            }
        }
    }
    let rates = rates.into_iter();
    let node = Node {
        facts,
        profile,
        rates: rates.map(|(of, it)| (of, Rates::of(&it))).collect(),
    };
    Box::new(move |gpu| judge(gpu, &node))
}

fn product<'f>(products: &'f PrecisionRun, run: &'f BurnRun, gpu: &'f GpuFacts) -> Product<'f> {
    Product {
        name: &gpu.name,
        engine: &run.engine,
        precision: products.precision,
        size: (products.m, products.n, products.k),
        kernels: &products.kernels,
    }
}

/// How many rates there are, and their median.
type Median = (usize, f64);

/// The rates of GPUs that multiplied the same.
struct Rates<'f> {
    of_all: Option<Median>,
    /// Of the GPUs with other UUIDs than this one.
    of_others: HashMap<&'f Reading<String>, Option<Median>>,
}

impl<'f> Rates<'f> {
    fn of(rates: &[(f64, &'f Reading<String>)]) -> Self {
        let mut ascending: Vec<f64> = rates.iter().map(|(rate, _)| *rate).collect();
        ascending.sort_by(f64::total_cmp);
        let mut of_uuids: HashMap<&Reading<String>, Vec<f64>> = HashMap::new();
        for (rate, uuid) in rates {
            of_uuids.entry(uuid).or_default().push(*rate);
        }
        let of_others = of_uuids.into_iter().map(|(uuid, mut own)| {
            own.sort_by(f64::total_cmp);
            (uuid, median_without(&ascending, &own))
        });
        Self {
            of_others: of_others.collect(),
            of_all: median_without(&ascending, &[]),
        }
    }

    fn of_others(&self, uuid: &Reading<String>) -> Option<Median> {
        *self.of_others.get(uuid).unwrap_or(&self.of_all)
    }
}

/// The median of `all` without `own`, which are some of them; both ascend.
fn median_without(all: &[f64], own: &[f64]) -> Option<Median> {
    let count = all.len().checked_sub(own.len())?;
    let upper = nth_without(all, own, count / 2)?;
    let median = if count % 2 == 1 {
        upper
    } else {
        f64::midpoint(upper, nth_without(all, own, (count / 2).checked_sub(1)?)?)
    };
    Some((count, median))
}

fn nth_without(all: &[f64], own: &[f64], position: usize) -> Option<f64> {
    let (mut position, mut after_the_last) = (position, 0);
    for rate in own {
        // Equal ones follow each other.
        let at = all.partition_point(|it| it < rate).max(after_the_last);
        after_the_last = at + 1;
        if at <= position {
            position += 1;
        }
    }
    all.get(position).copied()
}

fn judge(gpu: &GpuFacts, node: &Node<'_>) -> Judgement {
    let (facts, profile) = (node.facts, node.profile);
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
    let worst = worst_of(precisions.map(|products| judge_products(products, run, gpu, node)));
    burned::unless_others_use_it(worst, gpu, facts)
}

fn judge_products(
    products: &PrecisionRun,
    run: &BurnRun,
    gpu: &GpuFacts,
    node: &Node<'_>,
) -> Judgement {
    let (facts, profile) = (node.facts, node.profile);
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
    let reference = against_the_reference(products, rate, gpu, facts, &held);
    let mut others = against_the_others(products, rate, run, gpu, node, &held);
    if let (Ok(others), Err(reason)) = (&mut others, &reference) {
        others.summary = format!("{}; {reason}", others.summary);
    }
    let reference = reference
        .map_err(|reason| Outcome::skip(format!("{precision}: {rate:.1} TFLOP/s; {reason}")));
    worst_of([reference, others])
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

/// `Err` has the reason why the rate cannot be held against a reference.
fn against_the_reference(
    products: &PrecisionRun,
    rate: f64,
    gpu: &GpuFacts,
    facts: &Facts,
    held: &str,
) -> Result<Outcome, String> {
    let (precision, kernels) = (products.precision, &products.kernels);
    let Some(reference) = burned::reference(products, gpu) else {
        return Err(format!(
            "no reference throughput exists for this model with {kernels} kernels"
        ));
    };
    let (GemmRate::Measured { tflops, .. } | GemmRate::Floor { tflops, .. }) = reference;
    let power = power_share(gpu, facts);
    let Some(size) = size_share(products, tflops, gpu, facts) else {
        return Err(format!(
            "how much of the GPU products of {} x {} x {} occupy is not known",
            products.m, products.n, products.k
        ));
    };
    if size.overhead_dominates && matches!(reference, GemmRate::Floor { .. }) {
        return Err(format!(
            "products of {} x {} x {} are too short to compare with the least of this model",
            products.m, products.n, products.k
        ));
    }
    let size = size.share;
    let mut lowered = String::new();
    if size < 1.0 {
        lowered = format!(
            " in products of {} x {} x {}",
            products.m, products.n, products.k
        );
    }
    if power < 1.0 {
        let percent = power * 100.0;
        let _ = write!(
            lowered,
            ", at a power limit of {percent:.0} % of the default"
        );
    }
    let share = power * size;
    let (minimum, wanted, text, source) = match reference {
        GemmRate::Measured { source, .. } => (
            tflops * share * REFERENCE_SHARE_MINIMUM,
            tflops * share * REFERENCE_SHARE_WANTED,
            format!(
                "{precision}: {rate:.1} TFLOP/s, {:.0} % of the {:.0} that this model reaches{lowered}",
                rate / (tflops * size) * 100.0,
                tflops * size
            ),
            source,
        ),
        GemmRate::Floor { source, .. } => (
            tflops * share,
            0.0,
            format!(
                "{precision}: {rate:.1} TFLOP/s, the least of this model is {:.1}{lowered}",
                tflops * size
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

/// What products of a size can reach.
struct SizeShare {
    /// The part of the reference throughput, 1 where the products fill the GPU.
    share: f64,
    /// The sums of a product take less than its overhead, which differs from host to host: a floor
    /// has no margin for that.
    overhead_dominates: bool,
}

/// `None` where it is not known how many multiprocessors there are to fill.
fn size_share(
    products: &PrecisionRun,
    reference_tflops: f64,
    gpu: &GpuFacts,
    facts: &Facts,
) -> Option<SizeShare> {
    let (m, n, k) = (products.m, products.n, products.k);
    let seconds = 2.0 * f64::from(m) * f64::from(n) * f64::from(k) / (reference_tflops * 1e12);
    if seconds >= PRODUCT_MINIMUM_S {
        return Some(SizeShare {
            share: 1.0,
            overhead_dominates: false,
        });
    }
    let model = crate::expect::gpu_model(gpu)?;
    let in_cuda = || {
        let devices = facts.cuda.devices.value()?;
        let of_gpu = devices
            .iter()
            .find(|it| gpu.uuid.value() == Some(&it.uuid))?;
        Some(of_gpu.multiprocessors)
    };
    let multiprocessors = model.multiprocessors.or_else(in_cuda)?.max(1);
    let (rows, columns) = reference::gemm_tile(&products.kernels, products.precision);
    let tiles = m.div_ceil(rows) * n.div_ceil(columns);
    let rounds = tiles.div_ceil(multiprocessors).max(1);
    let occupied = f64::from(tiles) / (f64::from(rounds) * f64::from(multiprocessors));
    let result_bytes = f64::from(m) * f64::from(n) * f64::from(RESULT_BYTES);
    let reading = model
        .memory_bandwidth_gbs
        .map_or(0.0, |it| result_bytes / (it * 1e9));
    let sums = seconds / occupied.max(f64::MIN_POSITIVE);
    Some(SizeShare {
        share: seconds / (sums + PRODUCT_OVERHEAD_S + reading),
        overhead_dominates: sums < PRODUCT_OVERHEAD_S,
    })
}

const REMEDY: &str = "see burn_throttling, burn_power, burn_temperature and power_limit for what holds it back; a GPU that is slow at full clocks and power belongs to its vendor";

fn against_the_others(
    products: &PrecisionRun,
    rate: f64,
    run: &BurnRun,
    gpu: &GpuFacts,
    node: &Node<'_>,
    held: &str,
) -> Judgement {
    let precision = products.precision;
    let rates = node.rates.get(&product(products, run, gpu));
    let Some((others, median)) = rates.and_then(|it| it.of_others(&gpu.uuid)) else {
        return Err(Outcome::skip(format!(
            "{precision}: no other GPU of this model multiplied the same"
        )));
    };
    let count = queries::counted(others, "other GPU");
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
    use crate::facts::{BurnRun, Facts, Precision, PrecisionRun, Reading};
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

    /// Products of `side` x `side` x `k` on all GPUs, at `share` of what such products reach on an
    /// H200: 132 multiprocessors, tiles of 128 x 256, 663 TFLOP/s, 4800 GB/s.
    fn small(side: u32, k: u32, share: f64) -> Finding {
        let tiles = f64::from(side / 128) * f64::from(side / 256);
        let occupied = tiles / ((tiles / 132.0).ceil() * 132.0);
        let operations = 2.0 * f64::from(side) * f64::from(side) * f64::from(k);
        let sums_s = operations / 663e12 / occupied;
        let seconds = sums_s + 20e-6 + f64::from(side) * f64::from(side) * 4.0 / 4800e9;
        let facts = node(|_, products| {
            (products.m, products.n, products.k) = (side, side, k);
            set_rate(products, operations / seconds / 1e12 * share);
        });
        judge_check(&CHECK, &facts, "{}").swap_remove(0)
    }

    #[test]
    fn small_products_are_held_against_what_such_products_reach() {
        for (side, k) in [(512, 512), (1024, 2048), (2048, 4096), (4096, 8192)] {
            let finding = small(side, k, 1.0);
            assert_eq!(finding.verdict, Verdict::Pass, "{}", finding.summary);
            assert!(
                finding.summary.contains("100 % of the"),
                "{}",
                finding.summary
            );
            assert_eq!(small(side, k, 0.89).verdict, Verdict::Warn);
            // A fleet that is a third slower on all of its GPUs.
            assert_eq!(small(side, k, 0.7).verdict, Verdict::Fail);
        }
        // BENCHMARKS.md: an H100 in products of 4096 x 4096 x 8192, 641 of the 688 of its model.
        let mut facts = node(|_, products| {
            (products.m, products.n, products.k) = (4096, 4096, 8192);
            set_rate(products, 641.0);
        });
        for gpu in &mut facts.gpus {
            gpu.name = Reading::Value("NVIDIA H100 80GB HBM3".to_owned());
        }
        let finding = judge_check(&CHECK, &facts, "{}").swap_remove(0);
        assert_eq!(finding.verdict, Verdict::Pass, "{}", finding.summary);
    }

    #[test]
    fn a_floor_holds_where_no_rate_was_measured() {
        let t4 = |tflops: f64, precision: Precision, kernels: &str| {
            let mut facts = node(|_, products| {
                products.precision = precision;
                kernels.clone_into(&mut products.kernels);
                (products.m, products.n, products.k) = (4096, 4096, 8192);
                set_rate(products, tflops);
            });
            for gpu in &mut facts.gpus {
                gpu.name = Reading::Value("Tesla T4".to_owned());
            }
            judge_check(&CHECK, &facts, "{}").swap_remove(0)
        };
        for (precision, kernels, floor) in [
            (Precision::Fp16, "sm_70", 1.62),
            (Precision::Fp32, "sm_70", 1.62),
            (Precision::Fp16, "cublaslt", 13.0),
        ] {
            let above = t4(floor * 1.01, precision, kernels);
            assert_eq!(above.verdict, Verdict::Pass, "{}", above.summary);
            let below = t4(floor * 0.99, precision, kernels);
            assert_eq!(below.verdict, Verdict::Fail, "{}", below.summary);
            assert!(below.expected.is_some_and(|it| it.contains("DCGM")));
        }
    }

    #[test]
    fn no_floor_is_judged_where_the_overhead_of_products_dominates() {
        let h100_pcie = |side: u32, tflops: f64| {
            let mut facts = node(|_, products| {
                (products.m, products.n, products.k) = (side, side, side);
                set_rate(products, tflops);
            });
            for gpu in &mut facts.gpus {
                gpu.name = Reading::Value("NVIDIA H100 PCIe".to_owned());
            }
            judge_check(&CHECK, &facts, "{}").swap_remove(0)
        };
        let short = h100_pcie(512, 1.0);
        assert_eq!(short.verdict, Verdict::Pass, "{}", short.summary);
        assert!(short.summary.contains("too short"), "{}", short.summary);
        assert_eq!(h100_pcie(4096, 100.0).verdict, Verdict::Fail);
    }

    #[test]
    fn a_model_without_a_reference_is_reported_as_such() {
        let mut facts = node(|_, products| {
            "sm_80".clone_into(&mut products.kernels);
            set_rate(products, 500.0);
        });
        for gpu in &mut facts.gpus {
            gpu.name = Reading::Value("NVIDIA B200".to_owned());
        }
        let beside_others = judge_check(&CHECK, &facts, "{}").swap_remove(0);
        assert_eq!(beside_others.verdict, Verdict::Pass);
        facts.gpus.truncate(1);
        let alone = judge_check(&CHECK, &facts, "{}").swap_remove(0);
        assert_eq!(alone.verdict, Verdict::Skip);
        for finding in [beside_others, alone] {
            assert!(
                finding
                    .summary
                    .contains("no reference throughput exists for this model"),
                "{}",
                finding.summary
            );
        }
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

    #[test]
    fn the_median_of_the_others_is_that_of_a_list_without_the_own_ones() {
        let lists: [&[f64]; 4] = [
            &[1.0],
            &[1.0, 2.0, 2.0, 3.0],
            &[2.0, 2.0, 2.0, 2.0, 5.0],
            &[1.0, 2.0, 4.0, 8.0, 16.0, 16.0],
        ];
        for all in lists {
            // Each part of the list as the own ones.
            for mask in 0..1_u32 << all.len() {
                let is_own = |(at, _): &(usize, &f64)| mask >> at & 1 == 1;
                let rates = || all.iter().enumerate();
                let own: Vec<f64> = rates().filter(is_own).map(|(_, it)| *it).collect();
                let mut others: Vec<f64> = rates()
                    .filter(|it| !is_own(it))
                    .map(|(_, it)| *it)
                    .collect();
                let expected = crate::burned::median(&mut others).map(|it| (others.len(), it));
                assert_eq!(
                    super::median_without(all, &own),
                    expected,
                    "{all:?} {own:?}"
                );
            }
        }
    }
}
