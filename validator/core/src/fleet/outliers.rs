//! Which numbers are unlike the others. Pure.
//!
//! The rule is the modified z-score of Iglewicz and Hoaglin: 0.6745 x (x - median) / MAD, where MAD
//! is the median of the absolute deviations from the median; beyond 3.5 a value is an outlier.
//! Median and MAD stand where up to half of the values are wrong, while one broken GPU moves a mean
//! and a standard deviation enough to hide itself. Where more than half of the values are the same,
//! MAD is 0, and the mean absolute deviation takes its place: (x - median) / (1.253314 x mean
//! deviation).
//!
//! Sources: B. Iglewicz, D. Hoaglin, "How to Detect and Handle Outliers", ASQC 1993; NIST/SEMATECH
//! e-Handbook of Statistical Methods 1.3.5.17,
//! <https://www.itl.nist.gov/div898/handbook/eda/section3/eda35h.htm>; the second form: IBM, SPSS
//! Statistics, modified z score.

/// Beyond this modified z-score a value is an outlier. Source: Iglewicz and Hoaglin, as above.
const SCORE_MAXIMUM: f64 = 3.5;
/// The 0.75 quantile of the normal distribution, by which MAD estimates a standard deviation.
/// Source: as above.
const MAD_TO_DEVIATION: f64 = 0.6745;
/// The square root of pi / 2, by which the mean absolute deviation does. Source: as above.
const MEAN_DEVIATION_TO_DEVIATION: f64 = 1.253_314;
/// Fewer values say nothing of what is usual. Iglewicz and Hoaglin tried their rule on samples from
/// 10 on; one node of eight GPUs is let in, as a person would compare them, too.
pub(crate) const VALUES_MINIMUM: usize = 8;

/// In which direction a number is worth a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Worse {
    Lower,
    Higher,
    /// Every GPU of a model should have the same.
    Different,
}

/// A number of a GPU that can be compared with others of its model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measurement {
    /// The name in the reports, or the parts before and after `*`.
    pub(crate) name: &'static str,
    pub(crate) worse: Worse,
    /// A smaller distance from the median is of no interest, whatever the score: a share of the
    /// median, or in the measurement's unit.
    floor: Floor,
}

#[derive(Clone, Copy, Debug)]
enum Floor {
    Share(f64),
    Absolute(f64),
}

/// What is compared.
// The floors are this project's. Throughput: eight healthy H200s of one node spread by 4 % under
// one burn (gpu-burn, 343 to 358 TFLOP/s, in BENCHMARKS.md's sitting of 2026-11-20), so that less
// than 5 % is no news. Clocks and power under load follow the same spread. Temperatures of
// neighbours in one air stream differ by several degrees; 8 is beyond that. The rest are settings
// and sizes, which do not vary.
pub(crate) const MEASUREMENTS: &[Measurement] = &[
    Measurement {
        name: "burn_*_tflops",
        worse: Worse::Lower,
        floor: Floor::Share(0.05),
    },
    Measurement {
        name: "burn_sm_clock_median_mhz",
        worse: Worse::Lower,
        floor: Floor::Share(0.05),
    },
    Measurement {
        name: "burn_power_median_w",
        worse: Worse::Lower,
        floor: Floor::Share(0.05),
    },
    Measurement {
        name: "burn_temperature_maximum_c",
        worse: Worse::Higher,
        floor: Floor::Absolute(8.0),
    },
    Measurement {
        name: "burn_memory_temperature_maximum_c",
        worse: Worse::Higher,
        floor: Floor::Absolute(8.0),
    },
    Measurement {
        name: "idle_temperature_c",
        worse: Worse::Higher,
        floor: Floor::Absolute(8.0),
    },
    Measurement {
        name: "idle_power_w",
        worse: Worse::Higher,
        floor: Floor::Share(0.25),
    },
    Measurement {
        name: "cuda_kernel_wall_ms",
        worse: Worse::Higher,
        floor: Floor::Share(1.0),
    },
    Measurement {
        name: "pcie_generation_maximum",
        worse: Worse::Different,
        floor: Floor::Absolute(0.5),
    },
    Measurement {
        name: "pcie_width",
        worse: Worse::Different,
        floor: Floor::Absolute(0.5),
    },
    Measurement {
        name: "sm_clock_maximum_mhz",
        worse: Worse::Different,
        floor: Floor::Absolute(0.5),
    },
    Measurement {
        name: "power_limit_w",
        worse: Worse::Different,
        floor: Floor::Absolute(0.5),
    },
    // Retired pages and rows take a little of it.
    Measurement {
        name: "memory_total_mib",
        worse: Worse::Different,
        floor: Floor::Share(0.001),
    },
];

impl Measurement {
    /// How a measurement of this name is compared, if at all.
    pub(crate) fn named(name: &str) -> Option<&'static Measurement> {
        MEASUREMENTS
            .iter()
            .find(|it| match it.name.split_once('*') {
                Some((start, end)) => {
                    name.len() > start.len() + end.len()
                        && name.starts_with(start)
                        && name.ends_with(end)
                }
                None => it.name == name,
            })
    }
}

