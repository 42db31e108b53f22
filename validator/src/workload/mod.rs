//! Workloads: what a worker process does on its GPUs, one folder each.
//!
//! A workload implements [`Workload`], and [`Task`] has an arm for it; [`worker`] runs it in a
//! process, and `session` starts and follows that process.

pub(crate) mod allocation;
pub(crate) mod check;
mod chunks;
pub(crate) mod contention;
mod foreign_processes;
pub(crate) mod gemm;
pub(crate) mod memory;
mod ordered;
pub(crate) mod orders;
pub(crate) mod reserve;
pub(crate) mod start;
pub(crate) mod worker;

pub(crate) use ordered::{CHANGE, Change};
use serde::{Deserialize, Serialize};
use validator_core::facts::{ALLOCATION, RequestedWork, WorkerEnd, WorkloadRun};
use validator_core::worker_id::WorkerId;

use crate::cuda::{Context, Device};
use crate::plan::MemoryShare;
use crate::worker::protocol::Reporter;

/// The request to a worker, as its command line carries it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Assignment {
    pub(crate) id: WorkerId,
    /// UUIDs of CUDA devices: the GPUs, or MIG devices in their place.
    pub(crate) devices: Vec<String>,
    /// Of the memory that is free on each GPU.
    pub(crate) memory: MemoryShare,
    pub(crate) requested: RequestedWork,
    pub(crate) on_foreign_process: OnForeignProcess,
    /// Prepares, and waits on standard input for the order to begin.
    #[serde(default)]
    pub(crate) stands_by: bool,
    pub(crate) task: Task,
}

/// The reaction to a foreign process on one of the worker's GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OnForeignProcess {
    /// A note in the run.
    Report,
    /// The worker frees everything and ends as busy.
    Yield,
    /// None: the parent reads the process lists for all workers.
    Ignore,
    /// None while it works. Where the GPU refuses memory or access, the worker reads once whether a
    /// foreign process has it.
    ReadOnRefusal,
    /// None of the worker's own: the parent watches, and orders on standard input (see [`orders`]).
    /// Eight workers that each read NVML's lists would keep the driver's locks.
    AwaitOrders,
}

/// What is to be done, by workload.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Task {
    Check(check::CheckTask),
    Memory(memory::MemoryTask),
    Gemm(gemm::rotation::GemmTask),
    Burn(gemm::burn::BurnTask),
    Allocation(allocation::AllocationTask),
    Reserve(reserve::ReserveTask),
}

impl Task {
    /// The workload's name in a [`WorkerId`].
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Check(_) => "check",
            Self::Memory(_) => "memory",
            Self::Gemm(_) => "gemm",
            Self::Burn(_) => "burn",
            Self::Allocation(_) => ALLOCATION,
            Self::Reserve(_) => "reserve",
        }
    }
}

/// A GPU of a worker, with CUDA started.
pub(crate) struct WorkerGpu {
    /// UUID of the GPU, which for a MIG device differs from the device's.
    pub(crate) uuid: String,
    pub(crate) device: Device<'static>,
    pub(crate) context: Context<'static>,
}

impl WorkerGpu {
    /// Makes the context.
    fn of(uuid: &str, device: Device<'static>, reporter: &Reporter) -> Result<Self, WorkerEnd> {
        reporter.step("cuDevicePrimaryCtxRetain");
        let context = device.context()?;
        Ok(Self {
            uuid: uuid.to_owned(),
            device,
            context,
        })
    }
}

/// Something that a worker does again and again on its GPUs.
pub(crate) trait Workload {
    type Prepared<'g>: Prepared;

    /// Loads kernels and allocates memory, and notes in `run` how much that was. Calls that may
    /// hang are announced to `reporter`, here and in the steps.
    fn prepare<'g>(
        &self,
        gpus: &'g [WorkerGpu],
        budget: MemoryShare,
        reporter: &'g Reporter,
        run: &mut WorkloadRun,
    ) -> Result<Self::Prepared<'g>, WorkerEnd>;
}

/// A workload that has its memory.
pub(crate) trait Prepared {
    /// A part of the work that takes some 10 ms at most, so that a stop is not delayed; a longer one
    /// heeds SIGTERM and reports itself. Results go to `run`.
    fn step(&mut self, run: &mut WorkloadRun) -> Result<Step, WorkerEnd>;

    /// Awaits what steps have left under way on the GPU. No step follows.
    fn settle(&mut self, _run: &mut WorkloadRun) -> Result<(), WorkerEnd> {
        Ok(())
    }

    /// Notes what is known only at the end, and frees everything.
    fn finish(self, run: &mut WorkloadRun) -> Result<(), WorkerEnd>;
}

/// Whether a step completed a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    WithinPass,
    EndOfPass,
}
