//! Every request that is made of the API server, and the RBAC rules that allow exactly these.
//!
//! The client takes its paths from here and from nowhere else, so that no request can be made that
//! the rules leave out.

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// What a request is made for; each is granted by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum Purpose {
    /// `gpu-validator kubernetes gate`: condition, annotation and taint of the node, taint of its
    /// devices
    Gate,
    /// The checks that read the API server: node, runtime classes, `DaemonSets`
    Checks,
    /// The checks that read the device plugin's pods, in its namespace
    DevicePlugin,
    /// Pods that use the GPUs, for the check `gpu_pod_runs`, in the namespace of its pods
    GpuPod,
}

/// One kind of request: verb and resource as RBAC names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ApiRequest {
    pub(crate) verb: &'static str,
    /// Empty for the core group.
    pub(crate) group: &'static str,
    pub(crate) version: &'static str,
    pub(crate) resource: &'static str,
    /// Empty for the resource itself.
    pub(crate) subresource: &'static str,
}

const fn core(verb: &'static str, resource: &'static str, subresource: &'static str) -> ApiRequest {
    ApiRequest {
        verb,
        group: "",
        version: "v1",
        resource,
        subresource,
    }
}

pub(crate) const GET_NODE: ApiRequest = core("get", "nodes", "");
pub(crate) const PATCH_NODE: ApiRequest = core("patch", "nodes", "");
pub(crate) const PATCH_NODE_STATUS: ApiRequest = core("patch", "nodes", "status");
pub(crate) const LIST_PODS: ApiRequest = core("list", "pods", "");
pub(crate) const CREATE_POD: ApiRequest = core("create", "pods", "");
pub(crate) const DELETE_PODS: ApiRequest = core("deletecollection", "pods", "");
pub(crate) const GET_POD_LOG: ApiRequest = core("get", "pods", "log");
pub(crate) const LIST_EVENTS: ApiRequest = core("list", "events", "");
pub(crate) const LIST_RUNTIME_CLASSES: ApiRequest = ApiRequest {
    verb: "list",
    group: "node.k8s.io",
    version: "v1",
    resource: "runtimeclasses",
    subresource: "",
};
pub(crate) const LIST_DAEMON_SETS: ApiRequest = ApiRequest {
    verb: "list",
    group: "apps",
    version: "v1",
    resource: "daemonsets",
    subresource: "",
};

/// The group of dynamic resource allocation.
const RESOURCE_GROUP: &str = "resource.k8s.io";

/// The kinds that a version of the group of dynamic resource allocation serves.
pub(crate) const fn kinds_of_resource_group(version: &'static str) -> ApiRequest {
    ApiRequest {
        verb: "get",
        group: RESOURCE_GROUP,
        version,
        resource: "",
        subresource: "",
    }
}

pub(crate) const fn device_taint_rules(verb: &'static str, version: &'static str) -> ApiRequest {
    ApiRequest {
        verb,
        group: RESOURCE_GROUP,
        version,
        resource: "devicetaintrules",
        subresource: "",
    }
}

/// All requests, by what they are made for. The kinds of a version are left out: role
/// system:discovery grants them to every account. RBAC knows no versions.
pub(crate) const REQUESTS: &[(Purpose, &[ApiRequest])] = &[
    (
        Purpose::Gate,
        &[
            GET_NODE,
            PATCH_NODE,
            PATCH_NODE_STATUS,
            // A server-side apply of an object that is not there needs `create` as well.
            device_taint_rules("create", "v1"),
            device_taint_rules("patch", "v1"),
            device_taint_rules("delete", "v1"),
        ],
    ),
    (
        Purpose::Checks,
        &[GET_NODE, LIST_RUNTIME_CLASSES, LIST_DAEMON_SETS],
    ),
    (
        Purpose::DevicePlugin,
        &[LIST_PODS, GET_POD_LOG, LIST_EVENTS],
    ),
    (
        Purpose::GpuPod,
        &[CREATE_POD, LIST_PODS, DELETE_PODS, GET_POD_LOG, LIST_EVENTS],
    ),
];

impl ApiRequest {
    /// `nodes/status`, as RBAC and kubectl write it.
    pub(crate) fn resource_name(&self) -> String {
        if self.subresource.is_empty() {
            self.resource.to_owned()
        } else {
            format!("{}/{}", self.resource, self.subresource)
        }
    }

