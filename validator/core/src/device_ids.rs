//! The ids of a device plugin's devices, and which of them a node must have.

use std::collections::{BTreeMap, BTreeSet};

use crate::facts::{ApiFacts, Facts, GpuFacts, KubernetesFacts, Reading};
use crate::findings::Outcome;
use crate::profile::Profile;
use crate::queries::{self, counted};

/// What follows the UUID of a device that several containers share.
///
/// Source: NVIDIA k8s-device-plugin, `internal/rm/devices.go`, annotated ids.
const REPLICA_SEPARATOR: &str = "::";

/// The domain of NVIDIA's resources; its network devices have it, too.
pub const RESOURCE_DOMAIN: &str = "nvidia.com/";

/// Whether a resource is one of GPUs by its name: `nvidia.com/gpu`, `nvidia.com/gpu.shared`,
/// `nvidia.com/mig-1g.10gb`.
pub(crate) fn is_gpu_resource(resource: &str) -> bool {
    let name = resource.strip_prefix(RESOURCE_DOMAIN);
    name.is_some_and(|it| it.starts_with("gpu") || it.starts_with("mig-"))
}

/// Whether devices are GPUs: by the name of their resource, or where the plugin was configured with
/// another name, by their ids.
pub fn are_gpus(resource: &str, ids: &[String]) -> bool {
    is_gpu_resource(resource)
        || resource.starts_with(RESOURCE_DOMAIN) && ids.iter().any(|it| is_uuid(it))
}

/// Whether an id identifies its GPU; Google's device plugin numbers its devices.
pub(crate) fn is_uuid(device_id: &str) -> bool {
    device_id.starts_with("GPU-") || device_id.starts_with("MIG-")
}

/// The UUID of the GPU or MIG device: `GPU-8f0c…` of `GPU-8f0c…::3`.
pub(crate) fn uuid(device_id: &str) -> &str {
    device_id
        .split_once(REPLICA_SEPARATOR)
        .map_or(device_id, |(uuid, _)| uuid)
}

/// Whether this is one of several shares of a GPU.
pub(crate) fn is_replica(device_id: &str) -> bool {
    device_id.contains(REPLICA_SEPARATOR)
}

/// How many devices there are of each UUID.
pub(crate) fn counts<'a>(ids: impl IntoIterator<Item = &'a String>) -> BTreeMap<&'a str, u32> {
    let mut counts = BTreeMap::new();
    for id in ids {
        *counts.entry(uuid(id)).or_default() += 1;
    }
    counts
}

/// UUIDs of the MIG devices of this GPU where MIG is on, else of the GPU itself.
fn of_gpu(gpu: &GpuFacts) -> Result<Vec<String>, Outcome> {
    let uuid = gpu.uuid.required("UUID of a GPU")?;
    let mig_is_on = match &gpu.mig {
        Reading::NotSupported => false,
        mig => mig.required(&format!("MIG mode of {uuid}"))?.current,
    };
    if !mig_is_on {
        return Ok(vec![uuid.clone()]);
    }
    let devices = gpu
        .mig_devices
        .required(&format!("MIG devices of {uuid}"))?;
    Ok(devices.iter().map(|it| it.uuid.clone()).collect())
}

/// UUIDs of everything that containers may be given: GPUs, and MIG devices of GPUs in MIG mode.
pub fn expected(facts: &Facts) -> Result<BTreeSet<String>, Outcome> {
    if queries::in_container(facts)
        && let Ok(on_the_bus) = queries::pci_gpus(facts)
        && on_the_bus.len() > facts.gpus.len()
    {
        return Err(Outcome::error(format!(
            "this container sees {} of the node's {}, so that nothing can be compared",
            facts.gpus.len(),
            counted(on_the_bus.len(), "GPU")
        )));
    }
    facts.nvml.initialized.required("NVML's list of GPUs")?;
    let mut uuids = BTreeSet::new();
    for gpu in &facts.gpus {
        uuids.extend(of_gpu(gpu)?);
    }
    if uuids.is_empty() {
        return Err(Outcome::error(
            "NVML lists no GPU or MIG device, so that there is nothing to compare with",
        ));
    }
    Ok(uuids)
}

/// The facts of Kubernetes, if they were collected.
fn seen(facts: &Facts) -> Result<&KubernetesFacts, Outcome> {
    facts
        .kubernetes
        .as_ref()
        .ok_or_else(|| Outcome::skip("these facts were collected without Kubernetes"))
}

