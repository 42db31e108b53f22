//! `cargo xtask nvml-clients`: third-party programs must see the simulated node as in its scenario.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use xshell::cmd;

use crate::simulate::Simulator;
use xtask::{tools, workspace};

const SCRIPT: &str = "tests/simulator/clients/compare.py";

/// One GPU and eight with everything that Hopper reports, one without `NVLink`, and one that is cut
/// into MIG instances.
const NODES: [&str; 4] = ["h200x1", "h200x8", "g4dn.xlarge", "mig"];

const NVIDIA_SMI_SCRIPT: &str = "tests/simulator/clients/nvidia_smi.py";

/// Those of the captures, and every way in which GPUs are joined: switches, bridges to one another,
/// PCIe alone, MIG.
const NVIDIA_SMI_NODES: [&str; 5] = ["h200x1", "h200x8", "p3.16xlarge", "g4dn.12xlarge", "mig"];

/// Of Debian 12's component non-free: the last version of the driver branch that it has.
const NVIDIA_SMI_PACKAGE: &str = "nvidia-smi=535.261.03-1";

const DEBIAN_SOURCES: &str = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm non-free\n";

/// Hold what nvidia-ml-py, gpustat, nvitop and nvidia-smi show of simulated nodes against the
/// nodes' scenarios
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Nodes by name or from a file [default: those of each client]
    nodes: Vec<String>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let python = tools::NVML_CLIENTS.install()?.join("python3");
    let nvidia_smi = install_nvidia_smi()?;
    let simulator = Simulator::build()?;
    for name in nodes(arguments, &NODES) {
        run_client(&simulator, &name, &python, SCRIPT, None)?;
    }
    for name in nodes(arguments, &NVIDIA_SMI_NODES) {
        run_client(
            &simulator,
            &name,
            &python,
            NVIDIA_SMI_SCRIPT,
            Some(&nvidia_smi),
        )?;
    }
    Ok(())
}

fn nodes(arguments: &Arguments, default: &[&str]) -> Vec<String> {
    if arguments.nodes.is_empty() {
        default.iter().map(|&name| name.to_owned()).collect()
    } else {
        arguments.nodes.clone()
    }
}

fn run_client(
    simulator: &Simulator,
    node_name: &str,
    python: &Path,
    script: &str,
    program: Option<&Path>,
) -> anyhow::Result<()> {
    let node = simulator.prepare(node_name, &[], &[])?;
    let mut client = Command::new(python);
    client.arg("-I").arg(workspace::root().join(script));
    client.args(program);
    node.apply_environment(&mut client);
    let status = client
        .status()
        .with_context(|| format!("{} could not be started", python.display()))?;
    ensure!(
        status.success(),
        "{script} does not agree with the scenario of {node_name}; see above"
    );
    Ok(())
}

/// NVIDIA's own program, unpacked below target/tools; it is never shipped. What cannot be had is an
/// error.
fn install_nvidia_smi() -> anyhow::Result<PathBuf> {
    let shell = workspace::shell()?;
    let root = workspace::tools().join("nvidia-smi");
    let program = root.join("usr/lib/nvidia/current/nvidia-smi");
    let stamp = root.join("complete");
    if std::fs::read_to_string(&stamp).is_ok_and(|made| made == NVIDIA_SMI_PACKAGE) {
        return Ok(program);
    }
    shell.remove_path(&root)?;
    eprintln!("fetching Debian's {NVIDIA_SMI_PACKAGE}");
    // An apt of its own: the machine's sources stay as they are, and what the package depends on
    // (NVIDIA's libnvidia-ml, which nothing here may load) is not fetched.
    for folder in [
        "lists/partial",
        "archives/partial",
        "etc/apt.conf.d",
        "etc/preferences.d",
    ] {
        shell.create_dir(root.join(folder))?;
    }
    shell.write_file(root.join("etc/sources.list"), DEBIAN_SOURCES)?;
    shell.write_file(root.join("status"), "")?;
    let settings = [
        ("Dir::Etc", "etc"),
        ("Dir::State::lists", "lists"),
        ("Dir::State::status", "status"),
        ("Dir::Cache", "archives"),
    ]
    .map(|(name, path)| format!("{name} \"{}\";\n", root.join(path).display()))
    .concat();
    let configuration = root.join("apt.conf");
    shell.write_file(&configuration, settings + "APT::Architecture \"amd64\";\n")?;
    let _environment = shell.push_env("APT_CONFIG", &configuration);
    let _folder = shell.push_dir(&root);
    let fetch = || -> xshell::Result<()> {
        cmd!(shell, "apt-get --quiet --quiet update")
            .quiet()
            .run()?;
        cmd!(
            shell,
            "apt-get --quiet --quiet download {NVIDIA_SMI_PACKAGE}"
        )
        .quiet()
        .run()
    };
    fetch().with_context(|| {
        format!("Debian's {NVIDIA_SMI_PACKAGE} cannot be had; check that deb.debian.org answers and has bookworm's component non-free")
    })?;
    let package = shell
        .read_dir(&root)?
        .into_iter()
        .find(|path| path.extension().is_some_and(|it| it == "deb"))
        .context("apt-get downloaded no package")?;
    cmd!(shell, "dpkg-deb --extract {package} {root}")
        .quiet()
        .run()?;
    shell.write_file(&stamp, NVIDIA_SMI_PACKAGE)?;
    Ok(program)
}
