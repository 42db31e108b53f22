//! A trial of an engine: its rate, and the power that the GPU draws.

use std::time::{Duration, Instant};

use super::kernels::Gemm;
use super::operand::OperandMode;
use super::product::GemmGpu;
use super::shape::Layout;
use super::sizing::Pace;
use crate::cuda::CudaFailure;
use crate::probe::PowerMeter;

type CudaResult<T> = Result<T, CudaFailure>;

/// Products of the first batch of a trial.
const TRIAL_BATCH: u64 = 16;
/// How long after a change of engines a power is still the other's, in part: NVIDIA's instantaneous
/// reading is renewed every tenth of a second.
// Source: BENCHMARKS.md, power readings of an H200.
const POWER_SETTLES: Duration = Duration::from_millis(100);
/// Fewer readings have no mean worth the name; this project's choice.
const POWER_READINGS_MINIMUM: u32 = 3;

/// What an engine reached while it was tried.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Trial {
    operations: f64,
    seconds: f64,
    /// Sum of the powers that were read under load, in watts, and how many they were.
    power_sum_w: f64,
    /// Sum of their squares.
    power_squares: f64,
    pub(crate) power_readings: u32,
}

impl Trial {
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            operations: self.operations + other.operations,
            seconds: self.seconds + other.seconds,
            power_sum_w: self.power_sum_w + other.power_sum_w,
            power_squares: self.power_squares + other.power_squares,
            power_readings: self.power_readings + other.power_readings,
        }
    }

    fn note_power(&mut self, watts: f64) {
        self.power_sum_w += watts;
        self.power_squares += watts * watts;
        self.power_readings += 1;
    }

    pub(crate) fn tflops(&self) -> f64 {
        self.operations / self.seconds.max(1e-9) / 1e12
    }

    /// The mean; `None` where it was not read often enough.
    pub(crate) fn power_w(&self) -> Option<f64> {
        let enough = self.power_readings >= POWER_READINGS_MINIMUM;
        enough.then(|| self.power_sum_w / f64::from(self.power_readings))
    }

    /// How far the mean may lie from what longer reading would give, in watts: its standard error,
    /// from how the readings vary.
    pub(crate) fn power_error_w(&self) -> f64 {
        let number = f64::from(self.power_readings).max(2.0);
        let of_squares = self.power_squares - self.power_sum_w * self.power_sum_w / number;
        (of_squares.max(0.0) / (number - 1.0) / number).sqrt()
    }
}

/// Multiplies random operands for `duration` without looking at results, and reads the power under
/// way. `None` where products of this size cannot be computed.
pub(crate) fn try_out(
    gpu: &GemmGpu<'_, '_>,
    gemm: &Gemm<'_, '_>,
    (layout, product_s): &(Layout, f64),
    (seed, duration): (u64, Duration),
    power: &PowerMeter<'_>,
) -> CudaResult<Option<Trial>> {
    let Some(operands) = gemm.operands(gpu.context, &gpu.arena, layout)? else {
        return Ok(None);
    };
    gpu.generate_operands(layout, (OperandMode::Random, seed))?;
    let end = gpu.context.event()?;
    end.record()?;
    end.wait()?;
    let most = Pace::BURN.batch(*product_s, layout.results_count);
    // Launching may take longer than multiplying, so that batches grow only while the host keeps
    // up.
    let mut batch = most.min(TRIAL_BATCH);
    let mut number = 0;
    let started = Instant::now();
    let mut trial = Trial::default();
    while number == 0 || (started.elapsed() < duration && !gpu.shall_stop()) {
        let launched = Instant::now();
        for _ in 0..batch {
            let place = (layout.result(number), None);
            gemm.multiply(&operands, gpu.arena.address(), layout, place, None)?;
            number += 1;
        }
        if launched.elapsed().as_secs_f64() < Pace::BURN.batch_s / 2.0 {
            batch = most.min(batch * 2);
        }
        end.record()?;
        if started.elapsed() >= POWER_SETTLES
            && let Some(watts) = power.watts()
        {
            trial.note_power(watts);
        }
        end.wait()?;
    }
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    let operations = layout.shape.operations() * number as f64;
    Ok(Some(Trial {
        operations,
        seconds: started.elapsed().as_secs_f64(),
        ..trial
    }))
}

#[cfg(test)]
impl Trial {
    /// One that reached this rate, with these readings of its power.
    pub(crate) fn of(tflops: f64, powers_w: &[f64]) -> Self {
        let mut trial = Self {
            operations: tflops * 1e12,
            seconds: 1.0,
            ..Self::default()
        };
        for watts in powers_w {
            trial.note_power(*watts);
        }
        trial
    }
}
