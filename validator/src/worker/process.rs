//! A child process that may hang, crash or talk nonsense, as its parent sees it.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::own_processes::{self, ProcessKey};
use super::suspension::SuspensionWatch;
use crate::interrupt::Interrupt;
use validator_core::facts::WorkerEnd;
use validator_core::worker_id::WorkerId;

/// A line longer than this is not one of the protocol's; what is beyond is read and dropped.
const LONGEST_LINE_BYTES: u64 = 1 << 20;
/// Lines that wait to be taken; a child that talks faster than its parent listens waits, too.
const LINES_WAITING_MAXIMUM: usize = 64;
/// How much of the end of stderr is kept.
const STDERR_TAIL_BYTES: usize = 4 * 1024;
/// Poll interval of a wait for the run's stop.
const INTERRUPT_POLL: Duration = Duration::from_millis(20);
/// How long a killed child may take to disappear before it is given up as stuck in the kernel.
const DEATH_DEADLINE: Duration = Duration::from_secs(2);

/// Where programs of the machine are, on every distribution; NixOS has its own.
const SYSTEM_PATH: &str =
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/run/current-system/sw/bin";

/// The program that is started for `worker …`.
pub(crate) fn worker_program(configured: Option<&PathBuf>) -> PathBuf {
    configured.cloned().unwrap_or_else(|| {
        // The path is gone when the binary was replaced while it runs; the link still leads to this
        // one.
        std::env::current_exe()
            .ok()
            .filter(|path| path.exists())
            .unwrap_or_else(|| PathBuf::from("/proc/self/exe"))
    })
}

/// A running child in a process group of its own, with its output being read.
#[derive(Debug)]
pub(crate) struct WorkerProcess {
    child: Child,
    lines: Receiver<String>,
    stderr_tail: Arc<Mutex<VecDeque<u8>>>,
    stderr_reader: Option<JoinHandle<()>>,
    /// Of this process, since the child was started.
    suspension: SuspensionWatch,
    /// Its entry among this process's own, until it is gone.
    key: Option<ProcessKey>,
}

/// What a wait brought.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum WorkerEvent {
    /// A whole line of stdout, without its end.
    Line(String),
    /// stdout is closed: the child has ended, or will say no more.
    Closed,
    /// Nothing came in time.
    TimedOut,
    /// The run was stopped.
    Interrupted,
}

/// How a child ended, as the system reports it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ProcessEnd {
    Exited(i32),
    Killed(i32),
    /// It did not end although it was killed: a driver call keeps it in uninterruptible sleep. It
    /// is not reaped.
    Stuck,
}

/// What a process has in its environment that this program has not, and what it does not inherit
/// (`None`).
pub(crate) type Variables<'v> = [(&'v str, Option<String>)];

impl WorkerProcess {
    /// Starts a worker, `program` with `arguments`, under this program's own name wherever the file
    /// lies.
    pub(crate) fn start(
        program: &PathBuf,
        arguments: &[OsString],
        environment: &Variables<'_>,
    ) -> std::io::Result<Self> {
        let mut command = Command::new(program);
        command.arg0("gpu-validator").stdin(Stdio::null());
        Self::spawn(command, arguments, environment)
    }

    /// The same for a worker that gets orders on its standard input, which ends when that is
    /// dropped.
    pub(crate) fn start_with_input(
        program: &PathBuf,
        arguments: &[OsString],
        environment: &Variables<'_>,
    ) -> std::io::Result<(Self, Option<ChildStdin>)> {
        let mut command = Command::new(program);
        command.arg0("gpu-validator").stdin(Stdio::piped());
        let mut worker = Self::spawn(command, arguments, environment)?;
        let input = worker.child.stdin.take();
        Ok((worker, input))
    }

    /// Starts a program of the machine under its own name, by which some (`BusyBox`) know what to
    /// do.
    pub(crate) fn start_program(
        program: &str,
        arguments: &[OsString],
        environment: &Variables<'_>,
    ) -> std::io::Result<Self> {
        let mut command = Command::new(program);
        // Looked up there and nowhere else: the setter of PATH must not choose what root starts.
        command.stdin(Stdio::null()).env("PATH", SYSTEM_PATH);
        Self::spawn(command, arguments, environment)
    }

    fn spawn(
        mut command: Command,
        arguments: &[OsString],
        environment: &Variables<'_>,
    ) -> std::io::Result<Self> {
        for (name, value) in environment {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let mut child = command
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()?;
        let (sender, lines) = sync_channel(LINES_WAITING_MAXIMUM);
        let stderr_tail = Arc::new(Mutex::new(VecDeque::new()));
        let stderr_reader = match start_readers(&mut child, sender, &stderr_tail) {
            Ok(stderr_reader) => stderr_reader,
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(error);
            }
        };
        let key = own_processes::register(child.id(), None);
        Ok(Self {
            key,
            child,
            lines,
            stderr_tail,
            stderr_reader,
            suspension: SuspensionWatch::start(),
        })
    }

