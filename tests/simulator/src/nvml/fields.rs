//! `nvmlDeviceGetFieldValues`: many values by number in one call.

use super::call::{
    Call, Device, Failure, Handle, INVALID_ARGUMENT, NOT_SUPPORTED, Out, enabled, nvml, supported,
};
use super::{clocks, ecc, nvlink};
use crate::gpu::{Gpu, NvLinkErrors, RecoveryAction, ThrottleReason};
use nvml_wrapper_sys::bindings as sys;
use nvml_wrapper_sys::bindings::field_id;
use std::ffi::c_int;

const CORRECTED: u32 = sys::nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_CORRECTED;
const UNCORRECTED: u32 = sys::nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_UNCORRECTED;
const VOLATILE: u32 = sys::nvmlEccCounterType_enum_NVML_VOLATILE_ECC;
const AGGREGATE: u32 = sys::nvmlEccCounterType_enum_NVML_AGGREGATE_ECC;
const SINGLE_BIT: u32 =
    sys::nvmlPageRetirementCause_enum_NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS;
const DOUBLE_BIT: u32 =
    sys::nvmlPageRetirementCause_enum_NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR;
/// The scope of power fields: the GPU, the whole module, or the memory.
const SCOPE_GPU: u32 = 0;
const SCOPE_MEMORY: u32 = 2;
/// NVLink counters of every link together.
const ALL_LINKS: u32 = u32::MAX;
/// From this version on (Hopper) fields name a link by scope, the older numbers link by link are
/// gone, and links have a state of low power.
// Source: real H200s, captures/h200x4.nvml-transcript.json.
const FIRST_VERSION_WITH_FIELDS_BY_SCOPE: u32 = 4;
/// Hopper's value for the time after which an idle link saves power: the threshold that is set,
/// bounds, unit, and whether it can be set; in units of 100 microseconds.
// Source: real H200s, captures/h200x4.nvml-transcript.json.
const LOW_POWER_THRESHOLD: u32 = 500;
const LOW_POWER_THRESHOLD_MAXIMUM: u32 = 8191;
const LOW_POWER_THRESHOLD_MINIMUM: u32 = 1;
const LOW_POWER_THRESHOLD_UNITS: u32 = 0;
const LOW_POWER_THRESHOLD_SUPPORTED: u32 = 2;
/// Field numbers that driver 580 does not know at all.
// Source: driver 580.159.04, captures/h200x4.nvml-transcript.json.
fn is_unknown(id: u32) -> bool {
    matches!(id, 274 | 289..=293 | 296..=300 | 303..)
}
/// From this version on the counters of single packets and bit errors exist (NVLink 5, Blackwell).
const FIRST_VERSION_WITH_PACKET_COUNTERS: u32 = 5;

/// Fields for the time lost to software thermal, hardware thermal and power brake slowdown.
///
/// NVIDIA renumbered fields 251 to 273 between drivers 580.65 and 580.82; drivers before 555 have
/// none of them.
// Source: docs.nvidia.com/deploy/nvml-api/known-issues.html.
fn slowdown_fields(driver_version: &str) -> Option<[u32; 3]> {
    let mut parts = driver_version
        .split('.')
        .map(|part| part.parse::<u32>().unwrap_or(0));
    let (branch, minor) = (parts.next()?, parts.next()?);
    match (branch, minor) {
        _ if branch < 555 => None,
        version if version < (580, 82) => Some([251, 252, 253]),
        _ => Some([269, 270, 271]),
    }
}

/// The reasons of `slowdown_fields`, in the same order.
const SLOWDOWN_REASONS: [ThrottleReason; 3] = [
    ThrottleReason::SwThermalSlowdown,
    ThrottleReason::HwThermalSlowdown,
    ThrottleReason::HwPowerBrakeSlowdown,
];
const REMAPPED_ROWS_COR_INACTIVE: u32 = 301;
const REMAPPED_ROWS_UNC_INACTIVE: u32 = 302;

/// A field's value with its type.
enum Value {
    U32(u32),
    U64(u64),
    I32(i32),
}

