//! The host side of a node, as files below a sysroot.
//!
//! Device nodes are plain files; everything else has the form that the kernel, systemd and NVIDIA's packages give it.
//! The files tell the state at the node's start. Later changes reach the kernel log (see `Node::advance`).

use crate::gpu::{Architecture, Gpu};
use crate::scenario::{KernelModule, Scenario, ScheduledEvent, Toolkit};
use anyhow::{Context, Result};
use std::fmt::Write as _;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// NVSwitch bridges are on the buses from this one on.
pub(crate) const FIRST_NVSWITCH_BUS: u32 = 0xc0;
/// NVIDIA's PCI vendor id.
const VENDOR: &str = "0x10de";
/// How long ago the node was booted. Every node was booted as long ago, so that rates since boot do not depend on the
/// machine that simulates it.
pub(crate) const UPTIME_S: u64 = 3 * 24 * 3600;
/// Where Debian and Ubuntu keep the driver's libraries.
pub(crate) const LIBRARY_FOLDER: &str = "usr/lib/x86_64-linux-gnu";
/// When the kernel came to load the driver, in microseconds since boot.
const DRIVER_LOADED_US: u64 = 5_000_000;
/// How long before the node's start the events of its faults happened.
const EVENTS_BEFORE_START_US: u64 = 60_000_000;

/// A folder that files are written below.
struct Root<'root>(&'root Path);

impl Root<'_> {
    fn path(&self, path: &str) -> PathBuf {
        self.0.join(path)
    }

    fn write(&self, path: &str, content: impl AsRef<[u8]>) -> Result<()> {
        let path = self.path(path);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)
                .with_context(|| format!("create {}", parent.display()))?;
        }
        std::fs::write(&path, content).with_context(|| format!("write {}", path.display()))
    }

    fn folder(&self, path: &str) -> Result<()> {
        let path = self.path(path);
        std::fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))
    }

    fn link(&self, path: &str, target: impl AsRef<Path>) -> Result<()> {
        let path = self.path(path);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)
                .with_context(|| format!("create {}", parent.display()))?;
        }
        symlink(target, &path).with_context(|| format!("link {}", path.display()))
    }
}

/// Writes the host's files. Events that happened before the start go to the kernel log. `library` is what the user-mode
/// libraries of compat folders are. Returns the number of records in the kernel log.
pub fn write_sysroot(
    sysroot: &Path,
    scenario: &Scenario,
    events: &[ScheduledEvent],
    library: &Path,
) -> Result<u64> {
    let root = Root(sysroot);
    write_system(&root, scenario)?;
    write_pci(&root, scenario)?;
    write_modules(&root, scenario)?;
    write_device_nodes(&root, scenario)?;
    write_units(&root, scenario)?;
    write_toolkits(&root, scenario, library)?;
    write_container_runtime(&root, scenario)?;
    write_kernel_log(&root, scenario, events)
}

fn is_loaded(scenario: &Scenario) -> bool {
    scenario.driver.kernel_module != KernelModule::NotLoaded
}

fn write_system(root: &Root<'_>, scenario: &Scenario) -> Result<()> {
    let host = &scenario.host;
    let dmi = "sys/devices/virtual/dmi/id";
    root.write(
        &format!("{dmi}/sys_vendor"),
        format!("{}\n", host.system_vendor),
    )?;
    root.write(
        &format!("{dmi}/product_name"),
        format!("{}\n", host.product_name),
    )?;
    root.link("sys/class/dmi/id", "../../devices/virtual/dmi/id")?;
    let system = &host.operating_system;
    root.write(
        "etc/os-release",
        format!(
            "ID={}\nVERSION_ID=\"{}\"\nPRETTY_NAME=\"{}\"\n",
            system.id, system.version_id, system.pretty_name
        ),
    )?;
    root.write("etc/hostname", "simulated\n")?;
    root.write("proc/sys/kernel/hostname", "simulated\n")?;
    root.write(
        "proc/sys/kernel/osrelease",
        format!("{}\n", host.kernel_release),
    )?;
    root.write("proc/uptime", format!("{UPTIME_S}.00 {UPTIME_S}.00\n"))
}

