//! The device plugin's pod on this node is ready.
//!
//! ## Why
//! When a node offers no GPU, the reason is nearly always here: no pod on this node, or one that
//! does not start.
//!
//! ## How it is judged
//! Of the `DaemonSets` of NVIDIA's device plugin (by name or image), those that have a pod on this
//! node must have it ready; one that is not is a `fail` with its waiting reason, the last lines of
//! its log and its events. When none has a pod here it is a `fail` that names the missing label or
//! toleration. Without such a `DaemonSet` the check is skipped, unless
//! `kubernetes.device_plugin_daemon_set` of the profile is `required`; `forbidden` makes one a
//! `fail`.
//!
//! ## What to do
//! No pod here: give the node the label (`kubectl label node NODE nvidia.com/gpu=true`) or the
//! `DaemonSet` the toleration. A pod that crashes logs the reason: no NVML means that the container
//! runtime does not give it the driver (default runtime, runtime class), no socket that it cannot
//! reach `/var/lib/kubelet/device-plugins`.
//!
//! ## Source
//! NVIDIA k8s-device-plugin, <https://github.com/NVIDIA/k8s-device-plugin#deployment-via-helm>

use crate::check::{Check, Judge};
use crate::device_ids;
use crate::facts::{DaemonSetFacts, Facts, NodeFacts, NodeTaint, PodFacts, Reading, Toleration};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::{Profile, Requirement};
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "device_plugin_pods",
    stage: Stage::Gpu,
    level: Level::Standard,
    judge: Judge::Host(judge),
    documentation_url: "https://github.com/NVIDIA/k8s-device-plugin",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let api = device_ids::api(facts, profile)?;
    let daemon_sets = api
        .device_plugin_daemon_sets
        .required("the device plugin's DaemonSets")?;
    let policy = profile.kubernetes.device_plugin_daemon_set;
    if daemon_sets.is_empty() {
        let text = "the cluster has no DaemonSet of NVIDIA's device plugin";
        return match policy {
            Some(Requirement::Required) => Ok(Outcome::fail(text)
                .expected("a DaemonSet")
                .observed("none")
                .remedy("apply the device plugin of the manifests: cargo xtask k8s apply OVERLAY")),
            Some(Requirement::Forbidden) => Ok(Outcome::pass(text)),
            Some(Requirement::Allowed) | None => Err(Outcome::skip(text)),
        };
    }
    if policy == Some(Requirement::Forbidden) {
        let names: Vec<String> = daemon_sets.iter().map(name).collect();
        return Ok(Outcome::fail(format!(
            "the profile forbids a DaemonSet of NVIDIA's device plugin, the cluster has {}",
            names.join(", ")
        )));
    }
    let mut tally = Tally::default();
    for daemon_set in daemon_sets {
        for pod in &daemon_set.pods {
            judge_pod(daemon_set, pod, &mut tally);
        }
    }
    if tally.worst().is_none() {
        let node = api.node.required("the node object")?;
        for daemon_set in daemon_sets {
            tally.fail(format!(
                "DaemonSet {} has no pod on this node: {}",
                name(daemon_set),
                why_not_here(daemon_set, node)
            ));
        }
    }
    let failed = tally.worst() == Some(Verdict::Fail);
    let outcome = tally.outcome(Outcome::error("no pod was read"));
    Ok(if failed {
        outcome.remedy("kubectl label node NODE nvidia.com/gpu=true where the label is missing; a toleration in the DaemonSet where a taint stands in the way; else the pod's log: without NVML its container does not get the driver (runtime class, default runtime), without a socket it does not mount the kubelet's device-plugins")
    } else {
        outcome
    })
}

fn name(daemon_set: &DaemonSetFacts) -> String {
    format!("{}/{}", daemon_set.namespace, daemon_set.name)
}

fn judge_pod(daemon_set: &DaemonSetFacts, pod: &PodFacts, tally: &mut Tally) {
    if pod.ready {
        return tally.pass(format!(
            "pod {} is ready, {} of {} in the cluster are",
            pod.name, daemon_set.ready, daemon_set.desired
        ));
    }
    let mut text = format!("pod {} is {} and not ready", pod.name, pod.phase);
    if !pod.waiting.is_empty() {
        text = format!("{text}: {}", pod.waiting.join("; "));
    }
    if pod.restarts > 0 {
        text = format!("{text}; restarted {} times", pod.restarts);
    }
    for (what, reading) in [("log", &pod.log_tail), ("events", &pod.events)] {
        match reading {
            Reading::Value(lines) if !lines.is_empty() => {
                text = format!("{text}; {what}: {}", lines.join(" | "));
            }
            Reading::NotRead(reason) => {
                text = format!("{text}; its {what} could not be read: {reason}");
            }
            Reading::Value(_) | Reading::NotSupported => {}
        }
    }
    tally.fail(text);
}