    /// Registers it as this worker.
    pub(crate) fn register_as(&mut self, id: WorkerId) {
        self.key = own_processes::register(self.child.id(), Some(id));
    }

    /// The process id, by which the GPUs' process lists know it.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The time by which this child is judged: it stands still while this process does. What the
    /// child wrote meanwhile is still to be read.
    pub(crate) fn now(&self) -> Instant {
        let suspended = self.suspension.stood_still();
        let now = Instant::now();
        now.checked_sub(suspended).unwrap_or(now)
    }

    /// Waits for the next line until [`now`](Self::now) is `deadline`.
    pub(super) fn next_event(&self, deadline: Instant, interrupt: &Interrupt) -> WorkerEvent {
        loop {
            if interrupt.signal().is_some() {
                return WorkerEvent::Interrupted;
            }
            let left = deadline.saturating_duration_since(self.now());
            let wait = left.min(INTERRUPT_POLL);
            match self.lines.recv_timeout(wait) {
                Ok(line) => return WorkerEvent::Line(line),
                Err(RecvTimeoutError::Disconnected) => return WorkerEvent::Closed,
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return WorkerEvent::TimedOut,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Signals the process to end by itself.
    pub(crate) fn terminate(&self) {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // It is not waited for yet, so that its number is still its own; it may have ended
            // already.
            let _ = rustix::process::kill_process(pid, Signal::TERM);
        }
    }

    /// Kills the process group and waits a little for the end.
    pub(crate) fn kill(&mut self) -> ProcessEnd {
        self.kill_group();
        self.wait(DEATH_DEADLINE)
    }

    /// Waits for the end after stdout was closed; a child that lingers is killed.
    pub(crate) fn finish(&mut self, patience: Duration) -> ProcessEnd {
        match self.wait(patience) {
            ProcessEnd::Stuck => self.kill(),
            end => {
                // Whatever it started itself must not outlive it.
                self.kill_group();
                end
            }
        }
    }

    /// Leaves a child that has reported everything to end by itself, and reaps it in parallel:
    /// giving a GPU back takes the driver tens of milliseconds, which are not awaited.
    pub(crate) fn leave(mut self) {
        // Where the host refuses a thread the child is killed as `self` is dropped; everything was
        // reported.
        let _ = Builder::new().spawn(move || self.finish(DEATH_DEADLINE));
    }

    /// The end of what the child wrote on stderr, as text; called when it has ended.
    pub(crate) fn stderr(&self) -> String {
        // What it wrote last may still be in the pipe; a stuck child's pipe never ends.
        let deadline = Instant::now() + Duration::from_millis(200);
        let reading = || {
            self.stderr_reader
                .as_ref()
                .is_some_and(|it| !it.is_finished())
        };
        while reading() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        let tail = self
            .stderr_tail
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let bytes: Vec<u8> = tail.iter().copied().collect();
        String::from_utf8_lossy(&bytes).trim().to_owned()
    }

    /// How the worker's end reads in the facts, when it ended without a result.
    pub(crate) fn end_without_result(&self, end: &ProcessEnd) -> WorkerEnd {
        match end {
            ProcessEnd::Killed(signal) => WorkerEnd::Killed { signal: *signal },
            ProcessEnd::Exited(status) => WorkerEnd::Exited {
                status: *status,
                stderr: self.stderr(),
            },
            ProcessEnd::Stuck => WorkerEnd::TimedOut {
                step: "ending (uninterruptible sleep in the kernel)".to_owned(),
                seconds: DEATH_DEADLINE.as_secs_f64(),
            },
        }
    }

    fn kill_group(&self) {
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // The group is gone when all of it has ended, which is what is wanted.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }

    fn wait(&mut self, patience: Duration) -> ProcessEnd {
        let deadline = Instant::now() + patience;
        let mut pause = Duration::from_micros(100);
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => {
                    if let Some(key) = self.key.take() {
                        own_processes::remove(key);
                    }
                    return process_end(status);
                }
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(Duration::from_millis(10));
                }
                // A child that cannot be waited for was reaped elsewhere; it is as lost as a stuck
                // one.
                Ok(None) | Err(_) => return ProcessEnd::Stuck,
            }
        }
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            self.kill();
        }
    }
}

