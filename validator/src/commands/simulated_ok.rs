//! Root's word that simulated driver libraries are accepted on a whole machine: one that is
//! simulated for tests.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// An empty file that only root can write. Reports still show SIMULATED.
const FILE: &str = "/etc/gpu-validator/simulated-ok";

/// Whether root accepts simulated driver libraries here. No variable and no user other than root
/// can say so.
pub(crate) fn by_root() -> bool {
    is_roots_own(Path::new(FILE))
}

/// A regular file; only root can change it and its folder.
fn is_roots_own(file: &Path) -> bool {
    /// Write permission of group and others.
    const WRITABLE: u32 = 0o022;
    let belongs_to_root = |path: &Path, is_kind: fn(&std::fs::Metadata) -> bool| {
        std::fs::symlink_metadata(path)
            .is_ok_and(|it| is_kind(&it) && it.uid() == 0 && it.mode() & WRITABLE == 0)
    };
    let folder = file.parent().unwrap_or(Path::new("/"));
    belongs_to_root(folder, std::fs::Metadata::is_dir)
        && belongs_to_root(file, std::fs::Metadata::is_file)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::is_roots_own;

    #[test]
    fn only_a_file_that_nobody_else_can_write_counts() {
        let folder = tempfile::tempdir().expect("a folder");
        let mode = |path: &std::path::Path, mode| {
            fs::set_permissions(path, Permissions::from_mode(mode)).expect("permissions");
        };
        mode(folder.path(), 0o755);
        let file = folder.path().join("simulated-ok");
        assert!(!is_roots_own(&file), "it is missing");
        fs::write(&file, "").expect("written");
        mode(&file, 0o644);
        let runs_as_root = rustix::process::geteuid().is_root();
        assert_eq!(is_roots_own(&file), runs_as_root);
        mode(&file, 0o664);
        assert!(!is_roots_own(&file), "the group can write it");
        mode(&file, 0o644);
        mode(folder.path(), 0o777);
        assert!(!is_roots_own(&file), "everybody can replace it");
        mode(folder.path(), 0o755);
        let link = folder.path().join("link");
        symlink(&file, &link).expect("a link");
        assert!(!is_roots_own(&link), "it is a link");
    }
}
