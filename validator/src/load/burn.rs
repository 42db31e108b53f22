//! The burn: every GPU multiplies matrices at its power limit, and every element of every product is compared.
//!
//! Each GPU has a worker process of its own, to which `CUDA_VISIBLE_DEVICES=<UUID>` shows that GPU alone; one more process
//! reads NVML's sensors meanwhile. Whatever happens to one of them, the others go on.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

pub use super::burn_worker::EngineChoice;
use super::burn_worker::{BurnTask, empty_run};
use super::cuda_kernel::{busy_if_others_use_it, cuda_does_not_work, device_to_use};
use crate::facts::{
    BurnPlan, BurnRun, Facts, GpuFacts, KernelRun, Precision, Reading, SensorLog, SensorSample,
    WorkerEnd,
};
use crate::kernel_log::{KernelEvent, events};
use crate::probe::{Interrupt, ProbeOptions, SensorMessage};
use crate::worker::conversation::Message;
use crate::worker::process::{ProcessEnd, WorkerEvent, WorkerProcess, worker_program};

/// What is asked of a burn.
#[derive(Clone, Debug, PartialEq)]
pub struct BurnOptions {
    /// All precisions together.
    pub duration: Duration,
    /// Empty: the one of each GPU that heats it most.
    pub precisions: Vec<Precision>,
    /// UUIDs; empty: every GPU.
    pub gpus: Vec<String>,
    pub memory: MemoryShare,
    /// Burns a GPU although others use it.
    pub share: bool,
    /// How many bits to flip on purpose in each GPU's results.
    pub inject: u32,
    /// `None`: another one each time.
    pub seed: Option<u64>,
    /// Who multiplies.
    pub engine: EngineChoice,
}

impl BurnOptions {
    /// Every GPU for as long, at what heats it most, over nearly all of its free memory.
    pub fn lasting(duration: Duration) -> Self {
        Self {
            duration,
            precisions: Vec::new(),
            gpus: Vec::new(),
            memory: MemoryShare::DEFAULT,
            share: false,
            inject: 0,
            seed: None,
            engine: EngineChoice::Auto,
        }
    }
}

/// How much of a GPU's memory is written and read back every sweep.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryShare {
    /// Of the memory that is free when the burn begins.
    Percent(f64),
    Bytes(u64),
}

impl MemoryShare {
    /// What is left is for the driver and for the context of the process.
    pub const DEFAULT: Self = Self::Percent(95.0);

    /// Bytes to take of `free` ones.
    pub(crate) fn of(self, free: u64) -> u64 {
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of the memory, to the page"
        )]
        match self {
            Self::Percent(percent) => (free as f64 * percent / 100.0) as u64,
            Self::Bytes(bytes) => bytes,
        }
    }
}

/// How far the burn of one GPU is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BurnProgress {
    pub uuid: String,
    pub state: BurnState,
    pub precision: Option<Precision>,
    /// The kernels that multiply: `sm_90a`, `cublaslt`.
    pub kernels: String,
    pub tflops_now: f64,
    pub tflops_mean: f64,
    pub products_verified: u64,
    pub mismatches: u64,
    pub elapsed_s: f64,
    pub remaining_s: f64,
    pub memory_bytes: u64,
    pub power_limit_mw: Option<u32>,
    pub sensors: Option<SensorSample>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BurnState {
    #[default]
    Starting,
    Running,
    Ended,
}

/// How long a worker may take to stop before it is killed: less than the second that a person waits.
const TIME_TO_STOP: Duration = Duration::from_millis(800);
/// How long the sensors' process may take for its last look, and to say so.
const TIME_FOR_LAST_LOOK: Duration = Duration::from_secs(2);
const PROGRESS_PERIOD: Duration = Duration::from_millis(100);
/// Samples of a GPU that the facts keep; neighbours are merged beyond that.
const SAMPLES_MAXIMUM: usize = 100;
/// Xids are written a moment after what they tell of.
const XID_DELAY_S: f64 = 1.0;

