//! The state machine: observations of GPUs, workers and requests go in, orders to workers come out.
//!
//! For each GPU two questions are answered again and again: may it be worked at this moment
//! ([`Wish`]), and how far is its worker ([`Worker`]). An order is what leads from the second to
//! the first. Times are those of a monotonic clock, given from outside.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::memory_account::{MemoryAccount, Own, Used};

/// Since the sentinel's start, on a clock that never steps.
pub type Time = Duration;

/// Silence of all GPUs after an alarm that does not name a GPU: the newcomer's own GPU shows by
/// then, the others resume.
// Source: a CUDA process is listed by NVML 0.15 to 0.4 s after it opens `/dev/nvidia-uvm`, 2.6 s
// with eight GPUs (BENCHMARKS.md); this project's own choice.
const VERIFICATION: Duration = Duration::from_secs(2);
/// Each false alarm within this time doubles the silence after the next one, [`DOUBLINGS_MAXIMUM`]
/// times.
const FALSE_ALARMS_REMEMBERED: Duration = Duration::from_mins(10);
const DOUBLINGS_MAXIMUM: u32 = 5;
/// A silent worker keeps its context for so long; after that the GPU is left.
const SILENCE_MAXIMUM: Duration = Duration::from_secs(10);
/// Without a look at a GPU for this long it falls silent, and for so long it is left: nothing is
/// known of newcomers.
// Source: this project's own choice; NVML is read ten times a second and lists processes once a
// second.
const LOOK_OVERDUE: Duration = Duration::from_secs(2);
const LOOK_MISSING: Duration = Duration::from_secs(10);
/// Time after a worker freed memory until the rest is judged: the driver returns memory later than
/// the call that frees it.
const MEMORY_SETTLES: Duration = Duration::from_millis(250);
/// Time to obey before a worker is killed. Freeing 95 % of an H200 takes 0.06 s (BENCHMARKS.md); a
/// worker that creates its context is in the driver, whose calls take 0.3 s, 2.6 s with eight GPUs.
const TIME_TO_FALL_SILENT: Duration = Duration::from_millis(500);
const TIME_TO_END: Duration = Duration::from_secs(2);
const TIME_TO_START: Duration = Duration::from_secs(5);
/// A worker that failed is started again after this, doubled for each failure in a row.
const RETRY: Duration = Duration::from_secs(10);
const HOUR: Duration = Duration::from_hours(1);

/// Requests to the sentinel.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Time for which a GPU is idle before it is worked.
    pub grace: Duration,
    /// Time without a foreign process before a GPU that was yielded is worked again.
    pub quiet: Duration,
    /// Workers that are started on a GPU within an hour.
    pub starts_an_hour: usize,
}

impl Default for Settings {
    // Source: this project's own choice: a short job in a loop comes back within half a minute.
    fn default() -> Self {
        Self {
            grace: Duration::from_secs(10),
            quiet: Duration::from_secs(30),
            starts_an_hour: 20,
        }
    }
}

/// The state of a GPU, as it is published.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Nothing is known of it yet.
    #[default]
    Unknown,
    /// Idle, and not yet for the grace time.
    Grace,
    Starting,
    Working,
    /// The worker frees its memory, ends, or is silent until an alarm is verified.
    Yielding,
    /// A foreign process uses it, or did a moment ago.
    Away,
    /// It must not be worked: paused, assigned to a job, or in a mode without room for a second
    /// process.
    Withheld,
    /// It was found faulty, and is left alone.
    Ill,
}

impl State {
    pub const ALL: [Self; 8] = [
        Self::Unknown,
        Self::Grace,
        Self::Starting,
        Self::Working,
        Self::Yielding,
        Self::Away,
        Self::Withheld,
        Self::Ill,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Grace => "grace",
            Self::Starting => "starting",
            Self::Working => "working",
            Self::Yielding => "yielding",
            Self::Away => "away",
            Self::Withheld => "withheld",
            Self::Ill => "ill",
        }
    }
}

/// A reading of NVML.
#[derive(Clone, Debug, Default)]
pub struct Look {
    /// When NVML was read, which is before it is observed.
    pub at: Time,
    pub used: Option<Used>,
    /// Processes that are not the sentinel's, in words; `None` where the lists were not read this
    /// time.
    pub foreign: Option<Option<String>>,
}

