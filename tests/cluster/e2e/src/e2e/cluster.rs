//! The cluster of the checks: roles, the device plugin's daemon set, nodes and profiles.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use super::kubelet::{self, Logs};
use super::ran::{Ran, validator};
use super::server::{ADMIN_TOKEN, CHECKS_USER, Server};
use super::{JOBS, create};
use harness::simulate::PreparedNode;
use kubernetes_tasks::kubectl::Kubectl;
use kubernetes_tasks::manifests::Manifests;
use xtask::workspace;

const PLUGIN: &str = "nvidia-device-plugin-daemonset";
const PLUGINS_NAMESPACE: &str = "kube-system";
const PLUGINS_CONTAINER: &str = "nvidia-device-plugin-ctr";

/// Everything that the checks query, except the nodes.
#[derive(Debug)]
pub(super) struct Cluster<'a> {
    pub(super) server: &'a Server,
    pub(super) admin: Kubectl,
    pub(super) logs: Logs,
    daemon_set: Value,
}

/// The device plugin's pod on the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plugin {
    Ready,
    Crashes,
    Absent,
}

impl<'a> Cluster<'a> {
    pub(super) fn prepare(server: &'a Server) -> anyhow::Result<Cluster<'a>> {
        let admin = server.kubectl(ADMIN_TOKEN);
        for (purpose, namespace) in [
            ("checks", None),
            ("device-plugin", Some(PLUGINS_NAMESPACE)),
            ("gpu-pod", Some(JOBS)),
        ] {
            grant(&admin, purpose, namespace)?;
        }
        let manifests = Manifests::of_overlay(&"staging".parse()?)?;
        let spec = manifests.object("DaemonSet", PLUGIN)?["spec"]["template"]["spec"].clone();
        let status = json!({"status": {"desiredNumberScheduled": 1, "numberReady": 1}}).to_string();
        let patch = [
            "patch",
            "daemonset",
            PLUGIN,
            "--namespace",
            PLUGINS_NAMESPACE,
            "--subresource=status",
            "--type=merge",
            "--output=json",
            "--patch",
            &status,
        ];
        let mut daemon_set = admin.json(&patch)?;
        daemon_set["podSpec"] = spec;
        Ok(Cluster {
            logs: Logs::serve(server.folder().join("logs"), server.certificates())?,
            server,
            admin,
            daemon_set,
        })
    }

    /// A node object with so many GPUs, and the device plugin's pod on it.
    pub(super) fn make_node(&self, name: &str, gpus: usize) -> anyhow::Result<()> {
        self.make(&self.node_object(name, gpus), Plugin::Ready)
    }

    pub(super) fn node_object(&self, name: &str, gpus: usize) -> Value {
        let devices = json!({"cpu": "4", "pods": "110", "nvidia.com/gpu": gpus.to_string()});
        json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {"nvidia.com/gpu": "true", "team": "a"}},
            "spec": {"taints": [{"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}]},
            "status": {
                "capacity": devices,
                "allocatable": devices,
                "conditions": [
                    {"type": "Ready", "status": "True", "reason": "KubeletReady"},
                    {"type": "MemoryPressure", "status": "False", "reason": "KubeletHasSufficientMemory"},
                ],
                "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": self.logs.port}},
            },
        })
    }

    pub(super) fn make(&self, node: &Value, plugin: Plugin) -> anyhow::Result<()> {
        create(&self.admin, node, false)?;
        let name = node["metadata"]["name"].as_str().context("no name")?;
        if plugin != Plugin::Absent {
            self.make_plugin(name, plugin)?;
        }
        Ok(())
    }

    fn make_plugin(&self, node: &str, plugin: Plugin) -> anyhow::Result<()> {
        let name = format!("{PLUGIN}-{node}");
        let mut spec = self.daemon_set["podSpec"].clone();
        spec["nodeName"] = json!(node);
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": PLUGINS_NAMESPACE,
                "ownerReferences": [{
                    "apiVersion": "apps/v1",
                    "kind": "DaemonSet",
                    "name": PLUGIN,
                    "uid": self.daemon_set["metadata"]["uid"],
                    "controller": true,
                }],
            },
            "spec": spec,
        });
        create(&self.admin, &pod, false)?;
        let (ready, restarts, state) = match plugin {
            Plugin::Ready => ("True", 0, json!({"running": {}})),
            Plugin::Crashes | Plugin::Absent => {
                let waiting = json!({"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting failed container"});
                ("False", 4, json!({"waiting": waiting}))
            }
        };
        let status = json!({
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": ready}],
            "containerStatuses": kubelet::container_status(PLUGINS_CONTAINER, restarts, &state),
        });
        kubelet::set_status(&self.admin, PLUGINS_NAMESPACE, &name, &status)?;
        if plugin == Plugin::Crashes {
            self.record_the_crash(&name)?;
        }
        Ok(())
    }

    fn record_the_crash(&self, pod: &str) -> anyhow::Result<()> {
        self.logs.write(
            pod,
            PLUGINS_NAMESPACE,
            PLUGINS_CONTAINER,
            "?previous=true&tailLines=10",
            "Starting plugins\nFailed to initialize NVML: could not load NVML library\n",
        )?;
        let event = json!({
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": format!("{pod}.1"), "namespace": PLUGINS_NAMESPACE},
            "involvedObject": {"kind": "Pod", "namespace": PLUGINS_NAMESPACE, "name": pod},
            "reason": "BackOff",
            "message": "Back-off restarting failed container",
            "type": "Warning",
            "firstTimestamp": "2026-01-01T00:00:00Z",
            "lastTimestamp": "2026-01-01T00:00:00Z",
        });
        create(&self.admin, &event, false)
    }

    /// A profile that requires everything; `more` are lines of its section `kubernetes`, which win.
    pub(super) fn profile(
        &self,
        node: &str,
        kubeconfig: &Path,
        more: &str,
    ) -> anyhow::Result<PathBuf> {
        let mut text = format!(
            "levels: {{standard: {{burn: {{enabled: false}}}}}}\nkubernetes:\n  node_name: {node}\n  \
             labels: {{nvidia.com/gpu: 'true', team: a}}\n  taints: ['nvidia.com/gpu=true:NoSchedule']\n  \
             device_plugin_daemon_set: required\n  api: {{required: true, kubeconfig: {}}}\n",
            kubeconfig.display()
        );
        if !more.contains("runtime_class") {
            text.push_str("  runtime_class: nvidia\n");
        }
        let _ = write!(text, "{more}");
        let path = self.server.folder().join(format!("{node}.profile.yaml"));
        std::fs::write(&path, text)?;
        Ok(path)
    }

    pub(super) fn run(
        &self,
        node: &PreparedNode,
        name: &str,
        profile: &Path,
    ) -> anyhow::Result<Ran> {
        let report = self.server.folder().join(format!("{name}.report.json"));
        let mut command = validator(node, &["run", "--level=standard"]);
        command.arg("--profile").arg(profile);
        let output = command.arg("--json").arg(&report).output()?;
        Ran::of(&output, &report).with_context(|| format!("node {name}"))
    }
}

