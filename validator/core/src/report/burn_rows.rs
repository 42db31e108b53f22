//! What a burn showed of each GPU and precision, for every report that has a table of it.

use schemars::JsonSchema;
use serde::Serialize;

use crate::burned;
use crate::facts::{BurnRun, Facts, GpuFacts, PrecisionRun, SensorLog};
use crate::reference::GemmRate;

/// One precision on one GPU.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct BurnRow {
    pub gpu_uuid: String,
    pub pci_address: Option<String>,
    /// `bf16`.
    pub precision: String,
    /// The kernels that multiplied: `sm_90a`, `cublaslt`.
    pub kernels: String,
    /// Why this GPU was burned by these, and what was found of the other engine; of all its
    /// precisions.
    pub engine_choice: String,
    /// Median over time, in 1e12 operations a second; `null` where it is no number.
    pub tflops: Option<f64>,
    /// Over time, warm-up left out; `null` in a burn too short for it.
    pub tflops_minimum: Option<f64>,
    pub tflops_maximum: Option<f64>,
    /// The standard deviation over time, in percent of the mean.
    pub tflops_deviation_percent: Option<f64>,
    /// Of what a healthy GPU of the model was measured to reach.
    pub reference_percent: Option<f64>,
    pub products: u64,
    /// Products of which every element was compared.
    pub products_verified: u64,
    /// Blocks of results that were wrong, and results that were not finite.
    pub mismatches: u64,
    /// Seconds of this GPU's whole burn.
    pub measured_s: f64,
    /// Mean power over the second half of the whole burn, and the limit, in watts.
    pub power_w: Option<f64>,
    pub power_limit_w: Option<f64>,
    /// The hottest sample under load.
    pub temperature_c: Option<i32>,
}

/// In the order of the facts' GPUs, then of the precisions; empty where nothing was burned.
pub(crate) fn burn_rows(facts: &Facts) -> Vec<BurnRow> {
    burned_gpus(facts)
        .flat_map(|(gpu, uuid, run)| rows_of(gpu, uuid, run, facts))
        .collect()
}

/// The rows of one GPU.
pub(super) fn burn_rows_of(uuid: &str, facts: &Facts) -> Vec<BurnRow> {
    let run = facts.load.burn.get(uuid).and_then(|it| it.value());
    let burned = facts.gpu(uuid).zip(run);
    burned.map_or_else(Vec::new, |(gpu, run)| {
        rows_of(gpu, uuid, run, facts).collect()
    })
}

fn rows_of<'f>(
    gpu: &'f GpuFacts,
    uuid: &'f str,
    run: &'f BurnRun,
    facts: &'f Facts,
) -> impl Iterator<Item = BurnRow> {
    let log = facts.load.sensors.get(uuid);
    let products = run.precisions.iter();
    products.map(move |products| row(gpu, uuid, run, products, log))
}

/// The GPUs that were burned, with their UUIDs.
fn burned_gpus(facts: &Facts) -> impl Iterator<Item = (&GpuFacts, &str, &BurnRun)> {
    facts.gpus.iter().filter_map(|gpu| {
        let uuid = gpu.uuid.value()?;
        Some((gpu, uuid.as_str(), facts.load.burn.get(uuid)?.value()?))
    })
}

fn row(
    gpu: &GpuFacts,
    uuid: &str,
    run: &BurnRun,
    products: &PrecisionRun,
    log: Option<&SensorLog>,
) -> BurnRow {
    let tflops = Some(burned::rate(products)).filter(|it| it.is_finite());
    let reference = burned::reference(products, gpu).and_then(|rate| match rate {
        GemmRate::Measured { tflops, .. } => Some(tflops),
        GemmRate::Floor { .. } => None,
    });
    let spread = burned::spread(products);
    let samples = log
        .and_then(|log| burned::samples_under_load(run, log).ok())
        .unwrap_or_default();
    BurnRow {
        gpu_uuid: uuid.to_owned(),
        pci_address: gpu.pci_address.value().cloned(),
        precision: products.precision.to_string(),
        kernels: products.kernels.clone(),
        engine_choice: run.engine_choice.clone(),
        tflops,
        tflops_minimum: spread.map(|it| it.minimum),
        tflops_maximum: spread.map(|it| it.maximum),
        tflops_deviation_percent: spread.map(|it| it.deviation_percent),
        reference_percent: tflops.zip(reference).map(|(it, all)| it / all * 100.0),
        products: products.products,
        products_verified: products.products_verified,
        mismatches: products.mismatches + products.nonfinite,
        measured_s: run.measured_s,
        power_w: burned::power_in_second_half_mw(run, &samples).map(|it| it / 1000.0),
        power_limit_w: log
            .and_then(|it| it.power_limit_mw)
            .map(|it| f64::from(it) / 1000.0),
        temperature_c: samples.iter().filter_map(|it| it.gpu_c).max(),
    }
}

impl BurnRow {
    /// What the columns of a table are called.
    pub(super) const HEADS: [&'static str; 11] = [
        "GPU",
        "precision",
        "TFLOP/s (median)",
        "min",
        "max",
        "deviation",
        "of reference",
        "verified products",
        "wrong",
        "power",
        "hottest",
    ];

    /// The cells of a table; empty where nothing is known.
    pub(super) fn cells(&self) -> [String; 11] {
        let rate = |value: Option<f64>| {
            let digits = if self.tflops.is_some_and(|it| it < 10.0) {
                3
            } else {
                1
            };
            value.map_or_else(String::new, |it| format!("{it:.digits$}"))
        };
        let power = match (self.power_w, self.power_limit_w) {
            (Some(power), Some(limit)) => format!("{power:.0} of {limit:.0} W"),
            (Some(power), None) => format!("{power:.0} W"),
            _ => String::new(),
        };
        [
            self.pci_address
                .clone()
                .unwrap_or_else(|| self.gpu_uuid.clone()),
            format!("{} ({})", self.precision, self.kernels),
            rate(self.tflops),
            rate(self.tflops_minimum),
            rate(self.tflops_maximum),
            self.tflops_deviation_percent
                .map_or_else(String::new, |it| format!("{it:.1} %")),
            self.reference_percent
                .map_or_else(String::new, |it| format!("{it:.0} %")),
            format!("{} of {}", self.products_verified, self.products),
            self.mismatches.to_string(),
            power,
            self.temperature_c
                .map_or_else(String::new, |it| format!("{it} °C")),
        ]
    }
}
