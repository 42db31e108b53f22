//! `gpu-validator worker launch`: starts a user's command, follows it to its end, and ends
//! everything that it started.
//!
//! It is a process of its own because orphans of the command come to it (`PR_SET_CHILD_SUBREAPER`)
//! and stay in its tree, whatever process group or session they made for themselves. SIGTERM ends
//! the command; so does the end of the validator, for which the kernel sends that signal.

use std::collections::{BTreeSet, VecDeque};
use std::ffi::OsString;
use std::io::{Read, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitOptions, kill_process_group, pidfd_open,
    pidfd_send_signal, waitid, waitpid,
};
use serde::{Deserialize, Serialize};

use crate::process_stat;
use validator_core::environment::messages::explain_message;
use validator_core::facts::LayoutEnd;

const POLL: Duration = Duration::from_millis(20);
/// How much of the end of each stream is kept.
const OUTPUT_BYTES: usize = 8 * 1024;
/// A longer line is cut: messages are short.
const LINE_BYTES: usize = 4 * 1024;
/// Lines with a known cause that are kept, and how long each may be.
const MESSAGES_MAXIMUM: usize = 16;
const MESSAGE_CHARACTERS: usize = 400;
/// Time in which what the command started ends by itself after it.
// Python's resource tracker and the workers of DataLoader end when their pipes close.
const TIME_TO_FOLLOW: Duration = Duration::from_secs(1);
/// Time between SIGTERM and SIGKILL.
const TIME_TO_TERMINATE: Duration = Duration::from_secs(2);
/// The same where the validator is stopped, which may take a second in all.
const TIME_TO_TERMINATE_INTERRUPTED: Duration = Duration::from_millis(200);
/// Time in which a killed process disappears, unless a driver call keeps it.
const DEATH_DEADLINE: Duration = Duration::from_secs(2);
/// Time in which the streams of ended processes are read to their ends.
const READERS_DEADLINE: Duration = Duration::from_millis(500);

/// One line on standard output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum LaunchMessage {
    Started { pid: u32 },
    Ended(Box<Launched>),
}

/// The command after its end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Launched {
    pub(crate) end: LayoutEnd,
    pub(crate) seconds: f64,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) output_bytes: u64,
    pub(crate) messages: Vec<String>,
    pub(crate) survivors: u32,
}

/// Runs the command for this time at most.
pub(crate) fn run_launcher(limit: Duration, command: &[OsString]) {
    let stop = Arc::new(AtomicBool::new(false));
    // Without either the time limit of the parent is left.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&stop));
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::TERM));
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    let began = Instant::now();
    let launched = match start(command) {
        Ok(mut launch) => {
            if let Err(error) = launch.read_streams() {
                // Not the command's failure: without a report it counts as not tested.
                eprintln!("{error}");
                launch.end_all(Duration::ZERO);
                return;
            }
            send(&LaunchMessage::Started {
                pid: launch.child.id(),
            });
            launch.follow(limit, &stop)
        }
        Err(reason) => Launched {
            end: LayoutEnd::NotStarted { reason },
            seconds: began.elapsed().as_secs_f64(),
            stdout: String::new(),
            stderr: String::new(),
            output_bytes: 0,
            messages: Vec::new(),
            survivors: 0,
        },
    };
    send(&LaunchMessage::Ended(Box::new(launched)));
}

/// Where there is no reader any more, the processes have been ended all the same.
fn send(message: &LaunchMessage) {
    if let Ok(mut line) = serde_json::to_vec(message) {
        line.push(b'\n');
        let mut stdout = std::io::stdout().lock();
        let _ = stdout.write_all(&line).and_then(|()| stdout.flush());
    }
}

/// What was read of a stream.
#[derive(Default)]
struct Stream {
    tail: VecDeque<u8>,
    bytes: u64,
}

