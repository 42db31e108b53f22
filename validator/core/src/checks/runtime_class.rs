//! The runtime class that GPU pods request is in the cluster, and this node's runtime has its handler.
//!
//! ## Why
//! A pod with `runtimeClassName: nvidia` is refused without the class, and with a class whose
//! handler containerd does not know it stays in `ContainerCreating` for ever.
//!
//! ## How it is judged
//! `kubernetes.runtime_class` of the profile must be among the cluster's runtime classes. Where its
//! handler is `nvidia` and the container runtime's configuration of this node was read, containerd
//! or CRI-O must have a runtime of that name; a container does not see that configuration. Skipped
//! when the profile names no class, without a kubelet, and without credentials for the API server.
//!
//! ## What to do
//! Apply the class of the manifests, and on the node
//! `nvidia-ctk runtime configure --runtime=containerd`, then `systemctl restart containerd`. Where
//! `nvidia` is containerd's default runtime, no class is needed.
//!
//! ## Source
//! Kubernetes, runtime class, <https://kubernetes.io/docs/concepts/containers/runtime-class/>

use crate::check::{Check, Judge};
use crate::device_ids;
use crate::facts::Facts;
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;

pub(crate) const CHECK: Check = Check {
    id: "runtime_class",
    stage: Stage::Gpu,
    level: Level::Standard,
    judge: Judge::Host(judge),
    documentation_url: "https://kubernetes.io/docs/concepts/containers/runtime-class/",
};

/// What `nvidia-ctk runtime configure` calls the runtime.
const NVIDIA_HANDLER: &str = "nvidia";

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let Some(name) = &profile.kubernetes.runtime_class else {
        return Err(Outcome::skip(
            "no runtime class is configured in the profile",
        ));
    };
    let classes = device_ids::api(facts, profile)?
        .runtime_classes
        .required("the cluster's runtime classes")?;
    let Some(handler) = classes.get(name) else {
        let has: Vec<&str> = classes.keys().map(String::as_str).collect();
        return Ok(Outcome::fail(format!("the cluster has no runtime class {name}"))
            .expected(name)
            .observed(if has.is_empty() {
                "no runtime class".to_owned()
            } else {
                has.join(", ")
            })
            .remedy("apply the RuntimeClass of the manifests, or take runtimeClassName out of pods where nvidia is the default runtime"));
    };
    let known = format!("runtime class {name} is there, its handler is {handler}");
    if handler != NVIDIA_HANDLER || queries::in_container(facts) {
        return Ok(Outcome::pass(known));
    }
    let runtime = facts
        .host
        .container_runtime
        .required("the container runtime's configuration")?;
    if runtime.containerd_nvidia_runtime {
        return Ok(Outcome::pass(format!("{known}, which this node has")));
    }
    Ok(Outcome::fail(format!(
        "runtime class {name} requires handler {handler}, which containerd or CRI-O on this node does not know"
    ))
    .remedy("nvidia-ctk runtime configure --runtime=containerd, then systemctl restart containerd"))
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{ContainerRuntime, Facts, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{judge_host_check, kubernetes_node, kubernetes_node_with_api};

    fn judge(facts: &Facts, class: &str) -> Finding {
        let profile = format!("kubernetes: {{runtime_class: {class}}}");
        judge_host_check(&CHECK, facts, &profile)
    }

    fn node(containerd_nvidia_runtime: bool) -> Facts {
        let mut facts = kubernetes_node();
        facts.host.container_runtime = Reading::Value(ContainerRuntime {
            containerd_nvidia_runtime,
            ..ContainerRuntime::default()
        });
        facts
    }

    #[test]
    fn class_and_handler_must_be_there() {
        assert_eq!(judge(&node(true), "nvidia").verdict, Verdict::Pass);
        assert_eq!(judge(&node(false), "nvidia").verdict, Verdict::Fail);
        let finding = judge(&node(true), "nvidia-legacy");
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(finding.observed.as_deref(), Some("nvidia"));
    }

    #[test]
    fn a_container_sees_the_class_only() {
        let mut facts = node(false);
        facts.host.in_container = Reading::Value(true);
        assert_eq!(judge(&facts, "nvidia").verdict, Verdict::Pass);
    }

    #[test]
    fn skips_what_no_profile_names_and_errs_on_what_was_not_read() {
        let finding = judge_host_check(&CHECK, &kubernetes_node(), "{}");
        assert_eq!(finding.verdict, Verdict::Skip);
        let unread = kubernetes_node_with_api(|api| {
            api.runtime_classes = Reading::NotRead("403".to_owned());
        });
        assert_eq!(judge(&unread, "nvidia").verdict, Verdict::Error);
        let mut unread = node(true);
        unread.host.container_runtime = Reading::NotRead("x".to_owned());
        assert_eq!(judge(&unread, "nvidia").verdict, Verdict::Error);
    }
}