/// Burns the GPUs that are asked for, all at once, and puts what was seen into `facts.load`.
///
/// Needs the facts of stage gpu. A GPU that others use is not burned unless that is asked for.
pub(crate) fn burn(
    options: &BurnOptions,
    probe: &ProbeOptions,
    facts: &mut Facts,
    interrupt: &Interrupt,
    on_progress: &mut dyn FnMut(&[BurnProgress]),
) {
    let began = Instant::now();
    facts.load.burn_plan = Some(BurnPlan::On {
        duration_s: options.duration.as_secs_f64(),
        precisions: options.precisions.clone(),
        gpus: options.gpus.clone(),
    });
    let asked: Vec<(String, GpuFacts)> = facts
        .gpus
        .iter()
        .filter_map(|gpu| Some((gpu.uuid.value()?.clone(), gpu.clone())))
        .filter(|(uuid, _)| options.gpus.is_empty() || options.gpus.contains(uuid))
        .collect();
    let no_cuda = cuda_does_not_work(facts);
    let seed = options.seed.unwrap_or_else(random_seed);
    let state = State::default();
    let done = AtomicBool::new(false);
    let refusals: Vec<Option<Reading<BurnRun>>> = asked
        .iter()
        .map(|(uuid, gpu)| {
            let kernel = facts.load.cuda_kernel.get(uuid);
            refusal(gpu, options, no_cuda.as_deref(), kernel)
        })
        .collect();
    let uuids: Vec<String> = asked
        .iter()
        .zip(&refusals)
        .filter(|(_, refusal)| refusal.is_none())
        .map(|((uuid, _), _)| uuid.clone())
        .collect();
    std::thread::scope(|scope| {
        let sensors = (!uuids.is_empty())
            .then(|| scope.spawn(|| watch_sensors(probe, &uuids, &state, &done)));
        let workers: Vec<_> = asked
            .iter()
            .zip(&refusals)
            .map(|((uuid, gpu), refusal)| {
                let state = &state;
                scope.spawn(move || match refusal {
                    Some(refusal) => refusal.clone(),
                    None => burn_one(options, probe, seed, (uuid, gpu), interrupt, state),
                })
            })
            .collect();
        while workers.iter().any(|worker| !worker.is_finished()) {
            on_progress(&state.progress(options.duration));
            std::thread::sleep(PROGRESS_PERIOD);
        }
        for ((uuid, _), worker) in asked.iter().zip(workers) {
            let panicked = || Reading::NotRead("the thread of this GPU panicked".to_owned());
            let run = worker.join().unwrap_or_else(|_| panicked());
            facts.load.burn.insert(uuid.clone(), run);
        }
        done.store(true, Ordering::Relaxed);
        if let Some(sensors) = sensors {
            facts.load.sensors = sensors.join().unwrap_or_default();
        }
    });
    for uuid in &options.gpus {
        facts
            .load
            .burn
            .entry(uuid.clone())
            .or_insert_with(|| Reading::NotRead("no GPU with this UUID was found".to_owned()));
    }
    add_xids(probe, interrupt, facts, began);
    facts.interrupted = facts.interrupted.take().or(interrupt.reason());
}

/// Why a GPU is not burned at all.
fn refusal(
    gpu: &GpuFacts,
    options: &BurnOptions,
    no_cuda: Option<&str>,
    kernel: Option<&Reading<KernelRun>>,
) -> Option<Reading<BurnRun>> {
    if let Some(lost) = &gpu.lost {
        return Some(Reading::NotRead(format!("the GPU is lost: {lost}")));
    }
    if let Some(reason) = no_cuda {
        return Some(Reading::NotRead(reason.to_owned()));
    }
    // A GPU that hung or failed with one small kernel would only do so again, for as long.
    let has_worked = |run: &KernelRun| matches!(run.end, WorkerEnd::Finished | WorkerEnd::Busy(_));
    if kernel.is_some_and(|it| !it.value().is_some_and(has_worked)) {
        return Some(Reading::NotRead(
            "the check kernel did not end well on this GPU".to_owned(),
        ));
    }
    let processes = gpu.processes.value().map_or(0, Vec::len);
    if processes > 0 && !options.share {
        let reason = format!("{processes} other process(es) use it");
        return Some(Reading::Value(empty_run(WorkerEnd::Busy(reason))));
    }
    None
}

