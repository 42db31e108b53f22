//! `cargo xtask simulate`: runs a program on a simulated GPU node. Only that program's environment
//! is changed.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, ensure};
use xshell::cmd;

use xtask::{EXIT_CODE_BAD_INPUT, dist, workspace};

/// Run a program on a simulated GPU node, list the nodes and faults, or pack the simulator
///
/// The program loads simulated NVIDIA libraries (NVML, the CUDA driver, cuBLASLt) instead of the
/// machine's own.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// A node by name (`cargo xtask simulate list`) or from a file, `list`, or `archive` for
    /// gpu-simulator as one file
    #[arg(value_name = "NODE|list|archive")]
    node: String,
    /// A fault by name or from a file; may be given several times
    #[arg(long, value_name = "NAME-OR-FILE")]
    fault: Vec<String>,
    /// A change to the node (gpu.memory=2GiB); may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// The program and its arguments
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub fn run(arguments: &Arguments) -> ExitCode {
    let outcome = match arguments.node.as_str() {
        "list" => list(),
        "archive" => archive(),
        _ => run_on_node(arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(EXIT_CODE_BAD_INPUT)
        }
    }
}

/// A node that programs can be run on.
#[derive(Debug)]
pub struct PreparedNode {
    /// Node and faults in one name.
    pub scenario: String,
    folder: PathBuf,
    sysroot: PathBuf,
    environment: BTreeMap<String, String>,
}

impl PreparedNode {
    /// Makes the validator's `command` see the node instead of this machine.
    pub fn apply(&self, command: &mut Command) {
        self.apply_environment(command);
        command.args(["--simulated-ok", "--sysroot"]);
        command.arg(&self.sysroot);
    }

    /// What the validator reads in place of the host's files.
    pub fn sysroot(&self) -> &Path {
        &self.sysroot
    }

    /// What programs on the node need of the file system.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Makes any `command` that loads NVIDIA's libraries see the node's.
    pub fn apply_environment(&self, command: &mut Command) {
        command.envs(&self.environment);
    }
}

impl Drop for PreparedNode {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn run_on_node(arguments: &Arguments) -> anyhow::Result<()> {
    ensure!(
        !arguments.command.is_empty(),
        "no program to run; for example: cargo xtask simulate {} -- python3 -m gpustat",
        arguments.node
    );
    let mut command = Simulator::build()?.program();
    command.arg("run");
    for fault in &arguments.fault {
        command.args(["--fault", fault]);
    }
    for change in &arguments.set {
        command.args(["--set", change]);
    }
    command
        .arg(&arguments.node)
        .arg("--")
        .args(&arguments.command);
    workspace::without_cargos_library_path(&mut command);
    // The program takes this process's place: its signals, its terminal and its exit code are then
    // its own.
    let error = command.exec();
    Err(error).context("gpu-simulator could not be started")
}

/// Packs the program, its library and its catalogue, for machines with any supported glibc and no
/// checkout.
fn archive() -> anyhow::Result<()> {
    let shell = workspace::shell()?;
    let built = dist::build_portable_simulator()?;
    let name = format!("gpu-simulator-{}-x86_64-linux", env!("CARGO_PKG_VERSION"));
    let parent = workspace::target().join("dist-simulator");
    let folder = parent.join(&name);
    shell.remove_path(&folder)?;
    let share = folder.join("share/gpu-simulator");
    for path in [folder.join("bin"), folder.join("lib"), share.clone()] {
        shell.create_dir(path)?;
    }
    shell.copy_file(built.join("gpu-simulator"), folder.join("bin"))?;
    shell.copy_file(built.join("libsimulator.so"), folder.join("lib"))?;
    for file in ["LICENSE-APACHE", "LICENSE-MIT", "tests/simulator/README.md"] {
        shell.copy_file(workspace::root().join(file), &folder)?;
    }
    for kind in ["models", "nodes", "faults"] {
        let files = workspace::root().join("tests/simulator").join(kind);
        cmd!(shell, "cp --recursive {files} {share}")
            .quiet()
            .run()?;
    }
    let file = parent.join(format!("{name}.tar.gz"));
    cmd!(
        shell,
        "tar --create --gzip --sort=name --owner=0 --group=0 --numeric-owner --file {file} --directory {parent} {name}"
    )
    .quiet()
    .run()?;
    eprintln!("{}", file.display());
    Ok(())
}

fn list() -> anyhow::Result<()> {
    let status = Simulator::build()?.program().arg("list").status()?;
    ensure!(status.success(), "the simulator could not list its nodes");
    Ok(())
}

/// The simulator's program and its library, optimized: it executes the GPU kernels on the CPU.
#[derive(Debug)]
pub struct Simulator {
    folder: PathBuf,
}

impl Simulator {
    pub fn build() -> anyhow::Result<Simulator> {
        let shell = workspace::shell()?;
        let cargo = workspace::cargo();
        cmd!(shell, "{cargo} build --quiet --release --package simulator")
            .quiet()
            .run()?;
        Ok(Simulator {
            folder: workspace::target().join("release"),
        })
    }

