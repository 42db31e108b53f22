//! Processes that a job left on its GPUs, and their end.
//!
//! Only processes of this program's own user are ended, and of those only what started during the
//! job and holds the driver. A pidfd makes sure that the process which is signalled is the one that
//! was looked at.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd as _, OwnedFd};
use rustix::process::{Pid, PidfdFlags, Signal, geteuid, pidfd_open, pidfd_send_signal};

use crate::process_stat;
use validator_core::facts::GpuFacts;

/// A process on a GPU, as `/proc` shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GpuUser {
    pub(crate) pid: u32,
    pub(crate) name: String,
    /// UUIDs of the GPUs that it uses.
    pub(crate) gpus: Vec<String>,
    pub(crate) memory_bytes: u64,
    /// What it is to this job.
    pub(crate) standing: Standing,
}

/// What a process on a GPU is to the job that ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It was there before the job.
    Older,
    /// The job left it, and it may be ended.
    Leftover,
    /// It started during the job and must not or cannot be ended, with the reason.
    #[default]
    NotOurs,
    /// It is the runner, the hook, or one that started them.
    Runner,
    /// It started during the job, and nothing shows that the number is that of a process which
    /// holds the driver.
    Unproven,
    /// It cannot be seen: in another PID namespace, or gone.
    Unseen,
}

/// How a process was ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// It was gone already.
    Gone,
    Terminated,
    Killed,
    /// It outlived SIGKILL, or could not be signalled, with the reason.
    Survived(String),
}

/// The processes on these GPUs, each once.
pub(crate) fn users_of<'a>(
    gpus: impl Iterator<Item = &'a GpuFacts>,
    job_began_ticks: u64,
) -> Vec<GpuUser> {
    let mut users: BTreeMap<u32, GpuUser> = BTreeMap::new();
    for gpu in gpus {
        let uuid = gpu.uuid.value().cloned().unwrap_or_default();
        for process in gpu.processes.value().into_iter().flatten() {
            let user = users.entry(process.pid).or_insert_with(|| GpuUser {
                pid: process.pid,
                name: process
                    .name
                    .clone()
                    .unwrap_or_else(|| "unknown name".to_owned()),
                ..GpuUser::default()
            });
            user.gpus.push(uuid.clone());
            user.memory_bytes += process.used_memory_bytes.unwrap_or(0);
        }
    }
    let runner = ancestors(std::process::id());
    users
        .into_values()
        .map(|user| GpuUser {
            standing: standing(user.pid, job_began_ticks, &runner),
            ..user
        })
        .collect()
}

fn standing(pid: u32, job_began_ticks: u64, runner: &[u32]) -> Standing {
    if runner.contains(&pid) {
        return Standing::Runner;
    }
    let (Some(ticks), Some(user)) = (process_stat::start_ticks(pid), effective_user(pid)) else {
        return Standing::Unseen;
    };
    if ticks < job_began_ticks {
        return Standing::Older;
    }
    if user != geteuid().as_raw() {
        return Standing::NotOurs;
    }
    if holds_driver(pid) {
        Standing::Leftover
    } else {
        Standing::Unproven
    }
}

