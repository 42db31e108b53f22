//! What several checks ask of the facts in the same way, and which check reports it when the answer
//! is missing.

use std::collections::{HashMap, HashSet};

use crate::expect;
use crate::facts::{
    AllocationFacts, ComputeCapability, Facts, GpuFacts, GpuProcess, ImageFacts, KernelModules,
    PciDevice, Reading, ServiceState,
};
use crate::findings::{GpuSubject, Outcome, Verdict};
use crate::profile::{Profile, ServiceRequirement, Severity};
use crate::reference::{self, DriverVersion};
use crate::siblings::pci_devices_by_address;
pub use crate::words::counted;

/// The outcome of a check that means nothing because of what the check `root_cause` is sure to
/// report: a skip that names it, so that one fault is one finding.
///
/// Where the profile turns that check off or softens it, no check would stop the node any more, so
/// this is an error.
pub(crate) fn reported_by(root_cause: &str, reason: &str, profile: &Profile) -> Outcome {
    let softened = profile
        .checks
        .get(root_cause)
        .is_some_and(|it| it.severity != Severity::Fail);
    if softened {
        Outcome::error(format!(
            "{reason}; the profile keeps {root_cause} from failing, but this was still not checked"
        ))
    } else {
        Outcome::skip(format!("{reason}, which {root_cause} reports"))
    }
}

/// The allocation test, where it ran to its end.
pub(crate) fn allocation_test<'f>(
    facts: &'f Facts,
    profile: &Profile,
) -> Result<&'f AllocationFacts, Outcome> {
    if facts.interrupted.is_some() {
        let reason = "the run was stopped before the end of the allocation test";
        return Err(reported_by("run_complete", reason, profile));
    }
    let allocation = facts.load.allocation.as_deref();
    allocation.ok_or_else(|| Outcome::skip("no allocation test was requested"))
}

/// The outcome of a check of the allocation test that lacks what a worker would have reported.
pub(crate) fn workers_failed(reason: &str, profile: &Profile) -> Outcome {
    reported_by("allocation_success", reason, profile)
}

/// This process runs in a container, from which services, `/proc` and devices of the host may be
/// hidden.
pub fn in_container(facts: &Facts) -> bool {
    facts.host.in_container.value() == Some(&true)
}

/// This is Linux in Windows (WSL2): driver, device nodes and services are those of the Windows
/// host.
// Source: Microsoft's kernels have `-microsoft-standard-WSL2` in their release,
// https://github.com/microsoft/WSL2-Linux-Kernel.
pub(crate) fn in_wsl(facts: &Facts) -> bool {
    let release = facts.host.kernel_release.value();
    release.is_some_and(|it| it.to_ascii_lowercase().contains("microsoft"))
}

/// Every GPU is a virtual one of a hypervisor (vGPU), which keeps persistence, temperature and
/// faults to itself.
pub(crate) fn has_only_vgpus(facts: &Facts) -> bool {
    !facts.gpus.is_empty() && facts.gpus.iter().all(is_vgpu)
}

pub(crate) fn is_vgpu(gpu: &GpuFacts) -> bool {
    let mode = gpu.virtualization_mode.value();
    mode.is_some_and(|it| it == "vgpu")
}

/// What level image looked at.
pub(crate) fn image(facts: &Facts) -> Result<&ImageFacts, Outcome> {
    facts
        .host
        .image
        .as_ref()
        .ok_or_else(|| Outcome::error("the disk of the image was not read"))
}

/// The NVIDIA GPUs on the PCI bus.
pub(crate) fn pci_gpus(facts: &Facts) -> Result<Vec<&PciDevice>, Outcome> {
    let devices = facts.host.pci_devices.required("the PCI bus")?;
    Ok(devices.iter().filter(|it| it.is_gpu()).collect())
}

