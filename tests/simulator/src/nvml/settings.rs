//! Functions that change a setting or the node's configuration.
//!
//! A simulated node is used as an ordinary user uses a real one: every change is refused for lack
//! of permission, so that no program under test can turn an ill node into a healthy one. Scenarios
//! change settings.

use super::call::{self, Answer, NO_PERMISSION};
use nvml_wrapper_sys::bindings as sys;

macro_rules! refused {
    ($($name:ident)*) => {$(
        #[allow(unsafe_code, reason = "exported under NVML's name")]
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> sys::nvmlReturn_t {
            refuse(stringify!($name))
        }
    )*};
}

/// The arguments do not matter, and a C caller may pass more of them than a function takes.
fn refuse(function: &'static str) -> sys::nvmlReturn_t {
    let refused: Answer = Err(NO_PERMISSION);
    call::answer(function, |_| refused)
}

refused! {
    nvmlComputeInstanceDestroy
    nvmlDeviceClearAccountingPids
    nvmlDeviceClearCpuAffinity
    nvmlDeviceClearEccErrorCounts
    nvmlDeviceCreateGpuInstance
    nvmlDeviceCreateGpuInstanceWithPlacement
    nvmlDeviceDiscoverGpus
    nvmlDeviceModifyDrainState
    nvmlDeviceRemoveGpu
    nvmlDeviceRemoveGpu_v2
    nvmlDeviceResetApplicationsClocks
    nvmlDeviceResetGpuLockedClocks
    nvmlDeviceResetMemoryLockedClocks
    nvmlDeviceResetNvLinkErrorCounters
    nvmlDeviceSetAccountingMode
    nvmlDeviceSetApplicationsClocks
    nvmlDeviceSetComputeMode
    nvmlDeviceSetCpuAffinity
    nvmlDeviceSetEccMode
    nvmlDeviceSetGpuLockedClocks
    nvmlDeviceSetMemoryLockedClocks
    nvmlDeviceSetMigMode
    nvmlDeviceSetPersistenceMode
    nvmlDeviceSetPowerManagementLimit
    nvmlDeviceSetPowerManagementLimit_v2
    nvmlDeviceSetVirtualizationMode
    nvmlGpuInstanceCreateComputeInstance
    nvmlGpuInstanceCreateComputeInstanceWithPlacement
    nvmlGpuInstanceDestroy
    nvmlSystemSetNvlinkBwMode
}
