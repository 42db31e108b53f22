//! `gpu-validator worker …` as the command line sees it.

use std::process::ExitCode;

use crate::probe::NvmlWorker;

/// Asks the driver, in a process that may hang or crash; speaks JSON lines on stdout. Started by the validator itself.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum WorkerCommand {
    /// Reads NVML
    Nvml {
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
    Cuda,
    /// Runs the check kernel on one GPU
    CudaKernel {
        /// UUID of the GPU, or of a MIG device
        #[arg(long)]
        gpu: String,
    },
    /// Burns one GPU
    Burn {
        /// What to do, as JSON
        #[arg(long)]
        task: String,
    },
    /// Reads NVML's sensors again and again until SIGTERM
    Sensors {
        /// UUIDs of the GPUs
        #[arg(long)]
        gpu: Vec<String>,
    },
}

/// Does what `command` says, in this process, and returns its exit status.
pub fn run(command: &WorkerCommand) -> ExitCode {
    super::die_with_parent();
    match command {
        WorkerCommand::Nvml {
            skip,
            at_rest,
            finished,
        } => {
            NvmlWorker {
                skipped: skip.clone(),
                at_rest: at_rest.clone(),
                finished: finished.clone(),
            }
            .run();
        }
        WorkerCommand::Cuda => crate::probe::run_cuda_worker(),
        WorkerCommand::CudaKernel { gpu } => crate::load::cuda_kernel::run_worker(gpu),
        WorkerCommand::Burn { task } => crate::load::burn_worker::run_worker(task),
        WorkerCommand::Sensors { gpu } => crate::probe::run_sensors_worker(gpu),
    }
    ExitCode::SUCCESS
}
