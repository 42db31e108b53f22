//! The node that this process sees: the scenario, the shared state, and the changes that take effect in time.

use crate::dynamics::{self, Readings};
use crate::quantity::Trigger;
use crate::scenario::{LibraryBehaviour, ResolvedScenario, Scenario};
use crate::state::{Event, ProcessSlot, State, now_ns};
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
    resolved: ResolvedScenario,
    state: State,
    /// The scenario for each set of changes that has been in effect.
    views: RwLock<HashMap<u64, Arc<Scenario>>>,
}

impl Node {
    /// The node that `GPU_SIMULATOR_NODE` names, opened once. The libraries never invent a healthy node: without the
    /// variable, or with a folder that is not a node, every call fails and one line on stderr says why.
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
        crate::marker::refuse_system_path()?;
        let folder = std::env::var_os(NODE_VARIABLE).with_context(|| {
            format!("{NODE_VARIABLE} is not set; run the program under `cargo xtask simulate NODE -- PROGRAM`")
        })?;
        Self::open(Path::new(&folder))
    }

    /// Opens a folder that `prepare_node` made.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join("scenario.json");
        let text = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        let resolved: ResolvedScenario =
            serde_json::from_slice(&text).with_context(|| format!("parse {}", path.display()))?;
        ensure!(
            resolved.timed.len() <= 64,
            "more than 64 timed changes in {}",
            path.display()
        );
        let state = State::open(&folder.join("state"))?;
        let start: Scenario = serde_json::from_value(resolved.base.clone()).with_context(|| {
            format!(
                "{} was written by another version of the simulator",
                path.display()
            )
        })?;
        Ok(Self {
            folder: folder.to_owned(),
            resolved,
            state,
            views: RwLock::new(HashMap::from([(0, Arc::new(start))])),
        })
    }

    /// Node and faults, such as `p5.48xlarge+xid-79`.
    pub fn name(&self) -> &str {
        &self.resolved.name
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn state(&self) -> &State {
        &self.state
    }

    /// The scenario as it is now, after the changes whose time has come.
    pub fn scenario(&self) -> Arc<Scenario> {
        self.advance();
        let fired = self.state.fired();
        if let Some(view) = self
            .views
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&fired)
        {
            return Arc::clone(view);
        }
        let view = Arc::new(self.view(fired));
        self.views
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(fired, Arc::clone(&view));
        view
    }

    fn view(&self, fired: u64) -> Scenario {
        let mut value = self.resolved.base.clone();
        for (index, change) in self.resolved.timed.iter().enumerate() {
            if fired & (1 << index) != 0 {
                for (path, new) in &change.values {
                    crate::resolve::set_path(&mut value, path, new.clone());
                }
            }
        }
        // Every combination was checked when the node was prepared; a file that was edited since must not read as healthy.
        serde_json::from_value(value).expect("the prepared scenario is valid")
    }

    /// Lets the changes whose time has come take effect, and their events happen, once in the whole node.
    pub fn advance(&self) {
        if self.resolved.timed.is_empty() {
            return;
        }
        let fired = self.state.fired();
        for (index, change) in self.resolved.timed.iter().enumerate() {
            if fired & (1 << index) != 0 {
                continue;
            }
            let due = match change.trigger {
                Trigger::AtNs(ns) => self.state.elapsed().as_nanos() >= u128::from(ns),
                Trigger::AfterLaunches(count) => {
                    self.state.gpu(change.gpu as usize).launches() >= count
                }
                Trigger::AfterLoadNs(ns) => self.state.gpu(change.gpu as usize).loaded_ns() >= ns,
            };
            if due && self.state.fire(index) {
                self.happen(index);
            }
        }
    }

    fn happen(&self, change: usize) {
        for event in self
            .resolved
            .events
            .iter()
            .filter(|event| event.change == Some(change))
        {
            for message in &event.kernel_log {
                // A kernel log that cannot be written is the scenario's own fault (unreadable, read-only): the event still happens.
                let _ = self.append_kernel_log(message);
            }
            if let Some(xid) = event.xid {
                self.state.push_event(Event {
                    gpu: event.gpu,
                    xid,
                });
            }
        }
    }

    fn append_kernel_log(&self, message: &str) -> Result<()> {
        let path = self.folder.join("sysroot/dev/kmsg");
        let sequence = self.state.next_kernel_record();
        let host = &self.scenario().host;
        // After everything that happened before the start, and not after the uptime that the sysroot tells.
        let now_us = crate::host::UPTIME_S * 1_000_000 - 1_000_000;
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

    /// Notes that a kernel or copy of this process starts on the GPU; the work ends when the guard is dropped.
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

    /// Memory of a GPU that processes hold, in bytes: real ones, and those that the scenario makes up.
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

    /// Memory that CUDA can hand out on a GPU to all processes together, in bytes, less what made-up processes hold.
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

/// What a library does before it answers a call: it may be slow, hang, crash, or be told what to return.
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

/// A call that never returns.
pub(crate) fn hang() -> ! {
    loop {
        std::thread::park();
    }
}
