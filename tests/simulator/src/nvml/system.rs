//! Initialisation, versions and error texts.

use super::call::{
    self, Answer, DEPRECATED, Failure, NOT_FOUND, NOT_SUPPORTED, Out, TextOut, characters, nvml,
    set_list, shut_down,
};
use nvml_wrapper_sys::bindings as sys;
use std::ffi::{CStr, c_char, c_int, c_uint};

macro_rules! initialization {
    ($($name:ident($($argument:ident: $kind:ty)?);)*) => {$(
        #[allow(unsafe_code, reason = "exported under NVML's name")]
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $kind)?) -> sys::nvmlReturn_t {
            // The flags change only which GPUs are attached, and when; the simulated node attaches
            // none.
            $(let _ = $argument;)?
            call::initialize(stringify!($name))
        }
    )*};
}

initialization! {
    nvmlInit();
    nvmlInit_v2();
    nvmlInitWithFlags(flags: c_uint);
}

nvml! {
    fn nvmlShutdown() |_| { shut_down() }

    fn nvmlSystemGetDriverVersion(version: TextOut, length: c_uint) |call| {
        version.set(length, &call.scenario.driver.version)
    }

    fn nvmlSystemGetNVMLVersion(version: TextOut, length: c_uint) |call| {
        // NVML's own version is CUDA's major version before the driver's.
        let driver = &call.scenario.driver;
        version.set(length, &format!("{}.{}", driver.cuda_version[0], driver.nvml_version()))
    }

    fn nvmlSystemGetCudaDriverVersion(version: Out<c_int>) |call| {
        version.set(call.scenario.driver.cuda_version_number())
    }

    fn nvmlSystemGetCudaDriverVersion_v2(version: Out<c_int>) |call| {
        version.set(call.scenario.driver.cuda_version_number())
    }

    fn nvmlSystemGetDriverBranch(info: Out<sys::nvmlSystemDriverBranchInfo_t>, length: c_uint) |call| {
        let _ = length;
        let branch = call.scenario.driver.version.split('.').next().unwrap_or_default();
        let value = sys::nvmlSystemDriverBranchInfo_t {
            version: call::version_of::<sys::nvmlSystemDriverBranchInfo_t>(1),
            branch: characters(&format!("r{branch}_00")),
        };
        info.set_versioned(1, value)
    }

    fn nvmlSystemGetProcessName(pid: c_uint, name: TextOut, length: c_uint) |call| {
        let text = process_name(call, pid)?;
        // NVML cuts a name that is too long.
        let room = (length as usize).saturating_sub(1);
        let end = (0..=room.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        name.set(length, &text[..end])
    }

    fn nvmlSystemGetHicVersion(count: Out<c_uint>, entries: Out<sys::nvmlHwbcEntry_t>) |_| {
        // Host interface cards belong to S-class units, which no simulated node has.
        set_list(count, entries, &[])
    }

    fn nvmlUnitGetCount(count: Out<c_uint>) |_| { count.set(0) }

    fn nvmlSystemGetNvlinkBwMode(mode: Out<c_uint>) |_| {
        let _ = mode;
        Err(NOT_SUPPORTED)
    }

    fn nvmlGetExcludedDeviceCount(count: Out<c_uint>) |_| { count.set(0) }

    fn nvmlSystemGetConfComputeCapabilities(capabilities: Out<sys::nvmlConfComputeSystemCaps_t>) |_| {
        let value = sys::nvmlConfComputeSystemCaps_t { cpuCaps: 0, gpusCaps: 0 };
        capabilities.set(value)
    }

    fn nvmlDeviceSetDriverModel() |_| { Err(DEPRECATED) }
}

/// The name of a process, real or made up.
pub(super) fn process_name(call: &call::Call, pid: u32) -> Result<String, Failure> {
    let simulated = call
        .scenario
        .processes
        .iter()
        .find(|(_, process)| process.pid == pid);
    match simulated {
        Some((name, _)) => Ok(name.clone()),
        None => command_of(pid),
    }
}

/// The command of a process, as NVML reports it: the first argument.
fn command_of(pid: u32) -> Result<String, Failure> {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).map_err(|_| NOT_FOUND)?;
    let first = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(first).into_owned())
}

/// Texts of `nvmlErrorString`, in the words of NVIDIA's library
/// (captures/h200x4.nvml-transcript.json).
const ERROR_TEXTS: [(u32, &CStr); 32] = [
    (sys::nvmlReturn_enum_NVML_SUCCESS, c"Success"),
    (
        sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED,
        c"Uninitialized",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT,
        c"Invalid Argument",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED,
        c"Not Supported",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION,
        c"Insufficient Permissions",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_ALREADY_INITIALIZED,
        c"Already Initialized",
    ),
    (sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND, c"Not Found"),
    (
        sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE,
        c"Insufficient Size",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_POWER,
        c"Insufficient External Power",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED,
        c"Driver Not Loaded",
    ),
    (sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT, c"Timeout"),
    (
        sys::nvmlReturn_enum_NVML_ERROR_IRQ_ISSUE,
        c"Interrupt Request Issue",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_LIBRARY_NOT_FOUND,
        c"NVML Shared Library Not Found",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND,
        c"Function Not Found",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_CORRUPTED_INFOROM,
        c"Corrupted infoROM",
    ),
    (sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST, c"GPU is lost"),
    (
        sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED,
        c"GPU requires reset",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_OPERATING_SYSTEM,
        c"GPU access blocked by the operating system",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        c"Driver/library version mismatch",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_IN_USE,
        c"In use by another client",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_MEMORY,
        c"Insufficient Memory",
    ),
    (sys::nvmlReturn_enum_NVML_ERROR_NO_DATA, c"No data"),
    (
        sys::nvmlReturn_enum_NVML_ERROR_VGPU_ECC_NOT_SUPPORTED,
        c"vGPU ECC not supported",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES,
        c"Insufficient Resources",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_FREQ_NOT_SUPPORTED,
        c"Invalid Frequency",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        c"Argument version mismatch",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_DEPRECATED,
        c"Requested functionality has been deprecated",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_NOT_READY,
        c"System is not in ready state",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_GPU_NOT_FOUND,
        c"No supported GPUs were found",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_INVALID_STATE,
        c"Resource not in correct state to perform requested operation",
    ),
    (
        sys::nvmlReturn_enum_NVML_ERROR_RESET_TYPE_NOT_SUPPORTED,
        c"Reset type is not supported for given device",
    ),
    (sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN, c"Unknown Error"),
];

/// Works before initialisation, and on a machine with no node.
#[allow(unsafe_code, reason = "exported under NVML's name")]
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(result: sys::nvmlReturn_t) -> *const c_char {
    ERROR_TEXTS
        .iter()
        .find(|(code, _)| *code == result)
        .map_or(c"Unknown Error", |(_, text)| text)
        .as_ptr()
}

/// What a function that the product lacks answers.
pub(super) fn not_supported(function: &'static str) -> sys::nvmlReturn_t {
    let unsupported: Answer = Err(NOT_SUPPORTED);
    call::answer(function, |_| unsupported)
}
