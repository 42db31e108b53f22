//! `cargo xtask k8s check`: what can be known of the manifests without a cluster.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use serde_json::Value;
use xshell::{Shell, cmd};

use super::invariants;
use super::manifests::{self, Manifests, Overlay};
use super::schemas;
use crate::chart;
use crate::device_plugin;
use crate::karpenter;
use crate::node_policy;
use crate::runners;
use xtask::tools::CHECKOV;
use xtask::tools::go::KUBECONFORM;
use xtask::workspace;

/// Policies that are not applied, each with the reason.
const POLICIES_LEFT_OUT: [(&str, &str); 1] = [(
    "CKV_K8S_43",
    "digests are asked for when production is applied, by `cargo xtask k8s apply`",
)];

pub fn run() -> anyhow::Result<()> {
    let shell = workspace::shell()?;
    let built = shell.create_dir(workspace::target().join("kubernetes/built"))?;
    let mut files = Vec::new();
    let mut granted = Vec::new();
    for overlay in Overlay::all()? {
        let manifests =
            Manifests::of_overlay_with_jobs(&overlay, &["node", "fleet", "allocation"])?;
        invariants::check(&manifests).with_context(|| format!("overlay {overlay}"))?;
        node_policy::check(&manifests).with_context(|| format!("overlay {overlay}"))?;
        let file = built.join(format!("{overlay}.yaml"));
        shell.write_file(&file, manifests.text())?;
        println!("{overlay}: {} objects", manifests.objects().len());
        files.push(file);
        let in_the_cluster = self::granted(&manifests, GATE, "ClusterRole");
        let in_the_namespace = self::granted(&manifests, GATE, "Role");
        granted.push((overlay, in_the_cluster, in_the_namespace));
    }
    for overlay in Overlay::all()? {
        // Kept apart from the subjects of the policies: a runner is a machine for others' jobs, and
        // writes to its root.
        let file = workspace::target().join(format!("kubernetes/runners-{overlay}.yaml"));
        let objects = runners::checked_objects(&shell, &overlay)?;
        let documents: Vec<String> = objects.iter().map(ToString::to_string).collect();
        shell.write_file(&file, documents.join("\n---\n"))?;
        files.push(file);
    }
    runners::check_refusals(&shell)?;
    files.push(manifests::folder().join("runners/prerequisites.yaml"));
    files.push(manifests::folder().join("jobs/pytorch/job.yaml"));
    files.push(node_readiness(&shell)?);
    files.push(sentinel(&shell, &built)?);
    files.extend(device_plugin::check(&shell)?);
    files.extend(karpenter::check(&shell)?);
    files.push(chart::check(
        &shell,
        &workspace::target().join("kubernetes"),
    )?);
    conform(&shell, &files)?;
    policies(&shell, &built)?;
    let asked = asked(&shell)?;
    for (overlay, in_the_cluster, in_the_namespace) in granted {
        compare(&asked.in_the_cluster, &in_the_cluster)
            .with_context(|| format!("overlay {overlay}, in the cluster"))?;
        compare(&asked.in_the_namespace, &in_the_namespace)
            .with_context(|| format!("overlay {overlay}, in the device plugin's namespace"))?;
    }
    println!(
        "the gate is granted what the code requests: {}; in the device plugin's namespace {}",
        in_words(asked.in_the_cluster.iter()),
        in_words(asked.in_the_namespace.iter())
    );
    Ok(())
}

/// The component for the node readiness controller: what validates a node tolerates the taint that
/// keeps others away.
fn node_readiness(shell: &Shell) -> anyhow::Result<PathBuf> {
    let manifests = Manifests::of_overlay_with_component(&"staging".parse()?, "node-readiness")?;
    let rule = manifests.object("NodeReadinessRule", "gpu-validated")?;
    let taint = &rule["spec"]["taint"]["key"];
    for object in manifests.objects() {
        let Some(pod) = manifests::pod_spec(object) else {
            continue;
        };
        let tolerations = pod["tolerations"].as_array();
        ensure!(
            tolerations.is_some_and(|them| them.iter().any(|it| it["key"] == *taint)),
            "component node-readiness: {} does not tolerate {taint}",
            object["metadata"]["name"]
        );
    }
    let file = workspace::target().join("kubernetes/node-readiness.yaml");
    shell.write_file(&file, manifests.text())?;
    Ok(file)
}

