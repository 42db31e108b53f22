//! The allocation test: many workers that share GPUs, and what they leave.

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Reading, WorkloadRun};
use crate::worker_id::WorkerId;

/// Name of the workload in a [`WorkerId`].
pub const ALLOCATION: &str = "allocation";

/// The parent's view of the allocation test. The workers' own reports are in `load.runs`, by
/// [`WorkerId`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AllocationFacts {
    pub plan: AllocationPlan,
    /// Every worker that was planned, in the order of the phases.
    #[serde(default)]
    pub workers: Vec<AllocationWorker>,
    /// Before the first worker was started.
    #[serde(default)]
    pub before: Reading<AllocationSnapshot>,
    /// Process IDs that NVML listed while the workers ran, by GPU UUID.
    #[serde(default)]
    pub listed: BTreeMap<String, BTreeSet<u32>>,
    /// Why NVML was not read to the end of the test.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub view_trouble: Option<String>,
    /// What became of the workers that were killed on purpose.
    #[serde(default)]
    pub killing: Reading<KillingPhase>,
    #[serde(default)]
    pub oversubscription: Reading<Oversubscription>,
    /// After the last worker ended: as soon as nothing was left, or at the end of the time limit.
    #[serde(default)]
    pub after: Reading<AllocationSnapshot>,
}

/// The request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AllocationPlan {
    /// UUIDs of the GPUs that are tested, in NVML's order.
    pub gpus: Vec<String>,
    /// Of the steady phase, on all GPUs together.
    pub workers: u32,
    /// Of the steady phase.
    pub duration_s: f64,
    /// Of each worker.
    pub memory_bytes: u64,
    /// Share of the workers that must succeed.
    pub minimum_success_percent: f64,
    /// Processors that the test may use, by affinity and cgroup.
    pub processors: u32,
}

/// A part of the test. Phases run one after another.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum AllocationPhase {
    /// Workers of all GPUs for the whole duration.
    Steady,
    /// One worker, on one GPU.
    ScalingOne,
    /// One worker on each GPU.
    ScalingAll,
    /// A worker requests more memory than is free, in parallel with one that works.
    Oversubscription,
    /// Half of the workers are killed at random moments.
    Killing,
}

/// A worker as its parent knows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AllocationWorker {
    pub id: WorkerId,
    pub phase: AllocationPhase,
    /// `None` where its process was not started.
    pub pid: Option<u32>,
    /// When it was released to work, in seconds since the first workers were; `None` where it was
    /// not, and in facts of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released_s: Option<f64>,
    /// Killed on purpose.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub killed: bool,
}

impl AllocationWorker {
    /// UUID of its GPU.
    pub fn gpu(&self) -> &str {
        self.id.gpus.first().map_or("", String::as_str)
    }
}

/// What the test found, or left.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AllocationSnapshot {
    /// Since the last worker ended; 0 before the first.
    pub seconds: f64,
    /// By UUID.
    pub gpus: BTreeMap<String, GpuUse>,
    /// Open file descriptors of the parent.
    pub descriptors: u64,
    /// Workers' process IDs that still exist, zombies included.
    pub processes: BTreeSet<u32>,
    /// Those of them that have ended and were not reaped.
    pub zombies: BTreeSet<u32>,
    /// Shared memory segments of this user, by name; `None` where they cannot be listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_memory: Option<BTreeSet<String>>,
    /// References to the module `nvidia_uvm`, by all processes of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uvm_references: Option<u64>,
}

/// Who uses a GPU, by NVML.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GpuUse {
    /// `None` where NVML does not report it.
    pub memory_used_bytes: Option<u64>,
    #[serde(default)]
    pub memory_free_bytes: Option<u64>,
    /// `None` where NVML does not list processes.
    pub pids: Option<BTreeSet<u32>>,
}

/// Workers that were killed by SIGKILL at random moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KillingPhase {
    pub killed: u32,
    /// From the last kill until NVML listed none of them; `None` where it still did at the end of
    /// the time limit.
    pub unlisted_after_s: Option<f64>,
}

/// A request for more memory than was free.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Oversubscription {
    /// The worker that made it.
    pub worker: WorkerId,
    pub requested_bytes: u64,
    /// Free on the GPU by NVML before.
    pub free_bytes: u64,
}

/// What a worker reports in [`WorkloadRun::detail`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AllocationDetail {
    /// UUIDs of the devices that CUDA showed it.
    #[serde(default)]
    pub visible_devices: Vec<String>,
    /// UUID of the device of its context.
    #[serde(default)]
    pub device: String,
    /// Allocated, computed, verified and freed.
    #[serde(default)]
    pub operations: u64,
    #[serde(default)]
    pub failures: AllocationFailures,
    #[serde(default)]
    pub peak_memory_bytes: u64,
    /// Allocations that held the mark of another worker before they were written.
    #[serde(default)]
    pub foreign_marks: u64,
}

/// Operations that failed, by kind. How a process ended is in [`WorkloadRun::end`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AllocationFailures {
    pub out_of_memory: u64,
    pub cuda_error: u64,
    pub wrong_result: u64,
    pub wrong_gpu: u64,
}

impl WorkloadRun {
    /// The detail of a worker of the allocation test; `None` where it reported none.
    pub fn allocation(&self) -> Option<AllocationDetail> {
        let detail = self.detail.get(ALLOCATION)?;
        serde_json::from_value(detail.clone()).ok()
    }
}
