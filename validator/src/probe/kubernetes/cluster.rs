//! This node in the API server: the node object, runtime classes, the device plugin's pods.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::client::{ApiClient, ApiError, Target};
use super::requests::{
    GET_NODE, GET_POD_LOG, LIST_DAEMON_SETS, LIST_EVENTS, LIST_PODS, LIST_RUNTIME_CLASSES,
};
use crate::probe::json::at;
use validator_core::device_ids::RESOURCE_DOMAIN;
use validator_core::facts::{
    ApiFacts, DaemonSetFacts, NodeCondition, NodeFacts, NodeTaint, PodFacts, Reading, Toleration,
};
use validator_core::profile::KubernetesProfile;

/// Lines of a log and events that are kept of a pod that is not ready.
const LOG_LINES: usize = 10;
const EVENTS: usize = 5;
/// A text of a pod or condition is cut at this length.
const TEXT_CHARACTERS_MAXIMUM: usize = 300;

pub(super) fn ask(
    client: &ApiClient,
    server: &str,
    node_name: Result<String, String>,
    profile: &KubernetesProfile,
) -> ApiFacts {
    let named = node_name.as_deref().map_err(Clone::clone);
    let daemon_sets = named
        .clone()
        .and_then(|name| daemon_sets(client, name).map_err(|error| error.text));
    let selectors = daemon_sets
        .iter()
        .flatten()
        .flat_map(|it| it.node_selector.keys());
    let asked_for: BTreeSet<&String> = selectors.chain(profile.labels.keys()).collect();
    ApiFacts {
        server: server.to_owned(),
        node: named.and_then(|name| node(client, name, &asked_for)).into(),
        runtime_classes: runtime_classes(client).map_err(|error| error.text).into(),
        device_plugin_daemon_sets: daemon_sets.into(),
        node_name: node_name.into(),
    }
}

/// The pods of a namespace on the node. RBAC knows no fields: who may list pods of a namespace may
/// list all of it, so that no other namespace than the device plugin's is read.
fn pods_on(client: &ApiClient, namespace: &str, node_name: &str) -> Result<Vec<Value>, ApiError> {
    let selector = format!("spec.nodeName={node_name}");
    client.list(
        Target::in_namespace(LIST_PODS, namespace),
        &[("fieldSelector", &selector)],
    )
}

fn node(
    client: &ApiClient,
    name: &str,
    asked_for: &BTreeSet<&String>,
) -> Result<NodeFacts, String> {
    let node = client
        .get(Target::object(GET_NODE, name))
        .map_err(|error| error.text)?;
    node_facts(&node, asked_for)
}

fn node_facts(node: &Value, asked_for: &BTreeSet<&String>) -> Result<NodeFacts, String> {
    Ok(NodeFacts {
        labels: kept_labels(node, asked_for),
        taints: array(at(node, "/spec/taints"))
            .map(|it| NodeTaint {
                key: text(at(it, "/key")),
                value: text(at(it, "/value")),
                effect: text(at(it, "/effect")),
            })
            .collect(),
        unschedulable: at(node, "/spec/unschedulable") == true,
        conditions: array(at(node, "/status/conditions"))
            .map(|it| NodeCondition {
                kind: text(at(it, "/type")),
                status: text(at(it, "/status")),
                reason: text(at(it, "/reason")),
                message: text(at(it, "/message")),
            })
            .collect(),
        capacity: resources(at(node, "/status/capacity"))?,
        allocatable: resources(at(node, "/status/allocatable"))?,
    })
}

/// Labels about GPUs and machines, and requested ones; others may say whose the node is.
fn kept_labels(node: &Value, asked_for: &BTreeSet<&String>) -> BTreeMap<String, String> {
    const PREFIXES: [&str; 4] = [
        RESOURCE_DOMAIN,
        "gpu-bringup.dev/",
        "node.kubernetes.io/instance-type",
        "kubernetes.io/arch",
    ];
    strings(at(node, "/metadata/labels"))
        .into_iter()
        .filter(|(name, _)| {
            PREFIXES.iter().any(|it| name.starts_with(it)) || asked_for.contains(name)
        })
        .collect()
}

