//! `gpu-validator hook release`: lift the quarantine.

use anyhow::Context as _;

use super::super::terminal::{to_stderr, to_stdout};
use super::{LabelOptions, RunnerOptions};
use crate::runner_hook::quarantine::Quarantine;
use validator_core::findings::ExitStatus;
use validator_core::report::one_line;

/// Lift the quarantine of this machine's runners, once the machine is repaired
///
/// Reports the quarantine that is lifted, since when it held and why.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Only the runner of this name [default: all of the machine]
    #[arg(value_name = "RUNNER")]
    name: Option<String>,
    /// Give these labels back to the runner at GitHub, with the token; a job may have forged the
    /// file
    #[arg(long, value_name = "LIST", value_delimiter = ',', requires = "name")]
    give_labels: Vec<String>,
    #[command(flatten)]
    runner: RunnerOptions,
    #[command(flatten)]
    labels: LabelOptions,
}

pub(crate) fn release(arguments: &Arguments) -> anyhow::Result<ExitStatus> {
    let folders = arguments.runner.folders();
    let mut marks = Quarantine::all(&folders)?;
    if let Some(name) = &arguments.name {
        marks.retain(|(_, mark)| mark.job.runner == *name);
    }
    if let Some(name) = &arguments.name
        && !arguments.give_labels.is_empty()
    {
        give_labels_back(arguments, name)?;
    }
    if marks.is_empty() {
        let who = arguments
            .name
            .as_deref()
            .unwrap_or("no runner of this machine");
        let not = if arguments.name.is_some() {
            "is not"
        } else {
            "is"
        };
        to_stdout(&format!(
            "{who} {not} quarantined (folder {})\n",
            folders.in_words()
        ));
        return Ok(ExitStatus::Passed);
    }
    for (file, mark) in marks {
        Quarantine::lift(&file)?;
        let path = file.path();
        let path = path.display();
        to_stdout(&format!(
            "{path}: lifted; it held since {}: {}\n",
            one_line(&mark.since),
            one_line(&mark.reason)
        ));
        if !mark.labels_removed.is_empty() && arguments.give_labels.is_empty() {
            to_stderr(&format!(
                "runner {} has lost its labels at GitHub: {}; give them back there, or with --give-labels\n",
                one_line(&mark.job.runner),
                one_line(&mark.labels_removed.join(","))
            ));
        }
    }
    Ok(ExitStatus::Passed)
}

fn give_labels_back(arguments: &Arguments, runner: &str) -> anyhow::Result<()> {
    let repository = std::env::var("GITHUB_REPOSITORY").unwrap_or_default();
    let labels =
        arguments
            .labels
            .labels_of(runner, &repository, arguments.runner.deadline_scale)?;
    let labels = labels.context("--give-labels needs a token: --token-file")?;
    labels
        .restore(&arguments.give_labels)
        .context("the labels could not be given back, and the quarantine stays")?;
    to_stdout(&format!(
        "{runner} has its labels again: {}\n",
        arguments.give_labels.join(", ")
    ));
    Ok(())
}