/// Per-link counters that older drivers numbered link by link: the first numbers of each block.
#[derive(Clone, Copy)]
struct LinkBlock {
    /// Links 0 to 5.
    first: u32,
    /// Every link together.
    total: u32,
    /// Links 6 to 11.
    second: u32,
    of: fn(&NvLinkErrors) -> u64,
}

const LINK_BLOCKS: [LinkBlock; 4] = [
    LinkBlock {
        first: 32,
        total: 38,
        second: 96,
        of: |errors| errors.crc_flit,
    },
    LinkBlock {
        first: 39,
        total: 45,
        second: 102,
        of: |errors| errors.crc_data,
    },
    LinkBlock {
        first: 46,
        total: 52,
        second: 108,
        of: |errors| errors.replay,
    },
    LinkBlock {
        first: 53,
        total: 59,
        second: 114,
        of: |errors| errors.recovery,
    },
];

fn all_links(gpu: &Gpu, of: fn(&NvLinkErrors) -> u64) -> u64 {
    (0..gpu.nvlink.count)
        .map(|link| of(&nvlink::errors(gpu, link)))
        .sum()
}

/// A counter in the old numbering, if the number is one.
fn numbered_link(gpu: &Gpu, id: u32) -> Option<Result<Value, Failure>> {
    let block = LINK_BLOCKS.iter().find(|block| {
        (block.first..=block.total).contains(&id) || (block.second..block.second + 6).contains(&id)
    })?;
    if gpu.nvlink.count == 0 || gpu.nvlink.version >= FIRST_VERSION_WITH_FIELDS_BY_SCOPE {
        return Some(Err(NOT_SUPPORTED));
    }
    if id == block.total {
        return Some(Ok(Value::U64(all_links(gpu, block.of))));
    }
    let link = if id < block.total {
        id - block.first
    } else {
        6 + id - block.second
    };
    Some(nvlink::check_link(gpu, link).map(|()| Value::U64((block.of)(&nvlink::errors(gpu, link)))))
}

/// A counter of one link, or of all, by scope.
fn link_counter(gpu: &Gpu, scope: u32, of: fn(&NvLinkErrors) -> u64) -> Result<Value, Failure> {
    if gpu.nvlink.count == 0 {
        return Err(NOT_SUPPORTED);
    }
    if scope == ALL_LINKS {
        return Ok(Value::U64(all_links(gpu, of)));
    }
    nvlink::check_link(gpu, scope)?;
    Ok(Value::U64(of(&nvlink::errors(gpu, scope))))
}

/// A counter that came with NVLink 5.
fn packet_counter(gpu: &Gpu, scope: u32, of: fn(&NvLinkErrors) -> u64) -> Result<Value, Failure> {
    if gpu.nvlink.version < FIRST_VERSION_WITH_PACKET_COUNTERS {
        return Err(NOT_SUPPORTED);
    }
    link_counter(gpu, scope, of)
}

