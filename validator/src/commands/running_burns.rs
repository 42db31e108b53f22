//! Burns that run on this machine: a file that describes each, and one lock for each GPU.
//!
//! A run file holds the process id and the time at which that process started, so that a process
//! which got the number of one that ended is never taken for it, and never signalled.

use std::fs::{File, TryLockError};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::owned_folder::OwnedFolder;
use crate::process_stat;
use validator_core::report::one_line;

/// A burn stops within a second, its reports take another; then it hangs.
const TIME_TO_STOP: Duration = Duration::from_secs(10);
/// Several burns may run at once on different GPUs, and `burn wait` returns the result of each.
const RESULTS_KEPT: usize = 64;
const POLL: Duration = Duration::from_millis(20);

/// A burn's description of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct RunningBurn {
    pub(super) pid: u32,
    /// Field 22 of `/proc/<pid>/stat`: clock ticks from boot to the start of the process.
    pub(super) started_ticks: u64,
    pub(super) gpus: Vec<String>,
    pub(super) duration_s: f64,
    /// A line for each GPU, as the burn showed them last.
    pub(super) progress: Vec<String>,
    /// The log of a burn in the background.
    pub(super) log: Option<PathBuf>,
}

/// The result of a burn that ended, kept until the next one starts in the background and while few
/// came after it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct EndedBurn {
    pub(super) pid: u32,
    /// As in [`RunningBurn`].
    pub(super) started_ticks: u64,
    /// RFC 3339, UTC.
    pub(super) ended_at: String,
    pub(super) exit_code: u8,
    /// The first line of its report.
    pub(super) answer: String,
    pub(super) log: Option<PathBuf>,
}

/// The folder of run files and locks. Only this user and root can write to it: `burn stop` signals
/// what its files name.
#[derive(Debug)]
pub(super) struct RuntimeFolder(OwnedFolder);

impl RuntimeFolder {
    pub(super) fn open() -> anyhow::Result<Self> {
        crate::runtime_folder::open().map(Self)
    }

    /// The log of a burn that is about to start in the background.
    fn log_name() -> String {
        format!("burn-of-{}.log", std::process::id())
    }

    fn names(&self) -> Vec<String> {
        let names = self.0.names().unwrap_or_default();
        let names = names.into_iter().filter_map(|it| it.into_string().ok());
        names.collect()
    }

    /// Removes the logs and results of burns that are over.
    fn remove_old_logs(&self) {
        let running = self.running();
        for name in self.names() {
            let is_log = name
                .strip_prefix("burn-of-")
                .is_some_and(|it| it.strip_suffix(".log").is_some());
            let path = self.0.path_of(&name);
            let is_over = is_result(&name);
            if (is_log || is_over) && !running.iter().any(|it| it.log.as_ref() == Some(&path)) {
                // Another command may have removed it already.
                let _ = self.0.remove(name.as_ref());
            }
        }
    }

    /// The process whose run file this is, by the file's name.
    fn pid_of(name: &str) -> Option<u32> {
        let number = name.strip_prefix("burn-")?.strip_suffix(".json")?;
        number.parse().ok()
    }

    /// Burns whose process is alive. Files of others are removed.
    pub(super) fn running(&self) -> Vec<RunningBurn> {
        let mut burns = Vec::new();
        for name in self.names() {
            let Some(pid) = Self::pid_of(&name) else {
                continue;
            };
            let Ok(text) = self.0.read(name.as_ref()) else {
                continue;
            };
            // A file describes the process in its name, and no other.
            let burn = serde_json::from_slice::<RunningBurn>(&text).ok();
            let Some(burn) = burn.filter(|it| it.pid == pid) else {
                continue;
            };
            if burn.is_alive() {
                burns.push(burn);
            } else {
                // Another command may have removed it already.
                let _ = self.0.remove(name.as_ref());
            }
        }
        burns.sort_by_key(|it| it.pid);
        burns
    }

    /// Results of burns that ended, the last one first.
    fn ended(&self) -> Vec<EndedBurn> {
        let names = self.names().into_iter();
        let results = names.filter(|it| is_result(it));
        let texts = results.filter_map(|it| self.0.read(it.as_ref()).ok());
        let mut ended: Vec<EndedBurn> = texts
            .filter_map(|it| serde_json::from_slice(&it).ok())
            .collect();
        ended.sort_by(|one, other| other.ended_at.cmp(&one.ended_at));
        ended
    }

