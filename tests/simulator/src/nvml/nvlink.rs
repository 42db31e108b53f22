//! NVLinks: state, version, what is at the other end, and error counters.

use super::call::{
    Answer, Call, Device, Failure, Handle, INVALID_ARGUMENT, NOT_SUPPORTED, Out, characters,
    enabled, nvml, version_of,
};
use crate::gpu::{Gpu, NvLinkErrors, NvLinkRemote};
use nvml_wrapper_sys::bindings as sys;
use std::ffi::c_uint;

/// `NVML_NVLINK_VERSION_*`: NVML counts 2.2 and 3.1 as versions of their own. `version` is NVIDIA's
/// name of the generation.
pub(super) fn version_number(version: u32) -> c_uint {
    match version {
        0 => sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_INVALID,
        1 => sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_1_0,
        2 => sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_2_0,
        3 => sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_3_0,
        4 => sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_4_0,
        _ => sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_5_0,
    }
}

/// From this version on (Blackwell) packets are counted by other fields, and not data CRC and ECC
/// by link.
const FIRST_VERSION_WITHOUT_DATA_COUNTERS: u32 = 5;

/// A link number that NVML knows, on a GPU that has it.
pub(super) fn check_link(gpu: &Gpu, link: c_uint) -> Answer {
    if link >= sys::NVML_NVLINK_MAX_LINKS {
        return Err(INVALID_ARGUMENT);
    }
    if link >= gpu.nvlink.count {
        Err(NOT_SUPPORTED)
    } else {
        Ok(())
    }
}

fn checked(call: &Call, device: Handle, link: c_uint) -> Result<Device<'_>, Failure> {
    let device = call.gpu(device)?;
    check_link(device.gpu, link)?;
    Ok(device)
}

pub(super) fn is_active(gpu: &Gpu, link: c_uint) -> bool {
    link < gpu.nvlink.count && !gpu.nvlink.down.contains(&link)
}

/// The counters of a link.
pub(super) fn errors(gpu: &Gpu, link: c_uint) -> NvLinkErrors {
    let mut errors = if gpu.nvlink.error_links.contains(&link) {
        gpu.nvlink.errors
    } else {
        NvLinkErrors::default()
    };
    errors.crc_data += background(gpu.nvlink.background.crc_data, link);
    errors.ecc_data += background(gpu.nvlink.background.ecc_data, link);
    errors
}

/// What a healthy link has counted, which is another number for each: between nothing and twice the
/// mean.
fn background(mean: u64, link: c_uint) -> u64 {
    const STEPS: u64 = 16;
    // 7 and 16 have no divisor in common, so the links take every step before one comes again.
    let step = (u64::from(link) * 7 + 9) % (STEPS + 1);
    mean * step * 2 / STEPS
}

/// The GPU at the other end of a direct link: the others in turn.
fn peer(call: &Call, device: Device<'_>, link: c_uint) -> usize {
    let count = call.scenario.gpus.len();
    (device.index + 1 + link as usize % (count - 1).max(1)) % count
}

fn remote_pci_info(
    call: &Call,
    device: Handle,
    link: c_uint,
    out: Out<sys::nvmlPciInfo_t>,
) -> Answer {
    let device = checked(call, device, link)?;
    if !is_active(device.gpu, link) {
        return Err(NOT_SUPPORTED);
    }
    match device.gpu.nvlink.remote {
        NvLinkRemote::Gpu => out.set(super::pcie::pci_info(
            &call.scenario.gpus[peer(call, device, link)],
        )?),
        NvLinkRemote::Switch => out.set(switch_pci_info(call, link)),
    }
}

/// The address of the NVSwitch at a link's end. Where the machine has none of its own, NVML reports
/// an address of zeros.
fn switch_pci_info(call: &Call, link: c_uint) -> sys::nvmlPciInfo_t {
    let switches = call.scenario.host.nvswitches;
    let bus = if switches == 0 {
        0
    } else {
        crate::host::FIRST_NVSWITCH_BUS + link % switches
    };
    sys::nvmlPciInfo_t {
        busIdLegacy: characters(&format!("0000:{bus:02X}:00.0")),
        domain: 0,
        bus,
        device: 0,
        pciDeviceId: if switches == 0 { 0 } else { 0x22a3_10de },
        pciSubSystemId: 0,
        busId: characters(&format!("00000000:{bus:02X}:00.0")),
    }
}

