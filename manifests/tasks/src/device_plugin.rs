//! The device plugin's named configurations and its CDI strategy, as the components
//! `device-plugin-configs` and `device-plugin-cdi` add them.
//!
//! The plugin ignores a key that it does not know, and a variable of its container precedes every
//! file: both would leave a node as it was without a word.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use serde_json::Value;
use xshell::{Shell, cmd};

use crate::invariants::{self, Allowances};
use crate::manifests::{self, Manifests, containers, pod_spec};
use xtask::tools::LINTERS;
use xtask::{json_schema, workspace};

const DAEMON_SET: &str = "nvidia-device-plugin-daemonset";
const PLUGIN: &str = "nvidia-device-plugin-ctr";
const CONFIG_MAP: &str = "nvidia-device-plugin-configs";
/// The label that the plugin's documentation names.
const NODE_LABEL: &str = "nvidia.com/device-plugin.config";

/// What a component may do beyond the overlays.
const OF_CONFIGS: Allowances = Allowances {
    host_paths: &[],
    // It lists the MIG devices of the whole node.
    capabilities: &[(DAEMON_SET, "SYS_ADMIN")],
};
const OF_CDI: Allowances = Allowances {
    host_paths: &[(DAEMON_SET, "/", false), (DAEMON_SET, "/var/run/cdi", true)],
    capabilities: &[],
};

/// Variables of the plugin's container, and the key of the configuration that each of them hides.
///
/// Source: NVIDIA/k8s-device-plugin v0.20.0, cmd/nvidia-device-plugin/main.go (names) and
/// api/config/v1/config.go, `NewConfig` (precedence), read on 2026-11-23.
const VARIABLES: [(&str, &str); 14] = [
    ("MIG_STRATEGY", "/flags/migStrategy"),
    ("FAIL_ON_INIT_ERROR", "/flags/failOnInitError"),
    ("MPS_ROOT", "/flags/mpsRoot"),
    ("NVIDIA_DRIVER_ROOT", "/flags/nvidiaDriverRoot"),
    ("NVIDIA_DEV_ROOT", "/flags/nvidiaDevRoot"),
    ("GDRCOPY_ENABLED", "/flags/gdrcopyEnabled"),
    ("GDS_ENABLED", "/flags/gdsEnabled"),
    ("MOFED_ENABLED", "/flags/mofedEnabled"),
    (
        "DEVICE_DISCOVERY_STRATEGY",
        "/flags/deviceDiscoveryStrategy",
    ),
    ("PASS_DEVICE_SPECS", "/flags/plugin/passDeviceSpecs"),
    ("DEVICE_LIST_STRATEGY", "/flags/plugin/deviceListStrategy"),
    ("DEVICE_ID_STRATEGY", "/flags/plugin/deviceIDStrategy"),
    ("CDI_ANNOTATION_PREFIX", "/flags/plugin/cdiAnnotationPrefix"),
    (
        "SHARED_DEVICES_ALLOCATION_POLICY",
        "/flags/plugin/sharedDevicesAllocationPolicy",
    ),
];

/// Checks both components; returns what they build, for the schemas of Kubernetes.
pub(crate) fn check(shell: &Shell) -> anyhow::Result<Vec<PathBuf>> {
    let folder = shell.create_dir(workspace::target().join("kubernetes/device-plugin"))?;
    let overlay = "staging".parse()?;
    let built = |component: &str, manifests: &Manifests| -> anyhow::Result<PathBuf> {
        let file = folder.join(format!("{component}.yaml"));
        shell.write_file(&file, manifests.text())?;
        Ok(file)
    };

    let named = "device-plugin-configs";
    let manifests = Manifests::of_overlay_with_component(&overlay, named)?;
    let configs = config_map(&manifests)?;
    let context = || format!("component {named}");
    invariants::check_with(&manifests, &OF_CONFIGS).with_context(context)?;
    check_keys(shell, &folder, &configs).with_context(context)?;
    check_configs(&configs).with_context(context)?;
    check_pod(daemon_set(&manifests)?, &configs).with_context(context)?;
    check_egress(manifests.object("NetworkPolicy", "nvidia-device-plugin")?)
        .with_context(context)?;
    let first = built(named, &manifests)?;

    let cdi = "device-plugin-cdi";
    let manifests = Manifests::of_overlay_with_component(&overlay, cdi)?;
    invariants::check_with(&manifests, &OF_CDI).with_context(|| format!("component {cdi}"))?;
    check_cdi(daemon_set(&manifests)?).with_context(|| format!("component {cdi}"))?;
    Ok(vec![first, built(cdi, &manifests)?])
}

