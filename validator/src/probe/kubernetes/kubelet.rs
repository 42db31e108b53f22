//! The kubelet's sockets and those of NVIDIA's device plugins: gRPC over unix sockets.
//!
//! Every call has a deadline, and connecting to a unix socket does not block, so that a kubelet
//! that hangs costs its own answers and no more.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::pin::pin;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};

use super::client::wait_unless_interrupted;
use crate::interrupt::Interrupt;
use validator_core::device_ids;
use validator_core::facts::{
    AllocatableWait, DeviceAssignment, DevicePlugin, KubernetesFacts, PluginDevice, Reading,
};

/// Written by build.rs from `proto/deviceplugin/v1beta1.proto`.
#[allow(
    clippy::all,
    clippy::pedantic,
    missing_debug_implementations,
    unreachable_pub,
    unused_qualifications
)]
mod deviceplugin {
    tonic::include_proto!("v1beta1");
}

/// Written by build.rs from `proto/podresources/v1.proto`.
#[allow(
    clippy::all,
    clippy::pedantic,
    missing_debug_implementations,
    unreachable_pub,
    unused_qualifications
)]
mod podresources {
    tonic::include_proto!("v1");
}

use deviceplugin::Empty;
use deviceplugin::device_plugin_client::DevicePluginClient;
use podresources::pod_resources_lister_client::PodResourcesListerClient;

/// Folders that the kubelet makes below its root.
///
/// Source: Kubernetes documentation, Device Plugins.
const DEVICE_PLUGINS: &str = "device-plugins";
const POD_RESOURCES: &str = "pod-resources";
const POD_RESOURCES_SOCKET: &str = "kubelet.sock";
/// What the driver for dynamic resource allocation makes below the root.
///
/// Source: NVIDIA k8s-dra-driver-gpu, the name of its kubelet plugin.
const DYNAMIC_RESOURCE_ALLOCATION: &str = "plugins/gpu.nvidia.com";
/// An answer larger than this is not one of a kubelet; it has a page for each of a node's few
/// hundred pods.
const ANSWER_BYTES_MAXIMUM: usize = 16 << 20;
/// Poll interval while a kubelet is awaited.
const ASK_AGAIN: Duration = Duration::from_millis(500);

/// Ids of devices by the names of their resources.
type Resources = BTreeMap<String, Vec<String>>;

/// The way of querying the kubelet.
pub(super) struct KubeletQuestion<'a> {
    /// The kubelet's folder as this process finds it, sysroot included.
    pub(super) root: &'a Path,
    /// For one answer.
    pub(super) deadline: Duration,
    pub(super) list_and_watch: bool,
    /// How long `wanted` devices may take to become allocatable.
    pub(super) allocatable_within: Duration,
    /// Devices that the node has, where that is known.
    pub(super) wanted: Option<u32>,
    pub(super) interrupt: &'a Interrupt,
}

/// Whether a kubelet has made its folders here.
pub(super) fn is_present(root: &Path) -> Reading<bool> {
    let is_folder = |name: &str| match std::fs::metadata(root.join(name)) {
        Ok(found) => Ok(found.is_dir()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(format!(
            "cannot read {}: {error}",
            root.join(name).display()
        )),
    };
    let both = is_folder(DEVICE_PLUGINS).and_then(|it| Ok(it || is_folder(POD_RESOURCES)?));
    both.into()
}

/// Queries everything and fills in the kubelet's answers.
pub(super) fn ask(question: &KubeletQuestion<'_>, facts: &mut KubernetesFacts) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            let reason = format!("no runtime for gRPC: {error}");
            facts.device_plugins = Reading::NotRead(reason.clone());
            facts.allocatable = Reading::NotRead(reason.clone());
            facts.assignments = Reading::NotRead(reason);
            return;
        }
    };
    facts.dynamic_resource_allocation = question.root.join(DYNAMIC_RESOURCE_ALLOCATION).is_dir();
    let (allocatable, wait) = wait_for_allocatable(question, &runtime);
    facts.allocatable = allocatable.into();
    facts.allocatable_wait = wait;
    facts.assignments = assignments(question, &runtime).into();
    // Last, since a plugin that was waited for may have started only now.
    facts.device_plugins = device_plugins(question, &runtime).into();
}

/// For each device of a container, `pod namespace/name`; `None` where the kubelet has no such
/// socket.
pub(super) fn assigned(
    root: &Path,
    deadline: Duration,
    interrupt: &Interrupt,
) -> Option<Result<BTreeMap<String, String>, String>> {
    let socket = root.join(POD_RESOURCES).join(POD_RESOURCES_SOCKET);
    match std::fs::symlink_metadata(&socket) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        Err(error) => return Some(Err(format!("cannot read {}: {error}", socket.display()))),
    }
    let question = KubeletQuestion {
        root,
        deadline,
        list_and_watch: false,
        allocatable_within: Duration::ZERO,
        wanted: None,
        interrupt,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("no runtime for gRPC: {error}"));
    let assigned = runtime.and_then(|runtime| assignments(&question, &runtime));
    Some(assigned.map(|assigned| {
        let devices = assigned.into_iter().flat_map(|it| {
            let owner = format!("pod {}/{}", it.namespace, it.pod);
            it.device_ids.into_iter().map(move |id| (id, owner.clone()))
        });
        devices.collect()
    }))
}

