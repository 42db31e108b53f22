//! A user's own command under each layout of GPUs, one after another.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::super::devices::device_to_use;
use super::host_state::shared_memory;
use super::view::View;
use super::{Gpu, TIME_TO_RECOVER, TIME_TO_RECOVER_INTERRUPTED, usable_gpus};
use crate::interrupt::Interrupt;
use crate::plan::LayoutOptions;
use crate::probe::ProbeOptions;
use crate::process_stat;
use crate::worker::launcher::{LaunchMessage, Launched};
use crate::worker::listener::{self, Heard, Order};
use crate::worker::process::{WorkerProcess, worker_program};
use validator_core::allocation::MEMORY_TOLERANCE_BYTES;
use validator_core::facts::{
    Facts, GpuUse, Layout, LayoutFacts, LayoutGpuUse, LayoutRun, Reading, WorkerEnd,
};
use validator_core::layouts::gpus_of;

/// Poll interval of the memory that is left.
const POLL: Duration = Duration::from_millis(50);
/// Time beyond the time limit in which the launcher ends everything: SIGTERM, SIGKILL, the reading
/// of the output.
const TIME_TO_END: Duration = Duration::from_secs(10);

/// Starts the command under each layout, and adds what was seen to `facts.load`.
pub(crate) fn test_layouts(
    options: &LayoutOptions,
    probe: &ProbeOptions,
    facts: &mut Facts,
    interrupt: &Interrupt,
    on_layout: &mut dyn FnMut(Layout),
) {
    let (gpus, refused) = usable_gpus(&options.gpus, options.share, facts);
    let is_busy = |end: &Reading<WorkerEnd>| matches!(end, Reading::Value(WorkerEnd::Busy(_)));
    let busy = refused.iter().filter(|(_, end)| is_busy(end));
    let every: Vec<String> = facts
        .gpus
        .iter()
        .filter_map(|gpu| gpu.uuid.value().cloned())
        .collect();
    let mut seen = LayoutFacts {
        command: options
            .command
            .iter()
            .map(|it| it.to_string_lossy().into_owned())
            .collect(),
        time_limit_s: options.time_limit.as_secs_f64(),
        busy: busy.map(|(uuid, _)| uuid.clone()).collect(),
        runs: Vec::new(),
    };
    let mut view = View::start(probe, &every);
    let test = Test {
        options,
        probe,
        interrupt,
        gpus: &gpus,
        view: &view,
    };
    for layout in &options.layouts {
        if interrupt.signal().is_none() {
            on_layout(*layout);
            seen.runs.push(test.run(*layout));
        }
    }
    view.finish();
    facts.load.layouts = Some(Box::new(seen));
    facts.interrupted = facts.interrupted.take().or(interrupt.reason());
}

struct Test<'t> {
    options: &'t LayoutOptions,
    probe: &'t ProbeOptions,
    interrupt: &'t Interrupt,
    gpus: &'t [Gpu],
    view: &'t View,
}