/// What was seen from inside of a node with a kubelet. Without one the check is skipped, unless the
/// profile requires one.
pub(crate) fn kubelet<'a>(
    facts: &'a Facts,
    profile: &Profile,
) -> Result<&'a KubernetesFacts, Outcome> {
    let required = profile.kubernetes.required == Some(true);
    let seen = match seen(facts) {
        Err(_) if required => {
            return Err(Outcome::error(
                "the profile requires a kubelet, and these facts were collected without Kubernetes",
            ));
        }
        seen => seen?,
    };
    if *seen.kubelet_present.required("the kubelet's folder")? {
        return Ok(seen);
    }
    let root = &seen.kubelet_root;
    let container = if queries::in_container(facts) {
        ", or this container does not mount its folder"
    } else {
        ""
    };
    Err(if required {
        Outcome::error(format!(
            "the profile requires a kubelet, and none has made its folders in {root}{container}"
        ))
        .remedy(format!(
            "check that the kubelet runs: systemctl status kubelet; in a container, mount {root}/device-plugins and {root}/pod-resources; another folder is named by kubernetes.kubelet_root in the profile"
        ))
    } else {
        Outcome::skip(format!(
            "no kubelet has made its folders in {root}{container}"
        ))
    })
}

/// The API server's answer. Without credentials the check is skipped, unless the profile requires
/// the API.
pub(crate) fn api<'a>(facts: &'a Facts, profile: &Profile) -> Result<&'a ApiFacts, Outcome> {
    if profile.kubernetes.api.required == Some(true) {
        let Some(seen) = &facts.kubernetes else {
            return Err(Outcome::error(
                "the profile requires the API server, and these facts were collected without Kubernetes",
            ));
        };
        if seen.api == Reading::NotSupported {
            return Err(Outcome::error(
                "the profile requires the API server, and there are no credentials for one: no service account, no KUBECONFIG",
            )
            .remedy("run as a pod with a service account, or name a kubeconfig: kubernetes.api.kubeconfig in the profile, or KUBECONFIG"));
        }
        return Ok(seen.api.required("the API server")?);
    }
    let seen = kubelet(facts, profile)?;
    match &seen.api {
        Reading::NotSupported => Err(Outcome::skip(
            "there are no credentials for the API server: no service account, no KUBECONFIG",
        )),
        api => Ok(api.required("the API server")?),
    }
}

/// A few ids for a person, and how many more there are.
pub(crate) fn named<'a>(ids: impl IntoIterator<Item = &'a str>) -> String {
    const NAMED_MAXIMUM: usize = 4;
    let ids: Vec<&str> = ids.into_iter().collect();
    let mut text = ids.get(..NAMED_MAXIMUM).unwrap_or(&ids).join(", ");
    if ids.len() > NAMED_MAXIMUM {
        text = format!("{text} and {} more", ids.len() - NAMED_MAXIMUM);
    }
    text
}

/// What NVIDIA's plugin with migStrategy none does on a node whose GPUs are in MIG mode.
const WHOLE_GPUS: &str = " (of a GPU in MIG mode pods can be given its MIG devices only: the device plugin needs migStrategy single or mixed)";

/// Whether `ids` are the node's devices, each shared alike: in words what is right, or what
/// differs.
pub(crate) fn compare(
    ids: &[String],
    expected: &BTreeSet<String>,
    profile: &Profile,
) -> Result<String, Vec<String>> {
    let devices = counts(ids);
    let shares_wanted = profile.kubernetes.replicas;
    if !ids.is_empty() && !ids.iter().any(|it| is_uuid(it)) {
        let wanted = expected.len() * shares_wanted.unwrap_or(1) as usize;
        return if ids.len() == wanted {
            Ok(format!(
                "{} as the node has, by number only, since their ids are not UUIDs",
                counted(ids.len(), "device")
            ))
        } else {
            Err(vec![format!(
                "{} instead of {wanted}: {}",
                counted(ids.len(), "device"),
                named(ids.iter().map(String::as_str))
            )])
        };
    }
    let mut wrong = Vec::new();
    let missing = expected.iter().map(String::as_str);
    let missing: Vec<&str> = missing.filter(|it| !devices.contains_key(it)).collect();
    if !missing.is_empty() {
        wrong.push(format!(
            "{} missing: {}",
            missing.len(),
            named(missing.iter().copied())
        ));
    }
    let unknown = devices.keys().copied();
    let unknown: Vec<&str> = unknown.filter(|it| !expected.contains(*it)).collect();
    if !unknown.is_empty() {
        let whole = unknown.iter().any(|it| it.starts_with("GPU-"));
        let parts = expected.iter().any(|it| it.starts_with("MIG-"));
        wrong.push(format!(
            "{} that the node does not have: {}{}",
            unknown.len(),
            named(unknown.iter().copied()),
            if whole && parts { WHOLE_GPUS } else { "" }
        ));
    }
    // A plugin that shares one GPU shares all of its kind alike.
    let shares = shares_wanted
        .or_else(|| devices.values().copied().max())
        .unwrap_or(1);
    let others: Vec<&str> = devices
        .iter()
        .filter(|(_, count)| **count != shares)
        .map(|(uuid, _)| *uuid)
        .collect();
    if !others.is_empty() {
        wrong.push(format!(
            "not {} each: {}",
            counted(shares as usize, "share"),
            named(others.iter().copied())
        ));
    }
    if !wrong.is_empty() {
        return Err(wrong);
    }
    let of_devices = counted(expected.len(), "device");
    Ok(if ids.iter().any(|it| is_replica(it)) {
        format!("all {of_devices}, each shared {shares} times")
    } else {
        format!("all {of_devices}")
    })
}