/// A role as `gpu-validator kubernetes rbac` prints it.
pub(super) fn role(purpose: &str, namespace: Option<&str>) -> anyhow::Result<String> {
    let mut command = Command::new(workspace::target().join("debug/gpu-validator"));
    command.args(["kubernetes", "rbac", purpose, "--name", &role_name(purpose)]);
    if let Some(namespace) = namespace {
        command.args(["--namespace", namespace]);
    }
    let output = command.output()?;
    ensure!(output.status.success(), "no role for {purpose} is printed");
    Ok(String::from_utf8(output.stdout)?)
}

fn role_name(purpose: &str) -> String {
    format!("e2e-{purpose}")
}

/// Gives the user of the checks exactly the rights that the validator requires, and no other.
fn grant(admin: &Kubectl, purpose: &str, namespace: Option<&str>) -> anyhow::Result<()> {
    admin.text(&["apply", "--filename", "-"], &role(purpose, namespace)?)?;
    let kind = if namespace.is_some() { "" } else { "Cluster" };
    let mut binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": format!("{kind}RoleBinding"),
        "metadata": {"name": role_name(purpose)},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": format!("{kind}Role"),
            "name": role_name(purpose),
        },
        "subjects": [{"kind": "User", "name": CHECKS_USER, "apiGroup": "rbac.authorization.k8s.io"}],
    });
    if let Some(namespace) = namespace {
        binding["metadata"]["namespace"] = json!(namespace);
    }
    create(admin, &binding, false)
}
