//! The validator's command line, and what its end means; the same here and on another machine.

use std::ffi::OsString;
use std::io::{IsTerminal as _, Read, Write};
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::thread::{Builder, JoinHandle};

use anyhow::{Context as _, bail};

use crate::interrupts::Interrupts;
use crate::reports::{self, REPORTS};

/// One run of the validator, wherever it happens.
#[derive(Debug)]
pub struct Run<'a> {
    pub binary: &'a Path,
    pub level: Option<&'a str>,
    pub profile: Option<&'a Path>,
    /// Further arguments of `run`.
    pub more: &'a [OsString],
    pub sudo: bool,
    pub reports: &'a reports::Folder,
    /// In front of each line of the validator's on the terminal, where several validators share it.
    pub label: Option<&'a str>,
    pub interrupts: &'a Interrupts,
}

impl Run<'_> {
    /// The validator's arguments, with the reports in `folder` and the profile at `profile`.
    pub fn arguments(&self, folder: &Path, profile: Option<&Path>) -> Vec<OsString> {
        // The other machine keeps nothing of this run.
        let mut arguments: Vec<OsString> = vec!["run".into(), "--no-history".into()];
        if let Some(level) = self.level {
            arguments.extend(["--level".into(), level.into()]);
        }
        if let Some(profile) = profile {
            arguments.extend(["--profile".into(), profile.into()]);
        }
        arguments.extend(self.more.iter().cloned());
        for (option, name) in REPORTS {
            arguments.extend([option.into(), folder.join(name).into()]);
        }
        // The validator writes to a pipe, so it cannot see the terminal itself.
        arguments.extend([
            "--color".into(),
            if wants_color() {
                "always".into()
            } else {
                "never".into()
            },
        ]);
        arguments
    }
}

fn wants_color() -> bool {
    std::io::stdout().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// How the validator ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    Code(i32),
    Signal(i32),
}

impl Ending {
    pub fn of(status: ExitStatus) -> Ending {
        use std::os::unix::process::ExitStatusExt as _;
        status.code().map_or_else(
            || Ending::Signal(status.signal().unwrap_or_default()),
            Ending::Code,
        )
    }

    /// The validator's exit code. Anything that it never answers by itself is trouble, not a
    /// verdict.
    pub fn exit_code(self) -> anyhow::Result<u8> {
        match self {
            Ending::Code(code @ 0..=4) => Ok(u8::try_from(code)?),
            Ending::Code(101) => {
                bail!("the validator panicked (exit code 101); what it printed is in stderr.txt")
            }
            Ending::Code(code @ (126 | 127)) => {
                bail!(
                    "the validator could not be started (exit code {code}); the reason is in stderr.txt"
                )
            }
            // A shell on the other machine reports a signal this way.
            Ending::Code(code @ 129..=192) => Ending::Signal(code - 128).exit_code(),
            Ending::Code(code) => bail!(
                "the validator ended with exit code {code}, which is none of its own; stderr.txt may have the reason"
            ),
            Ending::Signal(signal) => {
                bail!("the validator was killed by signal {signal} before it could finish")
            }
        }
    }
}

/// Passes on what a child prints as it comes, and keeps a copy without colours in the reports'
/// folder.
#[derive(Debug)]
pub struct Streams {
    threads: Vec<JoinHandle<std::io::Result<()>>>,
}

impl Streams {
    pub fn follow(child: &mut Child, run: &Run<'_>) -> anyhow::Result<Streams> {
        let stdout = child.stdout.take().context("stdout is not a pipe")?;
        let stderr = child.stderr.take().context("stderr is not a pipe")?;
        let copy = |name| {
            std::fs::File::create(run.reports.file(name))
                .with_context(|| format!("{name} cannot be written"))
        };
        let (stdout_copy, stderr_copy) = (copy(reports::STDOUT)?, copy(reports::STDERR)?);
        let (to_stdout, to_stderr) = (
            Labelled::new(run.label, std::io::stdout()),
            Labelled::new(run.label, std::io::stderr()),
        );
        let follow_stdout = move || tee(stdout, to_stdout, stdout_copy);
        let follow_stderr = move || tee(stderr, to_stderr, stderr_copy);
        let no_thread = "no thread could be started to read the validator's output";
        Ok(Streams {
            threads: vec![
                Builder::new().spawn(follow_stdout).context(no_thread)?,
                Builder::new().spawn(follow_stderr).context(no_thread)?,
            ],
        })
    }

    /// Waits until the child has closed both.
    pub fn finish(self) {
        for thread in self.threads {
            if let Ok(Err(error)) = thread.join() {
                say!("warning: the validator's output was not kept whole: {error}");
            }
        }
    }
}

