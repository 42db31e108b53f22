//! The kubelet's allocatable devices are the node's GPUs.
//!
//! ## Why
//! What the kubelet has in its list is what pods get: a GPU that is missing there is idle for ever,
//! and one that is there and not on the node is a pod that does not start.
//!
//! ## How it is judged
//! `GetAllocatableResources` of the kubelet's socket `pod-resources/kubelet.sock` must hold, by
//! UUID, NVML's GPUs and, where MIG is on, the MIG devices; with time-slicing or MPS (`GPU-…::3`)
//! each `kubernetes.replicas` times, else all alike. The kubelet leaves out devices that the plugin
//! calls unhealthy. `kubernetes.resources` of the profile names numbers of resources that must be
//! exactly so. The time-out for the kubelet is `kubernetes.allocatable_within_s`; the finding
//! reports the time that it took.
//!
//! ## What to do
//! A GPU that is missing is unhealthy to the plugin (see `kernel_log_xid`) or was not there
//! when it started: start the plugin's pod on this node again. One too many was there before:
//! restart the kubelet after the plugin.
//!
//! ## Source
//! Kubernetes, monitoring device plugin resources,
//! <https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/#monitoring-device-plugin-resources>

use crate::check::{Check, Judge};
use crate::device_ids;
use crate::facts::{AllocatableWait, Facts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries::counted;

pub(crate) const CHECK: Check = Check {
    id: "device_plugin_allocatable",
    stage: Stage::Gpu,
    level: Level::Standard,
    judge: Judge::Host(judge),
    documentation_url: "https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/#monitoring-device-plugin-resources",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let kubelet = device_ids::kubelet(facts, profile)?;
    device_ids::require_device_plugin(kubelet, profile)?;
    let resources = kubelet
        .allocatable
        .required("the kubelet's allocatable devices")?;
    let expected = device_ids::expected(facts)?;
    let ids: Vec<String> = resources.values().flatten().cloned().collect();
    let mut wrong = Vec::new();
    for (resource, wanted) in &profile.kubernetes.resources {
        let has = resources.get(resource).map_or(0, Vec::len);
        if has != *wanted as usize {
            wrong.push(format!(
                "{has} of {resource}, the profile requires {wanted}"
            ));
        }
    }
    let right = match device_ids::compare(&ids, &expected, profile) {
        Ok(text) => text,
        Err(differences) => {
            wrong.extend(differences);
            String::new()
        }
    };
    let waited = kubelet
        .allocatable_wait
        .as_ref()
        .map(waited)
        .unwrap_or_default();
    if wrong.is_empty() {
        return Ok(Outcome::pass(format!(
            "the kubelet may give away {right}{waited}"
        )));
    }
    let names = |ids: Vec<&str>| device_ids::named(ids);
    Ok(Outcome::fail(format!(
        "what the kubelet may give away is not the node's GPUs: {}{waited}",
        wrong.join("; ")
    ))
    .expected(format!(
        "{}: {}",
        counted(expected.len(), "device"),
        names(expected.iter().map(String::as_str).collect())
    ))
    .observed(format!(
        "{}: {}",
        counted(ids.len(), "device"),
        names(ids.iter().map(String::as_str).collect())
    ))
    .remedy("a GPU that is missing is unhealthy to the device plugin (see kernel_log_xid) or came after it: start the plugin's pod on this node again (kubectl delete pod), then the kubelet if that does not help"))
}

/// `, allocatable was 8 after 43 s`.
fn waited(wait: &AllocatableWait) -> String {
    format!(
        ", allocatable was {} after {:.0} s",
        wait.devices, wait.waited_s
    )
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{AllocatableWait, Facts, MigDevice, MigMode, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{gpu_uuid, judge_host_check, kubernetes_node, kubernetes_node_with};

    fn with(ids: &[&str]) -> Facts {
        let ids = ids.iter().map(|&it| it.to_owned()).collect();
        kubernetes_node_with(|it| {
            let resource = ("nvidia.com/gpu".to_owned(), ids);
            it.allocatable = Reading::Value([resource].into());
        })
    }

    fn judge(facts: &Facts, profile: &str) -> Finding {
        judge_host_check(&CHECK, facts, profile)
    }

    fn uuids() -> Vec<String> {
        (0..8).map(gpu_uuid).collect()
    }

    #[test]
    fn the_nodes_gpus_pass() {
        let finding = judge(&kubernetes_node(), "{}");
        assert_eq!(finding.verdict, Verdict::Pass);
        assert_eq!(finding.summary, "the kubelet may give away all 8 devices");
    }

    #[test]
    fn every_difference_fails_and_is_named() {
        let uuids = uuids();
        let mut short: Vec<&str> = uuids.iter().map(String::as_str).collect();
        short.remove(7);
        let finding = judge(&with(&short), "{}");
        assert_eq!(finding.verdict, Verdict::Fail);
        let missing = format!("1 missing: {}", gpu_uuid(7));
        assert!(finding.summary.contains(&missing), "{}", finding.summary);
        let mut foreign = short.clone();
        foreign.push("GPU-of-another-node");
        for ids in [&foreign[..], &[], &[short[0], short[0]]] {
            assert_eq!(judge(&with(ids), "{}").verdict, Verdict::Fail, "{ids:?}");
        }
    }

    #[test]
    fn shared_gpus_are_understood() {
        let shared: Vec<String> = uuids()
            .iter()
            .flat_map(|uuid| (0..4).map(move |share| format!("{uuid}::{share}")))
            .collect();
        let mut shared: Vec<&str> = shared.iter().map(String::as_str).collect();
        let four = "kubernetes: {replicas: 4, resources: {nvidia.com/gpu: 32}}";
        for profile in ["{}", four] {
            assert_eq!(judge(&with(&shared), profile).verdict, Verdict::Pass);
        }
        assert_eq!(
            judge(&with(&shared), "kubernetes: {replicas: 2}").verdict,
            Verdict::Fail
        );
        shared.pop();
        assert_eq!(judge(&with(&shared), "{}").verdict, Verdict::Fail);
    }

    #[test]
    fn a_gpu_in_mig_mode_is_given_away_in_parts() {
        let mut facts = kubernetes_node();
        facts.gpus[0].mig = Reading::Value(MigMode {
            current: true,
            pending: true,
        });
        let part = |uuid: &str| MigDevice {
            uuid: uuid.to_owned(),
            ..MigDevice::default()
        };
        facts.gpus[0].mig_devices = Reading::Value(vec![part("MIG-a"), part("MIG-b")]);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Fail);
        if let Some(kubernetes) = &mut facts.kubernetes {
            let whole = uuids().split_off(1);
            let parts = vec!["MIG-a".to_owned(), "MIG-b".to_owned()];
            kubernetes.allocatable = Reading::Value(
                [
                    ("nvidia.com/gpu".to_owned(), whole),
                    ("nvidia.com/mig-3g.71gb".to_owned(), parts),
                ]
                .into(),
            );
        }
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Pass);
        facts.gpus[0].mig_devices = Reading::NotRead("no answer".to_owned());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
    }

    #[test]
    fn how_long_it_took_is_told() {
        let facts = kubernetes_node_with(|it| {
            it.allocatable_wait = Some(AllocatableWait {
                waited_s: 43.2,
                devices: 8,
                wanted: 8,
            });
        });
        let summary = judge(&facts, "{}").summary;
        assert!(
            summary.ends_with("allocatable was 8 after 43 s"),
            "{summary}"
        );
    }

    #[test]
    fn what_the_profile_counts_must_be_so() {
        let profile = "kubernetes: {resources: {nvidia.com/mig-1g.10gb: 7}}";
        let finding = judge(&kubernetes_node(), profile);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(
            finding
                .summary
                .contains("0 of nvidia.com/mig-1g.10gb, the profile requires 7")
        );
    }

    #[test]
    fn a_container_that_sees_one_gpu_cannot_compare() {
        let mut facts = kubernetes_node();
        facts.host.in_container = Reading::Value(true);
        facts.gpus.truncate(1);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
    }

    #[test]
    fn a_kubelet_that_hangs_is_an_error() {
        let facts = kubernetes_node_with(|it| {
            it.allocatable = Reading::NotRead("no answer within 5 s".to_owned());
        });
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
    }
}
