//! Registration with the NVSwitch fabric.

use super::call::{ARGUMENT_VERSION_MISMATCH, Handle, Out, nvml, supported, version_of};
use crate::gpu::{Fabric, FabricState};
use nvml_wrapper_sys::bindings as sys;

fn state(fabric: &Fabric) -> sys::nvmlGpuFabricState_t {
    let state = match fabric.state {
        FabricState::NotSupported => sys::NVML_GPU_FABRIC_STATE_NOT_SUPPORTED,
        FabricState::NotStarted => sys::NVML_GPU_FABRIC_STATE_NOT_STARTED,
        FabricState::InProgress => sys::NVML_GPU_FABRIC_STATE_IN_PROGRESS,
        FabricState::Completed => sys::NVML_GPU_FABRIC_STATE_COMPLETED,
    };
    u8::try_from(state).unwrap_or(0)
}

/// A UUID without its dashes, as bytes.
fn cluster_uuid(fabric: &Fabric) -> [u8; 16] {
    let digits: String = fabric.cluster_uuid.chars().filter(|c| *c != '-').collect();
    u128::from_str_radix(&digits, 16).unwrap_or(0).to_be_bytes()
}

/// Two bits a property: not reported, true, false. The configuration has four: not reported, right,
/// and the faults.
fn health_mask(fabric: &Fabric) -> u32 {
    let bits = |value: Option<bool>| match value {
        None => 0,
        Some(true) => 1,
        Some(false) => 2,
    };
    // A wrong configuration is reported as "insufficient NVLinks".
    let configuration = match fabric.incorrect_configuration {
        None => sys::NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NOT_SUPPORTED,
        Some(false) => sys::NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NONE,
        Some(true) => sys::NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_INSUFFICIENT_NVLINKS,
    };
    bits(fabric.degraded_bandwidth) << sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW
        | bits(fabric.route_recovery) << sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY
        | bits(fabric.route_unhealthy) << sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY
        | bits(fabric.access_timeout_recovery)
            << sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY
        | configuration << sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION
}

fn health_summary(fabric: &Fabric) -> u8 {
    let told = [
        fabric.degraded_bandwidth,
        fabric.route_recovery,
        fabric.route_unhealthy,
        fabric.access_timeout_recovery,
        fabric.incorrect_configuration,
    ];
    let summary = if told.iter().all(Option::is_none) {
        sys::NVML_GPU_FABRIC_HEALTH_SUMMARY_NOT_SUPPORTED
    } else if told.contains(&Some(true)) {
        sys::NVML_GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY
    } else {
        sys::NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY
    };
    u8::try_from(summary).unwrap_or(0)
}

nvml! {
    fn nvmlDeviceGetGpuFabricInfo(device: Handle, out: Out<sys::nvmlGpuFabricInfo_t>) |call| {
        let fabric = supported(call.gpu(device)?.gpu.fabric.as_ref())?;
        out.set(sys::nvmlGpuFabricInfo_t {
            clusterUuid: cluster_uuid(fabric),
            status: fabric.status,
            cliqueId: fabric.clique_id,
            state: state(fabric),
        })
    }

    fn nvmlDeviceGetGpuFabricInfoV(device: Handle, out: Out<sys::nvmlGpuFabricInfo_v3_t>) |call| {
        let fabric = supported(call.gpu(device)?.gpu.fabric.as_ref())?;
        let second = version_of::<sys::nvmlGpuFabricInfo_v2_t>(2);
        let third = version_of::<sys::nvmlGpuFabricInfo_v3_t>(3);
        let value = sys::nvmlGpuFabricInfo_v3_t {
            version: third,
            clusterUuid: cluster_uuid(fabric),
            status: fabric.status,
            cliqueId: fabric.clique_id,
            state: state(fabric),
            healthMask: health_mask(fabric),
            healthSummary: health_summary(fabric),
        };
        match out.cast::<u32>().get()? {
            given if given == third => out.set(value),
            // The second version ends where the third has its summary.
            given if given == second => out.cast().set(sys::nvmlGpuFabricInfo_v2_t {
                version: second,
                clusterUuid: value.clusterUuid,
                status: value.status,
                cliqueId: value.cliqueId,
                state: value.state,
                healthMask: value.healthMask,
            }),
            _ => Err(ARGUMENT_VERSION_MISMATCH),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_is_told_in_nvmls_bits() {
        let untold = Fabric::default();
        assert_eq!((health_mask(&untold), health_summary(&untold)), (0, 0));
        let ill = Fabric {
            degraded_bandwidth: Some(true),
            route_recovery: Some(false),
            incorrect_configuration: Some(false),
            ..Fabric::default()
        };
        assert_eq!(health_mask(&ill), 1 | 2 << 2 | 1 << 8);
        assert_eq!(
            u32::from(health_summary(&ill)),
            sys::NVML_GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY
        );
    }
}
