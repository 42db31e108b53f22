//! Simulated nodes in a cluster of the tests' own: the checks' verdicts on it, and the gate's
//! updates of it.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cluster::api_server::{ApiServer, Fault, Pods, Recorded};
use cluster::kubelet::{Container, Kubelet, KubeletScript, Socket};
use serde_json::{Value, json};

use crate::node::{Node, Ran, said, set, texts, validator};

const TOKEN: &str = "the-tests-token";
pub(crate) const NODE: &str = "gpu-node-1";
pub(crate) const UNVALIDATED: &str = "gpu-bringup.dev/unvalidated";
/// Burns have tests of their own.
const NO_BURN: &str = "levels: {standard: {burn: {enabled: false}}}\n";

/// A simulated node, its kubelet's list, and the API server that it belongs to.
pub(crate) struct Cluster {
    pub(crate) node: Node,
    pub(crate) server: ApiServer,
    /// What containers may be given: GPUs, or the parts of GPUs in MIG mode.
    uuids: Vec<String>,
    pub(crate) facts: Value,
}

impl Cluster {
    pub(crate) fn of(node: Node) -> Self {
        let mut collect = node.validator();
        collect
            .args(["collect", "--level", "standard", "--no-burn", "--sysroot"])
            .arg(node.sysroot());
        let (code, stdout, stderr) = said(&mut collect);
        assert_eq!(code, 0, "{stderr}");
        let facts: Value = serde_json::from_str(&stdout).expect("facts");
        let uuids: Vec<String> = array(&facts["gpus"]).flat_map(devices_of).collect();
        let server = ApiServer::start();
        server.accept_only(TOKEN);
        server.add_node(node_object(uuids.len()));
        server.add_runtime_class("nvidia", "nvidia");
        node.out.write("kubeconfig", server.kubeconfig(TOKEN));
        Self {
            node,
            server,
            uuids,
            facts,
        }
    }

    pub(crate) fn healthy(name: &str) -> Self {
        Self::of(Node::healthy(name))
    }

    pub(crate) fn kubelet(&self, change: impl FnOnce(&mut KubeletScript)) -> Kubelet {
        let mut script = KubeletScript::healthy(&self.uuids);
        change(&mut script);
        Kubelet::start(&self.node.sysroot().join("var/lib/kubelet"), script)
    }

    /// A profile for this cluster; `more` are lines of its section `kubernetes`.
    pub(crate) fn profile(&self, more: &str) -> String {
        let kubeconfig = self.node.out.path("kubeconfig");
        let profile = format!(
            "{NO_BURN}kubernetes:\n  required: true\n  node_name: {NODE}\n  \
             api: {{required: true, allow_insecure: true, kubeconfig: {}}}\n{more}",
            kubeconfig.display()
        );
        let path = self.node.out.write("profile.yaml", profile);
        path.to_str().expect("UTF-8").to_owned()
    }

    fn run(&self, more: &str) -> Ran {
        let profile = self.profile(more);
        self.node
            .run(&["--profile", &profile, "--deadline-scale", "0.4"])
    }

    pub(crate) fn gate(&self, arguments: &[&str]) -> Command {
        let mut gate = self.node.validator();
        gate.args(["kubernetes", "gate", "--sysroot"])
            .arg(self.node.sysroot())
            .arg("--json")
            .arg(self.node.out.path("report.json"))
            .args(["--profile", &self.profile("")])
            .env_remove("NODE_NAME")
            .args(arguments);
        gate
    }

    /// The gate on facts that were written before.
    fn gated_by(&self, facts: &Value) -> (i32, String, String) {
        let kubeconfig = self.node.out.path("kubeconfig");
        let profile = format!(
            "{NO_BURN}kubernetes: {{api: {{allow_insecure: true, kubeconfig: {}}}}}",
            kubeconfig.display()
        );
        let mut gate = validator();
        gate.args(["kubernetes", "gate", "--allow-simulated"])
            .args(["--node-name", NODE, "--profile"])
            .arg(self.node.out.write("gate.yaml", profile))
            .arg("--judge")
            .arg(self.node.out.write("facts.json", facts.to_string()));
        said(&mut gate)
    }