fn ecc_field(gpu: &Gpu, id: u32) -> Option<Result<u64, Failure>> {
    let l2 = sys::nvmlMemoryLocation_enum_NVML_MEMORY_LOCATION_L2_CACHE;
    let dram = sys::nvmlMemoryLocation_enum_NVML_MEMORY_LOCATION_DRAM;
    Some(match id {
        field_id::NVML_FI_DEV_ECC_SBE_VOL_TOTAL => ecc::total(gpu, CORRECTED, VOLATILE),
        field_id::NVML_FI_DEV_ECC_DBE_VOL_TOTAL => ecc::total(gpu, UNCORRECTED, VOLATILE),
        field_id::NVML_FI_DEV_ECC_SBE_AGG_TOTAL => ecc::total(gpu, CORRECTED, AGGREGATE),
        field_id::NVML_FI_DEV_ECC_DBE_AGG_TOTAL => ecc::total(gpu, UNCORRECTED, AGGREGATE),
        field_id::NVML_FI_DEV_ECC_SBE_VOL_L2 => ecc::counter(gpu, CORRECTED, VOLATILE, l2),
        field_id::NVML_FI_DEV_ECC_DBE_VOL_L2 => ecc::counter(gpu, UNCORRECTED, VOLATILE, l2),
        field_id::NVML_FI_DEV_ECC_SBE_AGG_L2 => ecc::counter(gpu, CORRECTED, AGGREGATE, l2),
        field_id::NVML_FI_DEV_ECC_DBE_AGG_L2 => ecc::counter(gpu, UNCORRECTED, AGGREGATE, l2),
        // Boards that count SRAM as a whole have the totals and no field of a single place.
        field_id::NVML_FI_DEV_ECC_SBE_VOL_DEV
        | field_id::NVML_FI_DEV_ECC_DBE_VOL_DEV
        | field_id::NVML_FI_DEV_ECC_SBE_AGG_DEV
        | field_id::NVML_FI_DEV_ECC_DBE_AGG_DEV
            if gpu.ecc.sram_status =>
        {
            Err(NOT_SUPPORTED)
        }
        field_id::NVML_FI_DEV_ECC_SBE_VOL_DEV => ecc::counter(gpu, CORRECTED, VOLATILE, dram),
        field_id::NVML_FI_DEV_ECC_DBE_VOL_DEV => ecc::counter(gpu, UNCORRECTED, VOLATILE, dram),
        field_id::NVML_FI_DEV_ECC_SBE_AGG_DEV => ecc::counter(gpu, CORRECTED, AGGREGATE, dram),
        field_id::NVML_FI_DEV_ECC_DBE_AGG_DEV => ecc::counter(gpu, UNCORRECTED, AGGREGATE, dram),
        _ => return None,
    })
}

fn power_field(call: &Call, device: Device<'_>, id: u32, scope: u32) -> Result<Value, Failure> {
    let (gpu, readings) = (device.gpu, call.readings(device));
    if scope == SCOPE_MEMORY {
        return match id {
            field_id::NVML_FI_DEV_POWER_AVERAGE => {
                supported(readings.memory_power_mw).map(Value::U32)
            }
            field_id::NVML_FI_DEV_POWER_INSTANT => Err(NOT_SUPPORTED),
            // Limits are the GPU's alone.
            _ => Err(INVALID_ARGUMENT),
        };
    }
    if scope != SCOPE_GPU {
        return Err(NOT_SUPPORTED);
    }
    Ok(Value::U32(match id {
        field_id::NVML_FI_DEV_POWER_AVERAGE => readings.power_mw,
        field_id::NVML_FI_DEV_POWER_INSTANT if gpu.power.no_instant => return Err(NOT_SUPPORTED),
        field_id::NVML_FI_DEV_POWER_INSTANT => readings.power_instant_mw,
        field_id::NVML_FI_DEV_POWER_MIN_LIMIT => gpu.power.min_limit_mw,
        field_id::NVML_FI_DEV_POWER_MAX_LIMIT => gpu.power.max_limit_mw,
        field_id::NVML_FI_DEV_POWER_DEFAULT_LIMIT => gpu.power.default_limit_mw,
        _ => gpu.power.limit_mw,
    }))
}

/// Thresholds as margins to the temperature that T.Limit counts down to.
fn t_limit_field(
    gpu: &Gpu,
    threshold_c: Option<i32>,
    zero_c: Option<i32>,
) -> Result<Value, Failure> {
    if !gpu.temperature.t_limit {
        return Err(NOT_SUPPORTED);
    }
    Ok(Value::I32(supported(zero_c)? - supported(threshold_c)?))
}

