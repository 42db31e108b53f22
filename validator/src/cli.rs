//! The command line: what can be asked for, and the exit code of each answer.

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{CommandFactory, Parser, Subcommand};

use crate::commands;
use crate::findings::ExitStatus;
use crate::worker::WorkerCommand;

/// Says whether this GPU node may take work.
///
/// Reads the machine (driver, CUDA, the health of every GPU), works every GPU with computations that are verified, and
/// says what is wrong, on which GPU, and what to do.
#[derive(Debug, Parser)]
#[command(
    name = "gpu-validator",
    version,
    long_version = env!("GPU_VALIDATOR_LONG_VERSION"),
    max_term_width = 100,
    after_long_help = format!("{EXIT_CODES}\n\n{EXAMPLES}"),
    after_help = "Exit codes: 0 pass, 1 fail, 2 not judged, 3 bad input, 4 busy. More: gpu-validator --help",
    subcommand_required = true,
    arg_required_else_help = true
)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

pub(crate) const EXIT_CODES: &str = "\
Exit codes:
  0  everything was judged and nothing failed; warnings are allowed
  1  at least one check failed: this node must not take work
  2  nothing failed, but something could not be judged (or the run was stopped): this is not a pass
  3  bad input: the profile or the arguments are wrong; nothing was judged
  4  nothing failed, and the only thing not judged is load on GPUs that others are using";

const EXAMPLES: &str = "\
Examples:
  Judge this node, with a report for CI:
      gpu-validator run --profile p5.48xlarge.yaml --junit report.xml
  Look before a job starts, in well under a second:
      gpu-validator run --level quick
  Collect on the node, judge elsewhere, again and again:
      gpu-validator collect -o facts.json
      gpu-validator judge facts.json --profile p5.48xlarge.yaml
  Judge a fleet, one line a node:
      gpu-validator judge facts/ --profile p5.48xlarge.yaml
  Multiply at the power limit for a minute, every product verified:
      gpu-validator burn --duration 60s
  Why did a check fail, and what is to be done?
      gpu-validator checks explain row_remapping";

#[derive(Debug, Subcommand)]
enum Command {
    Run(commands::run::Arguments),
    Burn(commands::burn::Arguments),
    Collect(commands::collect::Arguments),
    Judge(commands::judge::Arguments),
    /// What is checked, why, and what to do when it fails
    #[command(subcommand)]
    Checks(commands::checks::ChecksCommand),
    /// Profiles: what a node must be
    #[command(subcommand)]
    Profile(commands::profile::ProfileCommand),
    /// Before and after each job of a CI runner: gate, clean, quarantine
    #[command(subcommand)]
    Hook(commands::hook::HookCommand),
    #[command(subcommand)]
    Kubernetes(commands::kubernetes::KubernetesCommand),
    Schema(commands::schema::Arguments),
    #[command(subcommand, hide = true)]
    Generate(commands::generate::GenerateCommand),
    #[command(subcommand, hide = true)]
    Worker(WorkerCommand),
}

/// The whole program: reads the arguments, does what they ask, returns the exit code.
pub fn main() -> ExitCode {
    run(std::env::args_os())
}

fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let command_line = match CommandLine::try_parse_from(arguments) {
        Ok(command_line) => command_line,
        Err(error) => {
            // Nothing is left to do when the terminal is gone.
            let _ = error.print();
            // clap answers bad arguments with 2, which here means that something could not be judged.
            return ExitCode::from(if error.use_stderr() {
                ExitStatus::BadInput as u8
            } else {
                0
            });
        }
    };
    outlive_file_size_limits();
    let answer = match &command_line.command {
        Command::Run(arguments) => commands::run::run(arguments),
        Command::Burn(arguments) => commands::burn::burn(arguments),
        Command::Collect(arguments) => commands::collect::collect(arguments),
        Command::Judge(arguments) => commands::judge::judge(arguments),
        Command::Checks(command) => commands::checks::checks(command),
        Command::Profile(command) => commands::profile::profile(command),
        Command::Hook(command) => commands::hook::hook(command),
        Command::Kubernetes(command) => commands::kubernetes::kubernetes(command),
        Command::Schema(arguments) => Ok(commands::schema::schema(arguments)),
        Command::Generate(command) => commands::generate::generate(command),
        Command::Worker(command) => return crate::worker::run(command),
    };
    match answer {
        Ok(status) => ExitCode::from(status as u8),
        Err(error) => {
            commands::terminal::to_stderr(&format!("error: {error:#}\n"));
            ExitCode::from(ExitStatus::BadInput as u8)
        }
    }
}

/// A file that may not grow (`ulimit -f`) is then one that cannot be written, as on a full disk, and not the end of this process.
fn outlive_file_size_limits() {
    let noted = Arc::default();
    // Without the handler everything else is as it was.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, noted);
}

/// The command line as clap knows it, for the man page and the completions.
pub(crate) fn command() -> clap::Command {
    CommandLine::command()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_is_consistent() {
        super::command().debug_assert();
    }
}
