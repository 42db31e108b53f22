//! What a run leaves for later runs of the same node to compare with.

use std::collections::BTreeMap;

use crate::facts::{EarlierRun, Facts, GpuFacts, GpuFigures, WorkerEnd};

/// Eight healthy H200s lie within 4 % (BENCHMARKS.md); clocks follow power and temperature as
/// throughput does.
pub(crate) const THROUGHPUT_NOISE: f64 = 0.04;

/// The figures of these facts.
pub fn figures_of(facts: &Facts) -> EarlierRun {
    let gpus = facts.gpus.iter();
    let gpus = gpus.filter_map(|gpu| Some((gpu.uuid.value()?.clone(), figures_of_gpu(gpu, facts))));
    EarlierRun {
        collected_at: facts.collected_at.clone(),
        driver_version: facts.nvml.driver_version.value().cloned(),
        uptime_s: facts.host.uptime_s.value().copied(),
        simulated: facts.simulated.is_some(),
        gpus: gpus.collect(),
    }
}

pub(crate) fn figures_of_gpu(gpu: &GpuFacts, facts: &Facts) -> GpuFigures {
    let rows = gpu.row_remapping.value();
    let errors = gpu.ecc_aggregate.value();
    let times = gpu.violations.value();
    GpuFigures {
        power_limit_mw: gpu.power.value().map(|it| it.limit_mw),
        tflops: throughput(gpu, facts),
        remapped_rows: rows.map(|it| it.correctable_rows.saturating_add(it.uncorrectable_rows)),
        correctable_errors: errors.and_then(|it| {
            let parts = it.sram_correctable.zip(it.dram_correctable);
            it.total_correctable
                .or(parts.map(|(sram, dram)| sram.saturating_add(dram)))
        }),
        slowdown_ns: times.and_then(|it| {
            let causes = [it.thermal_ns, it.hw_thermal_ns, it.hw_power_brake_ns];
            causes.into_iter().flatten().reduce(u64::saturating_add)
        }),
    }
}

/// The rates of a burn that ended well; MIG devices share their GPU with other guests.
fn throughput(gpu: &GpuFacts, facts: &Facts) -> BTreeMap<String, f64> {
    let is_divided = gpu.mig.value().is_some_and(|it| it.current);
    let run = gpu
        .uuid
        .value()
        .and_then(|uuid| facts.load.burn.get(uuid)?.value())
        .filter(|run| run.end == WorkerEnd::Finished && !is_divided);
    let precisions = run.into_iter().flat_map(|it| &it.precisions);
    precisions
        .filter(|it| it.tflops.is_finite() && it.tflops > 0.0)
        .map(|it| (format!("{} {}", it.precision, it.kernels), it.tflops))
        .collect()
}
