//! Pods that ask for one GPU each and look at it: what a user's pod would get.
//!
//! Each runs `gpu-validator collect`, whose facts are read from the pod's log. Every pod has a
//! label with the node's name and one with the run's, by which they are removed in one request, at
//! the end of this run or at the begin of the next.

use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};

use super::client::{ApiClient, ApiError, Target, wait_unless_interrupted};
use super::cluster::{array, events, log_tail, text, waiting};
use super::requests::{CREATE_POD, DELETE_PODS, GET_POD_LOG, LIST_PODS};
use crate::interrupt::Interrupt;
use crate::probe::json::at;
use validator_core::facts::{Facts, GpuPod, GpuPodEnd, GpuPods};

const LABEL_NAME: &str = "app.kubernetes.io/name";
const LABEL_NAME_VALUE: &str = "gpu-validator-gpu-pod";
const LABEL_NODE: &str = "gpu-bringup.dev/node";
const LABEL_RUN: &str = "gpu-bringup.dev/run";
/// How often the pods are looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// How long pods of an earlier run may take to vanish; they hold their GPUs until then.
const LEFTOVERS_DEADLINE: Duration = Duration::from_mins(1);
/// A pod that the scheduler has refused for so long is not waited for: GPUs of pods that have just
/// ended are given back in less.
const UNSCHEDULABLE_PATIENCE: Duration = Duration::from_secs(15);
/// How often the removal of the pods is tried.
const CLEANUP_ATTEMPTS: u32 = 3;
/// The kubelet tries again, but what stands in the way does not change by itself.
const FINAL_REASONS: [&str; 6] = [
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
];
/// A user that no image needs to know; source: the `nonroot` user of distroless images.
const USER_ID: u32 = 65532;

/// What kind of pods, how many, and how long they may take.
#[derive(Clone, Debug)]
pub(super) struct GpuPodOrder {
    pub(super) node: String,
    pub(super) namespace: String,
    pub(super) image: String,
    pub(super) resource: String,
    pub(super) runtime_class: Option<String>,
    pub(super) count: u32,
    /// Devices that are free, where that is known.
    pub(super) free: Option<u32>,
    pub(super) deadline: Duration,
}

/// Makes the pods, waits for them, reads what they saw, and removes them, whatever happens.
///
/// `removal` is a client of short patience: a run that is stopped has little time left.
pub(super) fn run(
    client: &ApiClient,
    removal: &ApiClient,
    order: &GpuPodOrder,
    interrupt: &Interrupt,
) -> Result<GpuPods, String> {
    let words = |error: ApiError| error.text;
    let mut seen = GpuPods {
        namespace: order.namespace.clone(),
        image: order.image.clone(),
        resource: order.resource.clone(),
        free: order.free,
        ..GpuPods::default()
    };
    seen.leftovers_removed = remove_leftovers(client, order, interrupt).map_err(words)?;
    if order.count == 0 {
        return Ok(seen);
    }
    let run_id = run_id();
    let names: Vec<String> = (0..order.count)
        .map(|index| format!("gpu-validator-{run_id}-{index}"))
        .collect();
    let followed = create(client, order, &run_id, &names)
        .and_then(|()| follow(client, order, &run_id, &names, interrupt));
    seen.cleanup_trouble = remove(removal, order, &run_id, interrupt).err();
    match (followed, &seen.cleanup_trouble) {
        (Ok(pods), _) => {
            seen.pods = pods;
            Ok(seen)
        }
        (Err(error), None) => Err(error.text),
        (Err(error), Some(trouble)) => Err(format!("{}; {trouble}", error.text)),
    }
}

/// Sets this run's pods apart from any other's.
fn run_id() -> String {
    let nanoseconds = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |it| it.as_nanos());
    format!(
        "{:08x}{:04x}",
        nanoseconds >> 16 & 0xffff_ffff,
        std::process::id() & 0xffff
    )
}

/// A label's value for the node: its name, or a hash of it where the name is too long for a label.
fn node_label(node: &str) -> String {
    const LABEL_CHARACTERS_MAXIMUM: usize = 63;
    if node.len() <= LABEL_CHARACTERS_MAXIMUM {
        return node.to_owned();
    }
    // FNV-1a, 64 bits: the same on every run of every version.
    let hash = node.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("node-{hash:016x}")
}

