//! Workers that get ready to burn while the rest of the machine is still looked at.
//!
//! A GPU's worker starts as soon as NVML has returned the readings of that GPU that work would
//! change (its processes, memory, clocks): no sooner, so that nothing that is read of it is the
//! validator's own doing. It starts CUDA, makes its context, runs the check kernel, loads the
//! burn's kernels, takes the memory, and stands by; the burn gives the word when everything else is
//! known. One context serves both: the driver makes those of all GPUs one after another.

use std::collections::BTreeMap;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::burn_process::{BurnProcess, assignment_for, burn_id};
use super::burn_state::State;
use super::deferred_probes::DeferredProbes;
use super::sensors::Sensors;
use super::worked_gpus::{cuda_does_not_work, is_in_use};
use crate::interrupt::Interrupt;
use crate::plan::{BurnOptions, random_seed};
use crate::probe::ProbeOptions;
use validator_core::facts::{Facts, GpuFacts, KernelRun, Reading};
use validator_core::gpu_names::is_named;
use validator_core::queries::cuda_visible_devices_is_set;
use validator_core::worker_id::WorkerId;

/// GPUs at a time; the others get ready when the burn begins.
const WORKERS_MAXIMUM: usize = 16;
/// How long the deferred probes wait for the load to begin.
const START_OF_LOAD: Duration = Duration::from_secs(2);
/// How often it is looked whether the workers are ready.
const LOOK: Duration = Duration::from_millis(2);

/// What stands by for a burn.
pub(crate) struct Standby {
    options: BurnOptions,
    /// When the validator began to look at the machine.
    pub(super) began: Instant,
    pub(super) seed: u64,
    pub(super) state: Arc<State>,
    workers: Mutex<BTreeMap<WorkerId, BurnProcess>>,
    sensors: Mutex<Option<Sensors>>,
    /// What the burn does not wait for.
    deferred: Mutex<Option<DeferredProbes>>,
}

