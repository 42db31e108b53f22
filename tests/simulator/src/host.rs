//! The host side of a node, as files below a sysroot.
//!
//! Device nodes are plain files; everything else has the form that the kernel, systemd and NVIDIA's
//! packages give it. Later changes reach the kernel log, the counters and links of PCI devices,
//! device nodes, active units and the files that a scenario names (`update_sysroot`); the rest
//! shows the state at the node's start.

use crate::gpu::{Architecture, Gpu, LinkLoad};
use crate::scenario::{Container, KernelModule, Scenario, ScheduledEvent, Toolkit};
use anyhow::{Context, Result};
use std::fmt::Write as _;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};

/// NVSwitch bridges are on the buses from this one on.
pub(crate) const FIRST_NVSWITCH_BUS: u32 = 0xc0;
/// NVIDIA's PCI vendor id.
const VENDOR: &str = "0x10de";
/// Where Debian and Ubuntu keep the driver's libraries.
pub(crate) const LIBRARY_FOLDER: &str = "usr/lib/x86_64-linux-gnu";
/// When the kernel came to load the driver, in microseconds since boot.
const DRIVER_LOADED_US: u64 = 5_000_000;
/// How long before the node's start the events of its faults happened.
const EVENTS_BEFORE_START_US: u64 = 60_000_000;
/// The time that all of them take.
const EVENTS_LAST_US: u64 = 50_000_000;

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

    /// Replaces a file at once, since programs may be reading it.
    fn replace(&self, path: &str, content: impl AsRef<[u8]>) -> Result<()> {
        let path = self.path(path);
        let new = path.with_added_extension(format!("new-{}", std::process::id()));
        std::fs::write(&new, content).with_context(|| format!("write {}", new.display()))?;
        std::fs::rename(&new, &path).with_context(|| format!("replace {}", path.display()))
    }

    fn remove(&self, path: &str) -> Result<()> {
        let path = self.path(path);
        let removed = if path.is_dir() && !path.is_symlink() {
            std::fs::remove_dir_all(&path)
        } else {
            std::fs::remove_file(&path)
        };
        match removed {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("remove {}", path.display()))
            }
            _ => Ok(()),
        }
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

/// Writes the host's files. Events that happened before the start go to the kernel log. `library`
/// is what the user-mode libraries of compat folders are. Returns the number of records in the
/// kernel log.
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
    write_container(&root, scenario)?;
    let records = write_kernel_log(&root, scenario, events)?;
    for (path, content) in &scenario.host.files {
        write_file(&root, path, content.as_deref())?;
    }
    Ok(records)
}

/// Writes what a change on a running node makes different: counters and links of PCI devices, which
/// device nodes and active units there are, and files that the scenario names. Everything else is
/// as it was at the start.
pub fn update_sysroot(sysroot: &Path, before: &Scenario, after: &Scenario) -> Result<()> {
    let root = Root(sysroot);
    for (old, new) in before.gpus.iter().zip(&after.gpus) {
        let folder = pci_folder(new);
        if !root.path(&folder).exists() {
            continue;
        }
        let errors = |gpu: &Gpu| {
            let pcie = &gpu.pcie;
            [pcie.aer_correctable, pcie.aer_nonfatal, pcie.aer_fatal]
        };
        if errors(old) != errors(new) {
            write_aer_counters(&root, &folder, new)?;
        }
        let link = |gpu: &Gpu| gpu.pcie.shown_by_sysfs(LinkLoad::Saving);
        if link(old) != link(new) {
            write_pci_link(&root, &folder, new, LinkLoad::Saving)?;
        }
    }
    if before.host.units != after.host.units {
        write_active_units(&root, after)?;
    }
    for node in device_nodes(before) {
        if !device_nodes(after).contains(&node) {
            root.remove(&format!("dev/{node}"))?;
        }
    }
    for node in device_nodes(after) {
        if !root.path(&format!("dev/{node}")).exists() {
            write_device_node(&root, &node)?;
        }
    }
    for (path, content) in &after.host.files {
        if before.host.files.get(path) != Some(content) {
            write_file(&root, path, content.as_deref())?;
        }
    }
    Ok(())
}

/// Writes a GPU's link as it is now.
pub(crate) fn update_link(sysroot: &Path, gpu: &Gpu, load: LinkLoad) -> Result<()> {
    let root = Root(sysroot);
    let folder = pci_folder(gpu);
    if root.path(&folder).exists() {
        write_pci_link(&root, &folder, gpu, load)?;
    }
    Ok(())
}