/// Whether kernel module `nvidia` is loaded. Sandboxes hide `/sys/module` and `/proc/driver`; NVML,
/// which speaks to the module, is then the witness.
pub(crate) fn driver_is_loaded(facts: &Facts, modules: &KernelModules) -> bool {
    modules.loaded.contains_key("nvidia")
        || modules.nvidia_version.value().is_some()
        || facts.nvml.initialized == Reading::Value(true)
}

/// By which programs reach the driver.
pub(crate) const CONTROL_NODE: &str = "/dev/nvidiactl";

/// There was no control node when the machine was looked at.
pub(crate) fn lacks_control_node(facts: &Facts) -> bool {
    let nodes = facts.host.device_nodes.value();
    nodes.is_some_and(|it| !it.iter().any(|node| node.path == CONTROL_NODE))
}

/// `cuInit` succeeded in the probe.
pub(crate) fn cuda_initialised(facts: &Facts) -> bool {
    facts.cuda.init.value().is_some_and(|init| init.code == 0)
}

/// Whether `CUDA_VISIBLE_DEVICES` is set: to a list, or to nothing, which hides every GPU.
pub fn cuda_visible_devices_is_set(facts: &Facts) -> bool {
    let environment = facts.host.environment.value();
    environment.is_some_and(|it| it.contains_key("CUDA_VISIBLE_DEVICES"))
}

/// Whether `CUDA_VISIBLE_DEVICES` leaves neither this GPU nor a MIG device of it, as CUDA itself
/// reports.
pub fn is_hidden(gpu: &GpuFacts, facts: &Facts) -> bool {
    let offered = facts.cuda.devices.value();
    let Some(offered) = offered.filter(|_| cuda_visible_devices_is_set(facts)) else {
        return false;
    };
    let mig_devices = gpu.mig_devices.value().into_iter().flatten();
    let mut uuids = mig_devices.map(|it| &it.uuid).chain(gpu.uuid.value());
    !uuids.any(|uuid| offered.iter().any(|it| it.uuid == *uuid))
}

/// The kernel modules of a machine on which `nvidia` is loaded.
pub(crate) fn loaded_driver<'a>(
    facts: &'a Facts,
    profile: &Profile,
) -> Result<&'a KernelModules, Outcome> {
    let modules = facts.host.kernel_modules.required("kernel modules")?;
    if driver_is_loaded(facts, modules) {
        return Ok(modules);
    }
    Err(reported_by(
        "kernel_module_loaded",
        "kernel module nvidia is not loaded",
        profile,
    ))
}

/// The version of the loaded kernel module, which is the driver's.
pub(crate) fn driver_version(facts: &Facts, profile: &Profile) -> Result<DriverVersion, Outcome> {
    let modules = loaded_driver(facts, profile)?;
    // NVML queries the module, so its answer is the module's.
    let version = match modules
        .nvidia_version
        .value()
        .or(facts.nvml.driver_version.value())
    {
        Some(version) => version,
        None => modules
            .nvidia_version
            .required("version of kernel module nvidia")?,
    };
    version.parse::<DriverVersion>().map_err(Outcome::error)
}

/// A systemd service as it is on the host.
pub(crate) fn service(facts: &Facts, name: &str) -> Result<ServiceState, Outcome> {
    let reading = facts.host.services.get(name);
    let visible = reading
        .and_then(Reading::value)
        .filter(|state| state.installed || state.active);
    if let Some(state) = visible {
        return Ok(*state);
    }
    if in_container(facts) {
        return Err(Outcome::skip(format!(
            "this is a container, from which service {name} of the host is not visible"
        )));
    }
    match reading {
        None => Err(Outcome::error(format!(
            "the state of service {name} was not read"
        ))),
        Some(reading) => Ok(*reading.required(&format!("service {name}"))?),
    }
}

/// Whether `state` is the state that the service must have.
pub(crate) fn meets(state: ServiceState, requirement: ServiceRequirement) -> bool {
    match requirement {
        ServiceRequirement::Active => state.active,
        ServiceRequirement::Enabled => state.enabled,
        ServiceRequirement::Installed => state.installed,
        ServiceRequirement::Inactive => !state.active,
    }
}

