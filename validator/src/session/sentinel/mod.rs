//! The sentinel: works idle GPUs, and yields them at once when another process comes.
//!
//! Detectors, workers and requests are events of one channel. The loop hands them to
//! [`validator_core::sentinel::policy`] and passes its orders on. Nothing that can block is between
//! an event and its order: files are written after the orders.

mod detectors;
mod nvml;
mod published;
mod withholding;
mod workers;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use super::workload_process::WorkloadProcess;
use crate::interrupt::Interrupt;
use crate::owned_folder::OwnedFolder;
use crate::plan::MemoryShare;
use crate::probe::{Condition, LOOK_CLOSELY, NO_WORKERS, ProbeOptions, WORKERS, WatchMessage};
use crate::worker::{clock, own_processes};
use crate::workload::orders::{Order, duty_line};
use crate::workload::{Change, Task};
use published::Published;
use validator_core::facts::{GpuFacts, GpuProcess, WorkloadRun};
use validator_core::queries::processes_in_words;
use validator_core::sentinel::duty;
use validator_core::sentinel::health::{self, Health};
use validator_core::sentinel::memory_account::Used;
use validator_core::sentinel::policy::{
    Action, Look, Observation, Policy, Reaction, Settings, State, Withholder, WorkerEvent,
    WorkerOutcome,
};
use validator_core::sentinel::status::Status;

/// Poll interval where nothing happens.
const TICK: Duration = Duration::from_millis(20);
/// The same while no GPU is worked: the sentinel's own cost on an idle node.
const TICK_AT_REST: Duration = Duration::from_millis(100);
/// Poll interval of the request files.
const REQUESTS_POLL: Duration = Duration::from_millis(50);
/// Interval between two looks at requests, schedulers and MPS.
const SECOND: Duration = Duration::from_secs(1);
/// A memory reading that waited for longer in the channel is out of date.
const READING_AGE_MAXIMUM_S: f64 = 0.2;
/// Time for the workers to end when the sentinel ends; SIGKILL after that.
const TIME_TO_END: Duration = Duration::from_millis(800);

/// The request to a sentinel.
pub(crate) struct SentinelOptions {
    pub(crate) settings: Settings,
    pub(crate) task: Task,
    pub(crate) memory: MemoryShare,
    /// Of each GPU's power limit, in percent.
    pub(crate) power_percent: Option<f64>,
    pub(crate) probe: ProbeOptions,
    pub(crate) status_file: Option<PathBuf>,
    pub(crate) metrics_file: Option<PathBuf>,
}

/// A GPU that is watched.
pub(crate) struct SentinelGpu {
    pub(crate) uuid: String,
    /// `GPU 0`.
    pub(crate) name: String,
    pub(crate) facts: GpuFacts,
}

/// What reaches the loop.
enum Event {
    Nvml(WatchMessage),
    NvmlEnded(String),
    /// A detector that names no process.
    Alarm {
        source: &'static str,
        at_s: f64,
    },
    /// For each GPU that a scheduler gave away, to whom.
    Scheduled(Result<BTreeMap<String, String>, String>),
    WorkerStarted {
        uuid: String,
        pid: u32,
    },
    WorkerChanged {
        uuid: String,
        change: Change,
    },
    WorkerRun {
        uuid: String,
        run: Box<WorkloadRun>,
    },
    WorkerEnded {
        uuid: String,
        outcome: WorkerOutcome,
    },
}

/// Works the GPUs until `interrupt`. Returns the last status.
pub(crate) fn watch(
    options: &SentinelOptions,
    gpus: Vec<SentinelGpu>,
    simulated: Option<String>,
    folder: &OwnedFolder,
    interrupt: &Interrupt,
    log: &mut dyn FnMut(&str),
) -> anyhow::Result<Status> {
    let (events, received) = channel();
    let root = options.probe.sysroot.clone().unwrap_or("/".into());
    // Ended after the workers: nothing is read while none is there.
    let detectors = Interrupt::default();
    let has_workers = Arc::new(AtomicBool::new(false));
    let mut notes = detectors::start(&root, &events, &detectors, &has_workers);
    notes.extend(withholding::pid_namespace_note());
    let uuids: Vec<String> = gpus.iter().map(|it| it.uuid.clone()).collect();
    let requests = nvml::start(
        &options.probe,
        uuids.clone(),
        events.clone(),
        detectors.clone(),
    )?;
    withholding::follow_scheduler(&options.probe, &events, &detectors)?;
    let published = Published::new(options, &gpus, simulated, notes)?;
    for note in published.notes() {
        log(&format!("note: {note}"));
    }
    let mut sentinel = Sentinel {
        options,
        policy: Policy::new(options.settings.clone(), uuids),
        gpus: gpus
            .into_iter()
            .map(|it| (it.uuid.clone(), Watched::new(it)))
            .collect(),
        nvml: requests,
        has_workers,
        events,
        folder,
        interrupt,
        published,
        began: Instant::now(),
        log,
    };
    sentinel.work(&received);
    sentinel.end(&received);
    detectors.request(1);
    let status = sentinel.publish();
    crate::sentinel_requests::unpublish(folder);
    Ok(status)
}

