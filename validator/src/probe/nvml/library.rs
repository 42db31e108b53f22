//! The FFI corner of NVML: every unsafe call, typed, announced before it is made.
#![expect(unsafe_code, reason = "the only place that calls NVML's C functions")]

mod xid_events;

use std::ffi::{OsStr, c_char, c_int, c_uint, c_ulonglong};
use std::mem::size_of;

use libloading::Library;
use nvml_wrapper_sys::bindings::{
    NvmlLib, nvmlDevice_t, nvmlEccSramErrorStatus_v1_t, nvmlFieldValue_st, nvmlGpuFabricInfo_t,
    nvmlGpuFabricInfo_v2_t, nvmlGpuFabricInfo_v3_t, nvmlMarginTemperature_v1_t, nvmlMemory_st,
    nvmlMemory_v2_st, nvmlPciInfo_st, nvmlProcessInfo_v1_st, nvmlProcessInfo_v2_st,
    nvmlRepairStatus_v1_t, nvmlReturn_t, nvmlRowRemapperHistogramValues_st, nvmlUtilization_st,
    nvmlValue_st, nvmlViolationTime_st,
};

use super::calls::{CallFailure, Called, Calls, Failure};
use super::status::{
    ERROR_ARGUMENT_VERSION_MISMATCH, ERROR_CORRUPTED_INFOROM, ERROR_INSUFFICIENT_SIZE,
    ERROR_INVALID_ARGUMENT, ERROR_NOT_SUPPORTED, ERROR_UNKNOWN, SUCCESS,
};
pub(super) use xid_events::XidEvents;

type Symbol<F> = Result<F, libloading::Error>;
type Getter<T> = unsafe extern "C" fn(nvmlDevice_t, *mut T) -> nvmlReturn_t;
type GetterOf<A, T> = unsafe extern "C" fn(nvmlDevice_t, A, *mut T) -> nvmlReturn_t;
type PairGetter<T> = unsafe extern "C" fn(nvmlDevice_t, *mut T, *mut T) -> nvmlReturn_t;
type TextGetter = unsafe extern "C" fn(nvmlDevice_t, *mut c_char, c_uint) -> nvmlReturn_t;
type ListGetter<T> = unsafe extern "C" fn(nvmlDevice_t, *mut c_uint, *mut T) -> nvmlReturn_t;

/// `NVML_STRUCT_VERSION`: the size of a versioned struct and its version in one number.
#[expect(
    clippy::cast_possible_truncation,
    reason = "structs of a few hundred bytes"
)]
const fn struct_version<T>(version: u32) -> u32 {
    size_of::<T>() as u32 | version << 24
}

/// `nvmlUnrepairableMemoryStatus_v1_t`, newer than the bindings.
#[repr(C)]
#[derive(Clone, Copy)]
struct UnrepairableMemoryStatusV1 {
    version: c_uint,
    unrepairable_memory: c_uint,
}

/// A loaded and initialised NVML.
pub(super) struct NvmlLibrary {
    functions: NvmlLib,
    /// A second handle on the same library, for symbols that the bindings do not know.
    library: Library,
}

impl NvmlLibrary {
    /// Loads the library; nothing is initialised yet.
    pub(super) fn load(path: &OsStr) -> Result<Self, String> {
        // SAFETY: loading runs the library's initialisers; NVML's have no precondition.
        let library = unsafe { Library::new(path) }.map_err(|error| error.to_string())?;
        // SAFETY: as above; the second handle only counts up the loader's reference.
        let functions = unsafe { NvmlLib::new(path) }.map_err(|error| error.to_string())?;
        Ok(Self { functions, library })
    }

    pub(super) fn simulator_scenario(&self) -> Option<String> {
        crate::driver_libraries::simulator_scenario(&self.library)
    }

    pub(super) fn initialize(&self, calls: &Calls) -> Called<()> {
        calls.make("nvmlInit_v2", || {
            let function = symbol(&self.functions.nvmlInit_v2)?;
            // SAFETY: nvmlInit_v2 takes no arguments and may be called at any time.
            checked(unsafe { function() })
        })
    }

    pub(super) fn driver_version(&self, calls: &Calls) -> Called<String> {
        calls.make("nvmlSystemGetDriverVersion", || {
            let function = symbol(&self.functions.nvmlSystemGetDriverVersion)?;
            // SAFETY: the buffer has the length that is passed.
            text(|buffer, length| unsafe { function(buffer, length) })
        })
    }

