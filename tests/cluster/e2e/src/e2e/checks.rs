//! The checks that query the API server, on node objects of the test's own: right ones, and one
//! wrong in each way.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use super::certificates::EXPIRED_SERVER;
use super::cluster::{Cluster, Plugin, role};
use super::gpu_pods;
use super::server::{CHECKS_TOKEN, CHECKS_USER, Server};
use super::{JOBS, step};
use harness::simulate::{PreparedNode, Simulator};
use xtask::workspace;

/// A simulated node with one GPU and one with eight.
const ONE_GPU: &str = "h200x1";
const EIGHT_GPUS: &str = "h200x8";
/// The runtime class is of no use on a node whose containerd does not know its handler.
const CONTAINERD: &str = "host.container_runtime={containerd: true}";

pub(super) fn run(server: &Server) -> anyhow::Result<()> {
    let cluster = Cluster::prepare(server)?;
    let simulator = Simulator::build()?;
    let node = simulator.prepare(ONE_GPU, &[], &[CONTAINERD.to_owned()])?;
    let facts = collect(&node)?;
    let users = users(server)?;
    for (name, kubeconfig) in &users {
        cluster.healthy_node_passes(&node, &facts, name, kubeconfig)?;
    }
    for (index, case) in cases().iter().enumerate() {
        // Each user in turn, so that each way in is gone by many requests.
        let (_, kubeconfig) = &users[index % users.len()];
        cluster.case(&node, case, kubeconfig)?;
    }
    cluster.refusals(&node, &users)?;
    gpu_pods::one_gpu(&cluster, &node, &facts, &users[0].1)?;
    drop(node);
    let node = simulator.prepare(EIGHT_GPUS, &[], &[CONTAINERD.to_owned()])?;
    let facts = collect(&node)?;
    gpu_pods::eight_gpus(&cluster, &node, &facts, &users[1].1)
}

/// A node that is made for one case.
struct Case {
    name: &'static str,
    change: fn(&mut Value),
    plugin: Plugin,
    /// Lines that the profile's section `kubernetes` has beyond the usual.
    profile: &'static str,
    /// The one check that must not pass, its verdict, and words of its summary.
    check: &'static str,
    verdict: &'static str,
    words: &'static [&'static str],
}

/// Every check that requests an existing object from the API server.
const CHECKS: [&str; 6] = [
    "node_capacity",
    "node_labels",
    "node_taints",
    "node_conditions",
    "runtime_class",
    "device_plugin_pods",
];

fn cases() -> Vec<Case> {
    let case = |name, change, check, verdict, words| Case {
        name,
        change,
        plugin: Plugin::Ready,
        profile: "",
        check,
        verdict,
        words,
    };
    vec![
        case(
            "unhealthy-device",
            |node| node["status"]["allocatable"]["nvidia.com/gpu"] = json!("0"),
            "node_capacity",
            "fail",
            &["allocatable 0 of capacity 1 nvidia.com/gpu"],
        ),
        case(
            "too-many-devices",
            |node| {
                for amounts in ["capacity", "allocatable"] {
                    node["status"][amounts]["nvidia.com/gpu"] = json!("2");
                }
            },
            "node_capacity",
            "fail",
            &["capacity is 2, the node has 1", "1 too many"],
        ),
        case(
            "unknown-devices",
            |node| {
                for amounts in ["capacity", "allocatable"] {
                    node["status"][amounts] = json!({"cpu": "4"});
                }
            },
            "node_capacity",
            "fail",
            &["no resource nvidia.com/gpu"],
        ),
        case(
            "wrong-label",
            |node| node["metadata"]["labels"]["team"] = json!("b"),
            "node_labels",
            "fail",
            &["label team is `b`, the profile requires `a`"],
        ),
        case(
            "missing-taint",
            |node| node["spec"]["taints"] = json!([]),
            "node_taints",
            "fail",
            &["taint nvidia.com/gpu=true:NoSchedule is missing"],
        ),
        case(
            "not-ready",
            |node| {
                let ready = json!({"type": "Ready", "status": "False", "reason": "KubeletNotReady", "message": "cni plugin not initialized"});
                node["status"]["conditions"][0] = ready;
            },
            "node_conditions",
            "fail",
            &["KubeletNotReady", "cni plugin not initialized"],
        ),
        case(
            "memory-pressure",
            |node| {
                let pressure = json!({"type": "MemoryPressure", "status": "True", "reason": "KubeletHasInsufficientMemory"});
                node["status"]["conditions"][1] = pressure;
            },
            "node_conditions",
            "fail",
            &["MemoryPressure is True", "KubeletHasInsufficientMemory"],
        ),
        case(
            "cordoned",
            |node| node["spec"]["unschedulable"] = json!(true),
            "node_conditions",
            "warn",
            &["cordoned"],
        ),
        Case {
            profile: "  runtime_class: kata\n",
            ..case(
                "missing-runtime-class",
                |_| {},
                "runtime_class",
                "fail",
                &["no runtime class kata"],
            )
        },
        Case {
            plugin: Plugin::Crashes,
            ..case(
                "crashing-plugin",
                |_| {},
                "device_plugin_pods",
                "fail",
                &[
                    "CrashLoopBackOff: back-off 5m0s",
                    "restarted 4 times",
                    "could not load NVML library",
                    "BackOff: Back-off restarting failed container",
                ],
            )
        },
        Case {
            plugin: Plugin::Absent,
            ..case(
                "without-plugin",
                |node| {
                    node["spec"]["taints"] = json!([
                        {"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"},
                        {"key": "team", "value": "b", "effect": "NoExecute"},
                    ]);
                },
                "device_plugin_pods",
                "fail",
                &["has no pod on this node", "taint team=b:NoExecute"],
            )
        },
    ]
}