fn process_end(status: ExitStatus) -> ProcessEnd {
    match (status.code(), status.signal()) {
        (Some(code), _) => ProcessEnd::Exited(code),
        (None, Some(signal)) => ProcessEnd::Killed(signal),
        (None, None) => ProcessEnd::Stuck,
    }
}

/// Starts the threads that empty the pipes of `child`; returns that of standard error.
fn start_readers(
    child: &mut Child,
    sender: SyncSender<String>,
    stderr_tail: &Arc<Mutex<VecDeque<u8>>>,
) -> std::io::Result<Option<JoinHandle<()>>> {
    if let Some(stdout) = child.stdout.take() {
        Builder::new().spawn(move || send_lines(stdout, &sender))?;
    }
    let Some(stderr) = child.stderr.take() else {
        return Ok(None);
    };
    let tail = Arc::clone(stderr_tail);
    Builder::new()
        .spawn(move || keep_tail(stderr, &tail))
        .map(Some)
}

/// Sends whole lines; a last line without an end was torn by the child's death and is dropped.
fn send_lines(stdout: impl Read, sender: &SyncSender<String>) {
    let mut stdout = BufReader::new(stdout);
    loop {
        let mut line = Vec::new();
        match (&mut stdout)
            .take(LONGEST_LINE_BYTES)
            .read_until(b'\n', &mut line)
        {
            Ok(0) | Err(_) => return,
            Ok(_) if line.last() != Some(&b'\n') => continue,
            Ok(_) => {}
        }
        let text = String::from_utf8_lossy(&line).trim_end().to_owned();
        if sender.send(text).is_err() {
            return;
        }
    }
}

