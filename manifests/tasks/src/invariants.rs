//! Rules for every object of every overlay.

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
    ("gpu-validator-sentinel", "/run/gpu-validator", true),
    (
        "gpu-validator-sentinel",
        "/var/lib/kubelet/pod-resources",
        false,
    ),
];

/// Who sees the processes of the node: a process that comes to a GPU is in another container.
const HOST_PID: &[&str] = &["gpu-validator-sentinel"];

/// Who stays away from nodes that have not passed their validation.
const VALIDATED_NODES_ONLY: &[&str] = &["gpu-validator-sentinel"];

/// Capabilities beyond none, by the pod's owner.
const CAPABILITIES: &[(&str, &str)] = &[
    ("gpu-validator-gate", "SYSLOG"),
    ("gpu-validator-health", "SYSLOG"),
];

/// Who may speak to the API server.
const TOKEN_HOLDERS: &[&str] = &["gpu-validator-gate"];

/// What a component may do beyond [`HOST_PATHS`] and [`CAPABILITIES`], in the same words.
#[derive(Debug, Default)]
pub(crate) struct Allowances {
    pub(crate) host_paths: &'static [(&'static str, &'static str, bool)],
    pub(crate) capabilities: &'static [(&'static str, &'static str)],
}

pub(crate) fn check(manifests: &Manifests) -> anyhow::Result<()> {
    check_with(manifests, &Allowances::default())
}

/// The same for an overlay with a component.
pub(crate) fn check_with(manifests: &Manifests, more: &Allowances) -> anyhow::Result<()> {
    let mut pods = 0;
    for object in manifests.objects() {
        let Some(pod) = pod_spec(object) else {
            continue;
        };
        pods += 1;
        let owner = object["metadata"]["name"].as_str().unwrap_or_default();
        if let Err(error) = check_pod(owner, pod, more) {
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

fn check_pod(owner: &str, pod: &Value, more: &Allowances) -> anyhow::Result<()> {
    for sharing in ["hostNetwork", "hostPID", "hostIPC"] {
        let is_allowed = sharing == "hostPID" && HOST_PID.contains(&owner);
        ensure!(is_allowed || pod[sharing].is_null(), "{sharing} is set");
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
        let stays_away =
            taint == "gpu-bringup.dev/unvalidated" && VALIDATED_NODES_ONLY.contains(&owner);
        ensure!(
            tolerates != stays_away,
            "that it tolerates the taint {taint} is {tolerates}"
        );
    }
    ensure!(
        pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault",
        "its seccomp profile is not RuntimeDefault"
    );
    for volume in pod["volumes"].as_array().into_iter().flatten() {
        check_volume(owner, pod, volume, more)?;
    }
    containers(pod).try_for_each(|container| check_container(owner, container, more))
}

fn check_volume(owner: &str, pod: &Value, volume: &Value, more: &Allowances) -> anyhow::Result<()> {
    let Some(path) = volume["hostPath"]["path"].as_str() else {
        return Ok(());
    };
    let allowed = HOST_PATHS.iter().chain(more.host_paths);
    let Some((.., writable)) = allowed
        .into_iter()
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

fn check_container(owner: &str, container: &Value, more: &Allowances) -> anyhow::Result<()> {
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
            .chain(more.capabilities)
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
    fn the_sentinel_sees_all_processes_and_stays_off_nodes_that_have_not_passed() {
        let none = Allowances::default();
        let mut sentinel = pod();
        sentinel["hostPID"] = json!(true);
        assert!(check_pod("dcgm-exporter", &sentinel, &none).is_err());
        assert!(check_pod("gpu-validator-sentinel", &sentinel, &none).is_err());
        sentinel["tolerations"] = json!([{"key": "nvidia.com/gpu"}]);
        check_pod("gpu-validator-sentinel", &sentinel, &none).expect("right");
        assert!(check_pod("dcgm-exporter", &sentinel, &none).is_err());
    }

    #[test]
    fn one_wrong_field_is_named() {
        let none = Allowances::default();
        check_pod("dcgm-exporter", &pod(), &none).expect("right");
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
            let error = check_pod("dcgm-exporter", &pod, &none)
                .expect_err(&pointer)
                .to_string();
            assert!(error.contains(message), "{pointer}: {error}");
        }
        let mut pod = pod();
        pod["hostPID"] = json!(true);
        let error = check_pod("dcgm-exporter", &pod, &none)
            .expect_err("hostPID")
            .to_string();
        assert_eq!(error, "hostPID is set");
    }

    #[test]
    fn a_component_may_do_what_it_names_and_no_more() {
        let more = Allowances {
            host_paths: &[("dcgm-exporter", "/var/run/cdi", false)],
            capabilities: &[("dcgm-exporter", "SYS_ADMIN")],
        };
        let mut wide = pod();
        wide["volumes"][0]["hostPath"]["path"] = json!("/var/run/cdi");
        wide["containers"][0]["securityContext"]["capabilities"]["add"] = json!(["SYS_ADMIN"]);
        check_pod("dcgm-exporter", &wide, &more).expect("named");
        check_pod("dcgm-exporter", &wide, &Allowances::default()).expect_err("not named");
        check_pod("gpu-feature-discovery", &wide, &more).expect_err("of another");
        wide["containers"][0]["volumeMounts"][0]["readOnly"] = json!(false);
        check_pod("dcgm-exporter", &wide, &more).expect_err("it is read only");
    }
}