/// Devices are counted in whole numbers, which Kubernetes writes as texts.
fn resources(quantities: &Value) -> Result<BTreeMap<String, u64>, String> {
    strings(quantities)
        .into_iter()
        .filter(|(name, _)| name.starts_with(RESOURCE_DOMAIN))
        .map(|(name, quantity)| match quantity.parse() {
            Ok(count) => Ok((name, count)),
            Err(_) => Err(format!("{name} is `{quantity}`, expected a whole number")),
        })
        .collect()
}

fn runtime_classes(client: &ApiClient) -> Result<BTreeMap<String, String>, ApiError> {
    let classes = client.list(Target::everywhere(LIST_RUNTIME_CLASSES), &[])?;
    Ok(classes
        .iter()
        .map(|it| (text(at(it, "/metadata/name")), text(at(it, "/handler"))))
        .collect())
}

fn daemon_sets(client: &ApiClient, node_name: &str) -> Result<Vec<DaemonSetFacts>, ApiError> {
    let all = client.list(Target::everywhere(LIST_DAEMON_SETS), &[])?;
    all.iter()
        .filter(|it| is_device_plugin(it))
        .map(|it| daemon_set(client, it, node_name))
        .collect()
}

/// NVIDIA's plugin, by its image or by the name that its charts and the GPU operator give it. Other
/// programs come from the same image and are distinguished by their names.
fn is_device_plugin(daemon_set: &Value) -> bool {
    const OTHERS: [&str; 3] = [
        "mps-control-daemon",
        "gpu-feature-discovery",
        "config-manager",
    ];
    let name = text(at(daemon_set, "/metadata/name"));
    let mut images =
        array(at(daemon_set, "/spec/template/spec/containers")).map(|it| text(at(it, "/image")));
    let is_plugin = name.contains("nvidia-device-plugin")
        || images.any(|image| image.contains("k8s-device-plugin"));
    is_plugin && !OTHERS.iter().any(|it| name.contains(it))
}

fn daemon_set(
    client: &ApiClient,
    daemon_set: &Value,
    node_name: &str,
) -> Result<DaemonSetFacts, ApiError> {
    let namespace = text(at(daemon_set, "/metadata/namespace"));
    let uid = at(daemon_set, "/metadata/uid");
    let is_of_it =
        |pod: &&Value| array(at(pod, "/metadata/ownerReferences")).any(|it| at(it, "/uid") == uid);
    let spec = at(daemon_set, "/spec/template/spec");
    Ok(DaemonSetFacts {
        name: text(at(daemon_set, "/metadata/name")),
        desired: count(at(daemon_set, "/status/desiredNumberScheduled")),
        ready: count(at(daemon_set, "/status/numberReady")),
        node_selector: strings(at(spec, "/nodeSelector")),
        tolerations: array(at(spec, "/tolerations"))
            .map(|it| Toleration {
                key: text(at(it, "/key")),
                operator: text(at(it, "/operator")),
                value: text(at(it, "/value")),
                effect: text(at(it, "/effect")),
            })
            .collect(),
        pods: pods_on(client, &namespace, node_name)?
            .iter()
            .filter(is_of_it)
            .map(|pod| pod_facts(client, &namespace, pod))
            .collect(),
        namespace,
    })
}

/// A pod; its log and events are read only where it is not ready.
fn pod_facts(client: &ApiClient, namespace: &str, pod: &Value) -> PodFacts {
    let name = text(at(pod, "/metadata/name"));
    let statuses = || array(at(pod, "/status/containerStatuses"));
    let ready = array(at(pod, "/status/conditions"))
        .any(|it| at(it, "/type") == "Ready" && at(it, "/status") == "True");
    let mut facts = PodFacts {
        phase: text(at(pod, "/status/phase")),
        ready,
        waiting: waiting(pod),
        restarts: sum(statuses().map(|it| count(at(it, "/restartCount")))),
        log_tail: Reading::NotSupported,
        events: Reading::NotSupported,
        name,
    };
    if !ready {
        // The last run of a container that is not running now has the reason.
        let is_running = statuses().any(|it| at(it, "/state/running").is_object());
        facts.log_tail = log_tail(
            client,
            namespace,
            &facts.name,
            !is_running && facts.restarts > 0,
        )
        .map_err(|error| error.text)
        .into();
        facts.events = events(client, namespace, &facts.name)
            .map_err(|error| error.text)
            .into();
    }
    facts
}

