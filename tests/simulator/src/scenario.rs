//! The resolved scenario: one node with its faults, as the libraries and the host side read it.

use crate::gpu::Gpu;
use crate::quantity::{Bytes, Trigger};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Everything about a simulated node at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    pub driver: Driver,
    #[serde(default)]
    pub nvml: LibraryBehaviour,
    #[serde(default)]
    pub cuda: LibraryBehaviour,
    #[serde(default)]
    pub cublaslt: LibraryBehaviour,
    pub host: Host,
    pub gpus: Vec<Gpu>,
    /// Processes on the GPUs that no real process stands for.
    #[serde(default)]
    pub processes: BTreeMap<String, SimulatedProcess>,
}

/// The driver's parts; they carry one version on a healthy machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Driver {
    /// The kernel module's version, such as `580.159.04`.
    pub version: String,
    /// The libraries' versions; null means the kernel module's.
    #[serde(default)]
    pub nvml_version: Option<String>,
    #[serde(default)]
    pub libcuda_version: Option<String>,
    #[serde(default)]
    pub gsp_firmware_version: Option<String>,
    /// The result of `cuDriverGetVersion`, as `[major, minor]`.
    pub cuda_version: [u32; 2],
    pub kernel_module: KernelModule,
}

impl Driver {
    pub fn nvml_version(&self) -> &str {
        self.nvml_version.as_deref().unwrap_or(&self.version)
    }
    pub fn libcuda_version(&self) -> &str {
        self.libcuda_version.as_deref().unwrap_or(&self.version)
    }
    pub fn gsp_firmware_version(&self) -> &str {
        self.gsp_firmware_version
            .as_deref()
            .unwrap_or(&self.version)
    }
    /// `1000 * major + 10 * minor`, as CUDA counts.
    pub fn cuda_version_number(&self) -> i32 {
        i32::try_from(1000 * self.cuda_version[0] + 10 * self.cuda_version[1]).unwrap_or(0)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KernelModule {
    Open,
    Proprietary,
    /// The GPUs of a Windows host, through its paravirtualization (WSL2): the libraries work, the
    /// Linux kernel has no module, no `/proc/driver/nvidia` and no GPU on its PCI bus.
    Windows,
    /// No NVIDIA module is loaded: NVML answers DriverNotLoaded, CUDA 100.
    NotLoaded,
}

/// How a library misbehaves as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LibraryBehaviour {
    /// Whether the library's file is there.
    #[serde(default = "present")]
    pub present: bool,
    /// What the library's initialisation returns (`nvmlReturn_t`, `CUresult`, `cublasStatus_t`); 0
    /// is success.
    #[serde(default)]
    pub init_error: u32,
    /// Functions, by name, that never return.
    #[serde(default)]
    pub hang: Vec<String>,
    /// Functions that end the process with SIGABRT.
    #[serde(default)]
    pub crash: Vec<String>,
    /// Functions that return this code.
    #[serde(default)]
    pub returns: BTreeMap<String, u32>,
    /// Functions that the library does not export.
    #[serde(default)]
    pub missing_symbols: Vec<String>,
    /// Time that every call takes on top, to stand for a slow driver.
    #[serde(default)]
    pub delay_us: u64,
    /// Whether `nvmlDeviceGetFieldValues` also answers the entry after the last one, unless it has
    /// failed already. It ends the process with SIGABRT instead of writing there.
    // Source: libnvidia-ml 580.159.04.
    #[serde(default)]
    pub answers_one_field_too_many: bool,
    /// Whether `cuInit` fails (999) where it may not open the device node of every GPU.
    #[serde(default)]
    pub needs_every_device_node: bool,
}

fn present() -> bool {
    true
}

impl Default for LibraryBehaviour {
    fn default() -> Self {
        Self {
            present: true,
            init_error: 0,
            hang: Vec::new(),
            crash: Vec::new(),
            returns: BTreeMap::new(),
            missing_symbols: Vec::new(),
            delay_us: 0,
            answers_one_field_too_many: false,
            needs_every_device_node: false,
        }
    }
}

/// The host side, written below the sysroot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// `sys_vendor` of the DMI table; `Amazon EC2` on EC2.
    pub system_vendor: String,
    /// `product_name` of the DMI table; the instance type on EC2.
    pub product_name: String,
    #[serde(default = "kernel_release")]
    pub kernel_release: String,
    #[serde(default)]
    pub operating_system: OperatingSystem,
    /// Kernel modules that are loaded, besides those that the driver's flavour brings.
    #[serde(default = "nvidia_modules")]
    pub modules: Vec<String>,
    /// The kernel driver that GPUs are bound to, such as `nvidia`, `nouveau` or `vfio-pci`.
    #[serde(default = "nvidia")]
    pub pci_driver: String,
    /// Number of NVSwitch bridges on the PCI bus (none where the switches are outside the machine).
    #[serde(default)]
    pub nvswitches: u32,
    /// How many of these, the last ones, their driver could not take.
    #[serde(default)]
    pub nvswitches_without_driver: u32,
    /// Device nodes besides `/dev/nvidia<N>`.
    #[serde(default = "device_nodes")]
    pub device_nodes: Vec<String>,
    /// systemd units by name.
    #[serde(default)]
    pub units: BTreeMap<String, Unit>,
    /// `/usr/local/cuda-<major>.<minor>` trees, by that version.
    #[serde(default)]
    pub toolkits: BTreeMap<String, Toolkit>,
    /// The version that `/usr/local/cuda` points to; null means the newest.
    #[serde(default)]
    pub default_toolkit: Option<String>,
    /// Lines of `/etc/ld.so.conf.d/*.conf`.
    #[serde(default)]
    pub library_paths: Vec<String>,
    /// Messages of the kernel log since boot, oldest first, besides those that faults add.
    #[serde(default)]
    pub kernel_log: Vec<String>,
    /// Whether the kernel log can be read.
    #[serde(default = "present")]
    pub kernel_log_readable: bool,
    /// How many seconds the clock of the kernel log's time stamps lags the others: it is never
    /// corrected, and the uptime adds to its error.
    #[serde(default)]
    pub kernel_log_lag_s: u64,
    /// Whether new messages of the kernel log are overwritten before they are read.
    #[serde(default)]
    pub kernel_log_overrun: bool,
    #[serde(default)]
    pub container_runtime: ContainerRuntime,
    /// What the programs run in.
    #[serde(default)]
    pub container: Container,
    /// `ulimit`s of processes on the node, by their name in `/proc/self/limits`
    /// (`Max locked memory`): soft and hard alike, in bytes where it is one of size; null is
    /// unlimited.
    #[serde(default)]
    pub limits: BTreeMap<String, Option<u64>>,
    /// The size of `/dev/shm`.
    #[serde(default)]
    pub shared_memory: Option<Bytes>,
    /// How long ago the node was booted, in seconds.
    #[serde(default = "three_days")]
    pub uptime_s: u64,
    /// Further files below the sysroot, by their path without the first slash; null removes one
    /// that others wrote.
    #[serde(default)]
    pub files: BTreeMap<String, Option<String>>,
    /// Environment variables that processes on the node see.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// Module parameters, as in `/proc/driver/nvidia/params`.
    #[serde(default)]
    pub module_parameters: BTreeMap<String, String>,
}