/// The second number of the line `Uid:` in `/proc/PID/status`.
fn effective_user(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|it| it.strip_prefix("Uid:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// A process and all that it descends from.
fn ancestors(pid: u32) -> Vec<u32> {
    let mut line = vec![pid];
    while let Some(parent) = line.last().and_then(|pid| process_stat::parent(*pid)) {
        if parent == 0 || line.contains(&parent) {
            break;
        }
        line.push(parent);
    }
    line
}

/// Every program that computes has the driver library or its device in memory. In a container NVML
/// may give the numbers that processes have outside, and such a number may be another process's
/// here.
fn holds_driver(pid: u32) -> bool {
    let maps = std::fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
    let maps = String::from_utf8_lossy(&maps);
    ["/dev/nvidia", "libcuda.so", "libnvidia-"]
        .iter()
        .any(|it| maps.contains(it))
}

/// Ends the leftovers among `users`: SIGTERM to all, SIGKILL to those that are there after `grace`.
/// Returns what became of each, in their order.
pub(crate) fn end(
    users: &[GpuUser],
    job_began_ticks: u64,
    grace: Duration,
) -> Vec<(GpuUser, Ending)> {
    let mut ended: Vec<(GpuUser, Option<OwnedFd>, Ending)> = Vec::new();
    for user in users.iter().filter(|it| it.standing == Standing::Leftover) {
        let (process, ending) = match open(user.pid, job_began_ticks) {
            Ok(process) => match pidfd_send_signal(&process, Signal::TERM) {
                Ok(()) => (Some(process), Ending::Terminated),
                Err(error) => (None, refused(error)),
            },
            Err(ending) => (None, ending),
        };
        ended.push((user.clone(), process, ending));
    }
    let deadline = Instant::now() + grace;
    for (_, process, ending) in &mut ended {
        let Some(process) = process else { continue };
        if has_ended(process, deadline) {
            continue;
        }
        *ending = match pidfd_send_signal(&*process, Signal::KILL) {
            Ok(()) => Ending::Killed,
            Err(error) => refused(error),
        };
    }
    let deadline = Instant::now() + TIME_TO_DIE;
    for (_, process, ending) in &mut ended {
        let Some(process) = process else { continue };
        if *ending == Ending::Killed && !has_ended(process, deadline) {
            *ending = Ending::Survived(
                "it outlived SIGKILL: a driver call keeps it in the kernel".to_owned(),
            );
        }
    }
    ended
        .into_iter()
        .map(|(user, _, ending)| (user, ending))
        .collect()
}

/// How long a killed process may take to disappear: the driver frees its memory meanwhile.
const TIME_TO_DIE: Duration = Duration::from_secs(5);

/// A handle on the process, which is read once more after it: from here on its number cannot become
/// another's.
fn open(pid: u32, job_began_ticks: u64) -> Result<OwnedFd, Ending> {
    let number = i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or(Ending::Gone)?;
    let process = pidfd_open(number, PidfdFlags::empty()).map_err(refused)?;
    if standing(pid, job_began_ticks, &[]) == Standing::Leftover {
        Ok(process)
    } else {
        Err(Ending::Gone)
    }
}

fn refused(error: rustix::io::Errno) -> Ending {
    if error == rustix::io::Errno::SRCH {
        Ending::Gone
    } else {
        Ending::Survived(format!("it cannot be signalled: {error}"))
    }
}

/// Waits for the end of a process. A pidfd can be read from when the process has ended, although it
/// was not reaped.
fn has_ended(process: &OwnedFd, deadline: Instant) -> bool {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let mut wait = [PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN)];
        match poll(&mut wait, Some(&timeout)) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A process that reports when it is ready, then sleeps.
    fn child(script: &str) -> Child {
        use std::io::Read as _;
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdout(Stdio::piped())
            .spawn()
            .expect("sh starts");
        let mut ready = [0; 1];
        let stdout = child.stdout.as_mut().expect("piped");
        stdout.read_exact(&mut ready).expect("it is ready");
        child
    }

    fn leftover(pid: u32) -> GpuUser {
        GpuUser {
            pid,
            standing: Standing::Leftover,
            ..GpuUser::default()
        }
    }

    #[test]
    fn the_own_process_and_its_parents_are_the_runner() {
        let own = std::process::id();
        let line = ancestors(own);
        assert_eq!(line[0], own);
        assert!(line.contains(&std::os::unix::process::parent_id()));
        assert_eq!(standing(own, 0, &line), Standing::Runner);
    }

    #[test]
    fn a_process_is_older_by_its_start_and_unseen_without_one() {
        let own = std::process::id();
        let ticks = process_stat::start_ticks(own).expect("/proc is there");
        assert_eq!(standing(own, ticks + 1, &[]), Standing::Older);
        // This test holds no driver.
        assert_eq!(standing(own, ticks, &[]), Standing::Unproven);
        assert_eq!(standing(u32::MAX, 0, &[]), Standing::Unseen);
    }

    #[test]
    fn a_process_that_is_no_leftover_any_more_is_never_signalled() {
        // It holds no driver, so that the second look refuses it.
        let mut child = child("echo; exec sleep 60");
        let ended = end(&[leftover(child.id())], 0, Duration::ZERO);
        assert_eq!(ended[0].1, Ending::Gone);
        assert!(child.try_wait().expect("asked").is_none(), "it lives");
        child.kill().expect("killed");
        child.wait().expect("reaped");
    }

    #[test]
    fn an_end_is_seen_although_nobody_waited_for_the_process() {
        let mut child = child("echo; exec sleep 60");
        let pid = Pid::from_raw(i32::try_from(child.id()).expect("small")).expect("a pid");
        let handle = pidfd_open(pid, PidfdFlags::empty()).expect("opened");
        assert!(!has_ended(
            &handle,
            Instant::now() + Duration::from_millis(5)
        ));
        pidfd_send_signal(&handle, Signal::KILL).expect("signalled");
        assert!(has_ended(&handle, Instant::now() + Duration::from_secs(10)));
        child.wait().expect("reaped");
    }
}
