//! The id of a worker process: its workload, its GPUs, and an ordinal among workers that share
//! both.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Keys state, facts and process ownership of a worker.
///
/// Several workers on one GPU differ in `ordinal`; one worker may have several GPUs.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(deny_unknown_fields)]
pub struct WorkerId {
    /// Name of the workload: `memory`.
    pub workload: String,
    /// UUIDs of its GPUs, sorted.
    pub gpus: Vec<String>,
    /// Number among the workers of the same workload and GPUs, from 0.
    pub ordinal: u32,
}

impl WorkerId {
    /// The worker number `ordinal` of `workload` on these GPUs, in any order.
    pub fn new(workload: &str, gpus: &[&str], ordinal: u32) -> Self {
        let mut gpus: Vec<String> = gpus.iter().map(|&it| it.to_owned()).collect();
        gpus.sort_unstable();
        gpus.dedup();
        Self {
            workload: workload.to_owned(),
            gpus,
            ordinal,
        }
    }

    /// Whether this worker has that GPU.
    pub fn has_gpu(&self, uuid: &str) -> bool {
        self.gpus.iter().any(|it| it == uuid)
    }
}

impl std::fmt::Display for WorkerId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            workload,
            gpus,
            ordinal,
        } = self;
        write!(f, "{workload} {ordinal} on {}", gpus.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_gpus_does_not_matter_and_the_ordinal_does() {
        let id = WorkerId::new("memory", &["GPU-b", "GPU-a", "GPU-b"], 0);
        assert_eq!(id, WorkerId::new("memory", &["GPU-a", "GPU-b"], 0));
        assert_ne!(id, WorkerId::new("memory", &["GPU-a", "GPU-b"], 1));
        assert_ne!(id, WorkerId::new("memory", &["GPU-a"], 0));
        assert!(id.has_gpu("GPU-b") && !id.has_gpu("GPU-c"));
        assert_eq!(id.to_string(), "memory 0 on GPU-a, GPU-b");
    }
}
