//! Tasks that work on Kubernetes: `cargo xtask k8s`, `runners` and `validator-image`.

pub mod check;
pub mod kubectl;
pub mod manifests;

mod chart;
mod device_plugin;
mod invariants;
mod k8s;
mod karpenter;
mod node_policy;
mod runners;
mod schemas;
mod validate;
mod validator_image;

use std::process::ExitCode;

use xtask::command_line;

#[derive(Debug, clap::Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct CommandLine {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, clap::Subcommand)]
enum Task {
    K8s(k8s::Arguments),
    Runners(runners::Arguments),
    ValidatorImage(validator_image::Arguments),
}

/// The program that `cargo xtask` starts for these tasks.
pub fn main() -> ExitCode {
    let command_line = match command_line::parse::<CommandLine>() {
        Ok(command_line) => command_line,
        Err(code) => return code,
    };
    match command_line.task {
        Task::K8s(arguments) => command_line::code_or_bad_input(k8s::run(&arguments)),
        Task::Runners(arguments) => command_line::code(runners::run(&arguments)),
        Task::ValidatorImage(arguments) => command_line::code(validator_image::run(&arguments)),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_guides_commands_are_understood() {
        let tasks = ["k8s", "runners", "validator-image"];
        xtask::command_line::assert_parses_guides::<super::CommandLine>(&tasks, 1);
    }
}
