//! The validator's Helm chart makes the same objects as the base that kustomize builds, and refuses
//! values that it does not know.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use serde_json::Value;
use xshell::{Shell, cmd};

use crate::manifests::{self, Manifests};
use xtask::tools::go::HELM;

const NAMESPACE: &str = "gpu-bringup-system";
/// The oldest version that the chart is for, and the newest.
const VERSIONS: [&str; 2] = ["1.31.0", "1.37.0"];

/// Values that must be refused, and what the refusal must name.
const REFUSED: [(&str, &str); 6] = [
    ("gate.levle=quick", "levle"),
    ("gate.level=image", "level"),
    ("image.digest=sha256:0", "digest"),
    ("image.tag=latest", "tag"),
    ("health.nodes=0", "nodes"),
    ("networkPolicies=maybe", "networkPolicies"),
];

fn folder() -> PathBuf {
    manifests::folder().join("chart")
}

/// Writes what the chart renders below `to`, for the schemas; gives the files.
pub(crate) fn check(shell: &Shell, to: &std::path::Path) -> anyhow::Result<PathBuf> {
    let chart: Value = serde_yaml::from_str(&shell.read_file(folder().join("Chart.yaml"))?)?;
    for field in ["version", "appVersion"] {
        ensure!(
            chart[field] == env!("CARGO_PKG_VERSION"),
            "{field} of the chart is {}, the workspace's is {}",
            chart[field],
            env!("CARGO_PKG_VERSION")
        );
    }
    let base = Manifests::of_base()?;
    let expected = of_the_chart(base.objects());
    ensure!(!expected.is_empty(), "the base has nothing of the chart's");
    for version in VERSIONS {
        let rendered = render(shell, version, &[])?;
        compare(&expected, &by_name(rendered.objects()))
            .with_context(|| format!("the chart, for Kubernetes {version}"))?;
    }
    refusals(shell)?;
    options(shell)?;
    let file = to.join("chart.yaml");
    shell.write_file(&file, render(shell, VERSIONS[0], &[])?.text())?;
    println!(
        "the chart makes the {} objects of the base, and refuses {} wrong values",
        expected.len(),
        REFUSED.len()
    );
    Ok(file)
}

fn render(shell: &Shell, version: &str, values: &[&str]) -> anyhow::Result<Manifests> {
    let (helm, chart) = (HELM.install()?, folder());
    let values: Vec<String> = values.iter().map(|it| format!("--set={it}")).collect();
    let text = cmd!(
        shell,
        "{helm} template gpu-validator {chart} --namespace {NAMESPACE} --kube-version {version} {values...}"
    )
    .quiet()
    .read()
    .context("helm does not render the chart")?;
    Manifests::parse(text + "\n")
}

fn refusals(shell: &Shell) -> anyhow::Result<()> {
    let (helm, chart) = (HELM.install()?, folder());
    for (value, names) in REFUSED {
        let output = cmd!(shell, "{helm} template gpu-validator {chart} --set {value}")
            .quiet()
            .ignore_status()
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            !output.status.success() && said.contains("values don't meet") && said.contains(names),
            "the chart takes {value}: {said}"
        );
    }
    Ok(())
}

/// What a value is for changes with it.
fn options(shell: &Shell) -> anyhow::Result<()> {
    let digest = format!("sha256:{}", "a".repeat(64));
    let with_digest = format!("image.digest={digest}");
    let rendered = render(
        shell,
        VERSIONS[0],
        &[
            &with_digest,
            "health.nodes=7",
            "devicePluginNamespace=gpu-operator",
            "networkPolicies=false",
            "profile=name: other",
        ],
    )?;
    ensure!(
        rendered.images_without_digest().is_empty(),
        "image.digest is not taken: {:?}",
        rendered.images()
    );
    let health = rendered.object("CronJob", "gpu-validator-health")?;
    ensure!(
        health["spec"]["jobTemplate"]["spec"]["completions"] == 7,
        "health.nodes is not taken"
    );
    let role = rendered.object("Role", "gpu-validator-gate")?;
    ensure!(
        role["metadata"]["namespace"] == "gpu-operator",
        "devicePluginNamespace is not taken"
    );
    let policies = rendered.objects().iter();
    let policies = policies.filter(|it| it["kind"] == "NetworkPolicy").count();
    ensure!(policies == 0, "networkPolicies is not taken");
    let name = |manifests: &Manifests| -> Option<String> {
        let mut maps = manifests
            .objects()
            .iter()
            .filter(|it| it["kind"] == "ConfigMap");
        Some(maps.next()?["metadata"]["name"].as_str()?.to_owned())
    };
    ensure!(
        name(&rendered) != name(&render(shell, VERSIONS[0], &[])?),
        "another profile has the same name, so that the gate does not start anew"
    );
    Ok(())
}

