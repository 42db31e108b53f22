//! Where run files and locks of running validators lie.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::owned_folder::OwnedFolder;

/// Tests and simulated nodes have a folder of their own.
pub(crate) const FOLDER_VARIABLE: &str = "GPU_VALIDATOR_RUNTIME_DIR";
/// The folder for files of running processes (File Hierarchy Standard), which only root may write
/// to.
const SYSTEM_FOLDER: &str = "/run/gpu-validator";

/// `/run/gpu-validator` where it can be written to, else the user's own runtime folder, else one
/// below `/tmp`.
pub(crate) fn open() -> anyhow::Result<OwnedFolder> {
    let (own, fallback) = candidates();
    // A container may have neither.
    if let Some(folder) = own.and_then(|it| make(&it).ok()) {
        return Ok(folder);
    }
    make(&fallback)
}

/// The same where it is there already.
pub(crate) fn existing() -> Option<OwnedFolder> {
    let (own, fallback) = candidates();
    let open = |path: &Path| OwnedFolder::open(path).ok().flatten();
    own.and_then(|it| open(&it)).or_else(|| open(&fallback))
}

fn candidates() -> (Option<PathBuf>, PathBuf) {
    if let Some(folder) = std::env::var_os(FOLDER_VARIABLE) {
        return (None, PathBuf::from(folder));
    }
    let user = rustix::process::geteuid();
    let own = if user.is_root() {
        Some(PathBuf::from(SYSTEM_FOLDER))
    } else {
        std::env::var_os("XDG_RUNTIME_DIR").map(|it| Path::new(&it).join("gpu-validator"))
    };
    let name = format!("gpu-validator-{}", user.as_raw());
    (own, std::env::temp_dir().join(name))
}

pub(crate) fn make(folder: &Path) -> anyhow::Result<OwnedFolder> {
    OwnedFolder::create(folder, 0o700)
        .with_context(|| format!("runtime folder {} cannot be used", folder.display()))
}