/// What a worker reports, and its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerEvent {
    /// It has its memory and computes.
    Working { bytes: u64 },
    /// It computes no more and has freed its memory.
    Silent,
    /// It is gone, with its context.
    Ended(WorkerOutcome),
}

/// How a worker ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerOutcome {
    /// As it was ordered to.
    Obeyed,
    /// A foreign process took the memory, the GPU, or ended the worker.
    Busy(String),
    /// CUDA did not start; driver and GPU may come back.
    NotStarted(String),
    /// The GPU or its driver failed at work.
    Failed(String),
}

/// Whose wish it is that a GPU is not worked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Withholder {
    /// `sentinel pause`.
    Pause,
    /// The opt-out file.
    OptOut,
    /// A burn or a run of the validator.
    Validation,
    /// Kubernetes gave it to a container.
    Scheduler,
    /// Its mode, or the node's.
    Mode,
    /// NVML does not return readings.
    Nvml,
}

/// What was observed.
#[derive(Clone, Debug)]
pub enum Observation {
    Look {
        gpu: String,
        look: Look,
    },
    /// A CUDA process started somewhere on the node.
    Alarm {
        source: &'static str,
    },
    Worker {
        gpu: String,
        event: WorkerEvent,
    },
    /// For `gpu` a withholder has this reason now, or none.
    Withheld {
        gpu: String,
        by: Withholder,
        reason: Option<String>,
    },
    /// A finding about the GPU, which is left alone from now on.
    Ill {
        gpu: String,
        finding: String,
    },
    /// Nothing but that time passed.
    Tick,
}

/// An order to the worker of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Start,
    /// Compute no more, free the memory, keep the context.
    Silence,
    Resume,
    /// Free everything and exit.
    End,
    Kill,
}

/// Orders, and requests to the detectors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reaction {
    pub orders: Vec<(String, Action)>,
    /// The process lists are to be read now, and often for a moment.
    pub look_closely: bool,
}

/// How far a worker is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Worker {
    #[default]
    None,
    Starting {
        since: Time,
    },
    Working {
        since: Time,
        bytes: u64,
    },
    /// It was ordered to fall silent.
    Silencing {
        since: Time,
    },
    Silent {
        since: Time,
    },
    Ending {
        since: Time,
        limit: Duration,
        killed: bool,
    },
}

/// Whether a GPU may be worked.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Wish {
    Work,
    /// Nothing may run or hold data on it until an alarm is verified.
    Silence,
    /// No worker may be there.
    Leave,
}

#[derive(Clone, Debug, Default)]
struct Gpu {
    worker: Worker,
    account: MemoryAccount,
    last_look: Option<Time>,
    last_list: Option<Time>,
    /// From the lists, or from the memory.
    listed: Option<String>,
    unexplained_bytes: u64,
    last_foreign: Option<Time>,
    last_foreign_text: String,
    /// Since when nothing speaks against working it.
    free_since: Option<Time>,
    silent_until: Option<Time>,
    /// The evidence of the last alarm.
    alarm: &'static str,
    withheld: BTreeMap<Withholder, String>,
    illness: Option<String>,
    starts: VecDeque<Time>,
    failures_in_a_row: u32,
    retry_at: Option<Time>,
    retry_reason: String,
    worker_changed: Time,
}

/// The policy of a node.
#[derive(Clone, Debug)]
pub struct Policy {
    settings: Settings,
    gpus: BTreeMap<String, Gpu>,
    false_alarms: VecDeque<Time>,
    /// An alarm whose newcomer has not shown yet, and when its silence ends.
    unverified: Option<Time>,
}

impl Policy {
    pub fn new(settings: Settings, gpus: impl IntoIterator<Item = String>) -> Self {
        let gpus = gpus.into_iter().map(|uuid| (uuid, Gpu::default()));
        Self {
            settings,
            gpus: gpus.collect(),
            false_alarms: VecDeque::new(),
            unverified: None,
        }
    }

