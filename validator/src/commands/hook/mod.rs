//! `gpu-validator hook …`: what a CI runner starts before and after each job.

pub(crate) mod administrator;
mod post_job;
mod pre_job;
mod release;

use std::path::PathBuf;

use super::terminal::{to_stderr, to_stdout};
use crate::runner_hook::runner_labels::{ApiAccess, RunnerLabels, Token};
use crate::runner_hook::state_folder::StateFolders;
use validator_core::findings::ExitStatus;
use validator_core::report::{one_line, printable, workflow_command};

/// What a CI runner starts before and after each job.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum HookCommand {
    PreJob(pre_job::Arguments),
    PostJob(post_job::Arguments),
    Release(release::Arguments),
}

pub(crate) fn hook(command: &HookCommand) -> anyhow::Result<ExitStatus> {
    match command {
        HookCommand::PreJob(arguments) => pre_job::pre_job(arguments),
        HookCommand::PostJob(arguments) => post_job::post_job(arguments),
        HookCommand::Release(arguments) => release::release(arguments),
    }
}

/// Which runner this is. Hooks get no arguments from the runner, so every option has a variable,
/// for the administrator's file.
#[derive(Debug, clap::Args)]
struct RunnerOptions {
    /// The administrator's settings, NAME=value a line, for every option that has a variable: owned
    /// by root, or by this user where it is named here. hook-RUNNER.env in the same folder is for
    /// one runner and wins
    #[arg(long, value_name = "FILE", default_value = administrator::SETTINGS)]
    settings: PathBuf,
    /// This is the second start, with a cleaned environment
    #[arg(long, hide = true)]
    environment_is_clean: bool,
    /// Where quarantine and job records are [default: /var/lib/gpu-validator, else the user's
    /// ~/.local/state/gpu-validator]
    #[arg(long, value_name = "DIR", env = "GPU_VALIDATOR_HOOK_STATE")]
    state: Option<PathBuf>,
    /// The GPUs of this runner, by UUID or PCI address [default: what CUDA_VISIBLE_DEVICES or
    /// NVIDIA_VISIBLE_DEVICES leave, else all]
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        env = "GPU_VALIDATOR_HOOK_GPUS"
    )]
    gpu: Vec<String>,
    /// Read the host's files below this folder
    #[arg(
        long,
        value_name = "DIR",
        env = "GPU_VALIDATOR_HOOK_SYSROOT",
        hide_env = true
    )]
    sysroot: Option<PathBuf>,
    /// Deadlines times this, for tests
    #[arg(
        long,
        value_name = "FACTOR",
        default_value_t = 1.0,
        env = "GPU_VALIDATOR_HOOK_DEADLINE_SCALE",
        hide = true
    )]
    deadline_scale: f64,
}

impl RunnerOptions {
    fn folders(&self) -> StateFolders {
        StateFolders::new(self.state.as_deref())
    }
}

/// How to take labels from a quarantined runner and to give them back.
#[derive(Debug, clap::Args)]
struct LabelOptions {
    /// Take the runner's labels away while it is quarantined, with the token in this file (or in
    /// GPU_VALIDATOR_HOOK_TOKEN); a job can read whatever its runner can
    #[arg(long, value_name = "FILE", env = "GPU_VALIDATOR_HOOK_TOKEN_FILE")]
    token_file: Option<PathBuf>,
    /// Where the runner is registered: repos/OWNER/NAME, orgs/NAME, enterprises/NAME [default: the
    /// job's repository]
    #[arg(long, value_name = "SCOPE", env = "GPU_VALIDATOR_HOOK_RUNNER_SCOPE")]
    runner_scope: Option<String>,
}

impl LabelOptions {
    /// `None` where no token was given, which is the wish to leave labels alone.
    fn labels_of(
        &self,
        runner: &str,
        repository: &str,
        wait_scale: f64,
    ) -> anyhow::Result<Option<RunnerLabels>> {
        let variable = std::env::var("GPU_VALIDATOR_HOOK_TOKEN").ok();
        let Some(token) = Token::read(self.token_file.as_ref(), variable)? else {
            return Ok(None);
        };
        let api_url = std::env::var("GITHUB_API_URL")
            .ok()
            .filter(|it| !it.is_empty());
        let access = ApiAccess {
            // Source of the default: GitHub Actions documentation, default environment variables.
            api_url: api_url.unwrap_or_else(|| "https://api.github.com".to_owned()),
            scope: self
                .runner_scope
                .clone()
                .unwrap_or_else(|| format!("repos/{repository}")),
            token,
            wait_scale,
        };
        RunnerLabels::new(access, runner).map(Some)
    }
}

/// Which verdict fails the job, in the words of the action's `fail-on`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum FailOn {
    /// Everything but a pass
    NotPass,
    /// A failure, or something that could not be judged; GPUs that others use are tolerated
    NotJudged,
    /// A failure only
    Fail,
    /// Nothing: the verdict is only reported
    Never,
}

impl FailOn {
    fn fails(self, status: ExitStatus) -> bool {
        match status {
            ExitStatus::Passed => false,
            ExitStatus::Failed => self != Self::Never,
            ExitStatus::NotJudged => matches!(self, Self::NotPass | Self::NotJudged),
            ExitStatus::Busy => self == Self::NotPass,
            ExitStatus::BadInput => true,
        }
    }
}

/// Reports a hook that cannot start.
pub(crate) fn refuse(error: &anyhow::Error) {
    let github = std::env::var_os("GITHUB_ACTIONS").is_some_and(|it| it == "true");
    let message = format!("nothing was judged: {error:#}");
    tell(github, "error", "GPU runner hook", &message);
    to_stderr(&format!("error: {}\n", printable(&format!("{error:#}"))));
}

/// Writes a line to the job's log: as an annotation, or as a plain line outside of GitHub.
fn tell(github: bool, severity: &str, title: &str, message: &str) {
    if github {
        to_stdout(&workflow_command(severity, title, message));
    } else {
        let lines: Vec<String> = message.lines().map(one_line).collect();
        to_stderr(&format!("{severity}: {title}: {}\n", lines.join("\n")));
    }
}

#[cfg(test)]
mod tests {
    use super::{ExitStatus, FailOn};

    #[test]
    fn what_fails_a_job() {
        use ExitStatus::{BadInput, Busy, Failed, NotJudged, Passed};
        for (fail_on, failing) in [
            (FailOn::NotPass, &[Failed, NotJudged, BadInput, Busy][..]),
            (FailOn::NotJudged, &[Failed, NotJudged, BadInput]),
            (FailOn::Fail, &[Failed, BadInput]),
            (FailOn::Never, &[BadInput]),
        ] {
            for status in [Passed, Failed, NotJudged, BadInput, Busy] {
                assert_eq!(
                    fail_on.fails(status),
                    failing.contains(&status),
                    "{fail_on:?} {status:?}"
                );
            }
        }
    }
}