/// The release line of `/proc/driver/nvidia/version`, by which the module's flavour is told.
fn module_banner(module: KernelModule, version: &str) -> String {
    let built = "Tue Oct 14 10:21:17 UTC 2025";
    match module {
        KernelModule::Open => format!(
            "NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (dvs-builder@U22-I3-G01-1-1)  {built}"
        ),
        KernelModule::Proprietary | KernelModule::NotLoaded => {
            format!("NVIDIA UNIX x86_64 Kernel Module  {version}  {built}")
        }
    }
}

fn write_modules(root: &Root<'_>, scenario: &Scenario) -> Result<()> {
    let (driver, host) = (&scenario.driver, &scenario.host);
    let mut listing = String::new();
    for module in &host.modules {
        let is_nvidia = module.starts_with("nvidia");
        if is_nvidia && !is_loaded(scenario) {
            continue;
        }
        root.write(&format!("sys/module/{module}/initstate"), "live\n")?;
        root.write(&format!("sys/module/{module}/refcnt"), "1\n")?;
        // Only NVIDIA's own module states a version; its helpers and the kernel's modules have the kernel's.
        if is_nvidia {
            root.write(
                &format!("sys/module/{module}/version"),
                format!("{}\n", driver.version),
            )?;
        }
        writeln!(listing, "{module} 1048576 1 - Live 0x0000000000000000")?;
    }
    // A kernel without any module folder would be one that cannot be read.
    for module in ["ena", "nvme"] {
        root.write(&format!("sys/module/{module}/initstate"), "live\n")?;
        writeln!(listing, "{module} 131072 1 - Live 0x0000000000000000")?;
    }
    root.write("proc/modules", listing)?;
    let firmware = driver.gsp_firmware_version();
    for file in ["gsp_ga10x.bin", "gsp_tu10x.bin"] {
        root.write(
            &format!("lib/firmware/nvidia/{firmware}/{file}"),
            "simulated firmware\n",
        )?;
    }
    if !is_loaded(scenario) {
        return Ok(());
    }
    let banner = module_banner(driver.kernel_module, &driver.version);
    root.write(
        "proc/driver/nvidia/version",
        format!("NVRM version: {banner}\nGCC version:  gcc version 11.5.0 20240719 (Red Hat 11.5.0-5) (GCC)\n"),
    )?;
    let mut minors = String::new();
    for (minor, name) in mig_capabilities(scenario) {
        writeln!(minors, "{name} {minor}")?;
    }
    root.write("proc/driver/nvidia-caps/mig-minors", minors)?;
    write_module_parameters(root, scenario)?;
    for gpu in scenario.gpus.iter().filter(|gpu| gpu.visible_to.pci) {
        write_gpu_information(root, scenario, gpu)?;
    }
    Ok(())
}

fn write_module_parameters(root: &Root<'_>, scenario: &Scenario) -> Result<()> {
    let mut parameters: Vec<(&str, &str)> = vec![
        ("ResmanDebugLevel", "4294967295"),
        ("ModifyDeviceFiles", "1"),
        ("DeviceFileUID", "0"),
        ("DeviceFileGID", "0"),
        ("DeviceFileMode", "438"),
        ("EnableMSI", "1"),
        ("EnablePCIeGen3", "0"),
        ("EnableStreamMemOPs", "0"),
        ("EnableGpuFirmware", "18"),
        ("EnableGpuFirmwareLogs", "2"),
        ("OpenRmEnableUnsupportedGpus", "1"),
    ];
    for (name, value) in &scenario.host.module_parameters {
        parameters.retain(|(other, _)| other != name);
        parameters.push((name, value));
    }
    let mut text = String::new();
    for (name, value) in parameters {
        writeln!(text, "{name}: {value}")?;
    }
    root.write("proc/driver/nvidia/params", text)
}

