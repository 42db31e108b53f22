//! What one simulated GPU is and how it is: every value that NVML, CUDA or the host shows of it.
//!
//! A model file (`models/*.yaml`) writes the product's values; what is left out is the healthy
//! default. A node adds identities and overrides, a fault changes values by their path, such as
//! `ecc.volatile.dram_uncorrectable`.

use crate::quantity::{Bytes, Time};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One GPU. `Option` fields that are null are values that this product does not have; NVML answers
/// `NotSupported`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    // Identity: filled in from the position in the node.
    pub uuid: String,
    #[serde(default)]
    pub serial: Option<String>,
    /// Per-device identifier; 0 where the capture hid it.
    #[serde(default)]
    pub pdi: u64,
    pub minor_number: u32,
    /// `domain:bus:device.function` in lower-case hexadecimal, with the four-digit domain that
    /// sysfs uses.
    pub pci_address: String,
    #[serde(default)]
    pub module_id: Option<u32>,

    // Product.
    pub name: String,
    #[serde(default)]
    pub brand: Brand,
    pub architecture: Architecture,
    /// `[major, minor]`.
    pub compute_capability: [u32; 2],
    pub sm_count: u32,
    pub cuda_cores: u32,
    pub l2_cache: Bytes,
    pub memory_bus_width_bits: u32,
    pub vbios: String,
    #[serde(default)]
    pub board_part_number: Option<String>,
    #[serde(default)]
    pub gpu_part_number: Option<String>,
    #[serde(default)]
    pub inforom: Inforom,
    /// PCI vendor 0x10de's device id.
    pub pci_device_id: u16,
    pub pci_subsystem_id: u16,
    /// 0x00 is a VGA controller, 0x02 a 3D controller.
    #[serde(default = "three_d_controller")]
    pub pci_sub_class: u8,

    // Memory.
    /// Everything on the board that ECC leaves, as NVML's `total`.
    pub memory: Bytes,
    /// What the driver keeps for itself; CUDA's total is `memory - memory_reserved`.
    pub memory_reserved: Bytes,
    /// The most that `cuMemGetInfo` calls free; null is what really is. A program that takes what
    /// is free would otherwise make a CPU fill and multiply 139 GiB. A larger allocation
    /// succeeds, as far as the GPU has the memory.
    #[serde(default = "quickly_computed")]
    pub cuda_free_memory_maximum: Option<Bytes>,
    pub bar1_memory: Bytes,
    #[serde(default = "one_mebibyte")]
    pub bar1_memory_used: Bytes,

    pub power: Power,
    pub clocks: Clocks,
    pub temperature: Temperature,
    pub pcie: Pcie,
    #[serde(default)]
    pub nvlink: NvLink,
    #[serde(default)]
    pub fabric: Option<Fabric>,
    #[serde(default)]
    pub ecc: Ecc,
    #[serde(default)]
    pub row_remapping: Option<RowRemapping>,
    #[serde(default)]
    pub retired_pages: Option<RetiredPages>,
    #[serde(default)]
    pub repair: Option<Repair>,
    #[serde(default)]
    pub mig: Mig,

    // Settings and state.
    #[serde(default = "yes")]
    pub persistence_mode: bool,
    #[serde(default)]
    pub compute_mode: ComputeMode,
    #[serde(default)]
    pub virtualization: Virtualization,
    /// The whole InfoROM's checksum is right.
    #[serde(default = "yes")]
    pub inforom_valid: bool,
    /// None on drivers and products that do not report it.
    #[serde(default)]
    pub recovery_action: Option<RecoveryAction>,
    /// The performance state, where it does not follow from load and clocks; `P0` is 0.
    #[serde(default)]
    pub performance_state: Option<u32>,
    /// Throttle reasons that hold besides those that follow from load (idle, software power cap).
    #[serde(default)]
    pub throttle_reasons: Vec<ThrottleReason>,
    /// How long throttle reasons had held before the node's start, as the driver's counters have
    /// it.
    #[serde(default)]
    pub throttled_before: BTreeMap<ThrottleReason, Time>,
    #[serde(default = "yes")]
    pub gsp_firmware: bool,
    /// Fan speed in percent; none on passively cooled boards.
    #[serde(default)]
    pub fan_speed_percent: Option<u32>,
    #[serde(default)]
    pub display_attached: bool,

    // Where the GPU can be seen, and how it is ill.
    #[serde(default)]
    pub visible_to: VisibleTo,
    /// `cuInit` never returns where it may open this GPU's device node.
    #[serde(default)]
    pub hangs_cuda_init: bool,
    /// Fallen off the bus: NVML answers GPU_IS_LOST, CUDA error 999 or 719, sysfs reads 0xffff.
    #[serde(default)]
    pub lost: bool,
    #[serde(default)]
    pub cuda_error: Option<CudaError>,
    #[serde(default)]
    pub cuda_hang: Option<CudaCall>,
    /// `cuMemFree` that does not return, or does not give memory back.
    #[serde(default)]
    pub free_fault: Option<FreeFault>,
    /// Contexts and memory of this GPU come to be on another one, by its number: CUDA reports this
    /// one, NVML the other.
    #[serde(default)]
    pub cuda_lands_on: Option<u32>,
    #[serde(default)]
    pub wrong_results: Option<WrongResults>,
    /// Device memory and copies that do not keep what was written.
    #[serde(default)]
    pub memory_faults: Vec<MemoryFault>,
    /// NVML functions that misbehave when they are called for this GPU.
    #[serde(default)]
    pub nvml: NvmlCalls,
    /// Whether a process may open the GPU's device node; a container's device control group may
    /// refuse it.
    #[serde(default = "yes")]
    pub device_node_allowed: bool,
    /// Share of the model's speed that kernels reach.
    #[serde(default = "full_speed")]
    pub speed: f64,
}

