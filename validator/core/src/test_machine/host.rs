//! A healthy host and CUDA driver library.

use std::collections::BTreeMap;

use super::gpu::healthy_gpu;
use crate::facts::{
    ComputeCapability, ContainerRuntime, CudaDevice, CudaFacts, CudaResult, CudaToolkit,
    CudaToolkitKind, DeviceNode, Ec2Instance, Facts, HostFacts, KernelLog, KernelLogRecord,
    KernelLogSource, KernelModuleFlavor, KernelModules, KernelRun, LibraryFile, NvmlFacts,
    PciDevice, Reading, ServiceState, WorkerEnd,
};

/// The driver of the healthy machine.
pub(super) const DRIVER_VERSION: &str = "580.159.04";
/// GPUs of a p5en.48xlarge.
const GPUS: u32 = 8;
/// `NVSwitches` of an HGX H200 board.
const NVSWITCHES: u32 = 4;
const H200_DEVICE_ID: u16 = 0x2335;
const NVSWITCH_DEVICE_ID: u16 = 0x22a3;
const UPTIME_S: f64 = 86_400.0;

/// What host, driver libraries and load say on a healthy p5en.48xlarge.
pub(super) fn add_host_and_cuda(facts: &mut Facts) {
    facts.host = host();
    facts.nvml = NvmlFacts {
        initialized: Reading::Value(true),
        library_path: Some(format!(
            "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{DRIVER_VERSION}"
        )),
        loaded_by_path: None,
        unloadable: None,
        driver_version: Reading::Value(DRIVER_VERSION.to_owned()),
        nvml_version: Reading::Value(format!("13.{DRIVER_VERSION}")),
        cuda_driver_version: Reading::Value(13_000),
        gpu_count: Reading::Value(GPUS),
        probe_trouble: Vec::new(),
    };
    facts.cuda = CudaFacts {
        library: Reading::Value(format!(
            "/usr/lib/x86_64-linux-gnu/libcuda.so.{DRIVER_VERSION}"
        )),
        loaded_by_path: None,
        unloadable: None,
        init: Reading::Value(CudaResult {
            code: 0,
            name: "CUDA_SUCCESS".to_owned(),
        }),
        driver_version: Reading::Value(13_000),
        devices: Reading::Value((0..GPUS).map(cuda_device).collect()),
        first_gpu_only: false,
        probe_trouble: Vec::new(),
    };
    facts.load.cuda_kernel = (0..GPUS)
        .map(|index| (uuid(index), Reading::Value(healthy_kernel_run())))
        .collect();
}

/// The kernel module is not loaded, so that NVML does not answer and lists no GPU.
pub fn unload_driver(facts: &mut Facts) {
    facts.host.kernel_modules = Reading::Value(KernelModules {
        nvidia_version: Reading::NotSupported,
        nvidia_flavor: Reading::NotSupported,
        ..KernelModules::default()
    });
    facts.nvml = NvmlFacts {
        initialized: Reading::NotRead("driver not loaded".to_owned()),
        ..NvmlFacts::default()
    };
    facts.gpus.clear();
}

fn host() -> HostFacts {
    let running = ServiceState {
        installed: true,
        enabled: true,
        active: true,
    };
    HostFacts {
        hostname: Reading::Value("gpu-node".to_owned()),
        operating_system: Reading::Value("Ubuntu 24.04.3 LTS".to_owned()),
        kernel_release: Reading::Value("6.14.0-1015-aws".to_owned()),
        architecture: Reading::Value("x86_64".to_owned()),
        uptime_s: Reading::Value(UPTIME_S),
        in_container: Reading::Value(false),
        product_name: Reading::Value("p5en.48xlarge".to_owned()),
        ec2: Reading::Value(Ec2Instance {
            instance_type: "p5en.48xlarge".to_owned(),
            region: Some("us-west-2".to_owned()),
            ami_id: Some("ami-00000000000000000".to_owned()),
            instance_id: Some("i-00000000000000000".to_owned()),
        }),
        pci_devices: Reading::Value(
            (0..GPUS)
                .map(gpu_on_the_bus)
                .chain((0..NVSWITCHES).map(nvswitch))
                .collect(),
        ),
        kernel_modules: Reading::Value(kernel_modules()),
        device_nodes: Reading::Value(device_nodes()),
        services: BTreeMap::from([
            ("nvidia-persistenced".to_owned(), Reading::Value(running)),
            ("nvidia-fabricmanager".to_owned(), Reading::Value(running)),
        ]),
        kernel_log: Reading::Value(kernel_log()),
        environment: Reading::Value(BTreeMap::new()),
        cuda_toolkits: Reading::Value(vec![CudaToolkit {
            path: "/usr/local/cuda-13.0".to_owned(),
            version: Reading::Value("13.0.2".to_owned()),
            kind: CudaToolkitKind::Toolkit,
            ..CudaToolkit::default()
        }]),
        cuda_compat: Reading::Value(Vec::new()),
        libcuda_files: Reading::Value(vec![library("libcuda.so")]),
        libnvidia_ml_files: Reading::Value(vec![library("libnvidia-ml.so")]),
        gsp_firmware_versions: Reading::Value(vec![DRIVER_VERSION.to_owned()]),
        shared_memory_mib: Reading::NotSupported,
        locked_memory_mib: Reading::NotSupported,
        container_runtime: Reading::Value(ContainerRuntime {
            toolkit_installed: true,
            docker_nvidia_runtime: true,
            docker_default_runtime: None,
            containerd_nvidia_runtime: true,
            cdi_specs: BTreeMap::from([(
                "/etc/cdi/nvidia.yaml".to_owned(),
                (0..GPUS)
                    .map(|index| index.to_string())
                    .chain(["all".to_owned()])
                    .collect(),
            )]),
        }),
        identity: None,
        image: None,
    }
}

