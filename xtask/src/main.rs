//! `cargo xtask <task>`: everything a developer or an image builder runs.

/// Tells the user something. Unlike `eprintln!` it does not panic when the terminal is gone: what was begun must still be
/// brought to its end then.
macro_rules! say {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($words)*);
    }};
}

mod ami;
mod ci;
mod codegen;
mod debian_userland;
mod dist;
mod fault_matrix;
mod fleet;
mod fuzz;
mod glibc_floor;
mod images;
mod interrupts;
mod junit_readers;
mod k8s;
mod kernels;
mod loopback;
mod nvml_clients;
mod packer;
mod runner_image;
mod runners;
mod sbom;
mod simulate;
mod tf;
mod tools;
mod validate_ami;
mod validator_image;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Builds, drives and checks gpu-validator.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct CommandLine {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    ValidateAmi(Box<validate_ami::Arguments>),
    Dist(dist::Arguments),
    Simulate(simulate::Arguments),
    Ami(ami::Arguments),
    RunnerImage(runner_image::Arguments),
    Images(images::Arguments),
    FaultMatrix(fault_matrix::Arguments),
    Codegen(codegen::Arguments),
    Ci(ci::Arguments),
    JunitReaders(junit_readers::Arguments),
    NvmlClients(nvml_clients::Arguments),
    Fuzz(fuzz::Arguments),
    K8s(k8s::Arguments),
    Runners(runners::Arguments),
    ValidatorImage(validator_image::Arguments),
    Fleet(fleet::Arguments),
    /// Build the GPU kernels to PTX and cubins
    Kernels {
        #[arg(long)]
        check: bool,
    },
    Tf(tf::Arguments),
    Tools(tools::Arguments),
}

/// What the shell sees when the arguments themselves are wrong; the validator uses the same number.
const EXIT_CODE_BAD_INPUT: u8 = 3;

fn main() -> ExitCode {
    let command_line = match CommandLine::try_parse() {
        Ok(command_line) => command_line,
        Err(error) => {
            // Nothing is left to do when the terminal is gone.
            let _ = error.print();
            let code = if error.use_stderr() {
                EXIT_CODE_BAD_INPUT
            } else {
                0
            };
            return ExitCode::from(code);
        }
    };
    let outcome = match command_line.task {
        Task::ValidateAmi(arguments) => return validate_ami::run(&arguments),
        Task::Simulate(arguments) => return simulate::run(&arguments),
        Task::Tf(arguments) => return tf::run(&arguments),
        Task::Ami(arguments) => return ami::run(&arguments),
        Task::RunnerImage(arguments) => runner_image::run(&arguments),
        Task::Images(arguments) => images::run(&arguments),
        Task::K8s(arguments) => return code_or_bad_input(k8s::run(&arguments)),
        Task::Fleet(arguments) => return code_or_bad_input(fleet::run(&arguments)),
        Task::Runners(arguments) => runners::run(&arguments),
        Task::ValidatorImage(arguments) => validator_image::run(&arguments),
        Task::Dist(arguments) => dist::run(&arguments),
        Task::FaultMatrix(arguments) => fault_matrix::run(&arguments),
        Task::Codegen(arguments) => codegen::run(&arguments),
        Task::Ci(arguments) => return ci::run(&arguments),
        Task::JunitReaders(arguments) => junit_readers::run(&arguments),
        Task::NvmlClients(arguments) => nvml_clients::run(&arguments),
        Task::Fuzz(arguments) => fuzz::run(&arguments),
        Task::Kernels { check } => workspace::shell().and_then(|sh| kernels::run(&sh, check)),
        Task::Tools(arguments) => tools::run(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// For tasks whose exit code 1 is a verdict.
fn code_or_bad_input(outcome: anyhow::Result<ExitCode>) -> ExitCode {
    outcome.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::from(EXIT_CODE_BAD_INPUT)
    })
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};

    #[test]
    fn the_command_line_is_consistent() {
        super::CommandLine::command().debug_assert();
    }

    /// Every `cargo xtask` in the guides is one that this task takes, also where a test could not run it.
    #[test]
    fn the_guides_commands_are_understood() {
        let guides = [
            (include_str!("../../docs/ami.md"), 7),
            (include_str!("../../docs/github-actions.md"), 3),
            (include_str!("../../docs/kubernetes.md"), 12),
            (include_str!("../../docs/terraform.md"), 9),
        ];
        let mut all = Vec::new();
        for (guide, least) in guides {
            let lines = guide.lines();
            let commands: Vec<&str> = lines
                .filter_map(|line| line.strip_prefix("cargo xtask "))
                .collect();
            assert!(commands.len() >= least, "{commands:?}");
            all.extend(commands);
        }
        for command in all {
            let words = ["xtask"].into_iter().chain(command.split_whitespace());
            if let Err(error) = super::CommandLine::try_parse_from(words) {
                panic!("cargo xtask {command}: {error}");
            }
        }
    }
}
