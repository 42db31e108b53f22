//! `cargo xtask k8s check`: what can be known of the manifests without a cluster.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;
use xshell::{Shell, cmd};

use super::invariants;
use super::manifests::{self, Manifests, Overlay};
use super::schemas;
use crate::tools::CHECKOV;
use crate::tools::go::KUBECONFORM;
use crate::workspace;

/// Policies that are not asked for, each with the reason.
const POLICIES_LEFT_OUT: [(&str, &str); 1] = [(
    "CKV_K8S_43",
    "digests are asked for when production is applied, by `cargo xtask k8s apply`",
)];

pub(crate) fn run() -> anyhow::Result<()> {
    let shell = workspace::shell()?;
    let built = shell.create_dir(workspace::target().join("kubernetes/built"))?;
    let mut files = Vec::new();
    for overlay in Overlay::all()? {
        let manifests = Manifests::of_overlay_with_jobs(&overlay, &["node", "fleet"])?;
        invariants::check(&manifests).with_context(|| format!("overlay {overlay}"))?;
        roles_are_those_of_the_code(&shell, &manifests)
            .with_context(|| format!("overlay {overlay}"))?;
        let file = built.join(format!("{overlay}.yaml"));
        shell.write_file(&file, manifests.text())?;
        println!("{overlay}: {} objects", manifests.objects().len());
        files.push(file);
    }
    conform(&shell, &files)?;
    policies(&shell, &built)
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
    let copy = file.with_extension("misspelt");
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
    // Without the download of remote policies nothing is asked over the network.
    cmd!(
        shell,
        "{checkov} --directory {folder} --framework kubernetes --skip-download --compact --quiet --skip-check {left_out}"
    )
    .quiet()
    .run()
    .context("a security policy objects; exceptions are annotations with a reason: checkov.io/skip1: POLICY=reason")
}

/// The cluster role of the gate grants what the code asks for, and nothing else.
fn roles_are_those_of_the_code(shell: &Shell, manifests: &Manifests) -> anyhow::Result<()> {
    const ROLE: &str = "gpu-validator-gate";
    let cargo = workspace::cargo();
    let printed = cmd!(
        shell,
        "{cargo} run --quiet --package validator -- kubernetes rbac gate"
    )
    .quiet()
    .read()
    .context("gpu-validator does not print its rights")?;
    let of_the_code: Value = serde_yaml::from_str(&printed)
        .with_context(|| format!("gpu-validator printed {printed:?}"))?;
    let granted = &manifests.object("ClusterRole", ROLE)?["rules"];
    ensure!(
        of_the_code["rules"]
            .as_array()
            .is_some_and(|it| !it.is_empty()),
        "gpu-validator names no rights: {printed:?}"
    );
    if *granted != of_the_code["rules"] {
        bail!(
            "manifests/kubernetes/base/validator/role-gate.yaml grants {granted}, but the code asks for {}",
            of_the_code["rules"]
        );
    }
    Ok(())
}