    pub(super) fn nvml_version(&self, calls: &Calls) -> Called<String> {
        calls.make("nvmlSystemGetNVMLVersion", || {
            let function = symbol(&self.functions.nvmlSystemGetNVMLVersion)?;
            // SAFETY: the buffer has the length that is passed.
            text(|buffer, length| unsafe { function(buffer, length) })
        })
    }

    pub(super) fn cuda_driver_version(&self, calls: &Calls) -> Called<c_int> {
        calls.make("nvmlSystemGetCudaDriverVersion_v2", || {
            let function = symbol(&self.functions.nvmlSystemGetCudaDriverVersion_v2)?;
            let mut version = 0;
            // SAFETY: the pointer is to a live int.
            checked(unsafe { function(&raw mut version) }).map(|()| version)
        })
    }

    pub(super) fn device_count(&self, calls: &Calls) -> Called<u32> {
        calls.make("nvmlDeviceGetCount_v2", || {
            let function = symbol(&self.functions.nvmlDeviceGetCount_v2)?;
            let mut count = 0;
            // SAFETY: the pointer is to a live unsigned int.
            checked(unsafe { function(&raw mut count) }).map(|()| count)
        })
    }

    /// The GPU with NVML's number `index`; its calls are made through `calls`.
    pub(super) fn device<'a>(&'a self, index: u32, calls: &'a Calls) -> Called<Device<'a>> {
        let handle = calls.make("nvmlDeviceGetHandleByIndex_v2", || {
            let function = symbol(&self.functions.nvmlDeviceGetHandleByIndex_v2)?;
            let mut handle: nvmlDevice_t = std::ptr::null_mut();
            // SAFETY: the pointer is to a live handle, which NVML fills in on success.
            checked(unsafe { function(index, &raw mut handle) }).map(|()| handle)
        })?;
        Ok(Device {
            nvml: self,
            handle,
            calls,
        })
    }
}

/// One GPU or MIG device. The handle stays on the thread that requested it.
pub(super) struct Device<'a> {
    nvml: &'a NvmlLibrary,
    handle: nvmlDevice_t,
    calls: &'a Calls<'a>,
}

/// Methods of the shape `nvmlDeviceGetX(device, &value)`.
macro_rules! getters {
    ($($method:ident = $function:ident -> $type:ty;)*) => {
        impl Device<'_> {
            $(pub(super) fn $method(&self) -> Called<$type> {
                self.get(stringify!($function), &self.nvml.functions.$function, <$type>::default())
                    .and_then(|value| responded(stringify!($function), value))
            })*
        }
    };
}

/// A register of a device that does not respond reads all ones, which no such getter has as a value.
fn responded<T: Into<u64> + Copy>(function: &'static str, value: T) -> Called<T> {
    let number: u64 = value.into();
    if number == u64::from(u32::MAX) || number == u64::MAX {
        let cause = CallFailure::AllOnes;
        return Err(Failure { function, cause });
    }
    Ok(value)
}

/// Methods of the shape `nvmlDeviceGetX(device, argument, &value)`.
macro_rules! getters_of {
    ($($method:ident($argument:ident) = $function:ident -> $type:ty;)*) => {
        impl Device<'_> {
            $(pub(super) fn $method(&self, $argument: u32) -> Called<$type> {
                self.get_of(stringify!($function), &self.nvml.functions.$function, $argument, <$type>::default())
                    .and_then(|value| responded(stringify!($function), value))
            })*
        }
    };
}

/// Methods of the shape `nvmlDeviceGetX(device, &first, &second)`.
macro_rules! pair_getters {
    ($($method:ident = $function:ident -> $type:ty;)*) => {
        impl Device<'_> {
            $(pub(super) fn $method(&self) -> Called<($type, $type)> {
                self.get_pair(stringify!($function), &self.nvml.functions.$function, <$type>::default())
            })*
        }
    };
}

/// Methods of the shape `nvmlDeviceGetX(device, buffer, length)`.
macro_rules! text_getters {
    ($($method:ident = $function:ident;)*) => {
        impl Device<'_> {
            $(pub(super) fn $method(&self) -> Called<String> {
                self.get_text(stringify!($function), &self.nvml.functions.$function)
            })*
        }
    };
}

