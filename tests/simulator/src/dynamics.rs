//! Power, clocks, temperature and utilisation that follow load: one first-order lag each.
//!
//! The lags are of a real board's order (power settles in a fraction of a second, heat in tens of
//! seconds), so that tools which sample see a ramp, and a short test still sees a difference.

use crate::gpu::{ClockSet, Gpu, LinkLoad, ThrottleReason};
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};

const POWER_LAG_S: f64 = 0.15;
const UTILIZATION_LAG_S: f64 = 0.4;
const HEAT_LAG_S: f64 = 12.0;
/// Above this share of load the power limit (or the board's own ceiling) holds the clock.
const POWER_CAP_SHARE: f64 = 0.9;

/// A program that keeps a GPU at work queues launches ahead, and the GPU has no gaps between them.
/// The simulator computes when a launch is made, on a CPU that others use, too: gaps up to this
/// long between the launches of a queue are no idle time.
const QUEUE_GAP_NS: u64 = 400_000_000;
/// So many launches in a row make a queue; a single kernel does not heat a GPU.
const QUEUE_LAUNCHES: u64 = 8;

const THROTTLE_REASONS: usize = 9;

/// The lagged values of one GPU, shared between processes. Each is an `f64` from 0 (idle) to 1
/// (full load).
#[repr(C)]
#[derive(Debug)]
pub struct DynamicState {
    updated_ns: AtomicU64,
    /// Whether work ran since the last update, 0 or 1.
    running: AtomicU64,
    /// When work ended last, and how many launches followed one another by then.
    ended_ns: AtomicU64,
    launches_in_a_row: AtomicU64,
    /// What `running` and the queue make of it at the last update, 0 or 1.
    load: AtomicU64,
    power: AtomicU64,
    utilization: AtomicU64,
    heat: AtomicU64,
    /// Seconds of full load so far, for energy.
    loaded_s: AtomicU64,
    /// Seconds that each throttle reason has held, in the order of `ThrottleReason`.
    throttled_s: [AtomicU64; THROTTLE_REASONS],
    /// Whether the last product was cuBLASLt's, 0 or 1.
    of_cublaslt: AtomicU64,
}

impl DynamicState {
    /// Notes whose product has run.
    pub(crate) fn note_product(&self, of_cublaslt: bool) {
        self.of_cublaslt
            .store(u64::from(of_cublaslt), Ordering::Release);
    }

    /// Moves the lagged values on to `now_ns`, with the load that held since the last update; then
    /// notes whether work runs now.
    ///
    /// One caller wins a step; one that is killed between winning and storing loses that step only.
    pub(crate) fn advance(&self, gpu: &Gpu, now_ns: u64, runs_now: bool) {
        let before = self.updated_ns.load(Ordering::Acquire);
        if now_ns <= before
            || self
                .updated_ns
                .compare_exchange(before, now_ns, Ordering::AcqRel, Ordering::Acquire)
                .is_err()
        {
            return;
        }
        let ran = self.running.load(Ordering::Acquire) == 1;
        let loaded_until = if ran {
            now_ns
        } else {
            self.queue_ends_ns().clamp(before, now_ns)
        };
        if before != 0 {
            self.pass(gpu, loaded_until - before, 1.0);
            self.pass(gpu, now_ns - loaded_until, 0.0);
        }
        if ran && !runs_now {
            self.ended_ns.store(now_ns, Ordering::Release);
        }
        if runs_now && !ran {
            let gap = now_ns - self.ended_ns.load(Ordering::Acquire).min(now_ns);
            let in_a_row = self.launches_in_a_row.load(Ordering::Acquire);
            let in_a_row = if gap < QUEUE_GAP_NS { in_a_row + 1 } else { 1 };
            self.launches_in_a_row.store(in_a_row, Ordering::Release);
        }
        self.running.store(u64::from(runs_now), Ordering::Release);
        let loaded = runs_now || now_ns < self.queue_ends_ns();
        put(&self.load, f64::from(u8::from(loaded)));
    }

    /// Until when a queue of launches keeps the GPU at work, unless more follow.
    fn queue_ends_ns(&self) -> u64 {
        let is_queue = self.launches_in_a_row.load(Ordering::Acquire) >= QUEUE_LAUNCHES;
        let gap = if is_queue { QUEUE_GAP_NS } else { 0 };
        self.ended_ns.load(Ordering::Acquire) + gap
    }

    /// Moves the lagged values on by a time of constant load.
    fn pass(&self, gpu: &Gpu, nanoseconds: u64, load: f64) {
        if nanoseconds == 0 {
            return;
        }
        #[allow(
            clippy::cast_precision_loss,
            reason = "an interval of nanoseconds is far below 2^53"
        )]
        let seconds = nanoseconds as f64 * 1e-9;
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
    }

    /// Time of full load so far.
    pub(crate) fn loaded_ns(&self) -> u64 {
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "seconds of one node's life"
        )]
        let ns = (get(&self.loaded_s) * 1e9) as u64;
        ns
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
    /// Seconds that each throttle reason held since the driver was loaded, in the order of
    /// `ThrottleReason`.
    pub throttled_s: [f64; THROTTLE_REASONS],
    /// `P0` is 0.
    pub performance_state: u32,
    /// What the PCIe link's speed follows.
    pub link_load: LinkLoad,
}

/// The temperature of a GPU whose load was `state`.
pub(crate) fn temperature_c(gpu: &Gpu, state: &DynamicState) -> i32 {
    mix_i32(
        gpu.temperature.idle_c,
        gpu.temperature.load_c,
        get(&state.heat),
    )
}

