//! `gpu-validator collect`: look at this machine and write what was seen, without judging.

use std::path::{Path, PathBuf};

use super::burn_options::BurnOfRun;
use super::report_files::{ClaimedOutputs, facts_json, save_elsewhere, write_whole};
use super::run::{probe_options, refuse_missing_sysroot, stop_on_signals, watch};
use super::terminal::{to_stderr, to_stdout};
use crate::session::SessionOptions;
use validator_core::findings::ExitStatus;
use validator_core::level::Level;

/// Read this machine and write the facts, without judging
///
/// Exits with 0 when everything was read and written, with 2 when the run was stopped or the
/// file could not be written where it was requested (it is then saved elsewhere, and its place is
/// printed).
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Where to write the facts; standard output without it
    #[arg(long, short, value_name = "FILE", env = "GPU_VALIDATOR_FACTS")]
    output: Option<PathBuf>,
    /// How much to read
    #[arg(long, value_parser = crate::cli_values::level(), default_value_t, env = "GPU_VALIDATOR_LEVEL")]
    level: Level,
    #[command(flatten)]
    burn: BurnOfRun,
    /// The profile names services that are read in addition to NVIDIA's own
    #[arg(long, value_name = "FILE", env = "GPU_VALIDATOR_PROFILE")]
    profile: Option<PathBuf>,
    /// Replace serial numbers, UUIDs, the host name and the instance id, alike wherever they appear
    #[arg(long)]
    anonymize: bool,
    /// Read the host's files below this folder
    #[arg(long, value_name = "DIR")]
    sysroot: Option<PathBuf>,
}

pub(crate) fn collect(arguments: &Arguments) -> anyhow::Result<ExitStatus> {
    let interrupt = stop_on_signals()?;
    let outputs: Vec<&Path> = arguments.output.as_deref().into_iter().collect();
    let inputs: Vec<&Path> = arguments.profile.as_deref().into_iter().collect();
    let _outputs = ClaimedOutputs::of_paths(&outputs, &inputs)?;
    let profile = match arguments.profile.as_deref() {
        Some(path) => crate::profile_file::load(path)?,
        None => validator_core::profile::Profile::default(),
    };
    refuse_missing_sysroot(arguments.sysroot.as_deref())?;
    let probe = probe_options(arguments.level, arguments.sysroot.clone(), &profile);
    let mut options = SessionOptions::from(probe);
    options.burn = arguments.burn.plan(arguments.level, &profile)?;
    options.allocation = arguments.burn.allocation(arguments.level, &options.burn);
    let mut facts = watch(options, &interrupt, &mut |_, _| {});
    if arguments.anonymize {
        facts = facts.anonymized()?;
    }
    let text = facts_json(&facts);
    let path = arguments
        .output
        .as_deref()
        .filter(|it| *it != Path::new("-"));
    let written = match path {
        None => to_stdout(&text),
        Some(path) => match write_whole(path, text.as_bytes()) {
            Ok(()) => true,
            Err(error) => {
                save_elsewhere("facts", path, &error, &text);
                false
            }
        },
    };
    if let Some(reason) = &facts.interrupted {
        to_stderr(&format!("warning: the facts are not complete: {reason}\n"));
    }
    if written && facts.interrupted.is_none() {
        Ok(ExitStatus::Passed)
    } else {
        Ok(ExitStatus::NotJudged)
    }
}
