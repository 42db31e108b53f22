//! The operating system's side of a GPU node.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ImageFacts, KernelLog, Reading};

/// The operating system's files, read below `--sysroot` (`/` by default).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HostFacts {
    pub hostname: Reading<String>,
    /// `PRETTY_NAME` of `/etc/os-release`.
    pub operating_system: Reading<String>,
    /// `uname -r`.
    pub kernel_release: Reading<String>,
    /// `uname -m`.
    pub architecture: Reading<String>,
    /// Seconds since boot.
    pub uptime_s: Reading<f64>,
    /// This process runs in a container (so host services and devices may be hidden from it).
    pub in_container: Reading<bool>,
    /// The machine's name by its maker, `/sys/class/dmi/id/product_name`: `DGXH100`. `NotSupported`
    /// where there is none.
    #[serde(default)]
    pub product_name: Reading<String>,
    /// `NotSupported` off EC2.
    pub ec2: Reading<Ec2Instance>,
    /// NVIDIA functions on the PCI bus, from `/sys/bus/pci/devices`; GPUs, NVSwitches, audio and
    /// USB functions alike.
    pub pci_devices: Reading<Vec<PciDevice>>,
    pub kernel_modules: Reading<KernelModules>,
    /// `/dev/nvidia*` and `/dev/nvidia-caps/*`.
    pub device_nodes: Reading<Vec<DeviceNode>>,
    /// systemd services by unit name without `.service`: `nvidia-persistenced`,
    /// `nvidia-fabricmanager`, and those that the profile names. `NotSupported` where there is no
    /// systemd.
    pub services: BTreeMap<String, Reading<ServiceState>>,
    pub kernel_log: Reading<KernelLog>,
    /// Environment variables that change what the driver, CUDA or a profiler does; no others are
    /// kept.
    pub environment: Reading<BTreeMap<String, String>>,
    /// CUDA toolkits found on the machine.
    pub cuda_toolkits: Reading<Vec<CudaToolkit>>,
    /// `cuda-compat` folders found on the machine.
    pub cuda_compat: Reading<Vec<CudaCompatPackage>>,
    /// `libcuda.so.1` files in the order in which the loader would find them.
    pub libcuda_files: Reading<Vec<LibraryFile>>,
    /// `libnvidia-ml.so.1` files in the order in which the loader would find them.
    pub libnvidia_ml_files: Reading<Vec<LibraryFile>>,
    /// Versions of GSP firmware below `/lib/firmware/nvidia`, as folder names.
    pub gsp_firmware_versions: Reading<Vec<String>>,
    pub container_runtime: Reading<ContainerRuntime>,
    /// The size that `/dev/shm` is mounted with. `NotSupported` where the mount states none.
    #[serde(default)]
    pub shared_memory_mib: Reading<u64>,
    /// The limit of locked memory (`ulimit -l`) of this process. `NotSupported` where there is
    /// none.
    #[serde(default)]
    pub locked_memory_mib: Reading<u64>,
    /// Which machine and which boot of it; absent in anonymized facts and where the boot cannot be
    /// read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<MachineIdentity>,
    /// What only level image looks at; absent at every other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageFacts>,
}

/// One boot of one machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MachineIdentity {
    /// `/proc/sys/kernel/random/boot_id`: random at each boot, and the same in every container of
    /// the machine.
    pub boot_id: String,
    /// `/etc/machine-id`, which a container may lack or have of its own.
    pub machine_id: Option<String>,
}

/// An EC2 instance, from instance metadata version 2 or, below a sysroot, from the DMI tables.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Ec2Instance {
    /// `p5.48xlarge`.
    pub instance_type: String,
    pub region: Option<String>,
    pub ami_id: Option<String>,
    pub instance_id: Option<String>,
}

/// One NVIDIA function on the PCI bus.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PciDevice {
    /// `0000:3b:00.0`, lower case, four digits of domain.
    pub address: String,
    /// `0x2335` as a number.
    pub device_id: u16,
    pub subsystem_vendor_id: Option<u16>,
    pub subsystem_device_id: Option<u16>,
    /// The 24-bit class code: 0x030000 VGA, 0x030200 3D controller, 0x068000 bridge (NVSwitch),
    /// 0x040300 audio.
    pub class: u32,
    /// The bound kernel driver: `nvidia`, `nouveau`, `vfio-pci`.
    pub driver: Option<String>,
    pub numa_node: Option<i32>,
    /// Addresses of the PCIe ports above it, the nearest to the root first; `None` where `/sys`
    /// does not show them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream_ports: Option<Vec<String>>,
    /// `/sys` link state: gigatransfers per second and lanes. Idle GPUs lower the speed to save
    /// power.
    pub current_link_speed_gts: Option<f64>,
    pub current_link_width: Option<u32>,
    pub max_link_speed_gts: Option<f64>,
    pub max_link_width: Option<u32>,
    /// Sums of the AER counters; `None` where the kernel does not count (virtual machines, mostly).
    pub aer_correctable: Option<u64>,
    pub aer_nonfatal: Option<u64>,
    pub aer_fatal: Option<u64>,
    /// The largest memory region (`/sys/bus/pci/devices/*/resource`), of a GPU its BAR1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub largest_region_bytes: Option<u64>,
}