/// The component of the sentinel, which requests no GPU and gives way to every other pod.
fn sentinel(shell: &Shell, built: &Path) -> anyhow::Result<PathBuf> {
    const NAME: &str = "gpu-validator-sentinel";
    let manifests = Manifests::of_overlay_with_component(&"staging".parse()?, "sentinel")?;
    invariants::check(&manifests).context("component sentinel")?;
    let daemon_set = manifests.object("DaemonSet", NAME)?;
    let pod = manifests::pod_spec(daemon_set).context("component sentinel: no pod")?;
    ensure!(
        pod["priorityClassName"] == NAME,
        "component sentinel: its pods have another PriorityClass"
    );
    for container in manifests::containers(pod) {
        let resources = container["resources"].to_string();
        ensure!(
            !resources.contains("nvidia.com/"),
            "component sentinel: a GPU that it requests is kept from the scheduler"
        );
    }
    let class = manifests.object("PriorityClass", NAME)?;
    ensure!(
        class["value"].as_i64().is_some_and(|it| it < 0) && class["preemptionPolicy"] == "Never",
        "component sentinel: other pods would have to give way to it"
    );
    let file = built.join("sentinel.yaml");
    shell.write_file(&file, manifests.text())?;
    Ok(file)
}

/// Strict: a field that the version does not know is an error.
fn conform(shell: &Shell, files: &[PathBuf]) -> anyhow::Result<()> {
    let kubeconform = KUBECONFORM.install()?;
    let folder = schemas::folder()?;
    let kubernetes = format!(
        "{}/{{{{.NormalizedKubernetesVersion}}}}{{{{.StrictSuffix}}}}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json",
        folder.display()
    );
    let ours = format!(
        "{}/schemas/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json",
        manifests::folder().display()
    );
    let conforms = |version: &str, files: &[PathBuf]| {
        cmd!(
            shell,
            "{kubeconform} -strict -summary -kubernetes-version {version} -schema-location {kubernetes} -schema-location {ours} {files...}"
        )
        .quiet()
    };
    let misspelt = misspelt(&files[0])?;
    for version in schemas::VERSIONS {
        println!("Kubernetes {version}:");
        conforms(version, files)
            .run()
            .with_context(|| format!("the manifests do not fit Kubernetes {version}"))?;
        // Schemas that refuse nothing would pass everything.
        let refused = conforms(version, std::slice::from_ref(&misspelt))
            .ignore_status()
            .ignore_stdout()
            .output()?;
        ensure!(
            !refused.status.success(),
            "the schemas of Kubernetes {version} accept a field that does not exist"
        );
    }
    std::fs::remove_file(misspelt)?;
    Ok(())
}

/// A copy with one letter wrong in every pod.
fn misspelt(file: &Path) -> anyhow::Result<PathBuf> {
    let text = std::fs::read_to_string(file)?;
    let wrong = text.replace("restartPolicy:", "restartPolcy:");
    ensure!(
        wrong != text,
        "{} has no restartPolicy to misspell",
        file.display()
    );
    let copy = workspace::target().join("kubernetes/misspelt.yaml");
    std::fs::write(&copy, wrong)?;
    Ok(copy)
}

fn policies(shell: &Shell, folder: &Path) -> anyhow::Result<()> {
    let checkov = CHECKOV.install()?.join("checkov");
    let left_out: Vec<&str> = POLICIES_LEFT_OUT
        .iter()
        .map(|(policy, _)| *policy)
        .collect();
    let left_out = left_out.join(",");
    // Without the download of remote policies there is no network access.
    cmd!(
        shell,
        "{checkov} --directory {folder} --framework kubernetes --skip-download --compact --quiet --skip-check {left_out}"
    )
    .quiet()
    .run()
    .context("a security policy objects; exceptions are annotations with a reason: checkov.io/skip1: POLICY=reason")
}

/// The gate's service account.
const GATE: &str = "gpu-validator-gate";
/// What the gate's requests are made for, as `gpu-validator kubernetes rbac` names it: those that
/// concern the cluster, and those that are made in the device plugin's namespace.
const IN_THE_CLUSTER: &[&str] = &["gate", "checks"];
const IN_THE_NAMESPACE: &[&str] = &["device-plugin"];

/// What the code requests, in the cluster and in the device plugin's namespace.
#[derive(Debug)]
pub struct Asked {
    pub in_the_cluster: BTreeSet<Right>,
    pub in_the_namespace: BTreeSet<Right>,
}

impl Asked {
    pub fn all(&self) -> BTreeSet<Right> {
        &self.in_the_cluster | &self.in_the_namespace
    }
}

pub fn asked(shell: &Shell) -> anyhow::Result<Asked> {
    Ok(Asked {
        in_the_cluster: asked_for(shell, IN_THE_CLUSTER)?,
        in_the_namespace: asked_for(shell, IN_THE_NAMESPACE)?,
    })
}

/// What the code requests for these purposes, as it prints it.
fn asked_for(shell: &Shell, purposes: &[&str]) -> anyhow::Result<BTreeSet<Right>> {
    let validator = workspace::debug_validator(shell)?;
    let mut asked = BTreeSet::new();
    for purpose in purposes {
        let printed = cmd!(shell, "{validator} kubernetes rbac {purpose}")
            .quiet()
            .read()
            .context("gpu-validator does not print its rights")?;
        let role: Value = serde_yaml::from_str(&printed)
            .with_context(|| format!("gpu-validator printed {printed:?}"))?;
        let rights = rights(&role);
        ensure!(
            !rights.is_empty(),
            "gpu-validator names no rights: {printed:?}"
        );
        asked.extend(rights);
    }
    Ok(asked)
}