text_getters! {
    uuid = nvmlDeviceGetUUID;
    name = nvmlDeviceGetName;
    serial = nvmlDeviceGetSerial;
    vbios_version = nvmlDeviceGetVbiosVersion;
    board_part_number = nvmlDeviceGetBoardPartNumber;
    inforom_image_version = nvmlDeviceGetInforomImageVersion;
}

getters! {
    minor_number = nvmlDeviceGetMinorNumber -> c_uint;
    persistence_mode = nvmlDeviceGetPersistenceMode -> c_uint;
    compute_mode = nvmlDeviceGetComputeMode -> c_uint;
    performance_state = nvmlDeviceGetPerformanceState -> c_uint;
    virtualization_mode = nvmlDeviceGetVirtualizationMode -> c_uint;
    max_mig_device_count = nvmlDeviceGetMaxMigDeviceCount -> c_uint;
    retired_pages_pending = nvmlDeviceGetRetiredPagesPendingStatus -> c_uint;
    max_pcie_link_generation = nvmlDeviceGetMaxPcieLinkGeneration -> c_uint;
    gpu_max_pcie_link_generation = nvmlDeviceGetGpuMaxPcieLinkGeneration -> c_uint;
    max_pcie_link_width = nvmlDeviceGetMaxPcieLinkWidth -> c_uint;
    current_pcie_link_generation = nvmlDeviceGetCurrPcieLinkGeneration -> c_uint;
    current_pcie_link_width = nvmlDeviceGetCurrPcieLinkWidth -> c_uint;
    pcie_replay_counter = nvmlDeviceGetPcieReplayCounter -> c_uint;
    power_usage_mw = nvmlDeviceGetPowerUsage -> c_uint;
    enforced_power_limit_mw = nvmlDeviceGetEnforcedPowerLimit -> c_uint;
    default_power_limit_mw = nvmlDeviceGetPowerManagementDefaultLimit -> c_uint;
    clocks_event_reasons = nvmlDeviceGetCurrentClocksEventReasons -> c_ulonglong;
    clocks_throttle_reasons = nvmlDeviceGetCurrentClocksThrottleReasons -> c_ulonglong;
}

getters_of! {
    temperature(sensor) = nvmlDeviceGetTemperature -> c_uint;
    temperature_threshold(threshold) = nvmlDeviceGetTemperatureThreshold -> c_uint;
    clock_mhz(clock) = nvmlDeviceGetClockInfo -> c_uint;
    max_clock_mhz(clock) = nvmlDeviceGetMaxClockInfo -> c_uint;
    nvlink_state(link) = nvmlDeviceGetNvLinkState -> c_uint;
}

pair_getters! {
    ecc_mode = nvmlDeviceGetEccMode -> c_uint;
    mig_mode = nvmlDeviceGetMigMode -> c_uint;
    power_limit_range_mw = nvmlDeviceGetPowerManagementLimitConstraints -> c_uint;
    compute_capability = nvmlDeviceGetCudaComputeCapability -> c_int;
}

/// The PCI identity that NVML gives.
pub(super) struct PciIdentity {
    pub(super) domain: u32,
    pub(super) bus: u32,
    pub(super) device: u32,
    /// Device id << 16 | vendor id.
    pub(super) device_id: u32,
    pub(super) subsystem_id: u32,
}

impl From<nvmlPciInfo_st> for PciIdentity {
    fn from(info: nvmlPciInfo_st) -> Self {
        Self {
            domain: info.domain,
            bus: info.bus,
            device: info.device,
            device_id: info.pciDeviceId,
            subsystem_id: info.pciSubSystemId,
        }
    }
}

/// Total, reserved, free and used bytes.
pub(super) struct MemoryInfo {
    pub(super) total: u64,
    pub(super) reserved: Option<u64>,
    pub(super) free: u64,
    pub(super) used: u64,
}

/// Fabric registration, from the version of the struct that the driver knows.
pub(super) struct FabricInfo {
    pub(super) cluster_uuid: [u8; 16],
    pub(super) status: u32,
    pub(super) clique_id: u32,
    pub(super) state: u32,
    pub(super) health_mask: Option<u32>,
}

/// One value of `nvmlDeviceGetFieldValues`: the field's own status and its value as a number.
pub(super) type FieldValue = Called<u64>;

