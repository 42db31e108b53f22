//! Power, clocks, temperature and utilisation that follow load: one first-order lag each.
//!
//! The lags are of a real board's order (power settles in a fraction of a second, heat in tens of seconds), so that tools
//! which sample see a ramp, and a short test still sees a difference.

use crate::gpu::{ClockSet, Gpu, ThrottleReason};
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};

const POWER_LAG_S: f64 = 0.15;
const UTILIZATION_LAG_S: f64 = 0.4;
const HEAT_LAG_S: f64 = 12.0;
/// Above this share of load the power limit (or the board's own ceiling) holds the clock.
const POWER_CAP_SHARE: f64 = 0.9;

const THROTTLE_REASONS: usize = 9;

/// The lagged values of one GPU, shared between processes. Each is an `f64` from 0 (idle) to 1 (full load).
#[repr(C)]
#[derive(Debug)]
pub struct DynamicState {
    updated_ns: AtomicU64,
    /// Whether work ran since the last update, 0 or 1.
    load: AtomicU64,
    power: AtomicU64,
    utilization: AtomicU64,
    heat: AtomicU64,
    /// Seconds of full load so far, for energy.
    loaded_s: AtomicU64,
    /// Seconds that each throttle reason has held, in the order of `ThrottleReason`.
    throttled_s: [AtomicU64; THROTTLE_REASONS],
}

impl DynamicState {
    /// Moves the lagged values on to `now_ns`, with the load that held since the last update; then notes the new load.
    ///
    /// One caller wins a step; one that is killed between winning and storing loses that step only.
    pub(crate) fn advance(&self, gpu: &Gpu, now_ns: u64, busy: bool) {
        let before = self.updated_ns.load(Ordering::Acquire);
        if now_ns <= before
            || self
                .updated_ns
                .compare_exchange(before, now_ns, Ordering::AcqRel, Ordering::Acquire)
                .is_err()
        {
            return;
        }
        let load = get(&self.load);
        #[allow(
            clippy::cast_precision_loss,
            reason = "an interval of nanoseconds is far below 2^53"
        )]
        let seconds = if before == 0 {
            0.0
        } else {
            (now_ns - before) as f64 * 1e-9
        };
        for (value, lag) in [
            (&self.power, POWER_LAG_S),
            (&self.utilization, UTILIZATION_LAG_S),
            (&self.heat, HEAT_LAG_S),
        ] {
            let old = get(value);
            put(value, load + (old - load) * (-seconds / lag).exp());
        }
        put(&self.loaded_s, get(&self.loaded_s) + load * seconds);
        for reason in throttle_reasons(gpu, load > 0.5, get(&self.power)) {
            let total = &self.throttled_s[reason as usize];
            put(total, get(total) + seconds);
        }
        put(&self.load, f64::from(u8::from(busy)));
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot {
            load: get(&self.load),
            power: get(&self.power),
            utilization: get(&self.utilization),
            heat: get(&self.heat),
            loaded_s: get(&self.loaded_s),
            throttled_s: std::array::from_fn(|reason| get(&self.throttled_s[reason])),
        }
    }
}

struct Snapshot {
    load: f64,
    power: f64,
    utilization: f64,
    heat: f64,
    loaded_s: f64,
    throttled_s: [f64; THROTTLE_REASONS],
}

fn get(value: &AtomicU64) -> f64 {
    f64::from_bits(value.load(Ordering::Acquire))
}

fn put(value: &AtomicU64, new: f64) {
    value.store(new.to_bits(), Ordering::Release);
}

/// What a GPU's sensors show at one moment.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Readings {
    pub power_mw: u32,
    pub power_instant_mw: u32,
    pub memory_power_mw: Option<u32>,
    pub temperature_c: i32,
    pub memory_temperature_c: Option<i32>,
    pub clocks: ClockSet,
    pub gpu_utilization_percent: u32,
    pub memory_utilization_percent: u32,
    pub throttle_reasons: Vec<ThrottleReason>,
    /// Since the node was prepared.
    pub energy_mj: u64,
    /// Seconds that each throttle reason held since the node was prepared, in the order of `ThrottleReason`.
    pub throttled_s: [f64; THROTTLE_REASONS],
    /// `P0` is 0.
    pub performance_state: u32,
}

