//! NVIDIA's device plugin is registered and responds.
//!
//! ## Why
//! The device plugin reports GPUs to the kubelet. Without it a node has GPUs that no pod can
//! request, and no other component of the node reports it.
//!
//! ## How it is judged
//! Each socket `nvidia*.sock` in the kubelet's folder `device-plugins` receives
//! `GetDevicePluginOptions`. It is a `fail` when there is none or none answers, a `warn` when one
//! of several does not (a leftover socket). Skipped where no kubelet is, an `error` there when
//! the profile has `kubernetes.required: true`; skipped where GPUs are given out by dynamic
//! resource allocation.
//!
//! ## What to do
//! Check that the plugin's pod runs on this node: its `DaemonSet` needs the node's label
//! (`nvidia.com/gpu=true` in many clusters) and a toleration of the node's taints, and its
//! container must mount `/var/lib/kubelet/device-plugins`. Its log reports when it finds no NVML:
//! then the container runtime does not give it the driver.
//!
//! ## Source
//! Kubernetes, device plugins,
//! <https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/>;
//! NVIDIA k8s-device-plugin, <https://github.com/NVIDIA/k8s-device-plugin>

use crate::check::{Check, Judge};
use crate::device_ids;
use crate::facts::{DevicePlugin, Facts};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "device_plugin_registered",
    stage: Stage::Gpu,
    level: Level::Standard,
    judge: Judge::Host(judge),
    documentation_url: "https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    const REMEDY: &str = "check the plugin's pod on this node (kubectl get pods -A -o wide): the node needs the label that its DaemonSet selects (kubectl label node NODE nvidia.com/gpu=true) and its container the kubelet's folder device-plugins";
    let kubelet = device_ids::kubelet(facts, profile)?;
    device_ids::refuse_dynamic_resource_allocation(kubelet)?;
    let plugins = kubelet
        .device_plugins
        .required("the device plugins' sockets")?;
    if plugins.is_empty() {
        return Ok(Outcome::fail(format!(
            "no device plugin of NVIDIA has a socket in {}/device-plugins, so that no pod can request a GPU",
            kubelet.kubelet_root
        ))
        .expected("a socket such as nvidia-gpu.sock")
        .observed("none")
        .remedy(REMEDY));
    }
    let answers = |plugin: &DevicePlugin| plugin.answers.value() == Some(&true);
    let one_answers = plugins.iter().any(answers);
    let mut tally = Tally::default();
    for plugin in plugins {
        let socket = &plugin.socket;
        let trouble = plugin.trouble.as_deref().unwrap_or("no reason is known");
        match plugin.answers.value() {
            Some(true) => tally.pass(format!("the device plugin at {socket} answers")),
            Some(false) if one_answers => tally.warn(format!(
                "no process answers at {socket}, a leftover socket: {trouble}"
            )),
            Some(false) => tally.fail(format!(
                "the device plugin at {socket} does not answer: {trouble}"
            )),
            None => tally.error(format!("{socket} could not be queried: {trouble}")),
        }
    }
    let failed = tally.worst() == Some(Verdict::Fail);
    let outcome = tally.outcome(Outcome::error("no socket was read"));
    Ok(if failed {
        outcome.remedy(REMEDY)
    } else {
        outcome
    })
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{DevicePlugin, Facts, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        healthy_node, judge_host_check, kubernetes_node, kubernetes_node_with,
    };

    fn judge(facts: &Facts) -> Finding {
        judge_host_check(&CHECK, facts, "{}")
    }

    fn plugin(socket: &str, answers: Reading<bool>) -> DevicePlugin {
        DevicePlugin {
            socket: socket.to_owned(),
            answers,
            trouble: Some("connection refused".to_owned()),
            devices: Reading::NotSupported,
        }
    }

    fn with(plugins: Vec<DevicePlugin>) -> Facts {
        kubernetes_node_with(|it| it.device_plugins = Reading::Value(plugins))
    }

    #[test]
    fn a_plugin_that_answers_passes() {
        assert_eq!(judge(&kubernetes_node()).verdict, Verdict::Pass);
    }

    #[test]
    fn every_other_state_is_told_apart() {
        let dead = || plugin("nvidia-gpu.sock", Reading::Value(false));
        let left = || plugin("nvidia-mig-1g.10gb.sock", Reading::Value(false));
        let alive = || plugin("nvidia-gpu.sock", Reading::Value(true));
        let hidden = || {
            plugin(
                "nvidia-gpu.sock",
                Reading::NotRead("Permission denied".to_owned()),
            )
        };
        for (plugins, verdict) in [
            (vec![], Verdict::Fail),
            (vec![dead()], Verdict::Fail),
            (vec![alive(), left()], Verdict::Warn),
            (vec![hidden()], Verdict::Error),
            (vec![dead(), hidden()], Verdict::Fail),
        ] {
            let finding = judge(&with(plugins));
            assert_eq!(finding.verdict, verdict, "{}", finding.summary);
        }
    }

    #[test]
    fn a_machine_outside_of_kubernetes_is_skipped_unless_a_kubelet_is_required() {
        let absent = kubernetes_node_with(|it| it.kubelet_present = Reading::Value(false));
        for facts in [&absent, &healthy_node()] {
            assert_eq!(judge(facts).verdict, Verdict::Skip);
            let required = judge_host_check(&CHECK, facts, "kubernetes: {required: true}");
            assert_eq!(required.verdict, Verdict::Error, "{}", required.summary);
        }
        let unread =
            kubernetes_node_with(|it| it.kubelet_present = Reading::NotRead("x".to_owned()));
        assert_eq!(judge(&unread).verdict, Verdict::Error);
    }

    #[test]
    fn dynamic_resource_allocation_needs_no_plugin() {
        let mut facts = with(Vec::new());
        if let Some(kubernetes) = &mut facts.kubernetes {
            kubernetes.dynamic_resource_allocation = true;
        }
        assert_eq!(judge(&facts).verdict, Verdict::Skip);
    }
}
