//! The expectations of this machine, each with its source: the profile first, then what the EC2
//! instance type and the GPU model imply.
//!
//! `None` always means that no source has the value: the check then judges the machine's own
//! consistency or skips. A reference value is handed out only where it holds on every healthy
//! machine; what boards, clouds and virtual machines rightly change is left to the profile.

use crate::facts::{Facts, GpuFacts, PciDevice};
use crate::kernel_log_events::KernelEvent;
use crate::profile::{Profile, ServiceRequirement};
use crate::reference::{self, Ec2InstanceRow, GpuModel, KernelModuleSupport};
use crate::siblings::NameCounts;

/// A value that a machine must have, and its source.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Expected<T> {
    pub(crate) value: T,
    /// `the profile`, `EC2 instance type p5.48xlarge`, `GPU model H200 SXM`.
    pub(crate) source: String,
}

impl<T> Expected<T> {
    fn by_profile(value: T) -> Self {
        Self {
            value,
            source: "the profile".to_owned(),
        }
    }

    fn by_instance(row: &Ec2InstanceRow, value: T) -> Self {
        Self {
            value,
            source: format!("EC2 instance type {}", row.instance_type),
        }
    }

    fn by_model(model: &GpuModel, value: T) -> Self {
        Self {
            value,
            source: format!("GPU model {}", model.name),
        }
    }
}

/// The systemd service that sets NVSwitches up.
pub(crate) const FABRIC_MANAGER_SERVICE: &str = "nvidia-fabricmanager";

/// HGX boards of Blackwell GPUs show no function of their NVSwitches, so that this is no evidence
/// about the fabric itself.
const NO_NVSWITCH: &str = "no NVSwitch is visible; fabric_state judges the result";

/// GPUs of a whole HGX or DGX board, on which every NVLink of every GPU is connected.
const GPUS_OF_A_WHOLE_BOARD: usize = 8;

/// The row of the instance type, on EC2.
pub(crate) fn ec2_instance(facts: &Facts) -> Option<&'static Ec2InstanceRow> {
    reference::ec2_instance(&facts.host.ec2.value()?.instance_type)
}

/// The reference model of this GPU. A vGPU shows its card's PCI id but has none of its numbers, so
/// it has no model.
pub(crate) fn gpu_model(gpu: &GpuFacts) -> Option<&'static GpuModel> {
    if gpu
        .virtualization_mode
        .value()
        .is_some_and(|it| it == "vgpu")
    {
        return None;
    }
    reference::gpu_model(
        gpu.name.value().map(String::as_str),
        gpu.pci_device_id.value().copied(),
    )
}

/// The profile's value, else that of the EC2 instance type, else that of the GPU model.
pub(crate) fn expected<T>(
    profile: Option<T>,
    instance: Option<(&Ec2InstanceRow, T)>,
    model: Option<(&GpuModel, T)>,
) -> Option<Expected<T>> {
    profile
        .map(Expected::by_profile)
        .or_else(|| instance.map(|(row, value)| Expected::by_instance(row, value)))
        .or_else(|| model.map(|(row, value)| Expected::by_model(row, value)))
}

/// How many GPUs the machine must have; `None` leaves only the machine's own consistency to judge.
pub(crate) fn gpu_count(facts: &Facts, profile: &Profile) -> Option<Expected<u32>> {
    expected(
        profile.gpus.count,
        ec2_instance(facts).map(|row| (row, row.gpu_count)),
        None,
    )
}

/// GPUs and NVSwitches that belong together on a board, or in a virtual machine that has a part of
/// one.
// Source: NVIDIA Fabric Manager User Guide, "Full Passthrough Virtualization Model", and the HGX
// baseboards: eight Volta or Ampere GPUs with six NVSwitches, eight Hopper GPUs with four.
const VOLTA_AND_AMPERE_BOARDS: [(usize, usize); 4] = [(16, 12), (8, 6), (4, 3), (2, 1)];
const HOPPER_BOARDS: [(usize, usize); 1] = [(8, 4)];