fn field(call: &Call, device: Device<'_>, id: u32, scope: u32) -> Result<Value, Failure> {
    let gpu = device.gpu;
    if is_unknown(id) {
        return Err(INVALID_ARGUMENT);
    }
    if let Some(value) = link_field(gpu, id, scope) {
        return value;
    }
    if let Some(value) = pcie_field(call, gpu, id) {
        return Ok(value);
    }
    if let Some(value) = ecc_field(gpu, id) {
        return value.map(Value::U64);
    }
    if let Some(value) = numbered_link(gpu, id) {
        return value;
    }
    let slowdown = slowdown_fields(call.scenario.driver.nvml_version())
        .and_then(|fields| fields.iter().position(|field| *field == id));
    if let Some(position) = slowdown {
        let reason = SLOWDOWN_REASONS[position];
        return Ok(Value::U64(clocks::throttled_ns(call, device, reason)));
    }
    let rows = || supported(gpu.row_remapping);
    let retired = |cause| ecc::retired_pages(gpu, cause).map(|pages| Value::U64(u64::from(pages)));
    let throttled = |reason| Ok(Value::U64(clocks::throttled_ns(call, device, reason)));
    let celsius = &gpu.temperature;
    match id {
        field_id::NVML_FI_DEV_ECC_CURRENT => {
            supported(gpu.ecc.mode).map(|on| Value::U64(enabled(on).into()))
        }
        field_id::NVML_FI_DEV_ECC_PENDING => {
            let mode = supported(gpu.ecc.mode)?;
            Ok(Value::U64(enabled(gpu.ecc.pending.unwrap_or(mode)).into()))
        }
        field_id::NVML_FI_DEV_RETIRED_SBE => retired(SINGLE_BIT),
        field_id::NVML_FI_DEV_RETIRED_DBE => retired(DOUBLE_BIT),
        field_id::NVML_FI_DEV_RETIRED_PENDING
        | field_id::NVML_FI_DEV_RETIRED_PENDING_SBE
        | field_id::NVML_FI_DEV_RETIRED_PENDING_DBE => Ok(Value::U32(enabled(
            supported(gpu.retired_pages.as_ref())?.pending,
        ))),
        field_id::NVML_FI_DEV_PERF_POLICY_POWER => throttled(ThrottleReason::SwPowerCap),
        field_id::NVML_FI_DEV_PERF_POLICY_THERMAL => throttled(ThrottleReason::SwThermalSlowdown),
        field_id::NVML_FI_DEV_PERF_POLICY_SYNC_BOOST => throttled(ThrottleReason::SyncBoost),
        field_id::NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT => {
            throttled(ThrottleReason::HwPowerBrakeSlowdown)
        }
        field_id::NVML_FI_DEV_PERF_POLICY_LOW_UTILIZATION => throttled(ThrottleReason::GpuIdle),
        field_id::NVML_FI_DEV_PERF_POLICY_RELIABILITY => Ok(Value::U64(0)),
        field_id::NVML_FI_DEV_PERF_POLICY_TOTAL_APP_CLOCKS
        | field_id::NVML_FI_DEV_PERF_POLICY_TOTAL_BASE_CLOCKS => {
            Ok(Value::U64(clocks::held_below_clocks_ns(call, device)))
        }
        field_id::NVML_FI_DEV_MEMORY_TEMP => supported(call.readings(device).memory_temperature_c)
            .map(|c| Value::U32(c.max(0).cast_unsigned())),
        field_id::NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION | field_id::NVML_FI_DEV_ENERGY
            if scope == SCOPE_GPU =>
        {
            Ok(Value::U64(call.readings(device).energy_mj))
        }
        field_id::NVML_FI_DEV_NVLINK_LINK_COUNT => {
            if gpu.nvlink.count == 0 {
                Err(NOT_SUPPORTED)
            } else {
                Ok(Value::U32(gpu.nvlink.count))
            }
        }
        field_id::NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT => {
            let to_switch = gpu.nvlink.remote == crate::gpu::NvLinkRemote::Switch;
            let active = (0..gpu.nvlink.count)
                .filter(|link| nvlink::is_active(gpu, *link))
                .count();
            if gpu.nvlink.count == 0 || !to_switch {
                return Err(NOT_SUPPORTED);
            }
            Ok(Value::U32(u32::try_from(active).unwrap_or(0)))
        }
        field_id::NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY => {
            link_counter(gpu, scope, |errors| errors.replay)
        }
        field_id::NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY => {
            link_counter(gpu, scope, |errors| errors.recovery)
        }
        field_id::NVML_FI_DEV_NVLINK_ERROR_DL_CRC => {
            link_counter(gpu, scope, |errors| errors.crc_flit)
        }
        field_id::NVML_FI_DEV_NVLINK_ECC_DATA_ERROR_COUNT_TOTAL => {
            if gpu.nvlink.version >= FIRST_VERSION_WITH_FIELDS_BY_SCOPE {
                return Err(NOT_SUPPORTED);
            }
            link_counter(gpu, ALL_LINKS, |errors| errors.ecc_data)
        }
        field_id::NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS => {
            packet_counter(gpu, scope, |errors| errors.effective)
        }
        field_id::NVML_FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS => {
            packet_counter(gpu, scope, |errors| errors.symbol)
        }
        field_id::NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS
        | field_id::NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS => {
            packet_counter(gpu, scope, |errors| errors.recovery)
        }
        field_id::NVML_FI_DEV_NVLINK_COUNT_MALFORMED_PACKET_ERRORS
        | field_id::NVML_FI_DEV_NVLINK_COUNT_BUFFER_OVERRUN_ERRORS
        | field_id::NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS
        | field_id::NVML_FI_DEV_NVLINK_COUNT_RCV_REMOTE_ERRORS
        | field_id::NVML_FI_DEV_NVLINK_COUNT_RCV_GENERAL_ERRORS
        | field_id::NVML_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS
        | field_id::NVML_FI_DEV_NVLINK_COUNT_XMIT_DISCARDS
        | field_id::NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS => {
            packet_counter(gpu, scope, |_| 0)
        }
        field_id::NVML_FI_DEV_REMAPPED_COR => Ok(Value::U64(rows()?.correctable.into())),
        field_id::NVML_FI_DEV_REMAPPED_UNC => Ok(Value::U64(rows()?.uncorrectable.into())),
        field_id::NVML_FI_DEV_REMAPPED_PENDING => Ok(Value::U64(enabled(rows()?.pending).into())),
        field_id::NVML_FI_DEV_REMAPPED_FAILURE => Ok(Value::U64(enabled(rows()?.failure).into())),
        REMAPPED_ROWS_COR_INACTIVE | REMAPPED_ROWS_UNC_INACTIVE => rows().map(|_| Value::U64(0)),
        field_id::NVML_FI_DEV_IS_MIG_MODE_INDEPENDENT_MIG_QUERY_CAPABLE => {
            supported(gpu.mig.mode).map(|_| Value::U32(1))
        }
        field_id::NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED => {
            supported(gpu.mig.mode)?;
            Ok(Value::U32(enabled(
                gpu.architecture >= crate::gpu::Architecture::Hopper,
            )))
        }
        field_id::NVML_FI_DEV_POWER_AVERAGE..=field_id::NVML_FI_DEV_POWER_CURRENT_LIMIT
        | field_id::NVML_FI_DEV_POWER_REQUESTED_LIMIT => power_field(call, device, id, scope),
        field_id::NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT => {
            t_limit_field(gpu, Some(celsius.shutdown_c), Some(celsius.gpu_max_c))
        }
        field_id::NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT => {
            t_limit_field(gpu, Some(celsius.slowdown_c), Some(celsius.gpu_max_c))
        }
        field_id::NVML_FI_DEV_TEMPERATURE_MEM_MAX_TLIMIT => {
            t_limit_field(gpu, celsius.memory_max_c, celsius.memory_max_c)
        }
        field_id::NVML_FI_DEV_TEMPERATURE_GPU_MAX_TLIMIT => {
            t_limit_field(gpu, Some(celsius.gpu_max_c), Some(celsius.gpu_max_c))
        }
        field_id::NVML_FI_DEV_RESET_STATUS => {
            let action = supported(gpu.recovery_action)?;
            Ok(Value::U32(u32::from(action == RecoveryAction::Reset)))
        }
        field_id::NVML_FI_DEV_DRAIN_AND_RESET_STATUS => {
            let action = supported(gpu.recovery_action)?;
            Ok(Value::U32(u32::from(
                action == RecoveryAction::DrainAndReset,
            )))
        }
        field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION => {
            // nvmlDeviceGpuRecoveryAction_t counts in this order.
            supported(gpu.recovery_action).map(|action| Value::U32(action as u32))
        }
        _ => Err(NOT_SUPPORTED),
    }
}

