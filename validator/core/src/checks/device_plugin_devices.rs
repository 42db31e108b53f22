//! The device plugin's own list is the node's GPUs, and all are healthy.
//!
//! ## Why
//! A plugin that started before a GPU was there, or that took one for ill, offers fewer than the
//! node has until it is restarted: it enumerates GPUs once.
//!
//! ## How it is judged
//! Only where the profile has `kubernetes.list_and_watch: true`. The first answer of `ListAndWatch`
//! must hold, by UUID, NVML's GPUs and, where MIG is on, the MIG devices, each `Healthy`; with
//! time-slicing or MPS (`GPU-…::3`) each `kubernetes.replicas` times, else all alike.
//!
//! The request has a side effect, so that it is off by default: NVIDIA's plugin (0.20 and before)
//! does not notice that the listener has gone, and hands the next GPU that falls ill to it instead
//! of to the kubelet. So use it only before the plugin is restarted, or where nothing but the list
//! matters. `device_plugin_allocatable` judges the kubelet's copy of the list, which costs nothing.
//!
//! ## What to do
//! Start the plugin's pod on this node again; it then lists what NVML lists. A device that is
//! `Unhealthy` had a critical Xid, which `kernel_log_xid` explains.
//!
//! ## Source
//! NVIDIA k8s-device-plugin, `internal/plugin/server.go` and `internal/rm/health.go`,
//! <https://github.com/NVIDIA/k8s-device-plugin>

use crate::check::{Check, Judge};
use crate::device_ids;
use crate::facts::{Facts, PluginDevice, Reading};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "device_plugin_devices",
    stage: Stage::Gpu,
    level: Level::Standard,
    judge: Judge::Host(judge),
    documentation_url: "https://github.com/NVIDIA/k8s-device-plugin",
};

/// What a plugin calls a device that may be used.
///
/// Source: Kubernetes, `pkg/apis/deviceplugin/v1beta1/constants.go`.
const HEALTHY: &str = "Healthy";

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let kubelet = device_ids::kubelet(facts, profile)?;
    if profile.kubernetes.list_and_watch != Some(true) {
        return Err(Outcome::skip(
            "kubernetes.list_and_watch is not configured in the profile, and a request costs NVIDIA's plugin one health event",
        ));
    }
    device_ids::require_device_plugin(kubelet, profile)?;
    let plugins = kubelet
        .device_plugins
        .required("the device plugins' sockets")?;
    let mut devices: Vec<&PluginDevice> = Vec::new();
    for plugin in plugins {
        if plugin.answers == Reading::Value(true) {
            devices.extend(
                plugin
                    .devices
                    .required(&format!("the list of devices at {}", plugin.socket))?,
            );
        }
    }
    let ill: Vec<&str> = devices
        .iter()
        .filter(|it| it.health != HEALTHY)
        .map(|it| it.id.as_str())
        .collect();
    let ids: Vec<String> = devices.iter().map(|it| it.id.clone()).collect();
    let expected = device_ids::expected(facts)?;
    let mut wrong = match device_ids::compare(&ids, &expected, profile) {
        Ok(text) if ill.is_empty() => {
            return Ok(Outcome::pass(format!(
                "the device plugin lists {text}, healthy"
            )));
        }
        Ok(_) => Vec::new(),
        Err(wrong) => wrong,
    };
    if !ill.is_empty() {
        wrong.push(format!(
            "{} unhealthy: {}",
            ill.len(),
            device_ids::named(ill.iter().copied())
        ));
    }
    Ok(
        Outcome::fail(format!("the device plugin's list is not the node's GPUs: {}", wrong.join("; ")))
            .expected(device_ids::named(expected.iter().map(String::as_str)))
            .observed(device_ids::named(ids.iter().map(String::as_str)))
            .remedy("see kernel_log_xid for GPUs that are unhealthy; then start the plugin's pod on this node again: kubectl delete pod"),
    )
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{Facts, PluginDevice, Reading};
    use crate::findings::Verdict;
    use crate::test_machine::{gpu_uuid, judge_host_check, kubernetes_node, kubernetes_node_with};

    const ASKED: &str = "kubernetes: {list_and_watch: true}";

    fn with(change: impl FnOnce(&mut Vec<PluginDevice>)) -> Facts {
        kubernetes_node_with(|it| match &mut it.device_plugins {
            Reading::Value(plugins) => match &mut plugins[0].devices {
                Reading::Value(devices) => change(devices),
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn the_nodes_gpus_pass_and_nothing_else_does() {
        let finding = judge_host_check(&CHECK, &kubernetes_node(), ASKED);
        assert_eq!(finding.verdict, Verdict::Pass);
        assert_eq!(
            finding.summary,
            "the device plugin lists all 8 devices, healthy"
        );
        let short = with(|devices| {
            devices.remove(3);
        });
        let ill = with(|devices| devices[3].health = "Unhealthy".to_owned());
        let other = with(|devices| devices[3].id = "GPU-of-another-node".to_owned());
        let none = with(Vec::clear);
        for facts in [&short, &ill, &other, &none] {
            let finding = judge_host_check(&CHECK, facts, ASKED);
            assert_eq!(finding.verdict, Verdict::Fail, "{}", finding.summary);
        }
        let summary = judge_host_check(&CHECK, &ill, ASKED).summary;
        assert!(
            summary.ends_with(&format!("1 unhealthy: {}", gpu_uuid(3))),
            "{summary}"
        );
    }

    #[test]
    fn is_asked_only_where_the_profile_says_so() {
        let finding = judge_host_check(&CHECK, &kubernetes_node(), "{}");
        assert_eq!(finding.verdict, Verdict::Skip);
    }

    #[test]
    fn a_list_that_was_not_read_is_an_error() {
        let facts = kubernetes_node_with(|it| {
            if let Reading::Value(plugins) = &mut it.device_plugins {
                plugins[0].devices = Reading::NotRead("no answer within 5 s".to_owned());
            }
        });
        assert_eq!(
            judge_host_check(&CHECK, &facts, ASKED).verdict,
            Verdict::Error
        );
    }

    #[test]
    fn without_a_plugin_another_check_reports_it() {
        let facts = kubernetes_node_with(|it| it.device_plugins = Reading::Value(Vec::new()));
        assert_eq!(
            judge_host_check(&CHECK, &facts, ASKED).verdict,
            Verdict::Skip
        );
    }
}
