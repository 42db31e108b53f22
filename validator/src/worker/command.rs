//! `gpu-validator worker …` as the command line sees it.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use super::one_gpu::{Then, keep_to};
use super::process::worker_program;
use crate::probe::{NvmlWorker, Part};

/// Asks the driver, in a process that may hang or crash; speaks JSON lines on stdout. Started by the validator itself.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum WorkerCommand {
    /// Reads NVML
    Nvml {
        /// What is asked for
        #[arg(long, value_enum, default_value_t)]
        part: Part,
        /// A call that is left out because it hung or crashed before, and what it did
        #[arg(long, value_name = "FUNCTION@GPU=REASON")]
        skip: Vec<String>,
        /// NVML's number of a GPU that was read while nothing worked it, and may be at work by now
        #[arg(long, value_name = "INDEX")]
        at_rest: Vec<u32>,
        /// NVML's number of a GPU about which everything is known
        #[arg(long, value_name = "INDEX")]
        finished: Vec<u32>,
    },
    /// Reads the CUDA driver library
    Cuda {
        #[command(flatten)]
        nodes: Nodes,
    },
    /// Runs the check kernel on one GPU
    CudaKernel {
        /// UUID of the GPU, or of a MIG device
        #[arg(long)]
        gpu: String,
        #[command(flatten)]
        nodes: Nodes,
    },
    /// Burns one GPU
    Burn {
        /// What to do, as JSON
        #[arg(long)]
        task: String,
        #[command(flatten)]
        nodes: Nodes,
    },
    /// Reads NVML's sensors again and again until SIGTERM
    Sensors {
        /// UUIDs of the GPUs
        #[arg(long)]
        gpu: Vec<String>,
    },
}

/// The argument of [`Nodes::only`].
const ONLY: &str = "--node";

/// The device nodes that a worker may open.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Nodes {
    /// Of the GPUs' nodes in its folder, the only one that this worker is to open
    #[arg(long = "node", value_name = "PATH")]
    only: Vec<PathBuf>,
    /// Why an attempt with that one alone failed
    #[arg(long, value_name = "REASON", conflicts_with = "only")]
    alone_failed: Option<String>,
}

impl Nodes {
    /// The arguments that keep a worker to the GPU with this minor number: to CUDA's own node of it, and that of a simulated one.
    pub(crate) fn of(minor: u32, sysroot: Option<&Path>) -> Vec<OsString> {
        let folders = [Some(Path::new("/")), sysroot];
        let node = |folder: &Path| folder.join(format!("dev/nvidia{minor}")).into_os_string();
        let nodes = folders.into_iter().flatten().map(node);
        nodes.flat_map(|it| [ONLY.into(), it]).collect()
    }
}

/// Does what `command` says, in this process, and returns its exit status.
pub fn run(command: &WorkerCommand) -> ExitCode {
    super::die_with_parent();
    match command.clone() {
        WorkerCommand::Nvml {
            part,
            skip,
            at_rest,
            finished,
        } => {
            NvmlWorker {
                part,
                skipped: skip,
                at_rest,
                finished,
            }
            .run();
        }
        WorkerCommand::Cuda { nodes } => {
            return with_nodes(&nodes, |_| {
                crate::probe::run_cuda_worker();
                Then::Done
            });
        }
        WorkerCommand::CudaKernel { gpu, nodes } => {
            return with_nodes(&nodes, move |is_alone| {
                crate::load::cuda_kernel::run_worker(&gpu, is_alone)
            });
        }
        WorkerCommand::Burn { task, nodes } => {
            let failed = nodes.alone_failed.clone();
            return with_nodes(&nodes, move |is_alone| {
                crate::load::burn_worker::run_worker(&task, is_alone, failed)
            });
        }
        WorkerCommand::Sensors { gpu } => crate::probe::run_sensors_worker(&gpu),
    }
    ExitCode::SUCCESS
}

/// Works with one GPU's node alone where that is asked for, and where CUDA does not start so, once more with all.
fn with_nodes(nodes: &Nodes, work: impl FnOnce(bool) -> Then + Send + 'static) -> ExitCode {
    let Then::AgainWithAllNodes(reason) = keep_to(&nodes.only, work) else {
        return ExitCode::SUCCESS;
    };
    // Neither the rules can be taken back nor what the driver keeps of a start that failed.
    let error = Command::new(worker_program(None))
        .arg0("gpu-validator")
        .args(without_nodes(std::env::args_os().skip(1)))
        .args(["--alone-failed", &reason])
        .exec();
    eprintln!("cannot start anew: {error}");
    ExitCode::FAILURE
}

/// Arguments of a worker less those that keep it to a node.
fn without_nodes(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut is_path = false;
    arguments
        .filter(|argument| {
            let leave_out = is_path || argument == ONLY;
            is_path = !is_path && argument == ONLY;
            !leave_out
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_begins_anew_does_the_same_with_every_node() {
        let own: Vec<OsString> = ["worker", "cuda-kernel", "--gpu", "GPU-a"]
            .map(OsString::from)
            .to_vec();
        let nodes = Nodes::of(3, Some(Path::new("/host")));
        assert_eq!(
            nodes,
            ["--node", "/dev/nvidia3", "--node", "/host/dev/nvidia3"]
        );
        let all = own.iter().chain(&nodes).cloned();
        assert_eq!(without_nodes(all), own);
        // A path that is spelled like the argument is a path.
        let odd = ["--node", "--node", "--gpu"].map(OsString::from);
        assert_eq!(without_nodes(odd.into_iter()), ["--gpu"]);
    }
}
