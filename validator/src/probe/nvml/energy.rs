//! The energy counter of one GPU, for a worker that compares two ways of working it.

use std::ffi::OsStr;

use super::calls::Calls;
use super::driver::NvmlLibrary;
use super::protocol::Output;
use crate::probe::libraries;

/// Calls `body` with a function that reads how much energy the GPU with this UUID has used, in joules; it gives `None` where
/// that cannot be read.
pub(crate) fn with_energy_counter<T>(
    uuid: &str,
    body: impl FnOnce(&dyn Fn() -> Option<f64>) -> T,
) -> T {
    let output = Output::quiet();
    let calls = Calls::new(None, &[], &output);
    let open = |name: &str| NvmlLibrary::load(OsStr::new(name));
    let loaded = libraries::load("libnvidia-ml.so.1", open);
    let Some(nvml) = loaded
        .ok()
        .map(|it| it.library)
        .filter(|nvml| nvml.initialize(&calls).is_ok())
    else {
        return body(&|| None);
    };
    let count = nvml.device_count(&calls).unwrap_or_default();
    let device = (0..count)
        .filter_map(|index| nvml.device(index, &calls).ok())
        .find(|device| device.uuid().is_ok_and(|it| it == uuid));
    #[expect(clippy::cast_precision_loss, reason = "fewer than 2^53 millijoules")]
    body(&|| {
        let millijoules = device.as_ref()?.total_energy_mj().ok()?;
        Some(millijoules as f64 / 1000.0)
    })
}