fn write_gpu_information(root: &Root<'_>, scenario: &Scenario, gpu: &Gpu) -> Result<()> {
    let firmware = if gpu.gsp_firmware {
        scenario.driver.gsp_firmware_version()
    } else {
        "N/A"
    };
    let text = format!(
        "Model: \t\t {}\nIRQ:   \t\t {}\nGPU UUID: \t {}\nVideo BIOS: \t {}\nBus Type: \t PCIe\nDMA Size: \t 52 bits\n\
         DMA Mask: \t 0xfffffffffffff\nBus Location: \t {}\nDevice Minor: \t {}\nGPU Firmware: \t {firmware}\n\
         GPU Excluded:\t No\n",
        gpu.name,
        40 + gpu.minor_number,
        gpu.uuid,
        gpu.vbios.to_lowercase(),
        gpu.pci_address,
        gpu.minor_number,
    );
    root.write(
        &format!("proc/driver/nvidia/gpus/{}/information", gpu.pci_address),
        text,
    )
}

fn write_pci(root: &Root<'_>, scenario: &Scenario) -> Result<()> {
    root.folder("sys/bus/pci/devices")?;
    let count = scenario.gpus.len();
    for (index, gpu) in scenario
        .gpus
        .iter()
        .enumerate()
        .filter(|(_, gpu)| gpu.visible_to.pci)
    {
        let folder = format!("sys/bus/pci/devices/{}", gpu.pci_address);
        let class = format!("0x03{:02x}00", gpu.pci_sub_class);
        let device = format!("0x{:04x}", gpu.pci_device_id);
        let subsystem = format!("0x{:04x}", gpu.pci_subsystem_id);
        write_pci_identity(root, &folder, &device, &class, &subsystem)?;
        write_pci_link(root, &folder, gpu)?;
        let numa_node = crate::nvml::topology::numa_node(index, count);
        root.write(&format!("{folder}/numa_node"), format!("{numa_node}\n"))?;
        write_aer_counters(root, &folder, gpu)?;
        // Without its module a device is bound to nothing, unless another driver took it.
        if is_loaded(scenario) || scenario.host.pci_driver != "nvidia" {
            bind(root, &folder, &scenario.host.pci_driver)?;
        }
    }
    // The bridges of the generation that belongs to the GPUs.
    let hopper = scenario
        .gpus
        .iter()
        .any(|gpu| gpu.architecture >= Architecture::Hopper);
    let device = if hopper { "0x22a3" } else { "0x1af1" };
    for switch in 0..scenario.host.nvswitches {
        let folder = format!(
            "sys/bus/pci/devices/0000:{:02x}:00.0",
            FIRST_NVSWITCH_BUS + switch
        );
        write_pci_identity(root, &folder, device, "0x068000", "0x1796")?;
        root.write(&format!("{folder}/numa_node"), "0\n")?;
        if is_loaded(scenario) {
            bind(root, &folder, "nvidia-nvswitch")?;
        }
    }
    Ok(())
}

fn write_pci_identity(
    root: &Root<'_>,
    folder: &str,
    device: &str,
    class: &str,
    subsystem: &str,
) -> Result<()> {
    for (file, value) in [
        ("vendor", VENDOR),
        ("device", device),
        ("class", class),
        ("subsystem_vendor", VENDOR),
        ("subsystem_device", subsystem),
    ] {
        root.write(&format!("{folder}/{file}"), format!("{value}\n"))?;
    }
    Ok(())
}

fn bind(root: &Root<'_>, folder: &str, driver: &str) -> Result<()> {
    root.folder(&format!("sys/bus/pci/drivers/{driver}"))?;
    root.link(
        &format!("{folder}/driver"),
        format!("../../../../bus/pci/drivers/{driver}"),
    )
}

/// Gigatransfers per second as the kernel writes them.
fn link_speed(generation: u32) -> &'static str {
    match generation {
        1 => "2.5 GT/s PCIe",
        2 => "5.0 GT/s PCIe",
        3 => "8.0 GT/s PCIe",
        4 => "16.0 GT/s PCIe",
        5 => "32.0 GT/s PCIe",
        6 => "64.0 GT/s PCIe",
        _ => "Unknown",
    }
}

