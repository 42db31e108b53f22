//! `simulate-node`: lists nodes and faults, and prepares a node's folder. `cargo xtask simulate` runs it.

#![allow(clippy::print_stdout, reason = "what it prints is what it is for")]
#![allow(clippy::print_stderr, reason = "errors of a command line")]

use anyhow::Result;
use clap::{Parser, Subcommand};
use simulator::{Catalogue, Kind, NodeRequest, prepare_node};
use std::path::PathBuf;
use std::process::ExitCode;

/// Simulated GPU nodes.
#[derive(Debug, Parser)]
struct CommandLine {
    /// Folder of `models`, `nodes` and `faults` [default: those of the checkout that this was built from]
    #[arg(long, value_name = "DIR")]
    catalogue: Option<PathBuf>,
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Nodes and faults, a line each.
    List,
    /// Makes a node's folder and prints what a program on it needs, as JSON.
    Prepare {
        /// The folder to make; what is in it is replaced.
        #[arg(long)]
        folder: PathBuf,
        /// `libsimulator.so`.
        #[arg(long)]
        library: PathBuf,
        /// A fault by name or from a file; in the order in which they apply.
        #[arg(long, value_name = "NAME-OR-FILE")]
        fault: Vec<String>,
        /// `gpu.memory=2GiB`, or `gpus.3.memory=2GiB`.
        #[arg(long, value_name = "PATH=VALUE")]
        set: Vec<String>,
        /// A node by name or from a file.
        node: String,
    },
}

fn main() -> ExitCode {
    match run(CommandLine::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(3)
        }
    }
}

fn run(command_line: CommandLine) -> Result<()> {
    let catalogue = command_line
        .catalogue
        .map_or_else(Catalogue::shipped, |folder| Catalogue::at(&folder));
    match command_line.task {
        Task::List => list(&catalogue),
        Task::Prepare {
            folder,
            library,
            fault,
            set,
            node,
        } => {
            let prepared = prepare_node(&NodeRequest {
                folder: &folder,
                library: &library,
                catalogue: &catalogue,
                node: &node,
                faults: &fault,
                overrides: &set,
            })?;
            let answer = serde_json::json!({
                "scenario_name": prepared.scenario_name,
                "library_dir": prepared.library_dir,
                "sysroot": prepared.sysroot,
                "environment": prepared.environment,
            });
            println!("{answer:#}");
            Ok(())
        }
    }
}

fn list(catalogue: &Catalogue) -> Result<()> {
    println!("Nodes:");
    for name in catalogue.names(Kind::Node)? {
        println!("  {name:<34} {}", catalogue.node(&name)?.1.description);
    }
    println!("\nFaults:");
    for name in catalogue.names(Kind::Fault)? {
        println!("  {name:<34} {}", catalogue.fault(&name)?.1.description);
    }
    Ok(())
}
