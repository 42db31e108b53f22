//! Standard output and standard error. Neither may be open: a closed pipe is no reason to panic or
//! to change a verdict. Any other error of standard output loses what a command was started for, so
//! that the command does not exit with 0.

use std::io::{self, ErrorKind, IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use validator_core::findings::ExitStatus;
use validator_core::report::HumanStyle;

/// Output of this process was lost, or is not where it was requested.
static OUTPUT_LOST: AtomicBool = AtomicBool::new(false);

/// When to colour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ColorChoice {
    /// On a terminal, unless NO_COLOR is set
    #[default]
    Auto,
    Always,
    Never,
}

impl ColorChoice {
    /// Whether to colour what goes to standard output.
    pub(crate) fn on_stdout(self) -> bool {
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = || std::env::var_os("TERM").is_some_and(|value| value == "dumb");
        match self {
            Self::Always => true,
            Self::Never => false,
            // Source of the variable: https://no-color.org
            Self::Auto => io::stdout().is_terminal() && !set("NO_COLOR") && !dumb(),
        }
    }
}

/// Writes to standard output; `false` when it took not all of it.
pub(crate) fn to_stdout(text: &str) -> bool {
    let mut stdout = io::stdout().lock();
    let written = stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush());
    match written {
        Ok(()) => true,
        Err(error) => {
            note_error_of_stdout(&error);
            false
        }
    }
}

/// A reader that ended (`| head`) has what it wants, and a program that was started without
/// standard output wants nothing; any other error is reported once and fails the command.
pub(crate) fn note_error_of_stdout(error: &io::Error) {
    let is_closed = error.raw_os_error() == Some(Errno::BADF.raw_os_error());
    if error.kind() == ErrorKind::BrokenPipe || is_closed {
        return;
    }
    if !OUTPUT_LOST.swap(true, Ordering::Relaxed) {
        to_stderr(&format!(
            "error: standard output could not be written: {error}\n"
        ));
    }
}

/// Notes that a report is not where it was requested.
pub(crate) fn note_lost_report() {
    OUTPUT_LOST.store(true, Ordering::Relaxed);
}

/// The exit status of a command: one that lost its output does not pass.
pub(crate) fn status_with_output(status: ExitStatus) -> ExitStatus {
    match status {
        ExitStatus::Passed if OUTPUT_LOST.load(Ordering::Relaxed) => ExitStatus::NotJudged,
        status => status,
    }
}

/// Columns of the terminal on standard output; files and pipes have a fixed width.
pub(crate) fn width_of_stdout() -> usize {
    let columns = std::env::var("COLUMNS").ok();
    let window = rustix::termios::tcgetwinsize(io::stdout()).ok();
    width_of(
        io::stdout().is_terminal(),
        columns.as_deref(),
        window.map(|it| it.ws_col),
    )
}

/// The user's `COLUMNS` comes before the size of the terminal, as in ls and git. A terminal of a
/// serial line or of a CI service has columns and no rows, or neither.
fn width_of(is_terminal: bool, columns: Option<&str>, window: Option<u16>) -> usize {
    let requested = columns.and_then(|it| it.parse().ok());
    let width = requested.or(window.map(usize::from));
    let width = width.filter(|it| is_terminal && *it > 0);
    width.unwrap_or(HumanStyle::WIDTH_OF_PIPES)
}

/// Writes to standard error, if it has a reader.
pub(crate) fn to_stderr(text: &str) {
    let mut stderr = io::stderr().lock();
    let _ = stderr
        .write_all(text.as_bytes())
        .and_then(|()| stderr.flush());
}

#[cfg(test)]
mod tests {
    use super::{HumanStyle, width_of};

    #[test]
    fn the_variable_comes_before_the_terminal_and_pipes_have_a_fixed_width() {
        assert_eq!(width_of(true, None, Some(200)), 200);
        assert_eq!(width_of(true, Some("80"), Some(200)), 80);
        for none in [None, Some(""), Some("wide"), Some("-1")] {
            assert_eq!(width_of(true, none, Some(80)), 80);
        }
        for (is_terminal, columns) in [(false, Some("80")), (true, None), (true, Some("0"))] {
            let width = width_of(is_terminal, columns, Some(0));
            assert_eq!(width, HumanStyle::WIDTH_OF_PIPES);
        }
    }
}