/// The GPUs that `CUDA_VISIBLE_DEVICES` leaves, by UUID, where it hides some: burning what is hidden on purpose would disturb
/// its owner. `Ok(None)` where nothing is hidden.
pub(crate) fn visible_gpus(facts: &Facts) -> Result<Option<Vec<String>>, String> {
    let hides_some = std::env::var_os("CUDA_VISIBLE_DEVICES").is_some();
    let Some(visible) = facts.cuda.devices.value().filter(|_| hides_some) else {
        return Ok(None);
    };
    let of_gpus = facts.gpus.iter().filter(|gpu| {
        let mig = gpu.mig_devices.value().into_iter().flatten();
        let mut uuids = mig.map(|it| &it.uuid).chain(gpu.uuid.value());
        uuids.any(|uuid| visible.iter().any(|it| it.uuid == *uuid))
    });
    let uuids: Vec<String> = of_gpus
        .filter_map(|gpu| gpu.uuid.value().cloned())
        .collect();
    // No names mean every GPU to a burn.
    if uuids.is_empty() {
        return Err("CUDA_VISIBLE_DEVICES leaves no GPU to burn".to_owned());
    }
    Ok(Some(uuids))
}

fn random_seed() -> u64 {
    let since_epoch = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    u64::from(since_epoch.subsec_nanos()) << 32 ^ since_epoch.as_secs()
}

/// What the threads tell the one that shows it.
#[derive(Default)]
struct State {
    gpus: Mutex<BTreeMap<String, GpuState>>,
}

#[derive(Default)]
struct GpuState {
    run: Option<BurnRun>,
    ended: bool,
    /// When the first product was under way.
    load_began: Option<Instant>,
    power_limit_mw: Option<u32>,
    sensors: Option<SensorSample>,
}

impl State {
    fn change(&self, uuid: &str, change: impl FnOnce(&mut GpuState)) {
        let mut gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        change(gpus.entry(uuid.to_owned()).or_default());
    }

    fn load_began(&self, uuid: &str) -> Option<Instant> {
        let gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        gpus.get(uuid)?.load_began
    }

    fn progress(&self, duration: Duration) -> Vec<BurnProgress> {
        let gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        gpus.iter()
            .map(|(uuid, state)| progress(uuid, state, duration))
            .collect()
    }
}

