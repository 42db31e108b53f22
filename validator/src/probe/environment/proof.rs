//! Starting environments: one process for each environment and framework, and everything about how
//! it ended.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use serde::Deserialize;

use crate::probe::Interrupt;
use crate::probe::json::at;
use crate::worker::process::worker_program;
use validator_core::environment::installed::packages_of;
use validator_core::facts::{
    EnvironmentFacts, Framework, ProofEnd, ProofStep, PythonEnvironment, PythonProof, Reading,
};

const PROBE: &str = include_str!("probe.py");
/// Environments that are started although they were not named.
const UNNAMED_MAXIMUM: usize = 8;
/// How much of the end of the output is kept.
const OUTPUT_BYTES: usize = 8 * 1024;
const POLL: Duration = Duration::from_millis(10);
/// How long the readers of a dead process's output are waited for: a process that left the group
/// may hold the pipes.
const READERS_DEADLINE: Duration = Duration::from_millis(500);
/// How long a killed process may take to disappear.
const DEATH_DEADLINE: Duration = Duration::from_secs(2);

/// How far a proof may go.
#[derive(Clone, Debug)]
pub(crate) struct ProofLimits {
    pub(crate) time: Duration,
    pub(crate) resident_mib: u64,
    /// Rows and columns of the products.
    pub(crate) size: u32,
    pub(crate) in_parallel: usize,
    pub(crate) worker_program: Option<PathBuf>,
}

impl Default for ProofLimits {
    fn default() -> Self {
        Self {
            // Importing torch from a cold network disk takes a minute and more.
            time: Duration::from_mins(3),
            // torch with contexts on eight GPUs has some 10 GiB resident.
            resident_mib: 24 * 1024,
            size: 1024,
            in_parallel: 4,
            worker_program: None,
        }
    }
}

/// Starts every environment that is chosen: those that are named, and others with a GPU framework.
///
/// Below a sysroot only those are started that were named: the tree may be another machine's.
pub(crate) fn prove(
    facts: &mut EnvironmentFacts,
    is_this_machine: bool,
    limits: &ProofLimits,
    interrupt: &Interrupt,
) {
    let mut tasks: Vec<(usize, Framework, Owner)> = Vec::new();
    let mut unnamed = 0;
    for (index, environment) in facts.pythons.iter_mut().enumerate() {
        let frameworks = frameworks_of(environment);
        if frameworks.is_empty() {
            continue;
        }
        if !environment.named {
            if !is_this_machine {
                environment.not_started =
                    Some("it is in a tree that is not this machine's".to_owned());
                continue;
            }
            unnamed += 1;
            if unnamed > UNNAMED_MAXIMUM {
                environment.not_started = Some(format!(
                    "{UNNAMED_MAXIMUM} environments are started at most; name this one with --python or in the profile"
                ));
                continue;
            }
        }
        match owner_of(environment) {
            Ok(owner) => tasks.extend(frameworks.into_iter().map(|it| (index, it, owner))),
            Err(reason) => environment.not_started = Some(reason),
        }
    }
    let pythons = &facts.pythons;
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<(usize, PythonProof)>> = Mutex::default();
    crate::threads::in_parallel(limits.in_parallel.min(tasks.len()), || {
        while let Some((index, framework, owner)) = tasks.get(next.fetch_add(1, Ordering::Relaxed))
        {
            let Some(python) = pythons.get(*index) else {
                continue;
            };
            let proof = prove_one(python, *framework, *owner, limits, interrupt);
            let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
            results.push((*index, proof));
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|(index, proof)| (*index, proof.framework));
    for (index, proof) in results {
        if let Some(python) = facts.pythons.get_mut(index) {
            python.proofs.push(proof);
        }
    }
}

fn frameworks_of(environment: &PythonEnvironment) -> Vec<Framework> {
    let installed = |it: &Framework| !packages_of(environment, *it).is_empty();
    let has_gpu_code = |it: &Framework| {
        // A CPU build that was not named is a choice that needs no proof.
        environment.named
            || *it != Framework::Torch
            || environment
                .package("torch")
                .is_some_and(|it| it.cuda != Reading::NotSupported)
    };
    let frameworks: Vec<Framework> = Framework::OF_GPUS
        .into_iter()
        .filter(installed)
        .filter(has_gpu_code)
        .collect();
    if frameworks.is_empty() && environment.named {
        return vec![Framework::Interpreter];
    }
    frameworks
}

/// The user that a proof runs as; `None` is the validator's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner {
    user_and_group: Option<(u32, u32)>,
}

/// Whose code an environment is. Root runs a user's environment as that user, and one that every
/// user may change not at all.
fn owner_of(environment: &PythonEnvironment) -> Result<Owner, String> {
    let own = Owner {
        user_and_group: None,
    };
    if !rustix::process::geteuid().is_root() {
        return Ok(own);
    }
    let Reading::Value(interpreter) = &environment.interpreter else {
        return Ok(own);
    };
    let mut owners: Vec<(u32, u32)> = Vec::new();
    let folder = Path::new(interpreter)
        .parent()
        .unwrap_or(Path::new("/"))
        .to_owned();
    let prefix = PathBuf::from(&environment.prefix);
    let sites = environment.site_packages.iter().map(PathBuf::from);
    for path in [PathBuf::from(interpreter), folder, prefix]
        .into_iter()
        .chain(sites)
    {
        // The start itself reports what is absent.
        let Ok(metadata) = std::fs::metadata(&path) else {
            continue;
        };
        if metadata.mode() & 0o002 != 0 {
            return Err(format!(
                "{} is writable by every user, and root runs no such code",
                path.display()
            ));
        }
        let owner = (metadata.uid(), metadata.gid());
        if owner.0 != 0 && !owners.iter().any(|it| it.0 == owner.0) {
            owners.push(owner);
        }
    }
    match owners[..] {
        [] => Ok(own),
        [owner] => Ok(Owner {
            user_and_group: Some(owner),
        }),
        _ => Err("its files belong to several users, and root runs no such code".to_owned()),
    }
}

/// A line of the probe program.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Line {
    Begin {
        begin: String,
    },
    End {
        end: String,
        #[serde(default)]
        seconds: f64,
        #[serde(default)]
        error: Option<String>,
        #[serde(default)]
        skipped: Option<String>,
        #[serde(default)]
        results: BTreeMap<String, serde_json::Value>,
    },
}