/// The sensors of a GPU that is `gpu` and whose load was `state`, `elapsed_s` after the node was prepared.
pub fn readings(gpu: &Gpu, state: &DynamicState, elapsed_s: f64) -> Readings {
    let now = state.snapshot();
    let full_power_mw = gpu
        .power
        .load_mw
        .min(gpu.power.limit_mw)
        .max(gpu.power.idle_mw);
    let slowed = gpu.throttle_reasons.iter().any(|reason| reason.slows());
    let busy = now.load > 0.5;
    let power_mw = mix_u32(gpu.power.idle_mw, full_power_mw, now.power);
    let idle_instant = gpu.power.idle_instant_mw.unwrap_or(gpu.power.idle_mw);
    Readings {
        power_mw,
        power_instant_mw: mix_u32(idle_instant, full_power_mw, now.load),
        memory_power_mw: gpu
            .power
            .memory_idle_mw
            .map(|idle| mix_u32(idle, full_power_mw / 6, now.power)),
        temperature_c: mix_i32(gpu.temperature.idle_c, gpu.temperature.load_c, now.heat),
        memory_temperature_c: gpu.temperature.memory_idle_c.map(|idle| {
            mix_i32(
                idle,
                gpu.temperature.memory_load_c.unwrap_or(idle),
                now.heat,
            )
        }),
        clocks: clocks(gpu, busy, slowed),
        gpu_utilization_percent: mix_u32(0, 100, now.utilization),
        memory_utilization_percent: mix_u32(0, 60, now.utilization),
        throttle_reasons: throttle_reasons(gpu, busy, now.power),
        energy_mj: energy_mj(gpu, full_power_mw, &now, elapsed_s),
        throttled_s: now.throttled_s,
        performance_state: performance_state(gpu, busy),
    }
}

/// Boards whose clocks fall at idle show P8 there, except those that always stay in P0.
fn performance_state(gpu: &Gpu, busy: bool) -> u32 {
    let memory_clock_falls = gpu.clocks.idle.memory_mhz < gpu.clocks.max.memory_mhz;
    let follows = if busy || !memory_clock_falls { 0 } else { 8 };
    gpu.performance_state.unwrap_or(follows)
}

fn clocks(gpu: &Gpu, busy: bool, slowed: bool) -> ClockSet {
    if !busy {
        return gpu.clocks.idle;
    }
    // A slowdown by heat, power brake or hardware halves the clock; real boards vary between a half and an eighth.
    let sm_mhz = gpu.clocks.load_sm_mhz / if slowed { 2 } else { 1 };
    ClockSet {
        graphics_mhz: sm_mhz,
        sm_mhz,
        ..gpu.clocks.max
    }
}

fn throttle_reasons(gpu: &Gpu, busy: bool, power_share: f64) -> Vec<ThrottleReason> {
    let mut reasons = gpu.throttle_reasons.clone();
    if !busy {
        reasons.push(ThrottleReason::GpuIdle);
    } else if gpu.power.load_mw >= gpu.power.limit_mw && power_share > POWER_CAP_SHARE {
        reasons.push(ThrottleReason::SwPowerCap);
    }
    reasons.sort_unstable();
    reasons.dedup();
    reasons
}

fn energy_mj(gpu: &Gpu, full_power_mw: u32, now: &Snapshot, elapsed_s: f64) -> u64 {
    let idle = f64::from(gpu.power.idle_mw) * elapsed_s;
    let extra = f64::from(full_power_mw - gpu.power.idle_mw) * now.loaded_s;
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "both terms are positive and far below 2^53"
    )]
    let energy = (idle + extra) as u64;
    energy
}