/// What runs will run after a reboot, too. A container sees at most the process; whether the host
/// enables the service is unknown to it.
pub(crate) fn starts_again(state: ServiceState, facts: &Facts) -> bool {
    state.enabled || runs_without_a_unit(state) || in_container(facts)
}

/// Its process runs although systemd has no unit of that name, so that something else sees to it:
/// the GPU operator runs fabric manager in a container.
fn runs_without_a_unit(state: ServiceState) -> bool {
    state.active && !state.installed
}

/// `active and enabled`, `installed but not active`, `not installed`.
pub(crate) fn describe_service(state: ServiceState) -> &'static str {
    match (state.installed, state.enabled, state.active) {
        (false, false, true) => "active without a systemd unit, as in a container",
        (_, true, true) => "active and enabled",
        (true, false, true) => "active but not enabled",
        (true, true, false) => "enabled but not active",
        (true, false, false) => "installed but neither enabled nor active",
        (false, _, false) => "not installed",
    }
}

/// A driver library that works and that programs do not find, since only its path led to it.
///
/// Where it finds a file that it cannot load (`unloadable`), every program ends there.
pub(crate) fn not_on_loader_path(library: &str, path: &str, unloadable: Option<&str>) -> Outcome {
    let folder = path.rsplit_once('/').map_or(path, |(folder, _)| folder);
    if let Some(error) = unloadable {
        return Outcome::fail(format!(
            "programs cannot load {library}: {error}; the driver's own lies in {folder}"
        ))
        .expected(format!("the driver's {library} found by its name"))
        .observed(error)
        .remedy(
            "remove that file (an image that was committed from a container keeps empty ones), or take its folder out of \
             LD_LIBRARY_PATH and ld.so.conf.d and run ldconfig",
        );
    }
    Outcome::warn(format!(
        "{library} lies in {folder}, outside the loader's search path: programs do not find it"
    ))
    .expected(format!("{library} found by its name"))
    .observed(path)
    .remedy(format!(
        "put {folder} into a file below /etc/ld.so.conf.d and run ldconfig, or add it to LD_LIBRARY_PATH"
    ))
}

/// The words of the profile for a requirement.
pub(crate) fn requirement_word(requirement: ServiceRequirement) -> &'static str {
    match requirement {
        ServiceRequirement::Active => "active",
        ServiceRequirement::Enabled => "enabled",
        ServiceRequirement::Installed => "installed",
        ServiceRequirement::Inactive => "inactive",
    }
}

/// A job may have hundreds of processes; a person reads the first few.
const NAMED_PROCESSES_MAXIMUM: usize = 5;

/// Processes by name, number and memory: `python3 (pid 4242, 600 MiB)`.
pub fn processes_in_words(processes: &[GpuProcess]) -> String {
    let mut words: Vec<String> = processes
        .iter()
        .take(NAMED_PROCESSES_MAXIMUM)
        .map(|process| {
            let name = process.name.as_deref().unwrap_or("unknown name");
            let graphics = if process.graphics { ", graphics" } else { "" };
            let memory = process
                .used_memory_bytes
                .map(|it| format!(", {} MiB", it >> 20))
                .unwrap_or_default();
            format!("{name} (pid {}{graphics}{memory})", process.pid)
        })
        .collect();
    let rest = processes.len().saturating_sub(NAMED_PROCESSES_MAXIMUM);
    if rest > 0 {
        words.push(format!("{rest} more"));
    }
    words.join(", ")
}

/// `GPU 0 (0000:53:00.0)`, by its position among the facts' GPUs, which is NVML's index.
pub fn gpu_name(gpu: &GpuFacts, index: usize) -> String {
    crate::diagnosis::CauseGpu::of(gpu, index).to_string()
}

