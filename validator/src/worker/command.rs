//! `gpu-validator worker …` as the command line sees it.

use std::process::ExitCode;

/// Asks the driver, in a process that may hang or crash; speaks JSON lines on stdout. Started by the validator itself.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum WorkerCommand {
    /// Reads NVML
    Nvml {
        /// Calls that are not made, because they hung or crashed before: NAME or NAME@INDEX of the GPU
        #[arg(long = "skip", value_name = "CALL")]
        skip: Vec<String>,
        /// GPUs one after another instead of at the same time
        #[arg(long)]
        sequential: bool,
    },
    /// Reads the CUDA driver library
    Cuda,
    /// Runs the check kernel on one GPU
    CudaKernel {
        /// UUID of the GPU
        #[arg(long)]
        gpu: String,
    },
}

/// Does what `command` says, in this process, and returns its exit status.
pub fn run(command: &WorkerCommand) -> ExitCode {
    crate::worker::die_with_parent();
    match command {
        WorkerCommand::Nvml { .. } | WorkerCommand::Cuda | WorkerCommand::CudaKernel { .. } => {
            ExitCode::FAILURE
        }
    }
}