/// Every node was booted as long ago, so that rates since boot do not depend on the machine that
/// simulates it.
fn three_days() -> u64 {
    3 * 24 * 3600
}
fn kernel_release() -> String {
    "6.1.155-176.282.amzn2023.x86_64".to_owned()
}
fn nvidia() -> String {
    "nvidia".to_owned()
}
fn nvidia_modules() -> Vec<String> {
    ["nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm"]
        .map(str::to_owned)
        .to_vec()
}
fn device_nodes() -> Vec<String> {
    [
        "nvidiactl",
        "nvidia-uvm",
        "nvidia-uvm-tools",
        "nvidia-modeset",
    ]
    .map(str::to_owned)
    .to_vec()
}

/// The marks that container runtimes leave, and what a container does not see of its host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Container {
    #[default]
    None,
    /// `/.dockerenv`.
    Docker,
    /// `/run/.containerenv`.
    Podman,
    /// The control group of a pod, and the service account's folder.
    Kubernetes,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OperatingSystem {
    pub id: String,
    pub version_id: String,
    pub pretty_name: String,
}

impl Default for OperatingSystem {
    fn default() -> Self {
        Self {
            id: "amzn".to_owned(),
            version_id: "2023".to_owned(),
            pretty_name: "Amazon Linux 2023.9.20251117".to_owned(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unit {
    #[serde(default = "present")]
    pub enabled: bool,
    #[serde(default = "present")]
    pub active: bool,
}

/// A CUDA toolkit tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Toolkit {
    /// The full version in `version.json`, such as `13.0.2`.
    pub version: String,
    /// The driver version of the user-mode libraries below `compat`; null where that folder is
    /// absent.
    #[serde(default)]
    pub compat: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContainerRuntime {
    /// `/etc/docker/daemon.json` names the nvidia runtime.
    #[serde(default)]
    pub docker: bool,
    /// `/etc/containerd/config.toml` names the nvidia runtime.
    #[serde(default)]
    pub containerd: bool,
    /// `/etc/cdi/nvidia.yaml` lists the GPUs.
    #[serde(default)]
    pub cdi: bool,
}

/// A process that NVML lists although it runs nowhere on this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SimulatedProcess {
    #[serde(default)]
    pub gpu: u32,
    pub pid: u32,
    #[serde(default)]
    pub memory: Bytes,
    #[serde(default)]
    pub graphics: bool,
    /// Keeps the GPU busy.
    #[serde(default)]
    pub busy: bool,
    /// Shown by NVML's process lists; a leak holds memory that no listed process explains.
    #[serde(default = "present")]
    pub listed: bool,
}

/// In a prepared node's folder. In a folder of its own: a worker that may open no other GPU's
/// device node (Landlock) may read what is in this folder at any time, but of the folders above the
/// device nodes only what was there when it started, and the file is replaced by a rename.
pub const SCENARIO_FILE: &str = "scenario/scenario.json";

/// [`SCENARIO_FILE`]: what a prepared node's folder holds and the libraries read.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResolvedScenario {
    /// Node and faults, such as `p5.48xlarge+xid-79`.
    pub name: String,
    /// `Scenario` as it is from the start.
    pub base: serde_json::Value,
    /// Changes that come later, in the order in which they apply.
    pub timed: Vec<TimedChange>,
    /// Events that are there from the start, or come with a timed change.
    pub events: Vec<ScheduledEvent>,
    /// `Scenario` without faults, from the start.
    pub healthy: serde_json::Value,
}

/// Values that change when the trigger is met.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TimedChange {
    pub trigger: Trigger,
    /// The GPU whose launches count.
    pub gpu: u32,
    /// Absolute paths into `Scenario` (`gpus.3.lost`) and the new values.
    pub values: Vec<(String, serde_json::Value)>,
}

/// Something that happens once.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduledEvent {
    /// Index into `timed`; none means it happened before the start.
    pub change: Option<usize>,
    pub gpu: u32,
    /// The Xid that NVML's event sets deliver; none for a kernel message alone.
    pub xid: Option<u32>,
    /// Messages that the kernel log gains.
    pub kernel_log: Vec<String>,
    /// How many times it gains them, with `{n}` as the number of each time.
    pub times: u32,
}

impl ScheduledEvent {
    /// All messages in their order.
    pub fn messages(&self) -> impl Iterator<Item = String> {
        (0..self.times).flat_map(|number| {
            let number = number.to_string();
            self.kernel_log
                .iter()
                .map(move |message| message.replace("{n}", &number))
        })
    }
}
