//! NVML's statuses.

// Source: nvml.h, nvmlReturn_t.
pub(super) const SUCCESS: u32 = 0;
pub(super) const ERROR_INVALID_ARGUMENT: u32 = 2;
pub(super) const ERROR_NOT_SUPPORTED: u32 = 3;
pub(super) const ERROR_NOT_FOUND: u32 = 6;
pub(super) const ERROR_INSUFFICIENT_SIZE: u32 = 7;
pub(super) const ERROR_TIMEOUT: u32 = 10;
pub(super) const ERROR_FUNCTION_NOT_FOUND: u32 = 13;
pub(super) const ERROR_CORRUPTED_INFOROM: u32 = 14;
pub(super) const ERROR_GPU_IS_LOST: u32 = 15;
pub(super) const ERROR_RESET_REQUIRED: u32 = 16;
pub(super) const ERROR_VGPU_ECC_NOT_SUPPORTED: u32 = 22;
pub(super) const ERROR_ARGUMENT_VERSION_MISMATCH: u32 = 25;
pub(super) const ERROR_UNKNOWN: u32 = 999;

/// The name that nvml.h gives a status.
// Source: nvml.h, nvmlReturn_t.
pub(super) fn status_name(status: u32) -> String {
    let name = match status {
        0 => "NVML_SUCCESS",
        1 => "NVML_ERROR_UNINITIALIZED",
        2 => "NVML_ERROR_INVALID_ARGUMENT",
        3 => "NVML_ERROR_NOT_SUPPORTED",
        4 => "NVML_ERROR_NO_PERMISSION",
        5 => "NVML_ERROR_ALREADY_INITIALIZED",
        6 => "NVML_ERROR_NOT_FOUND",
        7 => "NVML_ERROR_INSUFFICIENT_SIZE",
        8 => "NVML_ERROR_INSUFFICIENT_POWER",
        9 => "NVML_ERROR_DRIVER_NOT_LOADED",
        10 => "NVML_ERROR_TIMEOUT",
        11 => "NVML_ERROR_IRQ_ISSUE",
        12 => "NVML_ERROR_LIBRARY_NOT_FOUND",
        13 => "NVML_ERROR_FUNCTION_NOT_FOUND",
        14 => "NVML_ERROR_CORRUPTED_INFOROM",
        15 => "NVML_ERROR_GPU_IS_LOST",
        16 => "NVML_ERROR_RESET_REQUIRED",
        17 => "NVML_ERROR_OPERATING_SYSTEM",
        18 => "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
        19 => "NVML_ERROR_IN_USE",
        20 => "NVML_ERROR_MEMORY",
        21 => "NVML_ERROR_NO_DATA",
        22 => "NVML_ERROR_VGPU_ECC_NOT_SUPPORTED",
        23 => "NVML_ERROR_INSUFFICIENT_RESOURCES",
        24 => "NVML_ERROR_FREQ_NOT_SUPPORTED",
        25 => "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
        26 => "NVML_ERROR_DEPRECATED",
        27 => "NVML_ERROR_NOT_READY",
        28 => "NVML_ERROR_GPU_NOT_FOUND",
        29 => "NVML_ERROR_INVALID_STATE",
        999 => "NVML_ERROR_UNKNOWN",
        other => return format!("NVML status {other}"),
    };
    name.to_owned()
}
