//! The PCI address and the PCIe link.

use super::call::{
    Answer, Call, Device, Failure, Handle, INVALID_ARGUMENT, NOT_SUPPORTED, Out, characters, nvml,
    version_of,
};
use crate::gpu::Gpu;
use nvml_wrapper_sys::bindings as sys;
use std::ffi::{c_char, c_uint};

/// NVIDIA's PCI vendor id.
const VENDOR: u32 = 0x10de;

/// The PCI identity of a GPU, in NVML's struct.
pub(super) fn pci_info(gpu: &Gpu) -> Result<sys::nvmlPciInfo_t, Failure> {
    let [domain, bus, device, _] = gpu.pci_parts().ok_or(NOT_SUPPORTED)?;
    Ok(sys::nvmlPciInfo_t {
        // The old form has room for a domain of four digits only.
        busIdLegacy: characters(&format!("{domain:04X}:{bus:02X}:{device:02X}.0")),
        domain,
        bus,
        device,
        pciDeviceId: u32::from(gpu.pci_device_id) << 16 | VENDOR,
        pciSubSystemId: u32::from(gpu.pci_subsystem_id) << 16 | VENDOR,
        busId: characters(&format!("{domain:08X}:{bus:02X}:{device:02X}.0")),
    })
}

fn set_pci_info(call: &Call, device: Handle, out: Out<sys::nvmlPciInfo_t>) -> Answer {
    out.set(pci_info(call.device(device)?.gpu)?)
}

/// What `nvmlDeviceGetPciInfo` filled before the longer address was added.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct PciInfoV1 {
    bus_id: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
}

fn current_generation(call: &Call, device: Device<'_>) -> u32 {
    let load = call.readings(device).link_load;
    device.gpu.pcie.current_generation(load)
}

/// Megabits per second and lane of a PCIe generation.
fn lane_speed_mbps(generation: u32) -> Result<u32, Failure> {
    Ok(match generation {
        1 => 2_500,
        2 => 5_000,
        3 => 8_000,
        4 => 16_000,
        5 => 32_000,
        6 => 64_000,
        _ => return Err(NOT_SUPPORTED),
    })
}

nvml! {
    fn nvmlDeviceGetPciInfo(device: Handle, out: Out<PciInfoV1>) |call| {
        let info = pci_info(call.device(device)?.gpu)?;
        out.set(PciInfoV1 {
            bus_id: info.busIdLegacy,
            domain: info.domain,
            bus: info.bus,
            device: info.device,
            device_id: info.pciDeviceId,
        })
    }

    fn nvmlDeviceGetPciInfo_v2(device: Handle, out: Out<sys::nvmlPciInfo_t>) |call| { set_pci_info(call, device, out) }
    fn nvmlDeviceGetPciInfo_v3(device: Handle, out: Out<sys::nvmlPciInfo_t>) |call| { set_pci_info(call, device, out) }

    fn nvmlDeviceGetPciInfoExt(device: Handle, out: Out<sys::nvmlPciInfoExt_t>) |call| {
        let gpu = call.device(device)?.gpu;
        let info = pci_info(gpu)?;
        out.set_versioned(1, sys::nvmlPciInfoExt_t {
            version: version_of::<sys::nvmlPciInfoExt_t>(1),
            domain: info.domain,
            bus: info.bus,
            device: info.device,
            pciDeviceId: info.pciDeviceId,
            pciSubSystemId: info.pciSubSystemId,
            baseClass: 3,
            subClass: u32::from(gpu.pci_sub_class),
            busId: info.busId,
        })
    }

    fn nvmlDeviceGetMaxPcieLinkGeneration(device: Handle, out: Out<c_uint>) |call| {
        out.set(call.gpu(device)?.gpu.pcie.max_generation)
    }

    fn nvmlDeviceGetGpuMaxPcieLinkGeneration(device: Handle, out: Out<c_uint>) |call| {
        let pcie = &call.gpu(device)?.gpu.pcie;
        out.set(pcie.device_max_generation.unwrap_or(pcie.max_generation))
    }

    fn nvmlDeviceGetMaxPcieLinkWidth(device: Handle, out: Out<c_uint>) |call| {
        out.set(call.gpu(device)?.gpu.pcie.max_width)
    }

    fn nvmlDeviceGetCurrPcieLinkGeneration(device: Handle, out: Out<c_uint>) |call| {
        out.set(current_generation(call, call.gpu(device)?))
    }

    fn nvmlDeviceGetCurrPcieLinkWidth(device: Handle, out: Out<c_uint>) |call| {
        let device = call.gpu(device)?;
        out.set(device.gpu.pcie.current_width(call.readings(device).link_load))
    }

    fn nvmlDeviceGetPcieThroughput(device: Handle, counter: c_uint, out: Out<c_uint>) |call| {
        let pcie = &call.gpu(device)?.gpu.pcie;
        out.set(match counter {
            sys::nvmlPcieUtilCounter_enum_NVML_PCIE_UTIL_TX_BYTES => pcie.tx_kb_per_s,
            sys::nvmlPcieUtilCounter_enum_NVML_PCIE_UTIL_RX_BYTES => pcie.rx_kb_per_s,
            _ => return Err(INVALID_ARGUMENT),
        })
    }

    fn nvmlDeviceGetPcieReplayCounter(device: Handle, out: Out<c_uint>) |call| {
        out.set(call.gpu(device)?.gpu.pcie.replays)
    }

    fn nvmlDeviceGetPcieLinkMaxSpeed(device: Handle, out: Out<c_uint>) |call| {
        // NVML_PCIE_LINK_MAX_SPEED_* count the generations.
        out.set(call.gpu(device)?.gpu.pcie.max_generation)
    }

    fn nvmlDeviceGetPcieSpeed(device: Handle, out: Out<c_uint>) |call| {
        out.set(lane_speed_mbps(current_generation(call, call.gpu(device)?))?)
    }

    fn nvmlDeviceGetBusType(device: Handle, out: Out<c_uint>) |call| {
        call.gpu(device)?;
        out.set(sys::NVML_BUS_TYPE_PCIE)
    }
}