    fn gated(&self, arguments: &[&str]) -> (i32, String, String) {
        said(&mut self.gate(arguments))
    }

    pub(crate) fn taints(&self) -> Vec<String> {
        let node = self.server.node(NODE);
        array(&node["spec"]["taints"])
            .map(|it| it["key"].as_str().expect("a key").to_owned())
            .collect()
    }

    pub(crate) fn condition(&self) -> Value {
        let node = self.server.node(NODE);
        let found = array(&node["status"]["conditions"]).find(|it| it["type"] == "GpuValidated");
        found.cloned().unwrap_or_default()
    }

    /// The output of `gpu-validator collect` in a pod with this device.
    fn pod_log(&self, uuid: &str) -> String {
        let mut facts = self.facts.clone();
        let keep = |list: &mut Value, is_it: &dyn Fn(&Value) -> bool| {
            if let Some(list) = list.as_array_mut() {
                list.retain(|it| is_it(it));
            }
        };
        keep(&mut facts["gpus"], &|it| it["uuid"]["value"] == uuid);
        keep(&mut facts["cuda"]["devices"]["value"], &|it| {
            it["uuid"] == uuid
        });
        serde_json::to_string_pretty(&facts).expect("JSON")
    }
}

fn array(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn devices_of(gpu: &Value) -> Vec<String> {
    let text = |value: &Value| value.as_str().expect("a UUID").to_owned();
    if gpu["mig"]["value"]["current"] == true {
        return array(&gpu["mig_devices"]["value"])
            .map(|it| text(&it["uuid"]))
            .collect();
    }
    vec![text(&gpu["uuid"]["value"])]
}

fn node_object(devices: usize) -> Value {
    json!({
        "metadata": {"name": NODE, "resourceVersion": "1", "labels": {"nvidia.com/gpu": "true"}},
        "spec": {"taints": [
            {"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"},
            {"key": UNVALIDATED, "effect": "NoSchedule"},
        ]},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "capacity": {"nvidia.com/gpu": devices.to_string()},
            "allocatable": {"nvidia.com/gpu": devices.to_string()},
        },
    })
}

/// The verdict of each check of Kubernetes.
fn verdicts(ran: &Ran) -> Vec<(&'static str, String)> {
    const CHECKS: [&str; 11] = [
        "device_plugin_allocatable",
        "device_plugin_assignments",
        "device_plugin_devices",
        "device_plugin_pods",
        "device_plugin_registered",
        "gpu_pod_runs",
        "node_capacity",
        "node_conditions",
        "node_labels",
        "node_taints",
        "runtime_class",
    ];
    CHECKS
        .into_iter()
        .map(|check| {
            let verdict = ran.report.finding(check)["verdict"].as_str();
            (check, verdict.expect("a verdict").to_owned())
        })
        .collect()
}

#[test]
fn a_healthy_node_in_a_healthy_cluster_passes_every_check() {
    let cluster = Cluster::healthy("h200x8");
    let kubelet = cluster.kubelet(|_| {});
    cluster
        .server
        .offer_gpus(cluster.uuids.iter().map(|uuid| cluster.pod_log(uuid)));
    cluster.server.add_daemon_set(json!({
        "metadata": {"name": "nvidia-device-plugin", "namespace": "kube-system", "uid": "d"},
        "status": {"desiredNumberScheduled": 1, "numberReady": 1},
    }));
    cluster.server.add_pod(json!({
        "metadata": {"name": "p", "namespace": "kube-system", "ownerReferences": [{"uid": "d"}]},
        "spec": {"nodeName": NODE},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }));
    let ran = cluster.run(
        "  list_and_watch: true
  labels: {nvidia.com/gpu: 'true'}
  taints: ['nvidia.com/gpu=true:NoSchedule']
  device_plugin_daemon_set: required
  gpu_pod: {run: true, image: registry.example/gpu-validator}
",
    );
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    for (check, verdict) in verdicts(&ran) {
        let expected = if check == "runtime_class" {
            "skip"
        } else {
            "pass"
        };
        let finding = ran.report.finding(check);
        assert_eq!(verdict, expected, "{check}: {finding}");
    }
    let names: Vec<Value> = cluster.server.pods();
    assert_eq!(names.len(), 1, "the pods that looked at the GPUs are gone");
    assert!(kubelet.calls().contains(&"ListAndWatch"));
    let made = |it: &&Recorded| it.verb == "create";
    assert_eq!(cluster.server.requests().iter().filter(made).count(), 8);
}

