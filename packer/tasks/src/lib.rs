//! Tasks that bake, publish and judge machine images: `cargo xtask ami`, `runner-image` and
//! `validate-ami`.

pub mod ami;
pub mod packer;
pub mod runner_image;

mod validate_ami;

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
    ValidateAmi(Box<validate_ami::Arguments>),
    Ami(ami::Arguments),
    RunnerImage(runner_image::Arguments),
}

/// The program that `cargo xtask` starts for these tasks.
pub fn main() -> ExitCode {
    let command_line = match command_line::parse::<CommandLine>() {
        Ok(command_line) => command_line,
        Err(code) => return code,
    };
    match command_line.task {
        Task::ValidateAmi(arguments) => validate_ami::run(&arguments),
        Task::Ami(arguments) => ami::run(&arguments),
        Task::RunnerImage(arguments) => command_line::code(runner_image::run(&arguments)),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_guides_commands_are_understood() {
        let tasks = ["validate-ami", "ami", "runner-image"];
        xtask::command_line::assert_parses_guides::<super::CommandLine>(&tasks, 1);
    }
}