nvml! {
    fn nvmlDeviceGetNvLinkState(device: Handle, link: c_uint, out: Out<c_uint>) |call| {
        let device = checked(call, device, link)?;
        out.set(enabled(is_active(device.gpu, link)))
    }

    fn nvmlDeviceGetNvLinkVersion(device: Handle, link: c_uint, out: Out<c_uint>) |call| {
        out.set(version_number(checked(call, device, link)?.gpu.nvlink.version))
    }

    fn nvmlDeviceGetNvLinkCapability(device: Handle, link: c_uint, capability: c_uint, out: Out<c_uint>) |call| {
        checked(call, device, link)?;
        out.set(match capability {
            sys::nvmlNvLinkCapability_enum_NVML_NVLINK_CAP_P2P_SUPPORTED
            | sys::nvmlNvLinkCapability_enum_NVML_NVLINK_CAP_SYSMEM_ACCESS
            | sys::nvmlNvLinkCapability_enum_NVML_NVLINK_CAP_P2P_ATOMICS
            | sys::nvmlNvLinkCapability_enum_NVML_NVLINK_CAP_SYSMEM_ATOMICS
            | sys::nvmlNvLinkCapability_enum_NVML_NVLINK_CAP_SLI_BRIDGE
            | sys::nvmlNvLinkCapability_enum_NVML_NVLINK_CAP_VALID => 1,
            _ => return Err(INVALID_ARGUMENT),
        })
    }

    fn nvmlDeviceGetNvLinkRemotePciInfo(device: Handle, link: c_uint, out: Out<sys::nvmlPciInfo_t>) |call| {
        remote_pci_info(call, device, link, out)
    }
    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(device: Handle, link: c_uint, out: Out<sys::nvmlPciInfo_t>) |call| {
        remote_pci_info(call, device, link, out)
    }

    fn nvmlDeviceGetNvLinkRemoteDeviceType(device: Handle, link: c_uint, out: Out<c_uint>) |call| {
        let device = checked(call, device, link)?;
        out.set(match device.gpu.nvlink.remote {
            _ if !is_active(device.gpu, link) => sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN,
            NvLinkRemote::Gpu => sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU,
            NvLinkRemote::Switch => sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH,
        })
    }

    fn nvmlDeviceGetNvLinkErrorCounter(device: Handle, link: c_uint, counter: c_uint, out: Out<u64>) |call| {
        let gpu = checked(call, device, link)?.gpu;
        let errors = errors(gpu, link);
        let has_data_counters = gpu.nvlink.version < FIRST_VERSION_WITHOUT_DATA_COUNTERS;
        out.set(match counter {
            sys::nvmlNvLinkErrorCounter_enum_NVML_NVLINK_ERROR_DL_REPLAY => errors.replay,
            sys::nvmlNvLinkErrorCounter_enum_NVML_NVLINK_ERROR_DL_RECOVERY => errors.recovery,
            sys::nvmlNvLinkErrorCounter_enum_NVML_NVLINK_ERROR_DL_CRC_FLIT => errors.crc_flit,
            sys::nvmlNvLinkErrorCounter_enum_NVML_NVLINK_ERROR_DL_CRC_DATA if has_data_counters => errors.crc_data,
            sys::nvmlNvLinkErrorCounter_enum_NVML_NVLINK_ERROR_DL_ECC_DATA if has_data_counters => errors.ecc_data,
            sys::nvmlNvLinkErrorCounter_enum_NVML_NVLINK_ERROR_DL_CRC_DATA
            | sys::nvmlNvLinkErrorCounter_enum_NVML_NVLINK_ERROR_DL_ECC_DATA => return Err(NOT_SUPPORTED),
            _ => return Err(INVALID_ARGUMENT),
        })
    }

    fn nvmlDeviceGetNvLinkInfo(device: Handle, out: Out<sys::nvmlNvLinkInfo_v1_t>) |call| {
        call.gpu(device)?;
        out.set_versioned(1, sys::nvmlNvLinkInfo_v1_t {
            version: version_of::<sys::nvmlNvLinkInfo_v1_t>(1),
            isNvleEnabled: 0,
        })
    }
}