struct Watched {
    gpu: SentinelGpu,
    worker: Option<WorkloadProcess<()>>,
    health: Health,
    duty: f64,
    /// When the newcomer was detected to whom the GPU is yielded.
    detected_s: Option<f64>,
    state: State,
    reason: String,
}

impl Watched {
    fn new(gpu: SentinelGpu) -> Self {
        Self {
            gpu,
            worker: None,
            health: Health::default(),
            duty: 1.0,
            detected_s: None,
            state: State::Unknown,
            reason: String::new(),
        }
    }
}

struct Sentinel<'a> {
    options: &'a SentinelOptions,
    policy: Policy,
    gpus: BTreeMap<String, Watched>,
    nvml: nvml::NvmlRequests,
    /// Read by the detectors, too.
    has_workers: Arc<AtomicBool>,
    events: Sender<Event>,
    folder: &'a OwnedFolder,
    interrupt: &'a Interrupt,
    published: Published,
    began: Instant,
    log: &'a mut dyn FnMut(&str),
}

impl Sentinel<'_> {
    fn work(&mut self, received: &Receiver<Event>) {
        let mut next_second = Instant::now();
        let mut next_requests = Instant::now();
        while self.interrupt.signal().is_none() {
            let tick = if self.has_workers.load(Ordering::Relaxed) {
                TICK
            } else {
                TICK_AT_REST
            };
            match received.recv_timeout(tick) {
                Ok(event) => {
                    self.take(event);
                    while let Ok(event) = received.try_recv() {
                        self.take(event);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if Instant::now() >= next_requests {
                next_requests = Instant::now() + REQUESTS_POLL;
                self.read_requests();
            }
            self.observe(Observation::Tick, None);
            let has_changed = self.log_changes();
            if has_changed || Instant::now() >= next_second {
                next_second = Instant::now() + SECOND;
                self.publish();
            }
        }
    }

    /// Ends all workers, and returns when they are gone.
    fn end(&mut self, received: &Receiver<Event>) {
        (self.log)("stopping");
        for watched in self.gpus.values_mut() {
            if let Some(worker) = &mut watched.worker {
                workers::order(worker, Order::End);
            }
        }
        let deadline = Instant::now() + TIME_TO_END;
        let mut is_killed = false;
        while self.gpus.values().any(|it| it.worker.is_some()) {
            if let Ok(event) = received.recv_timeout(TICK) {
                self.take(event);
            }
            if Instant::now() >= deadline && !is_killed {
                is_killed = true;
                let workers = self.gpus.values().filter_map(|it| it.worker.as_ref());
                workers.for_each(WorkloadProcess::dismiss);
            }
            // A worker in uninterruptible sleep is left to the kernel.
            if Instant::now() >= deadline + SECOND * 3 {
                (self.log)("a worker is in uninterruptible sleep in the driver and is left");
                return;
            }
        }
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Nvml(message) => self.take_nvml(message),
            Event::NvmlEnded(reason) => {
                if !reason.is_empty() && self.interrupt.signal().is_none() {
                    (self.log)(&format!("NVML: {reason}"));
                }
                for uuid in self.uuids() {
                    self.withhold(&uuid, Withholder::Nvml, Some(reason.clone()));
                }
            }
            Event::Alarm { source, at_s } => {
                self.observe(Observation::Alarm { source }, Some(at_s));
            }
            Event::Scheduled(given) => self.take_schedule(&given),
            Event::WorkerStarted { uuid, pid } => self.published.gpu(&uuid).pid = Some(pid),
            Event::WorkerChanged { uuid, change } => self.take_change(uuid, change),
            Event::WorkerRun { uuid, run } => {
                self.published.take_run(&uuid, &run);
                if let Some(finding) = health::of_run(&run) {
                    self.found(&uuid, finding);
                }
            }
            Event::WorkerEnded { uuid, outcome } => self.take_end(uuid, outcome),
        }
    }

    fn uuids(&self) -> Vec<String> {
        self.gpus.keys().cloned().collect()
    }

    fn take_nvml(&mut self, message: WatchMessage) {
        match message {
            WatchMessage::Memory {
                uuid,
                at_s,
                used_bytes,
                without_reserved,
                processes,
            } => {
                let age_s = (clock::now_s() - at_s).max(0.0);
                let is_fresh = age_s <= READING_AGE_MAXIMUM_S;
                let used = is_fresh.then_some(Used {
                    bytes: used_bytes,
                    without_reserved,
                });
                let foreign = processes.map(foreign_in_words);
                self.withhold(&uuid, Withholder::Nvml, None);
                let age = Duration::try_from_secs_f64(age_s).unwrap_or_default();
                let at = self.now().saturating_sub(age);
                let look = Look { at, used, foreign };
                self.observe(Observation::Look { gpu: uuid, look }, Some(at_s));
            }
            WatchMessage::Condition { uuid, condition } => self.take_condition(&uuid, &condition),
            WatchMessage::Xids { uuid, xids } => {
                let is_alone = self.policy.state(self.now(), &uuid).0 == State::Working;
                let findings = xids.iter().filter_map(|it| health::of_xid(*it, is_alone));
                for finding in findings.collect::<Vec<_>>() {
                    self.found(&uuid, finding);
                }
            }
            WatchMessage::Unreadable { uuid, reason } => {
                if reason.contains("GPU_IS_LOST") || reason.contains("RESET_REQUIRED") {
                    self.found(&uuid, reason);
                } else {
                    self.withhold(&uuid, Withholder::Nvml, Some(reason));
                }
            }
            // The process ends, which is an event of its own.
            WatchMessage::Trouble(_) => {}
        }
    }

    fn take_condition(&mut self, uuid: &str, condition: &Condition) {
        let mode = withholding::of_modes(
            condition.compute_mode.value(),
            self.gpus.get(uuid).map(|it| &it.gpu.facts),
        );
        let mps = withholding::mps_daemon(self.options.probe.sysroot.as_deref());
        self.withhold(uuid, Withholder::Mode, mode.or(mps));
        self.published.gpu(uuid).power_mw = condition.power_mw;
        let is_working = self.policy.state(self.now(), uuid).0 == State::Working;
        let Some(watched) = self.gpus.get_mut(uuid) else {
            return;
        };
        let finding = watched
            .health
            .condition(is_working, condition.reasons, &condition.counters);
        if let (true, Some(percent), Some(power), Some(limit)) = (
            is_working,
            self.options.power_percent,
            condition.power_mw,
            condition.power_limit_mw,
        ) {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a share of the limit"
            )]
            let cap = (f64::from(limit) * percent / 100.0) as u32;
            watched.duty = duty::next(watched.duty, power, cap);
            self.published.gpu(uuid).duty = watched.duty;
            if let Some(worker) = &mut watched.worker {
                worker.write_line(&duty_line(watched.duty));
            }
        }
        if let Some(finding) = finding {
            self.found(uuid, finding);
        }
    }

    fn take_schedule(&mut self, given: &Result<BTreeMap<String, String>, String>) {
        for uuid in self.uuids() {
            let reason = match given {
                Ok(given) => withholding::owner_of(given, &uuid),
                Err(reason) => Some(format!(
                    "the kubelet does not report who has the GPU: {reason}"
                )),
            };
            self.withhold(&uuid, Withholder::Scheduler, reason);
        }
    }

    fn take_change(&mut self, uuid: String, change: Change) {
        let event = match change {
            Change::Working { bytes } => {
                self.published.gpu(&uuid).memory_bytes = bytes;
                WorkerEvent::Working { bytes }
            }
            Change::Silent {
                last_kernel_s,
                freed_s,
            } => {
                let detected = self.gpus.get(&uuid).and_then(|it| it.detected_s);
                self.published
                    .silent(&uuid, detected, last_kernel_s, freed_s);
                WorkerEvent::Silent
            }
        };
        self.observe(Observation::Worker { gpu: uuid, event }, None);
    }

    fn take_end(&mut self, uuid: String, outcome: WorkerOutcome) {
        if let Some(watched) = self.gpus.get_mut(&uuid) {
            watched.worker = None;
            let detected = watched.detected_s.take();
            self.published.gone(&uuid, detected, clock::now_s());
            if let WorkerOutcome::Failed(finding) = &outcome {
                let finding = finding.clone();
                self.found(&uuid, finding);
            }
        }
        let event = WorkerEvent::Ended(outcome);
        self.observe(Observation::Worker { gpu: uuid, event }, None);
    }

    fn found(&mut self, uuid: &str, finding: String) {
        let published = self.published.gpu(uuid);
        if published.finding.is_none() {
            published.finding = Some(finding.clone());
        }
        let gpu = uuid.to_owned();
        self.observe(Observation::Ill { gpu, finding }, None);
    }

    fn withhold(&mut self, uuid: &str, by: Withholder, reason: Option<String>) {
        let gpu = uuid.to_owned();
        self.observe(Observation::Withheld { gpu, by, reason }, None);
    }

    fn read_requests(&mut self) {
        let Some(requests) = self.published.changed_requests(self.folder) else {
            return;
        };
        for uuid in self.uuids() {
            let has = |it: &Option<crate::sentinel_requests::Named>| {
                it.as_ref().is_some_and(|it| it.has(&uuid))
            };
            let paused = has(&requests.paused).then(|| "paused by `sentinel pause`".to_owned());
            let opted_out = has(&requests.opted_out).then(|| "opted out by no-sentinel".to_owned());
            let validation = requests
                .validation
                .map(|pid| format!("a validation runs (pid {pid})"));
            self.withhold(&uuid, Withholder::Pause, paused);
            self.withhold(&uuid, Withholder::OptOut, opted_out);
            self.withhold(&uuid, Withholder::Validation, validation);
        }
    }

    /// Hands an observation to the policy, and passes the orders on. `at_s` is the time of what was
    /// observed.
    fn observe(&mut self, observation: Observation, at_s: Option<f64>) {
        let now = self.now();
        let Reaction {
            orders,
            look_closely,
        } = self.policy.observe(now, observation);
        for (uuid, action) in orders {
            self.order(&uuid, action, at_s);
        }
        if look_closely {
            self.nvml.send(LOOK_CLOSELY);
        }
        let has_workers = self.policy.is_working();
        if has_workers != self.has_workers.swap(has_workers, Ordering::Relaxed) {
            self.nvml
                .send(if has_workers { WORKERS } else { NO_WORKERS });
        }
    }

    fn order(&mut self, uuid: &str, action: Action, at_s: Option<f64>) {
        let Some(watched) = self.gpus.get_mut(uuid) else {
            return;
        };
        if action == Action::Start {
            self.start_worker(uuid);
            return;
        }
        let Some(worker) = &mut watched.worker else {
            return;
        };
        match action {
            Action::Silence | Action::End => {
                let line = if action == Action::End {
                    Order::End
                } else {
                    Order::Silence
                };
                workers::order(worker, line);
                if watched.detected_s.is_none() {
                    watched.detected_s = Some(at_s.unwrap_or_else(clock::now_s));
                    self.published.gpu(uuid).yields += 1;
                }
            }
            Action::Resume => {
                watched.detected_s = None;
                workers::order(worker, Order::Work);
            }
            Action::Kill => worker.dismiss(),
            Action::Start => {}
        }
    }

    fn start_worker(&mut self, uuid: &str) {
        let mut task = self.options.task.clone();
        if let Task::Gemm(task) = &mut task {
            task.covered.clone_from(&self.published.gpu(uuid).coverage);
        }
        let Some(watched) = self.gpus.get_mut(uuid) else {
            return;
        };
        let started = workers::start(
            &watched.gpu.facts,
            uuid,
            task,
            self.options,
            &self.events,
            self.interrupt,
        );
        match started {
            Ok(mut worker) => {
                if watched.duty < 1.0 {
                    worker.write_line(&duty_line(watched.duty));
                }
                watched.worker = Some(worker);
                self.published.gpu(uuid).starts += 1;
            }
            Err(reason) => {
                let uuid = uuid.to_owned();
                let outcome = WorkerOutcome::NotStarted(reason);
                // Not within the order, so that the policy takes one event after the other.
                let _ = self.events.send(Event::WorkerEnded { uuid, outcome });
            }
        }
    }

    /// Logs each change of a state; true where there is one.
    fn log_changes(&mut self) -> bool {
        let now = self.now();
        let mut has_changed = false;
        for (uuid, watched) in &mut self.gpus {
            let (state, reason) = self.policy.state(now, uuid);
            if state == watched.state && reason == watched.reason {
                continue;
            }
            has_changed = true;
            // Before the first reading there is nothing to report.
            if state != State::Unknown {
                let line = self.published.line(uuid, state, &reason);
                (self.log)(&format!("{} {line}", watched.gpu.name));
            }
            watched.state = state;
            watched.reason = reason;
        }
        has_changed
    }

    fn publish(&mut self) -> Status {
        let now = self.now();
        for uuid in self.uuids() {
            let (state, reason) = self.policy.state(now, &uuid);
            let withheld = self.policy.is_withheld(&uuid);
            let gpu = self.published.gpu(&uuid);
            (gpu.state, gpu.reason, gpu.withheld) = (state, reason, withheld);
        }
        self.published
            .write(self.folder, self.policy.false_alarms())
    }
}

/// The processes that this one did not start, in words.
fn foreign_in_words(mut processes: Vec<GpuProcess>) -> Option<String> {
    processes.retain(|it| !own_processes::contains(it.pid));
    (!processes.is_empty()).then(|| processes_in_words(&processes))
}