impl Device<'_> {
    pub(super) fn pci(&self) -> Called<PciIdentity> {
        let function = &self.nvml.functions.nvmlDeviceGetPciInfo_v3;
        self.get("nvmlDeviceGetPciInfo_v3", function, zeroed_pci_info())
            .map(PciIdentity::from)
    }

    pub(super) fn memory(&self) -> Called<MemoryInfo> {
        let v2 = nvmlMemory_v2_st {
            version: struct_version::<nvmlMemory_v2_st>(2),
            total: 0,
            reserved: 0,
            free: 0,
            used: 0,
        };
        let function = &self.nvml.functions.nvmlDeviceGetMemoryInfo_v2;
        match self.get("nvmlDeviceGetMemoryInfo_v2", function, v2) {
            Ok(memory) => Ok(MemoryInfo {
                total: memory.total,
                reserved: Some(memory.reserved),
                free: memory.free,
                used: memory.used,
            }),
            Err(failure) if failure.is_missing_function() => self.memory_v1(),
            Err(failure) => Err(failure),
        }
    }

    fn memory_v1(&self) -> Called<MemoryInfo> {
        let v1 = nvmlMemory_st {
            total: 0,
            free: 0,
            used: 0,
        };
        let function = &self.nvml.functions.nvmlDeviceGetMemoryInfo;
        let memory = self.get("nvmlDeviceGetMemoryInfo", function, v1)?;
        Ok(MemoryInfo {
            total: memory.total,
            reserved: None,
            free: memory.free,
            used: memory.used,
        })
    }

    /// The MIG device with this number; the numbers have gaps.
    pub(super) fn mig_device(&self, index: u32) -> Called<Device<'_>> {
        let function = &self.nvml.functions.nvmlDeviceGetMigDeviceHandleByIndex;
        let name = "nvmlDeviceGetMigDeviceHandleByIndex";
        let handle = self.get_of(name, function, index, std::ptr::null_mut())?;
        Ok(Device {
            nvml: self.nvml,
            handle,
            calls: self.calls,
        })
    }

    pub(super) fn memory_error_counter(
        &self,
        error_type: u32,
        counter_type: u32,
        location: u32,
    ) -> Called<u64> {
        self.calls.make("nvmlDeviceGetMemoryErrorCounter", || {
            let function = symbol(&self.nvml.functions.nvmlDeviceGetMemoryErrorCounter)?;
            let mut count = 0;
            // SAFETY: the handle is NVML's own and the pointer is to a live unsigned long long.
            let status = unsafe {
                function(
                    self.handle,
                    error_type,
                    counter_type,
                    location,
                    &raw mut count,
                )
            };
            checked(status).map(|()| count)
        })
    }

    pub(super) fn total_ecc_errors(&self, error_type: u32, counter_type: u32) -> Called<u64> {
        self.calls.make("nvmlDeviceGetTotalEccErrors", || {
            let function = symbol(&self.nvml.functions.nvmlDeviceGetTotalEccErrors)?;
            let mut count = 0;
            // SAFETY: the handle is NVML's own and the pointer is to a live unsigned long long.
            let status = unsafe { function(self.handle, error_type, counter_type, &raw mut count) };
            checked(status).map(|()| count)
        })
    }

    pub(super) fn sram_threshold_exceeded(&self) -> Called<bool> {
        let status = nvmlEccSramErrorStatus_v1_t {
            version: struct_version::<nvmlEccSramErrorStatus_v1_t>(1),
            aggregateUncParity: 0,
            aggregateUncSecDed: 0,
            aggregateCor: 0,
            volatileUncParity: 0,
            volatileUncSecDed: 0,
            volatileCor: 0,
            aggregateUncBucketL2: 0,
            aggregateUncBucketSm: 0,
            aggregateUncBucketPcie: 0,
            aggregateUncBucketMcu: 0,
            aggregateUncBucketOther: 0,
            bThresholdExceeded: 0,
        };
        let function = &self.nvml.functions.nvmlDeviceGetSramEccErrorStatus;
        self.get("nvmlDeviceGetSramEccErrorStatus", function, status)
            .map(|it| it.bThresholdExceeded != 0)
    }

    /// Channel repair pending, TPC repair pending.
    pub(super) fn repair_status(&self) -> Called<(bool, bool)> {
        let status = nvmlRepairStatus_v1_t {
            version: struct_version::<nvmlRepairStatus_v1_t>(1),
            bChannelRepairPending: 0,
            bTpcRepairPending: 0,
        };
        let function = &self.nvml.functions.nvmlDeviceGetRepairStatus;
        self.get("nvmlDeviceGetRepairStatus", function, status)
            .map(|it| (it.bChannelRepairPending != 0, it.bTpcRepairPending != 0))
    }

    pub(super) fn unrepairable_memory(&self) -> Called<bool> {
        const NAME: &str = "nvmlDeviceGetUnrepairableMemoryFlag_v1";
        // SAFETY: nvml.h declares this name with this signature.
        let function = unsafe {
            self.nvml
                .library
                .get::<Getter<UnrepairableMemoryStatusV1>>(NAME.as_bytes())
        }
        .map(|symbol| *symbol);
        let status = UnrepairableMemoryStatusV1 {
            version: struct_version::<UnrepairableMemoryStatusV1>(1),
            unrepairable_memory: 0,
        };
        self.get(NAME, &function, status)
            .map(|it| it.unrepairable_memory != 0)
    }

    /// Correctable rows, uncorrectable rows, pending, failure.
    pub(super) fn remapped_rows(&self) -> Called<(u32, u32, bool, bool)> {
        self.calls.make("nvmlDeviceGetRemappedRows", || {
            let function = symbol(&self.nvml.functions.nvmlDeviceGetRemappedRows)?;
            let (mut correctable, mut uncorrectable, mut pending, mut failure) = (0, 0, 0, 0);
            // SAFETY: the handle is NVML's own and all four pointers are to live unsigned ints.
            let status = unsafe {
                function(
                    self.handle,
                    &raw mut correctable,
                    &raw mut uncorrectable,
                    &raw mut pending,
                    &raw mut failure,
                )
            };
            checked(status).map(|()| (correctable, uncorrectable, pending != 0, failure != 0))
        })
    }

    pub(super) fn row_remapper_histogram(&self) -> Called<nvmlRowRemapperHistogramValues_st> {
        let empty = nvmlRowRemapperHistogramValues_st {
            max: 0,
            high: 0,
            partial: 0,
            low: 0,
            none: 0,
        };
        let function = &self.nvml.functions.nvmlDeviceGetRowRemapperHistogram;
        self.get("nvmlDeviceGetRowRemapperHistogram", function, empty)
    }

    /// How many pages were retired for this cause.
    pub(super) fn retired_page_count(&self, cause: u32) -> Called<u32> {
        self.calls.make("nvmlDeviceGetRetiredPages", || {
            let function = symbol(&self.nvml.functions.nvmlDeviceGetRetiredPages)?;
            let mut count = 0;
            // SAFETY: a count of 0 requests the number only, for which NVML takes a null buffer.
            let status =
                unsafe { function(self.handle, cause, &raw mut count, std::ptr::null_mut()) };
            match status {
                SUCCESS | ERROR_INSUFFICIENT_SIZE => Ok(count),
                other => Err(CallFailure::Status(other)),
            }
        })
    }

    pub(super) fn validate_inforom(&self) -> Called<bool> {
        self.calls.make("nvmlDeviceValidateInforom", || {
            let function = symbol(&self.nvml.functions.nvmlDeviceValidateInforom)?;
            // SAFETY: the handle is NVML's own.
            match unsafe { function(self.handle) } {
                SUCCESS => Ok(true),
                ERROR_CORRUPTED_INFOROM => Ok(false),
                other => Err(CallFailure::Status(other)),
            }
        })
    }

    pub(super) fn gsp_firmware_version(&self) -> Called<String> {
        self.calls.make("nvmlDeviceGetGspFirmwareVersion", || {
            let function = symbol(&self.nvml.functions.nvmlDeviceGetGspFirmwareVersion)?;
            // SAFETY: nvml.h requires NVML_GSP_FIRMWARE_VERSION_BUF_SIZE (64) bytes; the buffer has
            // more.
            text(|buffer, _| unsafe { function(self.handle, buffer) })
        })
    }

    pub(super) fn margin_temperature_c(&self) -> Called<i32> {
        let margin = nvmlMarginTemperature_v1_t {
            version: struct_version::<nvmlMarginTemperature_v1_t>(1),
            marginTemperature: 0,
        };
        let function = &self.nvml.functions.nvmlDeviceGetMarginTemperature;
        self.get("nvmlDeviceGetMarginTemperature", function, margin)
            .map(|it| it.marginTemperature)
    }

    /// Nanoseconds for which clocks were held down by this policy.
    pub(super) fn violation_ns(&self, policy: u32) -> Called<u64> {
        let none = nvmlViolationTime_st {
            referenceTime: 0,
            violationTime: 0,
        };
        let function = &self.nvml.functions.nvmlDeviceGetViolationStatus;
        self.get_of("nvmlDeviceGetViolationStatus", function, policy, none)
            .map(|it| it.violationTime)
    }

    /// Share of the driver's last sampling period in which kernels ran.
    pub(super) fn gpu_utilization_percent(&self) -> Called<u32> {
        let none = nvmlUtilization_st { gpu: 0, memory: 0 };
        let function = &self.nvml.functions.nvmlDeviceGetUtilizationRates;
        self.get("nvmlDeviceGetUtilizationRates", function, none)
            .map(|it| it.gpu)
    }

    pub(super) fn nvlink_error_counter(&self, link: u32, counter: u32) -> Called<u64> {
        self.calls.make("nvmlDeviceGetNvLinkErrorCounter", || {
            let function = symbol(&self.nvml.functions.nvmlDeviceGetNvLinkErrorCounter)?;
            let mut count = 0;
            // SAFETY: the handle is NVML's own and the pointer is to a live unsigned long long.
            checked(unsafe { function(self.handle, link, counter, &raw mut count) }).map(|()| count)
        })
    }

    /// Tries the newest struct first and steps back where the driver does not know it.
    pub(super) fn fabric(&self) -> Called<FabricInfo> {
        let older_struct = [ERROR_ARGUMENT_VERSION_MISMATCH, ERROR_INVALID_ARGUMENT];
        match self.fabric_v(3) {
            Err(failure)
                if failure
                    .status()
                    .is_some_and(|it| older_struct.contains(&it)) =>
            {
                self.fabric_v(2)
            }
            Err(failure) if failure.is_missing_function() => self.fabric_v1(),
            other => other,
        }
    }

    fn fabric_v(&self, version: u32) -> Called<FabricInfo> {
        // Version 2 is version 3 without its last field, so that one buffer serves both.
        let struct_version = match version {
            2 => struct_version::<nvmlGpuFabricInfo_v2_t>(2),
            _ => struct_version::<nvmlGpuFabricInfo_v3_t>(3),
        };
        let empty = nvmlGpuFabricInfo_v3_t {
            version: struct_version,
            clusterUuid: [0; 16],
            status: 0,
            cliqueId: 0,
            state: 0,
            healthMask: 0,
            healthSummary: 0,
        };
        let function = &self.nvml.functions.nvmlDeviceGetGpuFabricInfoV;
        let info = self.get("nvmlDeviceGetGpuFabricInfoV", function, empty)?;
        Ok(FabricInfo {
            cluster_uuid: info.clusterUuid,
            status: info.status,
            clique_id: info.cliqueId,
            state: u32::from(info.state),
            health_mask: Some(info.healthMask),
        })
    }

    fn fabric_v1(&self) -> Called<FabricInfo> {
        let empty = nvmlGpuFabricInfo_t {
            clusterUuid: [0; 16],
            status: 0,
            cliqueId: 0,
            state: 0,
        };
        let function = &self.nvml.functions.nvmlDeviceGetGpuFabricInfo;
        let info = self.get("nvmlDeviceGetGpuFabricInfo", function, empty)?;
        Ok(FabricInfo {
            cluster_uuid: info.clusterUuid,
            status: info.status,
            clique_id: info.cliqueId,
            state: u32::from(info.state),
            health_mask: None,
        })
    }

    /// Compute processes: process id and bytes of memory, where NVML reports them.
    pub(super) fn compute_processes(&self) -> ProcessList {
        self.processes([
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetComputeRunningProcesses_v2",
            "nvmlDeviceGetComputeRunningProcesses",
        ])
    }

    pub(super) fn graphics_processes(&self) -> ProcessList {
        self.processes([
            "nvmlDeviceGetGraphicsRunningProcesses_v3",
            "nvmlDeviceGetGraphicsRunningProcesses_v2",
            "nvmlDeviceGetGraphicsRunningProcesses",
        ])
    }

    /// Calls the newest function of the three that the driver has: R510 and newer, R470, before.
    fn processes(&self, [newest, older, oldest]: [&'static str; 3]) -> ProcessList {
        let is_missing = |list: &ProcessList| matches!(list, Err(it) if it.is_missing_function());
        let mut list = self.processes_by::<nvmlProcessInfo_v2_st>(newest);
        if is_missing(&list) {
            list = self.processes_by::<nvmlProcessInfo_v2_st>(older);
        }
        if is_missing(&list) {
            list = self.processes_by::<nvmlProcessInfo_v1_st>(oldest);
        }
        list
    }

    fn processes_by<T: ProcessInfo>(&self, name: &'static str) -> ProcessList {
        self.calls.make(name, || {
            // SAFETY: nvml.h declares the versions 2 and 3 of these functions with one struct, and
            // the one without a version with the struct that has process id and memory only; the
            // callers pass the name that fits `T`.
            let function = unsafe { self.nvml.library.get::<ListGetter<T>>(name.as_bytes()) }
                .map_err(|_| CallFailure::MissingSymbol)?;
            let mut capacity: c_uint = 64;
            // Processes come and go between two calls; a list that outgrows the buffer three times
            // is not waited for.
            for _ in 0..3 {
                let mut infos = vec![T::EMPTY; capacity as usize];
                let mut count = capacity;
                // SAFETY: the handle is NVML's own, and the buffer holds `count` entries.
                let status = unsafe { function(self.handle, &raw mut count, infos.as_mut_ptr()) };
                if status == ERROR_INSUFFICIENT_SIZE {
                    capacity = count.saturating_add(64).min(1 << 16);
                    continue;
                }
                checked(status)?;
                infos.truncate(count as usize);
                return Ok(infos.iter().map(process).collect());
            }
            Err(CallFailure::Status(ERROR_INSUFFICIENT_SIZE))
        })
    }

    /// Values of fields, each with the scope (an NVLink's number, mostly) in which it is requested.
    pub(super) fn field_values(&self, fields: &[(u32, u32)]) -> Called<Vec<FieldValue>> {
        self.calls.make("nvmlDeviceGetFieldValues", || {
            let function = symbol(&self.nvml.functions.nvmlDeviceGetFieldValues)?;
            let mut values: Vec<nvmlFieldValue_st> =
                fields.iter().copied().map(asked_field).collect();
            let count = c_int::try_from(values.len()).unwrap_or(c_int::MAX);
            values.push(BEHIND_THE_LAST);
            // SAFETY: the handle is NVML's own, and `values` holds `count` entries and the one
            // after them.
            checked(unsafe { function(self.handle, count, values.as_mut_ptr()) })?;
            values.truncate(fields.len());
            Ok(values.iter().map(field_value).collect())
        })
    }

    fn get<T: Copy>(
        &self,
        name: &'static str,
        function: &Symbol<Getter<T>>,
        initial: T,
    ) -> Called<T> {
        self.calls.make(name, || {
            let function = symbol(function)?;
            let mut value = initial;
            // SAFETY: the handle is NVML's own, and the pointer is to a live value of the type that
            // the header names.
            checked(unsafe { function(self.handle, &raw mut value) }).map(|()| value)
        })
    }

    fn get_of<A: Copy, T: Copy>(
        &self,
        name: &'static str,
        function: &Symbol<GetterOf<A, T>>,
        argument: A,
        initial: T,
    ) -> Called<T> {
        self.calls.make(name, || {
            let function = symbol(function)?;
            let mut value = initial;
            // SAFETY: as in `get`; the argument is passed by value.
            checked(unsafe { function(self.handle, argument, &raw mut value) }).map(|()| value)
        })
    }

    fn get_pair<T: Copy>(
        &self,
        name: &'static str,
        function: &Symbol<PairGetter<T>>,
        initial: T,
    ) -> Called<(T, T)> {
        self.calls.make(name, || {
            let function = symbol(function)?;
            let (mut first, mut second) = (initial, initial);
            // SAFETY: as in `get`, with two live values.
            checked(unsafe { function(self.handle, &raw mut first, &raw mut second) })
                .map(|()| (first, second))
        })
    }

    fn get_text(&self, name: &'static str, function: &Symbol<TextGetter>) -> Called<String> {
        self.calls.make(name, || {
            let function = symbol(function)?;
            // SAFETY: the handle is NVML's own, and the buffer has the length that is passed.
            text(|buffer, length| unsafe { function(self.handle, buffer, length) })
        })
    }
}

