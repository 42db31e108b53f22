//! `cargo xtask fault-matrix`: the release binary on every simulated node and fault, each held
//! against the checks that it must trip. The work is done by the simulator's program of the same
//! name.

use std::path::PathBuf;
use std::process::Command;

use anyhow::ensure;

use xtask::{dist, tools, workspace};

use crate::simulate;

/// Run the release binary on every simulated node and fault, and compare with what each must trip
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Only nodes and faults whose name contains one of these
    names: Vec<String>,
    /// Run what `cargo xtask dist` left in this folder before, instead of building it now
    #[arg(long, value_name = "DIR")]
    validator_folder: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let simulator = simulate::Simulator::build()?;
    // The portable binary where it can be built: it is the one that ships.
    let validator = if let Some(folder) = &arguments.validator_folder {
        std::path::absolute(folder.join("gpu-validator"))?
    } else if tools::python_is_missing().is_none() {
        dist::build()?
    } else {
        dist::build_native()?
    };
    let mut command = Command::new(simulator.fault_matrix());
    command.arg("--validator").arg(validator);
    command.arg("--library").arg(simulator.library());
    command
        .arg("--profiles")
        .arg(workspace::root().join("manifests/profiles"));
    command
        .arg("--out")
        .arg(workspace::target().join("fault-matrix"));
    workspace::without_cargos_library_path(&mut command);
    let status = command.args(&arguments.names).status()?;
    ensure!(status.success(), "the fault matrix is not as expected");
    Ok(())
}