/// The configurations by name.
fn config_map(manifests: &Manifests) -> anyhow::Result<BTreeMap<String, Value>> {
    let mut objects = manifests.objects().iter();
    let map = objects.find(|it| {
        let name = it["metadata"]["name"].as_str().unwrap_or_default();
        it["kind"] == "ConfigMap" && name.starts_with(CONFIG_MAP)
    });
    let map = map.with_context(|| format!("no ConfigMap {CONFIG_MAP}"))?;
    let data = map["data"].as_object().into_iter().flatten();
    let parsed = data.map(|(name, text)| {
        let config = serde_yaml::from_str(text.as_str().unwrap_or_default());
        Ok((
            name.clone(),
            config.with_context(|| format!("configuration {name}"))?,
        ))
    });
    parsed.collect()
}

fn daemon_set(manifests: &Manifests) -> anyhow::Result<&Value> {
    let object = manifests.object("DaemonSet", DAEMON_SET)?;
    pod_spec(object).context("a DaemonSet makes pods")
}

/// Each configuration against the keys that the plugin has. A key that it does not have must be
/// refused first, or the schema means nothing.
fn check_keys(
    shell: &Shell,
    folder: &Path,
    configs: &BTreeMap<String, Value>,
) -> anyhow::Result<()> {
    let checker = LINTERS.install()?.join("check-jsonschema");
    let schema = manifests::folder().join("schemas/device-plugin-config-v1.json");
    let mut files = Vec::new();
    for (name, config) in configs {
        let file = folder.join(format!("{name}.json"));
        shell.write_file(&file, config.to_string())?;
        files.push(file);
        let wrong = folder.join(format!("{name}.misspelt.json"));
        let misspelling = ("migStrategy", "migStrategies");
        json_schema::refuses(shell, &schema, &config.to_string(), misspelling, &wrong)?;
    }
    cmd!(shell, "{checker} --quiet --schemafile {schema} {files...}")
        .quiet()
        .run()
        .context("a configuration has keys or values that the device plugin does not know")
}

/// What the plugin refuses beyond a schema, and what these manifests do not run.
fn check_configs(configs: &BTreeMap<String, Value>) -> anyhow::Result<()> {
    for (name, config) in configs {
        let sharing = &config["sharing"];
        ensure!(
            sharing["mps"].is_null(),
            "configuration {name}: MPS takes NVIDIA's control daemon, which these manifests do not run"
        );
        let slices_gpus = sharing["timeSlicing"]["resources"]
            .as_array()
            .is_some_and(|them| them.iter().any(|it| it["name"] == "nvidia.com/gpu"));
        ensure!(
            !slices_gpus || sharing["timeSlicing"]["renameByDefault"] == true,
            "configuration {name}: pods that request nvidia.com/gpu would share it unasked; set renameByDefault"
        );
    }
    Ok(())
}

