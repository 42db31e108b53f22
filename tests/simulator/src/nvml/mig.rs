//! MIG: mode, GPU instances, compute instances and MIG devices.

use super::call::{
    Call, Device, Failure, Handle, HandleKind, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, Out,
    enabled, nvml, supported,
};
use crate::gpu::MigInstance;
use nvml_wrapper_sys::bindings as sys;
use std::ffi::c_uint;

/// The GPU instance that a handle names.
fn gpu_instance(
    call: &Call,
    handle: Handle,
    kind: HandleKind,
) -> Result<(usize, usize, &MigInstance), Failure> {
    let (gpu, instance) = handle.of_kind(kind).ok_or(INVALID_ARGUMENT)?;
    let values = call.scenario.gpus.get(gpu).ok_or(INVALID_ARGUMENT)?;
    if values.lost {
        return Err(super::call::GPU_IS_LOST);
    }
    Ok((
        gpu,
        instance,
        values.mig.instances.get(instance).ok_or(INVALID_ARGUMENT)?,
    ))
}

/// NVML's number of an instance profile, by its share of the GPU's compute slices.
fn profile_of(mig: &MigInstance) -> u32 {
    match mig.slices {
        1 => sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE,
        2 => sys::NVML_GPU_INSTANCE_PROFILE_2_SLICE,
        3 => sys::NVML_GPU_INSTANCE_PROFILE_3_SLICE,
        4 => sys::NVML_GPU_INSTANCE_PROFILE_4_SLICE,
        _ => sys::NVML_GPU_INSTANCE_PROFILE_7_SLICE,
    }
}

/// The driver's own id of a profile (as `nvidia-smi mig -lgip` lists it on A100 and H100).
fn profile_id(profile: u32) -> u32 {
    match profile {
        sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE => 19,
        sys::NVML_GPU_INSTANCE_PROFILE_2_SLICE => 14,
        sys::NVML_GPU_INSTANCE_PROFILE_3_SLICE => 9,
        sys::NVML_GPU_INSTANCE_PROFILE_4_SLICE => 5,
        _ => 0,
    }
}

/// MIG devices are instances that have a compute instance.
fn mig_devices(device: Device<'_>) -> Vec<usize> {
    let instances = device.gpu.mig.instances.iter().enumerate();
    instances
        .filter(|(_, mig)| mig.compute_instance)
        .map(|(index, _)| index)
        .collect()
}

/// GPU instances of a profile.
fn instances_of(device: Device<'_>, wanted_profile_id: c_uint) -> Vec<usize> {
    let instances = device.gpu.mig.instances.iter().enumerate();
    instances
        .filter(|(_, mig)| profile_id(profile_of(mig)) == wanted_profile_id)
        .map(|(index, _)| index)
        .collect()
}

fn partitioned(call: &Call, device: Handle) -> Result<Device<'_>, Failure> {
    let device = call.gpu(device)?;
    if supported(device.gpu.mig.mode)? {
        Ok(device)
    } else {
        Err(NOT_SUPPORTED)
    }
}

/// NVML writes these lists without looking at their length: the caller read it from the profile.
fn set_handles(out: Out<Handle>, count: Out<c_uint>, handles: &[Handle]) -> super::call::Answer {
    for (index, handle) in handles.iter().enumerate() {
        out.element(index).set(*handle)?;
    }
    count.set(c_uint::try_from(handles.len()).unwrap_or(0))
}

fn attributes(call: &Call, device: Handle) -> Result<sys::nvmlDeviceAttributes_t, Failure> {
    let device = call.device(device)?;
    let (_, mig) = supported(device.mig)?;
    Ok(sys::nvmlDeviceAttributes_t {
        multiprocessorCount: mig.sm_count,
        sharedCopyEngineCount: mig.slices,
        sharedDecoderCount: mig.slices,
        sharedEncoderCount: 0,
        sharedJpegCount: mig.slices,
        sharedOfaCount: 0,
        gpuInstanceSliceCount: mig.slices,
        computeInstanceSliceCount: mig.slices,
        memorySizeMB: mig.memory.0 >> 20,
    })
}

