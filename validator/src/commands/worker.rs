//! `gpu-validator worker …` as the command line sees it.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use crate::probe::NvmlWorker;
use crate::probe::Part;
use crate::worker::device_isolation::Attempt;
use crate::worker::nodes::{Nodes, with_nodes};

/// Queries the driver, in a process that may hang or crash; speaks JSON lines on stdout. Started by
/// the validator itself.
#[derive(Clone, Debug, clap::Subcommand)]
pub(crate) enum WorkerCommand {
    /// Reads NVML
    Nvml {
        /// The request
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
    /// Runs a workload on one or several GPUs
    Workload {
        /// The request, as JSON
        #[arg(long)]
        assignment: String,
        #[command(flatten)]
        nodes: Nodes,
    },
    /// Reads who uses GPUs, again and again until SIGTERM
    GpuUsers {
        /// UUIDs of the GPUs
        #[arg(long)]
        gpu: Vec<String>,
    },
    /// Starts a command, follows it to its end, and ends everything that it started
    Launch {
        /// Seconds after which it is ended
        #[arg(long)]
        limit_s: f64,
        /// The program and its arguments
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// Reads again and again who uses the GPUs
    Watch {
        /// UUIDs of the GPUs
        #[arg(long)]
        gpu: Vec<String>,
    },
    /// Reads NVML's sensors again and again until SIGTERM
    Sensors {
        /// UUIDs of the GPUs
        #[arg(long)]
        gpu: Vec<String>,
    },
}

/// Runs `command` in this process, and returns its exit status.
pub(crate) fn run(command: &WorkerCommand) -> ExitCode {
    crate::worker::die_with_parent();
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
                Attempt::Completed
            });
        }
        WorkerCommand::Workload { assignment, nodes } => {
            let failed = nodes.alone_failed.clone();
            return with_nodes(&nodes, move |is_alone| {
                crate::workload::worker::run_worker(&assignment, is_alone, failed)
            });
        }
        WorkerCommand::GpuUsers { gpu } => crate::probe::run_users_worker(&gpu),
        WorkerCommand::Launch { limit_s, command } => {
            let limit = Duration::try_from_secs_f64(limit_s).unwrap_or(Duration::MAX);
            crate::worker::launcher::run_launcher(limit, &command);
        }
        WorkerCommand::Watch { gpu } => crate::probe::run_watch_worker(&gpu),
        WorkerCommand::Sensors { gpu } => crate::probe::run_sensors_worker(&gpu),
    }
    ExitCode::SUCCESS
}