fn write_pci_link(root: &Root<'_>, folder: &str, gpu: &Gpu) -> Result<()> {
    let pcie = &gpu.pcie;
    for (file, value) in [
        (
            "current_link_speed",
            link_speed(pcie.current_generation(true)).to_owned(),
        ),
        ("max_link_speed", link_speed(pcie.max_generation).to_owned()),
        ("current_link_width", pcie.current_width().to_string()),
        ("max_link_width", pcie.max_width.to_string()),
    ] {
        root.write(&format!("{folder}/{file}"), format!("{value}\n"))?;
    }
    Ok(())
}

/// The kernel's names of the errors that Advanced Error Reporting counts; the simulator books all on the first.
fn write_aer_counters(root: &Root<'_>, folder: &str, gpu: &Gpu) -> Result<()> {
    const CORRECTABLE: [&str; 8] = [
        "RxErr",
        "BadTLP",
        "BadDLLP",
        "Rollover",
        "Timeout",
        "NonFatalErr",
        "CorrIntErr",
        "HeaderOF",
    ];
    const UNCORRECTABLE: [&str; 9] = [
        "DLP",
        "SDES",
        "TLP",
        "FCP",
        "CmpltTO",
        "CmpltAbrt",
        "UnxCmplt",
        "RxOF",
        "MalfTLP",
    ];
    let table = |names: &[&str], count: u64, total: &str| {
        let mut text = String::new();
        for (index, name) in names.iter().enumerate() {
            let _ = writeln!(text, "{name} {}", if index == 0 { count } else { 0 });
        }
        let _ = writeln!(text, "{total} {count}");
        text
    };
    let pcie = &gpu.pcie;
    for (file, text) in [
        (
            "aer_dev_correctable",
            table(&CORRECTABLE, pcie.aer_correctable, "TOTAL_ERR_COR"),
        ),
        (
            "aer_dev_nonfatal",
            table(&UNCORRECTABLE, pcie.aer_nonfatal, "TOTAL_ERR_NONFATAL"),
        ),
        (
            "aer_dev_fatal",
            table(&UNCORRECTABLE, pcie.aer_fatal, "TOTAL_ERR_FATAL"),
        ),
    ] {
        root.write(&format!("{folder}/{file}"), text)?;
    }
    Ok(())
}

fn write_device_nodes(root: &Root<'_>, scenario: &Scenario) -> Result<()> {
    root.folder("dev")?;
    if !is_loaded(scenario) {
        return Ok(());
    }
    let mut nodes = scenario.host.device_nodes.clone();
    let gpus = scenario
        .gpus
        .iter()
        .filter(|gpu| gpu.visible_to.device_node && gpu.visible_to.pci);
    nodes.extend(gpus.map(|gpu| format!("nvidia{}", gpu.minor_number)));
    if scenario.host.nvswitches > 0 {
        nodes.push("nvidia-nvswitchctl".to_owned());
        nodes
            .extend((0..scenario.host.nvswitches).map(|switch| format!("nvidia-nvswitch{switch}")));
    }
    nodes.extend(
        mig_capabilities(scenario)
            .into_iter()
            .map(|(minor, _)| format!("nvidia-caps/nvidia-cap{minor}")),
    );
    for node in nodes {
        let path = format!("dev/{node}");
        root.write(&path, "")?;
        // As the driver makes them, whatever the caller's umask.
        let everyone = std::fs::Permissions::from_mode(0o666);
        std::fs::set_permissions(root.path(&path), everyone)
            .with_context(|| format!("set the mode of {path}"))?;
    }
    Ok(())
}