fn leftovers_selector(order: &GpuPodOrder) -> String {
    format!(
        "{LABEL_NAME}={LABEL_NAME_VALUE},{LABEL_NODE}={}",
        node_label(&order.node)
    )
}

/// Removes what an earlier run has left on this node, and waits until it is gone.
fn remove_leftovers(
    client: &ApiClient,
    order: &GpuPodOrder,
    interrupt: &Interrupt,
) -> Result<u32, ApiError> {
    let selector = leftovers_selector(order);
    let list = || {
        client.list(
            Target::in_namespace(LIST_PODS, &order.namespace),
            &[("labelSelector", &selector)],
        )
    };
    let found = u32::try_from(list()?.len()).unwrap_or(u32::MAX);
    if found == 0 {
        return Ok(0);
    }
    let target = Target::in_namespace(DELETE_PODS, &order.namespace);
    client.delete_collection(target, &selector, 0)?;
    let until = Instant::now() + LEFTOVERS_DEADLINE;
    while !list()?.is_empty() {
        if Instant::now() >= until || !wait_unless_interrupted(LOOK_AGAIN, interrupt) {
            return Err(ApiError {
                status: None,
                text: format!("{found} pods of an earlier run do not vanish"),
            });
        }
    }
    Ok(found)
}

fn remove(
    removal: &ApiClient,
    order: &GpuPodOrder,
    run_id: &str,
    interrupt: &Interrupt,
) -> Result<(), String> {
    let selector = format!("{LABEL_RUN}={run_id}");
    let target = Target::in_namespace(DELETE_PODS, &order.namespace);
    let mut attempt = 1;
    loop {
        match removal.delete_collection(target, &selector, 0) {
            Ok(()) => return Ok(()),
            Err(error) if attempt == CLEANUP_ATTEMPTS => {
                return Err(format!(
                    "pods with label {selector} in namespace {} were not removed: {error}",
                    order.namespace
                ));
            }
            Err(_) => attempt += 1,
        }
        wait_unless_interrupted(LOOK_AGAIN, interrupt);
    }
}

fn create(
    client: &ApiClient,
    order: &GpuPodOrder,
    run_id: &str,
    names: &[String],
) -> Result<(), ApiError> {
    for name in names {
        let target = Target::in_namespace(CREATE_POD, &order.namespace);
        client.create(target, &pod(order, run_id, name))?;
    }
    Ok(())
}

/// A pod that Pod Security's level `restricted` admits: it mounts nothing and may do nothing but
/// use its GPU.
fn pod(order: &GpuPodOrder, run_id: &str, name: &str) -> Value {
    let mut pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {
                LABEL_NAME: LABEL_NAME_VALUE,
                LABEL_NODE: node_label(&order.node),
                LABEL_RUN: run_id,
            },
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": order.deadline.as_secs().max(1),
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            // By the scheduler, as a user's pod: a node's name in the pod itself would pass it by.
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchFields": [
                    {"key": "metadata.name", "operator": "In", "values": [order.node]},
                ]}],
            }}},
            "tolerations": [
                {"key": "nvidia.com/gpu", "operator": "Exists"},
                {"key": "gpu-bringup.dev/unvalidated", "operator": "Exists"},
            ],
            "securityContext": {
                "runAsNonRoot": true,
                "runAsUser": USER_ID,
                "runAsGroup": USER_ID,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [{
                "name": "gpu-validator",
                "image": order.image,
                "command": ["gpu-validator"],
                "args": ["collect", "--level", "standard", "--no-burn"],
                // What the NVIDIA runtime gives a container of its driver; an image may say less.
                "env": [{"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "compute,utility"}],
                "resources": {
                    "limits": {order.resource.as_str(): 1, "cpu": "2", "memory": "4Gi"},
                    "requests": {"cpu": "100m", "memory": "256Mi"},
                },
                "securityContext": {
                    "allowPrivilegeEscalation": false,
                    "readOnlyRootFilesystem": true,
                    "capabilities": {"drop": ["ALL"]},
                },
            }],
        },
    });
    let spec = pod.get_mut("spec").and_then(Value::as_object_mut);
    if let Some((spec, class)) = spec.zip(order.runtime_class.as_ref()) {
        spec.insert("runtimeClassName".to_owned(), json!(class));
    }
    pod
}

