//! Burns that run on this machine: what each says of itself in a file, and one lock for each GPU.
//!
//! A run file holds the process id and the time at which that process started, so that a process which got the number of one
//! that ended is never taken for it, and never signalled.

use std::fs::{File, TryLockError};
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use super::report_files::write_whole;
use crate::process_stat;

/// Where the files lie; tests and simulated nodes have a folder of their own.
pub(super) const FOLDER_VARIABLE: &str = "GPU_VALIDATOR_RUNTIME_DIR";
/// The folder for files of running processes (File Hierarchy Standard), which only root may write to.
const SYSTEM_FOLDER: &str = "/run/gpu-validator";
/// A burn stops within a second, its reports take another; then it hangs.
const TIME_TO_STOP: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(20);

/// What a burn says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct RunningBurn {
    pub(super) pid: u32,
    /// Field 22 of `/proc/<pid>/stat`: clock ticks from boot to the start of the process.
    pub(super) started_ticks: u64,
    pub(super) gpus: Vec<String>,
    pub(super) duration_s: f64,
    /// A line for each GPU, as the burn showed them last.
    pub(super) progress: Vec<String>,
    /// Where a burn in the background writes what it says.
    pub(super) log: Option<PathBuf>,
}

/// The folder of run files and locks.
#[derive(Clone, Debug)]
pub(super) struct RuntimeFolder(PathBuf);

impl RuntimeFolder {
    /// `/run/gpu-validator` where it can be written to, else the user's own runtime folder, else one below `/tmp`.
    pub(super) fn open() -> anyhow::Result<Self> {
        if let Some(folder) = std::env::var_os(FOLDER_VARIABLE) {
            return Self::make(folder.into());
        }
        let user = rustix::process::geteuid();
        let own = if user.is_root() {
            Some(PathBuf::from(SYSTEM_FOLDER))
        } else {
            std::env::var_os("XDG_RUNTIME_DIR").map(|it| Path::new(&it).join("gpu-validator"))
        };
        // A container may have neither.
        if let Some(folder) = own.and_then(|it| Self::make(it).ok()) {
            return Ok(folder);
        }
        let name = format!("gpu-validator-{}", user.as_raw());
        let folder = Self::make(std::env::temp_dir().join(name))?;
        let found = std::fs::symlink_metadata(&folder.0)?;
        // Anybody may have made it there, or a link in its place.
        if !found.is_dir() || found.uid() != user.as_raw() {
            bail!("{} belongs to somebody else", folder.0.display());
        }
        Ok(folder)
    }

    fn make(folder: PathBuf) -> anyhow::Result<Self> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(Self(folder))
    }

    /// Where a burn that is about to start in the background writes what it says.
    pub(super) fn log(&self) -> PathBuf {
        self.0.join(format!("burn-of-{}.log", std::process::id()))
    }

    /// Removes what burns said that are over.
    fn remove_old_logs(&self) {
        let running = self.running();
        for entry in std::fs::read_dir(&self.0).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_log = name
                .strip_prefix("burn-of-")
                .is_some_and(|it| it.strip_suffix(".log").is_some());
            if is_log && !running.iter().any(|it| it.log.as_ref() == Some(&path)) {
                // Another command may have removed it already.
                let _ = std::fs::remove_file(path);
            }
        }
    }

    fn run_file(&self, pid: u32) -> PathBuf {
        self.0.join(format!("burn-{pid}.json"))
    }

    /// Burns whose process is alive. Files of others are removed.
    pub(super) fn running(&self) -> Vec<RunningBurn> {
        let entries = std::fs::read_dir(&self.0).into_iter().flatten().flatten();
        let mut burns: Vec<RunningBurn> = entries
            .filter(|entry| {
                let name = entry.file_name();
                let name = name.to_string_lossy();
                name.starts_with("burn-") && name.ends_with(".json")
            })
            .filter_map(|entry| {
                let text = std::fs::read(entry.path()).ok()?;
                let burn: RunningBurn = serde_json::from_slice(&text).ok()?;
                if burn.is_alive() {
                    return Some(burn);
                }
                // Another command may have removed it already.
                let _ = std::fs::remove_file(entry.path());
                None
            })
            .collect();
        burns.sort_by_key(|it| it.pid);
        burns
    }

    /// Takes the lock of each GPU, or says who has it. Locks go with the process, however it ends.
    pub(super) fn lock(&self, gpus: &[String]) -> anyhow::Result<Vec<File>> {
        gpus.iter().map(|uuid| self.lock_one(uuid)).collect()
    }

    fn lock_one(&self, uuid: &str) -> anyhow::Result<File> {
        let path = self.0.join(format!("{uuid}.lock"));
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        match file.try_lock() {
            Ok(()) => Ok(file),
            Err(TryLockError::WouldBlock) => {
                let owner = self
                    .running()
                    .into_iter()
                    .find(|it| it.gpus.contains(&uuid.to_owned()));
                bail!("{}", already_burned(uuid, owner.as_ref()))
            }
            Err(TryLockError::Error(error)) => {
                Err(error).with_context(|| format!("cannot lock {}", path.display()))
            }
        }
    }

    /// Tells others of this process's burn until the value is dropped.
    pub(super) fn announce(
        &self,
        gpus: Vec<String>,
        duration: Duration,
        log: Option<PathBuf>,
    ) -> anyhow::Result<Announcement> {
        let pid = std::process::id();
        let announcement = Announcement {
            path: self.run_file(pid),
            burn: RunningBurn {
                pid,
                started_ticks: started_ticks(pid)
                    .with_context(|| format!("cannot read /proc/{pid}/stat"))?,
                gpus,
                duration_s: duration.as_secs_f64(),
                progress: Vec::new(),
                log,
            },
            written: None,
        };
        announcement.write()?;
        Ok(announcement)
    }
}