/// The capabilities of MIG as the driver numbers them, with their names: two for the machine, then one for each GPU
/// instance and each compute instance.
fn mig_capabilities(scenario: &Scenario) -> Vec<(u32, String)> {
    /// An instance and its eight compute instances.
    const PER_INSTANCE: u32 = 9;
    /// Fifteen instances a GPU.
    const PER_GPU: u32 = 15 * PER_INSTANCE;
    if scenario.gpus.iter().all(|gpu| gpu.mig.mode.is_none()) {
        return Vec::new();
    }
    let mut capabilities = vec![(1, "config".to_owned()), (2, "monitor".to_owned())];
    for gpu in &scenario.gpus {
        for mig in &gpu.mig.instances {
            let (device, instance) = (gpu.minor_number, mig.gpu_instance_id);
            let minor = 3 + device * PER_GPU + instance * PER_INSTANCE;
            capabilities.push((minor, format!("gpu{device}/gi{instance}/access")));
            if mig.compute_instance {
                capabilities.push((minor + 1, format!("gpu{device}/gi{instance}/ci0/access")));
            }
        }
    }
    capabilities
}

/// systemd as files: a unit's file, the link by which a target wants it, and the control group of its processes.
fn write_units(root: &Root<'_>, scenario: &Scenario) -> Result<()> {
    root.folder("run/systemd/system")?;
    root.write(
        "sys/fs/cgroup/cgroup.controllers",
        "cpuset cpu io memory hugetlb pids rdma misc\n",
    )?;
    root.folder("sys/fs/cgroup/system.slice")?;
    for (number, (unit, state)) in scenario.host.units.iter().enumerate() {
        let file = format!("usr/lib/systemd/system/{unit}");
        let name = unit.trim_end_matches(".service");
        root.write(
            &file,
            format!("[Unit]\nDescription={name}\n\n[Service]\nExecStart=/usr/bin/{name}\n\n[Install]\nWantedBy=multi-user.target\n"),
        )?;
        if state.enabled {
            root.link(
                &format!("etc/systemd/system/multi-user.target.wants/{unit}"),
                format!("/{file}"),
            )?;
        }
        if state.active {
            let pid = 900 + number;
            root.write(
                &format!("sys/fs/cgroup/system.slice/{unit}/cgroup.procs"),
                format!("{pid}\n"),
            )?;
            root.write(
                &format!("sys/fs/cgroup/system.slice/{unit}/cgroup.events"),
                "populated 1\nfrozen 0\n",
            )?;
        }
    }
    Ok(())
}

fn write_toolkits(root: &Root<'_>, scenario: &Scenario, library: &Path) -> Result<()> {
    let host = &scenario.host;
    for (name, toolkit) in &host.toolkits {
        write_toolkit(root, name, toolkit, library)?;
    }
    let newest = host
        .toolkits
        .keys()
        .max_by_key(|name| version_numbers(name));
    if let Some(name) = host.default_toolkit.as_ref().or(newest) {
        root.link("usr/local/cuda", format!("cuda-{name}"))?;
    }
    root.write("etc/ld.so.conf", "include ld.so.conf.d/*.conf\n")?;
    if !host.library_paths.is_empty() {
        let mut lines = String::new();
        for path in &host.library_paths {
            writeln!(lines, "{path}")?;
        }
        root.write("etc/ld.so.conf.d/00-cuda-compat.conf", lines)?;
    }
    write_loader_cache(root, scenario)
}