/// The plugin reads the file that config-manager links to, and nothing precedes it.
fn check_pod(pod: &Value, configs: &BTreeMap<String, Value>) -> anyhow::Result<()> {
    let plugin = container(pod, PLUGIN)?;
    for (variable, key) in VARIABLES {
        let value = variable_of(plugin, variable);
        let hidden = configs.iter().find(|(_, it)| it.pointer(key).is_some());
        if let (Some(value), Some((name, _))) = (value, hidden) {
            anyhow::bail!("{variable}={value} precedes {key} of configuration {name}");
        }
    }
    let read = variable_of(plugin, "CONFIG_FILE").unwrap_or_default();
    let managers: Vec<&Value> = containers(pod)
        .filter(|it| it["command"][0] == "config-manager")
        .collect();
    ensure!(
        managers.len() == 2,
        "{} containers run config-manager, expected one before the plugin and one beside it",
        managers.len()
    );
    for manager in managers {
        let variable = |name: &str| variable_of(manager, name).unwrap_or_default();
        ensure!(
            variable("CONFIG_FILE_DST") == read,
            "config-manager writes {}, the plugin reads {read}",
            variable("CONFIG_FILE_DST")
        );
        ensure!(
            variable("NODE_LABEL") == NODE_LABEL,
            "config-manager reads label {}, expected {NODE_LABEL}",
            variable("NODE_LABEL")
        );
        let default = variable("DEFAULT_CONFIG");
        ensure!(
            configs.contains_key(default),
            "DEFAULT_CONFIG is {default}, which is none of {:?}",
            configs.keys().collect::<Vec<_>>()
        );
    }
    ensure!(
        pod["shareProcessNamespace"] == true,
        "config-manager cannot signal the plugin: shareProcessNamespace is not set"
    );
    for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
        let command = plugin[probe]["exec"]["command"].to_string();
        ensure!(
            command.contains("/nvidia-*.sock"),
            "{probe} waits for the socket of one resource: {command}"
        );
    }
    Ok(())
}

/// config-manager reads the node's label from the API server.
fn check_egress(policy: &Value) -> anyhow::Result<()> {
    let rules = policy["spec"]["egress"].as_array().into_iter().flatten();
    let mut ports = rules.flat_map(|it| it["ports"].as_array().into_iter().flatten());
    ensure!(
        ports.any(|it| it["port"] == 443),
        "the network policy keeps config-manager from the API server"
    );
    Ok(())
}

/// A CDI specification has paths of the host, and lies where the runtime reads it.
fn check_cdi(pod: &Value) -> anyhow::Result<()> {
    let plugin = container(pod, PLUGIN)?;
    let strategy = variable_of(plugin, "DEVICE_LIST_STRATEGY").unwrap_or_default();
    ensure!(
        strategy.starts_with("cdi-"),
        "DEVICE_LIST_STRATEGY is {strategy:?}"
    );
    let root = variable_of(plugin, "DRIVER_ROOT_CTR_PATH").unwrap_or_default();
    for (path, of_the_host) in [
        (
            root,
            variable_of(plugin, "NVIDIA_DRIVER_ROOT").unwrap_or_default(),
        ),
        ("/var/run/cdi", "/var/run/cdi"),
    ] {
        ensure!(
            host_path(pod, plugin, path) == Some(of_the_host),
            "{path} of the container is not {of_the_host} of the host"
        );
    }
    Ok(())
}

fn container<'a>(pod: &'a Value, name: &str) -> anyhow::Result<&'a Value> {
    containers(pod)
        .find(|it| it["name"] == name)
        .with_context(|| format!("no container {name}"))
}

fn variable_of<'a>(container: &'a Value, name: &str) -> Option<&'a str> {
    let mut variables = container["env"].as_array()?.iter();
    variables.find(|it| it["name"] == name)?["value"].as_str()
}

