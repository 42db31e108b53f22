//! What processes leave on the host besides themselves: shared memory, references of the driver.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Names of segments that are looked at; more are those of a database, and change all the time.
const SEGMENTS_MAXIMUM: usize = 4096;

fn below(sysroot: Option<&Path>, path: &str) -> PathBuf {
    sysroot.unwrap_or(Path::new("/")).join(path)
}

/// Names of the POSIX shared memory segments of this user; `None` where they cannot be listed.
pub(super) fn shared_memory(sysroot: Option<&Path>) -> Option<BTreeSet<String>> {
    let user = rustix::process::geteuid().as_raw();
    let entries = std::fs::read_dir(below(sysroot, "dev/shm")).ok()?;
    let mut names = BTreeSet::new();
    for entry in entries.flatten() {
        let is_own = entry.metadata().is_ok_and(|it| it.uid() == user);
        if is_own {
            names.insert(entry.file_name().to_string_lossy().into_owned());
        }
        if names.len() > SEGMENTS_MAXIMUM {
            return None;
        }
    }
    Some(names)
}

/// References to the module `nvidia_uvm`: each CUDA process holds some. They are the whole node's.
pub(super) fn uvm_references(sysroot: Option<&Path>) -> Option<u64> {
    let path = below(sysroot, "sys/module/nvidia_uvm/refcnt");
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_and_references_are_read_where_there_are_any() {
        let root = tempfile::tempdir().expect("a folder");
        assert_eq!(shared_memory(Some(root.path())), None);
        assert_eq!(uvm_references(Some(root.path())), None);
        for (path, text) in [
            ("dev/shm/psm_1234", "x"),
            ("sys/module/nvidia_uvm/refcnt", "14\n"),
        ] {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            std::fs::write(path, text).expect("written");
        }
        let names = shared_memory(Some(root.path())).expect("a list");
        assert_eq!(names, BTreeSet::from(["psm_1234".to_owned()]));
        assert_eq!(uvm_references(Some(root.path())), Some(14));
    }
}