fn yes() -> bool {
    true
}
#[expect(
    clippy::unnecessary_wraps,
    reason = "the default of a field that may be null"
)]
fn quickly_computed() -> Option<Bytes> {
    Some(Bytes(256 << 20))
}
fn full_speed() -> f64 {
    1.0
}
fn three_d_controller() -> u8 {
    2
}
fn one_mebibyte() -> Bytes {
    Bytes(1 << 20)
}

impl Gpu {
    /// `[domain, bus, device, function]` of the PCI address.
    pub fn pci_parts(&self) -> Option<[u32; 4]> {
        let (domain, rest) = self.pci_address.split_once(':')?;
        let (bus, rest) = rest.split_once(':')?;
        let (device, function) = rest.split_once('.')?;
        let hex = |text: &str| u32::from_str_radix(text, 16).ok();
        Some([hex(domain)?, hex(bus)?, hex(device)?, hex(function)?])
    }
}

/// NVML's brand names that the shipped models need.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Brand {
    Tesla,
    #[default]
    Nvidia,
    NvidiaRtx,
    Geforce,
    GeforceRtx,
}

/// NVML's architecture names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Architecture {
    Kepler,
    Maxwell,
    Pascal,
    Volta,
    Turing,
    Ampere,
    Ada,
    Hopper,
    Blackwell,
}

/// InfoROM object versions; null where the board has none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inforom {
    #[serde(default)]
    pub image: Option<String>,
    #[serde(default)]
    pub oem: Option<String>,
    #[serde(default)]
    pub ecc: Option<String>,
    #[serde(default)]
    pub power: Option<String>,
}

/// Power in milliwatts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Power {
    pub idle_mw: u32,
    /// What full load would draw if no limit bound it.
    pub load_mw: u32,
    pub limit_mw: u32,
    pub default_limit_mw: u32,
    pub min_limit_mw: u32,
    pub max_limit_mw: u32,
    /// The instantaneous reading at idle, where it differs from the average.
    #[serde(default)]
    pub idle_instant_mw: Option<u32>,
    /// What full load draws while cuBLASLt multiplies, where that differs.
    #[serde(default)]
    pub cublaslt_load_mw: Option<u32>,
    /// The driver does not know the instantaneous reading: those before 530.
    #[serde(default)]
    pub no_instant: bool,
    /// The memory's part of the idle draw, where the board measures it.
    #[serde(default)]
    pub memory_idle_mw: Option<u32>,
}