    /// What programs load in place of NVIDIA's libraries.
    pub fn library(&self) -> PathBuf {
        self.folder.join("libsimulator.so")
    }

    pub fn fault_matrix(&self) -> PathBuf {
        self.folder.join("fault-matrix")
    }

    fn program(&self) -> Command {
        Command::new(self.folder.join("gpu-simulator"))
    }

    /// Makes a node for this process. An error is the user's: a name or a value that there is not.
    pub fn prepare(
        &self,
        node: &str,
        faults: &[String],
        overrides: &[String],
    ) -> anyhow::Result<PreparedNode> {
        let parent = workspace::target().join("simulated-nodes");
        remove_abandoned(&parent);
        std::fs::create_dir_all(&parent)
            .with_context(|| format!("{} cannot be made", parent.display()))?;
        let folder = parent.join(std::process::id().to_string());
        let mut command = self.program();
        command
            .arg("prepare")
            .arg("--folder")
            .arg(&folder)
            .arg("--library")
            .arg(self.library());
        for fault in faults {
            command.args(["--fault", fault]);
        }
        for change in overrides {
            command.args(["--set", change]);
        }
        // The node's library path goes before the one that the simulator is given.
        workspace::without_cargos_library_path(&mut command);
        let output = command.arg("--").arg(node).output()?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "{}",
            complaint.trim().trim_start_matches("error: ")
        );
        parse(&output.stdout, folder).context("the simulator's answer was not understood")
    }
}

fn parse(answer: &[u8], folder: PathBuf) -> anyhow::Result<PreparedNode> {
    let answer: serde_json::Value = serde_json::from_slice(answer)?;
    let text = |key: &str| answer[key].as_str().with_context(|| format!("no `{key}`"));
    let environment = answer["environment"]
        .as_object()
        .context("no `environment`")?;
    let environment = environment
        .iter()
        .map(|(key, value)| {
            Ok((
                key.clone(),
                value
                    .as_str()
                    .with_context(|| format!("{key} is not text"))?
                    .to_owned(),
            ))
        })
        .collect::<anyhow::Result<_>>()?;
    Ok(PreparedNode {
        scenario: text("scenario_name")?.to_owned(),
        sysroot: text("sysroot")?.into(),
        environment,
        folder,
    })
}

/// Removes the nodes of processes that are gone.
fn remove_abandoned(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else {
        return;
    };
    for entry in entries.flatten() {
        let process = Path::new("/proc").join(entry.file_name());
        if !process.exists() {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn the_simulators_answer_is_understood() {
        let folder = std::env::temp_dir().join("no-such-simulated-node");
        let answer = br#"{"scenario_name": "p5.48xlarge+xid-79", "sysroot": "/n/sysroot", "environment": {"LD_LIBRARY_PATH": "/n/lib"}}"#;
        let node = parse(answer, folder.clone()).expect("an answer");
        assert_eq!(node.scenario, "p5.48xlarge+xid-79");
        assert_eq!(node.environment["LD_LIBRARY_PATH"], "/n/lib");
        assert!(parse(br#"{"scenario_name": "x", "sysroot": "/n"}"#, folder).is_err());
    }
}
