//! Tasks of other crates of the workspace: the crate is built, and its program takes this process's
//! place.
//!
//! The programs are started, not linked, so that one task compiles only this crate and its own.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use anyhow::Context as _;

use crate::workspace;

/// All words after a task's name, `--help` included.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Words {
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGUMENT"
    )]
    words: Vec<OsString>,
}

impl Words {
    pub(crate) fn start_with(&self, word: &str) -> bool {
        self.words.first().is_some_and(|first| first == word)
    }

    #[cfg(test)]
    pub(crate) fn words(&self) -> &[OsString] {
        &self.words
    }
}

/// Returns only when the program cannot be built or started.
pub(crate) fn run(package: &str, task: &str, words: &Words) -> anyhow::Result<ExitCode> {
    let program = workspace::program(&workspace::shell()?, package)?;
    let error = Command::new(&program).arg(task).args(&words.words).exec();
    Err(error).with_context(|| format!("{} could not be started", program.display()))
}