/// GPUs of NVIDIA's own systems, by the beginning of their DMI product names without spaces and
/// hyphens.
// Source: NVIDIA DGX user guides; longer names first.
const SYSTEMS: [(&str, usize); 8] = [
    ("DGXSTATIONA100", 4),
    ("DGXSTATION", 4),
    ("DGXA100", 8),
    ("DGXH100", 8),
    ("DGXH200", 8),
    ("DGXB200", 8),
    ("DGXB300", 8),
    ("DGX2", 16),
];

/// What is wrong with the number of GPUs or NVSwitches by what the machine itself shows, where
/// neither profile nor instance type states a number; `None` where nothing is.
pub(crate) fn incomplete_board(facts: &Facts) -> Option<String> {
    let devices = facts.host.pci_devices.value()?;
    let gpus: Vec<&PciDevice> = devices.iter().filter(|it| it.is_gpu()).collect();
    let switches = devices.iter().filter(|it| it.is_nvswitch()).count();
    if let Some((name, count)) = system_of(facts)
        && gpus.len() < count
    {
        return Some(format!(
            "{} on the PCI bus, a {name} has {count}",
            crate::words::counted(gpus.len(), "GPU")
        ));
    }
    if let Some(address) = gone_since_boot(facts, devices) {
        return Some(format!(
            "the kernel found a GPU at {address} when it booted, which the PCI bus does not have any more"
        ));
    }
    if let Some(trouble) = incomplete_tray(facts, gpus.len()) {
        return Some(trouble);
    }
    let models = models_of(facts);
    let on_a_board = |it: &&GpuModel| it.whole_board_nvlinks || is_of_a_tray(it);
    let is_one_board_model = !models.is_empty() && models.iter().all(on_a_board);
    let major = models.first().map(|it| it.compute_capability.major)?;
    let boards: &[(usize, usize)] = match major {
        // Blackwell's switches are reached through network adapters; how many show on the bus is no
        // evidence.
        10.. => &[],
        9 => &HOPPER_BOARDS,
        _ => &VOLTA_AND_AMPERE_BOARDS,
    };
    if !is_one_board_model || boards.contains(&(gpus.len(), switches)) {
        return None;
    }
    if switches > 0 && !boards.is_empty() {
        let nearest = boards.iter().min_by_key(|(of_gpus, of_switches)| {
            of_gpus.abs_diff(gpus.len()) + of_switches.abs_diff(switches)
        })?;
        return Some(format!(
            "{} and {} on the PCI bus, a board has {} and {}",
            crate::words::counted(gpus.len(), "GPU"),
            counted_switches(switches),
            nearest.0,
            nearest.1
        ));
    }
    let is_bare_metal = !facts.gpus.is_empty()
        && facts.gpus.iter().all(|gpu| {
            gpu.virtualization_mode
                .value()
                .is_some_and(|it| it == "none")
        });
    let is_of_a_rack = models.iter().any(|it| is_of_a_tray(it));
    // Baseboards have four, eight or sixteen of them, those of Blackwell eight; one and two are
    // parts of a board in a virtual machine.
    let (is_whole, of) = if major >= BLACKWELL && !is_of_a_rack {
        (gpus.len() == GPUS_OF_A_WHOLE_BOARD, "eight")
    } else {
        (matches!(gpus.len(), 1 | 2 | 4 | 8 | 16), "four or eight")
    };
    (is_bare_metal && !is_whole).then(|| {
        format!(
            "{} of a model that is built on boards of {of}",
            crate::words::counted(gpus.len(), "GPU")
        )
    })
}

/// Blackwell's major compute capability: its SXM boards are built with eight GPUs alone.
// Source: NVIDIA HGX B200 and B300 data sheets.
const BLACKWELL: u32 = 10;
/// GPUs of a compute tray of a rack.
// Source: NVIDIA GB200 NVL72 and GB300 NVL72 data sheets, 18 trays with 72 GPUs.
const GPUS_OF_A_RACKS_TRAY: usize = 4;