/// NVML's fields of a link, or of the links' settings, besides counters of errors.
fn link_field(gpu: &Gpu, id: u32, scope: u32) -> Option<Result<Value, Failure>> {
    let one_link = |of: &dyn Fn(u32) -> Result<Value, Failure>| {
        // There is no speed, state or version of all links together.
        if scope == ALL_LINKS {
            return Err(NOT_SUPPORTED);
        }
        nvlink::check_link(gpu, scope)?;
        of(scope)
    };
    let low_power = |value| {
        if gpu.nvlink.version != FIRST_VERSION_WITH_FIELDS_BY_SCOPE || gpu.nvlink.count == 0 {
            return Err(NOT_SUPPORTED);
        }
        if scope == ALL_LINKS {
            return Err(INVALID_ARGUMENT);
        }
        Ok(Value::U32(value))
    };
    Some(match id {
        84..=90 | 132..=137 if gpu.nvlink.version >= FIRST_VERSION_WITH_FIELDS_BY_SCOPE => {
            Err(NOT_SUPPORTED)
        }
        84..=89 => link_speed(gpu, id - 84),
        132..=137 => link_speed(gpu, 6 + id - 132),
        field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON => link_speed(gpu, 0),
        field_id::NVML_FI_DEV_NVLINK_GET_SPEED => one_link(&|link| link_speed(gpu, link)),
        field_id::NVML_FI_DEV_NVLINK_GET_STATE => {
            one_link(&|link| Ok(Value::U32(enabled(nvlink::is_active(gpu, link)))))
        }
        field_id::NVML_FI_DEV_NVLINK_GET_VERSION => {
            one_link(&|_| Ok(Value::U32(nvlink::version_number(gpu.nvlink.version))))
        }
        // An idle link saves power.
        field_id::NVML_FI_DEV_NVLINK_GET_POWER_STATE => low_power(1),
        field_id::NVML_FI_DEV_NVLINK_GET_POWER_THRESHOLD => low_power(LOW_POWER_THRESHOLD),
        field_id::NVML_FI_DEV_NVLINK_GET_POWER_THRESHOLD_MAX => {
            low_power(LOW_POWER_THRESHOLD_MAXIMUM)
        }
        field_id::NVML_FI_DEV_NVLINK_GET_POWER_THRESHOLD_MIN => {
            low_power(LOW_POWER_THRESHOLD_MINIMUM)
        }
        field_id::NVML_FI_DEV_NVLINK_GET_POWER_THRESHOLD_UNITS => {
            low_power(LOW_POWER_THRESHOLD_UNITS)
        }
        field_id::NVML_FI_DEV_NVLINK_GET_POWER_THRESHOLD_SUPPORTED => {
            low_power(LOW_POWER_THRESHOLD_SUPPORTED)
        }
        // No simulated program sends anything over a link.
        field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
        | field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
        | field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_TX
        | field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_RX => link_counter(gpu, scope, |_| 0),
        // The number that a link has at its other end is its own.
        field_id::NVML_FI_DEV_NVLINK_REMOTE_NVLINK_ID => one_link(&|link| Ok(Value::U32(link))),
        _ => return None,
    })
}