/// Looks at the pods until all have ended, or waiting makes no sense any more.
fn follow(
    client: &ApiClient,
    order: &GpuPodOrder,
    run_id: &str,
    names: &[String],
    interrupt: &Interrupt,
) -> Result<Vec<GpuPod>, ApiError> {
    let start = Instant::now();
    let selector = format!("{LABEL_RUN}={run_id}");
    let mut ended: Vec<GpuPod> = Vec::new();
    loop {
        let listed = client.list(
            Target::in_namespace(LIST_PODS, &order.namespace),
            &[("labelSelector", &selector)],
        )?;
        if let Some(reason) = interrupt.reason() {
            return Err(ApiError {
                status: None,
                text: format!("the pods were removed early: {reason}"),
            });
        }
        let waited = start.elapsed();
        for name in names {
            if ended.iter().any(|it| it.name == *name) {
                continue;
            }
            let pod = listed
                .iter()
                .find(|it| at(it, "/metadata/name") == name.as_str());
            let patience = Patience {
                of_scheduler: waited >= UNSCHEDULABLE_PATIENCE,
                altogether: waited >= order.deadline,
            };
            if let Some(end) = pod_end(pod, &order.resource, patience) {
                ended.push(read_pod(client, order, name, end, waited));
            }
        }
        if ended.len() == names.len() {
            ended.sort_by_key(|pod| names.iter().position(|it| *it == pod.name));
            return Ok(ended);
        }
        wait_unless_interrupted(LOOK_AGAIN, interrupt);
    }
}

/// Whose patience is at its end.
#[derive(Clone, Copy, Debug)]
struct Patience {
    of_scheduler: bool,
    altogether: bool,
}

/// How a pod has ended, or why it is not waited for any longer; `None` while it is.
fn pod_end(pod: Option<&Value>, resource: &str, patience: Patience) -> Option<GpuPodEnd> {
    let Some(pod) = pod else {
        return Some(GpuPodEnd::NotStarted(
            "the pod was removed by another client".to_owned(),
        ));
    };
    let status = at(pod, "/status");
    let said = || {
        format!(
            "{} {}",
            text(at(status, "/reason")),
            text(at(status, "/message"))
        )
    };
    let terminated = array(at(status, "/containerStatuses"))
        .map(|it| at(it, "/state/terminated"))
        .find(|it| it.is_object());
    match at(status, "/phase").as_str() {
        Some("Succeeded") => return Some(GpuPodEnd::Finished),
        Some("Failed") => {
            // The kubelet refuses a pod when others took the device between its scheduling and its
            // start.
            let reason = text(at(status, "/reason"));
            if reason.starts_with("OutOf") && reason.contains(resource) {
                return Some(GpuPodEnd::Busy(said()));
            }
            let exit = terminated.map_or_else(said, |it| {
                let message = text(at(it, "/message"));
                format!(
                    "the container ended with exit code {} ({}) {message}",
                    at(it, "/exitCode"),
                    text(at(it, "/reason"))
                )
            });
            return Some(GpuPodEnd::Failed(exit.trim().to_owned()));
        }
        _ => {}
    }
    let waiting = waiting(pod).join("; ");
    let insufficient = waiting.contains(&format!("Insufficient {resource}"));
    if FINAL_REASONS.iter().any(|it| waiting.starts_with(it)) {
        return Some(GpuPodEnd::NotStarted(waiting));
    }
    if waiting.starts_with("Unschedulable") && (patience.of_scheduler || patience.altogether) {
        return Some(if insufficient {
            GpuPodEnd::Busy(waiting)
        } else {
            GpuPodEnd::NotStarted(waiting)
        });
    }
    if !patience.altogether {
        return None;
    }
    let phase = text(at(status, "/phase"));
    Some(if phase == "Running" {
        GpuPodEnd::Failed("it ran until time was up".to_owned())
    } else if waiting.is_empty() {
        GpuPodEnd::NotStarted(format!("it was still {phase} when time was up"))
    } else {
        GpuPodEnd::NotStarted(format!("{waiting} when time was up"))
    })
}

