//! `cargo xtask k8s e2e`: the manifests and the gate against a real API server, with etcd, on this
//! machine.
//!
//! There is no kubelet and no controller: nodes and pods are objects that this task makes. What is
//! tried is what the API server decides: whether it takes the manifests, what the gate's account
//! may do, and what the gate changes.

mod certificates;
mod checks;
mod cluster;
mod commands;
mod gpu_pods;
mod kubelet;
mod own_devices;
mod own_node;
mod ran;
mod server;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use commands::Commands;
use serde_json::{Value, json};
use server::Server;

use harness::simulate::Simulator;
use kubernetes_tasks::check::{self, Asked, Right};
use kubernetes_tasks::kubectl::Kubectl;
use kubernetes_tasks::manifests::{Manifests, Overlay};
use xtask::workspace;

const SYSTEM: &str = "gpu-bringup-system";
const JOBS: &str = "gpu-bringup";
const GATE: &str = "gpu-validator-gate";
const TAINT: &str = "gpu-bringup.dev/unvalidated";
/// A policy reaches the part of the API server that applies it within about a second.
const POLICY_DEADLINE: Duration = Duration::from_secs(20);

/// Try manifests and gate on a real API server on this machine
///
/// Needs etcd (Debian: etcd-server) and openssl; kube-apiserver and kubectl are built from their Go
/// module, which takes ten minutes once. CI does not run it.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The server's folder is kept, logs included
    #[arg(long)]
    keep: bool,
    /// A folder with GitHub's charts gha-runner-scale-set and gha-runner-scale-set-controller, for
    /// the runners
    #[arg(long, value_name = "DIR")]
    charts: Option<PathBuf>,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let shell = workspace::shell()?;
    let asked = check::asked(&shell)?;
    let server = Server::start(arguments.keep)?;
    let admin = server.kubectl(server::ADMIN_TOKEN);
    let commands = Commands::new(&server)?;
    commands.apply()?;
    // A controller makes these in a cluster; pods are refused without them.
    for namespace in [SYSTEM, JOBS, "kube-system"] {
        let account = [
            "create",
            "serviceaccount",
            "default",
            "--namespace",
            namespace,
        ];
        admin.text(&account, "")?;
    }
    accounts_have_their_rights(&admin, &asked)?;
    pods_fit_their_namespaces(&admin)?;
    commands.validate()?;
    gate_opens_and_closes(&server, &admin)?;
    checks::run(&server)?;
    commands.runners(arguments.charts.as_deref())?;
    commands.delete()?;
    println!(
        "k8s e2e: everything was as it should be, on {}",
        server.version()?
    );
    Ok(())
}

fn step(text: &str) {
    println!("ok  {text}");
}

/// Each account may do what the code requires, and nothing else.
fn accounts_have_their_rights(admin: &Kubectl, asked: &Asked) -> anyhow::Result<()> {
    // Rights of every account: queries of its own identity and rights.
    let everybodys: BTreeSet<Right> = rights_of(admin, SYSTEM, "gpu-validator-health", SYSTEM)?;
    ensure!(
        everybodys
            .iter()
            .all(|it| it.resource.starts_with("self") && it.verb == "create"),
        "an account without a role may {everybodys:?}"
    );
    ensure!(
        rights_of(admin, JOBS, "gpu-validator-job", JOBS)? == everybodys,
        "the account of the jobs has rights"
    );
    let in_namespace = |namespace: &str| -> anyhow::Result<BTreeSet<Right>> {
        let all = rights_of(admin, SYSTEM, GATE, namespace)?;
        Ok(all.difference(&everybodys).cloned().collect())
    };
    let with_plugin = in_namespace("kube-system")?;
    ensure!(
        with_plugin == asked.all(),
        "in kube-system the gate may {with_plugin:?}, the code requests {asked:?}"
    );
    for elsewhere in ["default", SYSTEM, JOBS] {
        let rights = in_namespace(elsewhere)?;
        ensure!(
            rights == asked.in_the_cluster,
            "in namespace {elsewhere} the gate may {rights:?}"
        );
    }
    step(&format!(
        "{GATE} has the {} rights that the code requests and no other, {} of them in the device plugin's namespace only; \
         the other accounts have none",
        asked.all().len(),
        asked.in_the_namespace.len()
    ));
    Ok(())
}

