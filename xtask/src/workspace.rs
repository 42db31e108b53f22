//! Where things are: the checkout, the build folder, and what the tasks write below it.

use std::path::{Path, PathBuf};

/// The root of the checkout that this task was built from.
pub(crate) fn root() -> PathBuf {
    let manifest_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest_folder
        .parent()
        .unwrap_or(manifest_folder)
        .to_path_buf()
}

/// Cargo's build folder, also when `CARGO_TARGET_DIR` moves it.
pub(crate) fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => std::path::absolute(&folder).unwrap_or_else(|_| PathBuf::from(folder)),
        None => root().join("target"),
    }
}

/// Pinned tools that the tasks install for themselves.
pub(crate) fn tools() -> PathBuf {
    target().join("tools")
}

/// The cargo that runs this task, so that nested builds use the same toolchain.
pub(crate) fn cargo() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned())
}

/// A shell whose working folder is the root of the checkout.
pub(crate) fn shell() -> anyhow::Result<xshell::Shell> {
    let shell = xshell::Shell::new()?;
    shell.change_dir(root());
    Ok(shell)
}
