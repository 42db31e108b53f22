//! NVML queries of a worker that works one GPU.

use std::ffi::OsStr;

use super::calls::Calls;
use super::library::{Device, NvmlLibrary};
use super::protocol::Output;
use super::read::{DriverNumber, GpuReader};
use crate::driver_libraries;
use validator_core::facts::{GpuFacts, GpuProcess};

/// Calls `body` with the GPU that has this UUID, and the driver's version; `None` where NVML does
/// not know it or does not work.
pub(super) fn with_own_gpu<T>(
    uuid: &str,
    body: impl FnOnce(Option<Device<'_>>, DriverNumber) -> T,
) -> T {
    let output = Output::quiet();
    let calls = Calls::new(None, &[], &output);
    let open = |name: &str| NvmlLibrary::load(OsStr::new(name));
    let loaded = driver_libraries::load("libnvidia-ml.so.1", open);
    let nvml = loaded
        .ok()
        .map(|it| it.library)
        .filter(|nvml| nvml.initialize(&calls).is_ok());
    let version = nvml.as_ref().and_then(|it| it.driver_version(&calls).ok());
    let device = nvml.as_ref().and_then(|nvml| {
        let count = nvml.device_count(&calls).unwrap_or_default();
        (0..count)
            .filter_map(|index| nvml.device(index, &calls).ok())
            .find(|device| device.uuid().is_ok_and(|it| it == uuid))
    });
    let driver = version.as_deref().map(DriverNumber::of);
    body(device, driver.unwrap_or_default())
}

/// Who uses the GPU with this UUID at the moment, and how much of its memory; the other facts of it
/// are not read. `None` as above, and for MIG devices.
pub(crate) fn users_of(uuid: &str) -> Option<GpuFacts> {
    with_own_gpu(uuid, |device, driver| {
        let output = Output::quiet();
        let reader = GpuReader {
            device: &device?,
            index: 0,
            output: &output,
            driver,
        };
        Some(reader.users())
    })
}

/// Calls `on_seen` with the processes of others on the GPU with this UUID, again and again, until
/// it returns false. Returns at once where NVML does not know the GPU.
pub(crate) fn watch_processes_of_others(
    uuid: &str,
    mut on_seen: impl FnMut(Vec<GpuProcess>) -> bool,
) {
    with_own_gpu(uuid, |device, driver| {
        let Some(device) = &device else { return };
        let output = Output::quiet();
        let reader = GpuReader {
            device,
            index: 0,
            output: &output,
            driver,
        };
        while on_seen(reader.processes_beside_a_worker()) {}
    });
}