/// A tray whose fabric spans the nodes of a rack, which a board of two Superchips by itself has
/// not.
fn incomplete_tray(facts: &Facts, gpus: usize) -> Option<String> {
    let spans_nodes = |gpu: &GpuFacts| is_rack_scale(gpu) && is_in_a_cluster(gpu);
    let is_incomplete = gpus < GPUS_OF_A_RACKS_TRAY && facts.gpus.iter().any(spans_nodes);
    is_incomplete.then(|| {
        format!(
            "{} of a fabric that spans nodes, a tray of such a rack has {GPUS_OF_A_RACKS_TRAY}",
            crate::words::counted(gpus, "GPU")
        )
    })
}

/// The GPU is registered with a fabric whose cluster has a UUID.
pub(crate) fn is_in_a_cluster(gpu: &GpuFacts) -> bool {
    let is_zero = |uuid: &str| uuid.bytes().all(|it| matches!(it, b'0' | b'-'));
    gpu.fabric.value().is_some_and(|fabric| {
        fabric.state == "completed"
            && fabric
                .cluster_uuid
                .as_deref()
                .is_some_and(|uuid| !is_zero(uuid))
    })
}

fn counted_switches(count: usize) -> String {
    format!("{count} NVSwitch{}", if count == 1 { "" } else { "es" })
}

fn system_of(facts: &Facts) -> Option<(&String, usize)> {
    let name = facts.host.product_name.value()?;
    let bare: String = name
        .to_ascii_uppercase()
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .collect();
    let bare = bare.trim_start_matches("NVIDIA");
    let system = SYSTEMS
        .iter()
        .find(|(prefix, _)| bare.starts_with(prefix))?;
    Some((name, system.1))
}

/// The first GPU that the kernel enumerated before the driver was loaded, and that is not on the
/// bus now.
///
/// Virtual functions come and go, but only once the driver is there.
fn gone_since_boot(facts: &Facts, devices: &[PciDevice]) -> Option<String> {
    let log = facts.host.kernel_log.value()?;
    let events = crate::kernel_log_events::events(&log.records);
    let mut first_load = None;
    for event in &events {
        if matches!(event.event, KernelEvent::DriverLoaded) {
            first_load = event.at_s;
            break;
        }
    }
    events
        .iter()
        .filter(|it| it.at_s.is_some() && (first_load.is_none() || it.at_s < first_load))
        .find_map(|it| match &it.event {
            KernelEvent::GpuEnumerated { pci_address }
                if pci_address.ends_with(".0")
                    && !devices.iter().any(|device| device.address == *pci_address) =>
            {
                Some(pci_address.clone())
            }
            _ => None,
        })
}

/// The model that every GPU must be: a product name or the name of a reference model. Compare with
/// [`is_model`].
pub(crate) fn gpu_model_name(facts: &Facts, profile: &Profile) -> Option<Expected<String>> {
    expected(
        profile.gpus.model.clone(),
        ec2_instance(facts).and_then(|row| Some((row, row.gpu_model.clone()?))),
        None,
    )
}

/// Whether this GPU is what `wanted` names: its own product name, or its reference model by any of
/// that model's names.
pub(crate) fn is_model(gpu: &GpuFacts, wanted: &str) -> bool {
    gpu.name.value().is_some_and(|it| it == wanted)
        || gpu_model(gpu).is_some_and(|model| model.name == wanted || model.is_named(wanted))
}

/// The least total memory of this GPU, in MiB.
pub(crate) fn memory_minimum_mib(gpu: &GpuFacts, profile: &Profile) -> Option<Expected<u64>> {
    let model = gpu_model(gpu);
    expected(
        profile.gpus.memory_minimum_mib,
        None,
        model.and_then(|it| Some((it, it.memory_minimum_mib()?))),
    )
}

/// The least PCIe generation that GPU and slot must reach together (`PcieLink::max_generation`).
/// The model's part is the floor of NVIDIA's own diagnostics, not what the card could do in a
/// better slot.
pub(crate) fn pcie_generation(gpu: &GpuFacts, profile: &Profile) -> Option<Expected<u32>> {
    let model = gpu_model(gpu);
    expected(
        profile.gpus.pcie.generation,
        None,
        model.and_then(|it| Some((it, it.pcie_floor?.generation?))),
    )
}

