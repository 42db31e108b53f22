//! `gpu-validator profile`: write and check profiles.

use std::path::PathBuf;

use super::terminal::to_stdout;
use crate::findings::ExitStatus;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum ProfileCommand {
    /// Check profiles: unknown keys, wrong types, contradictions, what they extend
    Check {
        #[arg(value_name = "FILE", required = true)]
        files: Vec<PathBuf>,
    },
}

pub(crate) fn profile(command: &ProfileCommand) -> anyhow::Result<ExitStatus> {
    match command {
        ProfileCommand::Check { files } => check(files),
    }
}

fn check(files: &[PathBuf]) -> anyhow::Result<ExitStatus> {
    let mut status = ExitStatus::Passed;
    for file in files {
        match crate::profile::load(file) {
            Ok(_) => {
                to_stdout(&format!("{}: valid\n", file.display()));
            }
            Err(error) => {
                super::terminal::to_stderr(&format!("error: {error}\n"));
                status = ExitStatus::BadInput;
            }
        }
    }
    Ok(status)
}