fn prove_one(
    environment: &PythonEnvironment,
    framework: Framework,
    owner: Owner,
    limits: &ProofLimits,
    interrupt: &Interrupt,
) -> PythonProof {
    let begin = Instant::now();
    let mut proof = PythonProof {
        framework,
        user_id: owner.user_and_group.map(|(user, _)| user),
        unfinished_step: Some("start".to_owned()),
        ..PythonProof::default()
    };
    let interpreter = match &environment.interpreter {
        Reading::Value(interpreter) => interpreter,
        Reading::NotRead(reason) => {
            proof.end = ProofEnd::NotStarted(reason.clone());
            return proof;
        }
        Reading::NotSupported => return proof,
    };
    let home = match PrivateFolder::new(owner) {
        Ok(home) => home,
        Err(error) => {
            proof.end = ProofEnd::NotStarted(format!("no private folder could be made: {error}"));
            return proof;
        }
    };
    match start(
        environment,
        interpreter,
        framework,
        owner,
        limits,
        &home.path,
    ) {
        Ok(process) => process.follow(limits, interrupt, &mut proof),
        Err(error) => proof.end = ProofEnd::NotStarted(error.to_string()),
    }
    proof.duration_s = begin.elapsed().as_secs_f64();
    proof
}

/// What the interpreter writes (caches, compiled kernels) goes here and away with it.
struct PrivateFolder {
    path: PathBuf,
}

impl PrivateFolder {
    fn new(owner: Owner) -> std::io::Result<Self> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("gpu-validator-python-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::DirBuilder::new().mode(0o700).create(&path)?;
        let folder = Self { path };
        if let Some((user, group)) = owner.user_and_group {
            std::os::unix::fs::chown(&folder.path, Some(user), Some(group))?;
        }
        Ok(folder)
    }
}

impl Drop for PrivateFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

