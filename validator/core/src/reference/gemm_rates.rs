//! What GPUs reach when they multiply matrices at their power limit.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;

use super::GpuModel;
use crate::facts::{ComputeCapability, Precision};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    measured: Vec<MeasuredRates>,
    share_of_peak: Vec<ShareOfPeak>,
}

/// Rates of a healthy GPU.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MeasuredRates {
    /// [`GpuModel::name`].
    model: String,
    kernels: String,
    tflops: BTreeMap<Precision, f64>,
    source: String,
}

/// What part of the data sheet's dense peak is the least that a healthy GPU reaches.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ShareOfPeak {
    kernels: String,
    #[serde(deserialize_with = "capabilities")]
    compute_capabilities: Vec<ComputeCapability>,
    share: f64,
    source: String,
}

/// What is known of a GPU model's throughput, in TFLOP/s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GemmRate {
    /// A healthy GPU at its default power limit was seen to reach this.
    Measured { tflops: f64, source: &'static str },
    /// Below this something is wrong; a healthy GPU reaches much more.
    Floor { tflops: f64, source: &'static str },
}

fn capabilities<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<ComputeCapability>, D::Error> {
    #[derive(Deserialize)]
    struct Written(#[serde(deserialize_with = "super::compute_capability")] ComputeCapability);
    let written: Vec<Written> = Vec::deserialize(deserializer)?;
    Ok(written.into_iter().map(|it| it.0).collect())
}

static TABLE: LazyLock<Table> = LazyLock::new(|| {
    serde_yaml::from_str(include_str!("../../data/gemm_rates.yaml"))
        .expect("a test parses the embedded table")
});

/// What `model` reaches with these kernels (`sm_90a`, `cublaslt`); `None` where it is unknown.
pub fn gemm_rate(model: &GpuModel, kernels: &str, precision: Precision) -> Option<GemmRate> {
    let measured = TABLE
        .measured
        .iter()
        .find(|it| it.model == model.name && it.kernels == kernels);
    let tflops = measured.and_then(|it| Some((it.tflops.get(&precision)?, it)));
    if let Some((tflops, row)) = tflops {
        return Some(GemmRate::Measured {
            tflops: *tflops,
            source: &row.source,
        });
    }
    let row = TABLE.share_of_peak.iter().find(|it| {
        it.kernels == kernels && it.compute_capabilities.contains(&model.compute_capability)
    })?;
    let peak = model.peak_tflops.get(&precision.to_string())?;
    Some(GemmRate::Floor {
        tflops: peak * row.share,
        source: &row.source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::gpu_models;

    fn model(name: &str) -> &'static GpuModel {
        let mut models = gpu_models().iter();
        models.find(|it| it.name == name).expect("a model")
    }

    #[test]
    fn every_row_can_be_found_and_is_below_the_peak() {
        for row in &TABLE.measured {
            assert!(!row.source.is_empty());
            for (precision, tflops) in &row.tflops {
                let peak = model(&row.model).peak_tflops[&precision.to_string()];
                assert!(*tflops > 0.2 * peak && *tflops < peak, "{row:?}");
                let rate = gemm_rate(model(&row.model), &row.kernels, *precision);
                assert!(matches!(rate, Some(GemmRate::Measured { .. })));
            }
        }
        for row in &TABLE.share_of_peak {
            assert!(row.share > 0.1 && row.share < 0.7 && !row.source.is_empty());
            // What was measured is well above the floor that would hold without the measurement.
            for measured in TABLE.measured.iter().filter(|it| it.kernels == row.kernels) {
                let of = model(&measured.model);
                if row.compute_capabilities.contains(&of.compute_capability) {
                    for (precision, tflops) in &measured.tflops {
                        let peak = of.peak_tflops[&precision.to_string()];
                        assert!(*tflops > peak * row.share, "{precision} {row:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_commonest_gpus_are_held_against_what_was_measured() {
        for (name, kernels, precision, expected) in [
            ("H100 SXM 80GB", "sm_90a", Precision::Bf16, 688.0),
            ("H100 SXM 80GB", "cublaslt", Precision::Fp64, 51.7),
            ("H200 SXM", "sm_90a", Precision::Bf16, 663.0),
        ] {
            let rate = gemm_rate(model(name), kernels, precision);
            let is_it = |rate| matches!(rate, GemmRate::Measured { tflops, .. } if (tflops - expected).abs() < 0.01);
            assert!(rate.is_some_and(is_it), "{name} {kernels}: {rate:?}");
        }
    }

    #[test]
    fn what_nobody_knows_is_not_guessed() {
        let bf16 = |name, kernels| gemm_rate(model(name), kernels, Precision::Bf16);
        assert!(matches!(
            bf16("A100 SXM 80GB", "sm_80"),
            Some(GemmRate::Floor { tflops, .. }) if (tflops - 93.6).abs() < 0.01
        ));
        assert_eq!(bf16("B200", "sm_80"), None);
        assert_eq!(bf16("V100 SXM2 16GB", "sm_70"), None);
        assert_eq!(gemm_rate(model("L4"), "sm_80", Precision::Fp64), None);
    }
}
