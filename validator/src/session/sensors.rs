//! What NVML's sensors show while GPUs burn, from a process that reads them again and again.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::burn_state::State;
use super::samples::Samples;
use crate::interrupt::Interrupt;
use crate::probe::ProbeOptions;
use crate::probe::SensorMessage;
use crate::worker::clock;
use crate::worker::listener::{ConversationEnd, Heard, Order, follow};
use crate::worker::own_processes;
use crate::worker::process::{ProcessEnd, WorkerProcess, worker_program};
use validator_core::facts::{GpuProcess, PcieUnderLoad, Reading, SensorLog};

/// How long a burn waits for the counters before its load. NVML starts in 0.1 s a GPU
/// (BENCHMARKS.md); a burn whose counters were not read is judged without them.
const TIME_FOR_FIRST_LOOK: Duration = Duration::from_secs(3);
/// How long the sensors' process may take for its last look, and to say so.
const TIME_FOR_LAST_LOOK: Duration = Duration::from_secs(2);
/// Xids of a GPU that the facts keep as events: more say nothing more.
const XID_EVENTS_MAXIMUM: usize = 1_000;

/// Samples of the PCIe link that are kept: a day of one every half second.
const PCIE_SAMPLES_MAXIMUM: usize = 172_800;
/// Samples of the PCIe link within this time after the first product do not count: the link leaves
/// its idle speed when work arrives. This project's choice.
const PCIE_SETTLES: Duration = Duration::from_secs(1);

/// Samples that arrived, with their times.
#[derive(Default)]
struct Watched {
    log: SensorLog,
    samples: Samples,
    /// Of others, by their numbers, as they were seen last.
    processes: BTreeMap<u32, (Instant, GpuProcess)>,
    /// Time, generation and width of the PCIe link.
    pcie: Vec<(Instant, u32, u32)>,
    after_was_read: bool,
}

/// The sensors' process, and the thread that listens to it.
pub(super) struct Sensors {
    uuids: Vec<String>,
    done: Arc<AtomicBool>,
    /// Of how many GPUs the counters before the load were read; all when nothing more is to come.
    first_looks: Arc<AtomicUsize>,
    thread: std::io::Result<JoinHandle<BTreeMap<String, SensorLog>>>,
}

impl Sensors {
    pub(super) fn start(probe: &ProbeOptions, uuids: Vec<String>, state: &Arc<State>) -> Self {
        let done = Arc::new(AtomicBool::new(false));
        let first_looks = Arc::new(AtomicUsize::new(0));
        let thread = {
            let (probe, uuids, state) = (probe.clone(), uuids.clone(), Arc::clone(state));
            let (done, first_looks) = (Arc::clone(&done), Arc::clone(&first_looks));
            crate::threads::spawn("for the sensors", move || {
                let logs = watch_sensors(&probe, &uuids, &state, &done, &first_looks);
                first_looks.store(usize::MAX, Ordering::Release);
                logs
            })
        };
        if thread.is_err() {
            first_looks.store(usize::MAX, Ordering::Release);
        }
        Self {
            uuids,
            done,
            first_looks,
            thread,
        }
    }

    pub(super) fn watch(&self, uuids: &[String]) -> bool {
        uuids.iter().all(|uuid| self.uuids.contains(uuid))
    }

