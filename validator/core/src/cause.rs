//! Kinds of root causes, and the actions that are recommended for them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What to do about a root cause. The enum is closed: automation may match on it.
///
/// The order is the order of precedence: of several actions for one cause the last one wins.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum RecommendedAction {
    /// Validate again later: the node is in use, or the run did not complete.
    Wait,
    /// Install, configure or start software on the host.
    FixSoftware,
    /// Take the node out of service and investigate.
    Drain,
    /// Drain the GPU and reset it: `nvidia-smi --gpu-reset`.
    Reset,
    /// Drain the node and reboot it. A cloud instance is stopped and started.
    Reboot,
    /// Replace the hardware, after the vendor's diagnostics.
    Rma,
}

impl RecommendedAction {
    /// Every action, in the order of precedence.
    pub const ALL: [Self; 6] = [
        Self::Wait,
        Self::FixSoftware,
        Self::Drain,
        Self::Reset,
        Self::Reboot,
        Self::Rma,
    ];

    /// Its name for programs: `fix_software`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wait => "wait",
            Self::FixSoftware => "fix_software",
            Self::Drain => "drain",
            Self::Reset => "reset",
            Self::Reboot => "reboot",
            Self::Rma => "rma",
        }
    }

    /// As people read it.
    pub fn words(self) -> &'static str {
        match self {
            Self::Wait => "wait",
            Self::FixSoftware => "fix software",
            Self::Drain => "drain",
            Self::Reset => "reset",
            Self::Reboot => "reboot",
            Self::Rma => "RMA",
        }
    }

    /// One sentence for a person.
    pub fn sentence(self) -> &'static str {
        match self {
            Self::Wait => "validate again later",
            Self::FixSoftware => "fix the software or the configuration of the host",
            Self::Drain => "drain the node and investigate",
            Self::Reset => "drain the GPU and reset it (nvidia-smi --gpu-reset)",
            Self::Reboot => "drain and reboot the node (on a cloud, stop and start the instance)",
            Self::Rma => "drain the node, run the vendor's diagnostics and replace the hardware",
        }
    }
}

impl std::fmt::Display for RecommendedAction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The kind of a root cause. The order is the rank: an earlier kind explains more of a broken node.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum CauseKind {
    /// The kernel module or a driver library is missing, mismatched or does not initialise.
    Driver,
    /// A GPU is lost, has fallen off the bus or is absent.
    GpuLost,
    /// The GPU's firmware or a microcontroller stopped.
    GpuFirmware,
    /// Memory of the GPU: ECC errors, row remapping, page retirement, repairs.
    GpuMemory,
    /// The GPU computed wrong results.
    WrongResults,
    /// Other hardware of the GPU or its board.
    GpuHardware,
    /// NVLink, NVSwitch, fabric manager.
    Nvlink,
    /// The PCIe link or a port above the GPU.
    Pcie,
    /// The driver requests a recovery action, and nothing else explains it.
    RecoveryRequested,
    /// Power or temperature.
    PowerAndThermal,
    /// Throughput, clocks or a straggler.
    Performance,
    /// A kernel or a burn ended early.
    LoadFailed,
    /// Modes and settings of the GPU.
    GpuConfiguration,
    /// Packages, services and settings of the host.
    HostSoftware,
    /// The kubelet, the device plugin, the node object.
    Kubernetes,
    /// The disk of an image.
    Image,
    /// The GPU is in use.
    InUse,
    /// A value could not be read.
    NotRead,
}

impl CauseKind {
    /// Its name in every report: `gpu_lost`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Driver => "driver",
            Self::GpuLost => "gpu_lost",
            Self::GpuFirmware => "gpu_firmware",
            Self::GpuMemory => "gpu_memory",
            Self::WrongResults => "wrong_results",
            Self::GpuHardware => "gpu_hardware",
            Self::Nvlink => "nvlink",
            Self::Pcie => "pcie",
            Self::RecoveryRequested => "recovery_requested",
            Self::PowerAndThermal => "power_and_thermal",
            Self::Performance => "performance",
            Self::LoadFailed => "load_failed",
            Self::GpuConfiguration => "gpu_configuration",
            Self::HostSoftware => "host_software",
            Self::Kubernetes => "kubernetes",
            Self::Image => "image",
            Self::InUse => "in_use",
            Self::NotRead => "not_read",
        }
    }

    /// What it is, as a heading.
    pub fn title(self) -> &'static str {
        match self {
            Self::Driver => "the driver does not work",
            Self::GpuLost => "a GPU is lost or absent",
            Self::GpuFirmware => "GPU firmware failed",
            Self::GpuMemory => "GPU memory is faulty",
            Self::WrongResults => "a GPU computes wrong results",
            Self::GpuHardware => "GPU hardware reports errors",
            Self::Nvlink => "NVLink or the fabric is faulty",
            Self::Pcie => "a PCIe link is faulty",
            Self::RecoveryRequested => "the driver requests a recovery action",
            Self::PowerAndThermal => "power or cooling limits a GPU",
            Self::Performance => "a GPU is slow",
            Self::LoadFailed => "a GPU did not complete its load",
            Self::GpuConfiguration => "a GPU is configured differently",
            Self::HostSoftware => "the host's software needs a change",
            Self::Kubernetes => "Kubernetes does not offer the GPUs as required",
            Self::Image => "the image is not complete",
            Self::InUse => "GPUs are in use",
            Self::NotRead => "values could not be read",
        }
    }

    /// Whether a GPU or its board is replaced when a cause of this kind returns.
    pub(crate) fn is_hardware(self) -> bool {
        matches!(
            self,
            Self::GpuLost
                | Self::GpuFirmware
                | Self::GpuMemory
                | Self::WrongResults
                | Self::GpuHardware
                | Self::Nvlink
                | Self::Pcie
        )
    }

    /// Whether a cause of this kind explains evidence of kind `other` on the same GPU, or of the
    /// whole host where the cause is the host's.
    pub(crate) fn explains(self, other: Self) -> bool {
        use CauseKind::{
            Driver, GpuConfiguration, GpuFirmware, GpuHardware, GpuLost, GpuMemory, InUse,
            Kubernetes, LoadFailed, NotRead, Nvlink, Performance, PowerAndThermal,
            RecoveryRequested,
        };
        match self {
            // Without a driver, and on a GPU that is gone, nothing else can be right.
            Driver => !matches!(other, Self::HostSoftware | Self::Image | Self::Pcie),
            GpuLost => true,
            GpuFirmware => matches!(
                other,
                LoadFailed | RecoveryRequested | NotRead | Performance | GpuHardware
            ),
            GpuMemory => matches!(
                other,
                LoadFailed | RecoveryRequested | NotRead | GpuHardware
            ),
            GpuHardware | Self::WrongResults => {
                matches!(other, LoadFailed | RecoveryRequested | NotRead)
            }
            Nvlink => matches!(other, LoadFailed | RecoveryRequested | NotRead),
            Self::Pcie => matches!(other, LoadFailed | NotRead),
            PowerAndThermal => matches!(other, Performance),
            GpuConfiguration => matches!(other, Kubernetes),
            InUse => matches!(other, Performance | LoadFailed | NotRead),
            _ => matches!(other, NotRead),
        }
    }
}