    pub(super) fn last_ended(&self) -> Option<EndedBurn> {
        self.ended().into_iter().next()
    }

    /// The result of this burn, once it ended; `None` where it was killed.
    pub(super) fn result_of(&self, burn: &RunningBurn) -> Option<EndedBurn> {
        let is_it = |it: &EndedBurn| it.pid == burn.pid && it.started_ticks == burn.started_ticks;
        self.ended().into_iter().find(is_it)
    }

    /// Takes the lock of each GPU, or returns its holder. Locks go with the process, however it
    /// ends.
    pub(super) fn lock(&self, gpus: &[String]) -> anyhow::Result<Vec<File>> {
        gpus.iter().map(|uuid| self.lock_one(uuid)).collect()
    }

    fn lock_one(&self, uuid: &str) -> anyhow::Result<File> {
        // The UUID is the driver's word and becomes the name of a file.
        let plain = |it: u8| it.is_ascii_alphanumeric() || it == b'-';
        if uuid.is_empty() || !uuid.bytes().all(plain) {
            bail!("`{}` is not the UUID of a GPU", one_line(uuid));
        }
        let name = format!("{uuid}.lock");
        let path = self.0.path_of(&name);
        let file = self
            .0
            .open_lock(name.as_ref())
            .with_context(|| format!("cannot open {}", path.display()))?;
        match file.try_lock() {
            Ok(()) => Ok(file),
            Err(TryLockError::WouldBlock) => {
                let owner = self
                    .running()
                    .into_iter()
                    .find(|it| it.gpus.contains(&uuid.to_owned()));
                Err(already_burned(uuid, owner.as_ref()).into())
            }
            Err(TryLockError::Error(error)) => {
                Err(error).with_context(|| format!("cannot lock {}", path.display()))
            }
        }
    }

    /// Publishes this process's burn until the value is dropped.
    pub(super) fn announce(
        &self,
        gpus: Vec<String>,
        duration: Duration,
        log: Option<PathBuf>,
    ) -> anyhow::Result<Announcement<'_>> {
        let pid = std::process::id();
        let announcement = Announcement {
            folder: self,
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

/// Another burn has a GPU: busy, which is neither bad input nor a broken GPU.
#[derive(Debug)]
pub(crate) struct AlreadyBurned(String);

impl std::fmt::Display for AlreadyBurned {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for AlreadyBurned {}

/// `GPU-… is burned by process 4711 already; …`.
pub(super) fn already_burned(uuid: &str, owner: Option<&RunningBurn>) -> AlreadyBurned {
    let by = owner.map_or(String::new(), |it| format!(" by process {}", it.pid));
    AlreadyBurned(format!(
        "{uuid} is burned{by} already; see gpu-validator burn status, gpu-validator burn stop"
    ))
}

/// The run file of this process's burn.
pub(super) struct Announcement<'f> {
    folder: &'f RuntimeFolder,
    burn: RunningBurn,
    written: Option<Instant>,
}

impl Announcement<'_> {
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

    /// Keeps the result for `burn status` and `burn wait`.
    pub(super) fn ended(&self, exit_code: u8, answer: &str) {
        let ended = EndedBurn {
            pid: self.burn.pid,
            started_ticks: self.burn.started_ticks,
            ended_at: jiff::Timestamp::now()
                .strftime("%Y-%m-%dT%H:%M:%S%.3fZ")
                .to_string(),
            exit_code,
            answer: answer.to_owned(),
            log: self.burn.log.clone(),
        };
        let name = format!("ended-{}.json", ended.pid);
        let written = serde_json::to_vec(&ended)
            .map_err(std::io::Error::from)
            .and_then(|text| self.folder.0.write(name.as_ref(), &text));
        if let Err(error) = written {
            super::terminal::to_stderr(&format!(
                "warning: the result cannot be kept for gpu-validator burn status: {error}\n"
            ));
        }
        for old in self.folder.ended().iter().skip(RESULTS_KEPT) {
            let _ = self
                .folder
                .0
                .remove(format!("ended-{}.json", old.pid).as_ref());
        }
    }

    fn write(&self) -> anyhow::Result<()> {
        let text = serde_json::to_vec(&self.burn)?;
        let name = self.name();
        self.folder
            .0
            .write(name.as_ref(), &text)
            .with_context(|| format!("cannot write {}", self.folder.0.path_of(&name).display()))
    }

    fn name(&self) -> String {
        format!("burn-{}.json", self.burn.pid)
    }
}

impl Drop for Announcement<'_> {
    fn drop(&mut self) {
        // A file that is left speaks of a process that is gone, and is removed by the next command.
        let _ = self.folder.0.remove(self.name().as_ref());
    }
}