/// `GPU-… is burned by process 4711 already; …`.
pub(super) fn already_burned(uuid: &str, owner: Option<&RunningBurn>) -> String {
    let by = owner.map_or(String::new(), |it| format!(" by process {}", it.pid));
    format!("{uuid} is burned{by} already; see gpu-validator burn status, gpu-validator burn stop")
}

/// The run file of this process's burn.
pub(super) struct Announcement {
    path: PathBuf,
    burn: RunningBurn,
    written: Option<Instant>,
}

impl Announcement {
    const PERIOD: Duration = Duration::from_secs(1);

    /// Notes the progress, at most once a second.
    pub(super) fn progress(&mut self, lines: impl FnOnce() -> Vec<String>) {
        if self.written.is_some_and(|it| it.elapsed() < Self::PERIOD) {
            return;
        }
        self.written = Some(Instant::now());
        self.burn.progress = lines();
        // The burn is worth more than what others see of it.
        let _ = self.write();
    }

    fn write(&self) -> anyhow::Result<()> {
        let text = serde_json::to_vec(&self.burn)?;
        write_whole(&self.path, &text)
            .with_context(|| format!("cannot write {}", self.path.display()))
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        // A file that is left speaks of a process that is gone, and is removed by the next command.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// How a burn answered the wish to stop.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stopped {
    /// It ended by itself and wrote its reports.
    Ended,
    /// It did not answer and was killed.
    Killed,
    /// It was gone, or another process has its number.
    NotThere,
}

impl RunningBurn {
    /// The process is there, and it is the one that wrote the file.
    fn is_alive(&self) -> bool {
        started_ticks(self.pid) == Some(self.started_ticks)
    }

    /// A handle by which only this process can be signalled, whatever becomes of its number.
    fn handle(&self) -> Option<OwnedFd> {
        let pid = Pid::from_raw(i32::try_from(self.pid).ok()?)?;
        let handle = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // Asked after the handle was taken: the number can no longer change hands unseen.
        self.is_alive().then_some(handle)
    }

    /// Asks it to stop and waits until it is gone, with its workers and their memory.
    pub(super) fn stop(&self) -> anyhow::Result<Stopped> {
        let Some(handle) = self.handle() else {
            return Ok(Stopped::NotThere);
        };
        pidfd_send_signal(&handle, Signal::TERM)
            .with_context(|| format!("cannot stop process {}", self.pid))?;
        if self.is_gone_within(TIME_TO_STOP) {
            return Ok(Stopped::Ended);
        }
        // Its workers die with it.
        pidfd_send_signal(&handle, Signal::KILL)
            .with_context(|| format!("cannot kill process {}", self.pid))?;
        if self.is_gone_within(TIME_TO_STOP) {
            return Ok(Stopped::Killed);
        }
        bail!(
            "process {} cannot be killed: a driver call keeps it in uninterruptible sleep",
            self.pid
        )
    }

    fn is_gone_within(&self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        while self.is_alive() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(POLL);
        }
        true
    }
}

/// When a process started, in clock ticks since boot; `None` where there is none, or only a zombie.
fn started_ticks(pid: u32) -> Option<u64> {
    let state: char = process_stat::field(pid, 3)?;
    process_stat::start_ticks(pid).filter(|_| state != 'Z')
}