impl std::fmt::Debug for Standby {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Standby")
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl Standby {
    /// For a burn of the GPUs that `options` names, by UUID or address.
    pub(crate) fn new(options: BurnOptions) -> Self {
        Self {
            seed: options.seed.unwrap_or_else(random_seed),
            options,
            began: Instant::now(),
            state: Arc::default(),
            workers: Mutex::default(),
            sensors: Mutex::default(),
            deferred: Mutex::default(),
        }
    }

    /// Whether the burn is to work this GPU: one that was named, or else one that is not hidden.
    /// NVML's index is known once all GPUs were read: a GPU that is named by it gets ready later
    /// than one that is named by address or UUID.
    pub(super) fn is_for(
        &self,
        (gpu, index): (&GpuFacts, Option<usize>),
        is_hidden: impl FnOnce() -> bool,
    ) -> bool {
        let names = &self.options.gpus;
        let is_named = |name: &String| is_named(gpu, index, name);
        names.iter().any(is_named) || (names.is_empty() && !is_hidden())
    }

    /// Has a worker for this GPU get ready, where it is certain that the GPU is to be burned.
    pub(crate) fn prepare(&self, gpu: &GpuFacts, probe: &ProbeOptions, interrupt: &Interrupt) {
        let Some(uuid) = gpu.uuid.value() else { return };
        let is_taken = gpu.lost.is_some() || is_in_use(gpu, &self.options);
        let id = burn_id(uuid);
        let mut workers = self.lock_workers();
        let may_be_hidden = || match std::env::var("CUDA_VISIBLE_DEVICES") {
            Ok(list) => !is_certainly_left(uuid, &list, |it| workers.contains_key(&burn_id(it))),
            Err(std::env::VarError::NotPresent) => false,
            Err(std::env::VarError::NotUnicode(_)) => true,
        };
        let full = workers.len() >= WORKERS_MAXIMUM || workers.contains_key(&id);
        let stopped = interrupt.signal().is_some();
        if !self.is_for((gpu, None), may_be_hidden) || is_taken || full || stopped {
            return;
        }
        let Ok(assignment) = assignment_for(&self.options, (uuid, gpu), self.seed, true) else {
            return;
        };
        // Where it does not start, the burn tries again and reports the reason.
        if let Ok(worker) = BurnProcess::start(&assignment, probe, gpu, interrupt, &self.state) {
            workers.insert(id, worker);
        }
    }

    /// Has the sensors of these GPUs read from now on.
    pub(crate) fn watch_sensors(&self, probe: &ProbeOptions) {
        let workers = self.lock_workers();
        let uuids: Vec<String> = workers.keys().flat_map(|it| it.gpus.clone()).collect();
        if !uuids.is_empty() {
            let sensors = Sensors::start(probe, uuids, &self.state);
            *self.sensors.lock().unwrap_or_else(PoisonError::into_inner) = Some(sensors);
        }
    }

    /// Starts the deferred probes. Where workers have shown by then that CUDA works, the result is
    /// awaited after the burn, and else at once. With `CUDA_VISIBLE_DEVICES` only CUDA knows which
    /// GPUs may be burned.
    pub(crate) fn start_deferred_probes(
        &self,
        probe: &ProbeOptions,
        interrupt: &Interrupt,
        facts: &mut Facts,
    ) {
        self.await_workers(probe, interrupt);
        let some_work = !self.lock_workers().is_empty();
        let all_stand_by = self.each_worker(|ready, ended| ready && !ended);
        if !some_work || !all_stand_by || cuda_visible_devices_is_set(facts) {
            DeferredProbes::start(probe, facts, || {}).add_to(facts, interrupt);
            return;
        }
        // The workers still ask the driver for this and that before their first products.
        let (state, is_over) = (Arc::clone(&self.state), interrupt.clone());
        let deadline = Instant::now() + START_OF_LOAD;
        let deferred = DeferredProbes::start(probe, facts, move || {
            let waits = || Instant::now() < deadline && is_over.signal().is_none();
            while waits() && !state.all_have_load() {
                std::thread::sleep(LOOK);
            }
        });
        *self.lock_deferred() = Some(deferred);
    }

    /// Waits until every worker stands by or has ended. One that hangs is waited for no longer than
    /// a third of the time that CUDA has to answer.
    fn await_workers(&self, probe: &ProbeOptions, interrupt: &Interrupt) {
        let deadline = Instant::now() + probe.deadlines.cuda / 3;
        let is_settled = || self.each_worker(|ready, ended| ready || ended);
        while !is_settled() && Instant::now() < deadline && interrupt.signal().is_none() {
            std::thread::sleep(LOOK);
        }
    }

    /// Waits for probes that were kept.
    pub(crate) fn add_deferred_probes(&self, facts: &mut Facts, interrupt: &Interrupt) {
        let deferred = self.lock_deferred().take();
        if let Some(deferred) = deferred {
            deferred.add_to(facts, interrupt);
        }
    }

    /// Why no GPU can be worked, if CUDA reported it.
    pub(super) fn no_cuda(&self, facts: &Facts) -> Option<String> {
        let has_said = self.lock_deferred().is_none();
        has_said.then(|| cuda_does_not_work(facts))?
    }

    /// Whether this holds for every worker, by whether it has reported standby, and whether it has
    /// ended.
    fn each_worker(&self, holds: impl Fn(bool, bool) -> bool) -> bool {
        let workers = self.lock_workers();
        workers
            .iter()
            .all(|(id, worker)| holds(self.state.is_ready(id), worker.has_ended()))
    }

    fn lock_workers(&self) -> MutexGuard<'_, BTreeMap<WorkerId, BurnProcess>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_deferred(&self) -> MutexGuard<'_, Option<DeferredProbes>> {
        self.deferred.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The channel of the check kernel's result on this GPU, if a worker that stands by has run it
    /// or will.
    pub(super) fn kernel(&self, uuid: &str) -> Option<Receiver<Reading<KernelRun>>> {
        self.lock_workers().get_mut(&burn_id(uuid))?.kernel()
    }

    /// This worker, which is the caller's from now on.
    pub(super) fn take_worker(&self, id: &WorkerId) -> Option<BurnProcess> {
        let mut workers = self.lock_workers();
        workers.remove(id)
    }

    /// What reads the sensors of all these GPUs, if it does.
    pub(super) fn take_sensors(&self, uuids: &[String]) -> Option<Sensors> {
        let mut sensors = self.sensors.lock().unwrap_or_else(PoisonError::into_inner);
        sensors.take_if(|it| it.watch(uuids))
    }

    /// Sends everything away that still stands by, and returns when it is gone.
    pub(crate) fn dismiss(&self) {
        let workers = {
            let mut workers = self.lock_workers();
            std::mem::take(&mut *workers)
        };
        workers.values().for_each(BurnProcess::dismiss);
        for (_, worker) in workers {
            worker.join();
        }
        let sensors = {
            let mut sensors = self.sensors.lock().unwrap_or_else(PoisonError::into_inner);
            sensors.take()
        };
        if let Some(sensors) = sensors {
            sensors.finish();
        }
    }
}

/// Whether a `CUDA_VISIBLE_DEVICES` leaves this GPU, before CUDA has reported it: it names it by
/// its whole UUID, after nothing but UUIDs of this machine. What names nothing would end the list,
/// and the order of numbers is CUDA's own.
fn is_certainly_left(uuid: &str, list: &str, is_known: impl Fn(&str) -> bool) -> bool {
    let mut before = list.split(',').take_while(|it| *it != uuid);
    list.split(',').any(|it| it == uuid) && before.all(is_known)
}

impl Drop for Standby {
    fn drop(&mut self) {
        self.dismiss();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_gets_ready_early_only_where_nothing_can_hide_it() {
        let known = |it: &str| it == "GPU-a";
        for (list, expected) in [
            ("GPU-b", true),
            ("GPU-a,GPU-b", true),
            ("GPU-b,nonsense", true),
            // Another GPU, a number, a beginning, and what may end the list.
            ("GPU-a", false),
            ("1", false),
            ("GPU-", false),
            ("", false),
            ("nonsense,GPU-b", false),
            ("GPU-a,GPU-c,GPU-b", false),
        ] {
            assert_eq!(is_certainly_left("GPU-b", list, known), expected, "{list}");
        }
    }
}