/// What is usual among values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Usual {
    pub(crate) count: usize,
    pub(crate) median: f64,
    /// Estimates a standard deviation; 0 where all values are the same.
    pub(crate) deviation: f64,
    /// More than half of the values are the median.
    most_are_the_same: bool,
}

impl Usual {
    /// `None` for too few values.
    pub(crate) fn of(values: &[f64]) -> Option<Usual> {
        if values.len() < VALUES_MINIMUM {
            return None;
        }
        let median = median(values);
        let deviations: Vec<f64> = values.iter().map(|value| (value - median).abs()).collect();
        let mad = self::median(&deviations);
        let deviation = if mad > 0.0 {
            mad / MAD_TO_DEVIATION
        } else {
            let count = u32::try_from(values.len()).map_or(f64::INFINITY, f64::from);
            MEAN_DEVIATION_TO_DEVIATION * deviations.iter().sum::<f64>() / count
        };
        let same = deviations.iter().filter(|it| **it == 0.0).count();
        Some(Usual {
            count: values.len(),
            median,
            deviation,
            most_are_the_same: 2 * same > values.len(),
        })
    }

    /// The modified z-score of an outlier; `None` for what is usual.
    pub(crate) fn outlier(&self, value: f64, measurement: &Measurement) -> Option<f64> {
        let distance = value - self.median;
        let is_worse = match measurement.worse {
            Worse::Lower => distance < 0.0,
            Worse::Higher => distance > 0.0,
            // Where no value has the majority, the odd one is unknown.
            Worse::Different => distance != 0.0 && self.most_are_the_same,
        };
        let floor = match measurement.floor {
            Floor::Share(share) => share * self.median.abs(),
            Floor::Absolute(floor) => floor,
        };
        let score = distance / self.deviation;
        // What every GPU of a model should share needs no score: the median is what most have.
        let is_far = measurement.worse == Worse::Different || score.abs() > SCORE_MAXIMUM;
        (is_worse && is_far && distance.abs() > floor).then_some(score)
    }
}

/// The mean of the two in the middle of an even number; `values` is not empty.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 {
        sorted[middle]
    } else {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str) -> &'static Measurement {
        Measurement::named(name).expect(name)
    }

    #[test]
    fn the_score_is_that_of_the_handbook() {
        // Median 2.5, absolute deviations 2.5 1.5 0.5 0.5 1.5 2.5 0.5 0.5, so MAD is 1.
        let values = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 2.0, 3.0];
        let usual = Usual::of(&values).expect("enough");
        assert!((usual.median - 2.5).abs() < 1e-12);
        assert!((usual.deviation - 1.0 / 0.6745).abs() < 1e-12);
        let score = usual.outlier(102.5, of("idle_temperature_c")).expect("far");
        assert!((score - 67.45).abs() < 1e-9, "{score}");
    }

    #[test]
    fn one_broken_gpu_does_not_hide_itself() {
        let mut values = vec![640.0, 655.0, 650.0, 645.0, 652.0, 648.0, 651.0, 520.0];
        let usual = Usual::of(&values).expect("enough");
        let tflops = of("burn_bf16_tflops");
        assert!(usual.outlier(520.0, tflops).is_some());
        for value in &values[..7] {
            assert_eq!(usual.outlier(*value, tflops), None, "{value}");
        }
        // A GPU that is faster than others is no trouble.
        assert_eq!(usual.outlier(900.0, tflops), None);
        // Nor is one that is slower by less than healthy ones differ, however alike the others are.
        values = vec![650.0, 650.1, 650.2, 650.1, 650.0, 650.2, 650.1, 640.0];
        let usual = Usual::of(&values).expect("enough");
        assert_eq!(usual.outlier(640.0, tflops), None);
    }

    #[test]
    fn where_most_are_the_same_any_other_is_an_outlier() {
        let usual = Usual::of(&[16.0, 16.0, 16.0, 16.0, 16.0, 16.0, 16.0, 8.0]).expect("enough");
        assert!(usual.outlier(8.0, of("pcie_width")).is_some());
        assert_eq!(usual.outlier(16.0, of("pcie_width")), None);
        let halves = [4.0, 4.0, 4.0, 4.0, 5.0, 5.0, 5.0, 5.0];
        let usual = Usual::of(&halves).expect("enough");
        assert_eq!(usual.outlier(4.0, of("pcie_generation_maximum")), None);
        let usual = Usual::of(&[45.0; 12]).expect("enough");
        assert!(usual.deviation.abs() < 1e-12);
        assert_eq!(usual.outlier(45.0, of("idle_temperature_c")), None);
    }

    #[test]
    fn few_values_say_nothing() {
        assert_eq!(Usual::of(&[1.0; VALUES_MINIMUM - 1]), None);
        assert_eq!(Usual::of(&[]), None);
    }

    #[test]
    fn measurements_are_known_by_name_or_pattern() {
        assert_eq!(of("burn_fp8_tflops").worse, Worse::Lower);
        assert!(Measurement::named("burn__tflop").is_none());
        assert!(Measurement::named("serial").is_none());
    }
}
