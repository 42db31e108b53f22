//! What the checks of a burn share: the run of a GPU, and its sensors while it was at work.

use crate::facts::{
    BurnPlan, BurnRun, Facts, GpuFacts, Precision, PrecisionRun, Reading, SensorLog, SensorSample,
    WorkerEnd,
};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::profile::Profile;
use crate::reference::{self, GemmRate};
use crate::{expect, queries};

/// The burn of this GPU, however it ended; `Err` where there was none, or where others use the GPU.
pub(crate) fn run_of<'f>(
    gpu: &GpuFacts,
    facts: &'f Facts,
    profile: &Profile,
) -> Result<&'f BurnRun, Outcome> {
    let burned = &facts.load.burn;
    match &facts.load.burn_plan {
        Some(BurnPlan::Off(reason)) => return Err(Outcome::skip(format!("no burn: {reason}"))),
        Some(BurnPlan::On { .. }) => {}
        None if !burned.is_empty() => {}
        None if facts.interrupted.is_some() => {
            let text = "the run was stopped before the burn";
            return Err(queries::reported_by("run_complete", text, profile));
        }
        // Facts of a version that did not burn.
        None => return Err(Outcome::skip("no burn was requested")),
    }
    let uuid = gpu.uuid.required("UUID of the GPU")?;
    let run = match burned.get(uuid) {
        Some(Reading::Value(run)) => run,
        None if leaves_out(uuid, facts) => {
            return Err(Outcome::skip("no burn of this GPU was requested"));
        }
        missing => {
            let reason = match missing {
                Some(Reading::NotRead(reason)) => reason,
                Some(_) => "not supported on this GPU",
                None => "there is no result for this GPU",
            };
            return Err(why_not_burned(uuid, reason, facts, profile));
        }
    };
    if let WorkerEnd::Busy(reason) = &run.end {
        return Err(
            Outcome::busy(format!("the GPU is in use, so it was not burned: {reason}"))
                .remedy("run again when the GPU is free, or burn it all the same: burn --share, run --burn-share"),
        );
    }
    Ok(run)
}

/// Whether a burn of other GPUs was requested.
pub(crate) fn leaves_out(uuid: &str, facts: &Facts) -> bool {
    let Some(BurnPlan::On { gpus, .. }) = &facts.load.burn_plan else {
        return false;
    };
    !gpus.is_empty() && !gpus.iter().any(|it| it == uuid)
}

/// Nothing is burned where no kernel runs; one fault is one finding.
fn why_not_burned(uuid: &str, reason: &str, facts: &Facts, profile: &Profile) -> Outcome {
    let text = format!("the burn did not run: {reason}");
    if !queries::cuda_initialised(facts) {
        if let Err(outcome) = queries::loaded_driver(facts, profile) {
            return outcome;
        }
        return queries::reported_by("cuda_driver_library", &text, profile);
    }
    let kernel = facts.load.cuda_kernel.get(uuid).and_then(Reading::value);
    match kernel.map(|it| &it.end) {
        Some(WorkerEnd::Finished | WorkerEnd::Busy(_)) => Outcome::error(text),
        _ => queries::reported_by("cuda_kernel", &text, profile),
    }
}

/// Something is missing of a burn; where the run was stopped, that is why, and one stop is one
/// finding.
pub(crate) fn missing(text: impl Into<String>, facts: &Facts, profile: &Profile) -> Outcome {
    if facts.interrupted.is_some() {
        let text = format!("{} when the run was stopped", text.into());
        return queries::reported_by("run_complete", &text, profile);
    }
    Outcome::error(text)
}

/// Products that ended, in all precisions.
pub(crate) fn products(run: &BurnRun) -> u64 {
    run.precisions.iter().map(|it| it.products).sum()
}

/// The sensors of this GPU, where its burn put load on it.
pub(crate) fn sensors_of<'f>(
    gpu: &GpuFacts,
    facts: &'f Facts,
    profile: &Profile,
) -> Result<(&'f BurnRun, &'f SensorLog), Outcome> {
    let run = run_of(gpu, facts, profile)?;
    if products(run) == 0 {
        return Err(Outcome::skip(
            "the burn put no load on this GPU, which burn_completed reports",
        ));
    }
    let uuid = gpu.uuid.required("UUID of the GPU")?;
    let log = facts
        .load
        .sensors
        .get(uuid)
        .ok_or_else(|| Outcome::error("the sensors were not read during the burn"))?;
    Ok((run, log))
}

/// Others who used this GPU while it was burned, in words; `None` where no process was seen.
fn others_on(gpu: &GpuFacts, facts: &Facts) -> Option<String> {
    let log = facts.load.sensors.get(gpu.uuid.value()?);
    let listed = log.filter(|it| it.trouble.is_none() || !it.other_processes.is_empty());
    let seen = match listed {
        Some(log) => &log.other_processes,
        // The observation did not last to the end. Those who were there before are there where the
        // GPU was to be shared.
        None => gpu.processes.value()?,
    };
    (!seen.is_empty()).then(|| queries::processes_in_words(seen))
}

/// A GPU that others use is slow without being broken: it is busy where it would fail, and a
/// warning names them.
pub(crate) fn unless_others_use_it(
    judgement: Judgement,
    gpu: &GpuFacts,
    facts: &Facts,
) -> Judgement {
    let Some(others) = others_on(gpu, facts) else {
        return judgement;
    };
    let told = |outcome: Outcome| {
        let summary = format!(
            "{}; others used the GPU meanwhile: {others}",
            outcome.summary
        );
        match outcome.verdict {
            Verdict::Fail => Outcome {
                expected: outcome.expected,
                observed: outcome.observed,
                ..Outcome::busy(summary).remedy("run again when no other process uses the GPU")
            },
            Verdict::Warn => Outcome { summary, ..outcome },
            _ => outcome,
        }
    };
    judgement.map(told).map_err(told)
}

