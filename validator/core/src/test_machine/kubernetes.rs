//! What kubelet and API server say of the healthy machine.

use std::collections::BTreeMap;

use super::healthy_node;
use crate::facts::{
    ApiFacts, DaemonSetFacts, DeviceAssignment, DevicePlugin, Facts, GpuPod, GpuPodEnd, GpuPods,
    KernelRun, KubernetesFacts, NodeCondition, NodeFacts, NodeTaint, PluginDevice, PodFacts,
    Reading, Toleration, WorkerEnd,
};

/// The UUID of a GPU of the healthy machine.
pub fn gpu_uuid(index: usize) -> String {
    format!("GPU-00000000-0000-0000-0000-00000000000{index}")
}

/// Eight healthy H200s in a cluster that offers all of them and has given away the first.
pub fn kubernetes_node() -> Facts {
    let mut facts = healthy_node();
    facts.kubernetes = Some(kubernetes());
    facts
}

/// The same, but for Kubernetes.
pub fn kubernetes_node_with(change: impl FnOnce(&mut KubernetesFacts)) -> Facts {
    let mut facts = kubernetes_node();
    if let Some(kubernetes) = &mut facts.kubernetes {
        change(kubernetes);
    }
    facts
}

/// The same, but for the API server.
pub fn kubernetes_node_with_api(change: impl FnOnce(&mut ApiFacts)) -> Facts {
    kubernetes_node_with(|kubernetes| match &mut kubernetes.api {
        Reading::Value(api) => change(api),
        other => panic!("the machine has an API server, not {other:?}"),
    })
}

/// The same, but for the node object.
pub fn kubernetes_node_with_object(change: impl FnOnce(&mut NodeFacts)) -> Facts {
    kubernetes_node_with_api(|api| match &mut api.node {
        Reading::Value(node) => change(node),
        other => panic!("the machine has a node object, not {other:?}"),
    })
}

/// The same, but for the pods that looked at the GPUs.
pub fn kubernetes_node_with_gpu_pods(change: impl FnOnce(&mut GpuPods)) -> Facts {
    kubernetes_node_with(|kubernetes| match &mut kubernetes.gpu_pods {
        Some(Reading::Value(pods)) => change(pods),
        other => panic!("the machine has pods, not {other:?}"),
    })
}

fn kubernetes() -> KubernetesFacts {
    let uuids: Vec<String> = (0..8).map(gpu_uuid).collect();
    let devices = uuids.iter().map(|id| PluginDevice {
        id: id.clone(),
        health: "Healthy".to_owned(),
    });
    KubernetesFacts {
        kubelet_root: "/var/lib/kubelet".to_owned(),
        kubelet_present: Reading::Value(true),
        dynamic_resource_allocation: false,
        device_plugins: Reading::Value(vec![DevicePlugin {
            socket: "nvidia-gpu.sock".to_owned(),
            answers: Reading::Value(true),
            trouble: None,
            devices: Reading::Value(devices.collect()),
        }]),
        allocatable: Reading::Value(BTreeMap::from([(
            "nvidia.com/gpu".to_owned(),
            uuids.clone(),
        )])),
        allocatable_wait: None,
        assignments: Reading::Value(vec![DeviceAssignment {
            namespace: "team".to_owned(),
            pod: "train-0".to_owned(),
            container: "train".to_owned(),
            resource: "nvidia.com/gpu".to_owned(),
            device_ids: vec![uuids[0].clone()],
        }]),
        process_owners: BTreeMap::new(),
        api: Reading::Value(api()),
        gpu_pods: Some(Reading::Value(GpuPods {
            namespace: "gpu-bringup".to_owned(),
            image: "registry.example/gpu-validator:1".to_owned(),
            resource: "nvidia.com/gpu".to_owned(),
            free: Some(8),
            leftovers_removed: 0,
            pods: (0..8).map(gpu_pod).collect(),
            cleanup_trouble: None,
        })),
    }
}

fn api() -> ApiFacts {
    let condition = |kind: &str, status: &str| NodeCondition {
        kind: kind.to_owned(),
        status: status.to_owned(),
        ..NodeCondition::default()
    };
    let label = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let eight = BTreeMap::from([("nvidia.com/gpu".to_owned(), 8)]);
    ApiFacts {
        server: "https://10.0.0.1:443".to_owned(),
        node_name: Reading::Value("gpu-node-1".to_owned()),
        node: Reading::Value(NodeFacts {
            labels: BTreeMap::from([label("nvidia.com/gpu", "true")]),
            taints: vec![NodeTaint {
                key: "nvidia.com/gpu".to_owned(),
                value: "true".to_owned(),
                effect: "NoSchedule".to_owned(),
            }],
            unschedulable: false,
            conditions: vec![
                condition("MemoryPressure", "False"),
                condition("DiskPressure", "False"),
                condition("PIDPressure", "False"),
                condition("Ready", "True"),
            ],
            capacity: eight.clone(),
            allocatable: eight,
        }),
        runtime_classes: Reading::Value(BTreeMap::from([label("nvidia", "nvidia")])),
        device_plugin_daemon_sets: Reading::Value(vec![DaemonSetFacts {
            namespace: "kube-system".to_owned(),
            name: "nvidia-device-plugin".to_owned(),
            desired: 2,
            ready: 2,
            node_selector: BTreeMap::from([label("nvidia.com/gpu", "true")]),
            tolerations: vec![Toleration {
                key: "nvidia.com/gpu".to_owned(),
                operator: "Exists".to_owned(),
                ..Toleration::default()
            }],
            pods: vec![PodFacts {
                name: "nvidia-device-plugin-x2x4z".to_owned(),
                phase: "Running".to_owned(),
                ready: true,
                waiting: Vec::new(),
                restarts: 0,
                log_tail: Reading::NotSupported,
                events: Reading::NotSupported,
            }],
        }]),
    }
}

fn gpu_pod(index: usize) -> GpuPod {
    let run = KernelRun {
        end: WorkerEnd::Finished,
        values_compared: 1 << 20,
        mismatches: 0,
        examples: Vec::new(),
        wall_ms: 900.0,
    };
    GpuPod {
        name: format!("gpu-validator-1-{index}"),
        end: GpuPodEnd::Finished,
        took_s: 9.0,
        nvml_uuids: vec![gpu_uuid(index)],
        cuda_uuids: vec![gpu_uuid(index)],
        cuda_kernel: BTreeMap::from([(gpu_uuid(index), Reading::Value(run))]),
        cuda_trouble: None,
    }
}
