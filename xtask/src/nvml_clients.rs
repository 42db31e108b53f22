//! `cargo xtask nvml-clients`: programs that others wrote must see the simulated node as its scenario says.

use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::simulate::Simulator;
use crate::{tools, workspace};

const SCRIPT: &str = "tests/simulator/clients/compare.py";

/// One GPU and eight with everything that Hopper tells, one without `NVLink`, and one that is cut into MIG instances.
const NODES: [&str; 4] = ["h200x1", "h200x8", "g4dn.xlarge", "mig"];

/// Hold what nvidia-ml-py, gpustat and nvitop show of simulated nodes against the nodes' scenarios
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Nodes by name or from a file [default: h200x1 h200x8 g4dn.xlarge mig]
    nodes: Vec<String>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let default = NODES.map(str::to_owned);
    let nodes = if arguments.nodes.is_empty() {
        &default[..]
    } else {
        &arguments.nodes
    };
    let python = tools::NVML_CLIENTS.install()?.join("python3");
    let script = workspace::root().join(SCRIPT);
    let simulator = Simulator::build()?;
    for name in nodes {
        let node = simulator.prepare(name, &[], &[])?;
        let mut clients = Command::new(&python);
        clients.arg("-I").arg(&script);
        node.apply_environment(&mut clients);
        let status = clients
            .status()
            .with_context(|| format!("{} could not be started", python.display()))?;
        ensure!(
            status.success(),
            "the clients do not agree with the scenario of {name}; see above"
        );
    }
    Ok(())
}
