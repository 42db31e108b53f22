//! The device of a GPU that a worker uses, and the device node that it may open.

use std::ffi::OsString;

use validator_core::facts::{GpuFacts, Reading};

use crate::probe::ProbeOptions;
use crate::worker::Nodes;

/// Arguments that keep a worker to this GPU's device node.
pub(crate) fn own_node(gpu: &GpuFacts, options: &ProbeOptions) -> Vec<OsString> {
    let minor = gpu.minor_number.value();
    minor.map_or_else(Vec::new, |it| Nodes::of(*it, options.sysroot.as_deref()))
}

/// The GPU itself, or its first MIG device.
pub(crate) fn device_to_use<'a>(gpu: &'a GpuFacts, uuid: &'a str) -> Result<&'a str, String> {
    if !gpu.mig.value().is_some_and(|mig| mig.current) {
        return Ok(uuid);
    }
    match &gpu.mig_devices {
        Reading::Value(devices) => devices
            .first()
            .map(|device| device.uuid.as_str())
            .ok_or_else(|| "the GPU is in MIG mode and has no MIG devices".to_owned()),
        Reading::NotRead(reason) => Err(format!("its MIG devices could not be read: {reason}")),
        Reading::NotSupported => Err("its MIG devices could not be read".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use validator_core::facts::{MigDevice, MigMode};

    #[test]
    fn a_gpu_in_mig_mode_is_worked_through_its_first_device() {
        let mut gpu = GpuFacts::default();
        assert_eq!(device_to_use(&gpu, "GPU-a"), Ok("GPU-a"));
        gpu.mig = Reading::Value(MigMode {
            current: true,
            pending: true,
        });
        assert!(device_to_use(&gpu, "GPU-a").is_err());
        gpu.mig_devices = Reading::Value(vec![MigDevice {
            uuid: "MIG-b".to_owned(),
            ..MigDevice::default()
        }]);
        assert_eq!(device_to_use(&gpu, "GPU-a"), Ok("MIG-b"));
    }
}