/// Counters of the PCIe link.
fn pcie_field(call: &Call, gpu: &Gpu, id: u32) -> Option<Value> {
    let errors = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
    Some(Value::U32(match id {
        field_id::NVML_FI_DEV_PCIE_REPLAY_COUNTER => gpu.pcie.replays,
        field_id::NVML_FI_DEV_PCIE_REPLAY_ROLLOVER_COUNTER => gpu.pcie.replay_rollovers,
        field_id::NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS => errors(gpu.pcie.aer_correctable),
        field_id::NVML_FI_DEV_PCIE_COUNT_NON_FATAL_ERROR => errors(gpu.pcie.aer_nonfatal),
        field_id::NVML_FI_DEV_PCIE_COUNT_FATAL_ERROR => errors(gpu.pcie.aer_fatal),
        field_id::NVML_FI_DEV_PCIE_COUNT_TX_BYTES => bytes_passed(call, gpu.pcie.tx_kb_per_s),
        field_id::NVML_FI_DEV_PCIE_COUNT_RX_BYTES => bytes_passed(call, gpu.pcie.rx_kb_per_s),
        // What the simulator does not model has not happened; no atomics reach the host's memory or
        // come from there.
        field_id::NVML_FI_DEV_PCIE_L0_TO_RECOVERY_COUNTER
        | field_id::NVML_FI_DEV_PCIE_COUNT_NAKS_RECEIVED
            ..=field_id::NVML_FI_DEV_PCIE_COUNT_BAD_DLLP
        | field_id::NVML_FI_DEV_PCIE_COUNT_UNSUPPORTED_REQ
            ..=field_id::NVML_FI_DEV_PCIE_COUNT_LANE_ERROR
        | field_id::NVML_FI_DEV_PCIE_OUTBOUND_ATOMICS_MASK
        | field_id::NVML_FI_DEV_PCIE_INBOUND_ATOMICS_MASK => 0,
        _ => return None,
    }))
}

