//! The node offers the cluster exactly the GPUs that it has.
//!
//! ## Why
//! The scheduler knows a node's GPUs by two numbers only. At least one is not enough: a node with
//! eight GPUs that offers seven is paid for in full, without an alarm.
//!
//! ## How it is judged
//! Over NVIDIA's resources of GPUs (`nvidia.com/gpu…`, `nvidia.com/mig-…`) of the node object,
//! capacity must equal allocatable, and their sum the GPUs and MIG devices of NVML, each so often
//! as it is shared: by `kubernetes.replicas`, else by the label `nvidia.com/gpu.replicas`, else by
//! the kubelet's list. `kubernetes.resources` of the profile names numbers that must be exactly so.
//! Skipped without a kubelet and without credentials for the API server, an `error` where the
//! profile has `kubernetes.api.required: true`.
//!
//! ## What to do
//! Allocatable below capacity: the device plugin calls GPUs unhealthy (see `kernel_log_xid`).
//! Capacity below the GPUs: the plugin started before they were there; start its pod on this node
//! again. None at all: the plugin does not run here.
//!
//! ## Source
//! Kubernetes, node status, <https://kubernetes.io/docs/reference/node/node-status/#capacity>

use crate::check::{Check, Judge};
use crate::device_ids;
use crate::facts::{Facts, KubernetesFacts, NodeFacts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "node_capacity",
    stage: Stage::Gpu,
    level: Level::Standard,
    judge: Judge::Host(judge),
    documentation_url: "https://kubernetes.io/docs/reference/node/node-status/#capacity",
};

/// What GPU feature discovery calls the number of shares.
///
/// Source: NVIDIA k8s-device-plugin, GPU feature discovery labels.
const REPLICAS_LABEL: &str = "nvidia.com/gpu.replicas";

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let node = device_ids::api(facts, profile)?
        .node
        .required("the node object")?;
    let kubelet = facts.kubernetes.as_ref();
    if let Some(kubelet) = kubelet {
        device_ids::refuse_dynamic_resource_allocation(kubelet)?;
    }
    let is_gpu = |resource: &&String| {
        device_ids::is_gpu_resource(resource)
            || profile.kubernetes.resources.contains_key(*resource)
            || kubelet
                .and_then(|it| it.allocatable.value())
                .is_some_and(|it| it.contains_key(*resource))
    };
    let resources: Vec<&String> = node.capacity.keys().filter(is_gpu).collect();
    let expected = device_ids::expected(facts)?.len() as u64;
    if resources.is_empty() {
        return Ok(Outcome::fail(
            "the node object has no resource nvidia.com/gpu: the cluster does not know of its GPUs",
        )
        .expected(expected)
        .observed("none")
        .remedy("the device plugin is not registered on this node: see device_plugin_registered"));
    }
    let mut wrong = Vec::new();
    let mut capacity = 0;
    for resource in resources {
        let (has, may) = (
            amount(&node.capacity, resource),
            amount(&node.allocatable, resource),
        );
        capacity += has;
        if has != may {
            wrong.push(format!(
                "allocatable {may} of capacity {has} {resource}: {} unhealthy to the device plugin",
                has.abs_diff(may)
            ));
        }
    }
    for (resource, wanted) in &profile.kubernetes.resources {
        let has = amount(&node.capacity, resource);
        if has != u64::from(*wanted) {
            wrong.push(format!(
                "{has} of {resource}, the profile requires {wanted}"
            ));
        }
    }
    let (times, says) = shares(node, kubelet, profile);
    let physical = expected * times;
    if capacity != physical {
        let shared = if times > 1 {
            format!(", each shared {times} times by {says}")
        } else {
            String::new()
        };
        wrong.push(format!(
            "capacity is {capacity}, the node has {expected} GPUs or MIG devices{shared}: {} {}",
            capacity.abs_diff(physical),
            if capacity < physical {
                "missing"
            } else {
                "too many"
            }
        ));
    }
    if wrong.is_empty() {
        let shared = if times > 1 {
            format!(", each shared {times} times")
        } else {
            String::new()
        };
        return Ok(Outcome::pass(format!(
            "capacity and allocatable are {capacity}, as the node has{shared}"
        )));
    }
    Ok(Outcome::fail(wrong.join("; "))
        .expected(physical)
        .observed(capacity)
        .remedy("GPUs that are unhealthy to the plugin: see kernel_log_xid; else start the device plugin's pod on this node again (kubectl delete pod); where GPUs are shared, set kubernetes.replicas in the profile"))
}

fn amount(resources: &std::collections::BTreeMap<String, u64>, resource: &str) -> u64 {
    resources.get(resource).copied().unwrap_or_default()
}

