//! NVML, queried by a child process that may hang or crash.
//!
//! The worker announces each call before it makes it and reports each reading as soon as it has it.
//! When a call does not return in time, or the worker dies in it, the parent keeps the reported
//! readings, leaves that call out and starts the worker again for the rest. A worker queries one
//! GPU after another, so that it is certain which call is to blame.

mod calls;
mod collected;
mod library;
mod own_gpu;
mod power_meter;
mod protocol;
mod queries;
mod read;
mod sensors;
mod status;
mod users;
mod watch;

use std::ffi::OsString;
use std::time::{Duration, Instant};

use clap::ValueEnum as _;
use collected::Collected;
pub(crate) use collected::NvmlOutcome;
pub(crate) use own_gpu::{users_of, watch_processes_of_others};
pub(crate) use power_meter::{PowerKind, PowerMeter, with_power_meter};
use protocol::Message;
pub(crate) use queries::{NvmlWorker, Part};
pub(crate) use sensors::{SensorMessage, run_worker as run_sensors_worker};
pub(crate) use users::{UsersMessage, run_worker as run_users_worker};
pub(crate) use watch::{
    Condition, LOOK_CLOSELY, NO_WORKERS, WORKERS, WatchMessage, run_worker as run_watch_worker,
};

use super::{Deadlines, ProbeOptions};
use crate::interrupt::Interrupt;
use crate::worker::listener::{Conversation, ConversationEnd, Heard, OnInterrupt, converse};
use crate::worker::process::{ProcessEnd, WorkerProcess, worker_program};
use validator_core::facts::GpuFacts;

/// A driver that makes so many calls hang or crash will not say much more of use.
const ATTEMPTS_MAXIMUM: usize = 12;
/// After one function hung or crashed on so many GPUs, it is not called for the others: each would
/// cost a deadline.
const GPUS_WITH_THE_SAME_BAD_CALL_MAXIMUM: usize = 2;
/// After so many of its calls hung or crashed, a GPU is not queried any more.
const BAD_CALLS_OF_A_GPU_MAXIMUM: usize = 2;

/// A call that was announced and has returned nothing yet.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CallInFlight {
    gpu: Option<u32>,
    function: String,
}

impl std::fmt::Display for CallInFlight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.function)?;
        self.gpu
            .map_or(Ok(()), |gpu| write!(f, " of NVML's GPU {gpu}"))
    }
}

/// How one worker ended.
enum AttemptEnd {
    Finished,
    /// A call took longer than this.
    Hung(CallInFlight, Duration),
    Died(Option<CallInFlight>, String),
    Interrupted,
    OutOfTime,
    NotStarted(String),
}

/// Queries NVML for a part of the facts. Takes no longer than [`Deadlines::nvml`]. `on_gpu` gets
/// the readings of a GPU once they include everything that work on it would change.
pub(crate) fn probe(
    options: &ProbeOptions,
    interrupt: &Interrupt,
    part: Part,
    on_gpu: &dyn Fn(&GpuFacts),
) -> NvmlOutcome {
    let mut collected = Collected::default();
    let overall = Instant::now() + options.deadlines.nvml;
    let mut asked_again = false;
    for _ in 0..ATTEMPTS_MAXIMUM {
        let listener = (&mut collected, on_gpu);
        let end = run_worker(options, interrupt, part, listener, overall);
        let (call, what_it_did) = match end {
            AttemptEnd::Finished => break,
            AttemptEnd::Interrupted => {
                collected.stop("the run was interrupted");
                break;
            }
            AttemptEnd::OutOfTime => {
                let seconds = options.deadlines.nvml.as_secs_f64();
                collected.stop(&format!("the NVML probe was stopped after {seconds} s"));
                break;
            }
            AttemptEnd::NotStarted(error) => {
                collected.stop(&error);
                break;
            }
            AttemptEnd::Hung(call, limit) => {
                let reason = format!("did not return within {} s", limit.as_secs_f64());
                (Some(call), reason)
            }
            AttemptEnd::Died(call, end) => (call, format!("took the process down: {end}")),
        };
        match call {
            Some(call) => {
                if !leave_out(&mut collected, &call, &what_it_did) {
                    break;
                }
            }
            None if asked_again => {
                collected.stop(&format!(
                    "the NVML probe {what_it_did}, outside of any call"
                ));
                break;
            }
            None => collected.trouble.push(format!(
                "the NVML probe {what_it_did}, outside of any call; restarting it"
            )),
        }
        asked_again = true;
    }
    collected.into_outcome()
}

/// Notes that a call must not be made again. False when nothing is left to be queried without it.
fn leave_out(collected: &mut Collected, call: &CallInFlight, what_it_did: &str) -> bool {
    collected.trouble.push(format!("{call} {what_it_did}"));
    let Some(gpu) = call.gpu else {
        collected.skip(call, what_it_did);
        let nothing_left = matches!(
            call.function.as_str(),
            "dlopen" | "nvmlInit_v2" | "nvmlDeviceGetCount_v2"
        );
        if nothing_left {
            collected.stop(&format!("{call} {what_it_did}"));
        }
        return !nothing_left;
    };
    collected.skip(call, what_it_did);
    if collected.gpus_with_bad_call(&call.function) >= GPUS_WITH_THE_SAME_BAD_CALL_MAXIMUM {
        collected.skip_everywhere(
            &call.function,
            &format!("was not called, since on other GPUs it {what_it_did}"),
        );
    }
    if collected.bad_calls(gpu) >= BAD_CALLS_OF_A_GPU_MAXIMUM {
        collected.give_up(
            gpu,
            &format!("not queried any more after {call} {what_it_did}"),
        );
    }
    true
}