/// The least current PCIe width in lanes. From the profile it is meant exactly; the model's part is
/// a floor.
pub(crate) fn pcie_width(gpu: &GpuFacts, profile: &Profile) -> Option<Expected<u32>> {
    let model = gpu_model(gpu);
    expected(
        profile.gpus.pcie.width,
        None,
        model.and_then(|it| Some((it, it.pcie_floor?.width))),
    )
}

/// How many NVLinks of this GPU must be active.
///
/// The model's number holds only where a whole board of eight is in the machine: bridges and
/// partitions of a board rightly connect fewer (Azure's `NCv5` has 12 of 18 by design, a single
/// passed-through GPU of an HGX board none).
pub(crate) fn nvlinks(
    gpu: &GpuFacts,
    counts: &NameCounts<'_>,
    facts: &Facts,
    profile: &Profile,
) -> Option<Expected<u32>> {
    let model =
        gpu_model(gpu).filter(|it| it.whole_board_nvlinks && is_on_a_whole_board(gpu, counts));
    expected(
        profile.gpus.nvlinks,
        ec2_instance(facts).and_then(|row| Some((row, row.nvlinks?))),
        model.and_then(|it| Some((it, it.nvlinks?))),
    )
}

/// A whole board of this GPU's model is in the machine; GPUs of other models are none of its
/// business.
pub(crate) fn is_on_a_whole_board(gpu: &GpuFacts, counts: &NameCounts<'_>) -> bool {
    counts.of_this_model(gpu) == GPUS_OF_A_WHOLE_BOARD
}

/// The power limit that must be in force, in milliwatts: the profile's, else the GPU's own default.
///
/// The reference table's number is not used: vendors ship the same model with other defaults.
pub(crate) fn power_limit_mw(gpu: &GpuFacts, profile: &Profile) -> Option<Expected<u32>> {
    let own_default = || {
        Some(Expected {
            value: gpu.power.value()?.default_limit_mw?,
            source: "the GPU's own default".to_owned(),
        })
    };
    profile
        .gpus
        .power_limit_w
        .map(|watts| Expected::by_profile(watts.saturating_mul(1000)))
        .or_else(own_default)
}

/// Whether ECC must be on: on data center GPUs that have it, unless the profile states otherwise.
pub(crate) fn ecc(gpu: &GpuFacts, profile: &Profile) -> Option<Expected<bool>> {
    let model = gpu_model(gpu).filter(|it| it.ecc && it.data_center);
    expected(profile.gpus.ecc, None, model.map(|it| (it, true)))
}

/// Which flavour of the kernel module the machine's GPUs leave possible, by NVML and the PCI bus
/// together.
///
/// One GPU that needs the proprietary module decides for the machine, as only that module drives
/// both old and new GPUs.
pub(crate) fn kernel_module(
    facts: &Facts,
    profile: &Profile,
) -> Option<Expected<KernelModuleSupport>> {
    if let Some(flavor) = profile.driver.kernel_module {
        return Some(Expected::by_profile(KernelModuleSupport::only(flavor)));
    }
    let models = models_of(facts);
    let of = |support| models.iter().find(|it| it.kernel_module == support);
    of(KernelModuleSupport::ProprietaryOnly)
        .or_else(|| of(KernelModuleSupport::OpenOnly))
        .or_else(|| of(KernelModuleSupport::Either))
        .map(|model| Expected::by_model(model, model.kernel_module))
}

/// A GPU whose fabric spans the nodes of a rack.
// Source: NVIDIA GB200 NVL72, Multi-Node NVLink; models by their names in the reference table.
pub(crate) fn is_rack_scale(gpu: &GpuFacts) -> bool {
    model_has(gpu, is_of_a_tray)
}

/// A compute tray of a rack has four GPUs, or two.
fn is_of_a_tray(model: &GpuModel) -> bool {
    matches!(model.name.as_str(), "GB200" | "GB300")
}

