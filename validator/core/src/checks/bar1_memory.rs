//! The host can map all of the GPU's memory (BAR1).
//!
//! ## Why
//! Peers, network adapters (`GPUDirect` RDMA) and storage reach a GPU's memory through its largest
//! PCIe region. Where firmware gave it a small one (resizable BAR off, too little address space
//! above 4 GiB), peer mappings are refused and transfers are staged through the host.
//!
//! ## How it is judged
//! The largest memory region of the GPU's PCIe function, which is NVML's BAR1: `fail` when another
//! GPU of the same PCI device id in this machine has a larger one. Data center GPUs from Hopper on
//! map their whole memory: a region that is smaller than the memory of the model is a `warn`. Other
//! GPUs are compared with each other only: a T4 has 256 MiB by design.
//!
//! Skipped where `/sys` does not show the region, and on virtual GPUs.
//!
//! ## What to do
//! Enable "Above 4G decoding" and resizable BAR in the system's firmware and update it; in a
//! virtual machine give the guest enough 64-bit MMIO space.
//!
//! ## Source
//! NVIDIA, `GPUDirect` RDMA, <https://docs.nvidia.com/cuda/gpudirect-rdma/>; `nvidia-smi -q` states
//! 256 GiB on an H200 with 141 GiB of memory.

use std::collections::HashMap;

use crate::check::{Check, Judge, JudgeGpu};
use crate::expect;
use crate::facts::{Facts, GpuFacts, PciDevice};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;
use crate::siblings::pci_devices_by_address;

pub(crate) const CHECK: Check = Check {
    id: "bar1_memory",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpuAmongAll(among_all),
    documentation_url: "https://docs.nvidia.com/cuda/gpudirect-rdma/",
};

/// Hopper, from which on data center GPUs map their whole memory: an A10 of 24 GiB maps 32 GiB, a
/// T4 of 16 GiB maps 256 MiB.
const FIRST_MAJOR_THAT_MAPS_ALL: u32 = 9;
const BYTES_PER_MIB: u64 = 1 << 20;

const REMEDY: &str = "enable Above 4G decoding and resizable BAR in the system's firmware; give a virtual machine enough 64-bit \
                      MMIO space";

/// What is known of all devices of the PCI bus together.
struct Bus<'f> {
    was_read: bool,
    devices: HashMap<&'f str, &'f PciDevice>,
    /// The largest region of the devices with an id.
    largest_bytes: HashMap<u16, u64>,
}

fn among_all<'f>(facts: &'f Facts, profile: &'f Profile) -> JudgeGpu<'f> {
    let mut largest_bytes: HashMap<u16, u64> = HashMap::new();
    for device in facts.host.pci_devices.value().into_iter().flatten() {
        if let Some(bytes) = device.largest_region_bytes {
            let largest = largest_bytes.entry(device.device_id).or_default();
            *largest = bytes.max(*largest);
        }
    }
    let bus = Bus {
        was_read: facts.host.pci_devices.value().is_some(),
        devices: pci_devices_by_address(facts),
        largest_bytes,
    };
    Box::new(move |gpu| judge(gpu, &bus, profile))
}

fn judge(gpu: &GpuFacts, bus: &Bus<'_>, profile: &Profile) -> Judgement {
    if gpu
        .virtualization_mode
        .value()
        .is_some_and(|it| it == "vgpu")
    {
        return Ok(Outcome::skip(
            "a virtual GPU has the regions that its hypervisor shows",
        ));
    }
    if !bus.was_read {
        let reason = "the PCI bus was not read";
        return Err(queries::reported_by("gpu_count", reason, profile));
    }
    let address = gpu.pci_address.value().map(String::as_str);
    let own = address.and_then(|it| bus.devices.get(it));
    let Some((device, bytes)) = own.and_then(|it| Some((it, it.largest_region_bytes?))) else {
        return Ok(Outcome::skip("/sys does not show the regions of this GPU"));
    };
    let largest = bus.largest_bytes.get(&device.device_id);
    let largest = largest.copied().unwrap_or(bytes);
    let observed = mebibytes(bytes);
    if bytes < largest {
        return Ok(Outcome::fail(format!(
            "BAR1 is {observed}, that of another GPU of this model here {}",
            mebibytes(largest)
        ))
        .expected(mebibytes(largest))
        .observed(observed)
        .remedy(REMEDY));
    }
    let memory_mib = expect::gpu_model(gpu)
        .filter(|model| model.data_center)
        .filter(|model| model.compute_capability.major >= FIRST_MAJOR_THAT_MAPS_ALL)
        .and_then(|model| model.memory_mib);
    if let Some(memory_mib) = memory_mib.filter(|it| bytes / BYTES_PER_MIB < *it) {
        return Ok(Outcome::warn(format!(
            "BAR1 is {observed}, less than the {memory_mib} MiB of memory that peers map through it"
        ))
        .expected(format!("at least {memory_mib} MiB"))
        .observed(observed)
        .remedy(REMEDY));
    }
    Ok(Outcome::pass(format!("BAR1 is {observed}")))
}

fn mebibytes(bytes: u64) -> String {
    format!("{} MiB", bytes / BYTES_PER_MIB)
}

#[cfg(test)]
mod tests {
    use crate::facts::{Facts, Reading};
    use crate::findings::Verdict;
    use crate::test_machine::{healthy_node, judge_check};

    const GIB: u64 = 1 << 30;

    fn node(regions: &[Option<u64>]) -> Facts {
        let mut facts = healthy_node();
        if let Reading::Value(devices) = &mut facts.host.pci_devices {
            for (device, bytes) in devices.iter_mut().zip(regions) {
                device.largest_region_bytes = *bytes;
            }
        }
        facts
    }

    fn verdict(regions: &[Option<u64>]) -> Verdict {
        let findings = judge_check(&super::CHECK, &node(regions), "{}");
        findings[0].verdict
    }

    #[test]
    fn a_small_region_is_seen_by_the_model_and_by_the_neighbours() {
        let whole = Some(256 * GIB);
        assert_eq!(verdict(&[whole, whole]), Verdict::Pass);
        assert_eq!(verdict(&[Some(GIB / 4), whole]), Verdict::Fail);
        assert_eq!(verdict(&[Some(GIB / 4); 8]), Verdict::Warn);
        assert_eq!(verdict(&[None; 8]), Verdict::Skip);
    }
}
