//! Enumeration, handles and what a GPU is.

use super::call::{
    Answer, CORRUPTED_INFOROM, Device, Failure, GPU_IS_LOST, Handle, HandleKind, INVALID_ARGUMENT,
    NOT_FOUND, NOT_SUPPORTED, Out, TextIn, TextOut, characters, enabled, nvml, supported,
    version_of,
};
use crate::gpu::{Architecture, Brand, ComputeMode, Virtualization};
use nvml_wrapper_sys::bindings as sys;
use std::ffi::{c_int, c_uint, c_ulong};

fn count(call: &super::call::Call, out: Out<c_uint>) -> Answer {
    out.set(c_uint::try_from(call.visible_gpus().len()).unwrap_or(0))
}

fn handle_by_index(call: &super::call::Call, index: c_uint, out: Out<Handle>) -> Answer {
    let gpu = *call
        .visible_gpus()
        .get(index as usize)
        .ok_or(INVALID_ARGUMENT)?;
    handle_of(call, gpu, out)
}

fn handle_of(call: &super::call::Call, gpu: usize, out: Out<Handle>) -> Answer {
    if call.scenario.gpus[gpu].lost {
        return Err(GPU_IS_LOST);
    }
    out.set(Handle::new(HandleKind::Gpu, gpu, 0))
}

fn handle_by_uuid(call: &super::call::Call, uuid: &str, out: Out<Handle>) -> Answer {
    for gpu in call.visible_gpus() {
        let values = &call.scenario.gpus[gpu];
        if values.uuid == uuid {
            return handle_of(call, gpu, out);
        }
        if let Some(instance) = values.mig.instances.iter().position(|mig| mig.uuid == uuid) {
            return out.set(Handle::new(HandleKind::MigDevice, gpu, instance));
        }
    }
    Err(NOT_FOUND)
}

/// Accepts every spelling of an address: domains of four or eight digits, upper or lower case, no
/// domain.
fn handle_by_pci_bus_id(call: &super::call::Call, address: &str, out: Out<Handle>) -> Answer {
    let full = if address.matches(':').count() == 1 {
        format!("0:{address}")
    } else {
        address.to_owned()
    };
    let wanted = pci_parts(&full).ok_or(INVALID_ARGUMENT)?;
    let gpu = call
        .visible_gpus()
        .into_iter()
        .find(|gpu| call.scenario.gpus[*gpu].pci_parts() == Some(wanted))
        .ok_or(NOT_FOUND)?;
    handle_of(call, gpu, out)
}

fn pci_parts(address: &str) -> Option<[u32; 4]> {
    let mut fields = address
        .split([':', '.'])
        .map(|field| u32::from_str_radix(field, 16));
    let mut next = || fields.next()?.ok();
    Some([next()?, next()?, next()?, next()?])
}

/// `GPU-` and 32 hexadecimal digits as 16 bytes.
fn uuid_bytes(uuid: &str) -> Option<[u8; 16]> {
    let digits: String = uuid
        .trim_start_matches("GPU-")
        .chars()
        .filter(|c| *c != '-')
        .collect();
    let value = u128::from_str_radix(&digits, 16).ok()?;
    Some(value.to_be_bytes())
}

fn name(device: Device<'_>) -> String {
    match device.mig {
        Some((_, mig)) => format!("{} MIG {}", device.gpu.name, mig.profile),
        None => device.gpu.name.clone(),
    }
}

fn set_version(value: Option<&String>, out: TextOut, length: c_uint) -> Answer {
    out.set(length, supported(value)?)
}