/// The loader's cache, in which compat folders of the loader's configuration come before the driver's own libraries.
///
/// The format is glibc's: a header of 48 bytes, an entry of 24 bytes for each library (kind, offsets of name and path),
/// and the strings.
fn write_loader_cache(root: &Root<'_>, scenario: &Scenario) -> Result<()> {
    const HEADER: &[u8; 20] = b"glibc-ld.so.cache1.1";
    const HEADER_BYTES: usize = 48;
    const ENTRY_BYTES: usize = 24;
    /// An ELF library for x86-64.
    const KIND: u32 = 0x0303;
    let mut folders: Vec<String> = scenario
        .host
        .library_paths
        .iter()
        .map(|path| path.trim_start_matches('/').to_owned())
        .collect();
    folders.push(LIBRARY_FOLDER.to_owned());
    let mut libraries = Vec::new();
    for folder in folders {
        for name in ["libnvidia-ml.so.1", "libcuda.so.1"] {
            if root.path(&format!("{folder}/{name}")).exists() {
                libraries.push((name, format!("/{folder}/{name}")));
            }
        }
    }
    let (mut entries, mut strings) = (Vec::new(), Vec::new());
    let start = HEADER_BYTES + ENTRY_BYTES * libraries.len();
    for (name, path) in &libraries {
        entries.extend(KIND.to_le_bytes());
        for text in [*name, path.as_str()] {
            entries.extend(u32::try_from(start + strings.len())?.to_le_bytes());
            strings.extend(text.as_bytes());
            strings.push(0);
        }
        entries.extend([0; 12]);
    }
    let mut cache = HEADER.to_vec();
    cache.extend(u32::try_from(libraries.len())?.to_le_bytes());
    cache.extend(u32::try_from(strings.len())?.to_le_bytes());
    cache.resize(HEADER_BYTES, 0);
    cache.extend(entries);
    cache.extend(strings);
    root.write("etc/ld.so.cache", cache)
}

/// `12.10` is newer than `12.9`.
fn version_numbers(version: &str) -> Vec<u32> {
    version
        .split('.')
        .map(|part| part.parse().unwrap_or(0))
        .collect()
}

fn write_toolkit(root: &Root<'_>, name: &str, toolkit: &Toolkit, library: &Path) -> Result<()> {
    let folder = format!("usr/local/cuda-{name}");
    let version = &toolkit.version;
    let description = serde_json::json!({
        "cuda": {"name": "CUDA SDK", "version": version},
        "cuda_cudart": {"name": "CUDA Runtime (cudart)", "version": version},
        "cuda_nvcc": {"name": "CUDA NVCC", "version": version},
    });
    root.write(
        &format!("{folder}/version.json"),
        format!("{description:#}\n"),
    )?;
    root.write(&format!("{folder}/bin/nvcc"), "#!/bin/sh\nexit 1\n")?;
    let major = version.split('.').next().unwrap_or_default();
    root.write(&format!("{folder}/lib64/libcudart.so.{version}"), "")?;
    root.link(
        &format!("{folder}/lib64/libcudart.so.{major}"),
        format!("libcudart.so.{version}"),
    )?;
    let Some(driver) = &toolkit.compat else {
        return Ok(());
    };
    // A program may load it, so it is the simulator's library under the name that the package gives it.
    let file = format!("{folder}/compat/libcuda.so.{driver}");
    root.folder(&format!("{folder}/compat"))?;
    std::fs::hard_link(library, root.path(&file)).with_context(|| format!("link {file}"))?;
    root.link(
        &format!("{folder}/compat/libcuda.so.1"),
        format!("libcuda.so.{driver}"),
    )?;
    root.write(
        &format!("{folder}/compat/libnvidia-ptxjitcompiler.so.{driver}"),
        "",
    )
}