    /// Waits until the counters before the load were read, which a load may move.
    pub(super) fn await_first_look(&self, interrupt: &Interrupt) {
        let deadline = Instant::now() + TIME_FOR_FIRST_LOOK;
        while self.first_looks.load(Ordering::Acquire) < self.uuids.len()
            && Instant::now() < deadline
            && interrupt.signal().is_none()
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Has the counters read again, and returns what was seen of each GPU.
    pub(super) fn finish(self) -> BTreeMap<String, SensorLog> {
        self.done.store(true, Ordering::Relaxed);
        match self.thread {
            Ok(thread) => thread.join().unwrap_or_default(),
            Err(error) => {
                let log = SensorLog {
                    trouble: Some(error.to_string()),
                    ..SensorLog::default()
                };
                let logs = self.uuids.into_iter().map(|uuid| (uuid, log.clone()));
                logs.collect()
            }
        }
    }
}

/// Listens to the sensors' process until the burn is done.
fn watch_sensors(
    probe: &ProbeOptions,
    uuids: &[String],
    state: &State,
    done: &AtomicBool,
    first_looks: &AtomicUsize,
) -> BTreeMap<String, SensorLog> {
    let began = Instant::now();
    let mut watched: BTreeMap<String, Watched> = uuids
        .iter()
        .map(|uuid| (uuid.clone(), Watched::default()))
        .collect();
    let trouble = listen_to_sensors(probe, uuids, state, (done, first_looks), &mut watched);
    watched
        .into_iter()
        .map(|(uuid, it)| {
            let load = (
                state.load_began(&uuid).unwrap_or(began),
                state.load_s(&uuid),
            );
            (uuid, finished_log(it, load, trouble.as_deref()))
        })
        .collect()
}

fn finished_log(
    watched: Watched,
    (began, load_s): (Instant, f64),
    trouble: Option<&str>,
) -> SensorLog {
    let (samples, reasons_seen) = watched.samples.since(began, load_s);
    // Before its load a GPU's worker may not be there yet, and one of the others would be taken for
    // it.
    let processes = watched.processes.into_values();
    let others = processes.filter(|(seen, _)| *seen >= began).map(|it| it.1);
    let missing = (!watched.after_was_read)
        .then(|| "the sensors were not read to the end of the load".to_owned());
    let end = began + Duration::try_from_secs_f64(load_s).unwrap_or_default();
    let mut pcie = PcieUnderLoad::default();
    // The link changes its speed as the load begins and ends.
    let steady = |at: &Instant| *at >= began + PCIE_SETTLES && *at <= end;
    for (_, generation, width) in watched.pcie.iter().filter(|it| steady(&it.0)) {
        *pcie.generations.entry(*generation).or_default() += 1;
        *pcie.widths.entry(*width).or_default() += 1;
    }
    SensorLog {
        pcie: (!pcie.generations.is_empty()).then_some(pcie),
        samples,
        reasons_seen,
        other_processes: others.collect(),
        trouble: trouble.map(str::to_owned).or(missing),
        ..watched.log
    }
}

/// Why sampling ended early, if it did.
fn listen_to_sensors(
    probe: &ProbeOptions,
    uuids: &[String],
    state: &State,
    (done, first_looks): (&AtomicBool, &AtomicUsize),
    watched: &mut BTreeMap<String, Watched>,
) -> Option<String> {
    let program = worker_program(probe.worker_program.as_ref());
    let mut arguments: Vec<OsString> = vec!["worker".into(), "sensors".into()];
    for uuid in uuids {
        arguments.extend(["--gpu".into(), uuid.into()]);
    }
    let mut worker = match WorkerProcess::start(&program, &arguments, &[]) {
        Ok(worker) => worker,
        Err(error) => return Some(format!("cannot start {}: {error}", program.display())),
    };
    let order = || {
        if done.load(Ordering::Relaxed) {
            Order::Stop(TIME_FOR_LAST_LOOK)
        } else {
            Order::Continue
        }
    };
    let mut trouble = None;
    let mut hear = |message| {
        if matches!(message, SensorMessage::Before { .. }) {
            first_looks.fetch_add(1, Ordering::Release);
        }
        take(message, state, watched, &mut trouble);
        Heard::Part
    };
    let silence = probe.deadlines.nvml_initialization;
    // A run that is stopped stops the burn, which ends the sensors.
    let deaf = Interrupt::default();
    let end = follow(&mut worker, silence, &deaf, &order, &mut hear);
    let how = match end {
        ConversationEnd::Closed(ProcessEnd::Exited(0)) => return trouble,
        ConversationEnd::Closed(ProcessEnd::Exited(status)) => {
            format!("the process that reads NVML exited with status {status}")
        }
        ConversationEnd::Closed(ProcessEnd::Killed(signal)) => {
            format!("the process that reads NVML was ended by signal {signal}")
        }
        ConversationEnd::Closed(ProcessEnd::Stuck) => {
            "the process that reads NVML cannot be killed: uninterruptible sleep".to_owned()
        }
        ConversationEnd::TimedOut { .. }
        | ConversationEnd::Complete
        | ConversationEnd::Dismissed
        | ConversationEnd::Interrupted => "NVML does not answer any more".to_owned(),
    };
    trouble.or(Some(how))
}

fn take(
    message: SensorMessage,
    state: &State,
    watched: &mut BTreeMap<String, Watched>,
    trouble: &mut Option<String>,
) {
    match message {
        SensorMessage::Before {
            uuid,
            power_limit_mw,
            counters,
        } => {
            if let Some(it) = watched.get_mut(&uuid) {
                it.log.power_limit_mw = power_limit_mw;
                state.change_sensors(&uuid, |it| it.power_limit_mw = power_limit_mw);
                it.log.before = *counters;
            }
        }
        SensorMessage::Sample { uuid, at_s, sample } => {
            if let Some(it) = watched.get_mut(&uuid) {
                it.samples.push(clock::instant_of(at_s), sample);
                state.change_sensors(&uuid, |it| it.sample = Some(sample));
            }
        }
        SensorMessage::Xids { uuid, xids } => {
            if let Some(it) = watched.get_mut(&uuid) {
                add_xid_events(&mut it.log.xid_events, xids);
            }
        }
        SensorMessage::Processes {
            uuid,
            at_s,
            processes,
        } => {
            if let Some(it) = watched.get_mut(&uuid) {
                let at = clock::instant_of(at_s);
                let foreign = processes
                    .into_iter()
                    .filter(|it| !own_processes::contains(it.pid));
                let seen = foreign.map(|it| (it.pid, (at, it)));
                it.processes.extend(seen);
            }
        }
        SensorMessage::Pcie {
            uuid,
            at_s,
            generation,
            width,
        } => {
            if let Some(it) = watched.get_mut(&uuid)
                && it.pcie.len() < PCIE_SAMPLES_MAXIMUM
            {
                it.pcie.push((clock::instant_of(at_s), generation, width));
            }
        }
        SensorMessage::After { uuid, counters } => {
            if let Some(it) = watched.get_mut(&uuid) {
                it.log.after = *counters;
                it.after_was_read = true;
            }
        }
        SensorMessage::Trouble(text) => *trouble = Some(text),
        SensorMessage::Done {} => {}
    }
}

/// What was heard stays, also where nothing more can be.
fn add_xid_events(heard: &mut Reading<Vec<u32>>, news: Reading<Vec<u32>>) {
    match (heard, news) {
        (Reading::Value(all), Reading::Value(new)) => {
            let room = XID_EVENTS_MAXIMUM.saturating_sub(all.len());
            all.extend(new.into_iter().take(room));
        }
        (Reading::Value(all), _) if !all.is_empty() => {}
        (heard, news) => *heard = news,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_others_those_are_kept_that_were_there_under_load() {
        let began = Instant::now();
        let process = |pid| GpuProcess {
            pid,
            ..GpuProcess::default()
        };
        let mut watched = BTreeMap::from([("GPU-0".to_owned(), Watched::default())]);
        let mut list = |pids: &[u32]| {
            let message = SensorMessage::Processes {
                uuid: "GPU-0".to_owned(),
                at_s: clock::now_s(),
                processes: pids.iter().copied().map(process).collect(),
            };
            take(message, &State::default(), &mut watched, &mut None);
        };
        list(&[7, 8]);
        std::thread::sleep(Duration::from_millis(2));
        let load_began = Instant::now();
        list(&[8]);
        list(&[8, 9]);
        assert!(load_began > began);
        let watched = watched.remove("GPU-0").expect("it is watched");
        let log = finished_log(watched, (load_began, 1.0), None);
        let pids: Vec<u32> = log.other_processes.iter().map(|it| it.pid).collect();
        assert_eq!(pids, [8, 9]);
    }
}