/// Sensors are read several times a second, on a host that may be busy.
const MEASURED_MINIMUM_S: f64 = 1.0;

/// The samples from the first product to the last.
pub(crate) fn samples_under_load<'f>(
    run: &BurnRun,
    log: &'f SensorLog,
) -> Result<Vec<&'f SensorSample>, Outcome> {
    let samples: Vec<&SensorSample> = log
        .samples
        .iter()
        .filter(|it| it.t >= 0.0 && f64::from(it.t) <= run.load_s())
        .collect();
    if samples.is_empty() && log.trouble.is_none() && run.measured_s < MEASURED_MINIMUM_S {
        return Err(Outcome::skip("the burn was too short to read sensors"));
    }
    if samples.is_empty() {
        let why = log.trouble.as_deref().unwrap_or("no sample was taken");
        return Err(Outcome::error(format!(
            "the sensors were not read during the burn: {why}"
        )));
    }
    Ok(samples)
}

/// Intervals of half a second that are left out at the beginning of each precision: clocks rise,
/// and the power limit takes a moment to bind.
const WARM_UP_INTERVALS: usize = 2;
/// Fewer intervals have no median worth the name; the mean over all products serves.
const INTERVALS_MINIMUM: usize = 3;

/// The rates of a precision over time, in TFLOP/s, warm-up left out.
pub(crate) fn rates_after_warm_up(products: &PrecisionRun) -> Vec<f64> {
    let intervals = products.tflops_intervals.iter().skip(WARM_UP_INTERVALS);
    intervals.map(|it| f64::from(*it)).collect()
}

/// The rate of a precision in TFLOP/s: the median over time, or the mean of a short burn.
pub(crate) fn rate(products: &PrecisionRun) -> f64 {
    let mut rates = rates_after_warm_up(products);
    if rates.len() < INTERVALS_MINIMUM {
        return products.tflops;
    }
    median(&mut rates).unwrap_or(f64::NAN)
}

/// How far the rate of a precision moved over time, in TFLOP/s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) minimum: f64,
    pub(crate) maximum: f64,
    /// The standard deviation, in percent of the mean.
    pub(crate) deviation_percent: f64,
}

/// `None` of a burn too short for it, and where a rate is no number.
pub(crate) fn spread(products: &PrecisionRun) -> Option<Spread> {
    let rates = rates_after_warm_up(products);
    if rates.len() < INTERVALS_MINIMUM || !rates.iter().all(|it| it.is_finite()) {
        return None;
    }
    #[expect(clippy::cast_precision_loss, reason = "a few thousand intervals")]
    let count = rates.len() as f64;
    let mean = rates.iter().sum::<f64>() / count;
    let squares: f64 = rates.iter().map(|it| (it - mean).powi(2)).sum();
    let deviation = (squares / (count - 1.0)).sqrt();
    Some(Spread {
        minimum: rates.iter().copied().fold(f64::INFINITY, f64::min),
        maximum: rates.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        deviation_percent: if mean > 0.0 {
            deviation / mean * 100.0
        } else {
            0.0
        },
    })
}

/// `None` of nothing. NaN sorts last, so that a majority of them is NaN.
pub(crate) fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = *values.get(middle)?;
    Some(if values.len() % 2 == 1 {
        upper
    } else {
        f64::midpoint(upper, values[middle - 1])
    })
}

/// What is known of the throughput of this GPU's model with the kernels that multiplied.
pub(crate) fn reference(products: &PrecisionRun, gpu: &GpuFacts) -> Option<GemmRate> {
    reference_of(gpu, &products.kernels, products.precision)
}

/// The same, for kernels by their name.
pub fn reference_of(gpu: &GpuFacts, kernels: &str, precision: Precision) -> Option<GemmRate> {
    reference::gemm_rate(expect::gpu_model(gpu)?, kernels, precision)
}

/// Mean power over the second half of a burn, in milliwatts; power rises with the temperature.
pub(crate) fn power_in_second_half_mw(run: &BurnRun, samples: &[&SensorSample]) -> Option<f64> {
    let powers: Vec<f64> = samples
        .iter()
        .filter(|it| f64::from(it.t) >= run.load_s() / 2.0)
        .filter_map(|it| it.power_mw)
        .map(f64::from)
        .collect();
    #[expect(
        clippy::cast_precision_loss,
        reason = "a mean of at most a hundred samples"
    )]
    let count = powers.len() as f64;
    (count > 0.0).then(|| powers.iter().sum::<f64>() / count)
}

#[cfg(test)]
mod tests {
    use super::spread;
    use crate::test_machine::burned_node;

    #[test]
    fn the_spread_leaves_the_warm_up_out() {
        let facts = burned_node();
        let run = facts.load.burn.values().find_map(|it| it.value());
        let mut products = run.expect("a burn").precisions[0].clone();
        products.tflops_intervals = vec![900.0, 1.0, 98.0, 102.0, 100.0];
        let found = spread(&products).expect("a spread");
        assert!((found.minimum - 98.0).abs() < 1e-9 && (found.maximum - 102.0).abs() < 1e-9);
        assert!((found.deviation_percent - 2.0).abs() < 1e-9, "{found:?}");
        products.tflops_intervals.truncate(4);
        assert_eq!(spread(&products), None);
        products.tflops_intervals = vec![1.0, 1.0, 1.0, f32::NAN, 1.0];
        assert_eq!(spread(&products), None);
    }
}
