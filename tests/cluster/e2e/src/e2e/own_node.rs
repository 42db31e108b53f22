//! What the admission policy refuses a gate that was taken over, tried with the gate's own token on
//! the real API server.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use serde_json::{Value, json};

use super::server::Server;
use super::{GATE, POLICY_DEADLINE, SYSTEM, TAINT, gate_token, step};
use kubernetes_tasks::kubectl::Kubectl;

/// The node of the gate whose token is used.
pub(super) const OWN: &str = "other";
/// A node of another gate.
pub(super) const FOREIGN: &str = "healthy";

/// One request that must be refused.
struct Refused {
    /// `status`, or nothing for the node itself.
    subresource: &'static str,
    /// A merge patch.
    patch: fn(&Value) -> Value,
    /// What the refusal must name.
    words: &'static str,
}

const LABELS: &str = "may not change labels";
const FINALIZERS: &str = "may not change finalizers or owners";
const ANNOTATIONS: &str = "no annotation but gpu-bringup.dev/validation";
const CORDON: &str = "may not cordon";
const TAINTS: &str = "no taint but";
const EFFECT: &str = "with effect NoSchedule only";
const SPECIFICATION: &str = "nothing in a node's specification but its taint";
const CONDITIONS: &str = "no condition but GpuValidated";
const STATUS: &str = "nothing in a node's status but its condition";

fn refused() -> Vec<Refused> {
    let node = |words, patch| Refused {
        subresource: "",
        patch,
        words,
    };
    let status = |words, patch| Refused {
        subresource: "status",
        patch,
        words,
    };
    vec![
        node(
            LABELS,
            |_| json!({"metadata": {"labels": {"role": "control-plane"}}}),
        ),
        node(
            LABELS,
            |_| json!({"metadata": {"labels": {"nvidia.com/gpu": null}}}),
        ),
        status(
            LABELS,
            |_| json!({"metadata": {"labels": {"role": "control-plane"}}}),
        ),
        node(
            FINALIZERS,
            |_| json!({"metadata": {"finalizers": ["example.com/stay"]}}),
        ),
        node(
            FINALIZERS,
            |_| json!({"metadata": {"finalizers": ["example.com/kept", "example.com/stay"]}}),
        ),
        node(FINALIZERS, |_| {
            json!({"metadata": {"ownerReferences": [
                {"apiVersion": "v1", "kind": "Node", "name": "x", "uid": "0"},
            ]}})
        }),
        node(
            ANNOTATIONS,
            |_| json!({"metadata": {"annotations": {"cluster-autoscaler.kubernetes.io/scale-down-disabled": "true"}}}),
        ),
        node(
            ANNOTATIONS,
            |_| json!({"metadata": {"annotations": {"example.com/kept": "changed"}}}),
        ),
        node(
            ANNOTATIONS,
            |_| json!({"metadata": {"annotations": {"example.com/kept": null}}}),
        ),
        status(
            ANNOTATIONS,
            |_| json!({"metadata": {"annotations": {"example.com/new": "1"}}}),
        ),
        node(CORDON, |_| json!({"spec": {"unschedulable": true}})),
        node(TAINTS, |_| json!({"spec": {"taints": null}})),
        node(TAINTS, |node| with_taint(node, "team", "NoExecute")),
        node(EFFECT, |node| with_taint(node, TAINT, "NoExecute")),
        node(
            SPECIFICATION,
            |_| json!({"spec": {"providerID": "aws:///eu-central-1a/i-0"}}),
        ),
        node(
            SPECIFICATION,
            |_| json!({"spec": {"podCIDR": "10.1.0.0/24", "podCIDRs": ["10.1.0.0/24"]}}),
        ),
        status(CONDITIONS, |node| with_condition(node, "Ready", "False")),
        status(CONDITIONS, |node| {
            with_condition(node, "MemoryPressure", "True")
        }),
        status(CONDITIONS, |_| json!({"status": {"conditions": []}})),
        status(CONDITIONS, |node| {
            let once = with_condition(node, "GpuValidated", "True");
            let twice = with_condition(&once, "GpuValidated", "False");
            json!({"status": {"conditions": twice["status"]["conditions"]}})
        }),
        status(
            STATUS,
            |_| json!({"status": {"capacity": {"nvidia.com/gpu": "64"}}}),
        ),
        status(
            STATUS,
            |_| json!({"status": {"allocatable": {"nvidia.com/gpu": "64"}}}),
        ),
        status(
            STATUS,
            |_| json!({"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.99"}]}}),
        ),
        status(
            STATUS,
            |_| json!({"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 9999}}}}),
        ),
        status(
            STATUS,
            |_| json!({"status": {"nodeInfo": {"kubeletVersion": "v0.0.1"}}}),
        ),
        status(
            STATUS,
            |_| json!({"status": {"images": [{"names": ["example.com/x:1"], "sizeBytes": 1}]}}),
        ),
        status(
            STATUS,
            |_| json!({"status": {"volumesInUse": ["example.com/x"]}}),
        ),
        status(
            STATUS,
            |_| json!({"status": {"volumesAttached": [{"name": "example.com/x", "devicePath": ""}]}}),
        ),
        status(STATUS, |_| json!({"status": {"phase": "Terminated"}})),
        status(
            STATUS,
            |_| json!({"status": {"runtimeHandlers": [{"name": "x"}]}}),
        ),
        status(
            STATUS,
            |_| json!({"status": {"features": {"supplementalGroupsPolicy": true}}}),
        ),
    ]
}

