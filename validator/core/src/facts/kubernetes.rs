//! What the kubelet and the API server say of this node's GPUs.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{KernelRun, Reading};

/// This node in Kubernetes, from its inside and from the API server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KubernetesFacts {
    /// The folder that was taken for the kubelet's, without the sysroot: `/var/lib/kubelet`.
    pub kubelet_root: String,
    /// The folder holds what a kubelet makes there (`device-plugins` or `pod-resources`).
    pub kubelet_present: Reading<bool>,
    /// NVIDIA's driver for dynamic resource allocation is here, which gives out GPUs in place of a
    /// device plugin.
    pub dynamic_resource_allocation: bool,
    /// NVIDIA's device plugins, by their sockets in `device-plugins`.
    pub device_plugins: Reading<Vec<DevicePlugin>>,
    /// `GetAllocatableResources`: the ids of NVIDIA's devices that the kubelet may give to
    /// containers, by resource.
    pub allocatable: Reading<BTreeMap<String, Vec<String>>>,
    /// How long the kubelet was waited for until it had as many devices as the node has.
    pub allocatable_wait: Option<AllocatableWait>,
    /// `List`: NVIDIA's devices that containers have now.
    pub assignments: Reading<Vec<DeviceAssignment>>,
    /// Whose the processes are that NVML lists on the GPUs, by process id.
    pub process_owners: BTreeMap<u32, Reading<ProcessOwner>>,
    /// `NotSupported` where there are no credentials for an API server.
    pub api: Reading<ApiFacts>,
    /// Pods that were made to see whether pods may use the GPUs; `None` where none were requested.
    pub gpu_pods: Option<Reading<GpuPods>>,
}

/// One socket of a device plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DevicePlugin {
    /// The file's name in `device-plugins`: `nvidia-gpu.sock`.
    pub socket: String,
    /// It answered `GetDevicePluginOptions`; `NotRead` where this process may not ask.
    pub answers: Reading<bool>,
    /// Why it did not answer.
    pub trouble: Option<String>,
    /// The first answer of `ListAndWatch`; `NotSupported` where the profile does not ask for it.
    pub devices: Reading<Vec<PluginDevice>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PluginDevice {
    /// `GPU-8f0c…`, `MIG-…`, and `GPU-8f0c…::3` for a replica of a shared GPU.
    pub id: String,
    /// `Healthy` or `Unhealthy`.
    pub health: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AllocatableWait {
    /// Seconds until the number was reached, or until waiting was given up.
    pub waited_s: f64,
    pub devices: u32,
    /// How many were waited for.
    pub wanted: u32,
}

/// NVIDIA's devices that one container has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceAssignment {
    pub namespace: String,
    pub pod: String,
    pub container: String,
    /// `nvidia.com/gpu`.
    pub resource: String,
    pub device_ids: Vec<String>,
}

/// Whose a process is, by its control group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProcessOwner {
    /// A pod's; namespace and name where the folder of its logs names them.
    Pod {
        uid: String,
        namespace: Option<String>,
        name: Option<String>,
    },
    /// No pod's; this is its control group.
    NoPod { control_group: String },
}

/// The API server's answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ApiFacts {
    /// `https://10.0.0.1:443`.
    pub server: String,
    pub node_name: Reading<String>,
    pub node: Reading<NodeFacts>,
    /// Handlers by the names of the runtime classes.
    pub runtime_classes: Reading<BTreeMap<String, String>>,
    /// The `DaemonSets` of NVIDIA's device plugin, and their pods on this node.
    pub device_plugin_daemon_sets: Reading<Vec<DaemonSetFacts>>,
}

/// The node object, as far as GPUs are concerned.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeFacts {
    pub labels: BTreeMap<String, String>,
    pub taints: Vec<NodeTaint>,
    /// It is cordoned.
    pub unschedulable: bool,
    pub conditions: Vec<NodeCondition>,
    /// NVIDIA's resources.
    pub capacity: BTreeMap<String, u64>,
    pub allocatable: BTreeMap<String, u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeTaint {
    pub key: String,
    pub value: String,
    pub effect: String,
}

impl std::fmt::Display for NodeTaint {
    /// `nvidia.com/gpu=true:NoSchedule`, as kubectl writes it.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.key)?;
        if !self.value.is_empty() {
            write!(formatter, "={}", self.value)?;
        }
        write!(formatter, ":{}", self.effect)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeCondition {
    /// `Ready`.
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    pub reason: String,
    pub message: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DaemonSetFacts {
    pub namespace: String,
    pub name: String,
    /// In the whole cluster.
    pub desired: u64,
    pub ready: u64,
    pub node_selector: BTreeMap<String, String>,
    pub tolerations: Vec<Toleration>,
    /// Its pods on this node.
    pub pods: Vec<PodFacts>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Toleration {
    /// Empty for all keys.
    pub key: String,
    /// `Equal` or `Exists`.
    pub operator: String,
    pub value: String,
    /// Empty for all effects.
    pub effect: String,
}

/// A pod, and for one that is not ready what can be known of the reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PodFacts {
    pub name: String,
    /// `Running`.
    pub phase: String,
    pub ready: bool,
    /// `CrashLoopBackOff: back-off 5m0s restarting failed container`, one for each container that
    /// waits.
    pub waiting: Vec<String>,
    pub restarts: u64,
    pub log_tail: Reading<Vec<String>>,
    pub events: Reading<Vec<String>>,
}

/// Pods that were made on this node, each asking for one GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GpuPods {
    pub namespace: String,
    pub image: String,
    /// `nvidia.com/gpu`.
    pub resource: String,
    /// Devices of that resource that the kubelet had not assigned, as far as it reported them.
    pub free: Option<u32>,
    /// Pods of an earlier run on this node, which were removed first.
    pub leftovers_removed: u32,
    pub pods: Vec<GpuPod>,
    /// The reason for leftover pods, if there are any.
    pub cleanup_trouble: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GpuPod {
    pub name: String,
    pub end: GpuPodEnd,
    /// Seconds until the pod had ended, or until waiting was given up.
    pub took_s: f64,
    /// UUIDs of the GPUs or MIG devices that NVML and CUDA showed inside.
    pub nvml_uuids: Vec<String>,
    pub cuda_uuids: Vec<String>,
    /// The check kernel inside, by GPU UUID.
    pub cuda_kernel: BTreeMap<String, Reading<KernelRun>>,
    /// Why CUDA did not start inside, if it did not.
    pub cuda_trouble: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GpuPodEnd {
    /// It ended by itself and its facts were read.
    Finished,
    /// No GPU was free for it; the scheduler's or kubelet's words.
    Busy(String),
    /// It did not start, and why.
    NotStarted(String),
    /// It ran and failed.
    Failed(String),
    /// It ended and its facts could not be read.
    NotRead(String),
}
