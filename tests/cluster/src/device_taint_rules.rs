//! `DeviceTaintRule` of resource.k8s.io, refused as the real API server refuses it.

use std::sync::LazyLock;

use regex::Regex;
use serde_json::{Value, json};

/// The fields and values that a real API server takes, with their source.
static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    serde_json::from_str(include_str!("../devicetaintrule.schema.json")).expect("a schema")
});

/// The versions of resource.k8s.io that serve other kinds from 1.34 on, whether or not they serve
/// this one.
const VERSIONS_WITHOUT: [&str; 1] = ["v1"];

/// The API server's list of the kinds of a version; `None` where it does not serve the version.
pub(crate) fn discovery(version: &str, served: Option<&str>) -> Option<Value> {
    let mut resources = vec![json!({"name": "resourceslices", "namespaced": false})];
    if served == Some(version) {
        resources.push(json!({
            "name": "devicetaintrules",
            "namespaced": false,
            "kind": "DeviceTaintRule",
            "verbs": ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"],
        }));
    } else if !VERSIONS_WITHOUT.contains(&version) {
        return None;
    }
    Some(json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": format!("resource.k8s.io/{version}"),
        "resources": resources,
    }))
}

/// The refusal of an object that is applied at this version and name: status and message.
pub(crate) fn refusal(object: &Value, version: &str, name: &str) -> Option<(u16, String)> {
    let group_version = format!("resource.k8s.io/{version}");
    if object["apiVersion"] != group_version.as_str() || object["kind"] != "DeviceTaintRule" {
        return Some((
            400,
            format!("the object is no DeviceTaintRule of {group_version}"),
        ));
    }
    if object["metadata"]["name"] != name {
        return Some((
            400,
            "the name of the object does not match the name on the URL".to_owned(),
        ));
    }
    objection(object, &SCHEMA, "").map(|it| match it {
        Objection::UnknownField(path) => (
            500,
            format!("failed to create typed patch object: {path}: field not declared in schema"),
        ),
        Objection::Invalid(path, text) => (
            422,
            format!("DeviceTaintRule \"{name}\" is invalid: {path}: {text}"),
        ),
    })
}

enum Objection {
    UnknownField(String),
    Invalid(String, String),
}

/// The first objection of the schema, in the keywords that it uses.
fn objection(value: &Value, schema: &Value, path: &str) -> Option<Objection> {
    let invalid = |text: &str| Some(Objection::Invalid(path.to_owned(), text.to_owned()));
    if let Some(allowed) = schema["enum"].as_array()
        && !allowed.contains(value)
    {
        return invalid("Unsupported value");
    }
    match schema["type"].as_str() {
        Some("object") => return of_object(value, schema, path),
        Some("array") => {
            let Some(items) = value.as_array() else {
                return invalid("must be a list");
            };
            let mut items = items.iter().enumerate();
            return items.find_map(|(index, it)| {
                objection(it, &schema["items"], &format!("{path}[{index}]"))
            });
        }
        Some("boolean") if !value.is_boolean() => return invalid("must be a boolean"),
        Some("string") => {
            let Some(text) = value.as_str() else {
                return invalid("must be a string");
            };
            let length = text.len() as u64;
            if schema["maxLength"].as_u64().is_some_and(|it| length > it) {
                return invalid("Too long");
            }
            if schema["minLength"].as_u64().is_some_and(|it| length < it) {
                return invalid("Required value");
            }
            if let Some(pattern) = schema["pattern"].as_str()
                && !Regex::new(pattern).expect("a pattern").is_match(text)
            {
                return invalid("Invalid value");
            }
        }
        _ => {}
    }
    None
}

fn of_object(value: &Value, schema: &Value, path: &str) -> Option<Objection> {
    let Some(fields) = value.as_object() else {
        return Some(Objection::Invalid(
            path.to_owned(),
            "must be an object".to_owned(),
        ));
    };
    let required = schema["required"].as_array().into_iter().flatten();
    for name in required.filter_map(Value::as_str) {
        if !fields.contains_key(name) {
            return Some(Objection::Invalid(
                format!("{path}.{name}"),
                "Required value".to_owned(),
            ));
        }
    }
    for (name, field) in fields {
        let path = format!("{path}.{name}");
        match schema["properties"].get(name) {
            Some(schema) => {
                if let Some(objection) = objection(field, schema, &path) {
                    return Some(objection);
                }
            }
            None if schema["additionalProperties"] == false => {
                return Some(Objection::UnknownField(path));
            }
            None => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule() -> Value {
        json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceTaintRule",
            "metadata": {"name": "a"},
            "spec": {
                "deviceSelector": {"driver": "gpu.nvidia.com", "pool": "node-1.example.com"},
                "taint": {"key": "example.com/ill", "value": "Failed", "effect": "NoSchedule"},
            },
        })
    }

    /// A change that makes a right rule wrong.
    type Change = fn(&mut Value);

    fn refused(change: Change) -> (u16, String) {
        let mut rule = rule();
        change(&mut rule);
        refusal(&rule, "v1", "a").expect("refused")
    }

    #[test]
    fn a_rule_that_the_api_server_takes_is_taken() {
        assert_eq!(refusal(&rule(), "v1", "a"), None);
        let mut of_1_36 = rule();
        of_1_36["apiVersion"] = json!("resource.k8s.io/v1beta2");
        assert_eq!(refusal(&of_1_36, "v1beta2", "a"), None);
    }

    #[test]
    fn what_the_api_server_refuses_is_refused() {
        let cases: [(u16, &str, Change); 9] = [
            (422, ".spec.taint.effect: Unsupported value", |it| {
                it["spec"]["taint"]["effect"] = json!("PreferNoSchedule");
            }),
            (422, ".spec.taint.value: Invalid value", |it| {
                it["spec"]["taint"]["value"] = json!("two words");
            }),
            (422, ".spec.taint.value: Too long", |it| {
                it["spec"]["taint"]["value"] = json!("x".repeat(64));
            }),
            (422, ".spec.taint.key: Invalid value", |it| {
                it["spec"]["taint"]["key"] = json!("/ill");
            }),
            (422, ".spec.taint: Required value", |it| {
                it["spec"] = json!({});
            }),
            (422, ".spec.deviceSelector.device: Invalid value", |it| {
                it["spec"]["deviceSelector"]["device"] = json!("GPU 0");
            }),
            // Fields of 1.33 that 1.35 took away.
            (500, ".spec.deviceSelector.selectors: field not", |it| {
                it["spec"]["deviceSelector"]["selectors"] = json!([]);
            }),
            (400, "no DeviceTaintRule of", |it| {
                it["apiVersion"] = json!("resource.k8s.io/v1beta2");
            }),
            (400, "does not match the name", |it| {
                it["metadata"]["name"] = json!("b");
            }),
        ];
        for (status, words, change) in cases {
            let (answered, text) = refused(change);
            assert_eq!(answered, status, "{text}");
            assert!(text.contains(words), "{text}");
        }
    }

    #[test]
    fn a_version_may_be_served_without_the_kind() {
        let names = |version: &str, served: Option<&str>| {
            discovery(version, served).map(|it| it.to_string().contains("devicetaintrules"))
        };
        assert_eq!(names("v1", Some("v1")), Some(true));
        assert_eq!(names("v1", Some("v1beta2")), Some(false));
        assert_eq!(names("v1beta2", Some("v1beta2")), Some(true));
        assert_eq!(names("v1alpha3", None), None);
    }
}