/// A merge patch replaces a list as a whole.
fn with_taint(node: &Value, key: &str, effect: &str) -> Value {
    let mut taints = node["spec"]["taints"].clone();
    if let Some(them) = taints.as_array_mut() {
        them.retain(|it| it["key"] != key);
        them.push(json!({"key": key, "effect": effect}));
    }
    json!({"spec": {"taints": taints}})
}

fn with_condition(node: &Value, kind: &str, status: &str) -> Value {
    let mut conditions = node["status"]["conditions"].clone();
    if let Some(them) = conditions.as_array_mut() {
        if kind != "GpuValidated" {
            them.retain(|it| it["type"] != kind);
        }
        them.push(json!({"type": kind, "status": status, "reason": "Forged", "message": ""}));
    }
    json!({"status": {"conditions": conditions}})
}

/// A gate that was taken over can open no other node, and do nothing else to its own.
pub(super) fn is_held(server: &Server, admin: &Kubectl) -> anyhow::Result<()> {
    // kubectl reads what it patches, which the gate itself does not do of a status.
    let [role, binding] = READING_A_STATUS;
    admin.text(&[&["create"][..], role].concat(), "")?;
    admin.text(&[&["create"][..], binding].concat(), "")?;
    let held = policy_holds(server, admin);
    admin.text(&[&["delete"][..], &binding[..2]].concat(), "")?;
    admin.text(&[&["delete"][..], &role[..2]].concat(), "")?;
    held
}

/// A role, and its binding to the gate's account.
const READING_A_STATUS: [&[&str]; 2] = [
    &[
        "clusterrole",
        "read-node-status",
        "--verb=get",
        "--resource=nodes/status",
    ],
    &[
        "clusterrolebinding",
        "read-node-status",
        "--clusterrole=read-node-status",
        "--serviceaccount=gpu-bringup-system:gpu-validator-gate",
    ],
];

fn policy_holds(server: &Server, admin: &Kubectl) -> anyhow::Result<()> {
    let gate = server.kubectl(&gate_token(admin, OWN)?);
    wait_for_the_policy(admin, &gate)?;
    let cases = refused();
    for case in &cases {
        let node = admin.json(&["get", "node", OWN, "--output=json"])?;
        let patch = (case.patch)(&node).to_string();
        // The administrator shows that the request is one that the API server would take.
        let taken = patch_node(admin, OWN, case.subresource, &patch, true);
        ensure!(
            taken.is_none(),
            "the patch {patch} is no proof, the API server takes it of no user: {taken:?}"
        );
        let text = patch_node(&gate, OWN, case.subresource, &patch, false);
        ensure!(
            text.as_ref().is_some_and(|it| it.contains(case.words)),
            "expected the refusal `{}` of {} {patch}: {text:?}",
            case.words,
            case.subresource
        );
    }
    step(&format!(
        "{} changes of its own node are refused to the gate's token, each for its reason",
        cases.len()
    ));
    writes_what_is_its_own(&gate)?;
    unbound_token(server, admin)
}