fn tee(mut from: impl Read, mut terminal: impl Write, mut copy: impl Write) -> std::io::Result<()> {
    let mut buffer = [0; 8192];
    let mut plain = WithoutColor::default();
    let mut kept = Ok(());
    loop {
        let length = from.read(&mut buffer)?;
        if length == 0 {
            return kept;
        }
        // A closed terminal or a full disk must not block the validator: keep reading either way.
        let _ = terminal
            .write_all(&buffer[..length])
            .and_then(|()| terminal.flush());
        if kept.is_ok() {
            kept = copy.write_all(&plain.strip(&buffer[..length]));
        }
    }
}

/// A terminal that several validators write to: whole lines, each with its label. Without a label
/// everything passes at once.
#[derive(Debug)]
struct Labelled<W: Write> {
    label: Option<String>,
    terminal: W,
    line: Vec<u8>,
}

impl<W: Write> Labelled<W> {
    fn new(label: Option<&str>, terminal: W) -> Self {
        Self {
            label: label.map(str::to_owned),
            terminal,
            line: Vec::new(),
        }
    }
}

impl<W: Write> Write for Labelled<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let Some(label) = &self.label else {
            return self.terminal.write(bytes);
        };
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            if self.line.is_empty() {
                self.line.extend_from_slice(format!("{label}: ").as_bytes());
            }
            self.line.extend_from_slice(part);
            if part.ends_with(b"\n") {
                // In one call, and forgotten also when the terminal is gone.
                self.terminal.write_all(&std::mem::take(&mut self.line))?;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.terminal.flush()
    }
}

impl<W: Write> Drop for Labelled<W> {
    fn drop(&mut self) {
        if !self.line.is_empty() {
            self.line.push(b'\n');
            let _ = self.terminal.write_all(&self.line);
        }
    }
}

/// Removes the terminal's control sequences (`ESC [ … letter`), also when one is cut between two
/// reads.
#[derive(Debug, Default)]
struct WithoutColor {
    state: Sequence,
}

#[derive(Debug, Default, Clone, Copy)]
enum Sequence {
    #[default]
    Outside,
    Escape,
    Inside,
}

impl WithoutColor {
    fn strip(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut kept = Vec::with_capacity(bytes.len());
        for &byte in bytes {
            self.state = match (self.state, byte) {
                (Sequence::Outside, 0x1b) => Sequence::Escape,
                (Sequence::Escape, b'[') => Sequence::Inside,
                (Sequence::Inside, byte) if !(0x40..=0x7e).contains(&byte) => Sequence::Inside,
                (Sequence::Inside, _) => Sequence::Outside,
                (Sequence::Outside | Sequence::Escape, byte) => {
                    kept.push(byte);
                    Sequence::Outside
                }
            };
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::{Ending, Labelled, WithoutColor};

    #[test]
    fn validators_that_share_a_terminal_write_whole_lines_with_their_label() {
        let mut terminal = Vec::new();
        let mut one = Labelled::new(Some("g5.xlarge"), &mut terminal);
        for part in ["first\nsec", "ond\n\n", "cut"] {
            one.write_all(part.as_bytes()).expect("a vector grows");
        }
        drop(one);
        assert_eq!(
            String::from_utf8_lossy(&terminal),
            "g5.xlarge: first\ng5.xlarge: second\ng5.xlarge: \ng5.xlarge: cut\n"
        );
        terminal.clear();
        write!(Labelled::new(None, &mut terminal), "as it comes").expect("a vector grows");
        assert_eq!(terminal, b"as it comes");
    }

    #[test]
    fn only_the_validators_own_codes_are_verdicts() {
        for code in 0..=4_u8 {
            assert_eq!(Ending::Code(code.into()).exit_code().ok(), Some(code));
        }
        let trouble = |ending: Ending| ending.exit_code().expect_err("not a verdict").to_string();
        assert!(trouble(Ending::Code(101)).contains("panicked"));
        assert!(trouble(Ending::Code(127)).contains("could not be started"));
        assert!(trouble(Ending::Code(137)).contains("killed by signal 9"));
        assert!(trouble(Ending::Signal(11)).contains("killed by signal 11"));
        assert!(trouble(Ending::Code(64)).contains("exit code 64"));
    }

    #[test]
    fn the_kept_copy_has_no_colors() {
        let mut plain = WithoutColor::default();
        let mut kept = plain.strip(b"ok \x1b[1;3");
        kept.extend(plain.strip(b"2mgreen\x1b[0m \xe2\x9c\x93\n"));
        assert_eq!(
            String::from_utf8(kept).as_deref(),
            Ok("ok green \u{2713}\n")
        );
    }
}