/// The host's path that a container has mounted at `path`.
fn host_path<'a>(pod: &'a Value, container: &Value, path: &str) -> Option<&'a str> {
    let mut mounts = container["volumeMounts"].as_array()?.iter();
    let volume = &mounts.find(|it| it["mountPath"] == path)?["name"];
    let mut volumes = pod["volumes"].as_array()?.iter();
    volumes.find(|it| it["name"] == *volume)?["hostPath"]["path"].as_str()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn configs() -> BTreeMap<String, Value> {
        let config = json!({"flags": {"migStrategy": "mixed", "plugin": {}}});
        [("default".to_owned(), config)].into()
    }

    fn pod() -> Value {
        let probe = json!({"exec": {"command": ["sh", "-c", "ls /x/nvidia-*.sock"]}});
        let manager = json!({"command": ["config-manager"], "env": [
            {"name": "CONFIG_FILE_DST", "value": "/config/config.yaml"},
            {"name": "NODE_LABEL", "value": NODE_LABEL},
            {"name": "DEFAULT_CONFIG", "value": "default"},
        ]});
        json!({
            "shareProcessNamespace": true,
            "initContainers": [manager],
            "containers": [
                {
                    "name": PLUGIN,
                    "env": [
                        {"name": "CONFIG_FILE", "value": "/config/config.yaml"},
                        {"name": "PASS_DEVICE_SPECS", "value": "false"},
                    ],
                    "startupProbe": probe, "readinessProbe": probe, "livenessProbe": probe,
                },
                manager,
            ],
        })
    }

    #[test]
    fn what_would_keep_a_configuration_from_its_node_is_named() {
        check_pod(&pod(), &configs()).expect("right");
        for (pointer, value, message) in [
            (
                "/containers/0/env/1",
                json!({"name": "MIG_STRATEGY", "value": "none"}),
                "MIG_STRATEGY=none precedes /flags/migStrategy of configuration default",
            ),
            (
                "/containers/0/env/0/value",
                json!("/config.yaml"),
                "the plugin reads /config.yaml",
            ),
            (
                "/containers/1/env/1/value",
                json!("nvidia.com/mig.config"),
                "reads label nvidia.com/mig.config",
            ),
            (
                "/initContainers/0/env/2/value",
                json!("whole"),
                "DEFAULT_CONFIG is whole",
            ),
            (
                "/initContainers",
                json!([]),
                "1 containers run config-manager",
            ),
            ("/shareProcessNamespace", json!(false), "cannot signal"),
            (
                "/containers/0/livenessProbe/exec/command",
                json!(["test", "-S", "/x/nvidia-gpu.sock"]),
                "livenessProbe waits for the socket of one resource",
            ),
        ] {
            let mut pod = pod();
            *pod.pointer_mut(pointer).expect("there") = value;
            let error = check_pod(&pod, &configs()).expect_err(pointer).to_string();
            assert!(error.contains(message), "{pointer}: {error}");
        }
    }

    #[test]
    fn sharing_without_a_name_of_its_own_and_mps_are_refused() {
        let check = |sharing: Value| {
            let config = json!({"sharing": sharing});
            check_configs(&[("shared".to_owned(), config)].into()).map_err(|it| it.to_string())
        };
        let resources = json!([{"name": "nvidia.com/gpu", "replicas": 4}]);
        check(json!({"timeSlicing": {"renameByDefault": true, "resources": resources}}))
            .expect("right");
        let error = check(json!({"timeSlicing": {"resources": resources}})).expect_err("unasked");
        assert!(error.contains("set renameByDefault"), "{error}");
        let error = check(json!({"mps": {"resources": resources}})).expect_err("no daemon");
        assert!(error.contains("control daemon"), "{error}");
    }

    #[test]
    fn cdi_takes_the_hosts_paths() {
        let pod = |strategy: &str, cdi: &str| {
            json!({
                "containers": [{
                    "name": PLUGIN,
                    "env": [
                        {"name": "DEVICE_LIST_STRATEGY", "value": strategy},
                        {"name": "NVIDIA_DRIVER_ROOT", "value": "/"},
                        {"name": "DRIVER_ROOT_CTR_PATH", "value": "/driver-root"},
                    ],
                    "volumeMounts": [
                        {"name": "root", "mountPath": "/driver-root"},
                        {"name": "cdi", "mountPath": "/var/run/cdi"},
                    ],
                }],
                "volumes": [
                    {"name": "root", "hostPath": {"path": "/"}},
                    {"name": "cdi", "hostPath": {"path": cdi}},
                ],
            })
        };
        check_cdi(&pod("cdi-cri", "/var/run/cdi")).expect("right");
        check_cdi(&pod("envvar", "/var/run/cdi")).expect_err("no CDI");
        let error = check_cdi(&pod("cdi-cri", "/etc/cdi")).expect_err("another folder");
        assert!(error.to_string().contains("/var/run/cdi"), "{error}");
    }

    #[test]
    fn without_egress_the_label_is_not_read() {
        check_egress(&json!({"spec": {"egress": [{"ports": [{"port": 443}]}]}})).expect("right");
        check_egress(&json!({"spec": {"policyTypes": ["Egress"]}})).expect_err("kept away");
    }
}