fn uuid(index: u32) -> String {
    healthy_gpu(index).uuid.value().cloned().unwrap_or_default()
}

fn address(index: u32) -> String {
    healthy_gpu(index)
        .pci_address
        .value()
        .cloned()
        .unwrap_or_default()
}

fn gpu_on_the_bus(index: u32) -> PciDevice {
    PciDevice {
        address: address(index),
        device_id: H200_DEVICE_ID,
        subsystem_vendor_id: Some(0x10de),
        subsystem_device_id: Some(0x18bf),
        class: 0x03_0200,
        driver: Some("nvidia".to_owned()),
        numa_node: Some(i32::from(index >= GPUS / 2)),
        upstream_ports: None,
        current_link_speed_gts: Some(32.0),
        current_link_width: Some(16),
        max_link_speed_gts: Some(32.0),
        max_link_width: Some(16),
        aer_correctable: Some(0),
        aer_nonfatal: Some(0),
        aer_fatal: Some(0),
        largest_region_bytes: Some(256 << 30),
    }
}

fn nvswitch(index: u32) -> PciDevice {
    PciDevice {
        address: format!("0000:{:02x}:00.0", 0x80 + index),
        device_id: NVSWITCH_DEVICE_ID,
        class: 0x06_8000,
        driver: Some("nvidia-nvswitch".to_owned()),
        aer_correctable: Some(0),
        aer_nonfatal: Some(0),
        aer_fatal: Some(0),
        ..PciDevice::default()
    }
}

fn kernel_modules() -> KernelModules {
    KernelModules {
        loaded: ["nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm"]
            .into_iter()
            .map(|name| (name.to_owned(), Some(DRIVER_VERSION.to_owned())))
            .collect(),
        nvidia_version: Reading::Value(DRIVER_VERSION.to_owned()),
        nvidia_flavor: Reading::Value(KernelModuleFlavor::Open),
        nvidia_parameters: [
            ("EnableGpuFirmware", "18"),
            ("ModifyDeviceFiles", "1"),
            ("DeviceFileMode", "438"),
        ]
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect(),
        nvidia_gpus: (0..GPUS)
            .map(|index| (address(index), Some(index)))
            .collect(),
    }
}

fn device_nodes() -> Vec<DeviceNode> {
    let gpus = (0..GPUS).map(|minor| format!("/dev/nvidia{minor}"));
    let others = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"];
    gpus.chain(others.map(str::to_owned))
        .map(|path| DeviceNode {
            path,
            accessible: true,
            mode: 0o666,
        })
        .collect()
}

fn kernel_log() -> KernelLog {
    KernelLog {
        source: KernelLogSource::Kmsg,
        since_boot: true,
        oldest_record_age_s: Some(UPTIME_S),
        oldest_record_at_s: Some(0.0),
        newest_record_at_s: Some(12.0),
        gap_until_s: None,
        records: vec![KernelLogRecord {
            repeats: 0,
            age_s: Some(UPTIME_S - 12.0),
            at_s: Some(12.0),
            text: format!(
                "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER_VERSION}  Release Build"
            ),
        }],
        records_dropped: 0,
        others_dropped: 0,
    }
}

fn library(name: &str) -> LibraryFile {
    LibraryFile {
        path: format!("/usr/lib/x86_64-linux-gnu/{name}.1"),
        resolved: format!("/usr/lib/x86_64-linux-gnu/{name}.{DRIVER_VERSION}"),
        version: Some(DRIVER_VERSION.to_owned()),
    }
}

fn cuda_device(index: u32) -> CudaDevice {
    CudaDevice {
        uuid: uuid(index),
        name: "NVIDIA H200".to_owned(),
        pci_address: Some(address(index)),
        compute_capability: ComputeCapability { major: 9, minor: 0 },
        total_memory_bytes: 150_109_880_320,
        multiprocessors: 132,
    }
}

/// A verified run of the check kernel in which every value was right.
fn healthy_kernel_run() -> KernelRun {
    KernelRun {
        end: WorkerEnd::Finished,
        values_compared: 1 << 20,
        mismatches: 0,
        examples: Vec::new(),
        wall_ms: 900.0,
    }
}