/// Clocks in megahertz.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clocks {
    pub idle: ClockSet,
    pub max: ClockSet,
    /// The SM clock under full load, where power or heat holds it below the maximum.
    pub load_sm_mhz: u32,
    /// The memory clock under load, where it is not the maximum.
    #[serde(default)]
    pub load_memory_mhz: Option<u32>,
    /// The lowest supported graphics clock; supported clocks go down in steps of 15 MHz.
    pub min_graphics_mhz: u32,
    /// Memory clocks that can be set besides the maximum and that at idle, highest first.
    #[serde(default)]
    pub other_memory_mhz: Vec<u32>,
    /// Applications clocks; not on consumer boards.
    #[serde(default = "yes")]
    pub applications_clocks: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClockSet {
    pub graphics_mhz: u32,
    pub sm_mhz: u32,
    pub memory_mhz: u32,
    pub video_mhz: u32,
}

/// Temperatures in degrees Celsius.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Temperature {
    pub idle_c: i32,
    /// The GPU's temperature that full load settles at.
    pub load_c: i32,
    #[serde(default)]
    pub memory_idle_c: Option<i32>,
    #[serde(default)]
    pub memory_load_c: Option<i32>,
    pub shutdown_c: i32,
    pub slowdown_c: i32,
    /// The temperature that the driver's own throttling keeps below; T.Limit counts down to it.
    pub gpu_max_c: i32,
    #[serde(default)]
    pub memory_max_c: Option<i32>,
    /// The board reports a margin (T.Limit) in place of absolute thresholds (Ada Lovelace data
    /// centre, Hopper, Blackwell).
    #[serde(default)]
    pub t_limit: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pcie {
    pub max_generation: u32,
    pub max_width: u32,
    /// Current values; null means the maximum.
    #[serde(default)]
    pub generation: Option<u32>,
    #[serde(default)]
    pub width: Option<u32>,
    /// The generation that the link falls to while the GPU is idle in P8; null for boards that keep
    /// it.
    #[serde(default)]
    pub idle_generation: Option<u32>,
    /// What the link falls to while the GPU works; null means that it stays what it is.
    #[serde(default)]
    pub load_generation: Option<u32>,
    #[serde(default)]
    pub load_width: Option<u32>,
    /// What sysfs shows, where it differs from what NVML reports.
    #[serde(default)]
    pub sysfs_generation: Option<u32>,
    #[serde(default)]
    pub sysfs_width: Option<u32>,
    /// The PCIe port above the GPU (`0000:97:01.0`); null where the GPU hangs on the root complex.
    #[serde(default)]
    pub port: Option<String>,
    /// The GPU's own maximum, where the slot holds the link below it.
    #[serde(default)]
    pub device_max_generation: Option<u32>,
    #[serde(default)]
    pub replays: u32,
    #[serde(default)]
    pub replay_rollovers: u32,
    #[serde(default)]
    pub tx_kb_per_s: u32,
    #[serde(default)]
    pub rx_kb_per_s: u32,
    #[serde(default)]
    pub aer_correctable: u64,
    #[serde(default)]
    pub aer_nonfatal: u64,
    #[serde(default)]
    pub aer_fatal: u64,
}

impl Pcie {
    /// The generation now.
    pub fn current_generation(&self, load: LinkLoad) -> u32 {
        let now = match load {
            LinkLoad::Saving => self.generation.or(self.idle_generation),
            LinkLoad::Idle => self.generation,
            LinkLoad::Busy => self.load_generation.or(self.generation),
        };
        now.unwrap_or(self.max_generation)
    }

    pub fn current_width(&self, load: LinkLoad) -> u32 {
        let falls = self.load_width.filter(|_| load == LinkLoad::Busy);
        falls.or(self.width).unwrap_or(self.max_width)
    }

    /// Generation and width as sysfs shows them.
    pub fn shown_by_sysfs(&self, load: LinkLoad) -> (u32, u32) {
        let generation = self.sysfs_generation;
        let width = self.sysfs_width;
        (
            generation.unwrap_or_else(|| self.current_generation(load)),
            width.unwrap_or_else(|| self.current_width(load)),
        )
    }
}

/// What a link's speed follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum LinkLoad {
    /// The GPU is idle in a performance state that saves power.
    Saving,
    Idle,
    Busy,
}

