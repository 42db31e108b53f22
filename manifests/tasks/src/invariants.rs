//! What must hold for every object of every overlay, whoever changes it next.

use anyhow::{bail, ensure};
use serde_json::Value;

use super::manifests::{Manifests, containers, pod_spec};

/// Folders of the node that a pod may mount: by the pod's owner, the path, and whether it is
/// written to.
const HOST_PATHS: &[(&str, &str, bool)] = &[
    (
        "nvidia-device-plugin-daemonset",
        "/var/lib/kubelet/device-plugins",
        true,
    ),
    ("gpu-validator-gate", "/var/lib/gpu-bringup", true),
    (
        "gpu-validator-gate",
        "/var/lib/kubelet/device-plugins",
        false,
    ),
    (
        "gpu-validator-gate",
        "/var/lib/kubelet/pod-resources",
        false,
    ),
    ("gpu-validator-health", "/var/lib/gpu-bringup", true),
    (
        "gpu-feature-discovery",
        "/etc/kubernetes/node-feature-discovery/features.d",
        true,
    ),
    ("dcgm-exporter", "/var/lib/kubelet/pod-resources", false),
];

/// Capabilities beyond none, by the pod's owner.
const CAPABILITIES: &[(&str, &str)] = &[
    ("gpu-validator-gate", "SYSLOG"),
    ("gpu-validator-health", "SYSLOG"),
];

/// Who may speak to the API server.
const TOKEN_HOLDERS: &[&str] = &["gpu-validator-gate"];

pub(crate) fn check(manifests: &Manifests) -> anyhow::Result<()> {
    let mut pods = 0;
    for object in manifests.objects() {
        let Some(pod) = pod_spec(object) else {
            continue;
        };
        pods += 1;
        let owner = object["metadata"]["name"].as_str().unwrap_or_default();
        if let Err(error) = check_pod(owner, pod) {
            bail!(
                "{} {owner}: {error:#}",
                object["kind"].as_str().unwrap_or_default()
            );
        }
    }
    ensure!(pods > 0, "no object makes pods");
    check_namespaces(manifests)?;
    check_images(manifests)
}

fn check_pod(owner: &str, pod: &Value) -> anyhow::Result<()> {
    for sharing in ["hostNetwork", "hostPID", "hostIPC"] {
        ensure!(pod[sharing].is_null(), "{sharing} is set");
    }
    let token = pod["automountServiceAccountToken"] == true;
    ensure!(
        token == TOKEN_HOLDERS.contains(&owner) && pod["automountServiceAccountToken"].is_boolean(),
        "automountServiceAccountToken is {}",
        pod["automountServiceAccountToken"]
    );
    ensure!(
        pod["nodeSelector"]["nvidia.com/gpu"] == "true",
        "it would run on nodes that are not labelled nvidia.com/gpu=true"
    );
    ensure!(
        pod["runtimeClassName"] == "nvidia",
        "its runtime class is {}, so that it sees GPUs only where NVIDIA's runtime is the default",
        pod["runtimeClassName"]
    );
    for taint in ["nvidia.com/gpu", "gpu-bringup.dev/unvalidated"] {
        let tolerations = pod["tolerations"].as_array();
        let tolerates = tolerations.is_some_and(|them| them.iter().any(|it| it["key"] == taint));
        ensure!(tolerates, "it does not tolerate the taint {taint}");
    }
    ensure!(
        pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault",
        "its seccomp profile is not RuntimeDefault"
    );
    for volume in pod["volumes"].as_array().into_iter().flatten() {
        check_volume(owner, pod, volume)?;
    }
    containers(pod).try_for_each(|container| check_container(owner, container))
}

fn check_volume(owner: &str, pod: &Value, volume: &Value) -> anyhow::Result<()> {
    let Some(path) = volume["hostPath"]["path"].as_str() else {
        return Ok(());
    };
    let Some((.., writable)) = HOST_PATHS
        .iter()
        .find(|(of, allowed, _)| *of == owner && *allowed == path)
    else {
        bail!("it mounts {path} of the node");
    };
    let mounts = containers(pod).flat_map(|it| it["volumeMounts"].as_array().into_iter().flatten());
    for mount in mounts.filter(|it| it["name"] == volume["name"]) {
        ensure!(
            *writable || mount["readOnly"] == true,
            "it may write to {path} of the node"
        );
    }
    Ok(())
}

