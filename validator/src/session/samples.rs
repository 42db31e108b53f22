//! What the sensors showed of a GPU, kept within bounds however long its burn is.

use std::collections::BTreeMap;
use std::time::Instant;

use validator_core::facts::SensorSample;

/// Looks that are kept, neighbours merged beyond that: at ten a second, every look of seven
/// minutes.
const KEPT_MAXIMUM: usize = 4_096;
/// Samples of a GPU that the facts have.
const SAMPLES_MAXIMUM: usize = 100;
/// Of what was sampled before the load this much shows how it rose.
const SECONDS_BEFORE_LOAD: f32 = 1.0;

/// Looks at one GPU's sensors.
#[derive(Debug)]
pub(super) struct Samples {
    /// Each of `stride` looks.
    kept: Vec<Look>,
    stride: usize,
    /// Fewer than `stride`.
    pending: Vec<Look>,
}

/// One look, or several that were merged.
#[derive(Clone, Debug)]
struct Look {
    at: Instant,
    sample: SensorSample,
    /// How many looks had these clocks event reasons.
    reasons: BTreeMap<u64, u64>,
}

impl Default for Samples {
    fn default() -> Self {
        Self {
            kept: Vec::new(),
            stride: 1,
            pending: Vec::new(),
        }
    }
}

impl Samples {
    pub(super) fn push(&mut self, at: Instant, sample: SensorSample) {
        self.pending.push(Look {
            at,
            sample,
            reasons: sample.reasons.map(|it| (it, 1)).into_iter().collect(),
        });
        if self.pending.len() < self.stride {
            return;
        }
        self.kept.extend(merged(&self.pending));
        self.pending.clear();
        if self.kept.len() >= KEPT_MAXIMUM {
            self.kept = self.kept.chunks(2).filter_map(merged).collect();
            self.stride *= 2;
        }
    }

    /// The samples from shortly before the load on, with the seconds since it began, and how many
    /// looks in the `load_s` seconds of it had which clocks event reasons.
    pub(super) fn since(
        mut self,
        began: Instant,
        load_s: f64,
    ) -> (Vec<SensorSample>, BTreeMap<u64, u64>) {
        self.kept.extend(merged(&self.pending));
        for look in &mut self.kept {
            look.sample.t = seconds_from(began, look.at);
        }
        self.kept.retain(|it| it.sample.t >= -SECONDS_BEFORE_LOAD);
        let mut reasons = BTreeMap::new();
        let under_load = self
            .kept
            .iter()
            .filter(|it| it.sample.t >= 0.0 && f64::from(it.sample.t) <= load_s);
        for (mask, count) in under_load.flat_map(|it| &it.reasons) {
            *reasons.entry(*mask).or_default() += count;
        }
        let part = self.kept.len().div_ceil(SAMPLES_MAXIMUM).max(1);
        let few = self.kept.chunks(part).filter_map(merged);
        (few.map(|it| it.sample).collect(), reasons)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "milliseconds matter")]
fn seconds_from(began: Instant, at: Instant) -> f32 {
    let after = at.saturating_duration_since(began).as_secs_f64();
    let before = began.saturating_duration_since(at).as_secs_f64();
    // Adding zero leaves no negative zero, which the facts do not keep.
    (((after - before) * 1000.0).round() / 1000.0 + 0.0) as f32
}