/// Starts this program again with `arguments` in the background, and waits until its burn began or it ended.
pub(super) fn start_in_background(
    folder: &RuntimeFolder,
    arguments: impl IntoIterator<Item = std::ffi::OsString>,
) -> anyhow::Result<Result<RunningBurn, (Option<i32>, String)>> {
    use std::process::{Command, Stdio};
    folder.remove_old_logs();
    let log = folder.log();
    let mut output =
        File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
    output.flush()?;
    let mut child = Command::new(crate::worker::process::worker_program(None))
        .args(arguments)
        .arg("--in-background")
        .arg(&log)
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()
        .context("cannot start the burn in the background")?;
    loop {
        let began = folder.running().into_iter().find(|it| it.pid == child.id());
        if let Some(burn) = began {
            return Ok(Ok(burn));
        }
        if let Some(status) = child.try_wait()? {
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            let _ = std::fs::remove_file(&log);
            return Ok(Err((status.code(), said)));
        }
        std::thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> (tempfile::TempDir, RuntimeFolder) {
        let temporary = tempfile::tempdir().expect("a folder");
        let folder = RuntimeFolder::make(temporary.path().join("run")).expect("made");
        (temporary, folder)
    }

    fn announce(folder: &RuntimeFolder, gpu: &str) -> Announcement {
        folder
            .announce(vec![gpu.to_owned()], Duration::from_mins(1), None)
            .expect("announced")
    }

    #[test]
    fn a_burn_is_seen_while_it_runs_and_not_after() {
        let (_temporary, folder) = folder();
        let mut announcement = announce(&folder, "GPU-a");
        announcement.progress(|| vec!["GPU-a starting".to_owned()]);
        let running = folder.running();
        assert_eq!(running.len(), 1);
        assert_eq!(running[0].pid, std::process::id());
        assert_eq!(running[0].progress, ["GPU-a starting"]);
        drop(announcement);
        assert_eq!(folder.running(), []);
    }

    #[test]
    fn a_process_with_the_number_of_one_that_ended_is_never_signalled() {
        let (_temporary, folder) = folder();
        // A process of our own that would die of the signal.
        let mut other = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("sleep");
        let ticks = started_ticks(other.id()).expect("it runs");
        let burn = RunningBurn {
            pid: other.id(),
            started_ticks: ticks - 1,
            gpus: vec!["GPU-a".to_owned()],
            duration_s: 60.0,
            progress: Vec::new(),
            log: None,
        };
        assert_eq!(burn.stop().expect("no error"), Stopped::NotThere);
        assert!(other.try_wait().expect("asked").is_none(), "it still runs");
        let path = folder.run_file(burn.pid);
        std::fs::write(&path, serde_json::to_vec(&burn).expect("JSON")).expect("written");
        assert_eq!(folder.running(), []);
        assert!(
            !path.exists(),
            "the file of a process that is gone is removed"
        );
        let burn = RunningBurn {
            started_ticks: ticks,
            ..burn
        };
        assert_eq!(burn.stop().expect("no error"), Stopped::Ended);
        other.wait().expect("reaped");
    }

    #[test]
    fn a_gpu_is_burned_once() {
        let (_temporary, folder) = folder();
        let _announcement = announce(&folder, "GPU-a");
        let gpus = ["GPU-a".to_owned(), "GPU-b".to_owned()];
        let locks = folder.lock(&gpus).expect("free");
        let error = folder.lock(&gpus).expect_err("taken").to_string();
        let expected = format!(
            "GPU-a is burned by process {} already; ",
            std::process::id()
        );
        assert!(error.starts_with(&expected), "{error}");
        drop(locks);
        // What another test starts at this moment has the locks, too, until it becomes a program of its own.
        let deadline = Instant::now() + Duration::from_mins(1);
        while let Err(error) = folder.lock(&gpus) {
            assert!(Instant::now() < deadline, "{error}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_process_that_ended_has_no_start_even_before_its_parent_looks() {
        let mut child = std::process::Command::new("true").spawn().expect("true");
        let deadline = Instant::now() + Duration::from_mins(1);
        while started_ticks(child.id()).is_some() {
            assert!(Instant::now() < deadline, "`true` does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        // It was a zombie, and is nothing at all now.
        assert!(process_stat::start_ticks(child.id()).is_some());
        child.wait().expect("it ended");
        assert_eq!(started_ticks(child.id()), None);
    }
}