/// Process ids, and bytes of memory where NVML reports them.
pub(super) type ProcessList = Called<Vec<(u32, Option<u64>)>>;

/// An entry of a process list, in one of the struct's versions.
trait ProcessInfo: Copy {
    const EMPTY: Self;

    fn pid_and_memory(&self) -> (c_uint, c_ulonglong);
}

impl ProcessInfo for nvmlProcessInfo_v1_st {
    const EMPTY: Self = Self {
        pid: 0,
        usedGpuMemory: 0,
    };

    fn pid_and_memory(&self) -> (c_uint, c_ulonglong) {
        (self.pid, self.usedGpuMemory)
    }
}

impl ProcessInfo for nvmlProcessInfo_v2_st {
    const EMPTY: Self = Self {
        pid: 0,
        usedGpuMemory: 0,
        gpuInstanceId: 0,
        computeInstanceId: 0,
    };

    fn pid_and_memory(&self) -> (c_uint, c_ulonglong) {
        (self.pid, self.usedGpuMemory)
    }
}

/// NVML writes `NVML_VALUE_NOT_AVAILABLE`, all ones, where it does not know the memory.
fn process(info: &impl ProcessInfo) -> (u32, Option<u64>) {
    let (pid, memory) = info.pid_and_memory();
    (pid, (memory != u64::MAX).then_some(memory))
}

