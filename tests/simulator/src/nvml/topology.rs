//! Which GPUs and CPUs are near each other.

use super::call::{
    Call, Failure, Handle, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, Out, nvml, set_list,
};
use crate::gpu::Brand;
use crate::host::numa_node;
use nvml_wrapper_sys::bindings as sys;
use std::ffi::{c_uint, c_ulong};

fn common_ancestor(first: usize, second: usize, count: usize) -> u32 {
    if first == second {
        sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_INTERNAL
    } else if numa_node(first, count) == numa_node(second, count) {
        sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_NODE
    } else {
        sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_SYSTEM
    }
}

/// The same of two PCI addresses as NVML writes them, with a domain of eight digits.
pub(super) fn of_addresses(call: &Call, first: &str, second: &str) -> Result<u32, Failure> {
    let index_of = |address: &str| {
        let gpus = call.scenario.gpus.iter();
        let address = address.to_lowercase();
        let mut addresses = gpus.map(|gpu| gpu.pci_address.to_lowercase());
        addresses
            .position(|it| address.ends_with(&it))
            .ok_or(NOT_FOUND)
    };
    let count = call.scenario.gpus.len();
    Ok(common_ancestor(index_of(first)?, index_of(second)?, count))
}

nvml! {
    fn nvmlDeviceGetTopologyCommonAncestor(first: Handle, second: Handle, out: Out<c_uint>) |call| {
        let (first, second) = (call.gpu(first)?, call.gpu(second)?);
        out.set(common_ancestor(first.index, second.index, call.scenario.gpus.len()))
    }

    fn nvmlDeviceGetTopologyNearestGpus(
        device: Handle,
        level: c_uint,
        count: Out<c_uint>,
        list: Out<Handle>,
    ) |call| {
        let device = call.gpu(device)?;
        let total = call.scenario.gpus.len();
        let near: Vec<Handle> = call.visible_gpus().into_iter()
            .filter(|other| *other != device.index && common_ancestor(device.index, *other, total) <= level)
            .map(|other| Handle::new(super::call::HandleKind::Gpu, other, 0))
            .collect();
        set_list(count, list, &near)
    }

    fn nvmlDeviceGetP2PStatus(first: Handle, second: Handle, capability: c_uint, out: Out<c_uint>) |call| {
        let (first, second) = (call.gpu(first)?, call.gpu(second)?);
        if first.index == second.index {
            return Err(INVALID_ARGUMENT);
        }
        let linked = first.gpu.nvlink.count > 0 && second.gpu.nvlink.count > 0;
        let consumer = matches!(first.gpu.brand, Brand::Geforce | Brand::GeforceRtx);
        let possible = match capability {
            sys::nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_READ
            | sys::nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_WRITE => linked || !consumer,
            sys::nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_NVLINK
            | sys::nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_ATOMICS => linked,
            sys::nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_PCI => !consumer,
            _ => return Err(INVALID_ARGUMENT),
        };
        out.set(if possible {
            sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_OK
        } else {
            sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_NOT_SUPPORTED
        })
    }

    fn nvmlDeviceGetNumaNodeId(device: Handle, out: Out<c_uint>) |call| {
        let _ = out;
        call.gpu(device)?;
        // Reported only where the GPU's memory is a NUMA node of its own (Grace Hopper).
        Err(NOT_SUPPORTED)
    }

    fn nvmlDeviceGetCpuAffinity(device: Handle, size: c_uint, set: Out<c_ulong>) |call| {
        call.gpu(device)?;
        // Every CPU of this machine: it is the real one that runs the programs.
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        for word in 0..size as usize {
            let bits = cpus.saturating_sub(word * 64).min(64);
            let mask = if bits == 64 { c_ulong::MAX } else { (1 << bits) - 1 };
            set.element(word).set(mask)?;
        }
        Ok(())
    }

    fn nvmlDeviceGetMemoryAffinity(device: Handle, size: c_uint, set: Out<c_ulong>, scope: c_uint) |call| {
        let _ = scope;
        let device = call.gpu(device)?;
        for word in 0..size as usize {
            set.element(word).set(0)?;
        }
        set.set(1 << numa_node(device.index, call.scenario.gpus.len()))
    }
}
