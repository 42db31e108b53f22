//! A kubelet and NVIDIA's device plugin, on unix sockets below a folder.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use tokio::sync::oneshot;
use tokio_stream::Stream;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// Written by build.rs from the validator's `proto/deviceplugin/v1beta1.proto`.
#[allow(
    clippy::all,
    clippy::pedantic,
    missing_debug_implementations,
    unreachable_pub,
    unused_qualifications
)]
pub mod deviceplugin {
    tonic::include_proto!("v1beta1");
}

/// Written by build.rs from the validator's `proto/podresources/v1.proto`.
#[allow(
    clippy::all,
    clippy::pedantic,
    missing_debug_implementations,
    unreachable_pub,
    unused_qualifications
)]
pub mod podresources {
    tonic::include_proto!("v1");
}

use deviceplugin::device_plugin_client::DevicePluginClient;
use deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use deviceplugin::registration_server::{Registration, RegistrationServer};
use podresources::pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer};

/// How a socket behaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Socket {
    #[default]
    Answers,
    /// Every call is refused, as by a kubelet that does not know it.
    Unimplemented,
    /// Connections are accepted by the system and never read.
    Hangs,
    /// The file exists without a listener: its owner has died.
    Stale,
    /// There is no file.
    Gone,
}

/// One container with devices.
#[derive(Clone, Debug, Default)]
pub struct Container {
    pub namespace: String,
    pub pod: String,
    pub container: String,
    pub resource: String,
    pub device_ids: Vec<String>,
}

/// The lists of the kubelet and of the plugin.
#[derive(Clone, Debug, Default)]
pub struct KubeletScript {
    /// Ids that may be given away, by resource.
    pub allocatable: BTreeMap<String, Vec<String>>,
    /// How many times `GetAllocatableResources` is answered with nothing first: a plugin that is
    /// still starting.
    pub allocatable_empty_first: u32,
    pub containers: Vec<Container>,
    /// Ids and health by `ListAndWatch`.
    pub devices: Vec<(String, String)>,
    pub pod_resources: Socket,
    pub plugin: Socket,
}

impl KubeletScript {
    /// One resource `nvidia.com/gpu` with these devices, all healthy and free.
    pub fn healthy(ids: &[String]) -> Self {
        Self {
            allocatable: [("nvidia.com/gpu".to_owned(), ids.to_vec())].into(),
            devices: ids
                .iter()
                .map(|id| (id.clone(), "Healthy".to_owned()))
                .collect(),
            ..Self::default()
        }
    }
}

/// A plugin that has registered: its endpoint and resource.
pub type Registered = (String, String);

/// Ids and health of the devices of plugins that have registered, by resource.
pub type Followed = BTreeMap<String, Vec<(String, String)>>;

/// The running kubelet; it ends when dropped.
#[derive(Debug)]
pub struct Kubelet {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    registered: Arc<Mutex<Vec<Registered>>>,
    calls: Arc<Mutex<Vec<&'static str>>>,
    followed: Arc<Mutex<Followed>>,
    /// Listeners without a server.
    _silent: Vec<UnixListener>,
}

impl Kubelet {
    /// Starts below `root`, which stands for `/var/lib/kubelet`.
    pub fn start(root: &Path, script: KubeletScript) -> Self {
        let registered = Arc::default();
        let calls = Arc::default();
        let followed = Arc::default();
        let plugins = Arc::new(Folder::new(&root.join("device-plugins")));
        let service = Service {
            plugins,
            followed: Arc::clone(&followed),
            script: Arc::new(script),
            registered: Arc::clone(&registered),
            calls: Arc::clone(&calls),
        };
        let script = Arc::clone(&service.script);
        let mut silent = Vec::new();
        let mut listener = |folder: &str, name: &str, socket: Socket| {
            let folder = Folder::new(&root.join(folder));
            match socket {
                Socket::Gone => None,
                Socket::Stale => {
                    drop(folder.bind(name));
                    None
                }
                Socket::Hangs => {
                    silent.push(folder.bind(name));
                    None
                }
                Socket::Answers | Socket::Unimplemented => Some(folder.bind(name)),
            }
        };
        let plugin = listener("device-plugins", "nvidia-gpu.sock", script.plugin);
        let registration = listener("device-plugins", "kubelet.sock", Socket::Answers);
        let pod_resources = listener("pod-resources", "kubelet.sock", script.pod_resources);
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async move {
                if let Some(listener) = plugin {
                    let server = Server::builder();
                    let service = DevicePluginServer::new(service.clone());
                    tokio::spawn(
                        { server }
                            .add_service(service)
                            .serve_with_incoming(incoming(listener)),
                    );
                }
                if let Some(listener) = registration {
                    let server = Server::builder();
                    let service = RegistrationServer::new(service.clone());
                    tokio::spawn(
                        { server }
                            .add_service(service)
                            .serve_with_incoming(incoming(listener)),
                    );
                }
                if let Some(listener) = pod_resources {
                    let server = Server::builder();
                    let service = PodResourcesListerServer::new(service.clone());
                    tokio::spawn(
                        { server }
                            .add_service(service)
                            .serve_with_incoming(incoming(listener)),
                    );
                }
                // An error means that the kubelet was dropped without a word, which ends it as
                // well.
                let _ = stopped.await;
            });
        });
        Self {
            stop: Some(stop),
            thread: Some(thread),
            registered,
            calls,
            followed,
            _silent: silent,
        }
    }

    /// The plugins that have registered.
    pub fn registered(&self) -> Vec<Registered> {
        lock(&self.registered).clone()
    }

    /// The devices that registered plugins report now.
    pub fn followed(&self) -> Followed {
        lock(&self.followed).clone()
    }

    /// The names of all calls so far.
    pub fn calls(&self) -> Vec<&'static str> {
        lock(&self.calls).clone()
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An open folder: by its descriptor a socket's path is never too long.
#[derive(Debug)]
struct Folder(OwnedFd);