/// What the chart makes of the base: not namespaces, device plugin, runtime class and jobs.
fn of_the_chart(objects: &[Value]) -> BTreeMap<String, Value> {
    let is_of_the_chart = |object: &&Value| {
        let metadata = &object["metadata"];
        let is_of_the_gate = metadata["name"]
            .as_str()
            .is_some_and(|it| it.starts_with("gpu-validator-gate"));
        metadata["namespace"] == NAMESPACE || is_of_the_gate
    };
    let objects: Vec<Value> = objects.iter().filter(is_of_the_chart).cloned().collect();
    by_name(&objects)
}

/// By kind and name. kustomize and the chart hash a profile's name each in its way, so the hash is
/// cut off everywhere.
fn by_name(objects: &[Value]) -> BTreeMap<String, Value> {
    let named = objects.iter().map(|object| {
        let object = without_hashes(object);
        let metadata = &object["metadata"];
        let name = format!(
            "{} {}/{}",
            object["kind"].as_str().unwrap_or_default(),
            metadata["namespace"].as_str().unwrap_or_default(),
            metadata["name"].as_str().unwrap_or_default()
        );
        (name, object)
    });
    named.collect()
}

fn without_hashes(value: &Value) -> Value {
    const PROFILE: &str = "gpu-validator-profile";
    match value {
        Value::String(text) if text.starts_with(PROFILE) => Value::from(PROFILE),
        Value::Array(list) => list.iter().map(without_hashes).collect(),
        Value::Object(fields) => {
            let fields = fields.iter();
            fields
                .map(|(key, value)| (key.clone(), without_hashes(value)))
                .collect()
        }
        other => other.clone(),
    }
}

fn compare(
    expected: &BTreeMap<String, Value>,
    rendered: &BTreeMap<String, Value>,
) -> anyhow::Result<()> {
    let names = |map: &BTreeMap<String, Value>| map.keys().cloned().collect::<Vec<_>>();
    ensure!(
        names(expected) == names(rendered),
        "it makes {:?}, the base {:?}",
        names(rendered),
        names(expected)
    );
    for (name, object) in expected {
        let other = &rendered[name];
        ensure!(
            object == other,
            "{name} differs: {}",
            first_difference(object, other, "")
        );
    }
    Ok(())
}

fn first_difference(one: &Value, other: &Value, path: &str) -> String {
    if let (Value::Object(a), Value::Object(b)) = (one, other) {
        let keys = a.keys().chain(b.keys());
        for key in keys {
            if a.get(key) != b.get(key) {
                let null = Value::Null;
                let (a, b) = (a.get(key).unwrap_or(&null), b.get(key).unwrap_or(&null));
                return first_difference(a, b, &format!("{path}.{key}"));
            }
        }
    }
    format!("{path} is {one} in the base and {other} in the chart")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_difference_is_named() {
        let object = |cpu: &str| {
            let object = json!({"kind": "A", "metadata": {"name": "a"}, "spec": {"cpu": cpu}});
            by_name(&[object])
        };
        compare(&object("1"), &object("1")).expect("the same");
        let error = compare(&object("1"), &object("2")).expect_err("another");
        assert_eq!(
            error.to_string(),
            "A /a differs: .spec.cpu is \"1\" in the base and \"2\" in the chart"
        );
        let missing = compare(&object("1"), &BTreeMap::new()).expect_err("missing");
        assert!(missing.to_string().contains("it makes []"), "{missing}");
    }
}
