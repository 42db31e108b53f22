//! The CUDA driver's functions: declared once, resolved once when the library is loaded, so that no
//! call looks up a symbol.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::{CUDA_SUCCESS, CudaFailure, CudaResult, TensorMap};

/// Declares the table. Each function has the name that cuda.h gives it; where a driver may export
/// it under an older name only, that name follows.
macro_rules! function_table {
    ($(
        $(#[$attribute:meta])*
        fn $name:ident $(| $older:literal)* ($($argument:ident: $type:ty),* $(,)?);
    )*) => {
        /// Addresses of the functions that the loaded library exports.
        #[expect(non_snake_case, reason = "named as cuda.h names them")]
        pub(super) struct DriverFunctions {
            $($name: Option<unsafe extern "C" fn($($type),*) -> u32>,)*
        }

        #[expect(
            non_snake_case,
            clippy::too_many_arguments,
            reason = "named and declared as in cuda.h"
        )]
        impl DriverFunctions {
            /// Resolves every function with `address_of`, which returns the address of a symbol.
            ///
            /// # Safety
            /// What `address_of` returns is the function that cuda.h declares under that name.
            pub(super) unsafe fn resolve(
                address_of: impl Fn(&'static str) -> Option<*mut c_void>,
            ) -> Self {
                Self {
                    $($name: [stringify!($name) $(, $older)*]
                        .into_iter()
                        .find_map(&address_of)
                        .map(|address| {
                            // SAFETY: a function's address, of the type that cuda.h declares.
                            unsafe {
                                std::mem::transmute::<
                                    *mut c_void,
                                    unsafe extern "C" fn($($type),*) -> u32,
                                >(address)
                            }
                        }),)*
                }
            }

            $(
                $(#[$attribute])*
                /// # Safety
                /// As CUDA's documentation requires of this function's arguments.
                pub(super) unsafe fn $name(&self, $($argument: $type),*) -> CudaResult<()> {
                    let call = stringify!($name);
                    let function = self.$name.ok_or(CudaFailure::MissingFunction { call })?;
                    // SAFETY: the caller vouches for the arguments.
                    self.checked(call, unsafe { function($($argument),*) })
                }
            )*
        }
    };
}

// Source: cuda.h of CUDA 11.0 to 13.0. CUresult is passed as u32, CUdevice and enumerations as int,
// CUdeviceptr as u64, handles as untyped pointers, and CUuuid as 16 bytes.
function_table! {
    #[expect(dead_code, reason = "a failure to name a failure would be named again")]
    fn cuGetErrorName(code: u32, name: *mut *const c_char);
    fn cuInit(flags: c_uint);
    fn cuDriverGetVersion(version: *mut c_int);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int);
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int);
    fn cuDeviceGetPCIBusId(address: *mut c_char, length: c_int, device: c_int);
    fn cuDeviceGetUuid_v2 | "cuDeviceGetUuid" (uuid: *mut [u8; 16], device: c_int);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int);
    fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int);
    fn cuDevicePrimaryCtxRelease_v2 | "cuDevicePrimaryCtxRelease" (device: c_int);
    fn cuCtxSetCurrent(context: *mut c_void);
    fn cuCtxSynchronize();
    fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void);
    fn cuModuleUnload(module: *mut c_void);
    fn cuModuleGetFunction(function: *mut *mut c_void, module: *mut c_void, name: *const c_char);
    fn cuFuncSetAttribute(function: *mut c_void, attribute: c_int, value: c_int);
    fn cuLaunchKernel(
        function: *mut c_void,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: *mut c_void,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize);
    fn cuMemFree_v2(address: u64);
    fn cuMemAllocHost_v2(address: *mut *mut c_void, bytes: usize);
    fn cuMemFreeHost(address: *mut c_void);
    fn cuMemcpyDtoH_v2(host: *mut c_void, device: u64, bytes: usize);
    fn cuMemcpyHtoD_v2(device: u64, host: *const c_void, bytes: usize);
    fn cuMemcpyDtoHAsync_v2(
        host: *mut c_void,
        device: u64,
        bytes: usize,
        stream: *mut c_void,
    );
    fn cuMemsetD32_v2(device: u64, word: c_uint, words: usize);
    fn cuMemsetD2D32Async(
        device: u64,
        pitch: usize,
        word: c_uint,
        width: usize,
        height: usize,
        stream: *mut c_void,
    );
    fn cuEventCreate(event: *mut *mut c_void, flags: c_uint);
    fn cuEventRecord(event: *mut c_void, stream: *mut c_void);
    fn cuEventSynchronize(event: *mut c_void);
    fn cuEventElapsedTime(milliseconds: *mut f32, start: *mut c_void, end: *mut c_void);
    fn cuEventDestroy_v2(event: *mut c_void);
    fn cuTensorMapEncodeTiled(
        map: *mut TensorMap,
        data_type: c_int,
        rank: c_uint,
        address: u64,
        dimensions: *const u64,
        strides: *const u64,
        box_size: *const c_uint,
        element_strides: *const c_uint,
        interleave: c_int,
        swizzle: c_int,
        l2_promotion: c_int,
        fill: c_int,
    );
}

