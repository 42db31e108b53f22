//! The `DeviceTaintRule` of a node: its taint once more, for GPUs that pods request by claims (DRA).

use serde_json::{Value, json};

use crate::probe::json::at;
use crate::probe::kubernetes::client::{ApiClient, ApiError, PatchKind, Target};
use crate::probe::kubernetes::{device_taint_rules, kinds_of_resource_group};

/// The versions of resource.k8s.io that have had the kind, the newest first; 1.37 serves `v1` by
/// default, 1.36 `v1beta2` and 1.33 to 1.35 `v1alpha3` where the administrator enables it.
///
/// Source: kubernetes/api v0.37.0-beta.0, resource/*/types.go; kubernetes/kubernetes,
/// pkg/features/kube_features.go, DRADeviceTaintRules. Read on 2026-11-23.
const VERSIONS: [&str; 3] = ["v1", "v1beta2", "v1alpha3"];
/// NVIDIA's driver names itself so, and its pool by the node.
///
/// Source: NVIDIA/k8s-dra-driver-gpu at 22407113, cmd/gpu-kubelet-plugin/{main,driver}.go.
const DRIVER: &str = "gpu.nvidia.com";
/// Effects that a device's taint may have; `PreferNoSchedule` is one of nodes only.
///
/// Source: kubernetes/api v0.37.0-beta.0, resource/v1/types.go, `DeviceTaintEffect`.
const EFFECTS: [&str; 2] = ["NoSchedule", "NoExecute"];

/// The taint of all GPUs of a node.
pub(super) struct DeviceTaint<'a> {
    pub(super) node: &'a str,
    pub(super) key: &'a str,
    pub(super) effect: &'a str,
}

impl DeviceTaint<'_> {
    fn rule_name(&self) -> String {
        format!("gpu-validator.{}", self.node)
    }

    /// The version at which this cluster has the kind; `None` where it has none, or where the effect
    /// is not one of devices.
    pub(super) fn version(&self, client: &ApiClient) -> Result<Option<&'static str>, ApiError> {
        if !EFFECTS.contains(&self.effect) {
            return Ok(None);
        }
        for version in VERSIONS {
            let kinds = match client.get(Target::everywhere(kinds_of_resource_group(version))) {
                Ok(kinds) => kinds,
                Err(error) if error.status == Some(404) => continue,
                Err(error) => return Err(error),
            };
            let mut kinds = at(&kinds, "/resources").as_array().into_iter().flatten();
            if kinds.any(|it| at(it, "/name") == "devicetaintrules") {
                return Ok(Some(version));
            }
        }
        Ok(None)
    }

    /// Taints the GPUs. The rule belongs to the node object, so that it is deleted with it.
    pub(super) fn put(
        &self,
        client: &ApiClient,
        version: &'static str,
        node: &Value,
        reason: &str,
    ) -> Result<(), ApiError> {
        let (name, rule) = (self.rule_name(), self.rule(version, node, reason));
        let target = Target::object(device_taint_rules("patch", version), &name);
        client.patch(target, PatchKind::Apply, &rule)?;
        Ok(())
    }

    /// Removes the taint; `false` where there was none.
    pub(super) fn remove(
        &self,
        client: &ApiClient,
        version: &'static str,
    ) -> Result<bool, ApiError> {
        let name = self.rule_name();
        client.delete(Target::object(device_taint_rules("delete", version), &name))
    }

    fn rule(&self, version: &str, node: &Value, reason: &str) -> Value {
        json!({
            "apiVersion": format!("resource.k8s.io/{version}"),
            "kind": "DeviceTaintRule",
            "metadata": {
                "name": self.rule_name(),
                "labels": {"app.kubernetes.io/part-of": "gpu-bringup"},
                "ownerReferences": [{
                    "apiVersion": "v1",
                    "kind": "Node",
                    "name": self.node,
                    "uid": at(node, "/metadata/uid"),
                }],
            },
            "spec": {
                "deviceSelector": {"driver": DRIVER, "pool": self.node},
                "taint": {"key": self.key, "value": reason, "effect": self.effect},
            },
        })
    }
}