/// Roles grant what the code requests, and nothing else.
fn compare(asked: &BTreeSet<Right>, granted: &BTreeSet<Right>) -> anyhow::Result<()> {
    let missing = in_words(asked.difference(granted));
    ensure!(
        missing.is_empty(),
        "{GATE} is not granted what the code asks for: {missing}"
    );
    let needless = in_words(granted.difference(asked));
    ensure!(
        needless.is_empty(),
        "{GATE} is granted what no code asks for: {needless}"
    );
    Ok(())
}

fn in_words<'a>(rights: impl Iterator<Item = &'a Right>) -> String {
    rights
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}

/// A verb on a resource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Right {
    pub group: String,
    pub resource: String,
    pub verb: String,
}

impl std::fmt::Display for Right {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.verb, self.resource)?;
        if !self.group.is_empty() {
            write!(f, ".{}", self.group)?;
        }
        Ok(())
    }
}

/// Every right of a role.
fn rights(role: &Value) -> BTreeSet<Right> {
    let words = |list: &Value| -> Vec<String> {
        let list = list.as_array().into_iter().flatten();
        list.filter_map(|it| it.as_str().map(str::to_owned))
            .collect()
    };
    let mut rights = BTreeSet::new();
    for rule in role["rules"].as_array().into_iter().flatten() {
        for group in words(&rule["apiGroups"]) {
            for resource in words(&rule["resources"]) {
                for verb in words(&rule["verbs"]) {
                    let (group, resource) = (group.clone(), resource.clone());
                    rights.insert(Right {
                        group,
                        resource,
                        verb,
                    });
                }
            }
        }
    }
    rights
}

/// What every role of a kind that is bound to a service account grants.
fn granted(manifests: &Manifests, account: &str, kind: &str) -> BTreeSet<Right> {
    let objects = || manifests.objects().iter();
    let is_bound = |binding: &&Value| {
        let subjects = binding["subjects"].as_array().into_iter().flatten();
        subjects.into_iter().any(|it| it["name"] == account)
    };
    let bindings = objects()
        .filter(|it| !it["roleRef"].is_null())
        .filter(is_bound);
    bindings
        .flat_map(|binding| {
            objects().filter(|it| {
                it["kind"] == kind
                    && it["kind"] == binding["roleRef"]["kind"]
                    && it["metadata"]["name"] == binding["roleRef"]["name"]
                    && (it["kind"] == "ClusterRole"
                        || it["metadata"]["namespace"] == binding["metadata"]["namespace"])
            })
        })
        .flat_map(rights)
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_granted_is_followed_through_bindings() {
        let manifests = Manifests::parse(
            r#"
kind: ClusterRole
metadata: {name: a}
rules: [{apiGroups: [""], resources: [nodes], verbs: [get, patch]}]
---
kind: Role
metadata: {name: a, namespace: x}
rules: [{apiGroups: [apps], resources: [daemonsets], verbs: [list]}]
---
kind: Role
metadata: {name: a, namespace: y}
rules: [{apiGroups: [""], resources: [secrets], verbs: [get]}]
---
kind: ClusterRoleBinding
metadata: {name: a}
roleRef: {kind: ClusterRole, name: a}
subjects: [{kind: ServiceAccount, name: gate}]
---
kind: RoleBinding
metadata: {name: a, namespace: x}
roleRef: {kind: Role, name: a}
subjects: [{kind: ServiceAccount, name: gate}]
---
kind: RoleBinding
metadata: {name: a, namespace: y}
roleRef: {kind: Role, name: a}
subjects: [{kind: ServiceAccount, name: other}]
"#
            .to_owned(),
        )
        .expect("YAML");
        let granted = |kind| -> Vec<String> {
            let rights = granted(&manifests, "gate", kind);
            rights.iter().map(ToString::to_string).collect()
        };
        assert_eq!(granted("ClusterRole"), ["get nodes", "patch nodes"]);
        assert_eq!(granted("Role"), ["list daemonsets.apps"]);
    }

    #[test]
    fn one_right_too_many_or_too_few_is_named() {
        let role = |verbs: &[&str]| {
            rights(&json!({"rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": verbs}]}))
        };
        compare(&role(&["get"]), &role(&["get"])).expect("the same");
        let few = compare(&role(&["get", "patch"]), &role(&["get"])).expect_err("too few");
        assert!(
            few.to_string()
                .ends_with("what the code asks for: patch nodes"),
            "{few}"
        );
        let many = compare(&role(&["get"]), &role(&["get", "delete"])).expect_err("too many");
        assert!(
            many.to_string()
                .ends_with("what no code asks for: delete nodes"),
            "{many}"
        );
    }
}