fn progress(uuid: &str, state: &GpuState, duration: Duration) -> BurnProgress {
    let run = state.run.as_ref();
    let products = run.and_then(|it| it.precisions.last());
    let elapsed_s = run.map_or(0.0, |it| it.measured_s);
    let sum = |count: fn(&crate::facts::PrecisionRun) -> u64| {
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

fn burn_one(
    options: &BurnOptions,
    probe: &ProbeOptions,
    seed: u64,
    (uuid, gpu): (&str, &GpuFacts),
    interrupt: &Interrupt,
    state: &State,
) -> Reading<BurnRun> {
    let device = match device_to_use(gpu, uuid) {
        Ok(device) => device,
        Err(reason) => return Reading::NotRead(reason),
    };
    let task = BurnTask {
        device: device.to_owned(),
        seconds: options.duration.as_secs_f64(),
        precisions: options.precisions.clone(),
        memory: options.memory,
        inject: options.inject,
        seed,
        engine: options.engine,
    };
    let Ok(task) = serde_json::to_string(&task) else {
        return Reading::NotRead("the task cannot be written".to_owned());
    };
    let program = worker_program(probe.worker_program.as_ref());
    let arguments: [OsString; 4] = ["worker".into(), "burn".into(), "--task".into(), task.into()];
    let environment = [("CUDA_VISIBLE_DEVICES", device.to_owned())];
    state.change(uuid, |_| {});
    let run = match WorkerProcess::start(&program, &arguments, &environment) {
        Ok(worker) => {
            let silence = probe.deadlines.cuda_kernel;
            follow(worker, silence, interrupt, &mut |run| {
                state.change(uuid, |it| note(it, run));
            })
        }
        Err(error) => {
            return Reading::NotRead(format!("cannot start {}: {error}", program.display()));
        }
    };
    state.change(uuid, |it| it.ended = true);
    Reading::Value(BurnRun {
        end: busy_if_others_use_it(run.end, gpu),
        ..run
    })
}

fn note(state: &mut GpuState, run: &BurnRun) {
    if state.load_began.is_none() && run.measured_s > 0.0 {
        let running = Duration::try_from_secs_f64(run.measured_s).unwrap_or_default();
        state.load_began = Instant::now().checked_sub(running);
    }
    state.run = Some(run.clone());
}

/// Listens to a worker to its end. What it told last is what is known, however it ends. A worker that says nothing for as
/// long as `silence` hangs.
fn follow(
    mut worker: WorkerProcess,
    silence: Duration,
    interrupt: &Interrupt,
    on_run: &mut dyn FnMut(&BurnRun),
) -> BurnRun {
    let deaf = Interrupt::default();
    let mut last = None;
    let mut step = "start".to_owned();
    let mut is_done = false;
    let mut stopping = false;
    let mut deadline = Instant::now() + silence;
    let abnormal = loop {
        let heard = if stopping { &deaf } else { interrupt };
        match worker.next_event(deadline, heard) {
            WorkerEvent::Line(line) => {
                match serde_json::from_str(&line) {
                    Ok(Message::Step(name)) => step = name,
                    Ok(Message::Field { value, .. }) => {
                        if let Ok(run) = serde_json::from_value::<BurnRun>(value) {
                            on_run(&run);
                            last = Some(run);
                        }
                    }
                    Ok(Message::Done {}) => is_done = true,
                    // A library may print on stdout, which harms nothing.
                    Err(_) => continue,
                }
                if !stopping {
                    deadline = Instant::now() + silence;
                }
            }
            WorkerEvent::Interrupted => {
                stopping = true;
                worker.terminate();
                deadline = Instant::now() + TIME_TO_STOP;
            }
            WorkerEvent::TimedOut => {
                let stuck = worker.kill() == ProcessEnd::Stuck;
                if stuck {
                    step.push_str(" (and cannot be killed: uninterruptible sleep in the driver)");
                }
                let seconds = if stopping { TIME_TO_STOP } else { silence }.as_secs_f64();
                break Some(WorkerEnd::TimedOut { step, seconds });
            }
            WorkerEvent::Closed => {
                let end = worker.finish(TIME_FOR_LAST_LOOK);
                let well = is_done && end == ProcessEnd::Exited(0);
                break (!well).then(|| worker.end_without_result(&end));
            }
        }
    };
    let Some(end) = abnormal else {
        return last.unwrap_or_else(|| {
            empty_run(WorkerEnd::Exited {
                status: 0,
                stderr: "the worker ended without a result".to_owned(),
            })
        });
    };
    match last {
        // What it said of its own end says more than how the process went.
        Some(run) if is_done && run.end != WorkerEnd::Finished => run,
        Some(run) => BurnRun { end, ..run },
        None => empty_run(end),
    }
}

/// Samples that arrived, with the time of their arrival.
#[derive(Default)]
struct Watched {
    log: SensorLog,
    samples: Vec<(Instant, SensorSample)>,
    after_was_read: bool,
}

/// Listens to the sensors' process until the burn is done.
fn watch_sensors(
    probe: &ProbeOptions,
    uuids: &[String],
    state: &State,
    done: &AtomicBool,
) -> BTreeMap<String, SensorLog> {
    let began = Instant::now();
    let mut watched: BTreeMap<String, Watched> = uuids
        .iter()
        .map(|uuid| (uuid.clone(), Watched::default()))
        .collect();
    let trouble = listen_to_sensors(probe, uuids, state, done, &mut watched);
    watched
        .into_iter()
        .map(|(uuid, it)| {
            let began = state.load_began(&uuid).unwrap_or(began);
            (uuid, finished_log(it, began, trouble.as_deref()))
        })
        .collect()
}

fn finished_log(watched: Watched, began: Instant, trouble: Option<&str>) -> SensorLog {
    let samples = watched
        .samples
        .into_iter()
        .map(|(at, sample)| SensorSample {
            t: seconds_from(began, at),
            ..sample
        })
        .collect();
    let missing = (!watched.after_was_read)
        .then(|| "the sensors were not read to the end of the load".to_owned());
    SensorLog {
        samples: thinned(samples),
        trouble: trouble.map(str::to_owned).or(missing),
        ..watched.log
    }
}

#[expect(clippy::cast_possible_truncation, reason = "milliseconds matter")]
fn seconds_from(began: Instant, at: Instant) -> f32 {
    let after = at.saturating_duration_since(began).as_secs_f64();
    let before = began.saturating_duration_since(at).as_secs_f64();
    (((after - before) * 1000.0).round() / 1000.0) as f32
}

/// Why sampling ended early, if it did.
fn listen_to_sensors(
    probe: &ProbeOptions,
    uuids: &[String],
    state: &State,
    done: &AtomicBool,
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
    let deaf = Interrupt::default();
    let silence = probe.deadlines.nvml_initialization;
    let mut deadline = Instant::now() + silence;
    let mut stopping = false;
    let mut trouble = None;
    loop {
        if done.load(Ordering::Relaxed) && !stopping {
            stopping = true;
            worker.terminate();
            deadline = Instant::now() + TIME_FOR_LAST_LOOK;
        }
        let next_look = Instant::now() + Duration::from_millis(50);
        match worker.next_event(deadline.min(next_look), &deaf) {
            WorkerEvent::Line(line) => {
                if let Ok(message) = serde_json::from_str(&line) {
                    take(message, state, watched, &mut trouble);
                    if !stopping {
                        deadline = Instant::now() + silence;
                    }
                }
            }
            WorkerEvent::TimedOut if Instant::now() < deadline => {}
            WorkerEvent::TimedOut | WorkerEvent::Interrupted => {
                worker.kill();
                return trouble.or(Some("NVML does not answer any more".to_owned()));
            }
            WorkerEvent::Closed => {
                let end = worker.finish(TIME_FOR_LAST_LOOK);
                let how = match end {
                    ProcessEnd::Exited(0) => return trouble,
                    ProcessEnd::Exited(status) => format!("exited with status {status}"),
                    ProcessEnd::Killed(signal) => format!("was ended by signal {signal}"),
                    ProcessEnd::Stuck => "cannot be killed: uninterruptible sleep".to_owned(),
                };
                return trouble.or(Some(format!("the process that reads NVML {how}")));
            }
        }
    }
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
                state.change(&uuid, |it| it.power_limit_mw = power_limit_mw);
                it.log.before = *counters;
            }
        }
        SensorMessage::Sample { uuid, sample } => {
            if let Some(it) = watched.get_mut(&uuid) {
                it.samples.push((Instant::now(), sample));
                state.change(&uuid, |it| it.sensors = Some(sample));
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

/// Merges neighbours until few enough are left: greatest temperature, all reasons, mean power and clocks.
fn thinned(samples: Vec<SensorSample>) -> Vec<SensorSample> {
    let part = samples.len().div_ceil(SAMPLES_MAXIMUM).max(1);
    if part == 1 {
        return samples;
    }
    samples.chunks(part).map(merged).collect()
}

fn merged(samples: &[SensorSample]) -> SensorSample {
    let mean = |value: fn(&SensorSample) -> Option<u32>| {
        let values: Vec<u64> = samples.iter().filter_map(value).map(u64::from).collect();
        let sum: u64 = values.iter().sum();
        u32::try_from(sum.checked_div(values.len() as u64)?).ok()
    };
    SensorSample {
        t: samples.first().map_or(0.0, |it| it.t),
        power_mw: mean(|it| it.power_mw),
        sm_mhz: mean(|it| it.sm_mhz),
        memory_mhz: mean(|it| it.memory_mhz),
        gpu_c: samples.iter().filter_map(|it| it.gpu_c).max(),
        memory_c: samples.iter().filter_map(|it| it.memory_c).max(),
        reasons: samples
            .iter()
            .filter_map(|it| it.reasons)
            .reduce(|all, it| all | it),
        utilization_percent: mean(|it| it.utilization_percent),
    }
}

/// Xids that the kernel log gained while the GPUs were at work, by the GPU that they name.
fn add_xids(probe: &ProbeOptions, interrupt: &Interrupt, facts: &mut Facts, began: Instant) {
    let Reading::Value(log) = crate::probe::kernel_log(probe, interrupt) else {
        // Whether the log can be read at all is a fact of the host's stage, which its own checks judge.
        return;
    };
    let lasted_s = began.elapsed().as_secs_f64() + XID_DELAY_S;
    for timed in events(&log.records) {
        let during = timed.age_s.is_some_and(|age| age <= lasted_s);
        let KernelEvent::Xid(xid) = &timed.event else {
            continue;
        };
        let gpu = facts
            .gpus
            .iter()
            .find(|gpu| gpu.pci_address.value().map(String::as_str) == timed.event.pci_address());
        if let (true, Some(uuid)) = (during, gpu.and_then(|gpu| gpu.uuid.value())) {
            // An Xid counts although the sensors were not read.
            let log = facts.load.sensors.entry(uuid.clone()).or_default();
            log.xids.push(xid.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(script: &str) -> BurnRun {
        let program = std::path::PathBuf::from("/bin/sh");
        let arguments = ["-c".into(), script.into()];
        let worker = WorkerProcess::start(&program, &arguments, &[]).expect("sh starts");
        let silence = Duration::from_millis(500);
        follow(worker, silence, &Interrupt::default(), &mut |_| {})
    }

    fn line(measured_s: f64) -> String {
        let run = BurnRun {
            measured_s,
            ..empty_run(WorkerEnd::Finished)
        };
        let run = serde_json::to_string(&run).expect("a run is JSON");
        format!(r#"echo '{{"field":{{"name":"run","value":{run}}}}}'"#)
    }

    #[test]
    fn a_worker_that_finishes() {
        let run = told(&format!(r#"{}; echo '{{"done":{{}}}}'"#, line(1.5)));
        assert_eq!(run.end, WorkerEnd::Finished);
        assert!((run.measured_s - 1.5).abs() < 1e-9);
    }

    #[test]
    fn what_a_killed_worker_told_is_kept() {
        let run = told(&format!("{}; kill -9 $$", line(0.5)));
        assert_eq!(run.end, WorkerEnd::Killed { signal: 9 });
        assert!((run.measured_s - 0.5).abs() < 1e-9);
    }

    #[test]
    fn a_worker_that_hangs_is_killed_in_its_step() {
        let run = told(r#"trap '' TERM; echo '{"step":"bf16 products"}'; sleep 600"#);
        let expected = WorkerEnd::TimedOut {
            step: "bf16 products".to_owned(),
            seconds: 0.5,
        };
        assert_eq!(run.end, expected);
    }

    #[test]
    fn nothing_told_is_no_result() {
        assert!(matches!(
            told(r#"echo '{"done":{}}'"#).end,
            WorkerEnd::Exited { .. }
        ));
    }

    #[test]
    fn a_signal_stops_a_worker_that_listens_and_kills_one_that_does_not() {
        for (script, listens) in [
            (
                "trap 'exit 0' TERM; echo x; while :; do sleep 0.01; done",
                true,
            ),
            ("trap '' TERM; echo x; sleep 600", false),
        ] {
            let program = std::path::PathBuf::from("/bin/sh");
            let arguments = ["-c".into(), script.into()];
            let worker = WorkerProcess::start(&program, &arguments, &[]).expect("sh starts");
            let interrupt = Interrupt::default();
            std::thread::sleep(Duration::from_millis(100));
            interrupt.request(2);
            let began = Instant::now();
            let run = follow(worker, Duration::from_mins(1), &interrupt, &mut |_| {});
            assert!(began.elapsed() < Duration::from_secs(3));
            assert_eq!(
                matches!(run.end, WorkerEnd::Exited { status: 0, .. }),
                listens
            );
        }
    }

    #[test]
    fn a_gpu_of_others_is_busy_unless_it_is_shared() {
        let mut gpu = GpuFacts {
            processes: Reading::Value(vec![crate::facts::GpuProcess::default()]),
            ..GpuFacts::default()
        };
        let mut options = BurnOptions::lasting(Duration::from_secs(1));
        let busy = refusal(&gpu, &options, None, None);
        assert!(matches!(
            busy,
            Some(Reading::Value(BurnRun {
                end: WorkerEnd::Busy(_),
                ..
            }))
        ));
        options.share = true;
        assert_eq!(refusal(&gpu, &options, None, None), None);
        gpu.lost = Some("nvmlDeviceGetUUID answered NVML_ERROR_GPU_IS_LOST".to_owned());
        assert!(matches!(
            refusal(&gpu, &options, None, None),
            Some(Reading::NotRead(_))
        ));
    }

    #[test]
    fn a_gpu_on_which_the_check_kernel_did_not_end_well_is_not_burned() {
        let options = BurnOptions::lasting(Duration::from_secs(1));
        let kernel = |end| {
            Reading::Value(KernelRun {
                end,
                values_compared: 0,
                mismatches: 0,
                examples: Vec::new(),
                wall_ms: 1.0,
            })
        };
        let gpu = GpuFacts::default();
        let refused = |kernel: &Reading<KernelRun>| refusal(&gpu, &options, None, Some(kernel));
        assert_eq!(refused(&kernel(WorkerEnd::Finished)), None);
        for kernel in [
            kernel(WorkerEnd::Killed { signal: 9 }),
            Reading::NotRead("no answer".to_owned()),
        ] {
            assert!(matches!(refused(&kernel), Some(Reading::NotRead(_))));
        }
    }

    #[test]
    fn thinning_keeps_the_hottest_and_every_reason() {
        let samples: Vec<SensorSample> = (0..1000_u16)
            .map(|index| SensorSample {
                t: f32::from(index) / 5.0,
                gpu_c: Some(i32::from(index % 90)),
                reasons: Some(if index == 777 { 0x40 } else { 0x4 }),
                power_mw: Some(600_000),
                ..SensorSample::default()
            })
            .collect();
        let thin = thinned(samples);
        assert_eq!(thin.len(), 100);
        assert_eq!(thin.iter().filter_map(|it| it.gpu_c).max(), Some(89));
        let with_heat = thin.iter().filter(|it| it.reasons == Some(0x44));
        assert_eq!(with_heat.count(), 1);
        assert!(thin.iter().all(|it| it.power_mw == Some(600_000)));
    }

    #[test]
    fn a_share_of_the_memory() {
        assert_eq!(MemoryShare::Percent(50.0).of(1000), 500);
        assert_eq!(MemoryShare::Bytes(7).of(1000), 7);
    }
}
