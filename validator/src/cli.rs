//! The command line: its arguments, and the exit code of each command.

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{CommandFactory, Parser, Subcommand};

use crate::commands;
use crate::commands::worker::WorkerCommand;
use validator_core::findings::ExitStatus;

/// Reports whether this GPU node may take work.
///
/// Reads the machine (driver, CUDA, the health of every GPU), works every GPU with computations
/// that are verified, and reports each problem with its GPU and its remedy.
#[derive(Debug, Parser)]
#[command(
    name = "gpu-validator",
    version,
    long_version = env!("GPU_VALIDATOR_LONG_VERSION"),
    max_term_width = 100,
    after_long_help = format!("{}\n\n{EXAMPLES}", commands::EXIT_CODES),
    after_help = "Exit codes: 0 pass, 1 fail, 2 not judged, 3 bad input, 4 busy. More: gpu-validator --help",
    subcommand_required = true,
    arg_required_else_help = true
)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  Judge this node, with a report for CI:
      gpu-validator run --profile p5.48xlarge.yaml --junit report.xml
  Check before a job starts, in well under a second:
      gpu-validator run --level quick
  Collect on the node, judge elsewhere, again and again:
      gpu-validator collect -o facts.json
      gpu-validator judge facts.json --profile p5.48xlarge.yaml
  What changed between two runs, two images or two nodes?
      gpu-validator diff before.json after.json
  Judge a fleet, one line a node:
      gpu-validator judge facts/ --profile p5.48xlarge.yaml
  Judge other machines over ssh, with one report on all of them:
      gpu-validator run --targets hosts.txt --out reports/
  Merge the reports of many nodes:
      gpu-validator fleet report reports/ --html fleet.html
  Which CUDA toolkits and Python environments start on this driver and these GPUs?
      gpu-validator environment
      gpu-validator environment --explain \"torch 2.11 cu126 on B200 driver 570\"
  Multiply at the power limit for a minute, every product verified:
      gpu-validator burn --duration 60s
  Do many processes get the GPUs that they should, and leave nothing?
      gpu-validator allocation --workers 12 --duration 90s --memory 1GiB
  Why did a check fail, and what is to be done?
      gpu-validator checks explain row_remapping";

#[derive(Debug, Subcommand)]
enum Command {
    Run(Box<commands::run::Arguments>),
    Burn(commands::burn::Arguments),
    Allocation(Box<commands::allocation::Arguments>),
    Sentinel(commands::sentinel::Arguments),
    Collect(commands::collect::Arguments),
    Judge(commands::judge::Arguments),
    Diff(commands::diff::Arguments),
    /// Many nodes: their reports in one
    #[command(subcommand)]
    Fleet(commands::fleet::FleetCommand),
    Environment(commands::environment::Arguments),
    /// What is checked, why, and what to do when it fails
    #[command(subcommand)]
    Checks(commands::checks::ChecksCommand),
    /// Node requirements (profile)
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
    #[command(hide = true)]
    PythonProof(crate::probe::environment::launch::Arguments),
}

impl Command {
    /// A hook takes nothing from the variables of a job, and workers inherit those of their parent.
    fn is_started_by_a_person(&self) -> bool {
        !matches!(
            self,
            Self::Hook(_) | Self::Worker(_) | Self::PythonProof(_) | Self::Generate(_)
        )
    }

    /// Whether its exit code alone is its answer.
    fn is_gate(&self) -> bool {
        matches!(
            self,
            Self::Hook(_) | Self::Kubernetes(commands::kubernetes::KubernetesCommand::Gate(_))
        )
    }
}

/// The whole program: reads the arguments, does what they ask, returns the exit code.
pub fn main() -> ExitCode {
    run(std::env::args_os())
}

fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    // First of all: a signal that comes before the handlers ends a command without a report.
    if commands::refused_arguments::stops_on_signals(&arguments) {
        // Each command installs them again and reports the failure.
        let _ = commands::run::stop_on_signals();
    }
    wait_for_children();
    if let Err(error) = commands::hook::administrator::restart(&arguments) {
        commands::hook::refuse(&error);
        return refused(&arguments);
    }
    let command_line = match CommandLine::try_parse_from(&arguments) {
        Ok(command_line) => command_line,
        Err(error) => {
            let printed = error.print();
            if error.use_stderr() {
                // Nothing is left to do when the terminal is gone.
                return refused(&arguments);
            }
            // clap leaves a rest in the buffer of standard output.
            let printed = printed.and_then(|()| std::io::Write::flush(&mut std::io::stdout()));
            if let Err(error) = printed {
                commands::terminal::note_error_of_stdout(&error);
            }
            let status = commands::terminal::status_with_output(ExitStatus::Passed);
            return ExitCode::from(status as u8);
        }
    };
    outlive_file_size_limits();
    if command_line.command.is_started_by_a_person() {
        commands::variables::warn_of_unknown(&CommandLine::command());
    }
    let answer = match &command_line.command {
        Command::Run(arguments) => commands::run::run(arguments),
        Command::Burn(arguments) => commands::burn::burn(arguments),
        Command::Allocation(arguments) => commands::allocation::allocation(arguments),
        Command::Sentinel(arguments) => commands::sentinel::sentinel(arguments),
        Command::Collect(arguments) => commands::collect::collect(arguments),
        Command::Judge(arguments) => commands::judge::judge(arguments),
        Command::Diff(arguments) => commands::diff::diff(arguments),
        Command::Fleet(command) => commands::fleet::fleet(command),
        Command::Environment(arguments) => commands::environment::environment(arguments),
        Command::Checks(command) => commands::checks::checks(command),
        Command::Profile(command) => commands::profile::profile(command),
        Command::Hook(command) => commands::hook::hook(command),
        Command::Kubernetes(command) => commands::kubernetes::kubernetes(command),
        Command::Schema(arguments) => Ok(commands::schema::schema(arguments)),
        Command::Generate(command) => commands::generate::generate(command, CommandLine::command()),
        Command::Worker(command) => return commands::worker::run(command),
        Command::PythonProof(arguments) => {
            return crate::probe::environment::launch::launch(arguments);
        }
    };
    match answer {
        // The runner and the kubelet read the exit code as a statement on the node: a full disk
        // does not change it.
        Ok(status) if command_line.command.is_gate() => ExitCode::from(status as u8),
        Ok(status) => ExitCode::from(commands::terminal::status_with_output(status) as u8),
        Err(error) => {
            let text = validator_core::report::printable(&format!("{error:#}"));
            commands::terminal::to_stderr(&format!("error: {text}\n"));
            let is_busy = error.is::<commands::running_burns::AlreadyBurned>();
            let status = if is_busy {
                ExitStatus::Busy
            } else {
                ExitStatus::BadInput
            };
            ExitCode::from(status as u8)
        }
    }
}

/// The end of a command whose arguments are refused. clap answers them with 2, which here means
/// that something could not be judged.
fn refused(arguments: &[OsString]) -> ExitCode {
    if let Err(error) = commands::refused_arguments::discard_outputs(arguments) {
        commands::terminal::to_stderr(&format!("error: {error:#}\n"));
    }
    ExitCode::from(ExitStatus::BadInput as u8)
}

/// A file that may not grow (`ulimit -f`) is then one that cannot be written, as on a full disk,
/// and not the end of this process.
fn outlive_file_size_limits() {
    let noted = Arc::default();
    // Without the handler everything else is as it was.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, noted);
}

/// A parent that ignores SIGCHLD leaves that to this process, whose children would then end without
/// a status and read as stuck.
fn wait_for_children() {
    use signal_hook::consts::SIGCHLD;
    if commands::run::is_ignored(SIGCHLD) {
        // With any handler the kernel keeps the status of an ended child.
        let _ = signal_hook::flag::register(SIGCHLD, Arc::default());
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_is_consistent() {
        <super::CommandLine as clap::CommandFactory>::command().debug_assert();
    }

    /// The help of this command and of those below it that users see.
    fn help_of(command: &mut clap::Command) -> Vec<String> {
        let mut texts = vec![command.render_long_help().to_string()];
        let visible = command.get_subcommands_mut().filter(|it| !it.is_hide_set());
        texts.extend(visible.flat_map(help_of));
        texts
    }

    #[test]
    fn help_is_in_standard_terms() {
        let avoided = include_str!("../core/tests/avoided_words.txt");
        let texts = help_of(&mut <super::CommandLine as clap::CommandFactory>::command());
        assert!(texts.len() > 20, "{} subcommands are not all", texts.len());
        for line in texts.iter().flat_map(|it| it.lines()) {
            let mut words = line.split(|it: char| !it.is_alphanumeric());
            let found = words.find(|it| avoided.lines().any(|word| word.eq_ignore_ascii_case(it)));
            assert_eq!(found, None, "{line}");
        }
    }
}