fn keep_tail(mut stderr: impl Read, tail: &Mutex<VecDeque<u8>>) {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = stderr.read(&mut buffer) {
        let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
        tail.extend(buffer.get(..count).unwrap_or_default());
        let surplus = tail.len().saturating_sub(STDERR_TAIL_BYTES);
        tail.drain(..surplus);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> WorkerProcess {
        WorkerProcess::start(
            &PathBuf::from("/bin/sh"),
            &["-c".into(), script.into()],
            &[],
        )
        .expect("sh starts")
    }

    fn next(worker: &WorkerProcess, milliseconds: u64) -> WorkerEvent {
        worker.next_event(
            Instant::now() + Duration::from_millis(milliseconds),
            &Interrupt::default(),
        )
    }

    #[test]
    fn a_worker_inherits_what_is_not_kept_from_it() {
        // Shells set some of their own.
        let is_plain = |name: &String| {
            let own = [
                "PATH", "PWD", "OLDPWD", "SHLVL", "IFS", "OPTIND", "PPID", "_",
            ];
            !own.contains(&name.as_str()) && name.bytes().all(|it| it.is_ascii_uppercase())
        };
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        let inherited = names.into_iter().find(is_plain).expect("a variable");
        let count = |environment: &Variables<'_>| {
            let script = format!("env | grep -c -e '^{inherited}=' -e '^OWN=own$'");
            let arguments = ["-c".into(), script.into()];
            let worker = WorkerProcess::start(&"/bin/sh".into(), &arguments, environment);
            next(&worker.expect("sh"), 5000)
        };
        let line = |text: &str| WorkerEvent::Line(text.to_owned());
        assert_eq!(count(&[]), line("1"), "{inherited}");
        assert_eq!(count(&[("OWN", Some("own".to_owned()))]), line("2"));
        assert_eq!(count(&[(&inherited, None)]), line("0"), "{inherited}");
    }

    #[test]
    fn a_worker_has_this_programs_name_and_another_program_its_own() {
        // The shell's zeroth parameter is the name that it was started by.
        let name = |process: std::io::Result<WorkerProcess>| next(&process.expect("sh"), 5000);
        let arguments = ["-c".into(), "tr '\\0' ' ' < /proc/$$/cmdline; echo".into()];
        let WorkerEvent::Line(worker) =
            name(WorkerProcess::start(&"/bin/sh".into(), &arguments, &[]))
        else {
            panic!("no line")
        };
        assert!(worker.starts_with("gpu-validator -c "), "{worker}");
        let WorkerEvent::Line(other) = name(WorkerProcess::start_program("sh", &arguments, &[]))
        else {
            panic!("no line")
        };
        assert!(other.starts_with("sh -c "), "{other}");
    }

    #[test]
    fn a_child_that_talks_without_end_waits_for_its_listener() {
        let mut worker = shell("while :; do echo line; done");
        std::thread::sleep(Duration::from_millis(300));
        let waiting = worker.lines.try_iter().take(1_000_000).count();
        // While they were counted, more may have come.
        assert!(waiting < 100_000, "{waiting} lines were kept");
        assert_eq!(worker.kill(), ProcessEnd::Killed(9));
    }

    #[test]
    fn lines_then_the_end() {
        let mut worker = shell("echo one; echo two; exit 3");
        assert_eq!(next(&worker, 5000), WorkerEvent::Line("one".to_owned()));
        assert_eq!(next(&worker, 5000), WorkerEvent::Line("two".to_owned()));
        assert_eq!(next(&worker, 5000), WorkerEvent::Closed);
        assert_eq!(worker.finish(Duration::from_secs(5)), ProcessEnd::Exited(3));
    }

    #[test]
    fn a_hang_is_a_time_out_and_dies_with_its_own_children() {
        let mut worker = shell("trap '' TERM; sleep 600 & echo $!; while :; do sleep 600; done");
        let WorkerEvent::Line(grandchild) = next(&worker, 5000) else {
            panic!("no line")
        };
        assert_eq!(next(&worker, 50), WorkerEvent::TimedOut);
        assert_eq!(worker.kill(), ProcessEnd::Killed(9));
        let gone = (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            std::fs::read_to_string(format!("/proc/{grandchild}/stat"))
                .map_or(true, |stat| stat.contains(") Z "))
        });
        assert!(gone, "process {grandchild} survived its group");
    }

    #[test]
    fn a_crash_names_its_signal() {
        let mut worker = shell("kill -SEGV $$");
        assert_eq!(next(&worker, 5000), WorkerEvent::Closed);
        let end = worker.finish(Duration::from_secs(5));
        assert_eq!(
            worker.end_without_result(&end),
            WorkerEnd::Killed { signal: 11 }
        );
    }

    #[test]
    fn a_torn_line_is_no_line_and_bytes_that_are_no_text_are_harmless() {
        let worker = shell("printf '\\377\\376\\n'; printf '{\"half\": '");
        assert_eq!(
            next(&worker, 5000),
            WorkerEvent::Line("\u{fffd}\u{fffd}".to_owned())
        );
        assert_eq!(next(&worker, 5000), WorkerEvent::Closed);
    }

    #[test]
    fn an_endless_line_does_not_fill_the_memory() {
        let worker = shell("head -c 5000000 /dev/zero; echo; echo after");
        let mut lines = Vec::new();
        while let WorkerEvent::Line(line) = next(&worker, 20_000) {
            lines.push(line.len());
        }
        assert_eq!(lines.last(), Some(&"after".len()));
        assert!(lines.iter().all(|it| *it as u64 <= LONGEST_LINE_BYTES));
    }

    #[test]
    fn of_a_huge_stderr_the_end_is_kept() {
        let mut worker =
            shell("head -c 3000000 /dev/zero | tr '\\0' x >&2; echo the reason >&2; exit 1");
        assert_eq!(next(&worker, 20_000), WorkerEvent::Closed);
        let end = worker.finish(Duration::from_secs(5));
        let WorkerEnd::Exited { status: 1, stderr } = worker.end_without_result(&end) else {
            panic!("{end:?}")
        };
        assert!(
            stderr.ends_with("the reason") && stderr.len() <= STDERR_TAIL_BYTES,
            "{}",
            stderr.len()
        );
    }

    #[test]
    fn what_this_process_slept_through_is_not_the_childs_silence() {
        let mut worker = shell("sleep 600");
        worker.suspension = SuspensionWatch::unshared();
        let began = Instant::now();
        let deadline = worker.now() + Duration::from_millis(200);
        worker.suspension.suspend_for(Duration::from_secs(3));
        assert_eq!(
            worker.next_event(deadline, &Interrupt::default()),
            WorkerEvent::TimedOut
        );
        // Its clock went back by as much, so that the wait ended so much later.
        assert!(began.elapsed() > Duration::from_secs(3));
        assert!(worker.now() < deadline + Duration::from_secs(1));
    }

    #[test]
    fn a_request_to_stop_ends_a_wait() {
        let worker = shell("sleep 600");
        let interrupt = Interrupt::default();
        interrupt.request(15);
        let event = worker.next_event(Instant::now() + Duration::from_mins(1), &interrupt);
        assert_eq!(event, WorkerEvent::Interrupted);
    }

    #[test]
    fn a_child_that_closes_stdout_and_lingers_is_killed() {
        let mut worker = shell("exec >&-; sleep 600");
        assert_eq!(next(&worker, 5000), WorkerEvent::Closed);
        assert_eq!(
            worker.finish(Duration::from_millis(50)),
            ProcessEnd::Killed(9)
        );
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error() {
        let error = WorkerProcess::start(&PathBuf::from("/nonexistent"), &[], &[]);
        assert!(error.is_err());
    }
}
