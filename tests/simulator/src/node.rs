//! The node that this process sees: the scenario, the shared state, and the changes that take
//! effect in time.

use crate::dotted_path::set_path;
use crate::dynamics::{self, Readings};
use crate::gpu::{Gpu, NvmlCalls};
use crate::quantity::Trigger;
use crate::scenario::{
    Host, LibraryBehaviour, ResolvedScenario, SCENARIO_FILE, Scenario, TimedChange,
};
use crate::state::{Event, Fired, MAX_CHANGES, ProcessSlot, State, now_ns};
use anyhow::{Context, Result, ensure};
use std::collections::HashMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

/// The environment variable that names the prepared node's folder.
pub const NODE_VARIABLE: &str = "GPU_SIMULATOR_NODE";

/// A prepared node, opened by a process that runs on it.
#[derive(Debug)]
pub struct Node {
    folder: PathBuf,
    name: String,
    /// The scenario's file, and how often it had been replaced when it was read.
    resolved: RwLock<(u64, Arc<ResolvedScenario>)>,
    state: State,
    /// The scenario for each file and set of changes that has been in effect.
    views: RwLock<HashMap<(u64, Fired), Arc<Scenario>>>,
}

impl Node {
    /// The node that `GPU_SIMULATOR_NODE` names, opened once. The libraries never invent a healthy
    /// node: without the variable, or with a folder that is not a node, every call fails and one
    /// line on stderr states the reason.
    pub fn of_this_process() -> Result<&'static Self, &'static str> {
        static NODE: OnceLock<Result<Node, String>> = OnceLock::new();
        NODE.get_or_init(|| {
            Self::from_environment().map_err(|error| {
                let text = format!("gpu simulator: {error:#}");
                #[allow(
                    clippy::print_stderr,
                    reason = "a library has no other way to say why it refuses"
                )]
                {
                    eprintln!("{text}");
                }
                text
            })
        })
        .as_ref()
        .map_err(String::as_str)
    }

    fn from_environment() -> Result<Self> {
        crate::system_path::refuse_system_path()?;
        let folder = std::env::var_os(NODE_VARIABLE).with_context(|| {
            format!("{NODE_VARIABLE} is not set; run the program under `gpu-simulator run NODE -- PROGRAM`")
        })?;
        Self::open(Path::new(&folder))
    }

    /// Opens a folder that `prepare_node` made.
    pub fn open(folder: &Path) -> Result<Self> {
        let state = State::open(&folder.join("state"))?;
        let generation = state.generation();
        let resolved = read_scenario(folder)?;
        let start: Scenario = serde_json::from_value(resolved.base.clone()).with_context(|| {
            format!(
                "the scenario in {} was written by another version of the simulator",
                folder.display()
            )
        })?;
        let view = ((generation, Fired::default()), Arc::new(start));
        Ok(Self {
            folder: folder.to_owned(),
            name: resolved.name.clone(),
            resolved: RwLock::new((generation, Arc::new(resolved))),
            state,
            views: RwLock::new(HashMap::from([view])),
        })
    }

    /// Node and faults, such as `p5.48xlarge+xid-79`, when this process opened the node.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The scenario's file as it is now, and how often it was replaced.
    pub(crate) fn resolved(&self) -> (u64, Arc<ResolvedScenario>) {
        let generation = self.state.generation();
        let known = self.resolved.read().unwrap_or_else(PoisonError::into_inner);
        if known.0 == generation {
            return known.clone();
        }
        drop(known);
        // Replaced by a rename, so that it is there whole; who removed it has ended the node.
        let read = Arc::new(read_scenario(&self.folder).expect("the node's scenario"));
        let mut known = self
            .resolved
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        *known = (generation, read);
        known.clone()
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn state(&self) -> &State {
        &self.state
    }

    /// The scenario as it is now, after the changes whose time has come.
    pub fn scenario(&self) -> Arc<Scenario> {
        let (generation, resolved) = self.advanced();
        self.view(generation, &resolved, self.state.fired())
    }

    fn view(&self, generation: u64, resolved: &ResolvedScenario, fired: Fired) -> Arc<Scenario> {
        let key = (generation, fired);
        let views = self.views.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(view) = views.get(&key) {
            return Arc::clone(view);
        }
        drop(views);
        let mut value = resolved.base.clone();
        for (index, change) in resolved.timed.iter().enumerate() {
            if fired.has(index) {
                for (path, new) in &change.values {
                    set_path(&mut value, path, new.clone());
                }
            }
        }
        // Every combination was checked when it was written; a file that was edited since must not
        // read as healthy.
        let view: Scenario = serde_json::from_value(value).expect("the prepared scenario is valid");
        let view = Arc::new(view);
        let mut views = self.views.write().unwrap_or_else(PoisonError::into_inner);
        views.insert(key, Arc::clone(&view));
        view
    }

    /// Lets the changes whose time has come take effect, and their events happen, once in the whole
    /// node.
    pub fn advance(&self) {
        self.advanced();
    }

    fn advanced(&self) -> (u64, Arc<ResolvedScenario>) {
        let (generation, resolved) = self.resolved();
        if resolved.timed.is_empty() {
            return (generation, resolved);
        }
        let fired = self.state.fired();
        for (index, change) in resolved.timed.iter().enumerate() {
            if !fired.has(index)
                && self.is_due(change, generation, &resolved)
                && self.state.fire(index)
            {
                self.happen(index, generation, &resolved);
            }
        }
        (generation, resolved)
    }

    fn is_due(&self, change: &TimedChange, generation: u64, resolved: &ResolvedScenario) -> bool {
        let gpu = self.state.gpu(change.gpu as usize);
        match change.trigger {
            Trigger::AtNs(ns) => self.state.elapsed().as_nanos() >= u128::from(ns),
            Trigger::AfterLaunches(count) => gpu.launches() >= count,
            Trigger::AfterLoadNs(ns) => gpu.loaded_ns() >= ns,
            Trigger::AtTemperatureC(degrees) => {
                let scenario = self.view(generation, resolved, self.state.fired());
                let values = &scenario.gpus[change.gpu as usize];
                dynamics::temperature_c(values, &gpu.dynamics) >= degrees
            }
        }
    }

    fn happen(&self, change: usize, generation: u64, resolved: &ResolvedScenario) {
        let fired = self.state.fired();
        let before = self.view(generation, resolved, fired.without(change));
        let after = self.view(generation, resolved, fired);
        // A file that cannot be written is the scenario's own fault (unreadable, read-only): the
        // event still happens.
        let _ = crate::host::update_sysroot(&self.folder.join("sysroot"), &before, &after);
        for event in resolved
            .events
            .iter()
            .filter(|event| event.change == Some(change))
        {
            for message in event.messages() {
                let _ = self.append_kernel_log(&message, &after.host);
            }
            if let Some(xid) = event.xid {
                self.state.push_event(Event {
                    gpu: event.gpu,
                    xid,
                });
            }
        }
    }

    fn append_kernel_log(&self, message: &str, host: &Host) -> Result<()> {
        let path = self.folder.join("sysroot/dev/kmsg");
        let sequence = self.state.next_kernel_record();
        // After everything that happened before the start, and not after the uptime in the sysroot.
        let now_us = host.uptime_s * 1_000_000 - 1_000_000;
        let time_us = now_us - host.kernel_log_lag_s * 1_000_000 + sequence;
        let record = if host.kernel_log_overrun {
            let behind = self.state.next_kernel_record();
            format!("6,{behind},{time_us},-;what was written over it\n")
        } else {
            format!("4,{sequence},{time_us},-;{message}\n")
        };
        let mut file = std::fs::OpenOptions::new().append(true).open(path)?;
        file.write_all(record.as_bytes())?;
        Ok(())
    }

    /// Notes that a kernel or copy of this process starts on the GPU; the work ends when the guard
    /// is dropped.
    pub fn begin_work<'node>(&'node self, gpu: usize, slot: &'node ProcessSlot) -> Work<'node> {
        slot.begin_work();
        self.advance_load(gpu);
        Work {
            node: self,
            gpu,
            slot,
        }
    }

    fn advance_load(&self, gpu: usize) {
        let state = self.state.gpu(gpu);
        let scenario = self.scenario();
        let simulated = scenario
            .processes
            .values()
            .any(|process| process.busy && process.gpu as usize == gpu);
        state
            .dynamics
            .advance(&scenario.gpus[gpu], now_ns(), simulated || state.busy());
        self.show_link(gpu, &scenario.gpus[gpu]);
    }

    /// Lets sysfs show a link whose speed follows load.
    fn show_link(&self, index: usize, gpu: &Gpu) {
        let pcie = &gpu.pcie;
        let follows = [pcie.load_generation, pcie.load_width, pcie.idle_generation];
        if follows.iter().all(Option::is_none) {
            return;
        }
        let state = self.state.gpu(index);
        let load = dynamics::link_load(gpu, &state.dynamics);
        if state.note_link(pcie.shown_by_sysfs(load)) {
            // As in `happen`.
            let _ = crate::host::update_link(&self.folder.join("sysroot"), gpu, load);
        }
    }

    /// What the GPU's sensors show now.
    pub fn readings(&self, gpu: usize) -> Readings {
        self.advance_load(gpu);
        let scenario = self.scenario();
        dynamics::readings(
            &scenario.gpus[gpu],
            &self.state.gpu(gpu).dynamics,
            self.state.elapsed().as_secs_f64(),
        )
    }

    /// Memory of a GPU that processes hold, in bytes: real ones, and those that the scenario makes
    /// up.
    pub fn memory_used(&self, gpu: usize) -> u64 {
        let simulated: u64 = self
            .scenario()
            .processes
            .values()
            .filter(|process| process.gpu as usize == gpu)
            .map(|process| process.memory.0)
            .sum();
        self.state.gpu(gpu).memory_used() + simulated
    }

    /// Memory that CUDA can hand out on a GPU to all processes together, in bytes, less what
    /// made-up processes hold.
    pub fn memory_capacity(&self, gpu: usize) -> u64 {
        let scenario = self.scenario();
        let simulated: u64 = scenario
            .processes
            .values()
            .filter(|process| process.gpu as usize == gpu)
            .map(|process| process.memory.0)
            .sum();
        let values = &scenario.gpus[gpu];
        values
            .memory
            .0
            .saturating_sub(values.memory_reserved.0)
            .saturating_sub(simulated)
    }
}

