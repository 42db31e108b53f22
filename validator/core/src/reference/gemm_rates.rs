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
    /// All, where there are none.
    #[serde(default)]
    precisions: Vec<Precision>,
    /// The precision whose peak is meant: kernels without tensor cores compute narrow types as fast
    /// as FP32. The product's own, where there is none.
    #[serde(default)]
    of: Option<Precision>,
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
        it.kernels == kernels
            && it.compute_capabilities.contains(&model.compute_capability)
            && (it.precisions.is_empty() || it.precisions.contains(&precision))
    })?;
    let of = row.of.unwrap_or(precision);
    let peak = model.peak_tflops.get(&of.to_string())?;
    Some(GemmRate::Floor {
        tflops: peak * row.share,
        source: &row.source,
    })
}

/// Rows and columns of the part of a product that one multiprocessor computes at a time.
// Source: KERNELS.md; of cuBLASLt the largest of its usual tiles, which occupy the fewest
// multiprocessors.
pub fn gemm_tile(kernels: &str, precision: Precision) -> (u32, u32) {
    let is_fp64 = precision == Precision::Fp64;
    match kernels {
        "sm_70" if is_fp64 => (64, 64),
        "sm_80" if is_fp64 => (64, 128),
        "sm_90a" if is_fp64 => (128, 128),
        "sm_70" => (128, 128),
        _ => (128, 256),
    }
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
                let gpu = model(&measured.model);
                let is_of_row = row.compute_capabilities.contains(&gpu.compute_capability);
                for (precision, tflops) in &measured.tflops {
                    if is_of_row
                        && (row.precisions.is_empty() || row.precisions.contains(precision))
                    {
                        let peak = gpu.peak_tflops[&row.of.unwrap_or(*precision).to_string()];
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
    fn models_that_were_not_measured_have_a_floor() {
        use Precision::{Bf16, Fp8, Fp16, Fp32, Fp64, Int8};
        for (name, kernels, precision, expected) in [
            ("T4", "sm_70", Fp32, 1.62),
            ("T4", "sm_70", Fp16, 1.62),
            ("T4", "sm_70", Int8, 4.05),
            ("T4", "cublaslt", Fp16, 13.0),
            ("Quadro RTX 6000", "sm_70", Fp16, 3.26),
            ("Quadro RTX 8000", "cublaslt", Fp16, 26.1),
            ("V100 SXM2 16GB", "sm_70", Fp64, 1.56),
            ("V100 SXM2 16GB", "cublaslt", Fp16, 50.0),
            ("A10", "sm_80", Bf16, 37.5),
            ("A10", "cublaslt", Bf16, 25.0),
            ("A30", "cublaslt", Bf16, 66.0),
            ("A2", "sm_80", Bf16, 5.4),
            ("A40", "sm_80", Bf16, 44.91),
            ("RTX A6000", "sm_80", Bf16, 46.44),
            ("L4", "sm_70", Fp32, 6.06),
            ("L40S", "sm_89", Fp8, 146.6),
            ("B200", "cublaslt", Bf16, 900.0),
            ("GB200", "cublaslt", Fp8, 2000.0),
            (
                "RTX PRO 6000 Blackwell Server Edition",
                "sm_80",
                Bf16,
                125.0,
            ),
            ("GeForce RTX 5090", "cublaslt", Bf16, 41.9),
        ] {
            let rate = gemm_rate(model(name), kernels, precision);
            let is_it = |rate| matches!(rate, GemmRate::Floor { tflops, .. } if (tflops - expected).abs() < 0.01);
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
        assert_eq!(bf16("T4G", "sm_70"), None);
        let of_blackwell = gemm_rate(model("B200"), "cublaslt", Precision::Int8);
        assert_eq!(of_blackwell, None);
        assert_eq!(gemm_rate(model("L4"), "sm_80", Precision::Fp64), None);
    }
}