/// What keeps the `DaemonSet` from this node, as far as labels and taints tell.
fn why_not_here(daemon_set: &DaemonSetFacts, node: &NodeFacts) -> String {
    let labels = daemon_set
        .node_selector
        .iter()
        .filter(|(name, value)| node.labels.get(*name) != Some(*value))
        .map(|(name, value)| format!("the node has no label {name}={value}"));
    let taints = node
        .taints
        .iter()
        .filter(|taint| keeps_away(taint) && !is_tolerated(taint, &daemon_set.tolerations))
        .map(|taint| format!("it does not tolerate taint {taint}"));
    let reasons: Vec<String> = labels.chain(taints).collect();
    if reasons.is_empty() {
        "labels and taints do not explain it".to_owned()
    } else {
        reasons.join(", ")
    }
}

/// Taints of the node's own conditions are tolerated by every `DaemonSet`.
///
/// Source: Kubernetes documentation, `DaemonSet`, taints and tolerations.
fn keeps_away(taint: &NodeTaint) -> bool {
    taint.effect != "PreferNoSchedule" && !taint.key.starts_with("node.kubernetes.io/")
}

/// Source: Kubernetes documentation, taints and tolerations, matching.
fn is_tolerated(taint: &NodeTaint, tolerations: &[Toleration]) -> bool {
    tolerations.iter().any(|it| {
        let key = it.key.is_empty() && it.operator == "Exists" || it.key == taint.key;
        let value = it.operator == "Exists" || it.value == taint.value;
        let effect = it.effect.is_empty() || it.effect == taint.effect;
        key && value && effect
    })
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{DaemonSetFacts, Facts, PodFacts, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{judge_host_check, kubernetes_node, kubernetes_node_with_api};

    fn with(change: impl FnOnce(&mut Vec<DaemonSetFacts>)) -> Facts {
        kubernetes_node_with_api(|api| match &mut api.device_plugin_daemon_sets {
            Reading::Value(sets) => change(sets),
            other => panic!("{other:?}"),
        })
    }

    fn judge(facts: &Facts) -> Finding {
        judge_host_check(&CHECK, facts, "{}")
    }

    #[test]
    fn a_ready_pod_passes() {
        assert_eq!(judge(&kubernetes_node()).verdict, Verdict::Pass);
    }

    #[test]
    fn a_pod_that_crashes_says_why() {
        let facts = with(|sets| {
            sets[0].pods[0] = PodFacts {
                name: "p".to_owned(),
                phase: "Running".to_owned(),
                ready: false,
                waiting: vec!["CrashLoopBackOff: back-off 5m0s".to_owned()],
                restarts: 4,
                log_tail: Reading::Value(vec!["could not load NVML library".to_owned()]),
                events: Reading::NotRead("403".to_owned()),
            };
        });
        let finding = judge(&facts);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "pod p is Running and not ready: CrashLoopBackOff: back-off 5m0s; restarted 4 times; \
             log: could not load NVML library; its events could not be read: 403"
        );
    }

    #[test]
    fn a_node_without_its_pod_says_what_is_missing() {
        let mut facts = with(|sets| {
            sets[0].pods.clear();
            sets[0].tolerations.clear();
            sets[0].node_selector = [("role".to_owned(), "gpu".to_owned())].into();
        });
        let finding = judge(&facts);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "DaemonSet kube-system/nvidia-device-plugin has no pod on this node: the node has no label role=gpu, \
             it does not tolerate taint nvidia.com/gpu=true:NoSchedule"
        );
        facts = with(|sets| sets[0].pods.clear());
        let summary = judge(&facts).summary;
        assert!(
            summary.ends_with("labels and taints do not explain it"),
            "{summary}"
        );
    }

    #[test]
    fn one_of_several_is_enough() {
        let facts = with(|sets| {
            let mut other = sets[0].clone();
            other.pods.clear();
            sets.push(other);
        });
        assert_eq!(judge(&facts).verdict, Verdict::Pass);
    }

    #[test]
    fn the_profile_says_whether_one_must_be_there() {
        let none = with(Vec::clear);
        let judge = |facts: &Facts, word: &str| {
            let profile = format!("kubernetes: {{device_plugin_daemon_set: {word}}}");
            judge_host_check(&CHECK, facts, &profile).verdict
        };
        assert_eq!(judge(&none, "allowed"), Verdict::Skip);
        assert_eq!(judge(&none, "required"), Verdict::Fail);
        assert_eq!(judge(&none, "forbidden"), Verdict::Pass);
        assert_eq!(judge(&kubernetes_node(), "forbidden"), Verdict::Fail);
        let unread = kubernetes_node_with_api(|api| {
            api.device_plugin_daemon_sets = Reading::NotRead("403".to_owned());
        });
        assert_eq!(judge(&unread, "allowed"), Verdict::Error);
    }
}