fn compute_instance_info(
    call: &Call,
    handle: Handle,
) -> Result<sys::nvmlComputeInstanceInfo_t, Failure> {
    let (gpu, instance, mig) = gpu_instance(call, handle, HandleKind::ComputeInstance)?;
    Ok(sys::nvmlComputeInstanceInfo_t {
        device: Handle::new(HandleKind::Gpu, gpu, 0).pointer(),
        gpuInstance: Handle::new(HandleKind::GpuInstance, gpu, instance).pointer(),
        id: 0,
        profileId: 0,
        placement: sys::nvmlComputeInstancePlacement_t {
            start: 0,
            size: mig.slices,
        },
    })
}

nvml! {
    fn nvmlDeviceGetMigMode(device: Handle, current: Out<c_uint>, pending: Out<c_uint>) |call| {
        let mig = &call.gpu(device)?.gpu.mig;
        let mode = supported(mig.mode)?;
        current.set(enabled(mode))?;
        pending.set(enabled(mig.pending.unwrap_or(mode)))
    }

    fn nvmlDeviceGetMaxMigDeviceCount(device: Handle, out: Out<c_uint>) |call| {
        let mig = &call.gpu(device)?.gpu.mig;
        out.set(if mig.mode == Some(true) { mig.max_instances } else { 0 })
    }

    fn nvmlDeviceIsMigDeviceHandle(device: Handle, out: Out<c_uint>) |call| {
        out.set(u32::from(call.device(device)?.mig.is_some()))
    }

    fn nvmlDeviceGetMigDeviceHandleByIndex(device: Handle, index: c_uint, out: Out<Handle>) |call| {
        let device = call.gpu(device)?;
        if device.gpu.mig.mode != Some(true) || index >= device.gpu.mig.max_instances {
            return Err(if device.gpu.mig.mode == Some(true) { INVALID_ARGUMENT } else { NOT_SUPPORTED });
        }
        let instance = *mig_devices(device).get(index as usize).ok_or(NOT_FOUND)?;
        out.set(Handle::new(HandleKind::MigDevice, device.index, instance))
    }

    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device: Handle, out: Out<Handle>) |call| {
        let device = call.device(device)?;
        if device.mig.is_none() {
            return Err(INVALID_ARGUMENT);
        }
        out.set(Handle::new(HandleKind::Gpu, device.index, 0))
    }

    fn nvmlDeviceGetGpuInstanceId(device: Handle, out: Out<c_uint>) |call| {
        // A GPU's own handle is an invalid argument here, not a product without MIG.
        out.set(call.device(device)?.mig.ok_or(INVALID_ARGUMENT)?.1.gpu_instance_id)
    }

    fn nvmlDeviceGetComputeInstanceId(device: Handle, out: Out<c_uint>) |call| {
        call.device(device)?.mig.ok_or(INVALID_ARGUMENT)?;
        out.set(0)
    }

    fn nvmlDeviceGetAttributes(device: Handle, out: Out<sys::nvmlDeviceAttributes_t>) |call| {
        out.set(attributes(call, device)?)
    }
    fn nvmlDeviceGetAttributes_v2(device: Handle, out: Out<sys::nvmlDeviceAttributes_t>) |call| {
        out.set(attributes(call, device)?)
    }

    fn nvmlDeviceGetGpuInstanceProfileInfo(
        device: Handle, profile: c_uint, out: Out<sys::nvmlGpuInstanceProfileInfo_t>,
    ) |call| {
        let device = partitioned(call, device)?;
        let model = device.gpu.mig.instances.iter().find(|mig| profile_of(mig) == profile).ok_or(NOT_SUPPORTED)?;
        out.set(sys::nvmlGpuInstanceProfileInfo_t {
            id: profile_id(profile),
            isP2pSupported: 0,
            sliceCount: model.slices,
            instanceCount: device.gpu.mig.max_instances / model.slices.max(1),
            multiprocessorCount: model.sm_count,
            copyEngineCount: model.slices,
            decoderCount: model.slices,
            encoderCount: 0,
            jpegCount: model.slices,
            ofaCount: 0,
            memorySizeMB: model.memory.0 >> 20,
        })
    }

    fn nvmlDeviceGetGpuInstanceRemainingCapacity(device: Handle, profile: c_uint, count: Out<c_uint>) |call| {
        let device = partitioned(call, device)?;
        let used: u32 = device.gpu.mig.instances.iter().map(|mig| mig.slices).sum();
        let slices = (1..=7).find(|slices| profile_id(slices - 1) == profile).unwrap_or(1);
        count.set(device.gpu.mig.max_instances.saturating_sub(used) / slices)
    }

    fn nvmlDeviceGetGpuInstances(device: Handle, profile: c_uint, out: Out<Handle>, count: Out<c_uint>) |call| {
        let device = partitioned(call, device)?;
        let handles: Vec<Handle> = instances_of(device, profile).into_iter()
            .map(|instance| Handle::new(HandleKind::GpuInstance, device.index, instance))
            .collect();
        set_handles(out, count, &handles)
    }

    fn nvmlDeviceGetGpuInstanceById(device: Handle, id: c_uint, out: Out<Handle>) |call| {
        let device = partitioned(call, device)?;
        let instance = device.gpu.mig.instances.iter().position(|mig| mig.gpu_instance_id == id).ok_or(NOT_FOUND)?;
        out.set(Handle::new(HandleKind::GpuInstance, device.index, instance))
    }

    fn nvmlGpuInstanceGetInfo(handle: Handle, out: Out<sys::nvmlGpuInstanceInfo_t>) |call| {
        let (gpu, _, mig) = gpu_instance(call, handle, HandleKind::GpuInstance)?;
        out.set(sys::nvmlGpuInstanceInfo_t {
            device: Handle::new(HandleKind::Gpu, gpu, 0).pointer(),
            id: mig.gpu_instance_id,
            profileId: profile_id(profile_of(mig)),
            placement: sys::nvmlGpuInstancePlacement_t { start: mig.start, size: mig.slices },
        })
    }

    fn nvmlGpuInstanceGetComputeInstanceProfileInfo(
        handle: Handle, profile: c_uint, engine_profile: c_uint, out: Out<sys::nvmlComputeInstanceProfileInfo_t>,
    ) |call| {
        let _ = engine_profile;
        let (_, _, mig) = gpu_instance(call, handle, HandleKind::GpuInstance)?;
        if profile != profile_of(mig) {
            return Err(NOT_SUPPORTED);
        }
        out.set(sys::nvmlComputeInstanceProfileInfo_t {
            id: 0,
            sliceCount: mig.slices,
            instanceCount: 1,
            multiprocessorCount: mig.sm_count,
            sharedCopyEngineCount: mig.slices,
            sharedDecoderCount: mig.slices,
            sharedEncoderCount: 0,
            sharedJpegCount: mig.slices,
            sharedOfaCount: 0,
        })
    }

    fn nvmlGpuInstanceGetComputeInstances(handle: Handle, profile: c_uint, out: Out<Handle>, count: Out<c_uint>) |call| {
        let (gpu, instance, mig) = gpu_instance(call, handle, HandleKind::GpuInstance)?;
        if profile != 0 || !mig.compute_instance {
            return count.set(0);
        }
        set_handles(out, count, &[Handle::new(HandleKind::ComputeInstance, gpu, instance)])
    }

    fn nvmlGpuInstanceGetComputeInstanceById(handle: Handle, id: c_uint, out: Out<Handle>) |call| {
        let (gpu, instance, mig) = gpu_instance(call, handle, HandleKind::GpuInstance)?;
        if id != 0 || !mig.compute_instance {
            return Err(NOT_FOUND);
        }
        out.set(Handle::new(HandleKind::ComputeInstance, gpu, instance))
    }

    fn nvmlComputeInstanceGetInfo(handle: Handle, out: Out<sys::nvmlComputeInstanceInfo_t>) |call| {
        out.set(compute_instance_info(call, handle)?)
    }
    fn nvmlComputeInstanceGetInfo_v2(handle: Handle, out: Out<sys::nvmlComputeInstanceInfo_t>) |call| {
        out.set(compute_instance_info(call, handle)?)
    }
}
