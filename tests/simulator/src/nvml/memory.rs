//! Memory sizes and use.

use super::call::{Call, Device, Handle, Out, nvml, version_of};
use nvml_wrapper_sys::bindings as sys;
use std::ffi::c_uint;

/// Memory of a device in bytes.
struct MemoryUse {
    total: u64,
    reserved: u64,
    used: u64,
}

impl MemoryUse {
    fn free(&self) -> u64 {
        self.total
            .saturating_sub(self.reserved)
            .saturating_sub(self.used)
    }
}

fn memory_use(call: &Call, device: Device<'_>) -> MemoryUse {
    match device.mig {
        Some((instance, mig)) => MemoryUse {
            total: mig.memory.0,
            reserved: 0,
            used: call
                .node
                .state()
                .gpu(device.index)
                .processes()
                .iter()
                .filter(|process| process.mig_instance == Some(instance))
                .map(|process| process.memory_bytes)
                .sum(),
        },
        None => MemoryUse {
            total: device.gpu.memory.0,
            reserved: device.gpu.memory_reserved.0,
            used: call.node.memory_used(device.index),
        },
    }
}

nvml! {
    fn nvmlDeviceGetMemoryInfo(device: Handle, out: Out<sys::nvmlMemory_t>) |call| {
        let memory = memory_use(call, call.device(device)?);
        // The first version counts what the driver keeps for itself as used.
        let used = memory.used + memory.reserved;
        out.set(sys::nvmlMemory_t { total: memory.total, free: memory.free(), used })
    }

    fn nvmlDeviceGetMemoryInfo_v2(device: Handle, out: Out<sys::nvmlMemory_v2_t>) |call| {
        let memory = memory_use(call, call.device(device)?);
        out.set_versioned(2, sys::nvmlMemory_v2_t {
            version: version_of::<sys::nvmlMemory_v2_t>(2),
            total: memory.total,
            reserved: memory.reserved,
            free: memory.free(),
            used: memory.used,
        })
    }

    fn nvmlDeviceGetBAR1MemoryInfo(device: Handle, out: Out<sys::nvmlBAR1Memory_t>) |call| {
        let gpu = call.device(device)?.gpu;
        let (total, used) = (gpu.bar1_memory.0, gpu.bar1_memory_used.0);
        out.set(sys::nvmlBAR1Memory_t { bar1Total: total, bar1Free: total.saturating_sub(used), bar1Used: used })
    }

    fn nvmlDeviceGetMemoryBusWidth(device: Handle, out: Out<c_uint>) |call| {
        out.set(call.gpu(device)?.gpu.memory_bus_width_bits)
    }

    fn nvmlDeviceGetConfComputeMemSizeInfo(device: Handle, out: Out<sys::nvmlConfComputeMemSizeInfo_t>) |call| {
        call.gpu(device)?;
        out.set(sys::nvmlConfComputeMemSizeInfo_t { protectedMemSizeKib: 0, unprotectedMemSizeKib: 0 })
    }

    fn nvmlDeviceGetConfComputeProtectedMemoryUsage(device: Handle, out: Out<sys::nvmlMemory_t>) |call| {
        call.gpu(device)?;
        out.set(sys::nvmlMemory_t { total: 0, free: 0, used: 0 })
    }
}
