//! The process that reads NVML for the sentinel, started again when it ends or hangs.

use std::io::Write as _;
use std::process::ChildStdin;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::Event;
use crate::interrupt::Interrupt;
use crate::probe::{ProbeOptions, WatchMessage};
use crate::worker::listener::{ConversationEnd, Heard, Order, follow};
use crate::worker::process::{WorkerProcess, worker_program};

/// A process that is silent for so long hangs in NVML.
const SILENCE_MAXIMUM: Duration = Duration::from_secs(10);
/// Pause before the process is started again: the driver may be reloading.
const RESTART: Duration = Duration::from_secs(1);

/// Requests to the process.
#[derive(Clone, Debug, Default)]
pub(super) struct NvmlRequests(Arc<Mutex<Option<ChildStdin>>>);

impl NvmlRequests {
    pub(super) fn send(&self, line: &str) {
        let mut input = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(input) = &mut *input {
            // A process that is gone is started again, and reads at its default rate.
            let _ = writeln!(input, "{line}");
        }
    }

    fn set(&self, input: Option<ChildStdin>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = input;
    }
}

/// Starts the process, and a thread that keeps it running.
pub(super) fn start(
    probe: &ProbeOptions,
    uuids: Vec<String>,
    events: Sender<Event>,
    interrupt: Interrupt,
) -> std::io::Result<NvmlRequests> {
    let requests = NvmlRequests::default();
    let own = requests.clone();
    let program = worker_program(probe.worker_program.as_ref());
    let keep_running = move || {
        let mut arguments: Vec<std::ffi::OsString> = vec!["worker".into(), "watch".into()];
        for uuid in &uuids {
            arguments.extend(["--gpu".into(), uuid.into()]);
        }
        while interrupt.signal().is_none() {
            let reason = match WorkerProcess::start_with_input(&program, &arguments, &[]) {
                Ok((process, input)) => {
                    own.set(input);
                    let reason = follow_process(process, &events, &interrupt);
                    own.set(None);
                    reason
                }
                Err(error) => format!("cannot start {}: {error}", program.display()),
            };
            if events.send(Event::NvmlEnded(reason)).is_err() {
                return;
            }
            std::thread::sleep(RESTART);
        }
    };
    crate::threads::spawn("to read NVML", keep_running)?;
    Ok(requests)
}

/// Passes its messages on until it ends or is silent; returns the reason.
fn follow_process(
    mut process: WorkerProcess,
    events: &Sender<Event>,
    interrupt: &Interrupt,
) -> String {
    let mut trouble = None;
    let mut pass_on = |message| {
        let sent = match message {
            WatchMessage::Trouble(reason) => {
                trouble = Some(reason);
                Ok(())
            }
            message => events.send(Event::Nvml(message)),
        };
        // Without a receiver the sentinel has ended.
        sent.map_or(Heard::Everything, |()| Heard::Part)
    };
    let order = || Order::Continue;
    let end = follow(
        &mut process,
        SILENCE_MAXIMUM,
        interrupt,
        &order,
        &mut pass_on,
    );
    match end {
        ConversationEnd::Complete | ConversationEnd::Interrupted | ConversationEnd::Dismissed => {
            "the sentinel ends".to_owned()
        }
        ConversationEnd::TimedOut { .. } => {
            let seconds = SILENCE_MAXIMUM.as_secs();
            format!("NVML did not return within {seconds} s")
        }
        ConversationEnd::Closed(end) => {
            let ended = || format!("the process that reads NVML ended: {end:?}");
            trouble.unwrap_or_else(ended)
        }
    }
}
