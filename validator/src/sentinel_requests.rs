//! The files by which a sentinel, its commands and validations speak to each other, in the runtime
//! folder.
//!
//! - `sentinel.lock`: held by the sentinel; the kernel releases it however the sentinel ends
//! - `sentinel.json`: its status
//! - `sentinel-pause`: `sentinel pause`; UUIDs, one a line, or nothing for all GPUs; it holds until
//!   `sentinel resume`
//! - `no-sentinel`: the administrator's opt-out, in the same form
//! - `sentinel-claim-PID.json`: a validation that works or reads GPUs; it holds for as long as that
//!   process lives

use std::ffi::OsStr;
use std::fs::File;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};
use validator_core::sentinel::status::Status;

use crate::owned_folder::OwnedFolder;
use crate::process_stat::start_ticks;

const LOCK: &str = "sentinel.lock";
const STATUS: &str = "sentinel.json";
const PAUSE: &str = "sentinel-pause";
const OPT_OUT: &str = "no-sentinel";
const CLAIM_PREFIX: &str = "sentinel-claim-";
const CLAIM_SUFFIX: &str = ".json";
/// A validation goes on after this, though the sentinel has not yielded; it reports what it finds.
const CLAIM_PATIENCE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(10);

/// GPUs by UUID; none stands for all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Named(pub(crate) Vec<String>);

impl Named {
    fn of(text: &[u8]) -> Self {
        let text = String::from_utf8_lossy(text);
        let lines = text.lines().map(str::trim).filter(|it| !it.is_empty());
        Self(lines.map(str::to_owned).collect())
    }

    pub(crate) fn has(&self, uuid: &str) -> bool {
        self.0.is_empty() || self.0.iter().any(|it| it.eq_ignore_ascii_case(uuid))
    }
}

/// What is requested at the moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Requests {
    pub(crate) paused: Option<Named>,
    pub(crate) opted_out: Option<Named>,
    /// The process that validates.
    pub(crate) validation: Option<u32>,
}

#[derive(Debug, Serialize, Deserialize)]
struct ClaimFile {
    pid: u32,
    started_ticks: u64,
}

impl Requests {
    pub(crate) fn read(folder: &OwnedFolder) -> Self {
        // A request that is there and cannot be read holds for all GPUs.
        let named = |name: &str| match folder.contains(OsStr::new(name)) {
            Ok(false) => None,
            Ok(true) | Err(_) => Some(
                folder
                    .read(OsStr::new(name))
                    .map_or_else(|_| Named::default(), |it| Named::of(&it)),
            ),
        };
        let files = folder.names().unwrap_or_default();
        let claims = files.iter().filter_map(|it| it.to_str());
        let claims = claims.filter(|it| it.starts_with(CLAIM_PREFIX) && it.ends_with(CLAIM_SUFFIX));
        let validation = claims
            .filter_map(|name| {
                let text = folder.read(OsStr::new(name)).ok()?;
                let claim: ClaimFile = serde_json::from_slice(&text).ok()?;
                let lives = start_ticks(claim.pid) == Some(claim.started_ticks);
                if !lives {
                    // Its process is gone, or another one has the number.
                    let _ = folder.remove(OsStr::new(name));
                }
                lives.then_some(claim.pid)
            })
            .min();
        Self {
            paused: named(PAUSE),
            opted_out: named(OPT_OUT),
            validation,
        }
    }
}

/// Takes the lock of this machine's sentinel, or returns why it is taken.
pub(crate) fn lock(folder: &OwnedFolder) -> anyhow::Result<File> {
    let path = folder.path_of(LOCK);
    let file = folder
        .open_lock(OsStr::new(LOCK))
        .with_context(|| format!("cannot open {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => {
            let by = running(folder).map_or(String::new(), |it| format!(": process {}", it.pid));
            bail!("a sentinel runs on this machine already{by}")
        }
        Err(std::fs::TryLockError::Error(error)) => {
            Err(error).with_context(|| format!("cannot lock {}", path.display()))
        }
    }
}

/// Publishes the status in the runtime folder.
pub(crate) fn publish(folder: &OwnedFolder, status: &Status) -> std::io::Result<()> {
    folder.write(OsStr::new(STATUS), &serde_json::to_vec(status)?)
}

/// Removes the status of a sentinel that ends.
pub(crate) fn unpublish(folder: &OwnedFolder) {
    let _ = folder.remove(OsStr::new(STATUS));
}

/// The status of the sentinel that runs, if one does.
pub(crate) fn running(folder: &OwnedFolder) -> Option<Status> {
    let text = folder.read(OsStr::new(STATUS)).ok()?;
    let status: Status = serde_json::from_slice(&text).ok()?;
    (start_ticks(status.pid) == Some(status.started_ticks)).then_some(status)
}

/// Adds GPUs to the pause; none stands for all.
pub(crate) fn pause(folder: &OwnedFolder, gpus: &[String]) -> anyhow::Result<()> {
    let mut paused = Requests::read(folder).paused;
    let all = gpus.is_empty() || paused.as_ref().is_some_and(|it| it.0.is_empty());
    let mut named = paused.take().unwrap_or_default().0;
    if all {
        named.clear();
    } else {
        named.extend(gpus.iter().cloned());
        named.sort();
        named.dedup();
    }
    write_pause(folder, &named)
}