/// A run file, as [`crate::fuzzing`] makes it: one that describes no process by its start is none.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn read_any(bytes: &[u8]) {
    if let Ok(burn) = serde_json::from_slice::<RunningBurn>(bytes) {
        let _ = burn.is_alive();
    }
    let _ = serde_json::from_slice::<EndedBurn>(bytes);
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

fn is_result(name: &str) -> bool {
    name.strip_prefix("ended-")
        .is_some_and(|it| it.strip_suffix(".json").is_some())
}

impl RunningBurn {
    /// Returns when the process is gone, however long that takes.
    pub(super) fn wait(&self) {
        while self.is_alive() {
            std::thread::sleep(POLL);
        }
    }

    /// The process is there, and it is the one that wrote the file.
    fn is_alive(&self) -> bool {
        started_ticks(self.pid) == Some(self.started_ticks)
    }

    /// A handle by which only this process can be signalled, whatever becomes of its number.
    fn handle(&self) -> Option<OwnedFd> {
        let pid = Pid::from_raw(i32::try_from(self.pid).ok()?)?;
        let handle = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // Read after the handle was taken: the number can no longer change hands unseen.
        self.is_alive().then_some(handle)
    }

    /// Signals it to stop and waits until it is gone, with its workers and their memory.
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

/// Stops the process with this number and start, and returns how it ended.
pub(super) fn stop_process(pid: u32, started_ticks: u64) -> anyhow::Result<&'static str> {
    let process = RunningBurn {
        pid,
        started_ticks,
        gpus: Vec::new(),
        duration_s: 0.0,
        progress: Vec::new(),
        log: None,
    };
    Ok(match process.stop()? {
        Stopped::Ended => "stopped",
        Stopped::Killed => "did not stop and was killed",
        Stopped::NotThere => "was over already",
    })
}

/// When a process started, in clock ticks since boot; `None` where there is none, or only a zombie.
fn started_ticks(pid: u32) -> Option<u64> {
    let state: char = process_stat::field(pid, 3)?;
    process_stat::start_ticks(pid).filter(|_| state != 'Z')
}

/// Starts this program again with `arguments` in the background, and waits until its burn began or
/// it ended.
pub(super) fn start_in_background(
    folder: &RuntimeFolder,
    arguments: impl IntoIterator<Item = std::ffi::OsString>,
) -> anyhow::Result<Result<RunningBurn, (Option<i32>, String)>> {
    use std::process::{Command, Stdio};
    folder.remove_old_logs();
    let name = RuntimeFolder::log_name();
    let log = folder.0.path_of(&name);
    let output = folder
        .0
        .create_file(name.as_ref())
        .with_context(|| format!("cannot write {}", log.display()))?;
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
            let said = folder.0.read(name.as_ref()).unwrap_or_default();
            let said = String::from_utf8_lossy(&said).into_owned();
            let _ = folder.0.remove(name.as_ref());
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
        let folder = crate::runtime_folder::make(&temporary.path().join("run"))
            .map(RuntimeFolder)
            .expect("made");
        (temporary, folder)
    }

    fn announce<'f>(folder: &'f RuntimeFolder, gpu: &str) -> Announcement<'f> {
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
    fn the_result_of_a_burn_is_kept_and_not_taken_for_that_of_another_process() {
        let (_temporary, folder) = folder();
        let announcement = announce(&folder, "GPU-a");
        announcement.ended(1, "FAIL: GPU 1");
        let burn = folder.running().remove(0);
        drop(announcement);
        assert_eq!(folder.running(), []);
        let last = folder.last_ended().expect("a result");
        assert_eq!((last.exit_code, last.answer.as_str()), (1, "FAIL: GPU 1"));
        assert_eq!(folder.result_of(&burn), Some(last));
        let later = RunningBurn {
            started_ticks: burn.started_ticks + 1,
            ..burn
        };
        assert_eq!(folder.result_of(&later), None);
        folder.remove_old_logs();
        assert_eq!(folder.last_ended(), None);
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
        let path = folder.0.path_of(format!("burn-{}.json", burn.pid));
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
        // What another test starts at this moment has the locks, too, until it becomes a program of
        // its own.
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
