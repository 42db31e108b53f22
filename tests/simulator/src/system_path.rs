//! The refusal to work when installed among the system's libraries.

#![allow(unsafe_code, reason = "dladdr")]

use anyhow::{Result, bail};
use std::ffi::CStr;

/// Folders below which the libraries refuse to work.
const SYSTEM_FOLDERS: [&str; 6] = ["/usr", "/lib", "/lib64", "/lib32", "/opt", "/etc"];

/// Fails when this library was loaded from a system folder.
pub(crate) fn refuse_system_path() -> Result<()> {
    let Some(path) = own_path() else {
        return Ok(());
    };
    // Both names count: a link in a system folder is an installation as much as the file itself.
    let real = std::fs::canonicalize(&path).map(|path| path.to_string_lossy().into_owned());
    for name in [Some(path), real.ok()].into_iter().flatten() {
        if is_system_path(&name) {
            bail!(
                "{name} is a simulated driver library and must not be installed under system paths"
            );
        }
    }
    Ok(())
}

fn is_system_path(path: &str) -> bool {
    SYSTEM_FOLDERS.iter().any(|folder| {
        path.strip_prefix(folder)
            .is_some_and(|rest| rest.starts_with('/'))
    })
}

/// The file that this code was loaded from.
fn own_path() -> Option<String> {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    let address: fn() -> Option<String> = own_path;
    // SAFETY: looks an address of this library up and fills `info`.
    let found = unsafe { libc::dladdr(address as *const libc::c_void, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr gave a string that lives as long as the library is loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_folders_are_told_from_others() {
        assert!(is_system_path("/usr/lib/x86_64-linux-gnu/libcuda.so.1"));
        assert!(is_system_path("/lib64/libnvidia-ml.so.1"));
        assert!(is_system_path("/opt/nvidia/libcuda.so.1"));
        assert!(!is_system_path("/home/me/node/lib/libcuda.so.1"));
        assert!(!is_system_path("/usrlocal/libcuda.so.1"));
    }
}