fn write_file(root: &Root<'_>, path: &str, content: Option<&str>) -> Result<()> {
    anyhow::ensure!(
        !path.is_empty()
            && Path::new(path)
                .components()
                .all(|it| matches!(it, Component::Normal(_))),
        "host.files: `{path}` is not a path below the sysroot, such as proc/self/limits"
    );
    match content {
        Some(content) => root.write(path, content),
        None => root.remove(path),
    }
}

/// Whether this kernel has NVIDIA's module.
fn is_loaded(scenario: &Scenario) -> bool {
    matches!(
        scenario.driver.kernel_module,
        KernelModule::Open | KernelModule::Proprietary
    )
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
    root.write("proc/uptime", format!("{0}.00 {0}.00\n", host.uptime_s))?;
    if let Some(size) = host.shared_memory {
        let kibibytes = size.0 >> 10;
        let mount = format!("tmpfs /dev/shm tmpfs rw,nosuid,nodev,size={kibibytes}k 0 0\n");
        root.write("proc/mounts", &mount)?;
        root.write("proc/self/mounts", &mount)?;
    }
    write_limits(root, scenario)
}

/// `/proc/self/limits`, in the kernel's columns.
fn write_limits(root: &Root<'_>, scenario: &Scenario) -> Result<()> {
    if scenario.host.limits.is_empty() {
        return Ok(());
    }
    let mut text = format!(
        "{:<25} {:<20} {:<20} {:<10}\n",
        "Limit", "Soft Limit", "Hard Limit", "Units"
    );
    for (name, limit) in &scenario.host.limits {
        let limit = limit.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string());
        let unit = limit_unit(name)
            .with_context(|| format!("host.limits: the kernel knows no limit `{name}`"))?;
        writeln!(text, "{name:<25} {limit:<20} {limit:<20} {unit:<10}")?;
    }
    root.write("proc/self/limits", &text)?;
    root.write("proc/1/limits", &text)
}

/// Source: fs/proc/base.c of Linux 6.12, `lnames`.
fn limit_unit(name: &str) -> Option<&'static str> {
    Some(match name {
        "Max cpu time" => "seconds",
        "Max file size" | "Max data size" | "Max stack size" | "Max core file size"
        | "Max resident set" | "Max locked memory" | "Max address space" | "Max msgqueue size" => {
            "bytes"
        }
        "Max processes" => "processes",
        "Max open files" => "files",
        "Max file locks" => "locks",
        "Max pending signals" => "signals",
        "Max nice priority" | "Max realtime priority" => "",
        "Max realtime timeout" => "us",
        _ => return None,
    })
}

/// The marks by which programs know that they run in a container.
fn write_container(root: &Root<'_>, scenario: &Scenario) -> Result<()> {
    match scenario.host.container {
        Container::None => Ok(()),
        Container::Docker => {
            root.write(".dockerenv", "")?;
            root.write("proc/1/cgroup", "0::/\n")
        }
        Container::Podman => {
            root.write("run/.containerenv", "engine=\"podman-5.4.0\"\n")?;
            root.write("proc/1/cgroup", "0::/\n")
        }
        Container::Kubernetes => {
            let pod = "kubepods.slice/kubepods-pod1f5c6a1e_8a3c_4f0d_9b52_6a2f1c7d9e01.slice";
            root.write(
                "proc/1/cgroup",
                format!("0::/{pod}/cri-containerd-0.scope\n"),
            )?;
            let account = "var/run/secrets/kubernetes.io/serviceaccount";
            root.write(&format!("{account}/namespace"), "default\n")
        }
    }
}

