//! The duty cycle of a worker that keeps its GPU below a power cap.

/// The least share of time in which a worker computes; a GPU whose idle power exceeds the cap is
/// not worked faster than this.
// Source: this project's own choice: 1 step of 10 ms each second still verifies memory.
pub const LEAST: f64 = 0.01;
/// The largest change between two power readings, a second apart: NVML's power is an average over
/// up to a second.
// Source: nvmlDeviceGetPowerUsage, NVML API reference: on GPUs from Ampere on an average over 1 s.
const LARGEST_STEP: f64 = 0.25;

/// The duty cycle after a power reading. Proportional to the distance from the cap, limited in each
/// step.
pub fn next(duty: f64, power_mw: u32, cap_mw: u32) -> f64 {
    if cap_mw == 0 {
        return LEAST;
    }
    let distance = (f64::from(cap_mw) - f64::from(power_mw)) / f64::from(cap_mw);
    let change = distance.clamp(-LARGEST_STEP, LARGEST_STEP);
    (duty + change * duty.max(LEAST)).clamp(LEAST, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A GPU that takes 100 W idle and up to 700 W at work.
    fn power_mw(duty: f64) -> u32 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a test"
        )]
        let power = (100_000.0 + 600_000.0 * duty) as u32;
        power
    }

    #[test]
    fn the_power_comes_below_the_cap_and_stays_near_it() {
        let mut duty = 1.0;
        for _ in 0..60 {
            duty = next(duty, power_mw(duty), 420_000);
        }
        let power = power_mw(duty);
        assert!((400_000..=425_000).contains(&power), "{power}");
    }

    #[test]
    fn a_cap_above_the_power_leaves_the_worker_alone_and_one_below_idle_power_all_but_stops_it() {
        assert!((next(1.0, 300_000, 420_000) - 1.0).abs() < f64::EPSILON);
        let mut duty = 1.0;
        for _ in 0..100 {
            duty = next(duty, power_mw(duty), 50_000);
        }
        assert!((duty - LEAST).abs() < f64::EPSILON, "{duty}");
        assert!((next(0.5, 1, 0) - LEAST).abs() < f64::EPSILON);
    }
}