#[test]
fn level_quick_asks_neither_kubelet_nor_api_server() {
    let cluster = Cluster::healthy("h200x1");
    let kubelet = cluster.kubelet(|_| {});
    let profile = cluster.profile("");
    let ran = cluster
        .node
        .run(&["--level", "quick", "--profile", &profile]);
    assert_eq!(ran.code, 0, "{}", ran.stdout);
    assert!(kubelet.calls().is_empty());
    assert!(cluster.server.requests().is_empty());
}

type Change<'a> = Box<dyn Fn(&mut KubeletScript) + 'a>;

#[test]
fn what_the_kubelet_has_wrong_is_found() {
    let cluster = Cluster::healthy("h200x1");
    let first = &cluster.uuids[0];
    let container = |pod: &str| Container {
        namespace: "team".to_owned(),
        pod: pod.to_owned(),
        container: "train".to_owned(),
        resource: "nvidia.com/gpu".to_owned(),
        device_ids: vec![first.clone()],
    };
    let ids = |script: &mut KubeletScript, change: &dyn Fn(&mut Vec<String>)| {
        change(script.allocatable.get_mut("nvidia.com/gpu").expect("GPUs"));
    };
    let cases: [(Change<'_>, &[&str]); 6] = [
        (
            Box::new(|script| ids(script, &|ids| drop(ids.pop()))),
            &["device_plugin_allocatable: fail"],
        ),
        (
            Box::new(|script| ids(script, &|ids| ids[0] = "GPU-of-another-node".to_owned())),
            &["device_plugin_allocatable: fail"],
        ),
        (
            Box::new(|script| script.containers = vec![container("a"), container("b")]),
            &["device_plugin_assignments: fail"],
        ),
        (
            Box::new(|script| script.devices[0].1 = "Unhealthy".to_owned()),
            &["device_plugin_devices: fail"],
        ),
        (
            Box::new(|script| script.plugin = Socket::Stale),
            &["device_plugin_registered: fail"],
        ),
        (
            Box::new(|script| script.pod_resources = Socket::Hangs),
            &[
                "device_plugin_allocatable: error",
                "device_plugin_assignments: error",
            ],
        ),
    ];
    for (change, expected) in cases {
        let _kubelet = cluster.kubelet(|script| change(script));
        let ran = cluster.run("  list_and_watch: true\n");
        assert_eq!(ran.report.not_green(), set(expected), "{}", ran.stdout);
    }
}

#[test]
fn shared_gpus_and_parts_of_gpus_are_understood() {
    let cluster = Cluster::healthy("h200x1");
    let shares = |script: &mut KubeletScript| {
        let ids = script.allocatable.get_mut("nvidia.com/gpu").expect("GPUs");
        *ids = (0..4).map(|share| format!("{}::{share}", ids[0])).collect();
    };
    cluster.server.change_node(|node| {
        node["status"]["capacity"]["nvidia.com/gpu"] = json!("4");
        node["status"]["allocatable"]["nvidia.com/gpu"] = json!("4");
    });
    let _kubelet = cluster.kubelet(shares);
    let ran = cluster.run("  replicas: 4\n");
    assert_eq!(ran.code, 0, "{}", ran.stdout);

    let cluster = Cluster::healthy("mig");
    assert!(cluster.uuids.iter().any(|it| it.starts_with("MIG-")));
    let _kubelet = cluster.kubelet(|_| {});
    let ran = cluster.run("");
    for check in ["device_plugin_allocatable", "node_capacity"] {
        assert_eq!(
            ran.report.finding(check)["verdict"],
            "pass",
            "{}",
            ran.stdout
        );
    }
}

#[test]
fn a_process_that_was_given_no_gpu_is_found() {
    let cluster = Cluster::of(Node::with_fault("h200x8", "foreign-process"));
    let _kubelet = cluster.kubelet(|_| {});
    let cgroup = "proc/4000001/cgroup";
    let path = cluster.node.sysroot().join(cgroup);
    std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
    std::fs::write(&path, "0::/user.slice/session-3.scope\n").expect("written");
    let ran = cluster.run("");
    assert_eq!(
        ran.report.not_green(),
        set(&["device_plugin_assignments: fail", "foreign_processes: warn"])
    );
    let summary = ran.report.finding("device_plugin_assignments")["summary"].to_string();
    assert!(
        summary.contains("belongs to no pod, but to /user.slice/session-3.scope"),
        "{summary}"
    );
}

#[test]
fn an_api_server_that_refuses_is_an_error_with_the_missing_right() {
    let cluster = Cluster::healthy("h200x1");
    let _kubelet = cluster.kubelet(|_| {});
    cluster.server.enforce(&json!({"rules": []}));
    let ran = cluster.run("");
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    let summary = ran.report.finding("node_capacity")["summary"].to_string();
    assert!(
        summary.contains("no verb `get` on resource `nodes`"),
        "{summary}"
    );
}

#[test]
fn a_kubelet_that_is_required_and_absent_is_an_error() {
    let cluster = Cluster::healthy("h200x1");
    let ran = cluster.run("");
    let summary = ran.report.finding("device_plugin_registered")["summary"].to_string();
    assert_eq!(ran.code, 2);
    assert!(
        summary.contains("none has made its folders in /var/lib/kubelet"),
        "{summary}"
    );
}

#[test]
fn the_gate_opens_a_node_that_passes_with_exactly_its_rights() {
    let cluster = Cluster::healthy("h200x1");
    let role = said(validator().args(["kubernetes", "rbac", "gate"]));
    // The API's checks need more; without a kubelet and without being required they request
    // nothing.
    let yaml = role
        .1
        .lines()
        .filter(|it| it.trim_start().starts_with(['-', 'r', 'v']));
    assert!(
        yaml.clone().any(|it| it.contains("\"nodes/status\"")),
        "{}",
        role.1
    );
    let rules = json!({"rules": [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]},
        {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
        {
            "apiGroups": ["resource.k8s.io"],
            "resources": ["devicetaintrules"],
            "verbs": ["create", "patch", "delete"],
        },
    ]});
    cluster.server.enforce(&rules);
    let kubeconfig = cluster.node.out.path("kubeconfig");
    let profile = format!(
        "{NO_BURN}kubernetes: {{api: {{allow_insecure: true, kubeconfig: {}}}}}",
        kubeconfig.display()
    );
    let profile = cluster.node.out.write("gate.yaml", profile);
    let mut gate = cluster.node.validator();
    gate.args(["kubernetes", "gate", "--allow-simulated", "--sysroot"])
        .arg(cluster.node.sysroot())
        .arg("--profile")
        .arg(profile)
        .env("NODE_NAME", NODE);
    let (code, stdout, stderr) = said(&mut gate);
    assert_eq!(code, 0, "{stdout}{stderr}");
    let last = stdout.lines().last().expect("a line");
    assert_eq!(
        last,
        "node gpu-node-1: GpuValidated=True (ValidationPassed), taint gpu-bringup.dev/unvalidated:NoSchedule removed"
    );
    assert_eq!(cluster.taints(), ["nvidia.com/gpu"]);
    let condition = cluster.condition();
    assert_eq!(condition["status"], "True");
    let message = condition["message"].as_str().expect("a message");
    assert!(
        message.starts_with("node is ready: 1 GPU judged"),
        "{message}"
    );
    let node = cluster.server.node(NODE);
    let summary = &node["metadata"]["annotations"]["gpu-bringup.dev/validation"];
    let summary: Value = serde_json::from_str(summary.as_str().expect("text")).expect("JSON");
    assert_eq!(
        (&summary["exitCode"], &summary["gpus"]),
        (&json!(0), &json!(1))
    );
    let ready = array(&node["status"]["conditions"]).any(|it| it["type"] == "Ready");
    assert!(ready, "other conditions stay");
    let requests = cluster.server.requests();
    let condition_at = requests.iter().position(|it| it.resource == "nodes/status");
    let opened_at = requests
        .iter()
        .position(|it| it.verb == "patch" && it.resource == "nodes");
    assert!(
        condition_at < opened_at,
        "a node that is open has its condition"
    );
}

