//! How far the burn of each GPU is, as the threads that listen tell the one that shows it.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::plan::{BurnProgress, BurnState};
use crate::worker::protocol::STANDING_BY;
use crate::workload::gemm::worker::TRYING_ENGINES;
use crate::workload::start::FIRST_USE_OF_CONTEXT;
use validator_core::facts::{BurnRun, BurnStartup, SensorSample};

/// What the threads tell the one that shows it.
#[derive(Default)]
pub(super) struct State {
    gpus: Mutex<BTreeMap<String, GpuState>>,
}

#[derive(Default)]
pub(super) struct GpuState {
    /// It is told to burn; what only stands by is not shown.
    pub(super) burns: bool,
    run: Option<BurnRun>,
    pub(super) ended: bool,
    /// When the first product of the sweeps was under way.
    pub(super) load_began: Option<Instant>,
    pub(super) power_limit_mw: Option<u32>,
    pub(super) sensors: Option<SensorSample>,
    pub(super) times: StartTimes,
}

/// When a worker came how far.
#[derive(Default)]
pub(super) struct StartTimes {
    pub(super) spawned: Option<Instant>,
    context: Option<Instant>,
    ready: Option<Instant>,
    pub(super) go: Option<Instant>,
    /// When engines were tried, before the sweeps.
    trial: Option<Instant>,
}

impl StartTimes {
    /// Notes when a step was announced that says how far the worker is.
    pub(super) fn note_step(&mut self, step: &str) {
        let time = match step {
            FIRST_USE_OF_CONTEXT => &mut self.context,
            STANDING_BY => &mut self.ready,
            TRYING_ENGINES => &mut self.trial,
            _ => return,
        };
        time.get_or_insert_with(Instant::now);
    }
}

impl State {
    pub(super) fn change(&self, uuid: &str, change: impl FnOnce(&mut GpuState)) {
        let mut gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        change(gpus.entry(uuid.to_owned()).or_default());
    }

    /// Whether the worker of this GPU has said that it stands by.
    pub(super) fn is_ready(&self, uuid: &str) -> bool {
        let gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        gpus.get(uuid).is_some_and(|it| it.times.ready.is_some())
    }

    /// Whether GPUs burn, and each of them multiplies or has ended.
    pub(super) fn all_have_load(&self) -> bool {
        let gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        let mut burned = gpus.values().filter(|it| it.burns).peekable();
        let has_load =
            |it: &GpuState| it.ended || it.load_began.is_some() || it.times.trial.is_some();
        burned.peek().is_some() && burned.all(has_load)
    }

    pub(super) fn load_began(&self, uuid: &str) -> Option<Instant> {
        let gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        gpus.get(uuid)?.load_began
    }

    /// How long the load of this GPU lasted, as far as its worker told.
    pub(super) fn load_s(&self, uuid: &str) -> f64 {
        let gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        let run = gpus.get(uuid).and_then(|it| it.run.as_ref());
        run.map_or(0.0, BurnRun::load_s)
    }

    /// When the worker of this GPU came how far, since `began`.
    pub(super) fn startup(&self, uuid: &str, began: Instant) -> Option<BurnStartup> {
        let gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        let state = gpus.get(uuid)?;
        let times = &state.times;
        let milliseconds = |at: Option<Instant>| {
            Some((at?.duration_since(began).as_secs_f64() * 1e4).round() / 10.0)
        };
        Some(BurnStartup {
            spawned_ms: milliseconds(times.spawned)?,
            context_ms: milliseconds(times.context),
            ready_ms: milliseconds(times.ready),
            go_ms: milliseconds(times.go),
            first_product_ms: milliseconds(times.trial.or(state.load_began)),
        })
    }

    pub(super) fn progress(&self, duration: Duration) -> Vec<BurnProgress> {
        let gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        gpus.iter()
            .filter(|(_, state)| state.burns)
            .map(|(uuid, state)| progress(uuid, state, duration))
            .collect()
    }
}

fn progress(uuid: &str, state: &GpuState, duration: Duration) -> BurnProgress {
    let run = state.run.as_ref();
    let products = run.and_then(|it| it.precisions.last());
    let elapsed_s = run.map_or(0.0, |it| it.measured_s);
    let sum = |count: fn(&validator_core::facts::PrecisionRun) -> u64| {
        run.map_or(0, |it| it.precisions.iter().map(count).sum())
    };
    BurnProgress {
        uuid: uuid.to_owned(),
        state: match (state.ended, state.load_began) {
            (true, _) => BurnState::Ended,
            (false, Some(_)) => BurnState::Running,
            (false, None) => BurnState::Starting,
        },
        precision: products.map(|it| it.precision),
        kernels: products.map_or_else(String::new, |it| it.kernels.clone()),
        tflops_now: products.map_or(0.0, |it| match it.tflops_intervals.last() {
            Some(rate) => f64::from(*rate),
            None => it.tflops,
        }),
        tflops_mean: products.map_or(0.0, |it| it.tflops),
        products_verified: sum(|it| it.products_verified),
        mismatches: sum(|it| it.mismatches),
        elapsed_s,
        remaining_s: (duration.as_secs_f64() - elapsed_s).max(0.0),
        memory_bytes: run.map_or(0, |it| it.memory_used_bytes),
        power_limit_mw: state.power_limit_mw,
        sensors: state.sensors,
    }
}

impl GpuState {
    /// Notes what a worker told.
    pub(super) fn note(&mut self, run: &BurnRun) {
        self.run = Some(run.clone());
    }
}
