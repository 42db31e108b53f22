//! Kubernetes, from the node's inside (the kubelet's sockets) and from the API server.

pub(crate) mod client;
mod cluster;
pub(crate) mod credentials;
mod gpu_pods;
mod kubelet;
mod processes;
mod requests;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What the kubelet, the API server and a kubeconfig may hold.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod readers {
    pub(crate) fn grpc(bytes: &[u8]) {
        super::kubelet::read_any(bytes);
    }

    pub(crate) fn api(bytes: &[u8]) {
        let text = String::from_utf8_lossy(bytes);
        if let Some(object) = super::client::read_any(bytes) {
            super::cluster::read_any(&object);
            super::gpu_pods::read_any(&object, &text);
        }
    }

    pub(crate) fn kubeconfig(bytes: &[u8]) {
        super::credentials::read_any(&String::from_utf8_lossy(bytes));
    }
}

pub(crate) use requests::{
    GET_NODE, PATCH_NODE, PATCH_NODE_STATUS, Purpose, device_taint_rules, kinds_of_resource_group,
    role_yaml,
};

use super::ProbeOptions;
use crate::interrupt::Interrupt;
use client::ApiClient;
use credentials::{Credentials, CredentialsWanted};
use gpu_pods::GpuPodOrder;
use kubelet::KubeletQuestion;
use validator_core::device_ids;
use validator_core::facts::{ApiFacts, Facts, GpuPods, KubernetesFacts, Reading};
use validator_core::level::Level;
use validator_core::profile::KubernetesProfile;

/// Where kubelets keep their state.
///
/// Source: Kubernetes reference, kubelet, `--root-dir`.
const KUBELET_ROOT: &str = "/var/lib/kubelet";
/// The namespace of the pods that look at GPUs, as the manifests make it.
const GPU_POD_NAMESPACE: &str = "gpu-bringup";
const GPU_POD_RESOURCE: &str = "nvidia.com/gpu";
/// How long those pods may take: an image is pulled in a minute or two, and the kernel takes
/// seconds.
const GPU_POD_DEADLINE: Duration = Duration::from_mins(5);
/// Time left to a stopped run for the removal of its pods.
const REMOVAL_DEADLINE: Duration = Duration::from_secs(2);

/// This node's name in the cluster where the command line does not say it: the profile's,
/// `NODE_NAME`, else the host's, which is what kubelets call themselves by default. In a container
/// the host's name is the pod's.
pub(crate) fn node_name_here(profile: &KubernetesProfile, facts: &Facts) -> Result<String, String> {
    let variable = || std::env::var("NODE_NAME").ok().filter(|it| !it.is_empty());
    if let Some(name) = profile.node_name.clone().or_else(variable) {
        return Ok(name);
    }
    if facts.host.in_container.value() != Some(&false) {
        return Err(
            "the node's name is not known in this container: set NODE_NAME from the downward API (spec.nodeName)"
                .to_owned(),
        );
    }
    match facts.host.hostname.value() {
        Some(name) => Ok(name.to_lowercase()),
        None => Err("the node's name is not known: set NODE_NAME".to_owned()),
    }
}

/// The credentials that the profile and the environment name.
pub(crate) fn credentials_wanted(profile: &KubernetesProfile) -> CredentialsWanted {
    CredentialsWanted::from_environment(
        profile.api.kubeconfig.as_deref().map(Path::new),
        profile.api.context.as_deref(),
        profile.api.allow_insecure == Some(true),
    )
}

/// For each device that the kubelet gave to a container, whose it is; `None` where there is no
/// kubelet's socket here.
pub(crate) fn assigned_devices(
    options: &ProbeOptions,
    interrupt: &Interrupt,
) -> Option<Result<BTreeMap<String, String>, String>> {
    let kubelet_root = options.kubernetes.kubelet_root.as_deref();
    let sysroot = options.sysroot.as_deref().unwrap_or(Path::new("/"));
    let root = below(sysroot, kubelet_root.unwrap_or(KUBELET_ROOT));
    kubelet::assigned(&root, options.deadlines.kubelet_call, interrupt)
}

/// Queries the kubelet, where there is one, and the API server, where there are credentials for it.
/// `facts` are those of host and GPUs.
pub(crate) fn probe(
    options: &ProbeOptions,
    interrupt: &Interrupt,
    facts: &Facts,
) -> KubernetesFacts {
    let profile = &options.kubernetes;
    let kubelet_root = profile.kubelet_root.as_deref().unwrap_or(KUBELET_ROOT);
    let sysroot = options.sysroot.as_deref().unwrap_or(Path::new("/"));
    let root = below(sysroot, kubelet_root);
    let mut seen = KubernetesFacts {
        kubelet_root: kubelet_root.to_owned(),
        kubelet_present: kubelet::is_present(&root),
        device_plugins: Reading::NotSupported,
        allocatable: Reading::NotSupported,
        assignments: Reading::NotSupported,
        api: Reading::NotSupported,
        ..KubernetesFacts::default()
    };
    let is_present = seen.kubelet_present == Reading::Value(true);
    if is_present {
        let question = KubeletQuestion {
            root: &root,
            deadline: options.deadlines.kubelet_call,
            list_and_watch: profile.list_and_watch == Some(true),
            allocatable_within: seconds(profile.allocatable_within_s).unwrap_or_default(),
            wanted: wanted_devices(profile, facts),
            interrupt,
        };
        kubelet::ask(&question, &mut seen);
        seen.process_owners = processes::owners(sysroot, facts);
    }
    if is_present || profile.api.required == Some(true) {
        seen.api = ask_api(options, interrupt, facts);
    }
    seen
}