fn run_worker(
    options: &ProbeOptions,
    interrupt: &Interrupt,
    part: Part,
    (collected, on_gpu): (&mut Collected, &dyn Fn(&GpuFacts)),
    overall: Instant,
) -> AttemptEnd {
    let program = worker_program(options.worker_program.as_ref());
    let arguments = arguments(collected, part);
    let mut worker = match WorkerProcess::start(&program, &arguments, &[]) {
        Ok(worker) => worker,
        Err(error) => {
            return AttemptEnd::NotStarted(format!("cannot start {}: {error}", program.display()));
        }
    };
    let mut conversation = NvmlConversation {
        collected,
        on_gpu,
        in_flight: None,
        deadlines: &options.deadlines,
        overall,
    };
    let end = converse(&mut worker, OnInterrupt::Kill, interrupt, &mut conversation);
    let in_flight = conversation.in_flight.map(|(call, _)| call);
    match end {
        ConversationEnd::Complete => {
            // A library that crashes in its exit handlers takes nothing with it.
            worker.leave();
            AttemptEnd::Finished
        }
        ConversationEnd::Interrupted | ConversationEnd::Dismissed => AttemptEnd::Interrupted,
        ConversationEnd::TimedOut { is_stuck, .. } => {
            if is_stuck {
                collected.trouble.push(format!(
                    "process {} cannot be killed: a driver call is in uninterruptible sleep",
                    worker.pid()
                ));
            }
            match in_flight {
                Some(call) if worker.now() < overall => {
                    let limit = limit(&call, &options.deadlines);
                    AttemptEnd::Hung(call, limit)
                }
                _ => AttemptEnd::OutOfTime,
            }
        }
        ConversationEnd::Closed(end) => AttemptEnd::Died(in_flight, describe(&worker, &end)),
    }
}

/// What the process that reads NVML has reported, and the call that it is in.
struct NvmlConversation<'n> {
    collected: &'n mut Collected,
    on_gpu: &'n dyn Fn(&GpuFacts),
    in_flight: Option<(CallInFlight, Instant)>,
    deadlines: &'n Deadlines,
    overall: Instant,
}

impl Conversation for NvmlConversation<'_> {
    fn deadline(&mut self, _now: Instant) -> Instant {
        let of_call = |(call, since): &(CallInFlight, Instant)| {
            (*since + limit(call, self.deadlines)).min(self.overall)
        };
        self.in_flight.as_ref().map_or(self.overall, of_call)
    }

    fn hear(&mut self, line: &str, now: Instant) -> Heard {
        let Ok(message) = serde_json::from_str::<Message>(line) else {
            self.collected.note_nonsense(line);
            return Heard::Part;
        };
        if message == (Message::Done {}) {
            return Heard::Everything;
        }
        follow(&message, &mut self.in_flight, now);
        let at_rest = match &message {
            Message::GpuAtRest { index } => Some(*index),
            _ => None,
        };
        self.collected.take(message);
        if let Some(gpu) = at_rest.and_then(|index| self.collected.told_of(index)) {
            (self.on_gpu)(&gpu);
        }
        Heard::Part
    }
}

fn arguments(collected: &Collected, part: Part) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec!["worker".into(), "nvml".into()];
    if let Some(part) = part.to_possible_value() {
        arguments.extend(["--part".into(), part.get_name().into()]);
    }
    for skipped in &collected.skipped {
        arguments.extend(["--skip".into(), skipped.to_argument().into()]);
    }
    for index in &collected.at_rest {
        arguments.extend(["--at-rest".into(), index.to_string().into()]);
    }
    for index in &collected.finished {
        arguments.extend(["--finished".into(), index.to_string().into()]);
    }
    arguments
}

/// How long a call may take.
fn limit(call: &CallInFlight, deadlines: &Deadlines) -> Duration {
    match call.function.as_str() {
        "dlopen" | "nvmlInit_v2" | "nvmlDeviceGetHandleByIndex_v2" => deadlines.nvml_initialization,
        _ => deadlines.nvml_call,
    }
}

/// The worker is in the call that it announced last until it reports something.
fn follow(message: &Message, in_flight: &mut Option<(CallInFlight, Instant)>, now: Instant) {
    match message {
        Message::Call { gpu, function } => {
            let call = CallInFlight {
                gpu: *gpu,
                function: function.clone(),
            };
            *in_flight = Some((call, now));
        }
        // The GPU's loss is reported from inside a field that may go on to make calls; they are
        // announced.
        Message::Nvml { .. }
        | Message::Gpu { .. }
        | Message::Unopened { .. }
        | Message::GpuAtRest { .. }
        | Message::GpuDone { .. } => *in_flight = None,
        Message::Simulated { .. } | Message::Done {} => {}
    }
}

fn describe(worker: &WorkerProcess, end: &ProcessEnd) -> String {
    let said = match worker.stderr() {
        text if text.is_empty() => String::new(),
        text => format!(" ({})", text.lines().last().unwrap_or_default()),
    };
    match end {
        ProcessEnd::Killed(signal) => format!("signal {signal}{said}"),
        ProcessEnd::Exited(status) => format!("exit status {status}{said}"),
        ProcessEnd::Stuck => format!("it hangs in the kernel{said}"),
    }
}

#[cfg(test)]
mod tests;