struct Process {
    child: Child,
    lines: Receiver<Line>,
    output: Arc<Mutex<VecDeque<u8>>>,
    readers_end: Receiver<()>,
}

fn start(
    environment: &PythonEnvironment,
    interpreter: &str,
    framework: Framework,
    owner: Owner,
    limits: &ProofLimits,
    home: &Path,
) -> std::io::Result<Process> {
    let program = worker_program(limits.worker_program.as_ref());
    let seconds = limits.time.as_secs_f64();
    let mut command = Command::new(program);
    command
        .arg0("gpu-validator")
        .arg("python-proof")
        .arg(interpreter)
        .arg(framework.name())
        .arg(limits.size.to_string())
        // The traceback of what hangs comes before the end.
        .arg((seconds * 0.9).to_string())
        .arg("--processor-time-s")
        // As many processors as a machine has may be busy for the whole time.
        .arg((limits.time.as_secs().max(1) * 64).to_string());
    if let Some((user, group)) = owner.user_and_group {
        command.args([
            "--user".to_owned(),
            user.to_string(),
            "--group".to_owned(),
            group.to_string(),
        ]);
    }
    command
        .env_clear()
        .envs(variables(environment, home))
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    let mut child = command.spawn()?;
    if let Some(mut input) = child.stdin.take() {
        // An interpreter that dies at once reads nothing; its end has the reason.
        let _ = input.write_all(PROBE.as_bytes());
    }
    let (send, lines) = channel();
    let (send_end, readers_end) = channel();
    let output = Arc::new(Mutex::new(VecDeque::new()));
    if let Err(error) = start_readers(&mut child, (send, send_end), &output) {
        // Nothing but the interpreter has started yet, which waits for the end of its input.
        let _ = child.kill();
        let _ = child.wait();
        return Err(error);
    }
    Ok(Process {
        child,
        lines,
        output,
        readers_end,
    })
}

/// Starts the threads that empty the pipes of `child`.
fn start_readers(
    child: &mut Child,
    (send, send_end): (Sender<Line>, Sender<()>),
    output: &Arc<Mutex<VecDeque<u8>>>,
) -> std::io::Result<()> {
    if let Some(stdout) = child.stdout.take() {
        let end = send_end.clone();
        crate::threads::spawn("to read standard output", move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if let Ok(line) = serde_json::from_str(&line)
                    && send.send(line).is_err()
                {
                    break;
                }
            }
            let _ = end.send(());
        })?;
    }
    if let Some(stderr) = child.stderr.take() {
        let tail = Arc::clone(output);
        crate::threads::spawn("to read standard error", move || {
            keep_tail(stderr, &tail);
            let _ = send_end.send(());
        })?;
    }
    Ok(())
}

fn keep_tail(mut from: impl Read, tail: &Mutex<VecDeque<u8>>) {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
        tail.extend(buffer.get(..count).unwrap_or_default());
        let excess = tail.len().saturating_sub(OUTPUT_BYTES);
        tail.drain(..excess);
    }
}