/// Work on a GPU that runs until this is dropped.
#[derive(Debug)]
pub struct Work<'node> {
    node: &'node Node,
    gpu: usize,
    slot: &'node ProcessSlot,
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        self.slot.end_work();
        self.node.advance_load(self.gpu);
    }
}

fn read_scenario(folder: &Path) -> Result<ResolvedScenario> {
    let path = folder.join(SCENARIO_FILE);
    let text = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    let resolved: ResolvedScenario =
        serde_json::from_slice(&text).with_context(|| format!("parse {}", path.display()))?;
    ensure!(
        resolved.timed.len() <= MAX_CHANGES,
        "more than {MAX_CHANGES} timed changes in {}",
        path.display()
    );
    Ok(resolved)
}

/// What a library does before it answers a call: it may be slow, hang, crash, or return a set
/// value.
pub fn misbehave(behaviour: &LibraryBehaviour, function: &str) -> Option<u32> {
    if behaviour.delay_us > 0 {
        std::thread::sleep(std::time::Duration::from_micros(behaviour.delay_us));
    }
    let named = |list: &[String]| list.iter().any(|name| name == function);
    if named(&behaviour.hang) {
        hang();
    }
    if named(&behaviour.crash) {
        std::process::abort();
    }
    behaviour.returns.get(function).copied()
}

/// The same of a call for one GPU.
pub fn misbehave_for(calls: &NvmlCalls, function: &str) -> Option<u32> {
    if let Some(delay) = calls.delay.get(function) {
        std::thread::sleep(delay.0);
    }
    if calls.hang.iter().any(|name| name == function) {
        hang();
    }
    if calls.crash.iter().any(|name| name == function) {
        std::process::abort();
    }
    calls.returns.get(function).copied()
}

/// A call that never returns.
pub(crate) fn hang() -> ! {
    loop {
        std::thread::park();
    }
}
