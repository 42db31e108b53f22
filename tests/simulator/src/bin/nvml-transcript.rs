//! `nvml-transcript`: queries every NVML value that can be read without changing a setting, and
//! prints it as JSON, one entry a call; or compares two such transcripts.
//!
//! The same program runs on a real GPU and on the simulated one, which shows where the simulation
//! differs:
//!
//! ```text
//! nvml-transcript > real.json
//! gpu-simulator run h200x1 -- nvml-transcript > simulated.json
//! nvml-transcript --compare real.json simulated.json
//! ```

#![allow(unsafe_code, reason = "calls NVML's C interface")]
#![allow(clippy::print_stdout, reason = "what it prints is what it is for")]

use anyhow::{Context, Result, bail, ensure};
use nvml_wrapper_sys::bindings as sys;
use nvml_wrapper_sys::bindings::{NvmlLib, field_id, nvmlDevice_t};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::ffi::{CStr, c_char};

/// Room for every text of NVML.
const TEXT_LENGTH: u32 = 256;
/// One more than the greatest field number of nvidia-ml-py 13.615.
const FIELDS: u32 = 308;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [] => {
            println!("{:#}", transcript()?);
            Ok(())
        }
        [flag, left, right] if flag == "--compare" => compare(left, right),
        _ => bail!("usage: nvml-transcript | nvml-transcript --compare LEFT RIGHT"),
    }
}

/// What a call gave: its value, or the number of its error.
fn outcome(code: u32, value: Value) -> Value {
    if code == 0 {
        value
    } else {
        json!({ "error": code })
    }
}

/// Calls a function that fills one value; a function that the library lacks is listed as missing.
macro_rules! read {
    ($entries:ident, $name:expr, $function:expr, $kind:ty, |$out:ident| $arguments:expr, |$value:ident| $shown:expr) => {{
        let shown = match &$function {
            Err(_) => json!("missing"),
            Ok(function) => {
                // SAFETY: every bit pattern is valid for the plain structs and numbers of NVML.
                let mut place: $kind = unsafe { std::mem::zeroed() };
                let $out = &raw mut place;
                #[allow(clippy::redundant_closure_call, reason = "spreads the arguments")]
                // SAFETY: the function has this signature, and the pointer lives through the call.
                let code = unsafe { ($arguments)(*function) };
                let $value = place;
                outcome(code, json!($shown))
            }
        };
        $entries.insert($name.to_string(), shown);
    }};
}

macro_rules! numbers {
    ($entries:ident, $lib:ident, $device:ident, $kind:ty, [$($function:ident)*]) => {$(
        read!($entries, stringify!($function).trim_start_matches("nvml"), $lib.$function, $kind,
            |out| |f: unsafe extern "C" fn(nvmlDevice_t, *mut $kind) -> u32| f($device, out), |value| value);
    )*};
}

macro_rules! numbers_of {
    ($entries:ident, $lib:ident, $device:ident, $kind:ty, $range:expr, [$($function:ident)*]) => {$(
        for argument in $range {
            let name = format!("{}[{argument}]", stringify!($function).trim_start_matches("nvml"));
            read!($entries, name, $lib.$function, $kind,
                |out| |f: unsafe extern "C" fn(nvmlDevice_t, u32, *mut $kind) -> u32| f($device, argument, out), |value| value);
        }
    )*};
}

macro_rules! pairs {
    ($entries:ident, $lib:ident, $device:ident, $kind:ty, [$($function:ident)*]) => {$(
        read!($entries, stringify!($function).trim_start_matches("nvml"), $lib.$function, [$kind; 2],
            |out| |f: unsafe extern "C" fn(nvmlDevice_t, *mut $kind, *mut $kind) -> u32| {
                let first = out.cast::<$kind>();
                f($device, first, first.add(1))
            }, |value| value);
    )*};
}

macro_rules! texts {
    ($entries:ident, $lib:ident, $device:ident, [$($function:ident)*]) => {$(
        read!($entries, stringify!($function).trim_start_matches("nvml"), $lib.$function, [c_char; TEXT_LENGTH as usize],
            |out| |f: unsafe extern "C" fn(nvmlDevice_t, *mut c_char, u32) -> u32| f($device, out.cast(), TEXT_LENGTH),
            |value| text(&value));
    )*};
}