impl Test<'_> {
    fn run(&self, layout: Layout) -> LayoutRun {
        let usable: Vec<String> = self.gpus.iter().map(|(uuid, _)| uuid.clone()).collect();
        let given = match gpus_of(layout, &usable) {
            Ok(given) => given,
            Err(reason) => {
                let mut run = LayoutRun::of(layout, Vec::new());
                run.skipped = Some(reason);
                return run;
            }
        };
        let mut run = LayoutRun::of(layout, given);
        match self.visible_devices(&run.given) {
            Ok(value) => run.visible_devices = value,
            Err(reason) => {
                run.skipped = Some(reason);
                return run;
            }
        }
        self.view.await_round(self.interrupt);
        let before = self.view.gpus();
        let rounds = self.view.rounds();
        let sysroot = self.probe.sysroot.as_deref();
        let kills = oom_kills(sysroot);
        let segments = shared_memory(sysroot);
        let mut uses = Uses::since(before);
        self.launch(&mut run, &mut uses);
        run.rounds = self.view.rounds().saturating_sub(rounds);
        run.view_trouble = self.view.trouble();
        run.oom_kills = more_kills(&kills, oom_kills(sysroot));
        if let (Some(then), Some(now)) = (segments, shared_memory(sysroot)) {
            run.shared_memory_left = now.difference(&then).cloned().collect();
        }
        self.await_free(&mut uses);
        run.gpus = uses.found;
        run
    }

    fn visible_devices(&self, given: &[String]) -> Result<String, String> {
        let devices = given.iter().filter_map(|uuid| {
            let (_, gpu) = self.gpus.iter().find(|(it, _)| it == uuid)?;
            Some(device_to_use(gpu, uuid))
        });
        let devices: Result<Vec<&str>, String> = devices.collect();
        devices.map(|it| it.join(","))
    }

    fn launch(&self, run: &mut LayoutRun, uses: &mut Uses) {
        let program = worker_program(self.probe.worker_program.as_ref());
        let limit = self.options.time_limit;
        let mut arguments: Vec<OsString> = vec!["worker".into(), "launch".into()];
        arguments.extend(["--limit-s".into(), limit.as_secs_f64().to_string().into()]);
        arguments.push("--".into());
        arguments.extend(self.options.command.iter().cloned());
        match WorkerProcess::start(&program, &arguments, &variables(&run.visible_devices)) {
            Ok(launcher) => self.follow(launcher, run, uses),
            Err(error) => {
                run.end = Reading::NotRead(format!("cannot start {}: {error}", program.display()));
            }
        }
    }

    fn follow(&self, mut launcher: WorkerProcess, run: &mut LayoutRun, uses: &mut Uses) {
        let root = launcher.pid();
        let uses = RefCell::new(uses);
        let look = || uses.borrow_mut().look(&self.view.gpus(), root);
        let order = || {
            look();
            match self.interrupt.signal() {
                Some(_) => Order::Stop(TIME_TO_RECOVER),
                None => Order::Continue,
            }
        };
        let (mut leader, mut ended) = (None, None);
        let mut hear = |message| match message {
            LaunchMessage::Started { pid } => {
                leader = process_stat::start_ticks(pid).map(|it| (pid, it));
                Heard::Part
            }
            LaunchMessage::Ended(it) => {
                look();
                ended = Some(*it);
                Heard::Everything
            }
        };
        let silence = self.options.time_limit.saturating_add(TIME_TO_END);
        let deaf = Interrupt::default();
        listener::follow(&mut launcher, silence, &deaf, &order, &mut hear);
        launcher.finish(TIME_TO_RECOVER);
        if let Some(launched) = ended {
            take(launched, run);
            return;
        }
        if let Some((pid, started)) = leader {
            kill_orphans(pid, started);
        }
        let reason = "the process that follows the command ended without a report";
        run.end = Reading::NotRead(reason.to_owned());
    }

    /// Until the memory is as before, or the time limit is over.
    fn await_free(&self, uses: &mut Uses) {
        let limit = if self.interrupt.signal().is_some() {
            TIME_TO_RECOVER_INTERRUPTED
        } else {
            TIME_TO_RECOVER
        };
        let deadline = Instant::now() + limit;
        self.view.await_round(self.interrupt);
        while uses.note_left(&self.view.gpus()) > MEMORY_TOLERANCE_BYTES
            && Instant::now() < deadline
        {
            std::thread::sleep(POLL);
        }
    }
}