    /// Takes an observation of this moment, and returns what is to be done.
    pub fn observe(&mut self, now: Time, observation: Observation) -> Reaction {
        let mut reaction = Reaction::default();
        match observation {
            Observation::Look { gpu, look } => {
                if let Some(gpu) = self.gpus.get_mut(&gpu) {
                    reaction.look_closely |= gpu.look(now, look);
                    if gpu.last_foreign == Some(now) {
                        // The process that raised the alarm has appeared.
                        self.unverified = None;
                    }
                }
            }
            Observation::Alarm { source } => {
                reaction.look_closely = true;
                self.alarm(now, source);
            }
            Observation::Worker { gpu, event } => {
                // A process that came while the worker started was not distinguished from it by
                // alarm or memory.
                reaction.look_closely |= matches!(event, WorkerEvent::Working { .. });
                if let Some(gpu) = self.gpus.get_mut(&gpu) {
                    gpu.hear(now, event);
                }
            }
            Observation::Withheld { gpu, by, reason } => {
                if let Some(gpu) = self.gpus.get_mut(&gpu) {
                    match reason {
                        Some(reason) => gpu.withheld.insert(by, reason),
                        None => gpu.withheld.remove(&by),
                    };
                }
            }
            Observation::Ill { gpu, finding } => {
                if let Some(gpu) = self.gpus.get_mut(&gpu) {
                    gpu.illness.get_or_insert(finding);
                }
            }
            Observation::Tick => {}
        }
        self.verify(now);
        for (uuid, gpu) in &mut self.gpus {
            let action = gpu.act(now, &self.settings);
            reaction.orders.extend(action.map(|it| (uuid.clone(), it)));
        }
        reaction
    }

    /// All GPUs fall silent, unless it may have been a worker of our own that starts: then the
    /// lists decide.
    fn alarm(&mut self, now: Time, source: &'static str) {
        let starts = |gpu: &Gpu| matches!(gpu.worker, Worker::Starting { .. });
        if self.gpus.values().any(starts) {
            return;
        }
        let is_recent = |it: &Time| now.saturating_sub(*it) < FALSE_ALARMS_REMEMBERED;
        self.false_alarms.retain(is_recent);
        let mut silence = VERIFICATION;
        // Without a worker nothing falls silent, and a newcomer cannot be distinguished from a
        // false alarm: on an H100 the reference count grows for a moment as a CUDA process ends.
        let has_workers = self.is_working();
        if has_workers {
            let doublings = u32::try_from(self.false_alarms.len()).unwrap_or(DOUBLINGS_MAXIMUM);
            silence *= 2_u32.pow(doublings.min(DOUBLINGS_MAXIMUM));
        }
        let until = now + silence;
        if has_workers {
            self.unverified = Some(until);
        }
        for gpu in self.gpus.values_mut() {
            gpu.silent_until = gpu.silent_until.max(Some(until));
            gpu.alarm = source;
        }
    }

    /// Counts an alarm after which no GPU was taken.
    fn verify(&mut self, now: Time) {
        if self.unverified.is_some_and(|it| now >= it) {
            self.unverified = None;
            self.false_alarms.push_back(now);
        }
    }

    /// Alarms of the last minutes after which no GPU was taken.
    pub fn false_alarms(&self) -> usize {
        self.false_alarms.len()
    }

    /// The state of a GPU, and its reason.
    pub fn state(&self, now: Time, uuid: &str) -> (State, String) {
        self.gpus
            .get(uuid)
            .map_or_else(Default::default, |gpu| gpu.state(now, &self.settings))
    }

    /// Whether a GPU has no worker.
    pub fn is_clear(&self, uuid: &str) -> bool {
        self.gpus
            .get(uuid)
            .is_none_or(|gpu| gpu.worker == Worker::None)
    }

    /// Whether something withholds a GPU, so that no worker is started.
    pub fn is_withheld(&self, uuid: &str) -> bool {
        self.gpus
            .get(uuid)
            .is_none_or(|gpu| !gpu.withheld.is_empty())
    }

    /// Whether any worker computes or holds memory.
    pub fn is_working(&self) -> bool {
        let works = |gpu: &Gpu| gpu.worker != Worker::None;
        self.gpus.values().any(works)
    }
}

impl Gpu {
    /// Notes a reading. True where the process lists would say more.
    fn look(&mut self, now: Time, look: Look) -> bool {
        self.last_look = Some(now);
        let own = self.own(look.at);
        let was_foreign = self.foreign().is_some();
        // A reading that is no evidence does not clear the one before: the worker of a GPU that
        // was taken ends, and its memory settles, for longer than the quiet time on a loaded host.
        if let Some(bytes) = look.used.and_then(|it| self.account.unexplained(it, own)) {
            self.unexplained_bytes = bytes;
        }
        if let Some(listed) = look.foreign {
            self.last_list = Some(now);
            self.listed = listed;
        }
        let Some(foreign) = self.foreign() else {
            return false;
        };
        self.last_foreign = Some(now);
        self.last_foreign_text = foreign;
        !was_foreign && self.listed.is_none()
    }