fn check_container(owner: &str, container: &Value) -> anyhow::Result<()> {
    let context = &container["securityContext"];
    for (field, wanted) in [
        ("privileged", false),
        ("allowPrivilegeEscalation", false),
        ("readOnlyRootFilesystem", true),
    ] {
        ensure!(context[field] == wanted, "{field} is {}", context[field]);
    }
    ensure!(
        context["capabilities"]["drop"] == serde_json::json!(["ALL"]),
        "not all capabilities are dropped"
    );
    for added in context["capabilities"]["add"]
        .as_array()
        .into_iter()
        .flatten()
    {
        let allowed = CAPABILITIES
            .iter()
            .any(|(of, capability)| *of == owner && added == capability);
        ensure!(allowed, "it adds the capability {added}");
    }
    for kind in ["requests", "limits"] {
        for resource in ["cpu", "memory"] {
            ensure!(
                container["resources"][kind][resource].is_string(),
                "resources.{kind}.{resource} is not set"
            );
        }
    }
    Ok(())
}

/// Every namespace of ours names its Pod Security level.
fn check_namespaces(manifests: &Manifests) -> anyhow::Result<()> {
    for (name, level) in [
        ("gpu-bringup-system", "privileged"),
        ("gpu-bringup", "restricted"),
    ] {
        let labels = &manifests.object("Namespace", name)?["metadata"]["labels"];
        ensure!(
            labels["pod-security.kubernetes.io/enforce"] == level,
            "namespace {name} does not enforce Pod Security level {level}"
        );
    }
    Ok(())
}

/// A tag that moves is no version, and the validator is this one.
fn check_images(manifests: &Manifests) -> anyhow::Result<()> {
    let own = format!(":{}", env!("CARGO_PKG_VERSION"));
    for image in manifests.images() {
        let (name, version) = image.rsplit_once(':').unwrap_or((&image, ""));
        ensure!(
            !version.is_empty() && version != "latest" && !version.contains('/'),
            "image {name} has no version"
        );
        ensure!(
            !image.contains("/gpu-validator") || image.contains(&own),
            "image {image} is not of this version {}",
            env!("CARGO_PKG_VERSION")
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod() -> Value {
        json!({
            "automountServiceAccountToken": false,
            "nodeSelector": {"nvidia.com/gpu": "true"},
            "runtimeClassName": "nvidia",
            "tolerations": [{"key": "nvidia.com/gpu"}, {"key": "gpu-bringup.dev/unvalidated"}],
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "volumes": [{"name": "pods", "hostPath": {"path": "/var/lib/kubelet/pod-resources"}}],
            "containers": [{
                "resources": {
                    "requests": {"cpu": "1", "memory": "1Gi"},
                    "limits": {"cpu": "1", "memory": "1Gi"},
                },
                "securityContext": {
                    "privileged": false,
                    "allowPrivilegeEscalation": false,
                    "readOnlyRootFilesystem": true,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [{"name": "pods", "readOnly": true}],
            }],
        })
    }

    #[test]
    fn one_wrong_field_is_named() {
        check_pod("dcgm-exporter", &pod()).expect("right");
        let container = |field: &str| format!("/containers/0/securityContext/{field}");
        for (pointer, value, message) in [
            (
                "/nodeSelector".to_owned(),
                json!({}),
                "not labelled nvidia.com/gpu=true",
            ),
            (
                "/tolerations/1/key".to_owned(),
                json!("x"),
                "taint gpu-bringup.dev/unvalidated",
            ),
            (
                "/runtimeClassName".to_owned(),
                json!(null),
                "runtime class is null",
            ),
            (
                "/automountServiceAccountToken".to_owned(),
                json!(true),
                "automountServiceAccountToken is true",
            ),
            (container("privileged"), json!(true), "privileged is true"),
            (
                container("readOnlyRootFilesystem"),
                json!(null),
                "readOnlyRootFilesystem is null",
            ),
            (
                container("capabilities"),
                json!({"drop": ["ALL"], "add": ["SYS_ADMIN"]}),
                "capability \"SYS_ADMIN\"",
            ),
            (
                container("capabilities"),
                json!({}),
                "not all capabilities are dropped",
            ),
            (
                "/containers/0/volumeMounts/0/readOnly".to_owned(),
                json!(false),
                "may write to /var/lib/kubelet/pod-resources",
            ),
            (
                "/volumes/0/hostPath/path".to_owned(),
                json!("/"),
                "mounts / of the node",
            ),
            (
                "/containers/0/resources/limits".to_owned(),
                json!({"cpu": "1"}),
                "resources.limits.memory is not set",
            ),
        ] {
            let mut pod = pod();
            *pod.pointer_mut(&pointer).expect("there") = value;
            let error = check_pod("dcgm-exporter", &pod)
                .expect_err(&pointer)
                .to_string();
            assert!(error.contains(message), "{pointer}: {error}");
        }
        let mut pod = pod();
        pod["hostPID"] = json!(true);
        let error = check_pod("dcgm-exporter", &pod)
            .expect_err("hostPID")
            .to_string();
        assert_eq!(error, "hostPID is set");
    }
}
