//! The state of a node at a second time: after the load.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{DeviceNode, GpuFacts, KernelLog, KernelModules, PciDevice, Reading, ServiceState};

/// What was read of the node again after the load.
///
/// A value that the second reading does not attempt is left at its default, and the first reading
/// stands for it. A value that it attempts and does not get is [`Reading::NotRead`] with the
/// reason.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NodeState {
    /// `nvmlDeviceGetCount`.
    pub gpu_count: Reading<u32>,
    /// Every GPU that NVML lists now, with what was read of it.
    pub gpus: Reading<Vec<GpuFacts>>,
    pub pci_devices: Reading<Vec<PciDevice>>,
    /// The whole log, not only what it gained.
    pub kernel_log: Reading<KernelLog>,
    pub kernel_modules: Reading<KernelModules>,
    pub device_nodes: Reading<Vec<DeviceNode>>,
    /// systemd services that were read again.
    pub services: BTreeMap<String, Reading<ServiceState>>,
}
