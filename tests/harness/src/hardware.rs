//! `cargo xtask hardware`: measures on a machine with GPUs what BENCHMARKS.md reports.
//!
//! The work is done by tests/hardware/figures.py, which needs no checkout: a machine without Rust
//! receives it and the portable binary.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, ensure};

use xtask::{dist, workspace};

use crate::simulate;

const SCRIPT: &str = "tests/hardware/figures.py";

/// Measure speed, memory, environments and false alarms on this machine's GPUs
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Number of GPUs that the machine must have
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    gpus: u32,
    /// Use the binary in this folder [default: build the portable one]
    #[arg(long, value_name = "DIR")]
    validator_folder: Option<PathBuf>,
    /// An older validator, measured in turns with this one
    #[arg(long, value_name = "FILE")]
    old: Option<PathBuf>,
    /// Try the script on a simulated node; its figures are not those of hardware
    #[arg(long, value_name = "NODE")]
    simulated: Option<String>,
    /// Folder of figures.json and facts.json
    #[arg(long, value_name = "DIR", default_value = "target/hardware")]
    out: PathBuf,
    /// Further arguments of tests/hardware/figures.py
    #[arg(last = true)]
    more: Vec<String>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let validator = match &arguments.validator_folder {
        Some(folder) => std::path::absolute(folder.join("gpu-validator"))?,
        None => dist::build()?,
    };
    let mut command = Command::new("python3");
    command.arg(workspace::root().join(SCRIPT));
    command.arg("--validator").arg(validator);
    command.args(["--gpus", &arguments.gpus.to_string()]);
    command.arg("--out").arg(&arguments.out);
    if let Some(old) = &arguments.old {
        command.arg("--old").arg(old);
    }
    // Kept until the script has ended: dropping it removes the node's files.
    let _node = match &arguments.simulated {
        None => None,
        Some(name) => {
            let node = simulate::Simulator::build()?.prepare(name, &[], &[])?;
            node.apply_environment(&mut command);
            command.arg("--simulated").arg(node.sysroot());
            Some(node)
        }
    };
    let status = command
        .args(&arguments.more)
        .status()
        .context("python3 could not be started")?;
    ensure!(status.success(), "{SCRIPT} ended with {status}");
    Ok(())
}
