//! How far each worker of the burn is, and what the sensors of each GPU show, from the threads that
//! listen to the one that reports progress.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::plan::{BurnProgress, BurnState};
use crate::worker::protocol::STANDING_BY;
use crate::workload::gemm::burn::TRYING_ENGINES;
use crate::workload::start::FIRST_USE_OF_CONTEXT;
use validator_core::facts::{BurnRun, BurnStartup, SensorSample};
use validator_core::worker_id::WorkerId;

/// The state of a burn.
#[derive(Default)]
pub(super) struct State {
    shared: Mutex<Shared>,
}

#[derive(Default)]
struct Shared {
    workers: BTreeMap<WorkerId, WorkerState>,
    /// By UUID of the GPU, for all of its workers.
    sensors: BTreeMap<String, SensorState>,
}

#[derive(Default)]
pub(super) struct WorkerState {
    /// It was ordered to burn; a worker that only stands by is not shown.
    pub(super) burns: bool,
    run: Option<BurnRun>,
    pub(super) ended: bool,
    /// When the first product of the sweeps was under way.
    pub(super) load_began: Option<Instant>,
    pub(super) times: StartTimes,
}

#[derive(Clone, Copy, Default)]
pub(super) struct SensorState {
    pub(super) power_limit_mw: Option<u32>,
    pub(super) sample: Option<SensorSample>,
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
    /// Notes when a step was announced that shows the worker's progress.
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

impl Shared {
    fn workers_of<'s>(&'s self, uuid: &'s str) -> impl Iterator<Item = &'s WorkerState> {
        let workers = self.workers.iter();
        workers.filter_map(move |(id, state)| id.has_gpu(uuid).then_some(state))
    }
}

impl State {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn change(&self, id: &WorkerId, change: impl FnOnce(&mut WorkerState)) {
        change(self.lock().workers.entry(id.clone()).or_default());
    }

    pub(super) fn change_sensors(&self, uuid: &str, change: impl FnOnce(&mut SensorState)) {
        change(self.lock().sensors.entry(uuid.to_owned()).or_default());
    }

    /// Whether this worker has announced that it stands by.
    pub(super) fn is_ready(&self, id: &WorkerId) -> bool {
        let shared = self.lock();
        let state = shared.workers.get(id);
        state.is_some_and(|it| it.times.ready.is_some())
    }

    /// Whether workers burn, and each of them multiplies or has ended.
    pub(super) fn all_have_load(&self) -> bool {
        let shared = self.lock();
        let mut burning = shared.workers.values().filter(|it| it.burns).peekable();
        let has_load =
            |it: &WorkerState| it.ended || it.load_began.is_some() || it.times.trial.is_some();
        burning.peek().is_some() && burning.all(has_load)
    }

    /// When the first worker of this GPU began to load it.
    pub(super) fn load_began(&self, uuid: &str) -> Option<Instant> {
        let shared = self.lock();
        let began = shared.workers_of(uuid).filter_map(|it| it.load_began);
        began.min()
    }

    /// How long the load of this GPU lasted, as far as its workers reported.
    pub(super) fn load_s(&self, uuid: &str) -> f64 {
        let shared = self.lock();
        let runs = shared.workers_of(uuid).filter_map(|it| it.run.as_ref());
        runs.map(BurnRun::load_s).fold(0.0, f64::max)
    }

    /// When this worker came how far, since `began`.
    pub(super) fn startup(&self, id: &WorkerId, began: Instant) -> Option<BurnStartup> {
        let shared = self.lock();
        let state = shared.workers.get(id)?;
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

    /// One entry for each GPU of each worker that burns.
    pub(super) fn progress(&self, duration: Duration) -> Vec<BurnProgress> {
        let shared = self.lock();
        let burning = shared.workers.iter().filter(|(_, it)| it.burns);
        let gpus = burning.flat_map(|(id, state)| id.gpus.iter().map(move |uuid| (uuid, state)));
        gpus.map(|(uuid, state)| {
            let sensors = shared.sensors.get(uuid).copied().unwrap_or_default();
            progress(uuid, state, sensors, duration)
        })
        .collect()
    }
}

fn progress(
    uuid: &str,
    state: &WorkerState,
    sensors: SensorState,
    duration: Duration,
) -> BurnProgress {
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
        power_limit_mw: sensors.power_limit_mw,
        sensors: sensors.sample,
    }
}

impl WorkerState {
    /// Notes a worker's report.
    pub(super) fn note(&mut self, run: &BurnRun) {
        self.run = Some(run.clone());
    }
}

#[cfg(test)]
mod tests {
    use validator_core::facts::WorkerEnd;

    use super::*;

    #[test]
    fn two_workers_of_one_gpu_have_states_of_their_own_and_share_its_sensors() {
        let state = State::default();
        let [first, second] = [0, 1].map(|ordinal| WorkerId::new("gemm", &["GPU-a"], ordinal));
        let other = WorkerId::new("gemm", &["GPU-b"], 0);
        let began = Instant::now();
        let later = began + Duration::from_secs(2);
        let run = |measured_s| BurnRun {
            measured_s,
            ..BurnRun::empty(WorkerEnd::Finished)
        };
        for (id, at, seconds) in [(&first, later, 1.0), (&second, began, 4.0)] {
            state.change(id, |it| {
                it.burns = true;
                it.load_began = Some(at);
                it.note(&run(seconds));
            });
        }
        state.change(&other, |it| it.times.note_step(STANDING_BY));
        state.change_sensors("GPU-a", |it| it.power_limit_mw = Some(700_000));
        assert!(state.is_ready(&other) && !state.is_ready(&first));
        assert!(state.all_have_load());
        assert_eq!(state.load_began("GPU-a"), Some(began));
        assert_eq!(state.load_began("GPU-b"), None);
        assert!((state.load_s("GPU-a") - 4.0).abs() < 1e-9);
        state.change(&first, |it| it.ended = true);
        let shown = state.progress(Duration::from_secs(9));
        let shown: Vec<_> = shown.iter().map(|it| (it.state, it.elapsed_s)).collect();
        assert_eq!(shown, [(BurnState::Ended, 1.0), (BurnState::Running, 4.0)]);
        let limits = state.progress(Duration::ZERO);
        assert!(limits.iter().all(|it| it.power_limit_mw == Some(700_000)));
    }
}
