//! The GPU's identity and its modes.

use validator_core::facts::{
    ComputeCapability, ComputeMode, EccMode, MigDevice, MigMode, RecoveryAction,
};

use super::super::calls::Called;
use super::super::library::PciIdentity;
use super::super::status;
use super::GpuReader;

const FIELD_GPU_RECOVERY_ACTION: u32 = 230;

impl GpuReader<'_> {
    pub(super) fn identity(&self) {
        let device = self.device;
        self.read_uuid();
        self.pci();
        self.report("name", device.name());
        self.report("serial", device.serial());
        self.report("minor_number", device.minor_number());
        self.report("compute_capability", self.compute_capability());
        self.report("vbios_version", device.vbios_version());
        self.report("board_part_number", device.board_part_number());
        self.report("gsp_firmware_version", device.gsp_firmware_version());
        self.report("virtualization_mode", self.virtualization_mode());
    }

    pub(super) fn modes(&self) {
        let device = self.device;
        self.report(
            "persistence_mode",
            device.persistence_mode().map(|it| it != 0),
        );
        self.report("compute_mode", device.compute_mode().map(compute_mode));
        self.report("ecc_mode", self.ecc_mode());
        let mig = self.mig_mode();
        let mig_is_on = mig.as_ref().is_ok_and(|it| it.current);
        let mig_is_off = mig.as_ref().is_ok_and(|it| !it.current);
        self.report("mig", mig.clone());
        match mig {
            Ok(_) if mig_is_on => self.report("mig_devices", self.mig_devices()),
            Ok(_) if mig_is_off => self.report("mig_devices", Ok(Vec::<MigDevice>::new())),
            Ok(_) => {}
            Err(failure) => self.report("mig_devices", Err::<Vec<MigDevice>, _>(failure)),
        }
    }

    fn pci(&self) {
        match self.device.pci() {
            Ok(pci) => {
                self.report("pci_address", Ok(pci_address(&pci)));
                let device_id = u16::try_from(pci.device_id >> 16).unwrap_or_default();
                self.report("pci_device_id", Ok(device_id));
                self.report("pci_subsystem_id", Ok(pci.subsystem_id));
            }
            Err(failure) => {
                self.report("pci_address", Err::<String, _>(failure.clone()));
                self.report("pci_device_id", Err::<u16, _>(failure.clone()));
                self.report("pci_subsystem_id", Err::<u32, _>(failure));
            }
        }
    }

    fn compute_capability(&self) -> Called<ComputeCapability> {
        let (major, minor) = self.device.compute_capability()?;
        Ok(ComputeCapability {
            major: u32::try_from(major).unwrap_or_default(),
            minor: u32::try_from(minor).unwrap_or_default(),
        })
    }

    fn virtualization_mode(&self) -> Called<String> {
        // Source: nvml.h, nvmlGpuVirtualizationMode_t.
        self.device.virtualization_mode().map(|mode| match mode {
            0 => "none".to_owned(),
            1 => "pass_through".to_owned(),
            2 => "vgpu".to_owned(),
            3 => "host_vgpu".to_owned(),
            4 => "host_vsga".to_owned(),
            other => format!("unknown ({other})"),
        })
    }

    fn ecc_mode(&self) -> Called<EccMode> {
        let (current, pending) = self.device.ecc_mode()?;
        Ok(EccMode {
            current: current != 0,
            pending: pending != 0,
        })
    }

    fn mig_mode(&self) -> Called<MigMode> {
        let (current, pending) = self.device.mig_mode()?;
        Ok(MigMode {
            current: current != 0,
            pending: pending != 0,
        })
    }

    fn mig_devices(&self) -> Called<Vec<MigDevice>> {
        let mut devices = Vec::new();
        for index in 0..self.device.max_mig_device_count()? {
            let device = match self.device.mig_device(index) {
                Ok(device) => device,
                Err(failure) if failure.status() == Some(status::ERROR_NOT_FOUND) => {
                    continue;
                }
                Err(failure) => return Err(failure),
            };
            devices.push(MigDevice {
                uuid: device.uuid()?,
                name: device.name()?,
                memory_total_bytes: device.memory()?.total,
            });
        }
        Ok(devices)
    }

    pub(super) fn recovery_action(&self) -> Called<RecoveryAction> {
        let action = self.field(FIELD_GPU_RECOVERY_ACTION)?;
        Ok(recovery_action(action))
    }
}

fn pci_address(pci: &PciIdentity) -> String {
    format!("{:04x}:{:02x}:{:02x}.0", pci.domain, pci.bus, pci.device)
}

// Source: nvml.h, nvmlComputeMode_t.
pub(super) fn compute_mode(number: u32) -> ComputeMode {
    match number {
        0 => ComputeMode::Default,
        1 => ComputeMode::ExclusiveThread,
        2 => ComputeMode::Prohibited,
        3 => ComputeMode::ExclusiveProcess,
        other => ComputeMode::Unknown(other),
    }
}

// Source: nvml.h, nvmlDeviceGpuRecoveryAction_t.
fn recovery_action(number: u64) -> RecoveryAction {
    match number {
        0 => RecoveryAction::None,
        1 => RecoveryAction::GpuReset,
        2 => RecoveryAction::NodeReboot,
        3 => RecoveryAction::DrainP2p,
        4 => RecoveryAction::DrainAndReset,
        other => RecoveryAction::Unknown(u32::try_from(other).unwrap_or(u32::MAX)),
    }
}
