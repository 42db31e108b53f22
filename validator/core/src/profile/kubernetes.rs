//! The section `kubernetes:`: what the kubelet and the API server must say of the node.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Requirement;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct KubernetesProfile {
    /// A kubelet must be there: without one, its checks are errors instead of skipped.
    pub required: Option<bool>,
    /// The kubelet's folder; `/var/lib/kubelet` by default.
    pub kubelet_root: Option<String>,
    /// The node's name in the cluster; by default `NODE_NAME`, else the host's name.
    pub node_name: Option<String>,
    /// Devices that each resource must have, exactly, where the GPUs do not say it:
    /// `nvidia.com/mig-1g.10gb: 7`.
    pub resources: BTreeMap<String, u32>,
    /// Into how many devices time-slicing or MPS makes each GPU or MIG device; by default the
    /// device plugin's number.
    pub replicas: Option<u32>,
    /// Seconds in which the kubelet must have as many devices as the node has GPUs; 0 by default,
    /// which waits for none.
    pub allocatable_within_s: Option<f64>,
    /// Whether the device plugin's own list is requested. NVIDIA's plugin then loses one health
    /// event, see the check `device_plugin_devices`; false by default.
    pub list_and_watch: Option<bool>,
    /// Labels that the node must have.
    pub labels: BTreeMap<String, String>,
    /// Taints that the node must have, as kubectl writes them: `nvidia.com/gpu=true:NoSchedule`.
    pub taints: Vec<String>,
    /// A runtime class that the cluster must have.
    pub runtime_class: Option<String>,
    /// Whether a `DaemonSet` of NVIDIA's device plugin must be in the cluster; allowed by default,
    /// since a plugin may be part of the machine.
    pub device_plugin_daemon_set: Option<Requirement>,
    pub api: KubernetesApiProfile,
    pub gpu_pod: GpuPodProfile,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct KubernetesApiProfile {
    /// The API server must be queried: without credentials, its checks are errors instead of
    /// skipped.
    pub required: Option<bool>,
    /// A kubeconfig; by default `KUBECONFIG`, else the pod's service account.
    pub kubeconfig: Option<String>,
    /// A context of the kubeconfig; by default its current one.
    pub context: Option<String>,
    /// A kubeconfig may switch off the verification of the server's certificate, or TLS altogether.
    pub allow_insecure: Option<bool>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GpuPodProfile {
    /// Whether pods are made at level standard, too; at level extended they are made unless this is
    /// false.
    pub run: Option<bool>,
    /// The image of `gpu-validator`; without one no pod is made.
    pub image: Option<String>,
    /// The namespace that the pods are made in; `gpu-bringup` by default.
    pub namespace: Option<String>,
    /// The resource of which each pod requests one; `nvidia.com/gpu` by default.
    pub resource: Option<String>,
    /// How many pods at once; by default as many as devices are free.
    pub count: Option<u32>,
    pub runtime_class: Option<String>,
    /// Seconds in which all of them must have ended, the pull of the image included; 300 by
    /// default.
    pub deadline_s: Option<f64>,
}
