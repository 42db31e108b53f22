//! The admission policy that holds the gate to its own node names every field of a node.
//!
//! CEL compares an object field by field: a field that a new Kubernetes adds, and that the policy
//! does not name, would be free to change. So the lists are compared with the schemas of each
//! version.

use std::collections::BTreeSet;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::manifests::Manifests;
use crate::schemas;

pub(crate) const POLICY: &str = "gpu-validator-gate-own-node-only";

/// Parts of a node, the type of each, and the fields of it that the policy need not name.
const PARTS: [(&str, &str, &[&str]); 3] = [
    ("spec", "io.k8s.api.core.v1.NodeSpec", &[]),
    ("status", "io.k8s.api.core.v1.NodeStatus", &[]),
    (
        "metadata",
        "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta",
        // The API server itself keeps these: an update cannot change them, or is refused for them.
        //
        // Source: kubernetes, apimachinery/pkg/api/validation/objectmeta.go,
        // ValidateObjectMetaAccessorUpdate.
        &[
            "creationTimestamp",
            "deletionGracePeriodSeconds",
            "deletionTimestamp",
            "generateName",
            "generation",
            "managedFields",
            "namespace",
            "resourceVersion",
            "selfLink",
            "uid",
        ],
    ),
];

pub(crate) fn check(manifests: &Manifests) -> anyhow::Result<()> {
    let policy = manifests.object("ValidatingAdmissionPolicy", POLICY)?;
    let expressions = expressions(policy);
    for version in schemas::VERSIONS {
        for (part, of, kept_by_the_server) in PARTS {
            let named = named(&expressions, part);
            let fields = schemas::fields(version, of)?;
            unnamed(&fields, &named, kept_by_the_server)
                .with_context(|| format!("{POLICY}, Kubernetes {version}, {part} of a node"))?;
        }
    }
    Ok(())
}

/// Every expression of a policy, those of its variables included.
fn expressions(policy: &Value) -> String {
    let lists = [&policy["spec"]["variables"], &policy["spec"]["validations"]];
    let entries = lists.into_iter().filter_map(Value::as_array).flatten();
    let texts: Vec<&str> = entries.filter_map(|it| it["expression"].as_str()).collect();
    texts.join("\n")
}

/// The fields of a part that are compared: named both of the new and of the old object.
fn named(expressions: &str, part: &str) -> BTreeSet<String> {
    let of = |object: &str| -> BTreeSet<String> {
        let words = expressions.split(|it: char| !(it.is_alphanumeric() || it == '.' || it == '?'));
        let fields = words.filter_map(|word| {
            let word = word.replace('?', "");
            let field = word.strip_prefix(object)?.strip_prefix(part)?;
            let field = field.strip_prefix('.')?.split('.').next()?;
            Some(field.to_owned())
        });
        fields.collect()
    };
    let mut named = of("object.");
    // The name is compared with the token's, not with the old object's.
    named.retain(|it| it == "name" || of("oldObject.").contains(it));
    named
}

fn unnamed(
    fields: &BTreeSet<String>,
    named: &BTreeSet<String>,
    kept_by_the_server: &[&str],
) -> anyhow::Result<()> {
    let free: Vec<&str> = fields
        .iter()
        .map(String::as_str)
        .filter(|it| !named.contains(*it) && !kept_by_the_server.contains(it))
        .collect();
    ensure!(
        free.is_empty(),
        "the policy does not compare {}",
        free.join(", ")
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_field_counts_when_old_and_new_are_compared() {
        let policy = json!({"spec": {
            "variables": [
                {"expression": "object.?spec.?taints.orValue([])"},
                {"expression": "oldObject.?spec.?taints.orValue([])"},
            ],
            "validations": [
                {"expression": "object.?spec.?podCIDR == oldObject.?spec.?podCIDR"},
                {"expression": "object.?spec.?providerID != ''"},
                {"expression": "object.metadata.name in names"},
            ],
        }});
        let expressions = expressions(&policy);
        let spec = named(&expressions, "spec");
        assert_eq!(
            spec.iter().map(String::as_str).collect::<Vec<_>>(),
            ["podCIDR", "taints"]
        );
        assert!(named(&expressions, "metadata").contains("name"));
        let fields = ["podCIDR", "providerID", "uid"].map(str::to_owned);
        let error = unnamed(&fields.into(), &spec, &["uid"]).expect_err("one is free");
        assert_eq!(error.to_string(), "the policy does not compare providerID");
    }
}
