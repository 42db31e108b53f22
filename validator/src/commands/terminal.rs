//! Standard output and standard error. Neither may be open: a closed pipe is no reason to panic or to change a verdict.

use std::io::{IsTerminal as _, Write as _};

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
            Self::Auto => std::io::stdout().is_terminal() && !set("NO_COLOR") && !dumb(),
        }
    }
}

/// Writes to standard output; `false` when nobody reads it any more.
pub(crate) fn to_stdout(text: &str) -> bool {
    let mut stdout = std::io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .is_ok()
}

/// Writes to standard error, if anybody reads it.
pub(crate) fn to_stderr(text: &str) {
    let mut stderr = std::io::stderr().lock();
    let _ = stderr
        .write_all(text.as_bytes())
        .and_then(|()| stderr.flush());
}
