//! `gpu-simulator`: lists simulated GPU nodes and faults, runs programs on a node, and changes a
//! node that runs.

#![allow(clippy::print_stdout, reason = "what it prints is what it is for")]
#![allow(clippy::print_stderr, reason = "errors of a command line")]

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use simulator::catalogue::short_name;
use simulator::change::change_node;
use simulator::instances::{Instances, is_kept, own};
use simulator::node::Node;
use simulator::resolve::NodeChange;
use simulator::{Catalogue, Kind, NodeRequest, PreparedNode, prepare_node};
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Simulated GPU nodes: NVIDIA's NVML, CUDA driver and cuBLASLt, driven by a scenario, for any
/// program and with no GPU.
#[derive(Debug, Parser)]
#[command(version)]
struct CommandLine {
    /// Folder of `models`, `nodes` and `faults` [default: those that came with this program]
    #[arg(long, value_name = "DIR")]
    catalogue: Option<PathBuf>,
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// List the nodes and faults that there are, and the nodes that run.
    List,
    /// Run a program on a node. It takes this process's place: its signals and its exit code are
    /// the program's.
    Run(Run),
    /// Change a node while programs run on it. Times of faults count from now.
    Set {
        /// The name of a node that runs.
        name: String,
        /// Take back every fault first, those that it started with included.
        #[arg(long)]
        healthy: bool,
        #[command(flatten)]
        changes: Changes,
    },
    /// Remove nodes that run; programs on them see their driver fail.
    Remove {
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Make a node's folder and print what a program on it needs, as JSON, for test harnesses.
    Prepare {
        /// The folder to make; what is in it is replaced.
        #[arg(long)]
        folder: PathBuf,
        /// `libsimulator.so` [default: the one that came with this program].
        #[arg(long)]
        library: Option<PathBuf>,
        #[command(flatten)]
        changes: Changes,
        /// A node by name or from a file.
        node: String,
    },
}

#[derive(Debug, clap::Args)]
struct Changes {
    /// A fault by name or from a file; in the order in which they apply.
    #[arg(long, value_name = "NAME-OR-FILE")]
    fault: Vec<String>,
    /// `gpu.memory=2GiB` for every GPU, or `gpus.3.memory=2GiB`.
    #[arg(long, value_name = "PATH=VALUE")]
    set: Vec<String>,
}

#[derive(Debug, clap::Args)]
struct Run {
    /// A node by name or from a file, or the name of one that is kept.
    node: String,
    #[command(flatten)]
    changes: Changes,
    /// What `set` and `remove` call it [default: the node's name].
    #[arg(long)]
    name: Option<String>,
    /// Keep the node when the program has ended, with its processes' state and the time since its
    /// start.
    #[arg(long)]
    keep: bool,
    /// `libsimulator.so` [default: the one that came with this program].
    #[arg(long)]
    library: Option<PathBuf>,
    /// The program and its arguments. `gpu-validator` judges the simulated host, too (`--sysroot`
    /// is added); others find its files below `GPU_SIMULATOR_SYSROOT`.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
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
    let instances = Instances::of_user();
    match command_line.task {
        Task::List => list(&catalogue, &instances),
        Task::Run(arguments) => run_on_node(&catalogue, &instances, &arguments),
        Task::Set {
            name,
            healthy,
            changes,
        } => {
            ensure!(
                healthy || !changes.fault.is_empty() || !changes.set.is_empty(),
                "nothing to change; give --fault, --set or --healthy"
            );
            let folder = instances.find(&name)?;
            let change = NodeChange {
                catalogue: &catalogue,
                healthy,
                faults: &changes.fault,
                overrides: &changes.set,
            };
            println!("{name} is now {}", change_node(&folder, &change)?);
            Ok(())
        }
        Task::Remove { names } => names.iter().try_for_each(|name| instances.remove(name)),
        Task::Prepare {
            folder,
            library,
            changes,
            node,
        } => {
            let prepared = prepare(&catalogue, &folder, library, &node, &changes)?;
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

fn list(catalogue: &Catalogue, instances: &Instances) -> Result<()> {
    println!("Nodes:");
    for name in catalogue.names(Kind::Node)? {
        println!("  {name:<34} {}", catalogue.node(&name)?.1.description);
    }
    println!("\nFaults:");
    for name in catalogue.names(Kind::Fault)? {
        println!("  {name:<34} {}", catalogue.fault(&name)?.1.description);
    }
    let running = instances.names()?;
    if !running.is_empty() {
        println!("\nRunning:");
    }
    for name in running {
        // One that is being made, or removed by another process at this moment, has no scenario.
        let scenario = instances.find(&name).and_then(|folder| Node::open(&folder));
        let scenario = scenario.map_or_else(|_| String::new(), |node| node.name().to_owned());
        println!("  {name:<34} {scenario}");
    }
    Ok(())
}

fn prepare(
    catalogue: &Catalogue,
    folder: &Path,
    library: Option<PathBuf>,
    node: &str,
    changes: &Changes,
) -> Result<PreparedNode> {
    let library = library.map_or_else(own_library, Ok)?;
    prepare_node(&NodeRequest {
        folder,
        library: &library,
        catalogue,
        node,
        faults: &changes.fault,
        overrides: &changes.set,
    })
}

/// The library next to this program, or in the `lib` folder of its archive.
fn own_library() -> Result<PathBuf> {
    let program = std::env::current_exe().context("find this program")?;
    let folders = program.ancestors().skip(1).take(2);
    let places: Vec<PathBuf> = folders
        .flat_map(|folder| ["libsimulator.so", "lib/libsimulator.so"].map(|it| folder.join(it)))
        .collect();
    let found = places.iter().find(|path| path.is_file());
    found.cloned().with_context(|| {
        format!(
            "there is no {}; name it with --library",
            places[0].display()
        )
    })
}

fn run_on_node(catalogue: &Catalogue, instances: &Instances, arguments: &Run) -> Result<()> {
    let [program, rest @ ..] = &*arguments.command else {
        unreachable!("clap asks for a program")
    };
    let node = match kept(instances, arguments)? {
        Some(node) => node,
        None => new_node(catalogue, instances, arguments)?,
    };
    let error = Command::new(program)
        .args(with_sysroot(program, rest, &node.sysroot))
        .envs(&node.environment)
        .exec();
    Err(error).with_context(|| format!("start {}", program.display()))
}

/// The kept node of this name, if there is one.
fn kept(instances: &Instances, arguments: &Run) -> Result<Option<PreparedNode>> {
    let runs = instances.names()?.contains(&arguments.node);
    let folder = match runs.then(|| instances.find(&arguments.node)) {
        Some(Ok(folder)) if is_kept(&folder) => folder,
        _ => return Ok(None),
    };
    let changes = &arguments.changes;
    ensure!(
        changes.fault.is_empty() && changes.set.is_empty() && arguments.name.is_none(),
        "the node `{0}` is kept and has its faults; `gpu-simulator set {0}` changes them",
        arguments.node
    );
    simulator::prepare::reopen_node(&folder).map(Some)
}

fn new_node(catalogue: &Catalogue, instances: &Instances, arguments: &Run) -> Result<PreparedNode> {
    // Before a folder is made for a node that there is not.
    catalogue.node(&arguments.node)?;
    let own_name = short_name(&arguments.node);
    let (name, folder) = instances.reserve(arguments.name.as_deref(), &own_name)?;
    let library = arguments.library.clone();
    let made = prepare(
        catalogue,
        &folder,
        library,
        &arguments.node,
        &arguments.changes,
    )
    .and_then(|node| own(&node.folder, arguments.keep).map(|()| node));
    if made.is_err() {
        // Nothing may be left of a node that is not one.
        let _ = std::fs::remove_dir_all(&folder);
    }
    if arguments.keep {
        eprintln!("the node stays as `{name}`; `gpu-simulator remove {name}` ends it");
    }
    made
}

/// Subcommands of `gpu-validator` that read the host.
const READS_HOST: [&str; 6] = [
    "run",
    "collect",
    "burn",
    "allocation",
    "sentinel",
    "environment",
];
/// Those of them without a verdict about the machine, which take a simulated one as it is.
const WITHOUT_VERDICT: [&str; 2] = ["collect", "environment"];
/// Options of `environment` with which it reads no host.
const READS_NO_HOST: [&str; 3] = ["--explain", "--image", "--on"];

/// The arguments, with the simulated host for the validator's own commands: they would read this
/// machine's.
fn with_sysroot(program: &OsStr, arguments: &[OsString], sysroot: &Path) -> Vec<OsString> {
    let mut arguments = arguments.to_vec();
    let is_validator = Path::new(program).file_name() == Some(OsStr::new("gpu-validator"));
    let subcommand = arguments
        .iter()
        .position(|it| READS_HOST.iter().any(|name| it == name));
    // `burn status` and `burn stop` read nothing.
    let ends_there = |place: usize| {
        let next = arguments.get(place + 1);
        next.is_none_or(|it| it.to_string_lossy().starts_with('-'))
    };
    let has = |option: &str| {
        let is_it = |it: &OsString| it.to_string_lossy().split('=').next() == Some(option);
        arguments.iter().any(is_it)
    };
    let has_own = has("--sysroot") || READS_NO_HOST.iter().any(|it| has(it));
    if let Some(place) = subcommand
        && is_validator
        && !has_own
        && ends_there(place)
    {
        arguments.insert(place + 1, "--sysroot".into());
        arguments.insert(place + 2, sysroot.into());
        // Started here by name, a simulated run is what is wanted.
        if !WITHOUT_VERDICT.iter().any(|it| arguments[place] == *it) {
            arguments.insert(place + 1, "--simulated-ok".into());
        }
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(program: &str, arguments: &[&str]) -> Vec<OsString> {
        let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
        with_sysroot(OsStr::new(program), &arguments, Path::new("/n/sysroot"))
    }

    #[test]
    fn the_validator_judges_the_simulated_host() {
        let run = given(
            "/usr/bin/gpu-validator",
            &["--quiet", "run", "--level", "quick"],
        );
        assert_eq!(
            run,
            [
                "--quiet",
                "run",
                "--simulated-ok",
                "--sysroot",
                "/n/sysroot",
                "--level",
                "quick"
            ]
        );
        assert_eq!(given("gpu-validator", &["burn", "stop"]), ["burn", "stop"]);
        let environment = given("gpu-validator", &["environment"]);
        assert_eq!(environment, ["environment", "--sysroot", "/n/sysroot"]);
        let question = ["environment", "--explain", "cuda 13.0 on T4"];
        assert_eq!(given("gpu-validator", &question), question);
        let status = ["sentinel", "status"];
        assert_eq!(given("gpu-validator", &status), status);
        assert_eq!(given("gpu-validator", &["allocation"]).len(), 4);
        let own = given("gpu-validator", &["run", "--sysroot=/"]);
        assert_eq!(own, ["run", "--sysroot=/"]);
        assert_eq!(given("nvidia-smi", &["run"]), ["run"]);
    }
}