/// The models of all GPUs that NVML or the PCI bus shows, each once.
pub(crate) fn models_of(facts: &Facts) -> Vec<&'static GpuModel> {
    let on_the_bus = facts
        .host
        .pci_devices
        .value()
        .into_iter()
        .flatten()
        .filter(|device| device.is_gpu())
        .filter_map(|device| reference::gpu_model(None, Some(device.device_id)));
    let mut models: Vec<&GpuModel> = facts.gpus.iter().filter_map(gpu_model).collect();
    models.extend(on_the_bus);
    models.sort_by_key(|it| &it.name);
    models.dedup_by_key(|it| &it.name);
    models
}

/// Whether fabric manager must run (`true`) or has nothing to do (`false`).
///
/// GPUs that register with a fabric are no evidence: on a virtual machine with a shared NVSwitch
/// the host runs fabric manager, and a single passed-through GPU has no fabric at all.
pub(crate) fn fabric_manager(facts: &Facts, profile: &Profile) -> Option<Expected<bool>> {
    let wanted = match profile.services.get(FABRIC_MANAGER_SERVICE) {
        Some(ServiceRequirement::Active) => Some(true),
        Some(ServiceRequirement::Inactive) => Some(false),
        Some(ServiceRequirement::Enabled | ServiceRequirement::Installed) | None => None,
    };
    let switches = facts
        .host
        .pci_devices
        .value()
        .map(|devices| devices.iter().any(PciDevice::is_nvswitch));
    let by_bus = |value, source: &str| Expected {
        value,
        source: source.to_owned(),
    };
    wanted
        .map(Expected::by_profile)
        .or_else(|| (switches == Some(true)).then(|| by_bus(true, "NVSwitches on the PCI bus")))
        .or_else(|| {
            let row = ec2_instance(facts)?;
            Some(Expected::by_instance(row, row.fabric_manager))
        })
        .or_else(|| switches.map(|_| by_bus(false, NO_NVSWITCH)))
}

/// The GPU's model is known to have something; `false` for unknown models and for virtual GPUs.
pub(crate) fn model_has(gpu: &GpuFacts, has: impl FnOnce(&GpuModel) -> bool) -> bool {
    gpu_model(gpu).is_some_and(has)
}

/// A card for workstations and desktops, by its name where the reference table does not know it.
pub(crate) fn is_consumer_card(gpu: &GpuFacts) -> bool {
    match gpu_model(gpu) {
        Some(model) => !model.data_center,
        None => gpu
            .name
            .value()
            .is_some_and(|it| it.contains("GeForce") || it.contains("TITAN")),
    }
}

