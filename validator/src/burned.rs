//! What the checks of a burn share: the run of a GPU, and its sensors while it was at work.

use crate::facts::{BurnRun, Facts, GpuFacts, Reading, SensorLog, SensorSample, WorkerEnd};
use crate::findings::Outcome;

/// The burn of this GPU, however it ended; `Err` where there was none, or where others use the GPU.
pub(crate) fn run_of<'f>(gpu: &GpuFacts, facts: &'f Facts) -> Result<&'f BurnRun, Outcome> {
    if facts.load.burn.is_empty() {
        return Err(Outcome::skip("no burn was asked for"));
    }
    let uuid = gpu.uuid.required("UUID of the GPU")?;
    let run = match facts.load.burn.get(uuid) {
        Some(Reading::Value(run)) => run,
        Some(Reading::NotRead(reason)) => {
            return Err(Outcome::error(format!("the burn did not run: {reason}")));
        }
        Some(Reading::NotSupported) => {
            return Err(Outcome::error(
                "the burn did not run: not supported on this GPU",
            ));
        }
        None => return Err(Outcome::skip("no burn of this GPU was asked for")),
    };
    if let WorkerEnd::Busy(reason) = &run.end {
        return Err(
            Outcome::busy(format!("the GPU is in use, so it was not burned: {reason}"))
                .remedy("run again when the GPU is free"),
        );
    }
    Ok(run)
}

/// Products that ended, in all precisions.
pub(crate) fn products(run: &BurnRun) -> u64 {
    run.precisions.iter().map(|it| it.products).sum()
}

/// The sensors of this GPU, where its burn put load on it.
pub(crate) fn sensors_of<'f>(
    gpu: &GpuFacts,
    facts: &'f Facts,
) -> Result<(&'f BurnRun, &'f SensorLog), Outcome> {
    let run = run_of(gpu, facts)?;
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

/// The samples from the first product to the last.
pub(crate) fn samples_under_load<'f>(
    run: &BurnRun,
    log: &'f SensorLog,
) -> Result<Vec<&'f SensorSample>, Outcome> {
    let samples: Vec<&SensorSample> = log
        .samples
        .iter()
        .filter(|it| it.t >= 0.0 && f64::from(it.t) <= run.measured_s)
        .collect();
    if samples.is_empty() {
        let why = log.trouble.as_deref().unwrap_or("no sample was taken");
        return Err(Outcome::error(format!(
            "the sensors were not read during the burn: {why}"
        )));
    }
    Ok(samples)
}