fn write_container_runtime(root: &Root<'_>, scenario: &Scenario) -> Result<()> {
    let runtime = &scenario.host.container_runtime;
    if !(runtime.docker || runtime.containerd || runtime.cdi) {
        return Ok(());
    }
    for program in [
        "nvidia-ctk",
        "nvidia-container-runtime",
        "nvidia-container-cli",
    ] {
        let path = format!("usr/bin/{program}");
        root.write(&path, "#!/bin/sh\nexit 1\n")?;
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(root.path(&path), executable)
            .with_context(|| format!("set the mode of {path}"))?;
    }
    root.write(
        "etc/nvidia-container-runtime/config.toml",
        "[nvidia-container-runtime]\nmode = \"auto\"\n",
    )?;
    if runtime.docker {
        let configuration = serde_json::json!({
            "default-runtime": "nvidia",
            "runtimes": {"nvidia": {"args": [], "path": "nvidia-container-runtime"}},
        });
        root.write("etc/docker/daemon.json", format!("{configuration:#}\n"))?;
    }
    if runtime.containerd {
        root.write(
            "etc/containerd/config.toml",
            "version = 2\n\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\ndefault_runtime_name = \"nvidia\"\n\n\
             [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.nvidia]\nruntime_type = \"io.containerd.runc.v2\"\n\n\
             [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.nvidia.options]\n\
             BinaryName = \"/usr/bin/nvidia-container-runtime\"\n",
        )?;
    }
    if runtime.cdi {
        let mut text = "cdiVersion: \"0.5.0\"\nkind: nvidia.com/gpu\ndevices:\n".to_owned();
        for gpu in &scenario.gpus {
            let minor = gpu.minor_number;
            writeln!(
                text,
                "- name: \"{minor}\"\n  containerEdits:\n    deviceNodes:\n    - path: /dev/nvidia{minor}"
            )?;
        }
        writeln!(
            text,
            "- name: all\n  containerEdits:\n    deviceNodes:\n    - path: /dev/nvidiactl"
        )?;
        root.write("etc/cdi/nvidia.yaml", text)?;
    }
    Ok(())
}

/// The kernel log as records of `/dev/kmsg`: priority, sequence number, microseconds since boot, flags; then the message.
fn write_kernel_log(
    root: &Root<'_>,
    scenario: &Scenario,
    events: &[ScheduledEvent],
) -> Result<u64> {
    if !scenario.host.kernel_log_readable {
        write_unreadable_kernel_log(root)?;
        return Ok(0);
    }
    let mut records: Vec<(u64, String)> = boot_messages(scenario)
        .into_iter()
        .chain(scenario.host.kernel_log.clone())
        .enumerate()
        .map(|(index, message)| (DRIVER_LOADED_US + 1_000 * index as u64, message))
        .collect();
    let lag_us = scenario.host.kernel_log_lag_s * 1_000_000;
    let recent_us = UPTIME_S * 1_000_000 - EVENTS_BEFORE_START_US - lag_us;
    let messages = events
        .iter()
        .filter(|event| event.change.is_none())
        .flat_map(|event| &event.kernel_log);
    for (index, message) in messages.enumerate() {
        records.push((recent_us + 1_000 * index as u64, message.clone()));
    }
    let mut log = String::new();
    for (sequence, (time_us, message)) in records.iter().enumerate() {
        writeln!(log, "4,{sequence},{time_us},-;{message}")?;
    }
    root.write("dev/kmsg", log)?;
    Ok(records.len() as u64)
}

/// What the kernel says while it loads the driver.
fn boot_messages(scenario: &Scenario) -> Vec<String> {
    let mut messages = vec![format!(
        "Linux version {} (simulated)",
        scenario.host.kernel_release
    )];
    if is_loaded(scenario) {
        let banner = module_banner(scenario.driver.kernel_module, &scenario.driver.version);
        messages.push("nvidia: loading out-of-tree module taints kernel.".to_owned());
        messages.push(format!("NVRM: loading {banner}"));
    }
    messages
}

/// A file that nobody but root may read; for root, who may read every file, one that cannot be opened at all.
fn write_unreadable_kernel_log(root: &Root<'_>) -> Result<()> {
    #[allow(unsafe_code, reason = "asks for the user id")]
    // SAFETY: takes and writes no memory.
    let is_root = unsafe { libc::geteuid() } == 0;
    if is_root {
        return root.link("dev/kmsg", "kmsg");
    }
    root.write("dev/kmsg", "")?;
    let nobody = std::fs::Permissions::from_mode(0o000);
    std::fs::set_permissions(root.path("dev/kmsg"), nobody).context("set the mode of dev/kmsg")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_toolkit_is_found_by_numbers() {
        let newest = ["12.9", "12.10", "11.8"]
            .into_iter()
            .max_by_key(|name| version_numbers(name));
        assert_eq!(newest, Some("12.10"));
    }
}
