//! What is expected of this machine, and who says so: the profile first, then what the EC2 instance type and the GPU
//! model imply.
//!
//! `None` always means that nobody states the value: the check then judges the machine's own consistency or skips. A
//! reference value is handed out only where it holds on every healthy machine; what boards, clouds and virtual machines
//! rightly change is left to the profile.

use crate::facts::{Facts, GpuFacts};
use crate::profile::{Profile, ServiceRequirement};
use crate::reference::{self, Ec2InstanceRow, GpuModel, KernelModuleSupport};

/// A value that a machine must have, and who says so.
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

/// GPUs of a whole HGX or DGX board, on which every NVLink of every GPU is connected.
const GPUS_OF_A_WHOLE_BOARD: usize = 8;

/// The row of the instance type, on EC2.
pub(crate) fn ec2_instance(facts: &Facts) -> Option<&'static Ec2InstanceRow> {
    reference::ec2_instance(&facts.host.ec2.value()?.instance_type)
}

/// The reference model of this GPU. A vGPU shows its card's PCI id but has none of its numbers, so it has no model.
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

/// What the profile says, else what the EC2 instance type says, else what the GPU model says.
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

/// The model that every GPU must be: a product name or the name of a reference model. Compare with [`is_model`].
pub(crate) fn gpu_model_name(facts: &Facts, profile: &Profile) -> Option<Expected<String>> {
    expected(
        profile.gpus.model.clone(),
        ec2_instance(facts).and_then(|row| Some((row, row.gpu_model.clone()?))),
        None,
    )
}

/// Whether this GPU is what `wanted` names: its own product name, or its reference model by any of that model's names.
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

/// The least PCIe generation that GPU and slot must reach together (`PcieLink::max_generation`). The model's part is the
/// floor of NVIDIA's own diagnostics, not what the card could do in a better slot.
pub(crate) fn pcie_generation(gpu: &GpuFacts, profile: &Profile) -> Option<Expected<u32>> {
    let model = gpu_model(gpu);
    expected(
        profile.gpus.pcie.generation,
        None,
        model.and_then(|it| Some((it, it.pcie_floor?.generation?))),
    )
}

/// The least current PCIe width in lanes. From the profile it is meant exactly; the model's part is a floor.
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
/// The model's number holds only where a whole board of eight is in the machine: bridges and partitions of a board
/// rightly connect fewer (Azure's `NCv5` has 12 of 18 by design, a single passed-through GPU of an HGX board none).
pub(crate) fn nvlinks(gpu: &GpuFacts, facts: &Facts, profile: &Profile) -> Option<Expected<u32>> {
    let model = gpu_model(gpu)
        .filter(|it| it.whole_board_nvlinks && facts.gpus.len() == GPUS_OF_A_WHOLE_BOARD);
    expected(
        profile.gpus.nvlinks,
        ec2_instance(facts).and_then(|row| Some((row, row.nvlinks?))),
        model.and_then(|it| Some((it, it.nvlinks?))),
    )
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

/// Whether ECC must be on: on data center GPUs that have it, unless the profile says otherwise.
pub(crate) fn ecc(gpu: &GpuFacts, profile: &Profile) -> Option<Expected<bool>> {
    let model = gpu_model(gpu).filter(|it| it.ecc && it.data_center);
    expected(profile.gpus.ecc, None, model.map(|it| (it, true)))
}

/// Which flavour of the kernel module the machine's GPUs leave possible, by NVML and the PCI bus together.
///
/// One GPU that needs the proprietary module decides for the machine, as only that module drives both old and new GPUs.
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
/// GPUs that register with a fabric are no evidence: on a virtual machine with a shared NVSwitch the host runs fabric
/// manager, and a single passed-through GPU has no fabric at all.
pub(crate) fn fabric_manager(facts: &Facts, profile: &Profile) -> Option<Expected<bool>> {
    let wanted = match profile.services.get(FABRIC_MANAGER_SERVICE) {
        Some(ServiceRequirement::Active) => Some(true),
        Some(ServiceRequirement::Inactive) => Some(false),
        Some(ServiceRequirement::Enabled | ServiceRequirement::Installed) | None => None,
    };
    let instance = ec2_instance(facts).map(|row| (row, row.fabric_manager));
    expected(wanted, instance, None).or_else(|| {
        let devices = facts.host.pci_devices.value()?;
        let has_switches = devices.iter().any(crate::facts::PciDevice::is_nvswitch);
        Some(Expected {
            value: has_switches,
            source: if has_switches {
                "NVSwitches on the PCI bus".to_owned()
            } else {
                "no NVSwitch on the PCI bus".to_owned()
            },
        })
    })
}
