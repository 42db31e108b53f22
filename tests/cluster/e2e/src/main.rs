//! `cargo xtask k8s e2e`: the manifests on a real API server.

mod e2e;

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
    /// As it is called from outside; the manifests' other tasks are in kubernetes-tasks
    #[command(subcommand)]
    K8s(K8s),
}

#[derive(Debug, clap::Subcommand)]
enum K8s {
    E2e(e2e::Arguments),
}

fn main() -> ExitCode {
    match command_line::parse::<CommandLine>() {
        Ok(CommandLine {
            task: Task::K8s(K8s::E2e(arguments)),
        }) => command_line::code_or_bad_input(e2e::run(&arguments).map(|()| ExitCode::SUCCESS)),
        Err(code) => code,
    }
}