    /// The path below the server's address.
    pub(crate) fn path(&self, namespace: Option<&str>, name: Option<&str>) -> String {
        let mut path = if self.group.is_empty() {
            format!("/api/{}", self.version)
        } else {
            format!("/apis/{}/{}", self.group, self.version)
        };
        if let Some(namespace) = namespace {
            let _ = write!(path, "/namespaces/{namespace}");
        }
        if !self.resource.is_empty() {
            let _ = write!(path, "/{}", self.resource);
        }
        if let Some(name) = name {
            let _ = write!(path, "/{name}");
        }
        if !self.subresource.is_empty() {
            let _ = write!(path, "/{}", self.subresource);
        }
        path
    }
}

/// The role that allows what `purpose` needs and nothing else, as YAML: a `Role` where `namespace`
/// is given, else a `ClusterRole`.
pub(crate) fn role_yaml(purpose: Purpose, name: &str, namespace: Option<&str>) -> String {
    let kind = if namespace.is_some() {
        "Role"
    } else {
        "ClusterRole"
    };
    let mut text = format!(
        "apiVersion: rbac.authorization.k8s.io/v1\nkind: {kind}\nmetadata:\n  name: {name}\n"
    );
    if let Some(namespace) = namespace {
        let _ = writeln!(text, "  namespace: {namespace}");
    }
    text.push_str("rules:\n");
    for ((group, resource), verbs) in rules(purpose) {
        let _ = write!(
            text,
            "  - apiGroups: [\"{group}\"]\n    resources: [\"{resource}\"]\n    verbs: [{}]\n",
            verbs
                .iter()
                .map(|verb| format!("\"{verb}\""))
                .collect::<Vec<_>>()
                .join(", ")
        );
    }
    text
}

/// Verbs by group and resource.
fn rules(purpose: Purpose) -> BTreeMap<(&'static str, String), Vec<&'static str>> {
    let mut rules: BTreeMap<_, Vec<&'static str>> = BTreeMap::new();
    let requests = REQUESTS
        .iter()
        .filter(|(of, _)| *of == purpose)
        .flat_map(|(_, requests)| *requests);
    for request in requests {
        let verbs = rules
            .entry((request.group, request.resource_name()))
            .or_default();
        if !verbs.contains(&request.verb) {
            verbs.push(request.verb);
        }
    }
    rules
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_those_of_the_api() {
        for (request, namespace, name, path) in [
            (GET_NODE, None, Some("a"), "/api/v1/nodes/a"),
            (PATCH_NODE_STATUS, None, Some("a"), "/api/v1/nodes/a/status"),
            (LIST_PODS, Some("x"), None, "/api/v1/namespaces/x/pods"),
            (
                GET_POD_LOG,
                Some("x"),
                Some("p"),
                "/api/v1/namespaces/x/pods/p/log",
            ),
            (LIST_DAEMON_SETS, None, None, "/apis/apps/v1/daemonsets"),
            (
                LIST_RUNTIME_CLASSES,
                None,
                None,
                "/apis/node.k8s.io/v1/runtimeclasses",
            ),
            (
                kinds_of_resource_group("v1"),
                None,
                None,
                "/apis/resource.k8s.io/v1",
            ),
            (
                device_taint_rules("patch", "v1beta2"),
                None,
                Some("a"),
                "/apis/resource.k8s.io/v1beta2/devicetaintrules/a",
            ),
        ] {
            assert_eq!(request.path(namespace, name), path);
        }
    }

    #[test]
    fn the_gate_may_change_its_node_and_the_taint_of_its_devices() {
        assert_eq!(
            role_yaml(Purpose::Gate, "gpu-validator-gate", None),
            "apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: gpu-validator-gate
rules:
  - apiGroups: [\"\"]
    resources: [\"nodes\"]
    verbs: [\"get\", \"patch\"]
  - apiGroups: [\"\"]
    resources: [\"nodes/status\"]
    verbs: [\"patch\"]
  - apiGroups: [\"resource.k8s.io\"]
    resources: [\"devicetaintrules\"]
    verbs: [\"create\", \"patch\", \"delete\"]
"
        );
    }

    #[test]
    fn no_role_has_a_wildcard_and_every_role_is_yaml() {
        for (purpose, _) in REQUESTS {
            let text = role_yaml(*purpose, "x", Some("y"));
            assert!(!text.contains('*'), "{text}");
            let role: serde_json::Value = serde_yaml::from_str(&text).expect("YAML");
            assert_eq!(role["kind"], "Role");
            assert!(!role["rules"].as_array().expect("rules").is_empty());
        }
    }
}