/// NVLinks of a GPU; `count: 0` for boards without.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvLink {
    #[serde(default)]
    pub count: u32,
    /// The generation: 4 is NVLink 4.0 (Hopper), which NVML numbers 6.
    #[serde(default)]
    pub version: u32,
    /// One link, one direction.
    #[serde(default)]
    pub speed_mb_per_s: u32,
    #[serde(default)]
    pub remote: NvLinkRemote,
    /// Links that run at another speed, by their number.
    #[serde(default)]
    pub link_speeds_mb_per_s: BTreeMap<u32, u32>,
    /// Links that are not active.
    #[serde(default)]
    pub down: Vec<u32>,
    /// Counters of `error_links`.
    #[serde(default)]
    pub errors: NvLinkErrors,
    #[serde(default)]
    pub error_links: Vec<u32>,
    /// What healthy links have counted, on average.
    #[serde(default)]
    pub background: NvLinkBackground,
}

/// Errors that forward error correction repaired: every healthy link of NVLink 4 collects some.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvLinkBackground {
    #[serde(default)]
    pub crc_data: u64,
    #[serde(default)]
    pub ecc_data: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NvLinkRemote {
    #[default]
    Switch,
    /// Links go straight to the other GPUs of the node, in turn.
    Gpu,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvLinkErrors {
    #[serde(default)]
    pub crc_flit: u64,
    #[serde(default)]
    pub crc_data: u64,
    #[serde(default)]
    pub replay: u64,
    #[serde(default)]
    pub recovery: u64,
    #[serde(default)]
    pub ecc_data: u64,
    /// NVLink 5 (Blackwell): packets lost beyond what the link's error correction repaired.
    #[serde(default)]
    pub effective: u64,
    #[serde(default)]
    pub symbol: u64,
}

/// Registration with the NVSwitch fabric; null for GPUs that have none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fabric {
    #[serde(default)]
    pub state: FabricState,
    /// `nvmlReturn_t` of the registration, meaningful once it is completed.
    #[serde(default)]
    pub status: u32,
    #[serde(default)]
    pub clique_id: u32,
    #[serde(default = "zero_uuid")]
    pub cluster_uuid: String,
    #[serde(default)]
    pub degraded_bandwidth: Option<bool>,
    #[serde(default)]
    pub route_recovery: Option<bool>,
    #[serde(default)]
    pub route_unhealthy: Option<bool>,
    #[serde(default)]
    pub access_timeout_recovery: Option<bool>,
    #[serde(default)]
    pub incorrect_configuration: Option<bool>,
}