impl DriverFunctions {
    fn checked(&self, call: &'static str, code: u32) -> CudaResult<()> {
        if code == CUDA_SUCCESS {
            return Ok(());
        }
        let name = self.result_name(code);
        Err(CudaFailure::Status { call, code, name })
    }

    /// The name that the driver gives a result.
    pub(super) fn result_name(&self, code: u32) -> String {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: any number may be passed; the pointer is to a live pointer, which the driver sets
        // to a string of its own.
        let known = self
            .cuGetErrorName
            .is_some_and(|get_name| unsafe { get_name(code, &raw mut name) } == CUDA_SUCCESS);
        if !known || name.is_null() {
            return format!("CUDA error {code}");
        }
        // SAFETY: not null, and the driver's names are C strings that live as long as the library.
        let name = unsafe { CStr::from_ptr(name) };
        name.to_string_lossy().into_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    extern "C" fn get_error_name(_code: u32, name: *mut *const c_char) -> u32 {
        // SAFETY: the table passes a pointer to a live pointer.
        unsafe { *name = c"CUDA_ERROR_NOT_INITIALIZED".as_ptr() };
        CUDA_SUCCESS
    }

    extern "C" fn synchronize() -> u32 {
        3
    }

    extern "C" fn get_uuid(uuid: *mut [u8; 16], device: c_int) -> u32 {
        // SAFETY: the table passes a pointer to 16 live bytes.
        unsafe { *uuid = [u8::try_from(device).expect("small"); 16] };
        CUDA_SUCCESS
    }

    /// A driver that exports three functions, one of them under its older name alone.
    fn old_driver(name: &'static str) -> Option<*mut c_void> {
        match name {
            "cuGetErrorName" => Some(get_error_name as *mut c_void),
            "cuCtxSynchronize" => Some(synchronize as *mut c_void),
            "cuDeviceGetUuid" => Some(get_uuid as *mut c_void),
            _ => None,
        }
    }

    #[test]
    fn a_missing_function_is_an_error_of_its_call_alone() {
        // SAFETY: the three functions have the types of the table.
        let functions = unsafe { DriverFunctions::resolve(old_driver) };
        // SAFETY: nothing is called, since the function is missing.
        let missing = unsafe { functions.cuModuleUnload(std::ptr::null_mut()) };
        let call = "cuModuleUnload";
        assert_eq!(missing, Err(CudaFailure::MissingFunction { call }));
        let text = missing.expect_err("it is missing").to_string();
        assert_eq!(text, "libcuda has no function cuModuleUnload");
        // SAFETY: takes nothing.
        let failed = unsafe { functions.cuCtxSynchronize() };
        let expected = CudaFailure::Status {
            call: "cuCtxSynchronize",
            code: 3,
            name: "CUDA_ERROR_NOT_INITIALIZED".to_owned(),
        };
        assert_eq!(failed, Err(expected));
    }

    #[test]
    fn an_older_name_is_taken_where_the_newer_one_is_missing() {
        // SAFETY: the three functions have the types of the table.
        let functions = unsafe { DriverFunctions::resolve(old_driver) };
        let mut uuid = [0; 16];
        // SAFETY: the pointer is to 16 live bytes.
        let answer = unsafe { functions.cuDeviceGetUuid_v2(&raw mut uuid, 7) };
        assert_eq!((answer, uuid), (Ok(()), [7; 16]));
    }

    #[test]
    fn every_symbol_is_looked_up_once_and_never_by_a_call() {
        let names = RefCell::new(Vec::new());
        // SAFETY: the three functions have the types of the table.
        let functions = unsafe {
            DriverFunctions::resolve(|name| {
                names.borrow_mut().push(name);
                old_driver(name)
            })
        };
        let resolved = names.borrow().clone();
        let distinct: std::collections::BTreeSet<_> = resolved.iter().collect();
        assert_eq!(distinct.len(), resolved.len());
        assert!(resolved.contains(&"cuLaunchKernel"));
        for _ in 0..3 {
            // SAFETY: takes nothing.
            let _ = unsafe { functions.cuCtxSynchronize() };
            assert_eq!(functions.result_name(3), "CUDA_ERROR_NOT_INITIALIZED");
        }
        assert_eq!(*names.borrow(), resolved);
    }

    #[test]
    fn without_names_a_result_is_its_number() {
        // SAFETY: nothing is exported.
        let functions = unsafe { DriverFunctions::resolve(|_| None) };
        assert_eq!(functions.result_name(999), "CUDA error 999");
    }
}