/// Every right of an account in a namespace, as the API server answers.
fn rights_of(
    admin: &Kubectl,
    home: &str,
    account: &str,
    namespace: &str,
) -> anyhow::Result<BTreeSet<Right>> {
    let user = format!("--as=system:serviceaccount:{home}:{account}");
    let list = admin.text(
        &["auth", "can-i", "--list", &user, "--namespace", namespace],
        "",
    )?;
    let mut rights = BTreeSet::new();
    for line in list.lines().skip(1).filter(|it| !it.starts_with(' ')) {
        let (name, rest) = line
            .split_once(' ')
            .with_context(|| format!("kubectl said {line:?}"))?;
        let names = rest
            .trim_end_matches(']')
            .rsplit_once('[')
            .with_context(|| format!("kubectl said {line:?}"))?;
        let (resource, group) = name.split_once('.').unwrap_or((name, ""));
        for verb in names.1.split_whitespace() {
            rights.insert(Right {
                group: group.to_owned(),
                resource: resource.to_owned(),
                verb: verb.to_owned(),
            });
        }
    }
    Ok(rights)
}

/// Pod Security admission takes every pod of the manifests where it is to run, and no other pod
/// among the jobs.
fn pods_fit_their_namespaces(admin: &Kubectl) -> anyhow::Result<()> {
    let overlay: Overlay = "production".parse()?;
    let manifests = Manifests::of_overlay_with_jobs(&overlay, &["node", "fleet"])?;
    let mut count = 0;
    for object in manifests.objects() {
        let Some(spec) = kubernetes_tasks::manifests::pod_spec(object) else {
            continue;
        };
        let namespace = object["metadata"]["namespace"]
            .as_str()
            .context("no namespace")?;
        let name = object["metadata"]["name"].as_str().context("no name")?;
        create(admin, &pod(name, namespace, spec), true)
            .with_context(|| format!("a pod of {name} in {namespace}"))?;
        count += 1;
    }
    for (kind, name) in [
        ("Job", "gpu-validator-node"),
        ("Job", "gpu-validator-fleet"),
    ] {
        create(admin, manifests.object(kind, name)?, true)?;
    }
    let gate = manifests.object("DaemonSet", GATE)?;
    let mut stranger = pod("stranger", JOBS, &gate["spec"]["template"]["spec"]);
    stranger["spec"]["serviceAccountName"] = json!("gpu-validator-job");
    let create = ["create", "--dry-run=server", "--filename", "-"];
    let refused = admin.refusal(&create, &stranger.to_string());
    ensure!(
        refused
            .as_ref()
            .is_some_and(|it| it.contains("violates PodSecurity")),
        "namespace {JOBS} takes a pod with CAP_SYSLOG and folders of the node: {refused:?}"
    );
    step(&format!(
        "Pod Security admission takes the pods of {count} objects, and refuses the gate's among the jobs"
    ));
    Ok(())
}

fn pod(name: &str, namespace: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    })
}

fn create(admin: &Kubectl, object: &Value, dry_run: bool) -> anyhow::Result<()> {
    let mut arguments = vec!["create", "--validate=strict", "--filename", "-"];
    if dry_run {
        arguments.push("--dry-run=server");
    }
    admin.text(&arguments, &object.to_string()).map(drop)
}

