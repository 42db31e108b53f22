//! Where things are: the checkout, the build folder, and what the tasks write below it.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The root of the checkout that this task was built from.
pub fn root() -> PathBuf {
    let manifest_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest_folder
        .parent()
        .unwrap_or(manifest_folder)
        .to_path_buf()
}

/// Cargo's build folder, also when `CARGO_TARGET_DIR` moves it.
pub fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => std::path::absolute(&folder).unwrap_or_else(|_| PathBuf::from(folder)),
        None => root().join("target"),
    }
}

/// Pinned tools that the tasks install for themselves.
pub fn tools() -> PathBuf {
    target().join("tools")
}

/// The cargo that runs this task, so that nested builds use the same toolchain.
pub fn cargo() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned())
}

/// The validator's debug build, brought up to date first.
pub fn debug_validator(shell: &xshell::Shell) -> anyhow::Result<PathBuf> {
    program(shell, "gpu-validator")
}

/// The debug build of a program of this workspace, brought up to date first.
///
/// It is built with the features of the whole workspace, as `cargo test --workspace` builds it:
/// with those of the package alone, thirty crates and the validator itself would be compiled once
/// more.
pub fn program(shell: &xshell::Shell, name: &str) -> anyhow::Result<PathBuf> {
    let cargo = cargo();
    xshell::cmd!(shell, "{cargo} build --quiet --workspace --bin {name}")
        .quiet()
        .run()?;
    Ok(target().join("debug").join(name))
}

/// A shell whose working folder is the root of the checkout.
pub fn shell() -> anyhow::Result<xshell::Shell> {
    let shell = xshell::Shell::new()?;
    shell.change_dir(root());
    Ok(shell)
}

/// Where `PATH` has a program that may be run.
pub fn in_path(program: &str) -> Option<PathBuf> {
    which::which(program).ok()
}

/// Takes out of `LD_LIBRARY_PATH` what `cargo run` put in front of it to start this task.
pub fn without_cargos_library_path(command: &mut Command) {
    match std::env::var_os("LD_LIBRARY_PATH").and_then(|path| users_part(&path, &target())) {
        Some(path) => command.env("LD_LIBRARY_PATH", path),
        None => command.env_remove("LD_LIBRARY_PATH"),
    };
}

/// Cargo adds its build folder and the toolchain's libraries, which have a `rustlib` folder next to
/// or above them.
fn users_part(path: &OsStr, target: &Path) -> Option<OsString> {
    let is_cargos = |folder: &Path| {
        folder.starts_with(target)
            || folder.join("rustlib").is_dir()
            || folder
                .components()
                .any(|part| part.as_os_str() == "rustlib")
    };
    let kept: Vec<PathBuf> = std::env::split_paths(path)
        .filter(|folder| !is_cargos(folder))
        .collect();
    let kept = std::env::join_paths(kept).ok()?;
    (!kept.is_empty()).then_some(kept)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::path::Path;

    #[test]
    fn programs_are_found_and_folders_are_none() {
        assert!(super::in_path("sh").is_some());
        assert_eq!(super::in_path("no-such-program"), None);
        // The folder itself, which may be entered and not run.
        assert_eq!(super::in_path(""), None);
    }

    #[test]
    fn only_the_users_library_path_is_passed_on() {
        let users_part =
            |path: &str| super::users_part(OsStr::new(path), Path::new("/checkout/target"));
        let toolchain = "/checkout/target/debug/deps:/checkout/target/debug:/toolchain/lib/rustlib/x86_64-unknown-linux-gnu/lib";
        assert_eq!(
            users_part(&format!("{toolchain}:/usr/local/cuda/compat:/opt/lib")).as_deref(),
            Some(OsStr::new("/usr/local/cuda/compat:/opt/lib"))
        );
        assert_eq!(users_part(toolchain), None);
    }
}