impl PciDevice {
    /// A display controller (class 0x03): what NVML can count as a GPU.
    pub fn is_gpu(&self) -> bool {
        self.class >> 16 == 0x03
    }

    /// An NVSwitch: an NVIDIA bridge of class 0x068000.
    pub fn is_nvswitch(&self) -> bool {
        self.class >> 8 == 0x0680
    }
}

/// Kernel modules that matter, from `/sys/module` and `/proc/driver/nvidia`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KernelModules {
    /// Loaded modules among `nvidia`, `nvidia_uvm`, `nvidia_modeset`, `nvidia_drm`,
    /// `nvidia_peermem`, `nouveau`, `nova_core`, `nvidiafb`, with `/sys/module/*/version` where the
    /// module states one.
    pub loaded: BTreeMap<String, Option<String>>,
    /// Version of the `nvidia` module: `580.159.04`. `NotSupported` when it is not loaded.
    pub nvidia_version: Reading<String>,
    /// `NotSupported` when it is not loaded.
    pub nvidia_flavor: Reading<KernelModuleFlavor>,
    /// `/proc/driver/nvidia/params`, the parameters that matter here (`EnableGpuFirmware`,
    /// `ModifyDeviceFiles`, …).
    pub nvidia_parameters: BTreeMap<String, String>,
    /// Minor numbers by PCI address from `/proc/driver/nvidia/gpus/*/information`: GPUs that the
    /// module has bound.
    pub nvidia_gpus: BTreeMap<String, Option<u32>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KernelModuleFlavor {
    Open,
    Proprietary,
}

impl std::fmt::Display for KernelModuleFlavor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::Proprietary => "proprietary",
        })
    }
}

/// One device node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceNode {
    /// `/dev/nvidia0`, without the sysroot.
    pub path: String,
    /// This process may open it for reading and writing (queried with `access`, never opened).
    pub accessible: bool,
    /// Permission bits, `0o666`.
    pub mode: u32,
}

/// A systemd service, read from unit files, enablement links and control groups; systemd itself is
/// not queried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ServiceState {
    /// A unit file exists.
    pub installed: bool,
    /// A target wants it, or it is started on demand by a socket or udev rule that is enabled.
    pub enabled: bool,
    /// It has processes, in its own control group or, as in the GPU operator's containers,
    /// elsewhere.
    pub active: bool,
}

/// A CUDA toolkit or a runtime of one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CudaToolkit {
    /// `/usr/local/cuda-12.8`, links resolved, without the sysroot.
    pub path: String,
    /// `12.8.1`; an empty string never: a toolkit whose version cannot be read is listed with
    /// `NotRead`.
    pub version: Reading<String>,
    /// Where it was found.
    pub kind: CudaToolkitKind,
    /// Its `nvcc`, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvcc: Option<String>,
    /// Other paths that are links to it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CudaToolkitKind {
    /// A toolkit folder (`/usr/local/cuda*`, `/opt/cuda`, `/usr/lib/cuda`, `CUDA_HOME`,
    /// `CUDA_PATH`).
    #[default]
    Toolkit,
    /// A Python environment's `nvidia-cuda-runtime` wheel.
    PythonWheel,
    /// The toolkit inside of an HPC SDK.
    HpcSdk,
    /// A conda environment's `cuda-cudart`, `cuda-nvcc` or `cudatoolkit` package.
    Conda,
    /// A Spack package.
    Spack,
    /// A module file names its folder.
    Module,
}

impl CudaToolkitKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Toolkit => "toolkit",
            Self::PythonWheel => "Python wheel",
            Self::HpcSdk => "HPC SDK",
            Self::Conda => "conda",
            Self::Spack => "Spack",
            Self::Module => "module",
        }
    }
}

/// A folder of a `cuda-compat` package.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CudaCompatPackage {
    /// `/usr/local/cuda-13.0/compat`.
    pub path: String,
    /// CUDA version of the folder it lies in: `13.0`.
    pub cuda_version: Option<String>,
    /// Version in the name of its `libcuda.so.*`: `580.65.06`.
    pub libcuda_version: Option<String>,
    /// `LD_LIBRARY_PATH` or the loader's configuration selects it.
    pub on_loader_path: bool,
}

/// A shared library that the loader could pick.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LibraryFile {
    /// The path on which the loader finds it.
    pub path: String,
    /// Links resolved.
    pub resolved: String,
    /// Version in the resolved name: `libcuda.so.580.159.04` gives `580.159.04`.
    pub version: Option<String>,
}

/// What containers would get.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ContainerRuntime {
    /// `nvidia-ctk` or `nvidia-container-runtime` is on the machine.
    pub toolkit_installed: bool,
    /// Runtimes named `nvidia` in `/etc/docker/daemon.json`.
    pub docker_nvidia_runtime: bool,
    /// `default-runtime` of `/etc/docker/daemon.json`.
    pub docker_default_runtime: Option<String>,
    /// A runtime named `nvidia` in `/etc/containerd/config.toml` or its drop-ins, or in CRI-O's.
    pub containerd_nvidia_runtime: bool,
    /// CDI specifications below `/etc/cdi` and `/var/run/cdi` with the device names that they
    /// define for `nvidia.com/gpu`.
    pub cdi_specs: BTreeMap<String, Vec<String>>,
}
