//! One GPU, as NVML describes it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Reading;

/// The driver as a whole, as NVML reports it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NvmlFacts {
    /// `nvmlInit` worked. `NotRead` has the reason: no library, a missing symbol, a driver that
    /// does not answer.
    pub initialized: Reading<bool>,
    /// The file that was loaded, where the loader reports it.
    pub library_path: Option<String>,
    /// The loader does not find `libnvidia-ml.so.1` by its name, as programs ask for it; it was
    /// loaded by this path instead.
    #[serde(default)]
    pub loaded_by_path: Option<String>,
    /// The loader's error for that name, where it found a file that cannot be loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unloadable: Option<String>,
    /// `nvmlSystemGetDriverVersion`: `580.159.04`.
    pub driver_version: Reading<String>,
    /// `nvmlSystemGetNVMLVersion`: `13.580.159.04`.
    pub nvml_version: Reading<String>,
    /// `nvmlSystemGetCudaDriverVersion`: 1000 x major + 10 x minor.
    pub cuda_driver_version: Reading<u32>,
    /// `nvmlDeviceGetCount`; [`super::Facts::gpus`] may hold fewer when the probe was cut short.
    pub gpu_count: Reading<u32>,
    /// How the probe process ended, when it did not end well:
    /// `killed after 5 s in nvmlDeviceGetTemperature`.
    pub probe_trouble: Vec<String>,
}

/// One GPU. Every reading stands for itself: one that hangs or fails takes no other with it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GpuFacts {
    /// `GPU-8f0c…`.
    pub uuid: Reading<String>,
    /// `0000:3b:00.0`, lower case, four digits of domain.
    pub pci_address: Reading<String>,
    /// NVML answered `NVML_ERROR_GPU_IS_LOST` (or that a reset is required) to this call.
    pub lost: Option<String>,
    pub name: Reading<String>,
    pub serial: Reading<String>,
    /// Minor number: `/dev/nvidia<minor>`.
    pub minor_number: Reading<u32>,
    /// Device id without the vendor: 0x2335.
    pub pci_device_id: Reading<u16>,
    /// Subsystem (device << 16 | vendor), as NVML gives it.
    pub pci_subsystem_id: Reading<u32>,
    pub compute_capability: Reading<ComputeCapability>,
    pub vbios_version: Reading<String>,
    pub board_part_number: Reading<String>,
    /// `NotSupported` without a GSP.
    pub gsp_firmware_version: Reading<String>,
    pub memory: Reading<MemoryUse>,
    pub persistence_mode: Reading<bool>,
    pub compute_mode: Reading<ComputeMode>,
    pub mig: Reading<MigMode>,
    /// MIG devices, when MIG is on; by UUID.
    pub mig_devices: Reading<Vec<MigDevice>>,
    pub ecc_mode: Reading<EccMode>,
    /// Since the driver was loaded.
    pub ecc_volatile: Reading<EccErrors>,
    /// Over the GPU's life.
    pub ecc_aggregate: Reading<EccErrors>,
    /// The lifetime SRAM error threshold is exceeded (`nvmlDeviceGetSramEccErrorStatus`).
    pub sram_threshold_exceeded: Reading<bool>,
    /// Ampere and newer.
    pub row_remapping: Reading<RowRemapping>,
    /// Before Ampere.
    pub retired_pages: Reading<RetiredPages>,
    /// `nvmlDeviceGetRepairStatus`; newer drivers.
    pub repair_status: Reading<RepairStatus>,
    /// The driver found memory that it cannot repair (`NVML_FI_DEV_GET_GPU_UNREPAIRABLE_MEMORY` or
    /// the like).
    pub unrepairable_memory: Reading<bool>,
    /// `nvmlDeviceValidateInforom`: true when the checksum is right.
    pub inforom_valid: Reading<bool>,
    pub inforom_image_version: Reading<String>,
    pub recovery_action: Reading<RecoveryAction>,
    pub pcie: Reading<PcieLink>,
    /// `nvmlDeviceGetPcieReplayCounter`, since the driver was loaded.
    pub pcie_replays: Reading<u64>,
    /// One entry a link that the GPU has; `NotSupported` without NVLink.
    pub nvlinks: Reading<Vec<NvLink>>,
    /// `NotSupported` without a fabric that must be registered.
    pub fabric: Reading<FabricState>,
    pub clocks: Reading<Clocks>,
    /// `nvmlDeviceGetCurrentClocksEventReasons`: a bit mask, see [`ClocksEventReasons`].
    pub clocks_event_reasons: Reading<ClocksEventReasons>,
    /// Time lost to each reason since the driver was loaded.
    pub violations: Reading<ViolationTimes>,
    pub temperature: Reading<Temperature>,
    pub power: Reading<Power>,
    pub utilization: Reading<Utilization>,
    /// `P0` is 0.
    pub performance_state: Reading<u32>,
    /// Compute and graphics processes together, without this validator's own.
    pub processes: Reading<Vec<GpuProcess>>,
    /// `nvmlDeviceGetVirtualizationMode`: `none`, `pass_through`, `vgpu`, `host_vgpu`, `host_vsga`.
    pub virtualization_mode: Reading<String>,
    /// Readings that were given up because their NVML call did not return in time, by call name.
    pub calls_hung: Vec<String>,
}

