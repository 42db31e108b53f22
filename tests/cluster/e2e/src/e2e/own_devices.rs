//! What the admission policy on a `DeviceTaintRule` refuses a gate that was taken over.

use anyhow::ensure;
use serde_json::{Value, json};

use super::own_node::{FOREIGN, OWN};
use super::server::Server;
use super::{TAINT, create, gate_token, step};
use kubernetes_tasks::kubectl::Kubectl;

const NAME: &str = "only the DeviceTaintRule of the node";
const GPUS: &str = "taint only GPUs of the node";
const TAINTS: &str = "with effect NoSchedule only";
const METADATA: &str = "no finalizer, and no owner but its node";

/// A change that makes a rule wrong which the gate may write.
type Change = fn(&mut Value);

/// Changes, each with the words of the refusal.
const REFUSED: [(&str, Change); 7] = [
    (NAME, |it| {
        it["metadata"]["name"] = json!(rule_name(FOREIGN));
    }),
    (GPUS, |it| {
        it["spec"]["deviceSelector"]["pool"] = json!(FOREIGN);
    }),
    (GPUS, |it| {
        it["spec"]["deviceSelector"] = json!({});
    }),
    (TAINTS, |it| {
        it["spec"]["taint"]["key"] = json!("example.com/other");
    }),
    (TAINTS, |it| {
        it["spec"]["taint"]["effect"] = json!("NoExecute");
    }),
    (METADATA, |it| {
        it["metadata"]["finalizers"] = json!(["example.com/stay"]);
    }),
    (METADATA, |it| {
        it["metadata"]["ownerReferences"] = json!([
            {"apiVersion": "v1", "kind": "Node", "name": FOREIGN, "uid": "0"},
        ]);
    }),
];

pub(super) fn rule_name(node: &str) -> String {
    format!("gpu-validator.{node}")
}

fn rule(node: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1alpha3",
        "kind": "DeviceTaintRule",
        "metadata": {"name": rule_name(node)},
        "spec": {
            "deviceSelector": {"driver": "gpu.nvidia.com", "pool": node},
            "taint": {"key": TAINT, "value": "ValidationFailed", "effect": "NoSchedule"},
        },
    })
}

/// Whether the API server has the rule of a node.
pub(super) fn is_tainted(admin: &Kubectl, node: &str) -> anyhow::Result<bool> {
    let rules = admin.json(&["get", "devicetaintrules", "--output=json"])?;
    let mut items = rules["items"].as_array().into_iter().flatten();
    Ok(items.any(|it| it["metadata"]["name"] == rule_name(node)))
}

/// A gate that was taken over taints the GPUs of no other node, and does nothing else to its own.
pub(super) fn are_held(server: &Server, admin: &Kubectl) -> anyhow::Result<()> {
    let gate = server.kubectl(&gate_token(admin, OWN)?);
    let creating = ["create", "--filename", "-"];
    for (words, change) in &REFUSED {
        let mut wrong = rule(OWN);
        change(&mut wrong);
        // The administrator shows that the request is one that the API server would take.
        create(admin, &wrong, true)?;
        let text = gate.refusal(&creating, &wrong.to_string());
        ensure!(
            text.as_ref().is_some_and(|it| it.contains(words)),
            "expected the refusal `{words}` of {wrong}: {text:?}"
        );
    }
    create(admin, &rule(FOREIGN), false)?;
    let deleting = |node| {
        let name = rule_name(node);
        gate.refusal(&["delete", "devicetaintrule", &name, "--wait=false"], "")
    };
    let text = deleting(FOREIGN);
    ensure!(
        text.as_ref().is_some_and(|it| it.contains(NAME)),
        "a gate on one node deletes the rule of another: {text:?}"
    );
    create(&gate, &rule(OWN), false)?;
    let text = deleting(OWN);
    ensure!(
        text.is_none() && !is_tainted(admin, OWN)?,
        "the gate may not delete its own rule: {text:?}"
    );
    admin.text(&["delete", "devicetaintrule", &rule_name(FOREIGN)], "")?;
    step(&format!(
        "{} DeviceTaintRules are refused to the gate's token, each for its reason, and its own is taken",
        REFUSED.len() + 1
    ));
    Ok(())
}