    fn own(&self, at: Time) -> Own {
        // Allocated memory counts as used when the worker reports it, freed memory not yet as free.
        let settles = match self.worker {
            Worker::Working { .. } => Duration::ZERO,
            _ => MEMORY_SETTLES,
        };
        if self.worker_changed > Time::ZERO && at <= self.worker_changed + settles {
            return Own::Changing;
        }
        match self.worker {
            Worker::None => Own::Nothing,
            Worker::Working { bytes, .. } => Own::Worker { data_bytes: bytes },
            Worker::Silent { .. } => Own::Worker { data_bytes: 0 },
            Worker::Starting { .. } | Worker::Silencing { .. } | Worker::Ending { .. } => {
                Own::Changing
            }
        }
    }

    fn foreign(&self) -> Option<String> {
        if self.listed.is_some() {
            return self.listed.clone();
        }
        (self.unexplained_bytes > 0).then(|| {
            format!(
                "{} MiB of memory belong to a process that NVML does not list",
                self.unexplained_bytes >> 20
            )
        })
    }

    fn hear(&mut self, now: Time, event: WorkerEvent) {
        self.worker_changed = now;
        match event {
            // It may have been ordered to stop meanwhile, which it has yet to read.
            WorkerEvent::Working { bytes } => {
                if matches!(self.worker, Worker::Starting { .. }) {
                    self.failures_in_a_row = 0;
                    self.worker = Worker::Working { since: now, bytes };
                }
            }
            WorkerEvent::Silent => {
                if matches!(self.worker, Worker::Silencing { .. }) {
                    self.worker = Worker::Silent { since: now };
                }
            }
            WorkerEvent::Ended(outcome) => {
                self.worker = Worker::None;
                self.note_outcome(now, outcome);
            }
        }
    }

    fn note_outcome(&mut self, now: Time, outcome: WorkerOutcome) {
        let retries = match outcome {
            WorkerOutcome::Obeyed => {
                self.failures_in_a_row = 0;
                return;
            }
            WorkerOutcome::Busy(reason) => {
                self.last_foreign = Some(now);
                self.last_foreign_text = reason;
                return;
            }
            WorkerOutcome::Failed(finding) => {
                self.illness.get_or_insert(finding);
                return;
            }
            WorkerOutcome::NotStarted(reason) => {
                self.retry_reason = reason;
                self.failures_in_a_row += 1;
                self.failures_in_a_row
            }
        };
        self.retry_at = Some(now + RETRY * 2_u32.pow((retries - 1).min(DOUBLINGS_MAXIMUM)));
    }

    /// Whether it may be worked, by everything but its own waiting times.
    fn wish(&self, now: Time) -> Wish {
        let since_look = self.last_look.map(|it| now.saturating_sub(it));
        let is_blind = since_look.is_none_or(|it| it >= LOOK_MISSING);
        if self.illness.is_some() || !self.withheld.is_empty() || is_blind {
            return Wish::Leave;
        }
        if self.foreign().is_some() {
            return Wish::Leave;
        }
        let is_alarmed = self.silent_until.is_some_and(|it| now < it);
        if is_alarmed || since_look.is_some_and(|it| it >= LOOK_OVERDUE) {
            return Wish::Silence;
        }
        Wish::Work
    }

    /// When a worker may start, if nothing happens until then; the reason to wait where it is not
    /// the grace time.
    fn start_at(&self, now: Time, settings: &Settings) -> (Time, Option<String>) {
        let free_since = self.free_since.unwrap_or(now);
        let mut start = (free_since + settings.grace, None);
        let mut later = |at: Time, reason: String| {
            if at > start.0 {
                start = (at, Some(reason));
            }
        };
        if let Some(seen) = self.last_foreign {
            later(seen + settings.quiet, self.last_foreign_text.clone());
        }
        if let Some(at) = self.retry_at {
            later(at, self.retry_reason.clone());
        }
        let recent = self
            .starts
            .iter()
            .filter(|it| now.saturating_sub(**it) < HOUR);
        if recent.clone().count() >= settings.starts_an_hour
            && let Some(first) = recent.min()
        {
            let reason = format!("{} starts within an hour", settings.starts_an_hour);
            later(*first + HOUR, reason);
        }
        start
    }

