//! Messages of the NVML worker on stdout: one JSON value a line.

use std::io::Write;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Message {
    /// This call is about to be made.
    Call { gpu: Option<u32>, function: String },
    /// A field of [`validator_core::facts::NvmlFacts`].
    Nvml { field: String, value: Value },
    /// A field of [`validator_core::facts::GpuFacts`] of the GPU with this NVML index.
    Gpu {
        index: u32,
        field: String,
        value: Value,
    },
    /// NVML gave no handle for this GPU, so that it cannot be queried.
    Unopened { index: u32, reason: String },
    /// Everything about this GPU was queried that work on it would change.
    GpuAtRest { index: u32 },
    /// Everything about this GPU was queried.
    GpuDone { index: u32 },
    /// The library is a simulated one, in this scenario.
    Simulated { scenario: String },
    /// Everything was queried.
    Done {},
}

/// A call that must not be made again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SkippedCall {
    pub(super) function: String,
    /// `None` for a call about the driver as a whole.
    pub(super) gpu: Option<u32>,
    /// What it did, to follow its name: `did not return within 5 s`.
    pub(super) reason: String,
}

impl SkippedCall {
    /// As a command-line argument: `nvmlDeviceGetSerial@2=did not return within 5 s`.
    pub(super) fn to_argument(&self) -> String {
        let gpu = self.gpu.map_or(String::new(), |gpu| gpu.to_string());
        format!("{}@{gpu}={}", self.function, self.reason)
    }

    pub(super) fn from_argument(argument: &str) -> Option<Self> {
        let (call, reason) = argument.split_once('=')?;
        let (function, gpu) = call.split_once('@')?;
        let gpu = match gpu {
            "" => None,
            number => Some(number.parse().ok()?),
        };
        Some(Self {
            function: function.to_owned(),
            gpu,
            reason: reason.to_owned(),
        })
    }
}

/// The worker's stdout, shared by its threads.
pub(super) struct Output {
    stdout: Mutex<std::io::Stdout>,
    /// Calls are not announced: they are made again and again.
    quiet: bool,
}

impl Output {
    pub(super) fn new() -> Self {
        Self {
            stdout: Mutex::new(std::io::stdout()),
            quiet: false,
        }
    }

    /// Does not announce calls.
    pub(super) fn quiet() -> Self {
        Self {
            quiet: true,
            ..Self::new()
        }
    }

    pub(super) fn announce(&self, gpu: Option<u32>, function: &'static str) {
        if self.quiet {
            return;
        }
        self.send(&Message::Call {
            gpu,
            function: function.to_owned(),
        });
    }

    pub(super) fn nvml(&self, field: &str, value: &impl Serialize) {
        if let Ok(value) = serde_json::to_value(value) {
            let field = field.to_owned();
            self.send(&Message::Nvml { field, value });
        }
    }

    pub(super) fn gpu(&self, index: u32, field: &str, value: &impl Serialize) {
        if self.quiet {
            return;
        }
        if let Ok(value) = serde_json::to_value(value) {
            let field = field.to_owned();
            self.send(&Message::Gpu {
                index,
                field,
                value,
            });
        }
    }

    /// Writes one line at once. When the parent is gone there is no reader, and the worker dies
    /// with it.
    pub(super) fn send(&self, message: &Message) {
        let Ok(mut line) = serde_json::to_vec(message) else {
            return;
        };
        line.push(b'\n');
        let mut stdout = self.stdout.lock().unwrap_or_else(PoisonError::into_inner);
        if stdout.write_all(&line).is_err() || stdout.flush().is_err() {
            std::process::exit(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skipped_call_survives_the_command_line() {
        for gpu in [None, Some(7)] {
            let call = SkippedCall {
                function: "nvmlDeviceGetSerial".to_owned(),
                gpu,
                reason: "did not return within 5 s (a=b)".to_owned(),
            };
            assert_eq!(SkippedCall::from_argument(&call.to_argument()), Some(call));
        }
        assert_eq!(SkippedCall::from_argument("nonsense"), None);
    }
}