/// Greatest temperature, all reasons, mean power and clocks, at the time of the first; `None` of
/// nothing.
fn merged(looks: &[Look]) -> Option<Look> {
    let first = looks.first()?;
    let samples = || looks.iter().map(|it| &it.sample);
    let mean = |value: fn(&SensorSample) -> Option<u32>| {
        let values: Vec<u64> = samples().filter_map(value).map(u64::from).collect();
        let sum: u64 = values.iter().sum();
        u32::try_from(sum.checked_div(values.len() as u64)?).ok()
    };
    let mut reasons = BTreeMap::new();
    for (mask, count) in looks.iter().flat_map(|it| &it.reasons) {
        *reasons.entry(*mask).or_default() += count;
    }
    let sample = SensorSample {
        t: first.sample.t,
        power_mw: mean(|it| it.power_mw),
        sm_mhz: mean(|it| it.sm_mhz),
        memory_mhz: mean(|it| it.memory_mhz),
        gpu_c: samples().filter_map(|it| it.gpu_c).max(),
        memory_c: samples().filter_map(|it| it.memory_c).max(),
        reasons: samples()
            .filter_map(|it| it.reasons)
            .reduce(|all, it| all | it),
        utilization_percent: mean(|it| it.utilization_percent),
    };
    Some(Look {
        at: first.at,
        sample,
        reasons,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn samples_of(looks: u32, at: impl Fn(u32) -> SensorSample) -> (Instant, Samples) {
        let began = Instant::now();
        let mut samples = Samples::default();
        for index in 0..looks {
            samples.push(began + Duration::from_millis(100) * index, at(index));
        }
        (began, samples)
    }

    #[test]
    fn a_look_just_before_the_load_is_at_zero_as_in_the_facts() {
        let began = Instant::now();
        let just_before = began
            .checked_sub(Duration::from_micros(300))
            .expect("later");
        assert!(seconds_from(began, just_before).is_sign_positive());
        let long_before = began.checked_sub(Duration::from_millis(2)).expect("later");
        assert!((seconds_from(began, long_before) + 0.002).abs() < 1e-9);
    }

    #[test]
    fn thinning_keeps_the_hottest_and_every_reason() {
        let (began, samples) = samples_of(1000, |index| SensorSample {
            gpu_c: i32::try_from(index % 90).ok(),
            reasons: Some(if index == 777 { 0x40 } else { 0x4 }),
            power_mw: Some(600_000),
            ..SensorSample::default()
        });
        let (thin, reasons) = samples.since(began, 1000.0);
        assert_eq!(thin.len(), 100);
        assert_eq!(thin.iter().filter_map(|it| it.gpu_c).max(), Some(89));
        let with_heat = thin.iter().filter(|it| it.reasons == Some(0x44));
        assert_eq!(with_heat.count(), 1);
        assert_eq!(thin[1].power_mw, Some(600_000));
        assert!((thin[1].t - 1.0).abs() < 1e-6);
        assert_eq!(reasons, BTreeMap::from([(0x4, 999), (0x40, 1)]));
    }

    #[test]
    fn a_day_is_kept_within_bounds_and_evenly() {
        const DAY: u32 = 864_000;
        let (began, samples) = samples_of(DAY, |index| SensorSample {
            reasons: Some(if index % 100_000 == 7 { 0x40 } else { 0x4 }),
            // The second half draws more.
            power_mw: Some(if index < DAY / 2 { 600_000 } else { 700_000 }),
            ..SensorSample::default()
        });
        assert!(samples.kept.len() < KEPT_MAXIMUM);
        let (thin, reasons) = samples.since(began, f64::from(DAY) / 10.0);
        assert_eq!(
            reasons,
            BTreeMap::from([(0x4, u64::from(DAY) - 9), (0x40, 9)])
        );
        let powers: u64 = thin
            .iter()
            .filter_map(|it| it.power_mw)
            .map(u64::from)
            .sum();
        let mean = powers / thin.len() as u64;
        assert!((648_000..652_000).contains(&mean), "{mean}");
    }

    #[test]
    fn only_looks_under_load_count() {
        let (began, samples) = samples_of(100, |_| SensorSample {
            reasons: Some(0x4),
            ..SensorSample::default()
        });
        let load_began = began + Duration::from_secs(2);
        let (thin, reasons) = samples.since(load_began, 5.0);
        assert_eq!(reasons, BTreeMap::from([(0x4, 51)]));
        // Those of the second before it, and those after it, are shown.
        assert_eq!(thin.len(), 90);
    }
}