fn text(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer
        .iter()
        .map(|c| c.cast_unsigned())
        .take_while(|byte| *byte != 0)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn version_of<T>(version: u32) -> u32 {
    u32::try_from(size_of::<T>()).unwrap_or(0) | version << 24
}

fn transcript() -> Result<Value> {
    // SAFETY: loads NVML by the name under which every program loads it.
    let lib = unsafe { NvmlLib::new("libnvidia-ml.so.1") }.context("load libnvidia-ml.so.1")?;
    let lib = &lib;
    let initialize = lib
        .nvmlInit_v2
        .as_ref()
        .map_err(|error| anyhow::anyhow!("{error}"))?;
    // SAFETY: takes nothing.
    let code = unsafe { initialize() };
    ensure!(code == 0, "nvmlInit_v2: error {code}");
    let mut system = Map::new();
    for (name, function) in [
        ("SystemGetDriverVersion", &lib.nvmlSystemGetDriverVersion),
        ("SystemGetNVMLVersion", &lib.nvmlSystemGetNVMLVersion),
    ] {
        read!(
            system,
            name,
            *function,
            [c_char; TEXT_LENGTH as usize],
            |out| |f: unsafe extern "C" fn(*mut c_char, u32) -> u32| f(out.cast(), TEXT_LENGTH),
            |value| text(&value)
        );
    }
    read!(
        system,
        "SystemGetCudaDriverVersion",
        lib.nvmlSystemGetCudaDriverVersion,
        i32,
        |out| |f: unsafe extern "C" fn(*mut i32) -> u32| f(out),
        |value| value
    );
    read!(
        system,
        "DeviceGetCount",
        lib.nvmlDeviceGetCount_v2,
        u32,
        |out| |f: unsafe extern "C" fn(*mut u32) -> u32| f(out),
        |value| value
    );
    for code in (0..=30).chain([999]) {
        if let Ok(function) = &lib.nvmlErrorString {
            // SAFETY: gives a string that lives as long as the library.
            let words = unsafe { CStr::from_ptr(function(code)) };
            system.insert(
                format!("ErrorString[{code}]"),
                json!(words.to_string_lossy()),
            );
        }
    }
    let count = system
        .get("DeviceGetCount")
        .and_then(Value::as_u64)
        .unwrap_or(0);
    let gpus: Vec<Value> = (0..count)
        .map(|index| gpu(lib, u32::try_from(index).unwrap_or(0)))
        .collect();
    Ok(json!({ "system": system, "gpus": gpus }))
}

#[allow(clippy::cognitive_complexity, reason = "a list of calls")]
fn gpu(lib: &NvmlLib, index: u32) -> Value {
    let mut handle: nvmlDevice_t = std::ptr::null_mut();
    let code = match &lib.nvmlDeviceGetHandleByIndex_v2 {
        // SAFETY: fills one handle that lives through the call.
        Ok(function) => unsafe { function(index, &raw mut handle) },
        Err(_) => return json!("missing"),
    };
    if code != 0 {
        return json!({ "error": code });
    }
    let mut entries = Map::new();
    texts!(entries, lib, handle, [
        nvmlDeviceGetName nvmlDeviceGetSerial nvmlDeviceGetUUID nvmlDeviceGetVbiosVersion
        nvmlDeviceGetBoardPartNumber nvmlDeviceGetInforomImageVersion
    ]);
    numbers!(entries, lib, handle, u32, [
        nvmlDeviceGetBrand nvmlDeviceGetIndex nvmlDeviceGetModuleId nvmlDeviceGetMinorNumber nvmlDeviceGetBoardId
        nvmlDeviceGetMultiGpuBoard nvmlDeviceGetArchitecture nvmlDeviceGetNumGpuCores nvmlDeviceGetPersistenceMode
        nvmlDeviceGetComputeMode nvmlDeviceGetVirtualizationMode nvmlDeviceGetDisplayMode nvmlDeviceGetDisplayActive
        nvmlDeviceGetAccountingMode nvmlDeviceGetAccountingBufferSize nvmlDeviceGetMemoryBusWidth
        nvmlDeviceGetMaxPcieLinkGeneration nvmlDeviceGetGpuMaxPcieLinkGeneration nvmlDeviceGetMaxPcieLinkWidth
        nvmlDeviceGetCurrPcieLinkGeneration nvmlDeviceGetCurrPcieLinkWidth nvmlDeviceGetPcieReplayCounter
        nvmlDeviceGetPcieLinkMaxSpeed nvmlDeviceGetPcieSpeed nvmlDeviceGetBusType nvmlDeviceGetPerformanceState
        nvmlDeviceGetPowerState nvmlDeviceGetPowerManagementMode nvmlDeviceGetPowerManagementLimit
        nvmlDeviceGetEnforcedPowerLimit nvmlDeviceGetPowerManagementDefaultLimit nvmlDeviceGetPowerUsage
        nvmlDeviceGetPowerSource nvmlDeviceGetNumFans nvmlDeviceGetFanSpeed nvmlDeviceGetDefaultEccMode
        nvmlDeviceGetRetiredPagesPendingStatus nvmlDeviceGetMaxMigDeviceCount nvmlDeviceIsMigDeviceHandle
        nvmlDeviceGetGpuInstanceId nvmlDeviceGetComputeInstanceId nvmlDeviceGetNumaNodeId nvmlDeviceGetIrqNum
        nvmlDeviceGetAdaptiveClockInfoStatus nvmlDeviceGetInforomConfigurationChecksum
    ]);
    numbers!(entries, lib, handle, i32, [nvmlDeviceGetGpcClkVfOffset nvmlDeviceGetMemClkVfOffset]);
    numbers!(entries, lib, handle, u64, [
        nvmlDeviceGetTotalEnergyConsumption nvmlDeviceGetSupportedEventTypes nvmlDeviceGetCurrentClocksEventReasons
        nvmlDeviceGetCurrentClocksThrottleReasons nvmlDeviceGetSupportedClocksEventReasons
    ]);
    pairs!(entries, lib, handle, u32, [
        nvmlDeviceGetPowerManagementLimitConstraints nvmlDeviceGetEccMode nvmlDeviceGetMigMode
        nvmlDeviceGetEncoderUtilization nvmlDeviceGetDecoderUtilization nvmlDeviceGetJpgUtilization
        nvmlDeviceGetOfaUtilization nvmlDeviceGetGspFirmwareMode nvmlDeviceGetMinMaxFanSpeed
        nvmlDeviceGetAutoBoostedClocksEnabled nvmlDeviceGetGpuOperationMode nvmlDeviceGetDriverModel_v2
    ]);
    pairs!(
        entries,
        lib,
        handle,
        i32,
        [nvmlDeviceGetCudaComputeCapability]
    );
    numbers_of!(entries, lib, handle, u32, 0..4, [
        nvmlDeviceGetClockInfo nvmlDeviceGetMaxClockInfo nvmlDeviceGetApplicationsClock
        nvmlDeviceGetDefaultApplicationsClock nvmlDeviceGetMaxCustomerBoostClock
    ]);
    numbers_of!(entries, lib, handle, u32, 0..2, [nvmlDeviceGetTemperature nvmlDeviceGetPcieThroughput]);
    numbers_of!(
        entries,
        lib,
        handle,
        u32,
        0..8,
        [nvmlDeviceGetTemperatureThreshold]
    );
    numbers_of!(entries, lib, handle, u32, 0..20, [
        nvmlDeviceGetNvLinkState nvmlDeviceGetNvLinkVersion nvmlDeviceGetNvLinkRemoteDeviceType
    ]);
    structs(lib, handle, &mut entries);
    supported_clocks(lib, handle, &mut entries);
    if let Err(error) = unrepairable_memory(handle, &mut entries) {
        entries.insert(
            "DeviceGetUnrepairableMemoryFlag_v1".to_owned(),
            json!(error.to_string()),
        );
    }
    with_two_arguments(lib, handle, &mut entries);
    fields(lib, handle, &mut entries);
    Value::Object(entries)
}

/// Versioned and other structs.
#[allow(clippy::cognitive_complexity, reason = "a list of calls")]
fn structs(lib: &NvmlLib, handle: nvmlDevice_t, entries: &mut Map<String, Value>) {
    macro_rules! plain {
        ($function:ident, $kind:ty, |$value:ident| $shown:expr) => {
            read!(
                entries,
                stringify!($function).trim_start_matches("nvml"),
                lib.$function,
                $kind,
                |out| |f: unsafe extern "C" fn(nvmlDevice_t, *mut $kind) -> u32| f(handle, out),
                |$value| $shown
            )
        };
    }
    macro_rules! versioned {
        ($function:ident, $kind:ty, $version:expr, |$value:ident| $shown:expr) => {
            read!(
                entries,
                stringify!($function).trim_start_matches("nvml"),
                lib.$function,
                $kind,
                |out| |f: unsafe extern "C" fn(nvmlDevice_t, *mut $kind) -> u32| {
                    (*out).version = version_of::<$kind>($version);
                    f(handle, out)
                },
                |$value| $shown
            )
        };
    }
    plain!(nvmlDeviceGetPciInfo_v3, sys::nvmlPciInfo_t, |it| {
        json!({"bus_id": text(&it.busId), "legacy": text(&it.busIdLegacy), "domain": it.domain, "bus": it.bus,
            "device": it.device, "device_id": it.pciDeviceId, "subsystem_id": it.pciSubSystemId})
    });
    versioned!(nvmlDeviceGetPciInfoExt, sys::nvmlPciInfoExt_t, 1, |it| {
        json!({"base_class": it.baseClass, "sub_class": it.subClass, "device_id": it.pciDeviceId})
    });
    plain!(
        nvmlDeviceGetMemoryInfo,
        sys::nvmlMemory_t,
        |it| json!({"total": it.total, "used": it.used, "free": it.free})
    );
    versioned!(nvmlDeviceGetMemoryInfo_v2, sys::nvmlMemory_v2_t, 2, |it| {
        json!({"total": it.total, "reserved": it.reserved, "used": it.used, "free": it.free})
    });
    plain!(nvmlDeviceGetBAR1MemoryInfo, sys::nvmlBAR1Memory_t, |it| {
        json!({"total": it.bar1Total, "used": it.bar1Used, "free": it.bar1Free})
    });
    plain!(nvmlDeviceGetFBCStats, sys::nvmlFBCStats_t, |it| [
        it.sessionsCount,
        it.averageFPS,
        it.averageLatency
    ]);
    read!(
        entries,
        "DeviceGetEncoderStats",
        lib.nvmlDeviceGetEncoderStats,
        [u32; 3],
        |out| |f: unsafe extern "C" fn(nvmlDevice_t, *mut u32, *mut u32, *mut u32) -> u32| {
            let first = out.cast::<u32>();
            f(handle, first, first.add(1), first.add(2))
        },
        |value| value
    );
    plain!(
        nvmlDeviceGetUtilizationRates,
        sys::nvmlUtilization_t,
        |it| json!([it.gpu, it.memory])
    );
    versioned!(nvmlDeviceGetPdi, sys::nvmlPdi_t, 1, |it| it.value);
    versioned!(
        nvmlDeviceGetAddressingMode,
        sys::nvmlDeviceAddressingMode_t,
        1,
        |it| it.value
    );
    plain!(nvmlDeviceGetC2cModeInfoV, sys::nvmlC2cModeInfo_v1_t, |it| {
        it.isC2cEnabled
    });
    versioned!(
        nvmlDeviceGetMarginTemperature,
        sys::nvmlMarginTemperature_t,
        1,
        |it| it.marginTemperature
    );
    versioned!(nvmlDeviceGetTemperatureV, sys::nvmlTemperature_t, 1, |it| {
        it.temperature
    });
    versioned!(
        nvmlDeviceGetRepairStatus,
        sys::nvmlRepairStatus_t,
        1,
        |it| { [it.bChannelRepairPending, it.bTpcRepairPending] }
    );
    versioned!(
        nvmlDeviceGetSramEccErrorStatus,
        sys::nvmlEccSramErrorStatus_t,
        1,
        |it| {
            json!({"volatile": [it.volatileCor, it.volatileUncParity, it.volatileUncSecDed],
            "aggregate": [it.aggregateCor, it.aggregateUncParity, it.aggregateUncSecDed],
            "sources": [it.aggregateUncBucketL2, it.aggregateUncBucketSm, it.aggregateUncBucketMcu,
                it.aggregateUncBucketPcie, it.aggregateUncBucketOther],
            "threshold_exceeded": it.bThresholdExceeded})
        }
    );
    plain!(
        nvmlDeviceGetRowRemapperHistogram,
        sys::nvmlRowRemapperHistogramValues_t,
        |it| { [it.max, it.high, it.partial, it.low, it.none] }
    );
    plain!(nvmlDeviceGetGpuFabricInfo, sys::nvmlGpuFabricInfo_t, |it| {
        json!({"state": it.state, "status": it.status, "clique": it.cliqueId})
    });
    versioned!(
        nvmlDeviceGetGpuFabricInfoV,
        sys::nvmlGpuFabricInfoV_t,
        3,
        |it| {
            json!({"state": it.state, "status": it.status, "clique": it.cliqueId, "health_mask": it.healthMask,
            "health_summary": it.healthSummary})
        }
    );
    versioned!(
        nvmlDeviceGetPlatformInfo,
        sys::nvmlPlatformInfo_t,
        2,
        |it| {
            json!({"module": it.moduleId, "slot": it.slotNumber, "tray": it.trayIndex, "host": it.hostId, "peer": it.peerType})
        }
    );
    versioned!(
        nvmlDeviceGetCapabilities,
        sys::nvmlDeviceCapabilities_t,
        1,
        |it| it.capMask
    );
    read!(
        entries,
        "DeviceGetRemappedRows",
        lib.nvmlDeviceGetRemappedRows,
        [u32; 4],
        |out| |f: unsafe extern "C" fn(
            nvmlDevice_t,
            *mut u32,
            *mut u32,
            *mut u32,
            *mut u32,
        ) -> u32| {
            let first = out.cast::<u32>();
            f(handle, first, first.add(1), first.add(2), first.add(3))
        },
        |value| value
    );
    read!(
        entries,
        "DeviceGetGspFirmwareVersion",
        lib.nvmlDeviceGetGspFirmwareVersion,
        [c_char; TEXT_LENGTH as usize],
        |out| |f: unsafe extern "C" fn(nvmlDevice_t, *mut c_char) -> u32| f(handle, out.cast()),
        |value| text(&value)
    );
    read!(
        entries,
        "DeviceValidateInforom",
        lib.nvmlDeviceValidateInforom,
        u32,
        |_out| |f: unsafe extern "C" fn(nvmlDevice_t) -> u32| f(handle),
        |value| value
    );
    for object in 0..4 {
        read!(
            entries,
            format!("DeviceGetInforomVersion[{object}]"),
            lib.nvmlDeviceGetInforomVersion,
            [c_char; TEXT_LENGTH as usize],
            |out| |f: unsafe extern "C" fn(nvmlDevice_t, u32, *mut c_char, u32) -> u32| f(
                handle,
                object,
                out.cast(),
                TEXT_LENGTH
            ),
            |value| text(&value)
        );
    }
    for policy in 0..12 {
        read!(
            entries,
            format!("DeviceGetViolationStatus[{policy}]"),
            lib.nvmlDeviceGetViolationStatus,
            sys::nvmlViolationTime_t,
            |out| |f: unsafe extern "C" fn(
                nvmlDevice_t,
                u32,
                *mut sys::nvmlViolationTime_t,
            ) -> u32| f(handle, policy, out),
            |value| value.violationTime
        );
    }
    for (name, function) in [
        (
            "DeviceGetComputeRunningProcesses",
            &lib.nvmlDeviceGetComputeRunningProcesses_v3,
        ),
        (
            "DeviceGetGraphicsRunningProcesses",
            &lib.nvmlDeviceGetGraphicsRunningProcesses_v3,
        ),
    ] {
        read!(
            entries,
            name,
            *function,
            u32,
            |out| |f: unsafe extern "C" fn(
                nvmlDevice_t,
                *mut u32,
                *mut sys::nvmlProcessInfo_t,
            ) -> u32| { f(handle, out, std::ptr::null_mut()) },
            |count| count
        );
    }
}

/// The memory clocks that can be set, and the graphics clocks that go with each.
fn supported_clocks(lib: &NvmlLib, handle: nvmlDevice_t, entries: &mut Map<String, Value>) {
    const ROOM: u32 = 512;
    let (Ok(memory), Ok(graphics)) = (
        &lib.nvmlDeviceGetSupportedMemoryClocks,
        &lib.nvmlDeviceGetSupportedGraphicsClocks,
    ) else {
        return;
    };
    let list = |call: &dyn Fn(*mut u32, *mut u32) -> u32| {
        let (mut count, mut clocks) = (ROOM, vec![0_u32; ROOM as usize]);
        let code = call(&raw mut count, clocks.as_mut_ptr());
        clocks.truncate(count as usize);
        (code, clocks)
    };
    // SAFETY: fills at most `count` clocks of a list that has as many.
    let (code, memory_clocks) = list(&|count, clocks| unsafe { memory(handle, count, clocks) });
    for clock in memory_clocks.iter().filter(|_| code == 0) {
        // SAFETY: as above.
        let (code, clocks) =
            list(&|count, clocks| unsafe { graphics(handle, *clock, count, clocks) });
        let name = format!("DeviceGetSupportedGraphicsClocks[{clock}]");
        entries.insert(name, outcome(code, json!(clocks)));
    }
    entries.insert(
        "DeviceGetSupportedMemoryClocks".to_owned(),
        outcome(code, json!(memory_clocks)),
    );
}

/// A function that came after the bindings, by its name.
fn unrepairable_memory(handle: nvmlDevice_t, entries: &mut Map<String, Value>) -> Result<()> {
    /// As in nvidia-ml-py 13.615.
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct UnrepairableMemory {
        version: u32,
        unrepairable: u32,
    }
    type Function = unsafe extern "C" fn(nvmlDevice_t, *mut UnrepairableMemory) -> u32;
    // SAFETY: the library is loaded already.
    let library = unsafe { libloading::Library::new("libnvidia-ml.so.1") }
        .context("load libnvidia-ml.so.1")?;
    // SAFETY: the function has this signature.
    let function = unsafe { library.get::<Function>(b"nvmlDeviceGetUnrepairableMemoryFlag_v1\0") }
        .map(|symbol| *symbol);
    read!(
        entries,
        "DeviceGetUnrepairableMemoryFlag_v1",
        function,
        UnrepairableMemory,
        |out| |f: Function| {
            (*out).version = version_of::<UnrepairableMemory>(1);
            f(handle, out)
        },
        |it| it.unrepairable
    );
    Ok(())
}

/// Calls with two numbers before the result.
fn with_two_arguments(lib: &NvmlLib, handle: nvmlDevice_t, entries: &mut Map<String, Value>) {
    for kind in 0..2 {
        for counter in 0..2 {
            read!(
                entries,
                format!("DeviceGetTotalEccErrors[{kind},{counter}]"),
                lib.nvmlDeviceGetTotalEccErrors,
                u64,
                |out| |f: unsafe extern "C" fn(nvmlDevice_t, u32, u32, *mut u64) -> u32| f(
                    handle, kind, counter, out
                ),
                |value| value
            );
            for place in 0..8 {
                read!(
                    entries,
                    format!("DeviceGetMemoryErrorCounter[{kind},{counter},{place}]"),
                    lib.nvmlDeviceGetMemoryErrorCounter,
                    u64,
                    |out| |f: unsafe extern "C" fn(
                        nvmlDevice_t,
                        u32,
                        u32,
                        u32,
                        *mut u64,
                    ) -> u32| { f(handle, kind, counter, place, out) },
                    |value| value
                );
            }
        }
    }
    for kind in 0..4 {
        for which in 0..4 {
            read!(
                entries,
                format!("DeviceGetClock[{kind},{which}]"),
                lib.nvmlDeviceGetClock,
                u32,
                |out| |f: unsafe extern "C" fn(nvmlDevice_t, u32, u32, *mut u32) -> u32| f(
                    handle, kind, which, out
                ),
                |value| value
            );
        }
    }
    for link in 0..18 {
        for counter in 0..5 {
            read!(
                entries,
                format!("DeviceGetNvLinkErrorCounter[{link},{counter}]"),
                lib.nvmlDeviceGetNvLinkErrorCounter,
                u64,
                |out| |f: unsafe extern "C" fn(nvmlDevice_t, u32, u32, *mut u64) -> u32| f(
                    handle, link, counter, out
                ),
                |value| value
            );
        }
        for capability in 0..6 {
            read!(
                entries,
                format!("DeviceGetNvLinkCapability[{link},{capability}]"),
                lib.nvmlDeviceGetNvLinkCapability,
                u32,
                |out| |f: unsafe extern "C" fn(nvmlDevice_t, u32, u32, *mut u32) -> u32| f(
                    handle, link, capability, out
                ),
                |value| value
            );
        }
    }
    for cause in 0..2 {
        read!(
            entries,
            format!("DeviceGetRetiredPages[{cause}]"),
            lib.nvmlDeviceGetRetiredPages,
            u32,
            |out| |f: unsafe extern "C" fn(nvmlDevice_t, u32, *mut u32, *mut u64) -> u32| {
                f(handle, cause, out, std::ptr::null_mut())
            },
            |count| count
        );
    }
}

/// Every field, and those of a link for the first link and for all of them.
fn fields(lib: &NvmlLib, handle: nvmlDevice_t, entries: &mut Map<String, Value>) {
    let Ok(function) = &lib.nvmlDeviceGetFieldValues else {
        entries.insert("DeviceGetFieldValues".to_owned(), json!("missing"));
        return;
    };
    for field in 1..FIELDS {
        for scope in [0, 2, u32::MAX] {
            // The memory's scope is known to power fields alone, and all links at once to link
            // fields alone.
            let power = (field_id::NVML_FI_DEV_POWER_AVERAGE
                ..=field_id::NVML_FI_DEV_POWER_REQUESTED_LIMIT)
                .contains(&field);
            let link = (161..=168).contains(&field) || (201..=225).contains(&field);
            if (scope == 2 && !power) || (scope == u32::MAX && !link) {
                continue;
            }
            // SAFETY: every bit pattern is valid for this plain struct.
            let mut values: [sys::nvmlFieldValue_t; 2] = unsafe { std::mem::zeroed() };
            let [value, behind] = &mut values;
            value.fieldId = field;
            value.scopeId = scope;
            // Drivers answer the entry after the last one, too, unless it has failed already
            // (580.159).
            behind.nvmlReturn = sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN;
            // SAFETY: fills one field value, and may read the one after it; both live through the
            // call.
            let code = unsafe { function(handle, 1, values.as_mut_ptr()) };
            let shown = if code != 0 {
                json!({ "error": code })
            } else {
                outcome(values[0].nvmlReturn, field_value(&values[0]))
            };
            let name = match scope {
                0 => format!("Field[{field}]"),
                2 => format!("Field[{field}] of the memory"),
                _ => format!("Field[{field}] of all links"),
            };
            entries.insert(name, shown);
        }
    }
}

fn field_value(field: &sys::nvmlFieldValue_t) -> Value {
    let value = field.value;
    // SAFETY: the type names the member that was written, and every bit pattern is valid for each.
    unsafe {
        match field.valueType {
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_DOUBLE => json!({"double": value.dVal}),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT => json!({"u32": value.uiVal}),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_INT => json!({"i32": value.siVal}),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_LONG_LONG => {
                json!({"i64": value.sllVal})
            }
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_SHORT => json!({"u16": value.usVal}),
            _ => json!({"u64": value.ullVal}),
        }
    }
}

fn compare(left: &str, right: &str) -> Result<()> {
    let read = |path: &str| -> Result<Value> {
        let text = std::fs::read_to_string(path).with_context(|| format!("read {path}"))?;
        serde_json::from_str(&text).with_context(|| format!("parse {path}"))
    };
    let (left, right) = (read(left)?, read(right)?);
    let mut differences = 0;
    let mut both = vec![("system".to_owned(), &left["system"], &right["system"])];
    let gpus = |value: &'_ Value| value["gpus"].as_array().map_or(0, Vec::len);
    for index in 0..gpus(&left).max(gpus(&right)) {
        both.push((
            format!("gpu {index}"),
            &left["gpus"][index],
            &right["gpus"][index],
        ));
    }
    let mut compared = 0;
    for (place, left, right) in both {
        let keys = |value: &Value| -> BTreeSet<String> {
            value
                .as_object()
                .into_iter()
                .flat_map(Map::keys)
                .cloned()
                .collect()
        };
        for key in keys(left).union(&keys(right)) {
            compared += 1;
            if left[key] != right[key] {
                differences += 1;
                println!("{place} {key}: {} | {}", left[key], right[key]);
            }
        }
    }
    println!("{differences} of {compared} entries differ");
    Ok(())
}