/// The release line of `/proc/driver/nvidia/version`, which identifies the module's flavour.
fn module_banner(module: KernelModule, version: &str) -> String {
    let built = "Tue Oct 14 10:21:17 UTC 2025";
    match module {
        KernelModule::Open => format!(
            "NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (dvs-builder@U22-I3-G01-1-1)  {built}"
        ),
        KernelModule::Proprietary | KernelModule::Windows | KernelModule::NotLoaded => {
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
        // Only NVIDIA's own module states a version; its helpers and the kernel's modules have the
        // kernel's.
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
    // NVIDIA's container runtimes mask the folders of GPUs that a container was not given.
    let in_container = scenario.host.container != Container::None;
    let is_shown = |gpu: &&Gpu| gpu.visible_to.pci && (!in_container || gpu.visible_to.device_node);
    for gpu in scenario.gpus.iter().filter(is_shown) {
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
        let folder = pci_folder(gpu);
        if let Some(port) = &gpu.pcie.port {
            write_pci_port(root, port, &gpu.pci_address)?;
        }
        let class = format!("0x03{:02x}00", gpu.pci_sub_class);
        let device = format!("0x{:04x}", gpu.pci_device_id);
        let subsystem = format!("0x{:04x}", gpu.pci_subsystem_id);
        write_pci_identity(root, &folder, &device, &class, &subsystem)?;
        root.folder(&folder)?;
        write_pci_link(root, &folder, gpu, LinkLoad::Saving)?;
        write_pci_regions(root, &folder, gpu)?;
        root.write(
            &format!("{folder}/numa_node"),
            format!("{}\n", numa_node(index, count)),
        )?;
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
        let held = scenario
            .host
            .nvswitches
            .saturating_sub(scenario.host.nvswitches_without_driver);
        if is_loaded(scenario) && switch < held {
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

fn write_pci_link(root: &Root<'_>, folder: &str, gpu: &Gpu, load: LinkLoad) -> Result<()> {
    let pcie = &gpu.pcie;
    let (generation, width) = pcie.shown_by_sysfs(load);
    for (file, value) in [
        ("current_link_speed", link_speed(generation).to_owned()),
        ("max_link_speed", link_speed(pcie.max_generation).to_owned()),
        ("current_link_width", width.to_string()),
        ("max_link_width", pcie.max_width.to_string()),
    ] {
        root.replace(&format!("{folder}/{file}"), format!("{value}\n"))?;
    }
    Ok(())
}

/// Start, end and flags of each region: the registers, and BAR1 above 4 GiB.
fn write_pci_regions(root: &Root<'_>, folder: &str, gpu: &Gpu) -> Result<()> {
    const BAR1_START: u64 = 0x3800_0000_0000;
    let end = BAR1_START + gpu.bar1_memory.0.max(1) - 1;
    let text = format!(
        "{:#018x} {:#018x} {:#018x}\n{BAR1_START:#018x} {end:#018x} {:#018x}\n",
        0x9400_0000_u64, 0x94ff_ffff_u64, 0x0014_0204, 0x0014_220c
    );
    root.write(&format!("{folder}/resource"), text)
}

fn pci_folder(gpu: &Gpu) -> String {
    format!("sys/bus/pci/devices/{}", gpu.pci_address)
}

/// A port with a device below it, as sysfs has them: the device's folder lies in that of the port,
/// and links lead to both.
fn write_pci_port(root: &Root<'_>, port: &str, device: &str) -> Result<()> {
    let domain = port.split(':').next().unwrap_or("0000");
    let folder = format!("sys/devices/pci{domain}:00/{port}");
    for (file, value) in [
        ("vendor", "0x1000"),
        ("device", "0xc030"),
        ("class", "0x060400"),
        ("subsystem_vendor", "0x1000"),
        ("subsystem_device", "0xa064"),
    ] {
        root.write(&format!("{folder}/{file}"), format!("{value}\n"))?;
    }
    root.folder(&format!("{folder}/{device}"))?;
    let up = format!("../../../devices/pci{domain}:00/{port}");
    root.link(&format!("sys/bus/pci/devices/{port}"), &up)?;
    root.link(
        &format!("sys/bus/pci/devices/{device}"),
        format!("{up}/{device}"),
    )
}

/// The kernel's names of the errors that Advanced Error Reporting counts; the simulator books all
/// on the first.
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
        root.replace(&format!("{folder}/{file}"), text)?;
    }
    Ok(())
}

fn write_device_nodes(root: &Root<'_>, scenario: &Scenario) -> Result<()> {
    root.folder("dev")?;
    for node in device_nodes(scenario) {
        write_device_node(root, &node)?;
    }
    Ok(())
}

/// The names of the device nodes below `/dev`.
fn device_nodes(scenario: &Scenario) -> Vec<String> {
    let host = &scenario.host;
    match scenario.driver.kernel_module {
        KernelModule::Open | KernelModule::Proprietary => {}
        // What the Windows host's GPUs are reached through.
        KernelModule::Windows => return vec!["dxg".to_owned()],
        KernelModule::NotLoaded => return Vec::new(),
    }
    let mut nodes = host.device_nodes.clone();
    let gpus = scenario
        .gpus
        .iter()
        .filter(|gpu| gpu.visible_to.device_node && gpu.visible_to.pci);
    nodes.extend(gpus.map(|gpu| format!("nvidia{}", gpu.minor_number)));
    if host.nvswitches > 0 {
        nodes.push("nvidia-nvswitchctl".to_owned());
        nodes.extend((0..host.nvswitches).map(|switch| format!("nvidia-nvswitch{switch}")));
    }
    nodes.extend(
        mig_capabilities(scenario)
            .into_iter()
            .map(|(minor, _)| format!("nvidia-caps/nvidia-cap{minor}")),
    );
    nodes
}

fn write_device_node(root: &Root<'_>, node: &str) -> Result<()> {
    let path = format!("dev/{node}");
    root.write(&path, "")?;
    // As the driver makes them, whatever the caller's umask.
    let everyone = std::fs::Permissions::from_mode(0o666);
    std::fs::set_permissions(root.path(&path), everyone)
        .with_context(|| format!("set the mode of {path}"))
}

/// The capabilities of MIG as the driver numbers them, with their names: two for the machine, then
/// one for each GPU instance and each compute instance.
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

/// systemd as files: a unit's file, the link by which a target wants it, and the control group of
/// its processes.
fn write_units(root: &Root<'_>, scenario: &Scenario) -> Result<()> {
    root.folder("run/systemd/system")?;
    root.write(
        "sys/fs/cgroup/cgroup.controllers",
        "cpuset cpu io memory hugetlb pids rdma misc\n",
    )?;
    root.folder("sys/fs/cgroup/system.slice")?;
    for (unit, state) in &scenario.host.units {
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
    }
    write_active_units(root, scenario)
}

fn write_active_units(root: &Root<'_>, scenario: &Scenario) -> Result<()> {
    for (number, (unit, state)) in scenario.host.units.iter().enumerate() {
        let folder = format!("sys/fs/cgroup/system.slice/{unit}");
        if !state.active {
            root.remove(&folder)?;
            continue;
        }
        let pid = 900 + number;
        root.write(&format!("{folder}/cgroup.procs"), format!("{pid}\n"))?;
        root.write(
            &format!("{folder}/cgroup.events"),
            "populated 1\nfrozen 0\n",
        )?;
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

/// The loader's cache, in which compat folders of the loader's configuration come before the
/// driver's own libraries.
///
/// The format is glibc's: a header of 48 bytes, an entry of 24 bytes for each library (kind,
/// offsets of name and path), and the strings.
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
    // A program may load it, so it is the simulator's library under the name that the package gives
    // it.
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

/// The kernel log as records of `/dev/kmsg`: priority, sequence number, microseconds since boot,
/// flags; then the message.
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
    let now_us = scenario.host.uptime_s * 1_000_000;
    let recent_us = now_us.saturating_sub(EVENTS_BEFORE_START_US + lag_us);
    let messages: Vec<String> = events
        .iter()
        .filter(|event| event.change.is_none())
        .flat_map(ScheduledEvent::messages)
        .collect();
    let apart_us = (EVENTS_LAST_US / (messages.len() as u64).max(1)).min(1_000);
    for (index, message) in messages.into_iter().enumerate() {
        records.push((recent_us + apart_us * index as u64, message));
    }
    let mut log = String::new();
    for (sequence, (time_us, message)) in records.iter().enumerate() {
        writeln!(log, "4,{sequence},{time_us},-;{message}")?;
    }
    root.write("dev/kmsg", log)?;
    Ok(records.len() as u64)
}

/// Messages of the kernel while it loads the driver.
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

/// A file that only root may read; for root, who may read every file, one that cannot be opened at
/// all.
fn write_unreadable_kernel_log(root: &Root<'_>) -> Result<()> {
    #[allow(unsafe_code, reason = "reads the user id")]
    // SAFETY: takes and writes no memory.
    let is_root = unsafe { libc::geteuid() } == 0;
    if is_root {
        return root.link("dev/kmsg", "kmsg");
    }
    root.write("dev/kmsg", "")?;
    let nobody = std::fs::Permissions::from_mode(0o000);
    std::fs::set_permissions(root.path("dev/kmsg"), nobody).context("set the mode of dev/kmsg")
}

/// Half of the GPUs of a large node are on each of its two CPU sockets.
pub(crate) fn numa_node(gpu: usize, count: usize) -> u32 {
    u32::from(count > 4 && gpu >= count / 2)
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
