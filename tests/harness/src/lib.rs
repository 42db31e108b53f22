//! Tasks that run programs on simulated nodes, and read what came of it: `cargo xtask simulate`,
//! `fault-matrix`, `nvml-clients` and `junit-readers`; and `hardware`, on real GPUs.

pub mod simulate;

mod fault_matrix;
mod hardware;
mod junit_readers;
mod nvml_clients;

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
    Simulate(simulate::Arguments),
    FaultMatrix(fault_matrix::Arguments),
    JunitReaders(junit_readers::Arguments),
    NvmlClients(nvml_clients::Arguments),
    Hardware(hardware::Arguments),
}

/// The program that `cargo xtask` starts for these tasks.
pub fn main() -> ExitCode {
    let command_line = match command_line::parse::<CommandLine>() {
        Ok(command_line) => command_line,
        Err(code) => return code,
    };
    match command_line.task {
        Task::Simulate(arguments) => simulate::run(&arguments),
        Task::FaultMatrix(arguments) => command_line::code(fault_matrix::run(&arguments)),
        Task::JunitReaders(arguments) => command_line::code(junit_readers::run(&arguments)),
        Task::NvmlClients(arguments) => command_line::code(nvml_clients::run(&arguments)),
        Task::Hardware(arguments) => command_line::code(hardware::run(&arguments)),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_guides_commands_are_understood() {
        let tasks = [
            "simulate",
            "fault-matrix",
            "junit-readers",
            "nvml-clients",
            "hardware",
        ];
        xtask::command_line::assert_parses_guides::<super::CommandLine>(&tasks, 0);
    }
}