/// Whether GPUs come from a device plugin here: where the driver for dynamic resource allocation is
/// and no plugin, its checks do not apply.
pub(crate) fn refuse_dynamic_resource_allocation(kubelet: &KubernetesFacts) -> Result<(), Outcome> {
    let no_plugin = kubelet.device_plugins.value().is_none_or(Vec::is_empty);
    if kubelet.dynamic_resource_allocation && no_plugin {
        return Err(Outcome::skip(
            "GPUs are given out by dynamic resource allocation here, not by a device plugin",
        ));
    }
    Ok(())
}

/// A device plugin answers; without one nothing else of it can be right, which
/// `device_plugin_registered` reports.
pub(crate) fn require_device_plugin(
    kubelet: &KubernetesFacts,
    profile: &Profile,
) -> Result<(), Outcome> {
    refuse_dynamic_resource_allocation(kubelet)?;
    let plugins = kubelet
        .device_plugins
        .required("the device plugins' sockets")?;
    if plugins.iter().any(|it| it.answers == Reading::Value(true)) {
        return Ok(());
    }
    Err(queries::reported_by(
        "device_plugin_registered",
        "no device plugin of NVIDIA answers",
        profile,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|&it| it.to_owned()).collect()
    }

    fn two() -> BTreeSet<String> {
        ids(&["GPU-a", "GPU-b"]).into_iter().collect()
    }

    fn compared(texts: &[&str], replicas: Option<u32>) -> Result<String, Vec<String>> {
        let mut profile = Profile::default();
        profile.kubernetes.replicas = replicas;
        compare(&ids(texts), &two(), &profile)
    }

    #[test]
    fn the_nodes_devices_are_right_and_every_difference_is_named() {
        let wrong = |texts: &[&str]| compared(texts, None).unwrap_err().join("; ");
        assert_eq!(
            compared(&["GPU-a", "GPU-b"], None).as_deref(),
            Ok("all 2 devices")
        );
        assert_eq!(wrong(&["GPU-a"]), "1 missing: GPU-b");
        assert_eq!(wrong(&[]), "2 missing: GPU-a, GPU-b");
        assert_eq!(
            wrong(&["GPU-a", "GPU-c"]),
            "1 missing: GPU-b; 1 that the node does not have: GPU-c"
        );
    }

    #[test]
    fn whole_gpus_in_place_of_their_parts_are_explained() {
        let parts = ids(&["MIG-a", "MIG-b"]).into_iter().collect();
        let wrong = compare(&ids(&["GPU-a"]), &parts, &Profile::default()).unwrap_err();
        assert!(
            wrong[1].contains("GPU-a (of a GPU in MIG mode"),
            "{wrong:?}"
        );
        let wrong = compare(&ids(&["MIG-c"]), &parts, &Profile::default()).unwrap_err();
        assert!(!wrong[1].contains("MIG mode"), "{wrong:?}");
    }

    #[test]
    fn shares_are_counted() {
        let shared = ["GPU-a::0", "GPU-a::1", "GPU-b::0", "GPU-b::1"];
        for replicas in [None, Some(2)] {
            assert_eq!(
                compared(&shared, replicas).as_deref(),
                Ok("all 2 devices, each shared 2 times")
            );
        }
        assert!(compared(&shared, Some(4)).is_err());
        assert!(compared(&shared[..3], None).is_err());
        assert!(compared(&["GPU-a", "GPU-b"], Some(2)).is_err());
    }

    #[test]
    fn numbered_devices_are_compared_by_number() {
        assert!(compared(&["nvidia0", "nvidia1"], None).is_ok());
        assert!(compared(&["nvidia0"], None).is_err());
    }

    #[test]
    fn network_devices_are_no_gpus() {
        assert!(are_gpus("nvidia.com/gpu", &[]));
        assert!(are_gpus("nvidia.com/mig-1g.10gb", &[]));
        assert!(are_gpus("nvidia.com/a100", &ids(&["GPU-a"])));
        assert!(!are_gpus("nvidia.com/hostdev", &ids(&["0000:3b:00.0"])));
        assert!(!are_gpus("amd.com/gpu", &ids(&["GPU-a"])));
    }
}