/// Makes pods that use the GPUs, where level and profile require it and the API server can be
/// reached.
pub(crate) fn gpu_pods(
    options: &ProbeOptions,
    interrupt: &Interrupt,
    facts: &Facts,
) -> Option<Reading<GpuPods>> {
    let order = &options.kubernetes.gpu_pod;
    let asked = order.run.unwrap_or(options.level == Level::Extended);
    let seen = facts.kubernetes.as_ref()?;
    let api = seen.api.value()?;
    let image = order.image.as_ref().filter(|_| asked)?;
    Some(make_gpu_pods(options, interrupt, seen, api, image).into())
}

fn make_gpu_pods(
    options: &ProbeOptions,
    interrupt: &Interrupt,
    seen: &KubernetesFacts,
    api: &ApiFacts,
    image: &str,
) -> Result<GpuPods, String> {
    let profile = &options.kubernetes.gpu_pod;
    let node = match &api.node_name {
        Reading::Value(name) => name.clone(),
        Reading::NotRead(reason) => return Err(reason.clone()),
        Reading::NotSupported => return Err("the node's name is not known".to_owned()),
    };
    let resource = profile.resource.as_deref().unwrap_or(GPU_POD_RESOURCE);
    let free = free_devices(seen, api, resource);
    let count = match (profile.count, free) {
        (Some(count), Some(free)) => count.min(free),
        (Some(count), None) => count,
        (None, free) => free.unwrap_or(1),
    };
    let order = GpuPodOrder {
        node,
        namespace: profile
            .namespace
            .clone()
            .unwrap_or_else(|| GPU_POD_NAMESPACE.to_owned()),
        image: image.to_owned(),
        resource: resource.to_owned(),
        runtime_class: profile.runtime_class.clone(),
        count,
        free,
        deadline: seconds(profile.deadline_s).unwrap_or(GPU_POD_DEADLINE),
    };
    let credentials = credentials_wanted(&options.kubernetes)
        .find(interrupt)?
        .ok_or("the credentials for the API server are gone")?;
    let client = ApiClient::new(&credentials, options.deadlines.api_call, interrupt)?;
    let removal = ApiClient::new(&credentials, REMOVAL_DEADLINE, interrupt)?;
    gpu_pods::run(&client, &removal, &order, interrupt)
}

/// Devices of a resource that no container has, by the kubelet's lists.
fn free_devices(seen: &KubernetesFacts, api: &ApiFacts, resource: &str) -> Option<u32> {
    let all = match seen.allocatable.value() {
        Some(allocatable) => allocatable.get(resource).map_or(0, Vec::len),
        None => usize::try_from(*api.node.value()?.allocatable.get(resource)?).ok()?,
    };
    let taken = seen
        .assignments
        .value()?
        .iter()
        .filter(|it| it.resource == resource)
        .map(|it| it.device_ids.len())
        .sum();
    u32::try_from(all.saturating_sub(taken)).ok()
}

fn ask_api(options: &ProbeOptions, interrupt: &Interrupt, facts: &Facts) -> Reading<ApiFacts> {
    let profile = &options.kubernetes;
    let credentials: Credentials = match credentials_wanted(profile).find(interrupt) {
        Ok(Some(credentials)) => credentials,
        Ok(None) => return Reading::NotSupported,
        Err(reason) => return Reading::NotRead(reason),
    };
    match ApiClient::new(&credentials, options.deadlines.api_call, interrupt) {
        Ok(client) => Reading::Value(cluster::ask(
            &client,
            &credentials.server,
            node_name_here(profile, facts),
            profile,
        )),
        Err(reason) => Reading::NotRead(reason),
    }
}

/// How many devices the kubelet must have: the profile's number, else as many as NVML has, times
/// the replicas.
fn wanted_devices(profile: &KubernetesProfile, facts: &Facts) -> Option<u32> {
    if !profile.resources.is_empty() {
        return Some(profile.resources.values().sum());
    }
    let devices = device_ids::expected(facts).ok()?.len();
    Some(u32::try_from(devices).ok()? * profile.replicas.unwrap_or(1))
}

fn below(sysroot: &Path, path: &str) -> PathBuf {
    sysroot.join(path.trim_start_matches('/'))
}

fn seconds(value: Option<f64>) -> Option<Duration> {
    value.and_then(|it| Duration::try_from_secs_f64(it).ok())
}