fn asked_field((field, scope): (u32, u32)) -> nvmlFieldValue_st {
    nvmlFieldValue_st {
        fieldId: field,
        scopeId: scope,
        timestamp: 0,
        latencyUsec: 0,
        // Drivers do not write the return code of some NVLink fields that they do answer (580.159
        // on H200), but always the type: an entry that was left alone keeps a type that does not
        // exist.
        valueType: u32::MAX,
        nvmlReturn: 0,
        value: nvmlValue_st { ullVal: 0 },
    }
}

/// NVML reads the entry after the last one, too, and answers it unless it has failed already: into
/// memory that is not its own, which took the process down on four H100s.
// Source: seen with libnvidia-ml 580.159.04, every allocation of the process before a guard page;
// in its code, the loop over fields of NVLinks ends one entry late.
const BEHIND_THE_LAST: nvmlFieldValue_st = nvmlFieldValue_st {
    fieldId: 0,
    scopeId: 0,
    timestamp: 0,
    latencyUsec: 0,
    valueType: u32::MAX,
    nvmlReturn: ERROR_UNKNOWN,
    value: nvmlValue_st { ullVal: 0 },
};

fn field_value(value: &nvmlFieldValue_st) -> FieldValue {
    number_of(value).map_err(|cause| Failure {
        function: "nvmlDeviceGetFieldValues",
        cause,
    })
}