/// The pod with what it saw, or with what can be known of why it saw nothing.
fn read_pod(
    client: &ApiClient,
    order: &GpuPodOrder,
    name: &str,
    end: GpuPodEnd,
    took: Duration,
) -> GpuPod {
    let mut pod = GpuPod {
        name: name.to_owned(),
        end,
        took_s: took.as_secs_f64(),
        nvml_uuids: Vec::new(),
        cuda_uuids: Vec::new(),
        cuda_kernel: std::collections::BTreeMap::new(),
        cuda_trouble: None,
    };
    match &mut pod.end {
        GpuPodEnd::Finished => {
            let target = Target::in_namespace(GET_POD_LOG, &order.namespace).named(name);
            let facts = client
                .get_text(target, &[])
                .map_err(|error| error.text)
                .and_then(|log| facts_in(&log));
            match facts {
                Ok(facts) => take_facts(&mut pod, facts),
                Err(reason) => pod.end = GpuPodEnd::NotRead(reason),
            }
        }
        GpuPodEnd::NotStarted(reason) => {
            if let Ok(events) = events(client, &order.namespace, name)
                && let Some(last) = events.last()
            {
                reason.push_str("; last event: ");
                reason.push_str(last);
            }
        }
        GpuPodEnd::Failed(reason) => {
            if let Ok(lines) = log_tail(client, &order.namespace, name, false)
                && let Some(last) = lines.last()
            {
                reason.push_str("; last line of its log: ");
                reason.push_str(last);
            }
        }
        GpuPodEnd::Busy(_) | GpuPodEnd::NotRead(_) => {}
    }
    pod
}

/// A pod of the API server and a log, as [`crate::fuzzing`] makes them.
#[cfg(any(test, feature = "fuzzing"))]
pub(super) fn read_any(pod: &Value, log: &str) {
    for altogether in [false, true] {
        let patience = Patience {
            of_scheduler: altogether,
            altogether,
        };
        let end = pod_end(Some(pod), "nvidia.com/gpu", patience);
        assert!(end.is_some() || !altogether, "it is awaited for ever");
    }
    let _ = facts_in(log);
}

/// The facts in a log, where warnings on standard error may stand around them.
fn facts_in(log: &str) -> Result<Facts, String> {
    let lines: Vec<&str> = log.lines().collect();
    let begin = lines.iter().position(|it| *it == "{");
    let end = lines.iter().rposition(|it| *it == "}");
    let document = begin
        .zip(end)
        .and_then(|(begin, end)| lines.get(begin..=end));
    match document {
        Some(document) => Facts::from_json(document.join("\n").as_bytes())
            .map_err(|error| format!("the pod's log holds no facts: {error:#}")),
        None => Err(format!(
            "the pod's log holds no facts; it begins with `{}`",
            lines.first().unwrap_or(&"")
        )),
    }
}

fn take_facts(pod: &mut GpuPod, facts: Facts) {
    if let Some(reason) = facts.interrupted {
        pod.end = GpuPodEnd::NotRead(format!("the pod was interrupted: {reason}"));
        return;
    }
    let nvml = facts
        .gpus
        .iter()
        .filter_map(|gpu| gpu.uuid.value().cloned());
    pod.nvml_uuids = nvml.collect();
    match facts.cuda.devices {
        validator_core::facts::Reading::Value(devices) => {
            pod.cuda_uuids = devices.into_iter().map(|it| it.uuid).collect();
        }
        validator_core::facts::Reading::NotSupported => {}
        validator_core::facts::Reading::NotRead(reason) => pod.cuda_trouble = Some(reason),
    }
    pod.cuda_kernel = facts.load.cuda_kernel;
}

#[cfg(test)]
mod tests {
    use super::*;

    const EARLY: Patience = Patience {
        of_scheduler: false,
        altogether: false,
    };
    const LATER: Patience = Patience {
        of_scheduler: true,
        altogether: false,
    };
    const LATE: Patience = Patience {
        of_scheduler: true,
        altogether: true,
    };

    fn end(status: &Value, patience: Patience) -> Option<GpuPodEnd> {
        pod_end(Some(&json!({"status": status})), "nvidia.com/gpu", patience)
    }