/// Waits until a gate cannot open another node: a policy takes a moment to be in force.
fn wait_for_the_policy(admin: &Kubectl, gate: &Kubectl) -> anyhow::Result<()> {
    let open = json!({"spec": {"taints": null}}).to_string();
    let deadline = Instant::now() + POLICY_DEADLINE;
    loop {
        match patch_node(gate, FOREIGN, "", &open, false) {
            Some(text) if text.contains("only the node that its pod runs on") => break,
            Some(text) => bail!("the gate was refused for another reason: {text}"),
            None if Instant::now() > deadline => bail!("a gate on one node can open another"),
            None => {
                // Not in force yet: close the node again.
                let taints = super::node_object(FOREIGN)["spec"]["taints"].clone();
                let close = json!({"spec": {"taints": taints}}).to_string();
                if let Some(text) = patch_node(admin, FOREIGN, "", &close, false) {
                    bail!("the node could not be closed again: {text}");
                }
                std::thread::sleep(Duration::from_millis(200));
            }
        }
    }
    let condition = json!({"status": {"conditions": [{"type": "GpuValidated", "status": "True"}]}});
    let text = patch_node(gate, FOREIGN, "status", &condition.to_string(), false);
    ensure!(
        text.as_ref()
            .is_some_and(|it| it.contains("only the node that its pod runs on")),
        "a gate on one node writes the condition of another: {text:?}"
    );
    step("a gate's token changes no other node");
    Ok(())
}

/// The policy must leave the gate what it is there for.
fn writes_what_is_its_own(gate: &Kubectl) -> anyhow::Result<()> {
    let node = gate.json(&["get", "node", OWN, "--output=json"])?;
    let annotation = json!({"metadata": {"annotations": {"gpu-bringup.dev/validation": "{}"}}});
    let opened = json!({"spec": {"taints": node["spec"]["taints"].as_array().map(|them| {
        them.iter().filter(|it| it["key"] != TAINT).cloned().collect::<Vec<_>>()
    })}});
    let closed = with_taint(&node, TAINT, "NoSchedule");
    let condition = with_condition(&node, "GpuValidated", "Unknown");
    for (subresource, patch) in [
        ("", &annotation),
        ("", &opened),
        ("", &closed),
        ("status", &condition),
    ] {
        let text = patch_node(gate, OWN, subresource, &patch.to_string(), false);
        ensure!(
            text.is_none(),
            "the gate may not write its own {subresource} {patch}: {text:?}"
        );
    }
    step("condition, annotation and taint of its own node can be written by the gate's token");
    Ok(())
}

/// A token that is bound to no pod names no node, and changes none.
fn unbound_token(server: &Server, admin: &Kubectl) -> anyhow::Result<()> {
    let token = admin.text(&["create", "token", GATE, "--namespace", SYSTEM], "")?;
    let patch = json!({"metadata": {"annotations": {"gpu-bringup.dev/validation": "{}"}}});
    let gate = server.kubectl(token.trim());
    let text = patch_node(&gate, OWN, "", &patch.to_string(), false);
    ensure!(
        text.as_ref()
            .is_some_and(|it| it.contains("only the node that its pod runs on")),
        "a token of the gate's account without a pod changes a node: {text:?}"
    );
    step("a token of the gate's account that is bound to no pod changes no node");
    Ok(())
}

/// Why the API server refused a merge patch, if it did.
fn patch_node(
    user: &Kubectl,
    node: &str,
    subresource: &str,
    patch: &str,
    dry_run: bool,
) -> Option<String> {
    let of = format!("--subresource={subresource}");
    let mut arguments = vec!["patch", "node", node, "--type=merge", "--patch", patch];
    if !subresource.is_empty() {
        arguments.push(&of);
    }
    if dry_run {
        arguments.push("--dry-run=server");
    }
    user.refusal(&arguments, "")
}