/// How often each GPU is shared, and who says so.
fn shares(
    node: &NodeFacts,
    kubelet: Option<&KubernetesFacts>,
    profile: &Profile,
) -> (u64, &'static str) {
    if let Some(replicas) = profile.kubernetes.replicas {
        return (u64::from(replicas), "the profile");
    }
    if let Some(replicas) = node
        .labels
        .get(REPLICAS_LABEL)
        .and_then(|it| it.parse().ok())
    {
        // The label says 0 where GPUs are not shared.
        return (u64::max(replicas, 1), "label nvidia.com/gpu.replicas");
    }
    let shared = kubelet
        .and_then(|it| it.allocatable.value())
        .into_iter()
        .flat_map(|it| it.values().flatten())
        .filter(|it| device_ids::is_replica(it));
    let most = device_ids::counts(shared).into_values().max();
    (u64::from(most.unwrap_or(1)), "the kubelet's list")
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{Facts, NodeFacts, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        healthy_node, judge_host_check, kubernetes_node, kubernetes_node_with,
        kubernetes_node_with_api, kubernetes_node_with_object,
    };

    fn judge(facts: &Facts, profile: &str) -> Finding {
        judge_host_check(&CHECK, facts, profile)
    }

    fn node(capacity: u64, allocatable: u64) -> Facts {
        kubernetes_node_with_object(|node| set(node, capacity, allocatable))
    }

    fn set(node: &mut NodeFacts, capacity: u64, allocatable: u64) {
        let gpus = || "nvidia.com/gpu".to_owned();
        node.capacity = [(gpus(), capacity)].into();
        node.allocatable = [(gpus(), allocatable)].into();
    }

    #[test]
    fn the_three_numbers_are_one() {
        let finding = judge(&kubernetes_node(), "{}");
        assert_eq!(finding.verdict, Verdict::Pass, "{}", finding.summary);
        for (capacity, allocatable, says) in [
            (
                8,
                7,
                "allocatable 7 of capacity 8 nvidia.com/gpu: 1 unhealthy",
            ),
            (
                7,
                7,
                "capacity is 7, the node has 8 GPUs or MIG devices: 1 missing",
            ),
            (
                16,
                16,
                "capacity is 16, the node has 8 GPUs or MIG devices: 8 too many",
            ),
            (0, 0, "8 missing"),
            (8, 0, "8 unhealthy"),
        ] {
            let finding = judge(&node(capacity, allocatable), "{}");
            assert_eq!(finding.verdict, Verdict::Fail);
            assert!(finding.summary.contains(says), "{}", finding.summary);
        }
    }

    #[test]
    fn a_node_without_the_resource_fails() {
        let facts = kubernetes_node_with_object(|node| node.capacity.clear());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Fail);
    }

    #[test]
    fn shares_are_believed_to_those_who_say_them() {
        let shared = node(32, 32);
        assert_eq!(judge(&shared, "{}").verdict, Verdict::Fail);
        let profile = "kubernetes: {replicas: 4}";
        assert_eq!(judge(&shared, profile).verdict, Verdict::Pass);
        for (label, capacity, verdict) in [
            ("4", 32, Verdict::Pass),
            ("2", 32, Verdict::Fail),
            ("0", 8, Verdict::Pass),
        ] {
            let facts = kubernetes_node_with_object(|node| {
                set(node, capacity, capacity);
                let name = super::REPLICAS_LABEL.to_owned();
                node.labels.insert(name, label.to_owned());
            });
            assert_eq!(judge(&facts, "{}").verdict, verdict, "{label}");
        }
    }

    #[test]
    fn other_resources_of_nvidia_are_not_gpus() {
        let facts = kubernetes_node_with_object(|node| {
            for amounts in [&mut node.capacity, &mut node.allocatable] {
                amounts.insert("nvidia.com/hostdev".to_owned(), 4);
            }
        });
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Pass);
    }

    #[test]
    fn what_the_profile_counts_must_be_so() {
        let profile = "kubernetes: {resources: {nvidia.com/gpu: 4}}";
        assert_eq!(judge(&kubernetes_node(), profile).verdict, Verdict::Fail);
    }

    #[test]
    fn without_an_api_server_it_is_skipped_unless_one_is_required() {
        let none = kubernetes_node_with(|it| it.api = Reading::NotSupported);
        let required = "kubernetes: {api: {required: true}}";
        for facts in [&none, &healthy_node()] {
            assert_eq!(judge(facts, "{}").verdict, Verdict::Skip);
            assert_eq!(judge(facts, required).verdict, Verdict::Error);
        }
        let broken = kubernetes_node_with(|it| it.api = Reading::NotRead("x".to_owned()));
        assert_eq!(judge(&broken, "{}").verdict, Verdict::Error);
        let forbidden =
            kubernetes_node_with_api(|api| api.node = Reading::NotRead("403".to_owned()));
        assert_eq!(judge(&forbidden, "{}").verdict, Verdict::Error);
    }
}