    fn unschedulable(message: &str) -> Value {
        json!({"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message},
        ]})
    }

    fn waiting_for(reason: &str) -> Value {
        json!({"phase": "Pending", "containerStatuses": [
            {"state": {"waiting": {"reason": reason, "message": "why"}}},
        ]})
    }

    #[test]
    fn a_pod_that_runs_or_starts_is_waited_for_until_time_is_up() {
        for status in [
            json!({"phase": "Running"}),
            json!({"phase": "Pending"}),
            waiting_for("ContainerCreating"),
            waiting_for("ErrImagePull"),
        ] {
            assert_eq!(end(&status, EARLY), None, "{status}");
            assert_eq!(end(&status, LATER), None, "{status}");
            assert!(end(&status, LATE).is_some(), "{status}");
        }
    }

    #[test]
    fn taken_gpus_are_busy_and_nothing_else_is() {
        let taken = unschedulable("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.");
        assert_eq!(end(&taken, EARLY), None);
        assert!(matches!(end(&taken, LATER), Some(GpuPodEnd::Busy(_))));
        let tainted = unschedulable("1 node(s) had untolerated taint {team: a}");
        assert!(matches!(
            end(&tainted, LATER),
            Some(GpuPodEnd::NotStarted(_))
        ));
        let late = json!({"phase": "Failed", "reason": "OutOfnvidia.com/gpu", "message": "Node didn't have enough resource"});
        assert!(matches!(end(&late, EARLY), Some(GpuPodEnd::Busy(_))));
        let allocate = json!({"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Allocate failed due to rpc error"});
        assert!(matches!(end(&allocate, EARLY), Some(GpuPodEnd::Failed(_))));
    }

    #[test]
    fn what_does_not_change_by_itself_is_not_waited_for() {
        assert_eq!(
            end(&waiting_for("ImagePullBackOff"), EARLY),
            Some(GpuPodEnd::NotStarted("ImagePullBackOff: why".to_owned()))
        );
        assert_eq!(
            end(&json!({"phase": "Succeeded"}), EARLY),
            Some(GpuPodEnd::Finished)
        );
        let failed = json!({"phase": "Failed", "containerStatuses": [
            {"state": {"terminated": {"exitCode": 2, "reason": "Error"}}},
        ]});
        assert_eq!(
            end(&failed, EARLY),
            Some(GpuPodEnd::Failed(
                "the container ended with exit code 2 (Error)".to_owned()
            ))
        );
        assert!(matches!(
            pod_end(None, "nvidia.com/gpu", EARLY),
            Some(GpuPodEnd::NotStarted(_))
        ));
    }

    #[test]
    fn facts_are_found_between_warnings() {
        let facts = serde_json::to_string_pretty(&Facts::default()).expect("facts are JSON");
        assert_eq!(
            facts_in(&format!("warning: x\n{facts}\nwarning: y\n")),
            Ok(Facts::default())
        );
        for log in ["", "exec format error", "{\n}", "}\n{"] {
            assert!(facts_in(log).is_err(), "{log}");
        }
    }

    #[test]
    fn a_label_holds_any_nodes_name() {
        assert_eq!(node_label("node-1"), "node-1");
        let long = node_label(&"x".repeat(253));
        assert!(long.len() <= 63);
        assert_ne!(long, node_label(&"x".repeat(252)));
    }

    #[test]
    fn the_pod_mounts_nothing_and_asks_for_one_gpu() {
        let order = GpuPodOrder {
            node: "node-1".to_owned(),
            namespace: "gpu-bringup".to_owned(),
            image: "image".to_owned(),
            resource: "nvidia.com/gpu".to_owned(),
            runtime_class: None,
            count: 1,
            free: None,
            deadline: Duration::from_mins(1),
        };
        let pod = pod(&order, "r", "p");
        assert!(pod["spec"]["volumes"].is_null());
        assert!(pod["spec"]["runtimeClassName"].is_null());
        let container = &pod["spec"]["containers"][0];
        assert!(container["volumeMounts"].is_null());
        assert_eq!(container["resources"]["limits"]["nvidia.com/gpu"], 1);
    }
}
