//! `gpu-validator profile`: write and check profiles.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

use super::judge::read_facts;
use super::report_files::write_whole;
use super::run::{probe_options, stop_on_signals, watch};
use super::terminal::{to_stderr, to_stdout};
use crate::findings::{ExitStatus, Run};
use crate::level::Level;
use crate::profile::Profile;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum ProfileCommand {
    /// Write a profile that this node, as it is, would pass
    ///
    /// Meant for a node that is known to be good: what it has becomes what is expected. Read it before you use it.
    Init {
        /// Take what was seen of another machine before, not this one
        #[arg(long, value_name = "FILE")]
        facts: Option<PathBuf>,
        /// Where to write the profile; standard output without it
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Check profiles: unknown keys, wrong types, contradictions, what they extend
    Check {
        #[arg(value_name = "FILE", required = true)]
        files: Vec<PathBuf>,
    },
}

pub(crate) fn profile(command: &ProfileCommand) -> anyhow::Result<ExitStatus> {
    match command {
        ProfileCommand::Init { facts, output } => init(facts.as_deref(), output.as_deref()),
        ProfileCommand::Check { files } => Ok(check(files)),
    }
}

fn init(facts: Option<&Path>, output: Option<&Path>) -> anyhow::Result<ExitStatus> {
    let profile = Profile::default();
    let facts = match facts {
        Some(path) => read_facts(path)?,
        None => watch(
            probe_options(Level::Quick, None, &profile),
            &stop_on_signals()?,
            &mut |_, _| {},
        ),
    };
    if facts.gpus.is_empty() {
        bail!("no GPU was found, so there is nothing to write a profile from");
    }
    let text = crate::profile::init(&facts);
    let level = facts.level;
    let run = Run::judged(facts, &profile, Run::BUILT_IN_PROFILE, level);
    if run.counts().fail > 0 || run.incomplete.is_some() {
        to_stderr(&format!(
            "warning: {}; the profile takes this node as it is for what is expected\n",
            crate::report::verdict_sentence(&run)
        ));
    }
    match output {
        None => {
            to_stdout(&text);
        }
        Some(path) if path.exists() => bail!("{} is already there", path.display()),
        Some(path) => write_whole(path, text.as_bytes())
            .with_context(|| format!("cannot write {}", path.display()))?,
    }
    Ok(ExitStatus::Passed)
}

fn check(files: &[PathBuf]) -> ExitStatus {
    let mut status = ExitStatus::Passed;
    for file in files {
        match crate::profile::load(file) {
            Ok(_) => {
                to_stdout(&format!("{}: valid\n", file.display()));
            }
            Err(error) => {
                to_stderr(&format!("error: {error}\n"));
                status = ExitStatus::BadInput;
            }
        }
    }
    status
}