/// The GPU's model may have something: it is known to, or the model is unknown.
pub(crate) fn model_may_have(gpu: &GpuFacts, has: impl FnOnce(&GpuModel) -> bool) -> bool {
    gpu_model(gpu).is_none_or(has)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{Ec2Instance, KernelModuleFlavor, Power, Reading};

    fn gpu(name: &str, device_id: u16) -> GpuFacts {
        GpuFacts {
            name: Reading::Value(name.to_owned()),
            pci_device_id: Reading::Value(device_id),
            ..GpuFacts::default()
        }
    }

    fn node(count: usize, gpu: &GpuFacts) -> Facts {
        Facts {
            gpus: vec![gpu.clone(); count],
            ..Facts::default()
        }
    }

    fn on_ec2(mut facts: Facts, instance_type: &str) -> Facts {
        facts.host.ec2 = Reading::Value(Ec2Instance {
            instance_type: instance_type.to_owned(),
            ..Ec2Instance::default()
        });
        facts
    }

    fn on_the_bus(facts: &mut Facts, devices: &[(u16, u32)]) {
        let devices = devices.iter().map(|(device_id, class)| PciDevice {
            device_id: *device_id,
            class: *class,
            ..PciDevice::default()
        });
        facts.host.pci_devices = Reading::Value(devices.collect());
    }

    fn profile(yaml: &str) -> Profile {
        crate::parse_profile(yaml, "test profile").expect("the test's profile is valid")
    }

    fn h200() -> GpuFacts {
        gpu("NVIDIA H200", 0x2335)
    }

    fn told<T>(expected: Option<Expected<T>>) -> Option<(T, String)> {
        expected.map(|it| (it.value, it.source))
    }

    #[test]
    fn the_profile_comes_before_the_instance_type() {
        let facts = on_ec2(node(8, &h200()), "p5en.48xlarge");
        let by_instance = || "EC2 instance type p5en.48xlarge".to_owned();
        let by_profile = || "the profile".to_owned();
        let none = Profile::default();
        assert_eq!(told(gpu_count(&facts, &none)), Some((8, by_instance())));
        assert_eq!(
            told(gpu_model_name(&facts, &none)),
            Some(("H200 SXM".to_owned(), by_instance()))
        );
        let mine = profile("gpus: {count: 4, model: NVIDIA H200, nvlinks: 12}");
        assert_eq!(told(gpu_count(&facts, &mine)), Some((4, by_profile())));
        assert_eq!(
            told(nvlinks(&h200(), &NameCounts::of(&facts), &facts, &mine)),
            Some((12, by_profile()))
        );
        assert_eq!(
            told(nvlinks(&h200(), &NameCounts::of(&facts), &facts, &none)),
            Some((18, by_instance()))
        );
        assert_eq!(gpu_count(&node(8, &h200()), &none), None);
        assert_eq!(
            gpu_count(&on_ec2(Facts::default(), "m5.large"), &none),
            None
        );
    }

    #[test]
    fn a_model_goes_by_all_of_its_names() {
        assert!(is_model(&h200(), "H200 SXM") && is_model(&h200(), "NVIDIA H200"));
        assert!(!is_model(&h200(), "H200 NVL") && !is_model(&h200(), ""));
        assert!(
            is_model(&gpu("A100-SXM4-40GB", 0x20b0), "A100 SXM 40GB"),
            "drivers before 470"
        );
        // A name that no table knows is compared as it is.
        assert!(is_model(&gpu("NVIDIA X1", 0xffff), "NVIDIA X1"));
    }

    #[test]
    fn nvlinks_of_the_model_hold_on_a_whole_board_only() {
        let none = Profile::default();
        let of = |count, gpu: &GpuFacts| {
            let facts = node(count, gpu);
            told(nvlinks(gpu, &NameCounts::of(&facts), &facts, &none))
        };
        assert_eq!(of(8, &h200()), Some((18, "GPU model H200 SXM".to_owned())));
        // One passed-through GPU of a board: its links lead to switches that the host keeps.
        assert_eq!(of(1, &h200()), None);
        // Azure's NCv5: bridges connect 12 of 18.
        assert_eq!(of(2, &gpu("NVIDIA H100 NVL", 0x2321)), None);
        assert_eq!(of(8, &gpu("NVIDIA H100 NVL", 0x2321)), None);
        assert_eq!(of(8, &gpu("NVIDIA L4", 0x27b8)), None);
    }

    #[test]
    fn a_vgpu_has_none_of_its_cards_numbers() {
        let mut vgpu = gpu("NVIDIA L4-6Q", 0x27b8);
        assert!(memory_minimum_mib(&vgpu, &Profile::default()).is_some());
        vgpu.virtualization_mode = Reading::Value("vgpu".to_owned());
        assert_eq!(memory_minimum_mib(&vgpu, &Profile::default()), None);
        assert_eq!(ecc(&vgpu, &Profile::default()), None);
    }

    #[test]
    fn memory_and_link_are_floors() {
        let none = Profile::default();
        let memory = memory_minimum_mib(&h200(), &none).map(|it| it.value);
        assert!(
            memory.is_some_and(|it| (135_000..143_771).contains(&it)),
            "{memory:?}"
        );
        // H200 on a machine whose slot is slower than the card is no fault by itself.
        assert_eq!(pcie_generation(&h200(), &none).map(|it| it.value), Some(3));
        assert_eq!(
            pcie_width(&gpu("NVIDIA L4", 0x27b8), &none).map(|it| it.value),
            Some(8)
        );
        assert_eq!(pcie_width(&gpu("NVIDIA X1", 0xffff), &none), None);
        let mine = profile("gpus: {pcie: {generation: 5, width: 16}, memory_minimum_mib: 1}");
        assert_eq!(pcie_generation(&h200(), &mine).map(|it| it.value), Some(5));
        assert_eq!(
            memory_minimum_mib(&h200(), &mine).map(|it| it.value),
            Some(1)
        );
    }

    #[test]
    fn the_power_limit_is_the_gpus_own_default() {
        let mut gpu = h200();
        assert_eq!(power_limit_mw(&gpu, &Profile::default()), None);
        gpu.power = Reading::Value(Power {
            limit_mw: 500_000,
            default_limit_mw: Some(700_000),
            ..Power::default()
        });
        let own = told(power_limit_mw(&gpu, &Profile::default()));
        assert_eq!(own, Some((700_000, "the GPU's own default".to_owned())));
        let mine = profile("gpus: {power_limit_w: 500}");
        assert_eq!(
            power_limit_mw(&gpu, &mine).map(|it| it.value),
            Some(500_000)
        );
    }

    #[test]
    fn ecc_is_expected_of_data_center_gpus() {
        let none = Profile::default();
        assert_eq!(ecc(&h200(), &none).map(|it| it.value), Some(true));
        assert_eq!(ecc(&gpu("NVIDIA GeForce RTX 4090", 0x2684), &none), None);
        assert_eq!(
            ecc(&h200(), &profile("gpus: {ecc: false}")).map(|it| it.value),
            Some(false)
        );
    }

    #[test]
    fn the_oldest_gpu_decides_on_the_kernel_module() {
        let none = Profile::default();
        let support = |facts: &Facts| kernel_module(facts, &none).map(|it| it.value);
        assert_eq!(
            support(&node(8, &h200())),
            Some(KernelModuleSupport::Either)
        );
        assert_eq!(
            support(&node(8, &gpu("NVIDIA B200", 0x2901))),
            Some(KernelModuleSupport::OpenOnly)
        );
        let mut mixed = node(1, &h200());
        mixed.gpus.push(gpu("Tesla V100-SXM2-16GB", 0x1db1));
        assert_eq!(support(&mixed), Some(KernelModuleSupport::ProprietaryOnly));
        assert_eq!(support(&Facts::default()), None);
        // Where no driver runs yet, the PCI bus is enough.
        let mut bare = Facts::default();
        on_the_bus(&mut bare, &[(0x1db1, 0x03_0200), (0x2901, 0x06_8000)]);
        assert_eq!(support(&bare), Some(KernelModuleSupport::ProprietaryOnly));
        let mine = profile("driver: {kernel_module: open}");
        let by_profile = kernel_module(&bare, &mine).expect("the profile says so");
        assert!(by_profile.value.supports(KernelModuleFlavor::Open));
        assert!(!by_profile.value.supports(KernelModuleFlavor::Proprietary));
    }

    #[test]
    fn fabric_manager_is_needed_where_switches_are() {
        let none = Profile::default();
        let needed = |facts: &Facts| told(fabric_manager(facts, &none));
        // Eight GPUs with a fabric, but the host keeps the switches: nothing to run here.
        let mut guest = node(8, &h200());
        on_the_bus(&mut guest, &[(0x2335, 0x03_0200)]);
        assert_eq!(needed(&guest), Some((false, NO_NVSWITCH.to_owned())));
        on_the_bus(&mut guest, &[(0x2335, 0x03_0200), (0x22a3, 0x06_8000)]);
        assert_eq!(
            needed(&guest),
            Some((true, "NVSwitches on the PCI bus".to_owned()))
        );
        // The switches of an instance may be hidden; its type has them.
        let hidden = on_ec2(node(8, &h200()), "p5en.48xlarge");
        assert_eq!(
            needed(&hidden),
            Some((true, "EC2 instance type p5en.48xlarge".to_owned()))
        );
        let single = on_ec2(node(1, &gpu("NVIDIA H100 80GB HBM3", 0x2330)), "p5.4xlarge");
        assert_eq!(needed(&single).map(|it| it.0), Some(false));
        // Nothing was read: no source states it.
        assert_eq!(needed(&node(8, &h200())), None);
        let mine = profile("services: {nvidia-fabricmanager: inactive}");
        assert_eq!(
            fabric_manager(&hidden, &mine).map(|it| it.value),
            Some(false)
        );
    }
}
