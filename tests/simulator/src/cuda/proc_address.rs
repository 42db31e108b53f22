//! `cuGetProcAddress`: from a name without version suffix to the newest function that the caller's CUDA version knows.

use std::ffi::{CStr, CString, c_int, c_void};

/// Suffixes, newest first, with the CUDA version from which callers mean them.
/// Source: `cudaTypedefs.h` of CUDA 13.0, `PFN_cuCtxCreate_v13000` and the like.
const SUFFIXES: [(&str, c_int); 4] = [("_v4", 12_050), ("_v3", 11_040), ("_v2", 3_020), ("", 0)];

/// Functions whose `_v2` came later than CUDA 3.2 to 4.0.
const LATER: [(&str, c_int); 3] = [
    ("cuDeviceGetUuid", 11_040),
    ("cuEventElapsedTime", 12_080),
    ("cuGetProcAddress", 12_000),
];

pub(super) fn find(name: &CStr, version: c_int) -> Option<*mut c_void> {
    let name = name.to_str().ok()?;
    let later = LATER
        .iter()
        .find(|(known, _)| *known == name)
        .map_or(0, |row| row.1);
    SUFFIXES
        .iter()
        .filter(|(suffix, since)| version >= *since && (*suffix != "_v2" || version >= later))
        .find_map(|(suffix, _)| exported(&format!("{name}{suffix}")))
}

/// A function of this library by its exact name, if it does more than answer that it is not supported.
fn exported(name: &str) -> Option<*mut c_void> {
    if super::unsupported::NAMES.contains(&name) {
        return None;
    }
    let path = super::api::library_path()?;
    let name = CString::new(name).ok()?;
    // SAFETY: opens the library that this code is in once more, and looks a name up in it.
    let address = unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_NOW);
        if library.is_null() {
            return None;
        }
        let address = libc::dlsym(library, name.as_ptr());
        libc::dlclose(library);
        address
    };
    (!address.is_null()).then_some(address)
}