/// Where on the bus and by which name a person finds this GPU.
pub fn name_of(gpu: &GpuFacts) -> String {
    GpuSubject::of(gpu).to_string()
}

/// A GPU and its architecture.
pub(crate) struct GpuArchitecture {
    /// Its UUID and PCI address, as far as they are known.
    pub(crate) gpu: String,
    /// It is lost, or NVML does not list it, which other checks report.
    pub(crate) is_missing: bool,
    /// CUDA lists it: the driver works with the GPU, also where a table disagrees.
    pub(crate) offered_by_cuda: bool,
    /// `None` where neither NVML nor the reference table has it.
    pub(crate) compute_capability: Option<ComputeCapability>,
}

/// The architecture of every GPU of the machine: from NVML, else from CUDA, else from the reference
/// table.
///
/// A GPU that is lost or not listed, and whose architecture nothing else gives, is left out where
/// the check that reports it fails: it is no error of a check about other things.
pub(crate) fn gpu_architectures(
    facts: &Facts,
    profile: &Profile,
) -> Result<Vec<GpuArchitecture>, Outcome> {
    let lost = facts.gpus.iter().any(|gpu| gpu.lost.is_some());
    let (reports_it, reason) = if lost {
        (
            "gpu_reachable",
            "no GPU that answers has an architecture to judge",
        )
    } else {
        ("gpu_count", "there is no GPU to judge by")
    };
    let outcome = reported_by(reports_it, reason, profile);
    let is_reported = outcome.verdict == Verdict::Skip;
    let mut known = all_gpu_architectures(facts);
    known.retain(|it| {
        !(is_reported && it.is_missing && it.compute_capability.is_none() && !it.offered_by_cuda)
    });
    if known.is_empty() {
        return Err(outcome);
    }
    Ok(known)
}

/// The architecture of every GPU, also of those that are lost.
pub(crate) fn all_gpu_architectures(facts: &Facts) -> Vec<GpuArchitecture> {
    let by_cuda = cuda_compute_capabilities(facts);
    let of_cuda = |gpu: &GpuFacts| by_cuda.get(gpu.uuid.value()?.as_str()).copied();
    let on_the_bus = pci_devices_by_address(facts);
    let listed = facts.gpus.iter().map(|gpu| GpuArchitecture {
        gpu: name_of(gpu),
        is_missing: gpu.lost.is_some(),
        offered_by_cuda: of_cuda(gpu).is_some(),
        compute_capability: gpu
            .compute_capability
            .value()
            .copied()
            .or_else(|| of_cuda(gpu))
            .or_else(|| expect::gpu_model(gpu).map(|model| model.compute_capability)),
    });
    let unlisted = unlisted_gpus(facts).into_iter().map(|subject| {
        let address = subject.pci_address.as_deref();
        let device = address.and_then(|it| on_the_bus.get(it));
        let device_id = device.map(|device| device.device_id);
        GpuArchitecture {
            gpu: subject.to_string(),
            is_missing: true,
            offered_by_cuda: false,
            compute_capability: device_id.and_then(compute_capability_of_pci_id),
        }
    });
    listed.chain(unlisted).collect()
}

/// By UUID, the first device with each.
fn cuda_compute_capabilities(facts: &Facts) -> HashMap<&str, ComputeCapability> {
    let mut by_uuid = HashMap::new();
    for device in facts.cuda.devices.value().into_iter().flatten() {
        let capability = by_uuid.entry(device.uuid.as_str());
        capability.or_insert(device.compute_capability);
    }
    by_uuid
}

/// The compute capability that all models with this PCI device id share.
fn compute_capability_of_pci_id(device_id: u16) -> Option<ComputeCapability> {
    let mut capabilities = reference::gpu_models()
        .iter()
        .filter(|model| model.pci_device_ids.contains(&device_id))
        .map(|model| model.compute_capability);
    let first = capabilities.next()?;
    capabilities.all(|it| it == first).then_some(first)
}