impl Cluster<'_> {
    /// One pass of every check, the GPU pod's too, as one user.
    fn healthy_node_passes(
        &self,
        node: &PreparedNode,
        facts: &Value,
        user: &str,
        kubeconfig: &Path,
    ) -> anyhow::Result<()> {
        let name = format!("healthy-by-{}", user.replace(' ', "-"));
        self.make_node(&name, 1)?;
        let ran = gpu_pods::run(
            self,
            node,
            facts,
            &name,
            kubeconfig,
            &[gpu_pods::Play::Right],
        )?;
        for check in CHECKS.iter().chain(&["gpu_pod_runs"]) {
            ran.expect(check, "pass", &[])?;
        }
        ran.ended_with(0)?;
        step(&format!(
            "node {name}: every check of the API passes, by {user}, over TLS"
        ));
        Ok(())
    }

    /// Exactly one check objects, in the words that are expected.
    fn case(&self, node: &PreparedNode, case: &Case, kubeconfig: &Path) -> anyhow::Result<()> {
        let mut object = self.node_object(case.name, 1);
        (case.change)(&mut object);
        self.make(&object, case.plugin)?;
        let profile = self.profile(case.name, kubeconfig, case.profile)?;
        let ran = self.run(node, case.name, &profile)?;
        for check in CHECKS {
            if check == case.check {
                ran.expect(check, case.verdict, case.words)?;
            } else {
                ran.expect(check, "pass", &[])?;
            }
        }
        ran.ended_with(i32::from(case.verdict == "fail"))?;
        step(&format!(
            "node {}: {} says {}",
            case.name, case.check, case.verdict
        ));
        Ok(())
    }

    /// What the API server, or TLS before it, refuses is an error with its reason and never a pass.
    fn refusals(&self, node: &PreparedNode, users: &[(&str, PathBuf)]) -> anyhow::Result<()> {
        self.make_node("refused", 1)?;
        let (server, token) = (self.server, json!({"token": CHECKS_TOKEN}));
        server
            .certificates()
            .user("expired-user", CHECKS_USER, -1)?;
        let nobody = self
            .admin
            .text(&["create", "token", "default", "--namespace", JOBS], "")?;
        let cases: [(&str, PathBuf, &[&str]); 5] = [
            (
                "an authority that did not sign",
                server.kubeconfig_distrusting("distrusting", &token)?,
                &["not signed by the certificate authority of the credentials"],
            ),
            (
                EXPIRED_SERVER,
                server.kubeconfig_expired("expired-server", &token)?,
                &["the API server's certificate is not valid at this time"],
            ),
            (
                "a user's certificate that has expired",
                server.kubeconfig("expired-user", &certificate_user(server, "expired-user"))?,
                &["does not accept the credentials (401)"],
            ),
            (
                "a token that nobody issued",
                server.kubeconfig("unknown-token", &json!({"token": "unknown"}))?,
                &["does not accept the credentials (401)"],
            ),
            (
                "a user without a role",
                server.kubeconfig("nobody", &json!({"token": nobody.trim()}))?,
                &["not allowed (403)", "no verb `get` on resource `nodes`"],
            ),
        ];
        for (what, kubeconfig, words) in cases {
            let profile = self.profile("refused", &kubeconfig, "")?;
            let ran = self.run(node, "refused", &profile)?;
            ran.expect("node_capacity", "error", words)?;
            ran.ended_with(2)?;
            step(&format!("{what}: {}", ran.summary("node_capacity")));
        }
        self.one_right_is_missing(node, users)
    }

    /// A role without one verb: that one check cannot look, and names the verb.
    fn one_right_is_missing(
        &self,
        node: &PreparedNode,
        users: &[(&str, PathBuf)],
    ) -> anyhow::Result<()> {
        let role = role("checks", None)?;
        let without = role.replace("daemonsets", "deployments");
        ensure!(role != without, "the checks ask for no DaemonSets:\n{role}");
        self.admin
            .text(&["apply", "--filename", "-"], &without)
            .context("the role")?;
        let profile = self.profile("refused", &users[0].1, "")?;
        let ran = self.run(node, "refused", &profile)?;
        let words = [
            "not allowed (403)",
            "no verb `list` on resource `daemonsets` of API group `apps`",
        ];
        ran.expect("device_plugin_pods", "error", &words)?;
        ran.expect("node_capacity", "pass", &[])?;
        ran.ended_with(2)?;
        self.admin.text(&["apply", "--filename", "-"], &role)?;
        step("a role without one verb: that check alone is an error, and names the verb");
        Ok(())
    }
}

