//! Processes on a GPU.

use super::call::{
    ARGUMENT_VERSION_MISMATCH, Answer, Call, Handle, INSUFFICIENT_SIZE, NOT_FOUND, Out, nvml,
    set_list, version_of,
};
use nvml_wrapper_sys::bindings as sys;
use std::ffi::c_uint;

/// NVML's value in place of an instance on a GPU without MIG.
const NO_INSTANCE: u32 = u32::MAX;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Compute,
    Graphics,
}

/// Processes of a kind on a device, ordered by process id.
pub(super) fn processes(
    call: &Call,
    device: Handle,
    kind: Kind,
) -> Result<Vec<sys::nvmlProcessInfo_t>, super::call::Failure> {
    let device = call.device(device)?;
    let instance_ids = |instance: Option<u32>| {
        let mig = instance.and_then(|index| device.gpu.mig.instances.get(index as usize));
        mig.map_or((NO_INSTANCE, NO_INSTANCE), |mig| (mig.gpu_instance_id, 0))
    };
    let mut list = Vec::new();
    if kind == Kind::Compute {
        for process in call.node.state().gpu(device.index).processes() {
            let wanted = device
                .mig
                .is_none_or(|(index, _)| process.mig_instance == Some(index));
            if process.contexts > 0 && wanted {
                let (gpu_instance, compute_instance) = instance_ids(process.mig_instance);
                list.push((
                    process.pid,
                    process.memory_bytes,
                    gpu_instance,
                    compute_instance,
                ));
            }
        }
    }
    if device.mig.is_none() {
        for process in call.scenario.processes.values() {
            if process.listed
                && process.gpu as usize == device.index
                && process.graphics == (kind == Kind::Graphics)
            {
                list.push((process.pid, process.memory.0, NO_INSTANCE, NO_INSTANCE));
            }
        }
    }
    list.sort_unstable();
    let info = |(pid, memory, gpu_instance, compute_instance)| sys::nvmlProcessInfo_t {
        pid,
        usedGpuMemory: memory,
        gpuInstanceId: gpu_instance,
        computeInstanceId: compute_instance,
    };
    Ok(list.into_iter().map(info).collect())
}

/// The list in the first version of the struct, which knew no instances.
fn set_old_list(
    count: Out<c_uint>,
    infos: Out<sys::nvmlProcessInfo_v1_t>,
    processes: &[sys::nvmlProcessInfo_t],
) -> Answer {
    let old: Vec<_> = processes
        .iter()
        .map(|process| sys::nvmlProcessInfo_v1_t {
            pid: process.pid,
            usedGpuMemory: process.usedGpuMemory,
        })
        .collect();
    set_list(count, infos, &old)
}

/// How busy each process keeps the GPU, all of them together as much as the GPU is.
fn utilization(call: &Call, device: Handle) -> Result<Vec<(u32, u32)>, super::call::Failure> {
    let device = call.gpu(device)?;
    let mut busy: Vec<u32> = call
        .node
        .state()
        .gpu(device.index)
        .processes()
        .iter()
        .filter(|process| process.running > 0)
        .map(|process| process.pid)
        .collect();
    let simulated = call.scenario.processes.values();
    busy.extend(
        simulated
            .filter(|process| process.busy && process.gpu as usize == device.index)
            .map(|process| process.pid),
    );
    let share = u32::try_from(busy.len()).unwrap_or(u32::MAX).max(1);
    let each = call.readings(device).gpu_utilization_percent / share;
    Ok(busy.into_iter().map(|pid| (pid, each)).collect())
}

fn now_us() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |time| u64::try_from(time.as_micros()).unwrap_or(0))
}