/// The gate, with the token of a pod of its own, on simulated nodes.
fn gate_opens_and_closes(server: &Server, admin: &Kubectl) -> anyhow::Result<()> {
    let manifests = Manifests::of_overlay(&"staging".parse()?)?;
    let mut spec = manifests.object("DaemonSet", GATE)?["spec"]["template"]["spec"].clone();
    for node in ["healthy", "broken", "other"] {
        create(admin, &node_object(node), false)?;
        // The API server takes no status with a new object.
        let status = json!({"status": node_status()}).to_string();
        let patch = [
            "patch",
            "node",
            node,
            "--subresource=status",
            "--type=merge",
            "--patch",
            &status,
        ];
        admin.text(&patch, "")?;
        spec["nodeName"] = json!(node);
        create(admin, &pod(&format!("gate-{node}"), SYSTEM, &spec), false)?;
    }
    let simulator = Simulator::build()?;
    own_node::is_held(server, admin)?;
    own_devices::are_held(server, admin)?;
    for (node, faults, code, status, tainted) in [
        ("healthy", vec![], 0, "True", false),
        ("broken", vec!["xid-79".to_owned()], 1, "False", true),
    ] {
        let kubeconfig = server.kubeconfig("gate", &json!({"token": gate_token(admin, node)?}))?;
        let simulated = simulator.prepare("p5.48xlarge", &faults, &[])?;
        let mut gate = gate_command(&kubeconfig, node);
        simulated.apply(&mut gate);
        let output = gate.output().context("the gate does not start")?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(
            output.status.code() == Some(code),
            "the gate of node {node} ended with {}, expected {code}:\n{said}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        drop(simulated);
        let object = admin.json(&["get", "node", node, "--output=json"])?;
        ensure!(
            is_tainted(&object) == tainted,
            "node {node} has the taints {}",
            object["spec"]["taints"]
        );
        ensure!(
            condition(&object) == Some(status),
            "node {node} has the conditions {}",
            object["status"]["conditions"]
        );
        let summary = object["metadata"]["annotations"]["gpu-bringup.dev/validation"].as_str();
        ensure!(
            summary.is_some_and(|it| it.contains("exitCode")),
            "node {node} has no summary"
        );
        ensure!(
            own_devices::is_tainted(admin, node)? == tainted,
            "node {node} is tainted: {tainted}, and its GPUs are not so"
        );
        step(&format!(
            "node {node}: gate ended with {code}, GpuValidated={status}, taint and DeviceTaintRule {}",
            if tainted { "there" } else { "not there" }
        ));
    }
    Ok(())
}

fn node_object(name: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"nvidia.com/gpu": "true", "kubernetes.io/hostname": name},
            "annotations": {"example.com/kept": "1"},
            "finalizers": ["example.com/kept"],
        },
        "spec": {"taints": [
            {"key": TAINT, "effect": "NoSchedule"},
            {"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"},
        ]},
    })
}

/// A status as a kubelet writes it, so large that comparing it is what it costs on a node at work.
fn node_status() -> Value {
    // A kubelet reports 50 images by default (`nodeStatusMaxImages`).
    let image = |number: u32| {
        let name = format!("registry.example.com/team/image-{number}");
        json!({"names": [format!("{name}@sha256:{number:064}"), format!("{name}:1.0")], "sizeBytes": 1})
    };
    let condition = |kind: &str, status: &str| json!({"type": kind, "status": status, "reason": "Kubelet", "message": "as it should be"});
    json!({
        "addresses": [{"type": "InternalIP", "address": "10.0.0.7"}],
        "allocatable": {"cpu": "192", "nvidia.com/gpu": "8"},
        "capacity": {"cpu": "192", "nvidia.com/gpu": "8"},
        "conditions": [
            condition("MemoryPressure", "False"),
            condition("DiskPressure", "False"),
            condition("PIDPressure", "False"),
            condition("Ready", "True"),
        ],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
        "images": (0..50).map(image).collect::<Vec<_>>(),
        "nodeInfo": {
            "architecture": "amd64", "bootID": "b", "containerRuntimeVersion": "containerd://2.1.0",
            "kernelVersion": "6.12", "kubeProxyVersion": "", "kubeletVersion": "v1.34.4", "machineID": "m",
            "operatingSystem": "linux", "osImage": "Amazon Linux 2023", "systemUUID": "s",
        },
        "runtimeHandlers": [{"name": "", "features": {"recursiveReadOnlyMounts": true}}],
    })
}

fn is_tainted(node: &Value) -> bool {
    let taints = node["spec"]["taints"].as_array();
    taints.is_some_and(|them| them.iter().any(|it| it["key"] == TAINT))
}

fn condition(node: &Value) -> Option<&str> {
    let conditions = node["status"]["conditions"].as_array()?;
    let ours = conditions.iter().find(|it| it["type"] == "GpuValidated")?;
    ours["status"].as_str()
}

/// As the kubelet requests it: bound to the pod, so that it names the node.
fn gate_token(admin: &Kubectl, node: &str) -> anyhow::Result<String> {
    let pod = format!("--bound-object-name=gate-{node}");
    let token = admin.text(
        &[
            "create",
            "token",
            GATE,
            "--namespace",
            SYSTEM,
            "--bound-object-kind=Pod",
            &pod,
        ],
        "",
    )?;
    Ok(token.trim().to_owned())
}

fn gate_command(kubeconfig: &Path, node: &str) -> Command {
    let mut command = Command::new(workspace::target().join("debug/gpu-validator"));
    command
        .args([
            "kubernetes",
            "gate",
            "--level=quick",
            "--allow-simulated",
            "--node-name",
            node,
        ])
        .arg("--kubeconfig")
        .arg(kubeconfig);
    workspace::without_cargos_library_path(&mut command);
    command
}