#[test]
fn the_gate_closes_a_node_that_fails() {
    let cluster = Cluster::of(Node::with_fault("h200x1", "ecc-volatile-uncorrectable"));
    let _kubelet = cluster.kubelet(|_| {});
    cluster
        .server
        .change_node(|node| node["spec"]["taints"] = json!([]));
    let (code, stdout, stderr) = cluster.gated(&["--allow-simulated"]);
    assert_eq!(code, 1, "{stdout}{stderr}");
    assert_eq!(cluster.taints(), [UNVALIDATED]);
    let condition = cluster.condition();
    assert_eq!(
        (&condition["status"], &condition["reason"]),
        (&json!("False"), &json!("ValidationFailed"))
    );
    let requests = cluster.server.requests();
    let at = |resource: &str| {
        requests
            .iter()
            .position(|it| it.verb == "patch" && it.resource == resource)
    };
    assert!(
        at("nodes") < at("nodes/status"),
        "it is closed before it says so"
    );
}

/// 1.37 serves the kind at v1, 1.36 at v1beta2 where it is enabled.
#[test]
fn the_gate_taints_the_devices_of_a_node_that_fails_where_the_cluster_has_such_taints() {
    for version in ["v1", "v1beta2"] {
        let broken = Node::with_fault("h200x1", "ecc-volatile-uncorrectable");
        let cluster = Cluster::of(broken);
        let _kubelet = cluster.kubelet(|_| {});
        let (code, stdout, stderr) = cluster.gated(&["--allow-simulated"]);
        assert_eq!(code, 1, "{stdout}{stderr}");
        assert!(!stdout.contains("DeviceTaintRule"), "{stdout}");
        cluster.server.serve_device_taint_rules(version);
        let (code, stdout, stderr) = cluster.gated(&["--allow-simulated"]);
        assert_eq!(code, 1, "{stdout}{stderr}");
        assert!(
            stdout.ends_with("left on, DeviceTaintRule applied\n"),
            "{stdout}"
        );
        let rule = json!({
            "apiVersion": format!("resource.k8s.io/{version}"),
            "kind": "DeviceTaintRule",
            "metadata": {
                "name": format!("gpu-validator.{NODE}"),
                "labels": {"app.kubernetes.io/part-of": "gpu-bringup"},
                "ownerReferences": [
                    {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": format!("uid-of-{NODE}")},
                ],
            },
            "spec": {
                "deviceSelector": {"driver": "gpu.nvidia.com", "pool": NODE},
                "taint": {"key": UNVALIDATED, "value": "ValidationFailed", "effect": "NoSchedule"},
            },
        });
        assert_eq!(cluster.server.device_taint_rules(), [rule]);
    }
}

#[test]
fn a_pass_removes_the_taint_of_the_devices_before_the_nodes() {
    let cluster = Cluster::of(Node::with_fault("h200x1", "ecc-volatile-uncorrectable"));
    let _kubelet = cluster.kubelet(|_| {});
    cluster.server.serve_device_taint_rules("v1");
    assert_eq!(cluster.gated(&["--allow-simulated"]).0, 1);
    assert_eq!(cluster.server.device_taint_rules().len(), 1);
    let repaired = Cluster::healthy("h200x1").facts;
    let (code, stdout, stderr) = cluster.gated_by(&repaired);
    assert_eq!(code, 0, "{stdout}{stderr}");
    assert!(
        stdout.ends_with("removed, DeviceTaintRule deleted\n"),
        "{stdout}"
    );
    assert!(cluster.server.device_taint_rules().is_empty());
    let requests = cluster.server.requests();
    let deleted_at = requests.iter().position(|it| it.verb == "delete");
    let opened_at = requests
        .iter()
        .rposition(|it| it.verb == "patch" && it.resource == "nodes");
    assert!(
        deleted_at.is_some() && deleted_at < opened_at,
        "an open node has GPUs"
    );
    let (code, stdout, _) = cluster.gated_by(&repaired);
    assert_eq!(code, 0, "{stdout}");
    assert!(
        !stdout.contains("DeviceTaintRule"),
        "there is none: {stdout}"
    );
}

#[test]
fn a_taint_of_devices_that_is_refused_or_has_no_effect_on_devices_is_reported() {
    let cluster = Cluster::of(Node::with_fault("h200x1", "ecc-volatile-uncorrectable"));
    let _kubelet = cluster.kubelet(|_| {});
    cluster.server.serve_device_taint_rules("v1");
    cluster.server.enforce(&json!({"rules": [
        {"apiGroups": [""], "resources": ["nodes", "nodes/status"], "verbs": ["get", "patch"]},
        {"apiGroups": ["resource.k8s.io"], "resources": ["devicetaintrules"], "verbs": ["patch"]},
    ]}));
    let (code, _, stderr) = cluster.gated(&["--allow-simulated"]);
    assert_eq!(code, 1);
    assert!(
        stderr.contains("cannot create resource \"devicetaintrules\""),
        "{stderr}"
    );
    assert!(cluster.taints().contains(&UNVALIDATED.to_owned()));
    // Devices have no such effect; the node has.
    let preferred = format!("{UNVALIDATED}:PreferNoSchedule");
    let (code, stdout, stderr) = cluster.gated(&["--allow-simulated", "--taint", &preferred]);
    assert_eq!(code, 1, "{stderr}");
    assert!(stdout.ends_with("PreferNoSchedule added\n"), "{stdout}");
}

#[test]
fn the_gate_never_opens_a_simulated_node_unless_a_test_says_so() {
    let cluster = Cluster::healthy("h200x1");
    let _kubelet = cluster.kubelet(|_| {});
    let (code, stdout, _) = cluster.gated(&[]);
    assert_eq!(code, 2, "{stdout}");
    assert_eq!(cluster.taints(), ["nvidia.com/gpu", UNVALIDATED]);
    let condition = cluster.condition();
    assert_eq!(
        (&condition["status"], &condition["reason"]),
        (&json!("Unknown"), &json!("NotJudged"))
    );
}

#[test]
fn somebody_elses_change_to_the_node_is_kept() {
    let cluster = Cluster::healthy("h200x1");
    let _kubelet = cluster.kubelet(|_| {});
    // One conflict for the condition, which needs no version, and two for the taint.
    cluster.server.conflict(3);
    let (code, stdout, stderr) = cluster.gated(&["--allow-simulated"]);
    assert_eq!(code, 0, "{stdout}{stderr}");
    assert_eq!(cluster.taints(), ["nvidia.com/gpu"]);
    cluster.server.change_node(|node| {
        node["spec"]["taints"] = json!([{"key": UNVALIDATED, "effect": "NoSchedule"}]);
    });
    cluster.server.conflict(99);
    let (code, _, stderr) = cluster.gated(&["--allow-simulated"]);
    assert_eq!(code, 2, "it gives up");
    assert!(stderr.contains("the object was changed"), "{stderr}");
    assert_eq!(cluster.taints(), [UNVALIDATED]);
}

#[test]
fn a_gate_that_cannot_tell_the_cluster_is_no_pass() {
    let cluster = Cluster::healthy("h200x1");
    let _kubelet = cluster.kubelet(|_| {});
    let refuse = Fault::Status {
        code: 403,
        message: "nodes \"gpu-node-1\" is forbidden".to_owned(),
        retry_after: None,
    };
    let path = "/api/v1/nodes/gpu-node-1/status";
    cluster.server.fail("PATCH", path, 99, refuse);
    let (code, _, stderr) = cluster.gated(&["--allow-simulated"]);
    assert_eq!(code, 2);
    assert!(stderr.contains("the cluster was not updated"), "{stderr}");
    assert!(
        stderr.contains("no verb `patch` on resource `nodes/status`"),
        "{stderr}"
    );
    assert_eq!(
        cluster.taints(),
        ["nvidia.com/gpu", UNVALIDATED],
        "it stays closed"
    );
}

#[test]
fn the_gate_judges_facts_that_were_just_written() {
    let cluster = Cluster::healthy("h200x1");
    let facts = cluster
        .node
        .out
        .write("facts.json", cluster.facts.to_string());
    let kubeconfig = cluster.node.out.path("kubeconfig");
    let profile = format!(
        "{NO_BURN}kubernetes: {{api: {{allow_insecure: true, kubeconfig: {}}}}}",
        kubeconfig.display()
    );
    let profile = cluster.node.out.write("gate.yaml", profile);
    let gate = |arguments: &[&str]| {
        let mut gate = validator();
        gate.args([
            "kubernetes",
            "gate",
            "--allow-simulated",
            "--node-name",
            NODE,
            "--judge",
        ])
        .arg(&facts)
        .arg("--profile")
        .arg(&profile)
        .args(arguments);
        said(&mut gate)
    };
    let (code, stdout, _) = gate(&["--dry-run"]);
    assert_eq!(code, 0, "{stdout}");
    assert!(
        stdout.contains("dry run: node gpu-node-1 would get GpuValidated=True"),
        "{stdout}"
    );
    assert!(cluster.server.requests().is_empty());
    assert_eq!(gate(&[]).0, 0);
    assert_eq!(cluster.taints(), ["nvidia.com/gpu"]);
    let (code, _, stderr) = gate(&["--taint", "nonsense"]);
    assert_eq!(code, 3);
    assert!(stderr.contains("`nonsense` is not a taint"), "{stderr}");
}

#[test]
fn pods_are_removed_when_the_run_is_stopped() {
    let cluster = Cluster::healthy("h200x1");
    let _kubelet = cluster.kubelet(|_| {});
    cluster.server.let_pods(Pods::RunForEver);
    let profile =
        cluster.profile("  gpu_pod: {run: true, image: registry.example/gpu-validator}\n");
    let mut run = cluster.node.run_command(&["--profile", &profile]);
    let child = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.expect("the validator starts");
    let start = Instant::now();
    while cluster.server.pods().is_empty() {
        assert!(start.elapsed() < Duration::from_secs(30), "no pod was made");
        std::thread::sleep(Duration::from_millis(20));
    }
    let kill = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status();
    assert!(kill.expect("kill").success());
    let (code, stdout, _) = texts(child.wait_with_output().expect("it ends"));
    assert_eq!(code, 2, "{stdout}");
    assert!(cluster.server.pods().is_empty(), "they are removed");
}

#[test]
fn a_gate_that_stays_ends_with_sigterm() {
    let cluster = Cluster::healthy("h200x1");
    let _kubelet = cluster.kubelet(|_| {});
    let mut gate = cluster.gate(&["--allow-simulated", "--stay"]);
    let child = gate.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.expect("the validator starts");
    let start = Instant::now();
    while cluster.taints().contains(&UNVALIDATED.to_owned()) {
        assert!(
            start.elapsed() < Duration::from_secs(30),
            "the node was not opened"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(child.try_wait().expect("asked").is_none(), "it stays");
    let kill = Command::new("kill")
        .args(["-TERM", &child.id().to_string()])
        .status();
    assert!(kill.expect("kill").success());
    let (code, _, stderr) = texts(child.wait_with_output().expect("it ends"));
    assert_eq!(code, 0, "{stderr}");
}
