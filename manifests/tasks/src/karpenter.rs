//! The example for Karpenter: nodes that are closed until the gate opens them.

use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use xshell::Shell;

use crate::manifests::{self, Manifests};
use xtask::{json_schema, workspace};

/// Returns the files, for the schemas.
pub(crate) fn check(shell: &Shell) -> anyhow::Result<Vec<PathBuf>> {
    let file = |name: &str| manifests::folder().join(format!("karpenter/{name}.yaml"));
    let (pool, class) = (file("nodepool"), file("ec2nodeclass"));
    a_misspelt_field_is_refused(shell, &pool)?;
    let text = format!(
        "{}---\n{}",
        shell.read_file(&pool)?,
        shell.read_file(&class)?
    );
    check_pair(&Manifests::parse(text)?).context("manifests/kubernetes/karpenter")?;
    Ok(vec![pool, class])
}

/// Karpenter's API server would leave the field out, and nodes would be open from the start.
fn a_misspelt_field_is_refused(shell: &Shell, pool: &PathBuf) -> anyhow::Result<()> {
    let schema = manifests::folder().join("schemas/nodepool-karpenter-v1.json");
    let copy = workspace::target().join("kubernetes/misspelt-nodepool.yaml");
    let text = shell.read_file(pool)?;
    json_schema::refuses(
        shell,
        &schema,
        &text,
        ("startupTaints", "startupTaint"),
        &copy,
    )
}

fn check_pair(manifests: &Manifests) -> anyhow::Result<()> {
    let find = |kind: &str| {
        let mut objects = manifests.objects().iter();
        objects
            .find(|it| it["kind"] == kind)
            .with_context(|| format!("no {kind}"))
    };
    let (pool, class) = (find("NodePool")?, find("EC2NodeClass")?);
    let node = &pool["spec"]["template"];
    ensure!(
        node["metadata"]["labels"]["nvidia.com/gpu"] == "true",
        "its nodes have no label nvidia.com/gpu=true, by which the gate finds them"
    );
    let has = |list: &str, key: &str| {
        let taint = json!({"key": key, "value": "true", "effect": "NoSchedule"});
        let taints = node["spec"][list].as_array();
        taints.is_some_and(|them| them.contains(&taint))
    };
    ensure!(
        has("taints", "nvidia.com/gpu"),
        "its nodes have no taint nvidia.com/gpu=true:NoSchedule"
    );
    let unvalidated = "gpu-bringup.dev/unvalidated";
    ensure!(
        has("startupTaints", unvalidated) && !has("taints", unvalidated),
        "{unvalidated}=true:NoSchedule is no startup taint: nodes would be open before they are \
         validated, or Karpenter would start none for a pod that does not tolerate it"
    );
    let named = &node["spec"]["nodeClassRef"];
    let group = class["apiVersion"].as_str().unwrap_or_default();
    let is = json!({
        "group": group.split('/').next(),
        "kind": class["kind"],
        "name": class["metadata"]["name"],
    });
    ensure!(*named == is, "nodeClassRef is {named}, the class is {is}");
    let metadata: &Value = &class["spec"]["metadataOptions"];
    ensure!(
        metadata["httpTokens"] == "required" && metadata["httpPutResponseHopLimit"] == 1,
        "pods reach the instance's metadata: {metadata}"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files() -> String {
        let read = |name: &str| {
            let file = manifests::folder().join(format!("karpenter/{name}.yaml"));
            std::fs::read_to_string(file).expect(name)
        };
        format!("{}---\n{}", read("nodepool"), read("ec2nodeclass"))
    }

    #[test]
    fn what_would_open_an_unvalidated_node_is_named() {
        let check = |text: String| check_pair(&Manifests::parse(text).expect("YAML"));
        check(files()).expect("right");
        for (right, wrong, message) in [
            ("startupTaints:", "startupTaint:", "is no startup taint"),
            (
                "gpu-bringup.dev/unvalidated",
                "gpu-bringup.dev/unvalidate",
                "is no startup taint",
            ),
            ("nvidia.com/gpu: \"true\"", "gpu: \"true\"", "no label"),
            (
                "- key: nvidia.com/gpu",
                "- key: nvidia.com/gpus",
                "no taint",
            ),
            (
                "        name: gpu-g6",
                "        name: g6",
                "nodeClassRef is",
            ),
            ("httpTokens: required", "httpTokens: optional", "metadata"),
        ] {
            let text = files();
            assert!(text.contains(right), "{right}");
            let error = check(text.replace(right, wrong)).expect_err(wrong);
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