/// What the PCIe link's speed follows.
pub(crate) fn link_load(gpu: &Gpu, state: &DynamicState) -> LinkLoad {
    link_load_of(get(&state.load) > 0.5, gpu)
}

/// Boards that save power let the link fall to a lower generation together with their clocks.
fn link_load_of(busy: bool, gpu: &Gpu) -> LinkLoad {
    match (busy, performance_state(gpu, busy)) {
        (true, _) => LinkLoad::Busy,
        (false, 0) => LinkLoad::Idle,
        (false, _) => LinkLoad::Saving,
    }
}

/// The sensors of a GPU that is `gpu` and whose load was `state`, `elapsed_s` after the node was
/// prepared.
pub fn readings(gpu: &Gpu, state: &DynamicState, elapsed_s: f64) -> Readings {
    let now = state.snapshot();
    let of_cublaslt = state.of_cublaslt.load(Ordering::Acquire) == 1;
    let full_power_mw = gpu
        .power
        .cublaslt_load_mw
        .filter(|_| of_cublaslt)
        .unwrap_or(gpu.power.load_mw)
        .min(gpu.power.limit_mw)
        .max(gpu.power.idle_mw);
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
        clocks: clocks(gpu, busy),
        gpu_utilization_percent: mix_u32(0, 100, now.utilization),
        memory_utilization_percent: mix_u32(0, 60, now.utilization),
        throttle_reasons: throttle_reasons(gpu, busy, now.power),
        energy_mj: energy_mj(gpu, full_power_mw, &now, elapsed_s),
        throttled_s: std::array::from_fn(|reason| now.throttled_s[reason] + before_s(gpu, reason)),
        performance_state: performance_state(gpu, busy),
        link_load: link_load_of(busy, gpu),
    }
}

/// How long a throttle reason had held when the node was prepared.
fn before_s(gpu: &Gpu, reason: usize) -> f64 {
    let mut known = gpu.throttled_before.iter();
    known
        .find(|(it, _)| **it as usize == reason)
        .map_or(0.0, |(_, time)| time.0.as_secs_f64())
}

/// Boards whose clocks fall at idle show P8 there, except those that always stay in P0.
fn performance_state(gpu: &Gpu, busy: bool) -> u32 {
    let memory_clock_falls = gpu.clocks.idle.memory_mhz < gpu.clocks.max.memory_mhz;
    let follows = if busy || !memory_clock_falls { 0 } else { 8 };
    gpu.performance_state.unwrap_or(follows)
}

fn clocks(gpu: &Gpu, busy: bool) -> ClockSet {
    if !busy {
        return gpu.clocks.idle;
    }
    let sm_mhz = gpu.clocks.load_sm_mhz / gpu.slowdown();
    ClockSet {
        graphics_mhz: sm_mhz,
        sm_mhz,
        memory_mhz: gpu
            .clocks
            .load_memory_mhz
            .unwrap_or(gpu.clocks.max.memory_mhz),
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

impl Gpu {
    /// By how much the clock under load is divided: a slowdown by heat, power brake or hardware
    /// halves it; real boards vary between a half and an eighth.
    pub(crate) fn slowdown(&self) -> u32 {
        let slowed = self.throttle_reasons.iter().any(|reason| reason.slows());
        if slowed { 2 } else { 1 }
    }
}

impl ThrottleReason {
    /// Whether it lowers the clock under load; the others only name the setting that it
    /// follows.
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
            running: AtomicU64::new(0),
            ended_ns: AtomicU64::new(0),
            launches_in_a_row: AtomicU64::new(0),
            load: AtomicU64::new(0),
            power: AtomicU64::new(0),
            utilization: AtomicU64::new(0),
            heat: AtomicU64::new(0),
            loaded_s: AtomicU64::new(0),
            throttled_s: Default::default(),
            of_cublaslt: AtomicU64::new(0),
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

    /// Launches of a millisecond with gaps of 200 ms between them, from `SECOND_NS` on; returns
    /// when the last one ended.
    fn launches_with_gaps(gpu: &Gpu, state: &DynamicState, count: u64) -> u64 {
        let mut now = SECOND_NS;
        for _ in 0..count {
            now += 200_000_000;
            state.advance(gpu, now, true);
            now += 1_000_000;
            state.advance(gpu, now, false);
        }
        now
    }

    #[test]
    fn a_queue_of_launches_is_full_load_until_it_ends() {
        let (gpu, state) = (h200(), state());
        let end = launches_with_gaps(&gpu, &state, 50);
        // A reading of the sensors between two launches.
        state.advance(&gpu, end + 100_000_000, false);
        let loaded = readings(&gpu, &state, 0.0);
        assert_eq!(loaded.power_mw, gpu.power.limit_mw);
        assert_eq!(loaded.gpu_utilization_percent, 100);
        assert_eq!(loaded.clocks.sm_mhz, gpu.clocks.load_sm_mhz);
        // The look that comes late does not make the queue longer.
        state.advance(&gpu, end + 60 * SECOND_NS, false);
        assert_eq!(
            readings(&gpu, &state, 0.0).throttle_reasons,
            [ThrottleReason::GpuIdle]
        );
        let loaded_s = get(&state.loaded_s);
        assert!((loaded_s - 9.0).abs() < 0.5, "{loaded_s}");
    }

    #[test]
    fn a_few_kernels_do_not_heat_a_gpu() {
        let (gpu, state) = (h200(), state());
        let end = launches_with_gaps(&gpu, &state, QUEUE_LAUNCHES - 1);
        state.advance(&gpu, end + 1_000_000, false);
        let idle = readings(&gpu, &state, 0.0);
        assert_eq!(idle.clocks, gpu.clocks.idle);
        assert!(idle.power_mw < gpu.power.idle_mw + 20_000, "{idle:?}");
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
