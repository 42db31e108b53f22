//! Who uses the GPUs while the allocation test runs, from a process that reads NVML again and
//! again.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::interrupt::Interrupt;
use crate::probe::{ProbeOptions, UsersMessage};
use crate::worker::listener::{ConversationEnd, Heard, Order, follow};
use crate::worker::process::{WorkerProcess, worker_program};
use validator_core::facts::GpuUse;

/// Poll interval for a round.
const POLL: Duration = Duration::from_millis(10);

/// What was read so far.
#[derive(Default)]
struct Seen {
    now: BTreeMap<String, GpuUse>,
    listed: BTreeMap<String, BTreeSet<u32>>,
    rounds: u64,
    trouble: Option<String>,
}

/// The process that reads NVML, and the thread that listens to it.
pub(super) struct View {
    seen: Arc<Mutex<Seen>>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    /// Limit of one round: the first initialises NVML.
    silence: Duration,
}

impl View {
    pub(super) fn start(probe: &ProbeOptions, uuids: &[String]) -> Self {
        let seen: Arc<Mutex<Seen>> = Arc::default();
        let is_over: Arc<AtomicBool> = Arc::default();
        let silence = probe.deadlines.nvml_initialization;
        let program = worker_program(probe.worker_program.as_ref());
        let mut arguments: Vec<OsString> = vec!["worker".into(), "gpu-users".into()];
        for uuid in uuids {
            arguments.extend(["--gpu".into(), uuid.into()]);
        }
        let thread = {
            let (seen, is_over) = (Arc::clone(&seen), Arc::clone(&is_over));
            // The kernel kills the process when the thread that started it ends.
            let follow = move || {
                let trouble = match WorkerProcess::start(&program, &arguments, &[]) {
                    Ok(worker) => listen(worker, &seen, &is_over, silence),
                    Err(error) => Some(format!("cannot start {}: {error}", program.display())),
                };
                let mut seen = lock(&seen);
                seen.trouble = seen.trouble.take().or(trouble);
                // A wait for a round ends at once.
                seen.rounds = u64::MAX;
            };
            std::thread::Builder::new().spawn(follow)
        };
        let thread = thread.map_err(|error| {
            let mut seen = lock(&seen);
            seen.trouble = Some(format!("no thread could be started to read NVML: {error}"));
            seen.rounds = u64::MAX;
        });
        Self {
            seen,
            is_over,
            thread: thread.ok(),
            silence,
        }
    }

    /// Waits until every GPU was read at a time after this call.
    pub(super) fn await_round(&self, interrupt: &Interrupt) {
        let deadline = Instant::now() + self.silence;
        // The round that is under way may have read a GPU before.
        let wanted = lock(&self.seen).rounds.saturating_add(2);
        while lock(&self.seen).rounds < wanted
            && interrupt.signal().is_none()
            && Instant::now() < deadline
        {
            std::thread::sleep(POLL);
        }
    }

    /// How often every GPU was read.
    pub(super) fn rounds(&self) -> u64 {
        lock(&self.seen).rounds
    }

    /// Why nothing more is read.
    pub(super) fn trouble(&self) -> Option<String> {
        lock(&self.seen).trouble.clone()
    }

    pub(super) fn gpu(&self, uuid: &str) -> Option<GpuUse> {
        lock(&self.seen).now.get(uuid).cloned()
    }

    pub(super) fn gpus(&self) -> BTreeMap<String, GpuUse> {
        lock(&self.seen).now.clone()
    }

    /// Whether a GPU's newest list has this process.
    pub(super) fn is_listed_now(&self, pid: u32) -> bool {
        let seen = lock(&self.seen);
        let mut lists = seen.now.values().filter_map(|it| it.pids.as_ref());
        lists.any(|it| it.contains(&pid))
    }

    /// Ends the process. Returns every process that was listed, by GPU, and why the view ended
    /// early, if it did.
    pub(super) fn finish(&mut self) -> (BTreeMap<String, BTreeSet<u32>>, Option<String>) {
        let trouble = self.trouble();
        self.is_over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A panic there leaves what was read.
            let _ = thread.join();
        }
        (std::mem::take(&mut lock(&self.seen).listed), trouble)
    }
}

impl Drop for View {
    fn drop(&mut self) {
        self.finish();
    }
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns why nothing more can be read.
fn listen(
    mut worker: WorkerProcess,
    seen: &Mutex<Seen>,
    is_over: &AtomicBool,
    silence: Duration,
) -> Option<String> {
    let order = || {
        if is_over.load(Ordering::Acquire) {
            // It holds nothing that has to be freed.
            Order::Kill
        } else {
            Order::Continue
        }
    };
    let mut hear = |message| {
        take(message, &mut lock(seen));
        Heard::Part
    };
    let deaf = Interrupt::default();
    match follow(&mut worker, silence, &deaf, &order, &mut hear) {
        ConversationEnd::Dismissed => None,
        ConversationEnd::Closed(_) => Some("the process that reads NVML has ended".to_owned()),
        ConversationEnd::TimedOut { .. }
        | ConversationEnd::Complete
        | ConversationEnd::Interrupted => {
            let seconds = silence.as_secs_f64();
            Some(format!("NVML did not return within {seconds} s"))
        }
    }
}

fn take(message: UsersMessage, seen: &mut Seen) {
    match message {
        UsersMessage::Use { uuid, gpu } => {
            let pids = gpu.pids.iter().flatten().copied();
            seen.listed.entry(uuid.clone()).or_default().extend(pids);
            seen.now.insert(uuid, gpu);
        }
        UsersMessage::Round {} => seen.rounds = seen.rounds.saturating_add(1),
        UsersMessage::Trouble(trouble) => seen.trouble = Some(trouble),
    }
}