/// What a pod that sees all GPUs of the node would print.
fn collect(node: &PreparedNode) -> anyhow::Result<Value> {
    let mut command = Command::new(workspace::target().join("debug/gpu-validator"));
    workspace::without_cargos_library_path(&mut command);
    command
        .args(["collect", "--level=standard", "--no-burn", "--sysroot"])
        .arg(node.sysroot());
    node.apply_environment(&mut command);
    let output = command.output()?;
    serde_json::from_slice(&output.stdout).with_context(|| {
        format!(
            "gpu-validator collect printed no facts: {}",
            String::from_utf8_lossy(&output.stderr)
        )
    })
}

/// The same user by each way of saying who it is.
fn users(server: &Server) -> anyhow::Result<[(&'static str, PathBuf); 3]> {
    server.certificates().user("user", CHECKS_USER, 1)?;
    let certificate = certificate_user(server, "user");
    let exec = exec_plugin(server)?;
    Ok([
        (
            "client certificate",
            server.kubeconfig("by-certificate", &certificate)?,
        ),
        (
            "token",
            server.kubeconfig("by-token", &json!({"token": CHECKS_TOKEN}))?,
        ),
        ("exec plugin", server.kubeconfig("by-exec-plugin", &exec)?),
    ])
}

fn certificate_user(server: &Server, name: &str) -> Value {
    json!({
        "client-certificate": server.certificates().certificate(name),
        "client-key": server.certificates().key(name),
    })
}

/// A script that answers as `aws eks get-token` does, and only to a caller that states what it
/// expects.
fn exec_plugin(server: &Server) -> anyhow::Result<Value> {
    use std::os::unix::fs::PermissionsExt as _;
    let script = server.folder().join("get-token");
    std::fs::write(
        &script,
        format!(
            "#!/bin/sh\ncase \"$KUBERNETES_EXEC_INFO\" in\n*client.authentication.k8s.io/v1*) ;;\n\
             *) echo 'KUBERNETES_EXEC_INFO is not set' >&2; exit 1 ;;\nesac\n\
             echo '{{\"kind\": \"ExecCredential\", \"apiVersion\": \"client.authentication.k8s.io/v1\", \
             \"status\": {{\"token\": \"{CHECKS_TOKEN}\"}}}}'\n"
        ),
    )?;
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755))?;
    Ok(json!({"exec": {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": script,
        "interactiveMode": "Never",
    }}))
}