impl Folder {
    fn new(path: &Path) -> Self {
        std::fs::create_dir_all(path).expect("the kubelet's folder");
        let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY;
        Self(rustix::fs::open(path, flags, rustix::fs::Mode::empty()).expect("an open folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.0.as_raw_fd()))
    }

    fn bind(&self, name: &str) -> UnixListener {
        let path = self.path(name);
        // A kubelet that is started again removes its old socket, too.
        let _ = std::fs::remove_file(&path);
        UnixListener::bind(&path).expect("a socket")
    }
}

fn incoming(listener: UnixListener) -> UnixListenerStream {
    listener.set_nonblocking(true).expect("a socket");
    UnixListenerStream::new(tokio::net::UnixListener::from_std(listener).expect("a socket"))
}

#[derive(Clone)]
struct Service {
    plugins: Arc<Folder>,
    followed: Arc<Mutex<Followed>>,
    script: Arc<KubeletScript>,
    registered: Arc<Mutex<Vec<Registered>>>,
    calls: Arc<Mutex<Vec<&'static str>>>,
}

impl Service {
    /// Notes the call; the answer is how often it came before.
    fn note(&self, call: &'static str) -> u32 {
        let mut calls = lock(&self.calls);
        let before = calls.iter().filter(|it| **it == call).count();
        calls.push(call);
        u32::try_from(before).unwrap_or(u32::MAX)
    }
}

fn refuse_if(socket: Socket) -> Result<(), Status> {
    if socket == Socket::Unimplemented {
        return Err(Status::unimplemented("unknown method"));
    }
    Ok(())
}

#[tonic::async_trait]
impl PodResourcesLister for Service {
    async fn list(
        &self,
        _: Request<podresources::ListPodResourcesRequest>,
    ) -> Result<Response<podresources::ListPodResourcesResponse>, Status> {
        self.note("List");
        refuse_if(self.script.pod_resources)?;
        let containers = self.script.containers.iter();
        let pod_resources = containers.map(|it| podresources::PodResources {
            name: it.pod.clone(),
            namespace: it.namespace.clone(),
            containers: vec![podresources::ContainerResources {
                name: it.container.clone(),
                devices: vec![podresources::ContainerDevices {
                    resource_name: it.resource.clone(),
                    device_ids: it.device_ids.clone(),
                    topology: None,
                }],
                ..podresources::ContainerResources::default()
            }],
        });
        Ok(Response::new(podresources::ListPodResourcesResponse {
            pod_resources: pod_resources.collect(),
        }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<podresources::AllocatableResourcesRequest>,
    ) -> Result<Response<podresources::AllocatableResourcesResponse>, Status> {
        let before = self.note("GetAllocatableResources");
        refuse_if(self.script.pod_resources)?;
        if before < self.script.allocatable_empty_first {
            return Ok(Response::new(
                podresources::AllocatableResourcesResponse::default(),
            ));
        }
        let mut allocatable = self.script.allocatable.clone();
        for (resource, devices) in lock(&self.followed).iter() {
            let healthy = devices.iter().filter(|(_, health)| health == "Healthy");
            let ids = healthy.map(|(id, _)| id.clone());
            allocatable.entry(resource.clone()).or_default().extend(ids);
        }
        // As the kubelet does: one entry for each NUMA node, here one for each device.
        let devices = allocatable.iter().flat_map(|(resource, ids)| {
            ids.iter().map(|id| podresources::ContainerDevices {
                resource_name: resource.clone(),
                device_ids: vec![id.clone()],
                topology: None,
            })
        });
        Ok(Response::new(podresources::AllocatableResourcesResponse {
            devices: devices.collect(),
            ..podresources::AllocatableResourcesResponse::default()
        }))
    }

    async fn get(
        &self,
        _: Request<podresources::GetPodResourcesRequest>,
    ) -> Result<Response<podresources::GetPodResourcesResponse>, Status> {
        Err(Status::unimplemented(
            "Get is not asked for by anybody here",
        ))
    }
}

#[tonic::async_trait]
impl Registration for Service {
    async fn register(
        &self,
        request: Request<deviceplugin::RegisterRequest>,
    ) -> Result<Response<deviceplugin::Empty>, Status> {
        let request = request.into_inner();
        // Source: Kubernetes, pkg/kubelet/cm/devicemanager/plugin/v1beta1, server.go.
        if request.version != "v1beta1" {
            return Err(Status::unknown(format!(
                "requested API version {:?} is not supported by kubelet",
                request.version
            )));
        }
        let (endpoint, resource) = (request.endpoint, request.resource_name);
        lock(&self.registered).push((endpoint.clone(), resource.clone()));
        // The answer comes first: the plugin serves its socket, but is not bound to while it
        // registers.
        tokio::spawn(follow(
            Arc::clone(&self.plugins),
            Arc::clone(&self.followed),
            endpoint,
            resource,
        ));
        Ok(Response::new(deviceplugin::Empty {}))
    }
}

/// Keeps what a plugin reports of its devices, as the kubelet's device manager does; when its
/// stream ends, all of them are unhealthy.
async fn follow(
    plugins: Arc<Folder>,
    followed: Arc<Mutex<Followed>>,
    endpoint: String,
    resource: String,
) {
    // An error is the end of the stream: the kubelet logs it, and so would a test that reads the
    // plugin's own log.
    let _ = read_lists(&plugins, &followed, &endpoint, &resource).await;
    for (_, health) in lock(&followed).entry(resource).or_default() {
        "Unhealthy".clone_into(health);
    }
}

async fn read_lists(
    plugins: &Folder,
    followed: &Mutex<Followed>,
    endpoint: &str,
    resource: &str,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let uri = format!("unix://{}", plugins.path(endpoint).display());
    let channel = tonic::transport::Endpoint::from_shared(uri)?
        .connect()
        .await?;
    let mut client = DevicePluginClient::new(channel);
    client
        .get_device_plugin_options(deviceplugin::Empty {})
        .await?;
    let lists = client.list_and_watch(deviceplugin::Empty {}).await?;
    let mut lists = lists.into_inner();
    while let Some(list) = lists.message().await? {
        let devices = list.devices.into_iter().map(|it| (it.id, it.health));
        lock(followed).insert(resource.to_owned(), devices.collect());
    }
    Ok(())
}

type DeviceLists =
    Pin<Box<dyn Stream<Item = Result<deviceplugin::ListAndWatchResponse, Status>> + Send>>;

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream = DeviceLists;

    async fn get_device_plugin_options(
        &self,
        _: Request<deviceplugin::Empty>,
    ) -> Result<Response<deviceplugin::DevicePluginOptions>, Status> {
        self.note("GetDevicePluginOptions");
        refuse_if(self.script.plugin)?;
        Ok(Response::new(deviceplugin::DevicePluginOptions::default()))
    }

    async fn list_and_watch(
        &self,
        _: Request<deviceplugin::Empty>,
    ) -> Result<Response<DeviceLists>, Status> {
        self.note("ListAndWatch");
        refuse_if(self.script.plugin)?;
        let devices = self.script.devices.iter();
        let list = deviceplugin::ListAndWatchResponse {
            devices: devices
                .map(|(id, health)| deviceplugin::Device {
                    id: id.clone(),
                    health: health.clone(),
                    topology: None,
                })
                .collect(),
        };
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(list)))))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<deviceplugin::PreferredAllocationRequest>,
    ) -> Result<Response<deviceplugin::PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("nobody allocates here"))
    }

    async fn allocate(
        &self,
        _: Request<deviceplugin::AllocateRequest>,
    ) -> Result<Response<deviceplugin::AllocateResponse>, Status> {
        Err(Status::unimplemented("nobody allocates here"))
    }

    async fn pre_start_container(
        &self,
        _: Request<deviceplugin::PreStartContainerRequest>,
    ) -> Result<Response<deviceplugin::PreStartContainerResponse>, Status> {
        Err(Status::unimplemented("nobody starts containers here"))
    }
}