/// `NVIDIA_VISIBLE_DEVICES` is read by container runtimes, `CUDA_DEVICE_ORDER` makes numbers those
/// of `nvidia-smi`.
fn variables(visible_devices: &str) -> [(&'static str, Option<String>); 3] {
    let for_containers = if visible_devices.is_empty() {
        "void"
    } else {
        visible_devices
    };
    [
        ("CUDA_VISIBLE_DEVICES", Some(visible_devices.to_owned())),
        ("NVIDIA_VISIBLE_DEVICES", Some(for_containers.to_owned())),
        ("CUDA_DEVICE_ORDER", Some("PCI_BUS_ID".to_owned())),
    ]
}

fn take(launched: Launched, run: &mut LayoutRun) {
    let Launched {
        end,
        seconds,
        stdout,
        stderr,
        output_bytes,
        messages,
        survivors,
    } = launched;
    run.end = Reading::Value(end);
    run.seconds = seconds;
    run.stdout = stdout;
    run.stderr = stderr;
    run.output_bytes = output_bytes;
    run.messages = messages;
    run.survivors = survivors;
}

/// Where the launcher itself was killed: the process group of the command, while its number is
/// still its own.
fn kill_orphans(pid: u32, started: u64) {
    if process_stat::start_ticks(pid) == Some(started)
        && let Some(group) = i32::try_from(pid).ok().and_then(Pid::from_raw)
    {
        let _ = kill_process_group(group, Signal::KILL);
    }
}

/// Who used the GPUs since the command was started.
struct Uses {
    before: BTreeMap<String, GpuUse>,
    /// Processes that are of the command, or are not. One that ended before its parents were read
    /// is not known yet.
    of_command: BTreeMap<u32, bool>,
    found: BTreeMap<String, LayoutGpuUse>,
}

impl Uses {
    fn since(before: BTreeMap<String, GpuUse>) -> Self {
        let found = before
            .keys()
            .map(|it| (it.clone(), LayoutGpuUse::default()));
        Self {
            found: found.collect(),
            of_command: BTreeMap::new(),
            before,
        }
    }

    fn look(&mut self, now: &BTreeMap<String, GpuUse>, root: u32) {
        for (uuid, gpu) in now {
            let then = self.before.get(uuid).cloned().unwrap_or_default();
            let old = then.pids.clone().unwrap_or_default();
            let pids: BTreeSet<u32> = gpu.pids.clone().unwrap_or_default();
            let found = self.found.entry(uuid.clone()).or_default();
            found.peak_bytes = found.peak_bytes.max(growth(&then, gpu).unwrap_or_default());
            for pid in pids.difference(&old) {
                match ownership(&mut self.of_command, *pid, root) {
                    Some(true) => found.own.insert(*pid),
                    Some(false) => found.others.insert(*pid),
                    None => false,
                };
            }
        }
    }

    /// Returns the most that is left on a GPU.
    fn note_left(&mut self, now: &BTreeMap<String, GpuUse>) -> u64 {
        for (uuid, gpu) in now {
            let then = self.before.get(uuid).cloned().unwrap_or_default();
            let found = self.found.entry(uuid.clone()).or_default();
            found.left_bytes = growth(&then, gpu);
        }
        let left = self.found.values().filter_map(|it| it.left_bytes);
        left.max().unwrap_or_default()
    }
}

fn growth(then: &GpuUse, now: &GpuUse) -> Option<u64> {
    Some(
        now.memory_used_bytes?
            .saturating_sub(then.memory_used_bytes?),
    )
}

/// Whether a process is of the command's tree. One that is gone, or that this PID namespace does
/// not have, was of it where that was seen before.
fn ownership(known: &mut BTreeMap<u32, bool>, pid: u32, root: u32) -> Option<bool> {
    if let Some(known) = known.get(&pid) {
        return Some(*known);
    }
    process_stat::start_ticks(pid)?;
    let is_own = process_stat::descends_from(pid, root);
    // It may have ended between the two reads, and then has no parent any more.
    if !is_own && process_stat::parent(pid).is_none() {
        return None;
    }
    known.insert(pid, is_own);
    Some(is_own)
}

/// Processes of this control group that the kernel has ended for want of memory, so far.
fn oom_kills(sysroot: Option<&Path>) -> Reading<u64> {
    let root = sysroot.unwrap_or(Path::new("/"));
    let own = std::fs::read_to_string(root.join("proc/self/cgroup"));
    let own = match own {
        Ok(own) => own,
        Err(error) => return Reading::NotRead(format!("/proc/self/cgroup: {error}")),
    };
    let Some(file) = events_file(&own) else {
        return Reading::NotRead("no control group limits memory".to_owned());
    };
    match std::fs::read_to_string(root.join(&file)) {
        Ok(text) => kills_of(&text).map_or_else(
            || Reading::NotRead(format!("/{} has no oom_kill", file.display())),
            Reading::Value,
        ),
        Err(error) => Reading::NotRead(format!("/{}: {error}", file.display())),
    }
}

/// The file that counts, by `/proc/self/cgroup`: of version 2, or of the memory controller of
/// version 1.
fn events_file(own: &str) -> Option<PathBuf> {
    let group = |text: &str| PathBuf::from(text.trim_start_matches('/'));
    let of_memory = own.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let controllers = fields.next()?;
        let path = fields.next()?;
        controllers
            .split(',')
            .any(|it| it == "memory")
            .then_some(path)
    });
    if let Some(path) = of_memory {
        let folder = Path::new("sys/fs/cgroup/memory").join(group(path));
        return Some(folder.join("memory.oom_control"));
    }
    let path = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    Some(
        Path::new("sys/fs/cgroup")
            .join(group(path))
            .join("memory.events"),
    )
}

