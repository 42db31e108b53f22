//! The checks that ask the API server, on node objects of the test's own: right ones, and one wrong
//! in each way.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use super::certificates::EXPIRED_SERVER;
use super::gpu_pods;
use super::kubelet::{self, Logs};
use super::server::{ADMIN_TOKEN, CHECKS_TOKEN, CHECKS_USER, Server};
use super::{JOBS, create, step};
use harness::simulate::{PreparedNode, Simulator};
use kubernetes_tasks::kubectl::Kubectl;
use kubernetes_tasks::manifests::Manifests;
use xtask::workspace;

/// A simulated node with one GPU and one with eight.
const ONE_GPU: &str = "h200x1";
const EIGHT_GPUS: &str = "h200x8";
/// The runtime class is of no use on a node whose containerd does not know its handler.
const CONTAINERD: &str = "host.container_runtime={containerd: true}";
const PLUGIN: &str = "nvidia-device-plugin-daemonset";
const PLUGINS_NAMESPACE: &str = "kube-system";
const PLUGINS_CONTAINER: &str = "nvidia-device-plugin-ctr";

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

/// Everything that the checks ask about, but for the nodes.
#[derive(Debug)]
pub(super) struct Cluster<'a> {
    pub(super) server: &'a Server,
    pub(super) admin: Kubectl,
    pub(super) logs: Logs,
    daemon_set: Value,
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

/// The device plugin's pod on the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plugin {
    Ready,
    Crashes,
    Absent,
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

impl<'a> Cluster<'a> {
    fn prepare(server: &'a Server) -> anyhow::Result<Cluster<'a>> {
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

    fn node_object(&self, name: &str, gpus: usize) -> Value {
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

    fn make(&self, node: &Value, plugin: Plugin) -> anyhow::Result<()> {
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
            self.say_why_it_crashes(&name)?;
        }
        Ok(())
    }

    fn say_why_it_crashes(&self, pod: &str) -> anyhow::Result<()> {
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

/// The validator on a simulated node.
pub(super) fn validator(node: &PreparedNode, arguments: &[&str]) -> Command {
    let mut command = Command::new(workspace::target().join("debug/gpu-validator"));
    command.args(arguments);
    workspace::without_cargos_library_path(&mut command);
    node.apply(&mut command);
    command
}

/// What a pod that sees all GPUs of the node would print.
fn collect(node: &PreparedNode) -> anyhow::Result<Value> {
    let output = validator(node, &["collect", "--level=standard", "--no-burn"]).output()?;
    serde_json::from_slice(&output.stdout).with_context(|| {
        format!(
            "gpu-validator collect printed no facts: {}",
            String::from_utf8_lossy(&output.stderr)
        )
    })
}

/// How a run of the validator ended.
#[derive(Debug)]
pub(super) struct Ran {
    report: Value,
    code: Option<i32>,
    said: String,
}

impl Ran {
    pub(super) fn of(output: &std::process::Output, report: &Path) -> anyhow::Result<Ran> {
        let said = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        let text = std::fs::read_to_string(report)
            .with_context(|| format!("gpu-validator left no report:\n{said}"))?;
        Ok(Ran {
            report: serde_json::from_str(&text)?,
            code: output.status.code(),
            said,
        })
    }

    fn finding(&self, check: &str) -> &Value {
        let findings = self.report["findings"].as_array();
        findings
            .into_iter()
            .flatten()
            .find(|it| it["check"] == check)
            .unwrap_or(&Value::Null)
    }

    pub(super) fn summary(&self, check: &str) -> &str {
        self.finding(check)["summary"].as_str().unwrap_or_default()
    }

    pub(super) fn expect(&self, check: &str, verdict: &str, words: &[&str]) -> anyhow::Result<()> {
        let finding = self.finding(check);
        ensure!(
            finding["verdict"] == verdict,
            "{check} says {finding}, expected {verdict}"
        );
        for word in words {
            ensure!(
                self.summary(check).contains(word),
                "{check} says `{}`, expected `{word}` in it",
                self.summary(check)
            );
        }
        Ok(())
    }

    pub(super) fn ended_with(&self, code: i32) -> anyhow::Result<()> {
        ensure!(
            self.code == Some(code),
            "the run ended with {:?}, expected {code}:\n{}",
            self.code,
            self.said
        );
        Ok(())
    }
}

/// A role as `gpu-validator kubernetes rbac` prints it.
fn role(purpose: &str, namespace: Option<&str>) -> anyhow::Result<String> {
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