nvml! {
    fn nvmlDeviceGetCount(out: Out<c_uint>) |call| { count(call, out) }
    fn nvmlDeviceGetCount_v2(out: Out<c_uint>) |call| { count(call, out) }
    fn nvmlDeviceGetHandleByIndex(index: c_uint, out: Out<Handle>) |call| { handle_by_index(call, index, out) }
    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, out: Out<Handle>) |call| { handle_by_index(call, index, out) }

    fn nvmlDeviceGetHandleByUUID(uuid: TextIn, out: Out<Handle>) |call| { handle_by_uuid(call, &uuid.get()?, out) }

    fn nvmlDeviceGetHandleByUUIDV(uuid: Out<sys::nvmlUUID_t>, out: Out<Handle>) |call| {
        let given = uuid.get()?;
        if given.version != version_of::<sys::nvmlUUID_t>(1) {
            return Err(super::call::ARGUMENT_VERSION_MISMATCH);
        }
        match given.type_ {
            // The value starts where the union does: 8 bytes in.
            1 => handle_by_uuid(call, &text_of(uuid.cast::<u8>().element(8))?, out),
            2 => {
                let mut bytes = [0; 16];
                for (index, byte) in bytes.iter_mut().enumerate() {
                    *byte = uuid.cast::<u8>().element(8 + index).get()?;
                }
                let gpu = call.visible_gpus().into_iter()
                    .find(|gpu| uuid_bytes(&call.scenario.gpus[*gpu].uuid) == Some(bytes))
                    .ok_or(NOT_FOUND)?;
                handle_of(call, gpu, out)
            }
            _ => Err(INVALID_ARGUMENT),
        }
    }

    fn nvmlDeviceGetHandleBySerial(serial: TextIn, out: Out<Handle>) |call| {
        let wanted = serial.get()?;
        let gpu = call.visible_gpus().into_iter()
            .find(|gpu| call.scenario.gpus[*gpu].serial.as_deref() == Some(wanted.as_str()))
            .ok_or(NOT_FOUND)?;
        handle_of(call, gpu, out)
    }

    fn nvmlDeviceGetHandleByPciBusId(address: TextIn, out: Out<Handle>) |call| {
        handle_by_pci_bus_id(call, &address.get()?, out)
    }

    fn nvmlDeviceGetHandleByPciBusId_v2(address: TextIn, out: Out<Handle>) |call| {
        handle_by_pci_bus_id(call, &address.get()?, out)
    }

    fn nvmlDeviceGetName(device: Handle, out: TextOut, length: c_uint) |call| {
        out.set(length, &name(call.device(device)?))
    }

    fn nvmlDeviceGetBrand(device: Handle, out: Out<sys::nvmlBrandType_t>) |call| {
        out.set(match call.device(device)?.gpu.brand {
            Brand::Tesla => sys::nvmlBrandType_enum_NVML_BRAND_TESLA,
            Brand::Nvidia => sys::nvmlBrandType_enum_NVML_BRAND_NVIDIA,
            Brand::NvidiaRtx => sys::nvmlBrandType_enum_NVML_BRAND_NVIDIA_RTX,
            Brand::Geforce => sys::nvmlBrandType_enum_NVML_BRAND_GEFORCE,
            Brand::GeforceRtx => sys::nvmlBrandType_enum_NVML_BRAND_GEFORCE_RTX,
        })
    }

    fn nvmlDeviceGetIndex(device: Handle, out: Out<c_uint>) |call| {
        let device = call.device(device)?;
        if let Some((instance, _)) = device.mig {
            return out.set(instance);
        }
        let index = call.visible_gpus().iter().position(|gpu| *gpu == device.index).ok_or(NOT_FOUND)?;
        out.set(c_uint::try_from(index).unwrap_or(0))
    }

    fn nvmlDeviceGetSerial(device: Handle, out: TextOut, length: c_uint) |call| {
        set_version(call.gpu(device)?.gpu.serial.as_ref(), out, length)
    }

    fn nvmlDeviceGetModuleId(device: Handle, out: Out<c_uint>) |call| {
        out.set(supported(call.gpu(device)?.gpu.module_id)?)
    }

    fn nvmlDeviceGetUUID(device: Handle, out: TextOut, length: c_uint) |call| {
        let device = call.device(device)?;
        out.set(length, device.mig.map_or(&device.gpu.uuid, |(_, mig)| &mig.uuid))
    }

    fn nvmlDeviceGetPdi(device: Handle, out: Out<sys::nvmlPdi_t>) |call| {
        let value = call.gpu(device)?.gpu.pdi;
        out.set_versioned(1, sys::nvmlPdi_t { version: version_of::<sys::nvmlPdi_t>(1), value })
    }

    fn nvmlDeviceGetMinorNumber(device: Handle, out: Out<c_uint>) |call| {
        out.set(call.gpu(device)?.gpu.minor_number)
    }

    fn nvmlDeviceGetBoardId(device: Handle, out: Out<c_uint>) |call| {
        let [domain, bus, slot, _] = call.gpu(device)?.gpu.pci_parts().ok_or(NOT_SUPPORTED)?;
        out.set(domain << 16 | bus << 8 | slot)
    }

    fn nvmlDeviceGetMultiGpuBoard(device: Handle, out: Out<c_uint>) |call| {
        call.gpu(device)?;
        out.set(0)
    }

    fn nvmlDeviceOnSameBoard(first: Handle, second: Handle, out: Out<c_int>) |call| {
        out.set(c_int::from(call.gpu(first)?.index == call.gpu(second)?.index))
    }

    fn nvmlDeviceGetBoardPartNumber(device: Handle, out: TextOut, length: c_uint) |call| {
        set_version(call.gpu(device)?.gpu.board_part_number.as_ref(), out, length)
    }

    fn nvmlDeviceGetInforomVersion(device: Handle, object: c_uint, out: TextOut, length: c_uint) |call| {
        let inforom = &call.gpu(device)?.gpu.inforom;
        let version = match object {
            sys::nvmlInforomObject_enum_NVML_INFOROM_OEM => &inforom.oem,
            sys::nvmlInforomObject_enum_NVML_INFOROM_ECC => &inforom.ecc,
            sys::nvmlInforomObject_enum_NVML_INFOROM_POWER => &inforom.power,
            sys::nvmlInforomObject_enum_NVML_INFOROM_DEN => &None,
            _ => return Err(INVALID_ARGUMENT),
        };
        set_version(version.as_ref(), out, length)
    }

    fn nvmlDeviceGetInforomImageVersion(device: Handle, out: TextOut, length: c_uint) |call| {
        set_version(call.gpu(device)?.gpu.inforom.image.as_ref(), out, length)
    }

    fn nvmlDeviceGetInforomConfigurationChecksum(device: Handle, out: Out<c_uint>) |call| {
        let gpu = call.gpu(device)?.gpu;
        supported(gpu.inforom.image.as_ref())?;
        if !gpu.inforom_valid {
            return Err(CORRUPTED_INFOROM);
        }
        // Source: real H200s answer 0 (captures/h200x4.nvml-transcript.json).
        out.set(0)
    }

    fn nvmlDeviceValidateInforom(device: Handle) |call| {
        let gpu = call.gpu(device)?.gpu;
        supported(gpu.inforom.image.as_ref())?;
        if gpu.inforom_valid { Ok(()) } else { Err(CORRUPTED_INFOROM) }
    }

    fn nvmlDeviceGetVbiosVersion(device: Handle, out: TextOut, length: c_uint) |call| {
        out.set(length, &call.gpu(device)?.gpu.vbios)
    }

    fn nvmlDeviceGetArchitecture(device: Handle, out: Out<c_uint>) |call| {
        out.set(match call.device(device)?.gpu.architecture {
            Architecture::Kepler => sys::NVML_DEVICE_ARCH_KEPLER,
            Architecture::Maxwell => sys::NVML_DEVICE_ARCH_MAXWELL,
            Architecture::Pascal => sys::NVML_DEVICE_ARCH_PASCAL,
            Architecture::Volta => sys::NVML_DEVICE_ARCH_VOLTA,
            Architecture::Turing => sys::NVML_DEVICE_ARCH_TURING,
            Architecture::Ampere => sys::NVML_DEVICE_ARCH_AMPERE,
            Architecture::Ada => sys::NVML_DEVICE_ARCH_ADA,
            Architecture::Hopper => sys::NVML_DEVICE_ARCH_HOPPER,
            Architecture::Blackwell => sys::NVML_DEVICE_ARCH_BLACKWELL,
        })
    }

    fn nvmlDeviceGetCudaComputeCapability(device: Handle, major: Out<c_int>, minor: Out<c_int>) |call| {
        let [first, second] = call.device(device)?.gpu.compute_capability;
        major.set(first.cast_signed())?;
        minor.set(second.cast_signed())
    }

    fn nvmlDeviceGetNumGpuCores(device: Handle, out: Out<c_uint>) |call| {
        out.set(call.gpu(device)?.gpu.cuda_cores)
    }

    fn nvmlDeviceGetPersistenceMode(device: Handle, out: Out<sys::nvmlEnableState_t>) |call| {
        out.set(enabled(call.gpu(device)?.gpu.persistence_mode))
    }

    fn nvmlDeviceGetComputeMode(device: Handle, out: Out<sys::nvmlComputeMode_t>) |call| {
        out.set(match call.device(device)?.gpu.compute_mode {
            ComputeMode::Default => sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_DEFAULT,
            ComputeMode::Prohibited => sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_PROHIBITED,
            ComputeMode::ExclusiveProcess => sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
        })
    }

    fn nvmlDeviceGetVirtualizationMode(device: Handle, out: Out<sys::nvmlGpuVirtualizationMode_t>) |call| {
        out.set(match call.gpu(device)?.gpu.virtualization {
            Virtualization::None => sys::nvmlGpuVirtualizationMode_NVML_GPU_VIRTUALIZATION_MODE_NONE,
            Virtualization::Vgpu => sys::nvmlGpuVirtualizationMode_NVML_GPU_VIRTUALIZATION_MODE_VGPU,
            Virtualization::PassThrough => sys::nvmlGpuVirtualizationMode_NVML_GPU_VIRTUALIZATION_MODE_PASSTHROUGH,
        })
    }

    fn nvmlDeviceGetDisplayMode(device: Handle, out: Out<sys::nvmlEnableState_t>) |call| {
        out.set(enabled(call.gpu(device)?.gpu.display_attached))
    }

    fn nvmlDeviceGetDisplayActive(device: Handle, out: Out<sys::nvmlEnableState_t>) |call| {
        call.gpu(device)?;
        out.set(enabled(false))
    }

    fn nvmlDeviceGetGspFirmwareVersion(device: Handle, out: TextOut) |call| {
        if !call.gpu(device)?.gpu.gsp_firmware {
            return Err(NOT_SUPPORTED);
        }
        out.set(sys::NVML_GSP_FIRMWARE_VERSION_BUF_SIZE, call.scenario.driver.gsp_firmware_version())
    }

    fn nvmlDeviceGetGspFirmwareMode(device: Handle, on: Out<c_uint>, default: Out<c_uint>) |call| {
        let gpu = call.gpu(device)?.gpu;
        on.set(enabled(gpu.gsp_firmware))?;
        default.set(enabled(gpu.architecture >= Architecture::Turing))
    }

    fn nvmlDeviceGetAddressingMode(device: Handle, out: Out<sys::nvmlDeviceAddressingMode_t>) |call| {
        call.gpu(device)?;
        let version = version_of::<sys::nvmlDeviceAddressingMode_t>(1);
        out.set_versioned(1, sys::nvmlDeviceAddressingMode_t { version, value: 0 })
    }

    fn nvmlDeviceGetC2cModeInfoV(device: Handle, out: Out<sys::nvmlC2cModeInfo_v1_t>) |call| {
        call.gpu(device)?;
        // This struct has no version field. No simulated node joins its GPUs to the CPU by a
        // chip-to-chip link.
        out.set(sys::nvmlC2cModeInfo_v1_t { isC2cEnabled: 0 })
    }

    fn nvmlDeviceGetCapabilities(device: Handle, out: Out<sys::nvmlDeviceCapabilities_t>) |call| {
        call.gpu(device)?;
        let version = version_of::<sys::nvmlDeviceCapabilities_t>(1);
        out.set_versioned(1, sys::nvmlDeviceCapabilities_t { version, capMask: 0 })
    }

    fn nvmlDeviceGetLastBBXFlushTime(device: Handle, time: Out<u64>, duration: Out<c_ulong>) |call| {
        let _ = (time, duration);
        call.gpu(device)?;
        Err(super::call::NO_DATA)
    }

    fn nvmlDeviceGetBridgeChipInfo(device: Handle, out: Out<sys::nvmlBridgeChipHierarchy_t>) |call| {
        let _ = out;
        call.gpu(device)?;
        Err(NOT_SUPPORTED)
    }

    fn nvmlDeviceGetAccountingMode(device: Handle, out: Out<sys::nvmlEnableState_t>) |call| {
        call.gpu(device)?;
        out.set(enabled(false))
    }

    fn nvmlDeviceGetAccountingBufferSize(device: Handle, out: Out<c_uint>) |call| {
        call.gpu(device)?;
        out.set(4000)
    }

    fn nvmlDeviceGetAccountingPids(device: Handle, count: Out<c_uint>, pids: Out<c_uint>) |call| {
        call.gpu(device)?;
        super::call::set_list(count, pids, &[])
    }

    fn nvmlDeviceGetAPIRestriction(device: Handle, api: c_uint, out: Out<sys::nvmlEnableState_t>) |call| {
        call.gpu(device)?;
        match api {
            sys::nvmlRestrictedAPI_enum_NVML_RESTRICTED_API_SET_APPLICATION_CLOCKS => out.set(enabled(true)),
            _ => Err(NOT_SUPPORTED),
        }
    }

    fn nvmlDeviceGetIrqNum(device: Handle, out: Out<c_uint>) |call| {
        let device = call.gpu(device)?;
        out.set(40 + c_uint::try_from(device.index).unwrap_or(0))
    }

    fn nvmlDeviceGetPlatformInfo(device: Handle, out: Out<sys::nvmlPlatformInfo_t>) |call| {
        let gpu = call.gpu(device)?.gpu;
        let module = supported(gpu.module_id)?;
        supported(gpu.fabric.as_ref())?;
        let value = sys::nvmlPlatformInfo_t {
            version: version_of::<sys::nvmlPlatformInfo_t>(2),
            ibGuid: [0; 16],
            chassisSerialNumber: characters::<16>("0").map(std::ffi::c_char::cast_unsigned),
            slotNumber: 0,
            trayIndex: 0,
            // Source: boards with eight GPUs, captures/h200x4.nvml-transcript.json.
            hostId: 1,
            peerType: 0,
            moduleId: u8::try_from(module).unwrap_or(0),
        };
        out.set_versioned(2, value)
    }
}

/// Text in a fixed field of the caller's.
fn text_of(start: Out<u8>) -> Result<String, Failure> {
    let mut bytes = Vec::new();
    for index in 0..sys::NVML_DEVICE_UUID_ASCII_LEN as usize {
        match start.element(index).get()? {
            0 => break,
            byte => bytes.push(byte),
        }
    }
    String::from_utf8(bytes).map_err(|_| INVALID_ARGUMENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_in_every_spelling() {
        assert_eq!(pci_parts("00000000:3B:00.0"), Some([0, 0x3b, 0, 0]));
        assert_eq!(pci_parts("0000:3b:00.0"), Some([0, 0x3b, 0, 0]));
        assert_eq!(pci_parts("nonsense"), None);
    }

    #[test]
    fn uuids_become_bytes() {
        let bytes = uuid_bytes("GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
        assert_eq!(
            bytes,
            Some([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15])
        );
    }
}