impl Stream {
    fn text(&self) -> String {
        let bytes: Vec<u8> = self.tail.iter().copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// The first line of each known cause, in the order of their coming.
#[derive(Default)]
struct Messages {
    ids: BTreeSet<&'static str>,
    lines: Vec<String>,
}

impl Messages {
    fn take(&mut self, line: &[u8]) {
        if self.lines.len() >= MESSAGES_MAXIMUM {
            return;
        }
        let line = String::from_utf8_lossy(line);
        let Some(message) = explain_message(&line) else {
            return;
        };
        if self.ids.insert(&message.id) {
            let line = line.trim().chars().take(MESSAGE_CHARACTERS).collect();
            self.lines.push(line);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A command that runs.
struct Launch {
    child: Child,
    began: Instant,
    stdout: Arc<Mutex<Stream>>,
    stderr: Arc<Mutex<Stream>>,
    messages: Arc<Mutex<Messages>>,
    readers: Vec<JoinHandle<()>>,
}

fn start(command: &[OsString]) -> Result<Launch, String> {
    let (program, arguments) = command.split_first().ok_or("no command")?;
    let in_words = |error: std::io::Error| format!("{}: {error}", program.display());
    let child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(in_words)?;
    Ok(Launch {
        began: Instant::now(),
        stdout: Arc::default(),
        stderr: Arc::default(),
        messages: Arc::default(),
        readers: Vec::new(),
        child,
    })
}

fn keep(mut from: impl Read, stream: &Mutex<Stream>, messages: &Mutex<Messages>) {
    let mut buffer = [0; 8192];
    let mut line = Vec::new();
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let bytes = buffer.get(..count).unwrap_or_default();
        {
            let mut stream = lock(stream);
            stream.bytes += count as u64;
            stream.tail.extend(bytes);
            let excess = stream.tail.len().saturating_sub(OUTPUT_BYTES);
            stream.tail.drain(..excess);
        }
        for byte in bytes {
            if matches!(byte, b'\n' | b'\r') {
                lock(messages).take(&line);
                line.clear();
            } else if line.len() < LINE_BYTES {
                line.push(*byte);
            }
        }
    }
    lock(messages).take(&line);
}

impl Launch {
    /// Threads that read both streams to their ends, so that the command never waits for a reader.
    fn read_streams(&mut self) -> std::io::Result<()> {
        let stdout = self.child.stdout.take();
        let stderr = self.child.stderr.take();
        if let Some(from) = stdout {
            self.readers.push(self.reader(from, &self.stdout)?);
        }
        if let Some(from) = stderr {
            self.readers.push(self.reader(from, &self.stderr)?);
        }
        Ok(())
    }

    fn reader(
        &self,
        from: impl Read + Send + 'static,
        stream: &Arc<Mutex<Stream>>,
    ) -> std::io::Result<JoinHandle<()>> {
        let (stream, messages) = (Arc::clone(stream), Arc::clone(&self.messages));
        let purpose = "to read the command's output";
        crate::threads::spawn(purpose, move || keep(from, &stream, &messages))
    }

    fn follow(mut self, limit: Duration, stop: &AtomicBool) -> Launched {
        let deadline = self.began + limit;
        while !self.has_ended() && !stop.load(Ordering::Relaxed) && Instant::now() < deadline {
            std::thread::sleep(POLL);
        }
        let has_ended = self.has_ended();
        let seconds = self.began.elapsed().as_secs_f64();
        let survivors = if has_ended {
            self.await_followers(stop)
        } else {
            0
        };
        let patience = if stop.load(Ordering::Relaxed) {
            TIME_TO_TERMINATE_INTERRUPTED
        } else {
            TIME_TO_TERMINATE
        };
        self.end_all(patience);
        let status = self.child.try_wait().ok().flatten();
        let end = match status.filter(|_| has_ended) {
            Some(status) => match (status.code(), status.signal()) {
                (Some(status), _) => LayoutEnd::Exited { status },
                (None, signal) => LayoutEnd::Killed {
                    signal: signal.unwrap_or_default(),
                },
            },
            None => LayoutEnd::TimedOut { seconds },
        };
        let deadline = Instant::now() + READERS_DEADLINE;
        while self.readers.iter().any(|it| !it.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(POLL);
        }
        let (stdout, stderr) = (lock(&self.stdout), lock(&self.stderr));
        Launched {
            end,
            seconds,
            output_bytes: stdout.bytes + stderr.bytes,
            stdout: stdout.text(),
            stderr: stderr.text(),
            messages: lock(&self.messages).lines.clone(),
            survivors,
        }
    }

    fn leader(&self) -> Option<Pid> {
        i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)
    }

    /// It is left unreaped until everything has ended, so that the number of its group stays its
    /// own.
    fn has_ended(&self) -> bool {
        let Some(pid) = self.leader() else {
            return true;
        };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        !matches!(waitid(WaitId::Pid(pid), options), Ok(None))
    }

    /// Processes that outlive the command by more than a moment.
    fn await_followers(&self, stop: &AtomicBool) -> u32 {
        let deadline = Instant::now() + TIME_TO_FOLLOW;
        loop {
            let count = self.living().len();
            if count == 0 || Instant::now() >= deadline || stop.load(Ordering::Relaxed) {
                return u32::try_from(count).unwrap_or(u32::MAX);
            }
            std::thread::sleep(POLL);
        }
    }

    /// Processes of the tree that have not ended. Those orphans that have are reaped.
    fn living(&self) -> Vec<u32> {
        let leader = self.child.id();
        let own = std::process::id();
        let mut living = Vec::new();
        for pid in descendants(own) {
            if process_stat::field::<char>(pid, 3) != Some('Z') {
                living.push(pid);
            } else if pid != leader && process_stat::parent(pid) == Some(own) {
                let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
                let _ = pid.map(|it| waitpid(Some(it), WaitOptions::NOHANG));
            }
        }
        living
    }

    /// SIGTERM, then SIGKILL until nothing is left.
    fn end_all(&self, patience: Duration) {
        if self.living().is_empty() {
            return;
        }
        self.signal_all(Signal::TERM);
        let kill_at = Instant::now() + patience;
        while !self.living().is_empty() && Instant::now() < kill_at {
            std::thread::sleep(POLL);
        }
        let give_up_at = Instant::now() + DEATH_DEADLINE;
        while !self.living().is_empty() && Instant::now() < give_up_at {
            // A process may have forked since the last look.
            self.signal_all(Signal::KILL);
            std::thread::sleep(POLL);
        }
    }

    fn signal_all(&self, signal: Signal) {
        if let Some(group) = self.leader() {
            let _ = kill_process_group(group, signal);
        }
        for pid in self.living() {
            signal_descendant(pid, signal);
        }
    }
}

/// Through a descriptor of the process, which is looked at again once it is held: a number that
/// was reused meanwhile is not signalled.
fn signal_descendant(pid: u32, signal: Signal) {
    let Some(raw) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return;
    };
    if let Ok(process) = pidfd_open(raw, PidfdFlags::empty())
        && process_stat::descends_from(pid, std::process::id())
    {
        let _ = pidfd_send_signal(&process, signal);
    }
}

/// Children, their children, and so on.
fn descendants(of: u32) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|it| it.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| *pid != of && process_stat::descends_from(*pid, of))
        .collect()
}