/// Variables of the process: few of the validator's own, those of the environment, caches in a
/// private folder.
fn variables(environment: &PythonEnvironment, home: &Path) -> Vec<(String, String)> {
    /// Prefixes and names that are handed on: what CUDA, its container runtime and the simulator
    /// read.
    const HANDED_ON: [&str; 5] = ["CUDA_", "NVIDIA_", "GPU_SIMULATOR", "LD_LIBRARY_PATH", "TZ"];
    let home = home.display().to_string();
    let mut variables: BTreeMap<String, String> = std::env::vars()
        .filter(|(name, _)| HANDED_ON.iter().any(|it| name.starts_with(it)))
        .collect();
    let path = std::env::var("PATH").unwrap_or_else(|_| "/usr/local/bin:/usr/bin:/bin".to_owned());
    let prefix = &environment.prefix;
    variables.insert("PATH".to_owned(), format!("{prefix}/bin:{path}"));
    for name in [
        "HOME",
        "TMPDIR",
        "XDG_CACHE_HOME",
        "TRITON_CACHE_DIR",
        "CUDA_CACHE_PATH",
        "TORCHINDUCTOR_CACHE_DIR",
        "MPLCONFIGDIR",
        "CUPY_CACHE_DIR",
    ] {
        variables.insert(name.to_owned(), home.clone());
    }
    for (name, value) in [
        ("LANG", "C.UTF-8"),
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
        ("TF_FORCE_GPU_ALLOW_GROWTH", "true"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("OMP_NUM_THREADS", "1"),
    ] {
        variables.insert(name.to_owned(), value.to_owned());
    }
    let state = std::fs::read_to_string(format!("{prefix}/conda-meta/state"));
    if Path::new(prefix).join("conda-meta").is_dir() {
        variables.insert("CONDA_PREFIX".to_owned(), prefix.clone());
        let state: serde_json::Value =
            serde_json::from_str(&state.unwrap_or_default()).unwrap_or_default();
        // What `conda env config vars set` keeps; scripts of activation are not run.
        for (name, value) in at(&state, "/env_vars").as_object().into_iter().flatten() {
            if let Some(value) = value.as_str() {
                variables.insert(name.clone(), value.to_owned());
            }
        }
    } else if Path::new(prefix).join("pyvenv.cfg").is_file() {
        variables.insert("VIRTUAL_ENV".to_owned(), prefix.clone());
    }
    variables.into_iter().collect()
}

impl Process {
    fn follow(mut self, limits: &ProofLimits, interrupt: &Interrupt, proof: &mut PythonProof) {
        let begin = Instant::now();
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let killed = loop {
            self.take_lines(proof);
            if has_ended(pid) {
                break None;
            }
            let resident = resident_mib(self.child.id());
            proof.resident_mib = proof.resident_mib.max(resident);
            if interrupt.reason().is_some() {
                break Some(ProofEnd::Stopped);
            }
            if resident > limits.resident_mib {
                break Some(ProofEnd::OutOfMemory(limits.resident_mib));
            }
            if begin.elapsed() > limits.time {
                break Some(ProofEnd::TimedOut(limits.time.as_secs()));
            }
            std::thread::sleep(POLL);
        };
        // The leader is not reaped yet, so that the group's number is still its own.
        if let Some(pid) = pid {
            let _ = kill_process_group(pid, Signal::KILL);
        }
        let ended = Instant::now();
        let status = loop {
            match self.child.try_wait() {
                Ok(Some(status)) => break Some(status),
                // A driver call in uninterruptible sleep is not waited for.
                Ok(None) if ended.elapsed() < DEATH_DEADLINE => std::thread::sleep(POLL),
                _ => break None,
            }
        };
        for _ in 0..2 {
            let _ = self.readers_end.recv_timeout(READERS_DEADLINE);
        }
        self.take_lines(proof);
        let own_end = status.map(|status| match (status.code(), status.signal()) {
            (Some(code), _) => ProofEnd::Exited(code),
            (None, signal) => ProofEnd::Signal(signal.unwrap_or_default()),
        });
        proof.end = killed.or(own_end).unwrap_or_default();
        let tail = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes: Vec<u8> = tail.iter().copied().collect();
        String::from_utf8_lossy(&bytes)
            .trim()
            .clone_into(&mut proof.output);
    }

    fn take_lines(&self, proof: &mut PythonProof) {
        while let Ok(line) = self.lines.try_recv() {
            match line {
                Line::Begin { begin } => proof.unfinished_step = Some(begin),
                Line::End {
                    end,
                    seconds,
                    error,
                    skipped,
                    results,
                } => {
                    proof.unfinished_step = None;
                    proof.steps.push(ProofStep {
                        name: end,
                        seconds,
                        error,
                        skipped,
                        results,
                    });
                }
            }
        }
    }
}

/// The process has ended and is left unreaped.
fn has_ended(pid: Option<Pid>) -> bool {
    let Some(pid) = pid else { return true };
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    !matches!(waitid(WaitId::Pid(pid), options), Ok(None))
}

/// The resident set by `/proc/PID/statm`, whose second number is in pages.
fn resident_mib(pid: u32) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages: u64 = statm
        .split(' ')
        .nth(1)
        .and_then(|it| it.parse().ok())
        .unwrap_or(0);
    (pages * rustix::param::page_size() as u64) >> 20
}