/// Why containers wait, or why the pod is not scheduled.
pub(super) fn waiting(pod: &Value) -> Vec<String> {
    let with_message = |reason: &Value, message: &Value| {
        let (reason, message) = (text(reason), text(message));
        if message.is_empty() {
            reason
        } else {
            format!("{reason}: {message}")
        }
    };
    let status = at(pod, "/status");
    let of_containers = array(at(status, "/initContainerStatuses"))
        .chain(array(at(status, "/containerStatuses")))
        .map(|it| at(it, "/state/waiting"))
        .filter(|it| it.is_object())
        .map(|it| with_message(at(it, "/reason"), at(it, "/message")));
    let unscheduled = array(at(status, "/conditions"))
        .filter(|it| at(it, "/type") == "PodScheduled" && at(it, "/status") == "False")
        .map(|it| with_message(at(it, "/reason"), at(it, "/message")));
    of_containers.chain(unscheduled).collect()
}

pub(super) fn log_tail(
    client: &ApiClient,
    namespace: &str,
    pod: &str,
    previous: bool,
) -> Result<Vec<String>, ApiError> {
    let lines = LOG_LINES.to_string();
    let mut query = vec![("tailLines", lines.as_str())];
    if previous {
        query.push(("previous", "true"));
    }
    let target = Target::in_namespace(GET_POD_LOG, namespace).named(pod);
    let log = client.get_text(target, &query)?;
    Ok(log.lines().map(shortened).collect())
}

/// The last events about a pod, the newest last.
pub(super) fn events(
    client: &ApiClient,
    namespace: &str,
    pod: &str,
) -> Result<Vec<String>, ApiError> {
    let selector = format!("involvedObject.kind=Pod,involvedObject.name={pod}");
    let mut events = client.list(
        Target::in_namespace(LIST_EVENTS, namespace),
        &[("fieldSelector", &selector)],
    )?;
    let time = |event: &Value| {
        let last = text(at(event, "/lastTimestamp"));
        if last.is_empty() {
            text(at(event, "/eventTime"))
        } else {
            last
        }
    };
    events.sort_by_key(time);
    let newest = events.iter().rev().take(EVENTS).rev();
    Ok(newest
        .map(|it| format!("{}: {}", text(at(it, "/reason")), text(at(it, "/message"))))
        .collect())
}

fn shortened(line: &str) -> String {
    line.chars().take(TEXT_CHARACTERS_MAXIMUM).collect()
}

pub(super) fn array(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

pub(super) fn text(value: &Value) -> String {
    shortened(value.as_str().unwrap_or_default())
}

fn count(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

/// The API server may return any numbers.
fn sum(counts: impl Iterator<Item = u64>) -> u64 {
    counts.fold(0, u64::saturating_add)
}

/// An object of the API server, as [`crate::fuzzing`] makes it.
#[cfg(any(test, feature = "fuzzing"))]
pub(super) fn read_any(object: &Value) {
    let _ = node_facts(object, &BTreeSet::new());
    let _ = is_device_plugin(object);
    let restarts = array(at(object, "/status/containerStatuses"));
    let _ = sum(restarts.map(|it| count(at(it, "/restartCount"))));
    for text in waiting(object) {
        assert!(text.chars().count() <= 2 * TEXT_CHARACTERS_MAXIMUM + 2);
    }
}

fn strings(value: &Value) -> BTreeMap<String, String> {
    value
        .as_object()
        .into_iter()
        .flatten()
        .map(|(name, value)| {
            let value = value
                .as_str()
                .map_or_else(|| value.to_string(), str::to_owned);
            (name.clone(), value)
        })
        .collect()
}