nvml! {
    fn nvmlDeviceGetComputeRunningProcesses(
        device: Handle, count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_v1_t>,
    ) |call| { set_old_list(count, infos, &processes(call, device, Kind::Compute)?) }

    fn nvmlDeviceGetComputeRunningProcesses_v2(
        device: Handle, count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_t>,
    ) |call| { set_list(count, infos, &processes(call, device, Kind::Compute)?) }

    fn nvmlDeviceGetComputeRunningProcesses_v3(
        device: Handle, count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_t>,
    ) |call| { set_list(count, infos, &processes(call, device, Kind::Compute)?) }

    fn nvmlDeviceGetGraphicsRunningProcesses(
        device: Handle, count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_v1_t>,
    ) |call| { set_old_list(count, infos, &processes(call, device, Kind::Graphics)?) }

    fn nvmlDeviceGetGraphicsRunningProcesses_v2(
        device: Handle, count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_t>,
    ) |call| { set_list(count, infos, &processes(call, device, Kind::Graphics)?) }

    fn nvmlDeviceGetGraphicsRunningProcesses_v3(
        device: Handle, count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_t>,
    ) |call| { set_list(count, infos, &processes(call, device, Kind::Graphics)?) }

    fn nvmlDeviceGetMPSComputeRunningProcesses(
        device: Handle, count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_v1_t>,
    ) |call| {
        call.device(device)?;
        set_list(count, infos, &[])
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(
        device: Handle, count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_t>,
    ) |call| {
        call.device(device)?;
        set_list(count, infos, &[])
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
        device: Handle, count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_t>,
    ) |call| {
        call.device(device)?;
        set_list(count, infos, &[])
    }

    fn nvmlDeviceGetRunningProcessDetailList(device: Handle, out: Out<sys::nvmlProcessDetailList_t>) |call| {
        let mut list = out.get()?;
        if list.version != version_of::<sys::nvmlProcessDetailList_t>(1) {
            return Err(ARGUMENT_VERSION_MISMATCH);
        }
        // Modes are compute, graphics and MPS.
        let processes = match list.mode {
            0 => processes(call, device, Kind::Compute)?,
            1 => processes(call, device, Kind::Graphics)?,
            _ => Vec::new(),
        };
        let room = list.numProcArrayEntries as usize;
        list.numProcArrayEntries = c_uint::try_from(processes.len()).unwrap_or(0);
        out.set(list)?;
        if room < processes.len() {
            return Err(INSUFFICIENT_SIZE);
        }
        let array = Out::from_pointer(list.procArray);
        for (index, process) in processes.iter().enumerate() {
            array.element(index).set(sys::nvmlProcessDetail_v1_t {
                pid: process.pid,
                usedGpuMemory: process.usedGpuMemory,
                gpuInstanceId: process.gpuInstanceId,
                computeInstanceId: process.computeInstanceId,
                usedGpuCcProtectedMemory: 0,
            })?;
        }
        Ok(())
    }

    fn nvmlDeviceGetProcessUtilization(
        device: Handle,
        samples: Out<sys::nvmlProcessUtilizationSample_t>,
        count: Out<c_uint>,
        since_us: u64,
    ) |call| {
        let time = now_us();
        if since_us >= time {
            return Err(NOT_FOUND);
        }
        let list: Vec<_> = utilization(call, device)?.into_iter().map(|(pid, share)| {
            sys::nvmlProcessUtilizationSample_t { pid, timeStamp: time, smUtil: share, memUtil: share / 2, encUtil: 0, decUtil: 0 }
        }).collect();
        if list.is_empty() {
            return Err(NOT_FOUND);
        }
        set_list(count, samples, &list)
    }

    fn nvmlDeviceGetProcessesUtilizationInfo(device: Handle, out: Out<sys::nvmlProcessesUtilizationInfo_t>) |call| {
        let mut list = out.get()?;
        if list.version != version_of::<sys::nvmlProcessesUtilizationInfo_t>(1) {
            return Err(ARGUMENT_VERSION_MISMATCH);
        }
        let time = now_us();
        let shares = utilization(call, device)?;
        let room = list.processSamplesCount as usize;
        list.processSamplesCount = c_uint::try_from(shares.len()).unwrap_or(0);
        out.set(list)?;
        if room < shares.len() {
            return Err(INSUFFICIENT_SIZE);
        }
        let array = Out::from_pointer(list.procUtilArray);
        for (index, (pid, share)) in shares.into_iter().enumerate() {
            array.element(index).set(sys::nvmlProcessUtilizationInfo_v1_t {
                timeStamp: time, pid, smUtil: share, memUtil: share / 2, encUtil: 0, decUtil: 0, jpgUtil: 0, ofaUtil: 0,
            })?;
        }
        Ok(())
    }

    fn nvmlDeviceGetSamples(
        device: Handle,
        kind: c_uint,
        since_us: u64,
        value_type: Out<c_uint>,
        count: Out<c_uint>,
        samples: Out<sys::nvmlSample_t>,
    ) |call| {
        let device = call.gpu(device)?;
        let readings = call.readings(device);
        let value = match kind {
            sys::nvmlSamplingType_enum_NVML_TOTAL_POWER_SAMPLES => readings.power_mw,
            sys::nvmlSamplingType_enum_NVML_GPU_UTILIZATION_SAMPLES => readings.gpu_utilization_percent,
            sys::nvmlSamplingType_enum_NVML_MEMORY_UTILIZATION_SAMPLES => readings.memory_utilization_percent,
            sys::nvmlSamplingType_enum_NVML_PROCESSOR_CLK_SAMPLES => readings.clocks.sm_mhz,
            sys::nvmlSamplingType_enum_NVML_MEMORY_CLK_SAMPLES => readings.clocks.memory_mhz,
            _ => return Err(super::call::NOT_SUPPORTED),
        };
        let time = now_us();
        if since_us >= time {
            return Err(NOT_FOUND);
        }
        value_type.set(sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT)?;
        // The driver keeps a hundred samples of the past; the simulated one has the present one.
        if samples.is_null() {
            return count.set(1);
        }
        set_list(count, samples, &[sys::nvmlSample_t { timeStamp: time, sampleValue: sys::nvmlValue_t { uiVal: value } }])
    }
}