/// GPUs on the PCI bus that NVML does not list. In a container the bus is the host's, and what NVML
/// does not list was not given to it.
pub(crate) fn unlisted_gpus(facts: &Facts) -> Vec<GpuSubject> {
    if in_container(facts) {
        return Vec::new();
    }
    let Some(devices) = facts.host.pci_devices.value() else {
        return Vec::new();
    };
    let listed: HashSet<&String> = facts
        .gpus
        .iter()
        .filter_map(|gpu| gpu.pci_address.value())
        .collect();
    devices
        .iter()
        .filter(|device| device.is_gpu())
        .filter(|device| !listed.contains(&device.address))
        .map(|device| GpuSubject {
            pci_address: Some(device.address.clone()),
            ..GpuSubject::default()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use crate::facts::{
        CudaFacts, CudaResult, Facts, LibraryFile, NvmlFacts, Reading, ServiceState,
    };
    use crate::findings::Verdict;
    use crate::judge;
    use crate::level::Level;
    use crate::test_machine::{healthy_node, unload_driver};

    /// Every check that objects, as `error gpu_count`, each once and in the order of their names.
    fn objections(facts: &Facts) -> Vec<String> {
        let profile = crate::parse_profile("{}", "test profile").expect("an empty profile");
        let mut objections: Vec<String> = judge(facts, &profile, Level::Extended)
            .into_iter()
            .filter(|it| !matches!(it.verdict, Verdict::Pass | Verdict::Skip))
            .map(|it| format!("{} {}", it.verdict, it.check))
            .collect();
        objections.sort();
        objections.dedup();
        objections
    }

    /// The GPUs are on the bus, and nothing of NVIDIA's driver is installed.
    fn node_without_driver() -> Facts {
        let mut facts = healthy_node();
        unload_driver(&mut facts);
        if let Reading::Value(devices) = &mut facts.host.pci_devices {
            for device in devices {
                device.driver = None;
            }
        }
        for name in ["nvidia-persistenced", "nvidia-fabricmanager"] {
            let state = Reading::Value(ServiceState::default());
            facts.host.services.insert(name.to_owned(), state);
        }
        facts.host.device_nodes = Reading::Value(Vec::new());
        facts.host.cuda_toolkits = Reading::Value(Vec::new());
        facts.host.libcuda_files = Reading::Value(Vec::new());
        facts.host.libnvidia_ml_files = Reading::Value(Vec::new());
        facts.host.gsp_firmware_versions = Reading::Value(Vec::new());
        no_nvml(
            &mut facts,
            "libnvidia-ml.so.1: cannot open shared object file",
        );
        no_cuda(&mut facts);
        facts.cuda.library =
            Reading::NotRead("libcuda.so.1: cannot open shared object file".to_owned());
        facts
    }

    fn no_nvml(facts: &mut Facts, reason: &str) {
        facts.nvml = NvmlFacts {
            initialized: Reading::NotRead(reason.to_owned()),
            ..NvmlFacts::default()
        };
        facts.gpus.clear();
    }

    fn no_cuda(facts: &mut Facts) {
        facts.cuda = CudaFacts::default();
        facts.load.cuda_kernel.clear();
    }

    fn cuda_answers(facts: &mut Facts, code: u32, name: &str) {
        let library = facts.cuda.library.clone();
        no_cuda(facts);
        facts.cuda.library = library;
        facts.cuda.init = Reading::Value(CudaResult {
            code,
            name: name.to_owned(),
        });
    }

    #[test]
    fn nothing_objects_to_a_healthy_node() {
        assert_eq!(objections(&healthy_node()), [""; 0]);
    }

    #[test]
    fn a_driver_that_is_not_installed_is_one_fault() {
        assert_eq!(
            objections(&node_without_driver()),
            ["fail kernel_module_loaded"]
        );
    }

    #[test]
    fn a_machine_without_gpus_fails_nothing() {
        let mut facts = node_without_driver();
        facts.host.ec2 = Reading::NotSupported;
        facts.host.pci_devices = Reading::Value(Vec::new());
        assert_eq!(
            objections(&facts),
            ["error gpu_count", "error kernel_module_loaded"]
        );
    }

    #[test]
    fn an_upgrade_without_reboot() {
        let mut facts = healthy_node();
        let library = |name: &str| {
            Reading::Value(vec![LibraryFile {
                path: format!("/usr/lib/{name}.so.1"),
                resolved: format!("/usr/lib/{name}.so.580.200.01"),
                version: Some("580.200.01".to_owned()),
            }])
        };
        facts.host.libcuda_files = library("libcuda");
        facts.host.libnvidia_ml_files = library("libnvidia-ml");
        no_nvml(&mut facts, "driver/library version mismatch");
        cuda_answers(&mut facts, 803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH");
        assert_eq!(
            objections(&facts),
            [
                "error nvml_library",
                "fail cuda_driver_library",
                "fail driver_components_match"
            ]
        );
    }

    #[test]
    fn a_fabric_manager_that_does_not_run() {
        let mut facts = healthy_node();
        let state = ServiceState {
            installed: true,
            enabled: true,
            active: false,
        };
        let name = "nvidia-fabricmanager".to_owned();
        facts.host.services.insert(name, Reading::Value(state));
        cuda_answers(&mut facts, 802, "CUDA_ERROR_SYSTEM_NOT_READY");
        assert_eq!(
            objections(&facts),
            ["fail cuda_driver_library", "fail fabric_manager"]
        );
    }

    #[test]
    fn a_container_with_one_of_eight_gpus() {
        let mut facts = healthy_node();
        facts.host.in_container = Reading::Value(true);
        facts.gpus.truncate(1);
        facts.nvml.gpu_count = Reading::Value(1);
        if let Reading::Value(devices) = &mut facts.cuda.devices {
            devices.truncate(1);
        }
        if let Reading::Value(nodes) = &mut facts.host.device_nodes {
            nodes.retain(|node| !(1..8).any(|minor| node.path == format!("/dev/nvidia{minor}")));
        }
        for state in facts.host.services.values_mut() {
            *state = Reading::Value(ServiceState::default());
        }
        assert_eq!(objections(&facts), [""; 0]);
    }

    /// What a probe leaves of a GPU that is lost: its name tag, and no result of a load.
    fn lose(facts: &mut Facts, index: usize) {
        let gpu = &facts.gpus[index];
        let (uuid, pci_address) = (gpu.uuid.clone(), gpu.pci_address.clone());
        if let Reading::Value(devices) = &mut facts.cuda.devices {
            devices.retain(|device| Some(&device.uuid) != uuid.value());
        }
        if let Some(uuid) = uuid.value() {
            facts.load.cuda_kernel.remove(uuid);
        }
        facts.gpus[index] = crate::facts::GpuFacts {
            uuid,
            pci_address,
            lost: Some("nvmlDeviceGetName returned NVML_ERROR_GPU_IS_LOST".to_owned()),
            ..crate::facts::GpuFacts::default()
        };
    }

    #[test]
    fn a_lost_gpu_is_no_error_of_other_checks() {
        let mut facts = healthy_node();
        lose(&mut facts, 3);
        assert_eq!(objections(&facts), ["fail gpu_reachable"]);
        // Nothing but NVML's counter is left of it.
        facts.gpus[3].uuid = Reading::NotRead("GPU is lost".to_owned());
        assert_eq!(objections(&facts), ["fail gpu_reachable"]);
    }

    #[test]
    fn a_gpu_that_nvml_does_not_list() {
        let mut facts = healthy_node();
        let lost = facts.gpus.remove(3);
        if let Reading::Value(devices) = &mut facts.cuda.devices {
            devices.retain(|device| Some(&device.uuid) != lost.uuid.value());
        }
        assert_eq!(objections(&facts), ["fail gpu_count"]);
    }
}