    fn act(&mut self, now: Time, settings: &Settings) -> Option<Action> {
        let wish = self.wish(now);
        if wish == Wish::Work {
            self.free_since.get_or_insert(now);
        } else {
            self.free_since = None;
        }
        if self.silent_until.is_some_and(|it| now >= it) {
            self.silent_until = None;
        }
        match self.worker {
            Worker::None => self.start(now, settings, &wish),
            Worker::Starting { since } => (wish != Wish::Work)
                .then(|| self.end(now, TIME_TO_START.saturating_sub(now.saturating_sub(since)))),
            Worker::Working { .. } => match wish {
                Wish::Work => None,
                Wish::Silence => {
                    self.worker = Worker::Silencing { since: now };
                    Some(Action::Silence)
                }
                Wish::Leave => Some(self.end(now, TIME_TO_END)),
            },
            Worker::Silencing { since } => {
                let is_late = now.saturating_sub(since) >= TIME_TO_FALL_SILENT;
                match wish {
                    Wish::Leave => Some(self.end(now, TIME_TO_END)),
                    Wish::Work | Wish::Silence if is_late => Some(self.kill(now)),
                    Wish::Work | Wish::Silence => None,
                }
            }
            Worker::Silent { since } => match wish {
                Wish::Work => {
                    self.worker = Worker::Starting { since: now };
                    self.worker_changed = now;
                    Some(Action::Resume)
                }
                Wish::Silence if now.saturating_sub(since) < SILENCE_MAXIMUM => None,
                Wish::Silence | Wish::Leave => Some(self.end(now, TIME_TO_END)),
            },
            Worker::Ending {
                since,
                limit,
                killed: false,
            } if now.saturating_sub(since) >= limit => Some(self.kill(now)),
            Worker::Ending { .. } => None,
        }
    }

    fn start(&mut self, now: Time, settings: &Settings, wish: &Wish) -> Option<Action> {
        let was_listed = self
            .last_list
            .is_some_and(|it| now.saturating_sub(it) < LOOK_OVERDUE);
        let (start_at, _) = self.start_at(now, settings);
        if *wish != Wish::Work || !was_listed || now < start_at {
            return None;
        }
        self.starts.retain(|it| now.saturating_sub(*it) < HOUR);
        self.starts.push_back(now);
        self.worker = Worker::Starting { since: now };
        self.worker_changed = now;
        Some(Action::Start)
    }

    fn end(&mut self, now: Time, limit: Duration) -> Action {
        self.worker = Worker::Ending {
            since: now,
            limit: limit.max(TIME_TO_END),
            killed: false,
        };
        self.worker_changed = now;
        Action::End
    }

    fn kill(&mut self, now: Time) -> Action {
        self.worker = Worker::Ending {
            since: now,
            limit: Duration::MAX,
            killed: true,
        };
        self.worker_changed = now;
        Action::Kill
    }

    fn state(&self, now: Time, settings: &Settings) -> (State, String) {
        if let Some(finding) = &self.illness {
            return (State::Ill, finding.clone());
        }
        let reason = self.reason(now);
        match self.worker {
            Worker::Starting { .. } => return (State::Starting, String::new()),
            Worker::Working { .. } => return (State::Working, String::new()),
            Worker::Silencing { .. } | Worker::Silent { .. } | Worker::Ending { .. } => {
                return (State::Yielding, reason);
            }
            Worker::None => {}
        }
        if !self.withheld.is_empty() {
            return (State::Withheld, reason);
        }
        if self.foreign().is_some() {
            return (State::Away, reason);
        }
        if self.last_look.is_none() {
            return (
                State::Unknown,
                "NVML has not returned a reading yet".to_owned(),
            );
        }
        let (start_at, waits_for) = self.start_at(now, settings);
        match waits_for {
            Some(_) if now >= start_at => (State::Grace, String::new()),
            Some(reason) => (State::Away, reason),
            None => (State::Grace, reason),
        }
    }

    /// Why it is not worked at this moment.
    fn reason(&self, now: Time) -> String {
        if let Some(reason) = self.withheld.values().next() {
            return reason.clone();
        }
        if let Some(foreign) = self.foreign() {
            return foreign;
        }
        if self.silent_until.is_some_and(|it| now < it) {
            return format!("a CUDA process started on this node ({})", self.alarm);
        }
        let overdue = |it: Time| now.saturating_sub(it) >= LOOK_OVERDUE;
        if self.last_look.is_some_and(overdue) {
            return "NVML returned no reading in time".to_owned();
        }
        String::new()
    }
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