/// Takes GPUs out of the pause; none stands for all.
pub(crate) fn resume(folder: &OwnedFolder, gpus: &[String]) -> anyhow::Result<()> {
    let Some(Named(mut named)) = Requests::read(folder).paused else {
        return Ok(());
    };
    if !gpus.is_empty() && named.is_empty() {
        bail!("all GPUs are paused; `sentinel resume` without --gpu resumes all");
    }
    named.retain(|it| !gpus.contains(it));
    if gpus.is_empty() || named.is_empty() {
        let removed = folder.remove(OsStr::new(PAUSE));
        return removed
            .with_context(|| format!("cannot remove {}", folder.path_of(PAUSE).display()));
    }
    write_pause(folder, &named)
}

fn write_pause(folder: &OwnedFolder, named: &[String]) -> anyhow::Result<()> {
    let text = named.join("\n");
    folder
        .write(OsStr::new(PAUSE), text.as_bytes())
        .with_context(|| format!("cannot write {}", folder.path_of(PAUSE).display()))
}

/// Waits until the sentinel has no worker on these GPUs; none stands for all. False after
/// `patience`.
pub(crate) fn wait_until_clear(folder: &OwnedFolder, gpus: &Named, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    loop {
        let Some(status) = running(folder) else {
            return true;
        };
        let holds = |it: &validator_core::sentinel::status::GpuStatus| {
            gpus.has(&it.uuid) && (it.pid.is_some() || !it.withheld)
        };
        if !status.gpus.iter().any(holds) {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(POLL);
    }
}

/// A validation's claim to all GPUs, until it is dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    folder: OwnedFolder,
    name: String,
}

/// Has the sentinel of this machine yield to this process, where one runs.
pub(crate) fn claim() -> Option<Claim> {
    let folder = crate::runtime_folder::existing()?;
    running(&folder)?;
    let pid = std::process::id();
    let started_ticks = start_ticks(pid)?;
    let text = serde_json::to_vec(&ClaimFile { pid, started_ticks }).ok()?;
    let name = format!("{CLAIM_PREFIX}{pid}{CLAIM_SUFFIX}");
    // Where it cannot be written, the sentinel's detectors notice the validation as any other
    // process.
    folder.write(OsStr::new(&name), &text).ok()?;
    let claim = Claim { folder, name };
    wait_until_clear(&claim.folder, &Named::default(), CLAIM_PATIENCE);
    Some(claim)
}

impl Drop for Claim {
    fn drop(&mut self) {
        let _ = self.folder.remove(OsStr::new(&self.name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> (tempfile::TempDir, OwnedFolder) {
        let temporary = tempfile::tempdir().expect("a folder");
        let folder = OwnedFolder::create(&temporary.path().join("run"), 0o700).expect("made");
        (temporary, folder)
    }

    #[test]
    fn a_pause_holds_for_the_named_gpus_until_it_is_lifted() {
        let (_temporary, folder) = folder();
        let (a, b) = (["GPU-a".to_owned()], ["GPU-b".to_owned()]);
        pause(&folder, &a).expect("paused");
        pause(&folder, &b).expect("paused");
        let paused = Requests::read(&folder).paused.expect("paused");
        assert!(paused.has("GPU-a") && paused.has("gpu-B") && !paused.has("GPU-c"));
        resume(&folder, &a).expect("resumed");
        let paused = Requests::read(&folder).paused.expect("paused");
        assert!(!paused.has("GPU-a") && paused.has("GPU-b"));
        pause(&folder, &[]).expect("all");
        assert!(Requests::read(&folder).paused.expect("paused").has("GPU-c"));
        assert!(resume(&folder, &a).is_err());
        resume(&folder, &[]).expect("resumed");
        assert_eq!(Requests::read(&folder), Requests::default());
    }

    #[test]
    fn a_claim_holds_as_long_as_its_process_and_no_longer() {
        let (_temporary, folder) = folder();
        let pid = std::process::id();
        let ticks = start_ticks(pid).expect("this process");
        for (started_ticks, holds) in [(ticks, true), (ticks + 1, false)] {
            let claim = ClaimFile { pid, started_ticks };
            let text = serde_json::to_vec(&claim).expect("JSON");
            let name = format!("{CLAIM_PREFIX}{pid}{CLAIM_SUFFIX}");
            folder.write(OsStr::new(&name), &text).expect("written");
            let validation = Requests::read(&folder).validation;
            assert_eq!(validation, holds.then_some(pid));
            assert_eq!(folder.contains(OsStr::new(&name)).expect("told"), holds);
        }
    }

    #[test]
    fn an_opt_out_that_cannot_be_read_holds_for_all_gpus() {
        let (temporary, folder) = folder();
        let path = temporary.path().join("run").join(OPT_OUT);
        std::os::unix::fs::symlink("/nowhere", path).expect("a link");
        let opted_out = Requests::read(&folder).opted_out.expect("it holds");
        assert!(opted_out.has("GPU-a"));
    }

    #[test]
    fn a_second_sentinel_is_refused() {
        let (_temporary, folder) = folder();
        let held = lock(&folder).expect("free");
        let error = lock(&folder).expect_err("taken").to_string();
        assert_eq!(error, "a sentinel runs on this machine already");
        drop(held);
    }
}
