//! Everything that was seen of a machine, as one plain value.
//!
//! Probes fill it, checks judge it, and nothing else connects the two: any verdict can be computed
//! again from `facts.json`. No NVML or CUDA type appears here. A probe never fails: what could not
//! be read is a [`Reading::NotRead`] with the reason, so that a check cannot mistake it for a
//! value.

mod allocation;
mod anonymize;
mod cuda;
mod environment;
mod gemm;
mod gpu;
mod gpu_index;
mod history;
mod host;
mod image;
mod kernel_log;
mod kubernetes;
mod layouts;
mod load;
mod node_state;
mod reading;
mod sensor_columns;

use std::collections::BTreeMap;

use anyhow::Context as _;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use allocation::*;
pub use cuda::*;
pub use environment::*;
pub use gemm::*;
pub use gpu::*;
pub use gpu_index::GpuIndex;
pub use history::*;
pub use host::*;
pub use image::*;
pub use kernel_log::*;
pub use kubernetes::*;
pub use layouts::*;
pub use load::*;
pub use node_state::*;
pub use reading::*;
pub use sensor_columns::SensorColumns;

use crate::level::Level;

/// The format of `facts.json` that this version writes. It grows when a reader of the older format
/// would misjudge.
/// Format 2: the sensors' samples are plain columns; those of format 1 are differences.
pub const FACTS_FORMAT: u32 = 2;

/// The facts of one machine at one time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// [`FACTS_FORMAT`] of the writer.
    pub format: u32,
    /// Version of the `gpu-validator` that collected.
    pub validator_version: String,
    /// When collection began, RFC 3339 in UTC.
    pub collected_at: String,
    /// How much was looked at.
    pub level: Level,
    /// The scenario of the simulated driver libraries that answered, if any did: such facts are not
    /// of a real machine.
    pub simulated: Option<String>,
    /// Serial numbers, UUIDs and host names were replaced by `collect --anonymize`.
    pub anonymized: bool,
    /// Why collection ended early (a signal), if it did.
    pub interrupted: Option<String>,
    /// The operating system's side.
    pub host: HostFacts,
    /// The driver, as NVML reports it.
    pub nvml: NvmlFacts,
    /// One entry for each GPU that NVML counts, in NVML's order; the order means nothing outside
    /// NVML.
    pub gpus: Vec<GpuFacts>,
    /// Facts from the CUDA driver library.
    pub cuda: CudaFacts,
    /// What GPUs did under work.
    pub load: LoadFacts,
    /// What was read of the node again after the load; absent where no load ran or an older version
    /// collected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_load: Option<Box<NodeState>>,
    /// This node in Kubernetes; `None` below level standard.
    #[serde(default)]
    pub kubernetes: Option<KubernetesFacts>,
    /// Toolkits, libraries and Python environments; `None` where they were not read, below level
    /// standard.
    #[serde(default)]
    pub environment: Option<EnvironmentFacts>,
    /// Earlier runs of this node, the oldest first; `None` where no history is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub history: Option<Reading<Vec<EarlierRun>>>,
    /// Wall time of each probe, in milliseconds, by its name (`host`, `nvml`, `cuda`,
    /// `cuda_kernel`, …).
    pub timings_ms: BTreeMap<String, f64>,
    /// Where the GPUs stand in `gpus`.
    #[serde(skip)]
    #[schemars(skip)]
    pub gpu_index: GpuIndex,
}

impl Facts {
    /// The GPU with this UUID.
    pub fn gpu(&self, uuid: &str) -> Option<&GpuFacts> {
        let is_it = |gpu: &GpuFacts| gpu.uuid.value().is_some_and(|it| it == uuid);
        let position = self.position_of((Some(uuid), None), is_it)?;
        self.gpus.get(position)
    }

    /// Where the first GPU that is the one stands in `gpus`; UUID and PCI address are those that it
    /// has, if it has.
    pub(crate) fn position_of(
        &self,
        uuid_and_address: (Option<&str>, Option<&str>),
        is_it: impl Fn(&GpuFacts) -> bool,
    ) -> Option<usize> {
        self.gpu_index.find(&self.gpus, uuid_and_address, is_it)
    }

    /// Reads `facts.json`. Facts that a newer version wrote are refused: this version would
    /// misjudge them.
    pub fn from_json(text: &[u8]) -> anyhow::Result<Self> {
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        let facts: serde_json::Result<Self> = serde_json::from_slice(text);
        let format = match &facts {
            Ok(facts) => Some(facts.format),
            // Other fields may be unknown because the format is newer, and then that is what the
            // reader must hear.
            Err(_) => serde_json::from_slice::<Format>(text)
                .ok()
                .map(|it| it.format),
        };
        if let Some(format) = format.filter(|it| *it > FACTS_FORMAT) {
            anyhow::bail!(
                "these facts have format {format}, and this gpu-validator reads formats up to {FACTS_FORMAT}; \
                 use a newer gpu-validator"
            );
        }
        facts.context("not a facts file of gpu-validator")
    }
}