fn wait_for_allocatable(
    question: &KubeletQuestion<'_>,
    runtime: &Runtime,
) -> (Result<Resources, String>, Option<AllocatableWait>) {
    let start = Instant::now();
    loop {
        let answer = allocatable(question, runtime);
        let devices = answer
            .as_ref()
            .map_or(0, |it| it.values().map(Vec::len).sum::<usize>());
        let devices = u32::try_from(devices).unwrap_or(u32::MAX);
        let waited = start.elapsed();
        let wait = question
            .wanted
            .filter(|_| !question.allocatable_within.is_zero())
            .map(|wanted| AllocatableWait {
                waited_s: waited.as_secs_f64(),
                devices,
                wanted,
            });
        let reached = question.wanted.is_none_or(|wanted| devices >= wanted);
        let left = question.allocatable_within.saturating_sub(waited);
        if reached
            || left.is_zero()
            || !wait_unless_interrupted(ASK_AGAIN.min(left), question.interrupt)
        {
            return (answer, wait);
        }
    }
}

fn allocatable(question: &KubeletQuestion<'_>, runtime: &Runtime) -> Result<Resources, String> {
    let answer = runtime.block_on(async {
        let channel = connect(question, POD_RESOURCES, POD_RESOURCES_SOCKET).await?;
        let mut client =
            PodResourcesListerClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAXIMUM);
        let request = podresources::AllocatableResourcesRequest {};
        let answer = client.get_allocatable_resources(request);
        within(question, "GetAllocatableResources", answer).await
    })?;
    Ok(gpus_of(answer.into_inner()))
}

fn gpus_of(answer: podresources::AllocatableResourcesResponse) -> Resources {
    let mut resources: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for devices in answer.devices {
        if device_ids::are_gpus(&devices.resource_name, &devices.device_ids) {
            // The kubelet gives one entry a NUMA node.
            resources
                .entry(devices.resource_name)
                .or_default()
                .extend(devices.device_ids);
        }
    }
    resources
        .into_iter()
        .map(|(name, ids)| (name, ids.into_iter().collect()))
        .collect()
}

fn assignments(
    question: &KubeletQuestion<'_>,
    runtime: &Runtime,
) -> Result<Vec<DeviceAssignment>, String> {
    let answer = runtime.block_on(async {
        let channel = connect(question, POD_RESOURCES, POD_RESOURCES_SOCKET).await?;
        let mut client =
            PodResourcesListerClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAXIMUM);
        let answer = client.list(podresources::ListPodResourcesRequest {});
        within(question, "List", answer).await
    })?;
    Ok(assigned_by(answer.into_inner()))
}

fn assigned_by(answer: podresources::ListPodResourcesResponse) -> Vec<DeviceAssignment> {
    let mut assignments = Vec::new();
    for pod in answer.pod_resources {
        for container in pod.containers {
            for (resource, device_ids) in devices_of(&container) {
                assignments.push(DeviceAssignment {
                    namespace: pod.namespace.clone(),
                    pod: pod.name.clone(),
                    container: container.name.clone(),
                    resource,
                    device_ids,
                });
            }
        }
    }
    assignments
}

/// Messages of the kubelet and of device plugins, as [`crate::fuzzing`] makes them.
#[cfg(any(test, feature = "fuzzing"))]
pub(super) fn read_any(bytes: &[u8]) {
    use prost::Message as _;
    if let Ok(answer) = podresources::AllocatableResourcesResponse::decode(bytes) {
        let _ = gpus_of(answer);
    }
    if let Ok(answer) = podresources::ListPodResourcesResponse::decode(bytes) {
        let assignments = assigned_by(answer);
        assert!(assignments.len() <= bytes.len());
    }
    let _ = deviceplugin::ListAndWatchResponse::decode(bytes);
}

/// NVIDIA's devices of a container: a device plugin's by resource, those of dynamic resource
/// allocation by driver.
fn devices_of(container: &podresources::ContainerResources) -> BTreeMap<String, Vec<String>> {
    let mut devices: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for entry in &container.devices {
        if device_ids::are_gpus(&entry.resource_name, &entry.device_ids) {
            let ids = devices.entry(entry.resource_name.clone()).or_default();
            ids.extend(entry.device_ids.iter().cloned());
        }
    }
    let claims = container.dynamic_resources.iter();
    for claim in claims.flat_map(|it| &it.claim_resources) {
        if claim.driver_name.ends_with("nvidia.com") {
            let ids = devices.entry(claim.driver_name.clone()).or_default();
            ids.push(claim.device_name.clone());
        }
    }
    devices
}

