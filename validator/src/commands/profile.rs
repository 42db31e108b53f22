//! `gpu-validator profile`: write and check profiles.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

use super::judge::read_facts;
use super::report_files::write_whole;
use super::run::{probe_options, stop_on_signals, watch};
use super::terminal::{to_stderr, to_stdout};
use validator_core::findings::{ExitStatus, Run};
use validator_core::level::Level;
use validator_core::profile::Profile;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum ProfileCommand {
    /// Write a profile that this node, as it is, would pass
    ///
    /// Meant for a node that is known to be good: what it has becomes what is expected. Read it
    /// before you use it.
    Init {
        /// Take what was seen of another machine before, not this one
        #[arg(long, value_name = "FILE")]
        facts: Option<PathBuf>,
        /// Where to write the profile; standard output without it
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Print a profile with what it extends as JSON, or one value of it
    Show {
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Only the value of this key, as a script reads it: `firstboot.on_failure`
        #[arg(long, value_name = "KEY")]
        key: Option<String>,
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
        ProfileCommand::Show { file, key } => show(file, key.as_deref()),
        ProfileCommand::Check { files } => Ok(check(files)),
    }
}

fn init(facts: Option<&Path>, output: Option<&Path>) -> anyhow::Result<ExitStatus> {
    let profile = Profile::default();
    let facts = match facts {
        Some(path) => read_facts(path)?,
        None => watch(
            probe_options(Level::Quick, None, &profile).into(),
            &stop_on_signals()?,
            &mut |_, _| {},
        ),
    };
    if facts.gpus.is_empty() {
        bail!("no GPU was found, so there is nothing to write a profile from");
    }
    let text = validator_core::profile::init(&facts);
    let level = facts.level;
    let run = Run::judged(facts, &profile, Run::BUILT_IN_PROFILE, level);
    if run.counts().fail > 0 || run.incomplete.is_some() {
        to_stderr(&format!(
            "warning: {}; the profile takes this node as it is for what is expected\n",
            validator_core::report::verdict_sentence(&run)
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

fn show(file: &Path, key: Option<&str>) -> anyhow::Result<ExitStatus> {
    let profile = crate::profile_file::load(file).map_err(|error| anyhow::anyhow!("{error}"))?;
    let whole = serde_json::to_value(&profile).context("the profile cannot be written")?;
    let mut value = &whole;
    for name in key.into_iter().flat_map(|key| key.split('.')) {
        value = value.get(name).with_context(|| {
            let key = key.unwrap_or_default();
            format!("a profile has no key `{key}`: there is no `{name}`")
        })?;
    }
    let text = match value {
        serde_json::Value::String(text) => format!("{text}\n"),
        value => format!("{value:#}\n"),
    };
    to_stdout(&text);
    Ok(ExitStatus::Passed)
}

fn check(files: &[PathBuf]) -> ExitStatus {
    let mut status = ExitStatus::Passed;
    for file in files {
        match crate::profile_file::load(file) {
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