fn kills_of(text: &str) -> Option<u64> {
    let mut lines = text.lines();
    lines.find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

fn more_kills(before: &Reading<u64>, after: Reading<u64>) -> Reading<u64> {
    match (before, after) {
        (Reading::Value(before), Reading::Value(after)) => {
            Reading::Value(after.saturating_sub(*before))
        }
        (Reading::Value(_), other) => other,
        (other, _) => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_control_group_of_either_version_is_found() {
        let file = |text: &str| events_file(text).map(|it| it.display().to_string());
        assert_eq!(
            file("0::/system.slice/job\n").as_deref(),
            Some("sys/fs/cgroup/system.slice/job/memory.events")
        );
        assert_eq!(
            file("9:cpu,cpuacct:/a\n4:memory:/slurm/uid_1/job_2\n0::/b\n").as_deref(),
            Some("sys/fs/cgroup/memory/slurm/uid_1/job_2/memory.oom_control")
        );
        assert_eq!(file("nonsense"), None);
        assert_eq!(
            kills_of("low 0\noom 2\noom_kill 3\noom_group_kill 0\n"),
            Some(3)
        );
        assert_eq!(kills_of("oom 2\n"), None);
    }

    #[test]
    fn kills_before_the_command_are_not_its_own() {
        let more = more_kills(&Reading::Value(3), Reading::Value(4));
        assert_eq!(more, Reading::Value(1));
        let unread = more_kills(&Reading::NotRead("x".to_owned()), Reading::Value(4));
        assert_eq!(unread, Reading::NotRead("x".to_owned()));
    }

    fn gpu(used_mib: u64, pids: &[u32]) -> BTreeMap<String, GpuUse> {
        let gpu = GpuUse {
            memory_used_bytes: Some(used_mib << 20),
            memory_free_bytes: None,
            pids: Some(pids.iter().copied().collect()),
        };
        [("GPU-a".to_owned(), gpu)].into()
    }

    #[test]
    fn own_processes_others_and_those_from_before_are_kept_apart() {
        let own = std::process::id();
        let parent = std::os::unix::process::parent_id();
        let mut uses = Uses::since(gpu(10, &[1]));
        uses.look(&gpu(300, &[1, own, parent]), parent);
        uses.look(&gpu(100, &[1]), parent);
        assert_eq!(uses.note_left(&gpu(30, &[1])), 20 << 20);
        let expected = LayoutGpuUse {
            own: [own].into(),
            others: [parent].into(),
            peak_bytes: 290 << 20,
            left_bytes: Some(20 << 20),
        };
        assert_eq!(uses.found["GPU-a"], expected);
        // No process of this namespace.
        let mut known = BTreeMap::new();
        assert_eq!(ownership(&mut known, 4_000_001, parent), None);
    }
}
