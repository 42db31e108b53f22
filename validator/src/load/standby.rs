//! Workers that get ready to burn while the rest of the machine is still looked at.
//!
//! A GPU's worker starts as soon as NVML has told of that GPU what work would change (its processes, memory, clocks): no
//! sooner, so that nothing that is read of it is the validator's own doing. It starts CUDA, makes its context, runs the check kernel, loads
//! the burn's kernels, takes the memory, and stands by; the burn gives the word when everything else is known. One context
//! serves both: the driver makes those of all GPUs one after another.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::burn::{BurnOptions, is_in_use, is_named, task_for};
use super::burn_process::BurnProcess;
use super::burn_sensors::Sensors;
use super::burn_state::State;
use crate::facts::{GpuFacts, KernelRun, Reading};
use crate::probe::{Interrupt, ProbeOptions};

/// GPUs at a time; the others get ready when the burn begins.
const WORKERS_MAXIMUM: usize = 16;

/// What stands by for a burn.
pub(crate) struct Standby {
    options: BurnOptions,
    /// When the validator began to look at the machine.
    pub(super) began: Instant,
    pub(super) seed: u64,
    pub(super) state: Arc<State>,
    workers: Mutex<BTreeMap<String, BurnProcess>>,
    sensors: Mutex<Option<Sensors>>,
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
            seed: options.seed.unwrap_or_else(super::burn::random_seed),
            options,
            began: Instant::now(),
            state: Arc::default(),
            workers: Mutex::default(),
            sensors: Mutex::default(),
        }
    }

    /// Whether the burn is to work this GPU: one that was named, or else one that is not hidden.
    pub(super) fn is_for(&self, gpu: &GpuFacts, is_hidden: impl FnOnce() -> bool) -> bool {
        let names = &self.options.gpus;
        names.iter().any(|name| is_named(gpu, name)) || (names.is_empty() && !is_hidden())
    }

    /// Has a worker for this GPU get ready, where it is certain that the GPU is to be burned.
    pub(crate) fn prepare(&self, gpu: &GpuFacts, probe: &ProbeOptions, interrupt: &Interrupt) {
        let Some(uuid) = gpu.uuid.value() else { return };
        let is_taken = gpu.lost.is_some() || is_in_use(gpu, &self.options);
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        let may_be_hidden = || match std::env::var("CUDA_VISIBLE_DEVICES") {
            Ok(list) => !is_certainly_left(uuid, &list, |it| workers.contains_key(it)),
            Err(std::env::VarError::NotPresent) => false,
            Err(std::env::VarError::NotUnicode(_)) => true,
        };
        let full = workers.len() >= WORKERS_MAXIMUM || workers.contains_key(uuid);
        let stopped = interrupt.signal().is_some();
        if !self.is_for(gpu, may_be_hidden) || is_taken || full || stopped {
            return;
        }
        let Ok(task) = task_for(&self.options, (uuid, gpu), self.seed, true) else {
            return;
        };
        // Where it does not start, the burn tries again and says why.
        if let Ok(worker) = BurnProcess::start(&task, probe, (uuid, gpu), interrupt, &self.state) {
            workers.insert(uuid.clone(), worker);
        }
    }

    /// Has the sensors of these GPUs read from now on.
    pub(crate) fn watch_sensors(&self, probe: &ProbeOptions) {
        let workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        let uuids: Vec<String> = workers.keys().cloned().collect();
        if !uuids.is_empty() {
            let sensors = Sensors::start(probe, uuids, &self.state);
            *self.sensors.lock().unwrap_or_else(PoisonError::into_inner) = Some(sensors);
        }
    }

    /// The check kernel's result on this GPU, if a worker that stands by has run it or will.
    pub(super) fn kernel(&self, uuid: &str) -> Option<Reading<KernelRun>> {
        let receiver = {
            let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
            workers.get_mut(uuid)?.kernel()?
        };
        Some(
            receiver
                .recv()
                .unwrap_or_else(|_| Reading::NotRead("the thread of this GPU panicked".to_owned())),
        )
    }

    /// The worker of this GPU, which is the caller's from now on.
    pub(super) fn take_worker(&self, uuid: &str) -> Option<BurnProcess> {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        workers.remove(uuid)
    }

    /// What reads the sensors of all these GPUs, if it does.
    pub(super) fn take_sensors(&self, uuids: &[String]) -> Option<Sensors> {
        let mut sensors = self.sensors.lock().unwrap_or_else(PoisonError::into_inner);
        sensors.take_if(|it| it.watch(uuids))
    }

    /// Sends everything away that still stands by, and returns when it is gone.
    pub(super) fn dismiss(&self) {
        let workers = {
            let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
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

/// Whether a `CUDA_VISIBLE_DEVICES` leaves this GPU, before CUDA has said so: it names it by its whole UUID, behind nothing
/// but UUIDs of this machine. What names nothing would end the list, and the order of numbers is CUDA's own.
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