impl ThrottleReason {
    /// Whether it lowers the clock under load; the others only say why a clock is what it was set to.
    fn slows(self) -> bool {
        matches!(
            self,
            Self::HwSlowdown
                | Self::SwThermalSlowdown
                | Self::HwThermalSlowdown
                | Self::HwPowerBrakeSlowdown
        )
    }
}

fn mix_u32(idle: u32, full: u32, share: f64) -> u32 {
    let value = f64::from(idle) + (f64::from(full) - f64::from(idle)) * share.clamp(0.0, 1.0);
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the value lies between two u32"
    )]
    let rounded = value.round() as u32;
    rounded
}

fn mix_i32(idle: i32, full: i32, share: f64) -> i32 {
    let value = f64::from(idle) + (f64::from(full) - f64::from(idle)) * share.clamp(0.0, 1.0);
    #[allow(
        clippy::cast_possible_truncation,
        reason = "the value lies between two i32"
    )]
    let rounded = value.round() as i32;
    rounded
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Catalogue, resolve};

    fn h200() -> Gpu {
        let resolved = resolve::resolve(&Catalogue::shipped(), "h200x8", &[], &[]).unwrap();
        resolve::scenario_at_start(&resolved)
            .unwrap()
            .gpus
            .remove(0)
    }

    fn state() -> DynamicState {
        DynamicState {
            updated_ns: AtomicU64::new(0),
            load: AtomicU64::new(0),
            power: AtomicU64::new(0),
            utilization: AtomicU64::new(0),
            heat: AtomicU64::new(0),
            loaded_s: AtomicU64::new(0),
            throttled_s: Default::default(),
        }
    }

    const SECOND_NS: u64 = 1_000_000_000;

    #[test]
    fn a_minute_of_load_reaches_power_limit_and_heat_and_an_idle_one_goes_back() {
        let (gpu, state) = (h200(), state());
        state.advance(&gpu, SECOND_NS, true);
        state.advance(&gpu, 61 * SECOND_NS, true);
        let loaded = readings(&gpu, &state, 61.0);
        assert_eq!(loaded.power_mw, gpu.power.limit_mw);
        assert_eq!(loaded.clocks.sm_mhz, gpu.clocks.load_sm_mhz);
        assert!(
            (gpu.temperature.load_c - loaded.temperature_c).abs() <= 1,
            "{loaded:?}"
        );
        assert_eq!(loaded.throttle_reasons, [ThrottleReason::SwPowerCap]);
        assert!(loaded.throttled_s[ThrottleReason::SwPowerCap as usize] > 59.0);
        state.advance(&gpu, 62 * SECOND_NS, false);
        state.advance(&gpu, 200 * SECOND_NS, false);
        let idle = readings(&gpu, &state, 200.0);
        assert_eq!(
            (idle.power_mw, idle.temperature_c),
            (gpu.power.idle_mw, gpu.temperature.idle_c)
        );
        assert_eq!(idle.throttle_reasons, [ThrottleReason::GpuIdle]);
        assert!(idle.energy_mj > loaded.energy_mj);
    }

    #[test]
    fn a_slowdown_halves_the_clock_under_load_only() {
        let (mut gpu, state) = (h200(), state());
        gpu.throttle_reasons = vec![ThrottleReason::HwThermalSlowdown];
        assert_eq!(
            readings(&gpu, &state, 0.0).clocks.sm_mhz,
            gpu.clocks.idle.sm_mhz
        );
        state.advance(&gpu, SECOND_NS, true);
        assert_eq!(
            readings(&gpu, &state, 1.0).clocks.sm_mhz,
            gpu.clocks.load_sm_mhz / 2
        );
    }

    #[test]
    fn time_that_runs_backwards_changes_nothing() {
        let (gpu, state) = (h200(), state());
        state.advance(&gpu, 10 * SECOND_NS, true);
        let before = readings(&gpu, &state, 10.0);
        state.advance(&gpu, 5 * SECOND_NS, false);
        assert_eq!(readings(&gpu, &state, 10.0), before);
    }
}
