//! `cargo xtask tf`: Terraform modules are checked, planned and applied.

mod tf;

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
    Tf(tf::Arguments),
}

fn main() -> ExitCode {
    match command_line::parse::<CommandLine>() {
        Ok(CommandLine {
            task: Task::Tf(arguments),
        }) => tf::run(&arguments),
        Err(code) => code,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_guides_commands_are_understood() {
        xtask::command_line::assert_parses_guides::<super::CommandLine>(&["tf"], 5);
    }
}
