//! `gpu-validator diff`: what differs between two runs.

use std::path::{Path, PathBuf};

use super::judge::read_facts;
use super::terminal::to_stdout;
use validator_core::comparison::compare;
use validator_core::findings::{ExitStatus, Run};
use validator_core::profile::Profile;

/// Compare two runs: facts, verdicts, and figures beyond their noise
///
/// Both facts files are judged by the same profile; GPUs are matched by PCI address. Exits with 1
/// where a verdict of the second run is worse than that of the first, else with 0, and with 3 for
/// files that are no facts.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Facts of the first run, as `run --facts` and `collect` write them
    #[arg(value_name = "BEFORE")]
    before: PathBuf,
    /// Facts of the second run
    #[arg(value_name = "AFTER")]
    after: PathBuf,
    /// Node requirements (profile)
    #[arg(long, value_name = "FILE", env = "GPU_VALIDATOR_PROFILE")]
    profile: Option<PathBuf>,
    /// As JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn diff(arguments: &Arguments) -> anyhow::Result<ExitStatus> {
    let profile = match arguments.profile.as_deref() {
        Some(path) => crate::profile_file::load(path)?,
        None => Profile::default(),
    };
    let judged = |path: &Path| -> anyhow::Result<Run> {
        let facts = read_facts(path)?;
        let level = facts.level;
        Ok(Run::judged(facts, &profile, Run::BUILT_IN_PROFILE, level))
    };
    let comparison = compare(&judged(&arguments.before)?, &judged(&arguments.after)?);
    let text = if arguments.json {
        serde_json::to_string_pretty(&comparison)? + "\n"
    } else {
        comparison.to_string()
    };
    to_stdout(&text);
    Ok(if comparison.is_worse {
        ExitStatus::Failed
    } else {
        ExitStatus::Passed
    })
}