/// Bytes since the node was prepared, in a counter of 32 bits that starts again from 0 as the real
/// one does.
fn bytes_passed(call: &Call, kb_per_s: u32) -> u32 {
    let bytes = call.node.state().elapsed().as_millis() * u128::from(kb_per_s);
    u32::try_from(bytes & u128::from(u32::MAX)).unwrap_or(u32::MAX)
}

/// An inactive link has no speed.
fn link_speed(gpu: &Gpu, link: u32) -> Result<Value, Failure> {
    nvlink::check_link(gpu, link)?;
    let speed = if nvlink::is_active(gpu, link) {
        let own = gpu.nvlink.link_speeds_mb_per_s.get(&link);
        own.copied().unwrap_or(gpu.nvlink.speed_mb_per_s)
    } else {
        0
    };
    Ok(Value::U32(speed))
}

nvml! {
    fn nvmlDeviceGetFieldValues(device: Handle, count: c_int, values: Out<sys::nvmlFieldValue_t>) |call| {
        let device = call.gpu(device)?;
        let count = usize::try_from(count).map_err(|_| INVALID_ARGUMENT)?;
        if count == 0 || values.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let timestamp = now.map_or(0, |time| i64::try_from(time.as_micros()).unwrap_or(0));
        for index in 0..count {
            let place = values.element(index);
            let mut entry = place.get()?;
            entry.timestamp = timestamp;
            entry.latencyUsec = 1;
            let answer = field(call, device, entry.fieldId, entry.scopeId);
            (entry.valueType, entry.value, entry.nvmlReturn) = match answer {
                Ok(Value::U32(value)) => (
                    sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT,
                    // The whole union is written, so that a reader of the wrong width sees the
                    // value and no old bytes.
                    sys::nvmlValue_t { ullVal: u64::from(value) },
                    sys::nvmlReturn_enum_NVML_SUCCESS,
                ),
                Ok(Value::U64(value)) => (
                    sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG,
                    sys::nvmlValue_t { ullVal: value },
                    sys::nvmlReturn_enum_NVML_SUCCESS,
                ),
                Ok(Value::I32(value)) => (
                    sys::nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_INT,
                    sys::nvmlValue_t { sllVal: i64::from(value) },
                    sys::nvmlReturn_enum_NVML_SUCCESS,
                ),
                Err(failure) => (
                    sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT,
                    sys::nvmlValue_t { ullVal: 0 },
                    failure.0,
                ),
            };
            place.set(entry)?;
        }
        if call.scenario.nvml.answers_one_field_too_many
            && values.element(count).get()?.nvmlReturn == sys::nvmlReturn_enum_NVML_SUCCESS
        {
            std::process::abort();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slowdown_fields_follow_the_driver() {
        assert_eq!(slowdown_fields("535.104.05"), None);
        assert_eq!(slowdown_fields("580.65.06"), Some([251, 252, 253]));
        assert_eq!(slowdown_fields("580.159.04"), Some([269, 270, 271]));
    }
}