fn device_plugins(
    question: &KubeletQuestion<'_>,
    runtime: &Runtime,
) -> Result<Vec<DevicePlugin>, String> {
    let folder = question.root.join(DEVICE_PLUGINS);
    let entries = std::fs::read_dir(&folder)
        .map_err(|error| format!("cannot list {}: {error}", folder.display()))?;
    // NVIDIA's plugin calls its socket nvidia-<resource>.sock, Google's nvidiaGPU-<time>.sock.
    let mut sockets: Vec<String> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with("nvidia") && name.strip_suffix(".sock").is_some())
        .collect();
    sockets.sort();
    Ok(sockets
        .into_iter()
        .map(|socket| device_plugin(question, runtime, socket))
        .collect())
}

fn device_plugin(
    question: &KubeletQuestion<'_>,
    runtime: &Runtime,
    socket: String,
) -> DevicePlugin {
    let answers = runtime.block_on(async {
        let channel = connect(question, DEVICE_PLUGINS, &socket).await?;
        let mut client = DevicePluginClient::new(channel);
        let answer = client.get_device_plugin_options(Empty {});
        within(question, "GetDevicePluginOptions", answer).await
    });
    let trouble = answers.err();
    let devices = if !question.list_and_watch {
        Reading::NotSupported
    } else if let Some(reason) = &trouble {
        Reading::NotRead(reason.clone())
    } else {
        runtime
            .block_on(first_device_list(question, &socket))
            .into()
    };
    DevicePlugin {
        socket,
        answers: match &trouble {
            None => Reading::Value(true),
            // Root may connect, and an interrupted run could not.
            Some(reason)
                if reason.contains("ermission denied") || question.interrupt.signal().is_some() =>
            {
                Reading::NotRead(reason.clone())
            }
            Some(_) => Reading::Value(false),
        },
        trouble,
        devices,
    }
}

async fn first_device_list(
    question: &KubeletQuestion<'_>,
    socket: &str,
) -> Result<Vec<PluginDevice>, String> {
    let channel = connect(question, DEVICE_PLUGINS, socket).await?;
    let mut client =
        DevicePluginClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAXIMUM);
    let stream = client.list_and_watch(Empty {});
    let mut stream = within(question, "ListAndWatch", stream).await?.into_inner();
    let first = within(question, "ListAndWatch", stream.message()).await?;
    let list = first.ok_or("ListAndWatch ended without a list of devices")?;
    let mut devices: Vec<PluginDevice> = list
        .devices
        .into_iter()
        .map(|device| PluginDevice {
            id: device.id,
            health: device.health,
        })
        .collect();
    devices.sort_by(|one, other| one.id.cmp(&other.id));
    Ok(devices)
}

async fn connect(
    question: &KubeletQuestion<'_>,
    folder: &str,
    socket: &str,
) -> Result<Channel, String> {
    let path = question.root.join(folder);
    let shown = path.join(socket).display().to_string();
    // Paths of unix sockets end at 107 bytes; by the open folder they are always short.
    let folder = rustix::fs::open(
        &path,
        rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )
    .map_err(|error| format!("cannot open {}: {error}", path.display()))?;
    let uri = format!("unix:///proc/self/fd/{}/{socket}", folder.as_raw_fd());
    let endpoint = Endpoint::from_shared(uri)
        .map_err(|error| format!("{shown} is not the name of a socket: {error}"))?;
    within(
        question,
        &format!("connecting to {shown}"),
        endpoint.connect(),
    )
    .await
}

/// The result of `call`, unless it takes too long or the run is stopped.
async fn within<T, E>(
    question: &KubeletQuestion<'_>,
    what: &str,
    call: impl Future<Output = Result<T, E>>,
) -> Result<T, String>
where
    E: std::error::Error + 'static,
{
    /// How often the wish to stop is looked for.
    const LOOK: Duration = Duration::from_millis(20);
    let until = Instant::now() + question.deadline;
    let mut call = pin!(call);
    loop {
        match tokio::time::timeout(LOOK, &mut call).await {
            Ok(answer) => return answer.map_err(|error| format!("{what}: {}", in_words(&error))),
            Err(_) if question.interrupt.signal().is_some() => {
                return Err("the run was interrupted".to_owned());
            }
            Err(_) if Instant::now() >= until => {
                return Err(format!(
                    "{what}: no answer within {} s",
                    question.deadline.as_secs_f64()
                ));
            }
            Err(_) => {}
        }
    }
}

/// gRPC's own texts are long; what a person needs is the code and the message, or the system's
/// error below.
fn in_words(error: &(dyn std::error::Error + 'static)) -> String {
    if let Some(status) = error.downcast_ref::<tonic::Status>()
        && !status.message().is_empty()
    {
        return format!("{} ({:?})", status.message(), status.code());
    }
    super::client::causes(error)
}