fn number_of(value: &nvmlFieldValue_st) -> Result<u64, CallFailure> {
    checked(value.nvmlReturn)?;
    // Source of the numbers: nvml.h, nvmlValueType_t. A signed or floating value is not requested
    // by any caller, and a negative one would be nonsense in all fields that are. SAFETY: every
    // member of the union is plain data, and NVML names in `valueType` which one it wrote.
    let number = unsafe {
        match value.valueType {
            1 => u64::from(value.value.uiVal),
            2 => value.value.ulVal,
            3 => value.value.ullVal,
            4 => u64::try_from(value.value.sllVal).unwrap_or(0),
            5 => u64::try_from(value.value.siVal).unwrap_or(0),
            6 => u64::from(value.value.usVal),
            _ => return Err(CallFailure::Status(ERROR_NOT_SUPPORTED)),
        }
    };
    Ok(number)
}

fn zeroed_pci_info() -> nvmlPciInfo_st {
    nvmlPciInfo_st {
        busIdLegacy: [0; 16],
        domain: 0,
        bus: 0,
        device: 0,
        pciDeviceId: 0,
        pciSubSystemId: 0,
        busId: [0; 32],
    }
}

fn symbol<F: Copy>(symbol: &Symbol<F>) -> Result<F, CallFailure> {
    symbol
        .as_ref()
        .copied()
        .map_err(|_| CallFailure::MissingSymbol)
}

fn checked(status: nvmlReturn_t) -> Result<(), CallFailure> {
    match status {
        SUCCESS => Ok(()),
        other => Err(CallFailure::Status(other)),
    }
}

/// Reads a string into a buffer larger than any that nvml.h requires.
fn text(fill: impl FnOnce(*mut c_char, c_uint) -> nvmlReturn_t) -> Result<String, CallFailure> {
    let mut buffer = [0u8; 256];
    // NVML gets the size less one byte, so that the last one stays NUL in any case.
    checked(fill(buffer.as_mut_ptr().cast(), 255))?;
    let text = buffer.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(text).into_owned())
}