#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(deny_unknown_fields)]
pub struct ComputeCapability {
    pub major: u32,
    pub minor: u32,
}

impl std::fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Frame buffer, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MemoryUse {
    pub total_bytes: u64,
    /// Kept by the driver and firmware; `None` from the older call, which counts it as used.
    pub reserved_bytes: Option<u64>,
    pub used_bytes: u64,
    pub free_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ComputeMode {
    Default,
    ExclusiveThread,
    Prohibited,
    ExclusiveProcess,
    /// A number that this version has no name for.
    Unknown(u32),
}

impl std::fmt::Display for ComputeMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::ExclusiveThread => f.write_str("exclusive_thread"),
            Self::Prohibited => f.write_str("prohibited"),
            Self::ExclusiveProcess => f.write_str("exclusive_process"),
            Self::Unknown(number) => write!(f, "unknown ({number})"),
        }
    }
}

/// A mode that a reset or reboot changes from `current` to `pending`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EccMode {
    pub current: bool,
    pub pending: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MigMode {
    pub current: bool,
    pub pending: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MigDevice {
    /// `MIG-…`.
    pub uuid: String,
    pub name: String,
    pub memory_total_bytes: u64,
}

/// ECC error counts. A count that this GPU does not keep is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EccErrors {
    pub sram_correctable: Option<u64>,
    pub sram_uncorrectable: Option<u64>,
    pub dram_correctable: Option<u64>,
    pub dram_uncorrectable: Option<u64>,
    /// `nvmlDeviceGetTotalEccErrors`, all locations.
    pub total_correctable: Option<u64>,
    pub total_uncorrectable: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RowRemapping {
    pub correctable_rows: u32,
    pub uncorrectable_rows: u32,
    /// A remapping waits for a reset of the GPU.
    pub pending: bool,
    /// A remapping failed: no spare row was left.
    pub failure: bool,
    /// Banks by how many spare rows they have left; `None` where the driver does not say.
    pub histogram: Option<RowRemapperHistogram>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RowRemapperHistogram {
    pub max: u32,
    pub high: u32,
    pub partial: u32,
    pub low: u32,
    pub none: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RetiredPages {
    pub single_bit: u32,
    pub double_bit: u32,
    /// A retirement waits for a reset.
    pub pending: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RepairStatus {
    pub channel_repair_pending: bool,
    pub tpc_repair_pending: bool,
}

/// `nvmlDeviceGetGpuRecoveryAction` / `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RecoveryAction {
    None,
    GpuReset,
    NodeReboot,
    DrainP2p,
    DrainAndReset,
    /// A number that this version has no name for.
    Unknown(u32),
}

/// The PCIe link by NVML. An idle GPU may lower the generation to save power, never the width.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PcieLink {
    pub current_generation: u32,
    pub current_width: u32,
    /// What GPU and slot can do together (`nvmlDeviceGetMaxPcieLinkGeneration`).
    pub max_generation: u32,
    pub max_width: u32,
    /// What the GPU itself can do (`nvmlDeviceGetGpuMaxPcieLinkGeneration`).
    pub gpu_max_generation: Option<u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NvLink {
    pub link: u32,
    pub active: bool,
    /// Megabytes per second in one direction.
    pub speed_mbps: Option<u64>,
    /// Counters since the driver was loaded; `None` where this GPU does not keep one.
    pub crc_flit_errors: Option<u64>,
    pub crc_data_errors: Option<u64>,
    pub replay_errors: Option<u64>,
    pub recovery_errors: Option<u64>,
    /// NVLink 5: effective and symbol errors, link-down count.
    pub symbol_errors: Option<u64>,
    pub effective_errors: Option<u64>,
}

/// `nvmlDeviceGetGpuFabricInfo`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FabricState {
    /// `not_started`, `in_progress`, `completed`.
    pub state: String,
    /// The status of a completed registration: `success` or the error's name or number.
    pub status: String,
    pub clique_id: Option<u32>,
    pub cluster_uuid: Option<String>,
    /// The health mask's unhealthy parts in words: `degraded bandwidth`,
    /// `route recovery in progress`; `None` where the driver gives no mask.
    pub unhealthy: Option<Vec<String>>,
}

/// `NVML_CLOCKS_EVENT_REASON_*`, a bit mask: several reasons may hold at once, so it is never
/// compared for equality.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct ClocksEventReasons(pub u64);

impl ClocksEventReasons {
    // Source of the bits: nvml.h, nvmlClocksEventReasons.
    pub const GPU_IDLE: u64 = 0x1;
    pub const APPLICATIONS_CLOCKS_SETTING: u64 = 0x2;
    pub const SW_POWER_CAP: u64 = 0x4;
    pub const HW_SLOWDOWN: u64 = 0x8;
    pub const SYNC_BOOST: u64 = 0x10;
    pub const SW_THERMAL_SLOWDOWN: u64 = 0x20;
    pub const HW_THERMAL_SLOWDOWN: u64 = 0x40;
    pub const HW_POWER_BRAKE_SLOWDOWN: u64 = 0x80;
    pub const DISPLAY_CLOCKS_SETTING: u64 = 0x100;
    /// Heat or the power supply hold the clocks down, which no load alone does.
    pub const HEAT_OR_POWER_SUPPLY: u64 = Self::HW_SLOWDOWN
        | Self::SW_THERMAL_SLOWDOWN
        | Self::HW_THERMAL_SLOWDOWN
        | Self::HW_POWER_BRAKE_SLOWDOWN;

    pub fn contains(self, bits: u64) -> bool {
        self.0 & bits != 0
    }

    /// The names of all bits that are set, in NVIDIA's terms; unknown bits as hex.
    pub fn names(self) -> Vec<String> {
        const NAMES: [(u64, &str); 9] = [
            (ClocksEventReasons::GPU_IDLE, "gpu_idle"),
            (
                ClocksEventReasons::APPLICATIONS_CLOCKS_SETTING,
                "applications_clocks_setting",
            ),
            (ClocksEventReasons::SW_POWER_CAP, "sw_power_cap"),
            (ClocksEventReasons::HW_SLOWDOWN, "hw_slowdown"),
            (ClocksEventReasons::SYNC_BOOST, "sync_boost"),
            (
                ClocksEventReasons::SW_THERMAL_SLOWDOWN,
                "sw_thermal_slowdown",
            ),
            (
                ClocksEventReasons::HW_THERMAL_SLOWDOWN,
                "hw_thermal_slowdown",
            ),
            (
                ClocksEventReasons::HW_POWER_BRAKE_SLOWDOWN,
                "hw_power_brake_slowdown",
            ),
            (
                ClocksEventReasons::DISPLAY_CLOCKS_SETTING,
                "display_clocks_setting",
            ),
        ];
        let known: u64 = NAMES.iter().map(|(bit, _)| bit).sum();
        let mut names: Vec<String> = NAMES
            .iter()
            .filter(|(bit, _)| self.contains(*bit))
            .map(|(_, name)| (*name).to_owned())
            .collect();
        if self.0 & !known != 0 {
            names.push(format!("{:#x}", self.0 & !known));
        }
        names
    }
}

/// Nanoseconds for which clocks were held down, by reason, since the driver was loaded
/// (`nvmlDeviceGetViolationStatus`, or the clocks-event-reason counters of newer drivers).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ViolationTimes {
    pub power_ns: Option<u64>,
    pub thermal_ns: Option<u64>,
    pub hw_thermal_ns: Option<u64>,
    pub hw_power_brake_ns: Option<u64>,
    pub reliability_ns: Option<u64>,
    pub sync_boost_ns: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Clocks {
    pub sm_mhz: u32,
    pub memory_mhz: u32,
    pub max_sm_mhz: Option<u32>,
    pub max_memory_mhz: Option<u32>,
}

/// Degrees Celsius.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Temperature {
    pub gpu_c: i32,
    pub memory_c: Option<i32>,
    /// Where the driver begins to slow down and to shut down; `None` on GPUs that speak of T.Limit
    /// instead.
    pub slowdown_c: Option<i32>,
    pub shutdown_c: Option<i32>,
    pub gpu_max_c: Option<i32>,
    pub memory_max_c: Option<i32>,
    /// Degrees left before slowdown (`nvmlDeviceGetMarginTemperature`).
    pub tlimit_c: Option<i32>,
}

/// Milliwatts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Power {
    pub draw_mw: Option<u32>,
    /// The limit in force (`nvmlDeviceGetEnforcedPowerLimit`).
    pub limit_mw: u32,
    pub default_limit_mw: Option<u32>,
    pub min_limit_mw: Option<u32>,
    pub max_limit_mw: Option<u32>,
}

/// Percent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Utilization {
    pub gpu_percent: u32,
    pub memory_percent: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GpuProcess {
    pub pid: u32,
    /// The executable's name; `None` when the process is in another PID namespace or already gone.
    pub name: Option<String>,
    /// Whose it is, by name, or by number where the name is not known; absent for a process that
    /// cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// `None` where the driver does not say.
    pub used_memory_bytes: Option<u64>,
    pub graphics: bool,
}