fn zero_uuid() -> String {
    "00000000-0000-0000-0000-000000000000".to_owned()
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FabricState {
    NotSupported,
    NotStarted,
    InProgress,
    #[default]
    Completed,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ecc {
    /// Null: the board has no ECC.
    #[serde(default)]
    pub mode: Option<bool>,
    /// Null: the same as `mode`.
    #[serde(default)]
    pub pending: Option<bool>,
    #[serde(default)]
    pub volatile: EccCounts,
    #[serde(default)]
    pub aggregate: EccCounts,
    #[serde(default)]
    pub sram_threshold_exceeded: bool,
    #[serde(default)]
    pub sram_sources: SramSources,
    /// Ampere and newer count SRAM and DRAM apart with the SRAM status call; older ones by location
    /// only.
    #[serde(default)]
    pub sram_status: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EccCounts {
    #[serde(default)]
    pub sram_correctable: u64,
    #[serde(default)]
    pub sram_uncorrectable_parity: u64,
    #[serde(default)]
    pub sram_uncorrectable_secded: u64,
    #[serde(default)]
    pub dram_correctable: u64,
    #[serde(default)]
    pub dram_uncorrectable: u64,
}

impl EccCounts {
    pub fn correctable(&self) -> u64 {
        self.sram_correctable + self.dram_correctable
    }
    pub fn sram_uncorrectable(&self) -> u64 {
        self.sram_uncorrectable_parity + self.sram_uncorrectable_secded
    }
    pub fn uncorrectable(&self) -> u64 {
        self.sram_uncorrectable() + self.dram_uncorrectable
    }
}

/// Aggregate uncorrectable SRAM errors by unit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SramSources {
    #[serde(default)]
    pub l2: u64,
    #[serde(default)]
    pub sm: u64,
    #[serde(default)]
    pub microcontroller: u64,
    #[serde(default)]
    pub pcie: u64,
    #[serde(default)]
    pub other: u64,
}

/// Row remapping (Ampere and newer data-centre boards).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowRemapping {
    #[serde(default)]
    pub correctable: u32,
    #[serde(default)]
    pub uncorrectable: u32,
    #[serde(default)]
    pub pending: bool,
    #[serde(default)]
    pub failure: bool,
    /// Banks by how many spare rows they have left.
    #[serde(default)]
    pub histogram: RowRemapperHistogram,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowRemapperHistogram {
    #[serde(default)]
    pub max: u32,
    #[serde(default)]
    pub high: u32,
    #[serde(default)]
    pub partial: u32,
    #[serde(default)]
    pub low: u32,
    #[serde(default)]
    pub none: u32,
}

/// Retired pages (boards before row remapping).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RetiredPages {
    #[serde(default)]
    pub single_bit: u32,
    #[serde(default)]
    pub double_bit: u32,
    #[serde(default)]
    pub pending: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Repair {
    #[serde(default)]
    pub channel_pending: bool,
    #[serde(default)]
    pub tpc_pending: bool,
    #[serde(default)]
    pub unrepairable_memory: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mig {
    /// Null: the board cannot be partitioned.
    #[serde(default)]
    pub mode: Option<bool>,
    /// Null: the same as `mode`.
    #[serde(default)]
    pub pending: Option<bool>,
    #[serde(default)]
    pub max_instances: u32,
    #[serde(default)]
    pub instances: Vec<MigInstance>,
}

/// One GPU instance with one compute instance that fills it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigInstance {
    /// Such as `1g.18gb`.
    pub profile: String,
    pub memory: Bytes,
    pub sm_count: u32,
    pub slices: u32,
    /// First memory slice.
    pub start: u32,
    pub gpu_instance_id: u32,
    /// Without a compute instance CUDA cannot use the slice: a node that is half configured.
    #[serde(default = "yes")]
    pub compute_instance: bool,
    pub uuid: String,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ComputeMode {
    #[default]
    Default,
    Prohibited,
    ExclusiveProcess,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Virtualization {
    #[default]
    None,
    PassThrough,
    /// A virtual GPU in a guest.
    Vgpu,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecoveryAction {
    #[default]
    None,
    Reset,
    Reboot,
    DrainP2p,
    DrainAndReset,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ThrottleReason {
    GpuIdle,
    ApplicationsClocksSetting,
    SwPowerCap,
    HwSlowdown,
    SyncBoost,
    SwThermalSlowdown,
    HwThermalSlowdown,
    HwPowerBrakeSlowdown,
    DisplayClockSetting,
}

/// Whether each layer can see the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VisibleTo {
    #[serde(default = "yes")]
    pub pci: bool,
    #[serde(default = "yes")]
    pub device_node: bool,
    #[serde(default = "yes")]
    pub nvml: bool,
    #[serde(default = "yes")]
    pub cuda: bool,
}

impl Default for VisibleTo {
    fn default() -> Self {
        Self {
            pci: true,
            device_node: true,
            nvml: true,
            cuda: true,
        }
    }
}

/// What is wrong with some of the calls by which a process frees device memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FreeFault {
    pub kind: FreeFaultKind,
    /// The first wrong call of each process, counted from 0.
    #[serde(default)]
    pub first: u64,
    /// How many calls of each process are wrong.
    #[serde(default = "one")]
    pub count: u64,
}

impl FreeFault {
    /// Whether the call with this number is wrong.
    pub fn strikes(&self, number: u64) -> bool {
        number
            .checked_sub(self.first)
            .is_some_and(|since| since < self.count)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FreeFaultKind {
    /// The call does not return.
    Hang,
    /// The call succeeds, and the memory stays in use, also after the process.
    Keep,
}

/// An error that CUDA calls on this GPU return; `cuda_hang` names calls that do not return at all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CudaError {
    /// `CUresult`.
    pub code: u32,
    /// The call that first returns it.
    pub from: CudaCall,
    /// Once seen, every later call in the context returns it too (as for 700, 719 and other sticky
    /// errors).
    #[serde(default)]
    pub sticky: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CudaCall {
    ContextCreation,
    ModuleLoad,
    MemoryAllocation,
    Copy,
    Launch,
    /// Asynchronous errors are returned by the next call that waits.
    Synchronize,
}

/// Wrong numbers from kernels and matrix products on this GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WrongResults {
    pub kind: WrongResultKind,
    /// Part of a kernel's name; null means every kernel that writes results. `gemm` are all matrix
    /// products, those of cuBLASLt (`cublasLtMatmul`) too.
    #[serde(default)]
    pub kernel: Option<String>,
    /// Element of the output, counted from its start; null means one that follows from the launch's
    /// number.
    #[serde(default)]
    pub element: Option<u64>,
    /// The bit that flips, for `bit`; null means one that follows from the launch's number.
    #[serde(default)]
    pub bit: Option<u32>,
    /// Only blocks that run on this SM compute wrongly.
    #[serde(default)]
    pub sm: Option<u32>,
    /// Where `bit` and the kinds of single elements strike, unless `element` states it.
    #[serde(default)]
    pub place: WrongResultPlace,
    /// One launch in this many of those kernels is wrong; 1 means every one.
    #[serde(default = "one")]
    pub every_launches: u64,
    /// The first wrong launch of those kernels, counted from 0 since the fault is there.
    #[serde(default)]
    pub first_launch: u64,
    /// Only while the GPU is at least so hot.
    #[serde(default)]
    pub from_temperature_c: Option<i32>,
    /// Only from this much load on (`1s`), all loads together.
    #[serde(default)]
    pub from_load: Option<Time>,
    /// Only until this much load.
    #[serde(default)]
    pub until_load: Option<Time>,
}

/// Memory that does not keep what was written, or copies that do not bring it. Places are counted
/// through the memory that a process has of the GPU, one allocation after the other, as if it were
/// one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryFault {
    pub kind: MemoryFaultKind,
    /// The place, for `at-rest`, `lost-stores` and `aliased`; for copies the byte of the copy. It
    /// is taken within what is there, so that any place is one.
    #[serde(default)]
    pub offset: Bytes,
    /// How much of memory it is about, for `lost-stores` and `aliased`: whole pages of 4 KiB.
    #[serde(default = "one_page")]
    pub length: Bytes,
    /// The other place that the same memory answers at, for `aliased`.
    #[serde(default)]
    pub onto: Option<Bytes>,
    /// The bit of the byte that flips.
    #[serde(default)]
    pub bit: u32,
    /// One operation (launch, or copy of this kind) in so many is hit; 1 means every one.
    #[serde(default = "one")]
    pub every: u64,
    /// The first one that is hit, counted from 0 in each process.
    #[serde(default)]
    pub first: u64,
    /// Copies that are shorter are left alone.
    #[serde(default)]
    pub copies_from: Bytes,
}

fn one_page() -> Bytes {
    Bytes(4096)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryFaultKind {
    /// A bit flips between operations, where nothing is written.
    AtRest,
    /// What kernels and copies write there is gone once they have ended.
    LostStores,
    /// Two addresses are the same memory.
    Aliased,
    /// A bit of a copy flips on the way.
    CopyToDevice,
    CopyToHost,
    CopyOnDevice,
}

/// NVML functions by name that do not do what they should, for one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvmlCalls {
    /// Functions that never return.
    #[serde(default)]
    pub hang: Vec<String>,
    /// Functions that end the process with SIGABRT.
    #[serde(default)]
    pub crash: Vec<String>,
    /// Functions that return this code (`nvmlReturn_t`), and 0 without an answer.
    #[serde(default)]
    pub returns: BTreeMap<String, u32>,
    /// Functions that take so much longer.
    #[serde(default)]
    pub delay: BTreeMap<String, Time>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WrongResultPlace {
    /// Anywhere, as follows from the launch's number.
    #[default]
    Scattered,
    /// Each bit of each corner of each tile in turn, one a wrong launch.
    TileCorners,
}

fn one() -> u64 {
    1
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WrongResultKind {
    /// One bit of one element flips.
    Bit,
    /// One element has another value.
    Element,
    /// One row of the result is wrong.
    Row,
    /// One tile is wrong: one that a thread block computes, 128 x 128 where the kernel has none.
    Tile,
    /// One element is not a number.
    Nan,
    /// One element is infinite.
    Infinity,
    /// The same bit of two elements of a column flips, which a sum over the column may not see.
    TwoRows,
    /// The same wrong value in the same element every time: copies agree with one another and are
    /// all wrong.
    SameEveryTime,
    /// The launch succeeds in its usual time and writes nothing: what was there before stays.
    Stale,
    /// Rows and columns are exchanged.
    Transposed,
}
