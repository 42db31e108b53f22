//! The AWS CLI. It finds credentials by its own chain; none is ever read, passed on or logged here.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::refusal::Refusal;
use validator_remote::interrupts::Interrupts;
use xtask::tools;

/// The user's `aws`, or the pinned one where there is none.
#[derive(Debug)]
pub(super) struct Cli {
    pub(super) program: PathBuf,
    pub(super) region: Option<String>,
    pub(super) interrupts: Interrupts,
}

/// What a signal does to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OnSignal {
    /// The call is given up: it only reads.
    Stop,
    /// The call goes on to its end: half of it would be an unknown machine.
    GoOn,
}

impl Cli {
    pub(super) fn find(region: Option<&str>, interrupts: &Interrupts) -> anyhow::Result<Cli> {
        Ok(Cli {
            program: tools::aws_cli()?,
            region: region.map(str::to_owned),
            interrupts: interrupts.clone(),
        })
    }

    /// Reads something; a signal ends the call.
    pub(super) fn read<A: AsRef<OsStr>>(&self, arguments: &[A]) -> anyhow::Result<Value> {
        self.call(arguments, OnSignal::Stop)
    }

    /// Changes something; no signal ends the call.
    pub(super) fn change<A: AsRef<OsStr>>(&self, arguments: &[A]) -> anyhow::Result<Value> {
        self.call(arguments, OnSignal::GoOn)
    }

    pub(super) fn call<A: AsRef<OsStr>>(
        &self,
        arguments: &[A],
        on_signal: OnSignal,
    ) -> anyhow::Result<Value> {
        let mut command = Command::new(&self.program);
        command.args(["--output", "json"]);
        if let Some(region) = &self.region {
            command.args(["--region", region]);
        }
        command
            .args(arguments)
            .env("AWS_PAGER", "")
            .env("AWS_CLI_AUTO_PROMPT", "off")
            // Out of reach of the terminal's Ctrl-C: what it does is decided here.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let child = command
            .spawn()
            .with_context(|| format!("{} could not be started", self.program.display()))?;
        let id = Pid::from_child(&child);
        let output = match on_signal {
            OnSignal::GoOn => child.wait_with_output(),
            OnSignal::Stop => self.interrupts.while_waiting(
                // It may have ended in this very moment.
                move |_| {
                    let _ = kill_process(id, Signal::TERM);
                },
                || child.wait_with_output(),
            ),
        }?;
        if !output.status.success() {
            if on_signal == OnSignal::Stop && self.interrupts.requested() {
                anyhow::bail!("interrupted");
            }
            let words = arguments.iter().take(2);
            let words: Vec<_> = words.map(|it| it.as_ref().to_string_lossy()).collect();
            return Err(refusal(&words.join(" "), &String::from_utf8_lossy(&output.stderr)).into());
        }
        // Some calls answer nothing at all.
        if output.stdout.trim_ascii().is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&output.stdout).with_context(|| {
            format!(
                "{} answered something else than JSON",
                self.program.display()
            )
        })
    }
}

/// Reads `An error occurred (Code) when calling the Operation operation: message`; anything else
/// has no code.
fn refusal(call: &str, stderr: &str) -> Refusal {
    let text = stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    let coded = text
        .split_once("An error occurred (")
        .and_then(|(_, rest)| {
            let (code, rest) = rest.split_once(") when calling the ")?;
            let (_, rest) = rest.split_once(" operation")?;
            // The CLI may add the number of retries in parentheses.
            let message = match rest.strip_prefix(" (") {
                Some(rest) => rest.split_once("): ")?.1,
                None => rest.strip_prefix(": ")?,
            };
            Some((code.to_owned(), message.to_owned()))
        });
    let (code, message) = match coded {
        Some((code, message)) => (Some(code), message),
        None => (None, text),
    };
    Refusal {
        call: call.to_owned(),
        code,
        message,
    }
}

#[cfg(test)]
mod tests {
    use super::refusal;

    #[test]
    fn code_and_message_are_read_from_what_the_cli_prints() {
        for prefix in ["\n", "\naws: [ERROR]: "] {
            let refused = refusal(
                "ec2 run-instances",
                &format!(
                    "{prefix}An error occurred (VcpuLimitExceeded) when calling the RunInstances operation (reached max retries: 2): You have requested: more.\n"
                ),
            );
            assert_eq!(refused.code.as_deref(), Some("VcpuLimitExceeded"));
            assert_eq!(refused.message, "You have requested: more.");
        }
        let refused = refusal("ssm get-parameter", "\nUnable to locate credentials.\n");
        assert_eq!(refused.code, None);
        assert_eq!(refused.message, "Unable to locate credentials.");
    }
}
