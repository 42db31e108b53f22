//! The settings of the hooks are the administrator's. A job writes to its environment
//! (`GITHUB_ENV`), which the runner hands to the hook after it, so that nothing of that environment
//! may decide what is judged, by what, or whether it counts.
//!
//! A hook therefore starts itself again with a cleaned environment: what GitHub's runner sets and
//! protects, and the lines of the administrator's file.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};
use rustix::fs::OFlags;

use super::super::terminal::to_stderr;
use crate::runner_hook::state_folder::file_of_runner;

/// Owned by root. `hook-<runner's name>.env` in the same folder is for one of several runners, and
/// wins.
pub(super) const SETTINGS: &str = "/etc/gpu-validator/hook.env";
/// In the same folder: what an image sets for every program on the node.
const OF_IMAGE: &str = "environment";
/// What `hook` is started with the second time.
pub(crate) const IS_CLEAN: &str = "--environment-is-clean";
const SIZE_LIMIT_BYTES: u64 = 64 << 10;
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// What a hook keeps of its environment, by name or by the start of it.
// Source of GITHUB_ and RUNNER_: GitHub Actions documentation, default environment variables: a job
// cannot overwrite them. CUDA_, NCCL_ and NVIDIA_ are what jobs will find set, which is judged;
// none of them chooses a library.
const KEPT: [&str; 14] = [
    "CI", "CUDA_", "GITHUB_", "HOME", "LANG", "LC_", "LOGNAME", "NCCL_", "NO_COLOR", "NVIDIA_",
    "RUNNER_", "TERM", "TZ", "USER",
];
/// Variables of the validator that do not concern a hook, or that can only make it stricter.
const HARMLESS: [&str; 9] = [
    "GPU_VALIDATOR_ALLOCATION_DURATION",
    "GPU_VALIDATOR_ALLOCATION_MEMORY",
    "GPU_VALIDATOR_BINARY",
    "GPU_VALIDATOR_BURN_DURATION",
    "GPU_VALIDATOR_BURN_MEMORY",
    "GPU_VALIDATOR_COLOR",
    "GPU_VALIDATOR_FORBID_SIMULATED",
    "GPU_VALIDATOR_LEVEL",
    "GPU_VALIDATOR_RUNTIME_DIR",
];

/// Starts a hook again with the administrator's environment; returns where it has that already, or
/// is no hook of a job.
pub(crate) fn restart(arguments: &[OsString]) -> anyhow::Result<()> {
    let mut words = arguments.iter().skip(1);
    let is_hook = words.next().is_some_and(|it| it == "hook")
        && words.any(|it| it == "pre-job" || it == "post-job");
    let has = |flag: &str| arguments.iter().any(|it| it == flag);
    if !is_hook || has(IS_CLEAN) {
        return Ok(());
    }
    let environment: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
    let runner = environment.get(OsStr::new("RUNNER_NAME"));
    let runner = runner.map(|it| it.to_string_lossy().into_owned());
    let settings = settings(named_settings(arguments)?, &runner.unwrap_or_default())?;
    let foreign = foreign(&environment, &settings);
    if !foreign.is_empty() {
        let text = format!(
            "{} set in the environment, where a job can set it; only {SETTINGS}, which belongs to root, may",
            match &*foreign {
                [one] => format!("{one} is"),
                many => format!("{} are", many.join(", ")),
            }
        );
        // Before a job a hook that would judge by other settings than the administrator thinks must
        // not judge at all. After one it must clean whatever the job has set.
        if has("pre-job") {
            bail!("{text}");
        }
        to_stderr(&format!("warning: {text}; it is ignored\n"));
    }
    let simulated_ok = has("--simulated-ok") || crate::commands::simulated_ok::by_root();
    let kept = environment
        .into_iter()
        .filter(|(name, _)| is_kept(name, simulated_ok));
    let error = Command::new("/proc/self/exe")
        .arg0("gpu-validator")
        .args(arguments.iter().skip(1))
        .arg(IS_CLEAN)
        .env_clear()
        .envs(kept)
        .env("PATH", PATH)
        .envs(settings)
        .exec();
    Err(error).context("the hook cannot be started with a cleaned environment")
}

/// Settings in the environment that are not the administrator's.
fn foreign(
    environment: &BTreeMap<OsString, OsString>,
    settings: &BTreeMap<String, String>,
) -> Vec<String> {
    let names = environment.keys().filter_map(|it| it.to_str());
    names
        .filter(|it| is_setting(it) && !settings.contains_key(*it))
        .map(str::to_owned)
        .collect()
}

fn is_setting(name: &str) -> bool {
    name == "CUDA_VISIBLE_DEVICES"
        || (name.starts_with("GPU_VALIDATOR_") && !HARMLESS.contains(&name))
}

fn is_kept(name: &OsStr, simulated_ok: bool) -> bool {
    // Not even its name is text: no reader exists.
    let Some(name) = name.to_str() else {
        return false;
    };
    if is_setting(name) {
        return false;
    }
    // Simulated libraries are found by the environment, and such a run was accepted on the command
    // line.
    if simulated_ok {
        return true;
    }
    let is_listed = |kept: &str| {
        if kept.ends_with('_') {
            name.starts_with(kept)
        } else {
            name == kept
        }
    };
    KEPT.iter().any(|it| is_listed(it)) || name == "GPU_VALIDATOR_FORBID_SIMULATED"
}

/// The file of `--settings FILE`.
fn named_settings(arguments: &[OsString]) -> anyhow::Result<Option<PathBuf>> {
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        if argument == "--settings" {
            let path = rest.next().context("--settings lacks its file")?;
            return Ok(Some(path.into()));
        }
        if let Some(path) = argument
            .to_str()
            .and_then(|it| it.strip_prefix("--settings="))
        {
            return Ok(Some(path.into()));
        }
    }
    Ok(None)
}

fn settings(named: Option<PathBuf>, runner: &str) -> anyhow::Result<BTreeMap<String, String>> {
    let own = rustix::process::geteuid().as_raw();
    // A file that is named on the command line belongs to the caller of the hook; the other is the
    // administrator's.
    let (path, owners) = match named {
        Some(path) => (path, vec![0, own]),
        None => (PathBuf::from(SETTINGS), vec![0]),
    };
    let of_image = path.with_file_name(OF_IMAGE);
    let of_runner = file_of_runner("hook", runner).replace(".json", ".env");
    let of_runner = path.with_file_name(of_runner);
    let mut settings = BTreeMap::new();
    for path in [of_image, path, of_runner] {
        if let Some(text) = read(&path, &owners)? {
            parse(&text, &path, &mut settings)?;
        }
    }
    Ok(settings)
}

/// The text of a file that only its owner can write to; `None` where there is none.
fn read(path: &Path, owners: &[u32]) -> anyhow::Result<Option<String>> {
    let name = path.display();
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let opened = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot read {name}")),
    };
    let found = file.metadata()?;
    ensure!(found.is_file(), "{name} is not a regular file");
    ensure!(
        owners.contains(&found.uid()),
        "{name} belongs to user {}, and not to root",
        found.uid()
    );
    ensure!(
        found.mode() & 0o022 == 0,
        "other users can write to {name} (mode {:04o})",
        found.mode() & 0o7777
    );
    ensure!(
        found.len() <= SIZE_LIMIT_BYTES,
        "{name} is larger than 64 KiB"
    );
    let mut text = String::new();
    file.take(SIZE_LIMIT_BYTES)
        .read_to_string(&mut text)
        .with_context(|| format!("cannot read {name}"))?;
    Ok(Some(text))
}

/// `NAME=value` lines, as in a unit's EnvironmentFile, without quotes and continuations.
fn parse(text: &str, path: &Path, into: &mut BTreeMap<String, String>) -> anyhow::Result<()> {
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = || {
            format!(
                "{}:{number}: expected NAME=value with a name in capital letters",
                path.display()
            )
        };
        let (name, value) = line.split_once('=').with_context(wrong)?;
        let is_letter = |it: u8| it.is_ascii_uppercase() || it.is_ascii_digit() || it == b'_';
        ensure!(!name.is_empty() && name.bytes().all(is_letter), wrong());
        into.insert(name.to_owned(), value.to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn what_a_job_may_set_decides_nothing() {
        for name in [
            "GPU_VALIDATOR_HOOK_FAIL_ON",
            "GPU_VALIDATOR_HOOK_STATE",
            "GPU_VALIDATOR_HOOK_GPUS",
            "GPU_VALIDATOR_PROFILE",
            "CUDA_VISIBLE_DEVICES",
        ] {
            assert!(is_setting(name), "{name}");
            assert!(!is_kept(name.as_ref(), true), "{name}");
        }
        for name in [
            "LD_LIBRARY_PATH",
            "LD_PRELOAD",
            "GPU_SIMULATOR_NODE",
            "PATH",
            "CIRCLE",
        ] {
            assert!(!is_kept(name.as_ref(), false), "{name}");
        }
        for name in [
            "GITHUB_RUN_ID",
            "RUNNER_NAME",
            "HOME",
            "NVIDIA_VISIBLE_DEVICES",
            "LC_ALL",
        ] {
            assert!(is_kept(name.as_ref(), false), "{name}");
        }
    }

    #[test]
    fn settings_are_lines_and_errors_have_their_number() {
        let mut settings = BTreeMap::new();
        let path = Path::new("/etc/hook.env");
        parse("# comment\n\n A=b=c\nB=\n", path, &mut settings).expect("parsed");
        assert_eq!(settings["A"], "b=c");
        assert_eq!(settings["B"], "");
        for wrong in ["a=b", "A", "=b", "export A=b"] {
            let error = parse(wrong, path, &mut settings).expect_err(wrong);
            assert!(
                error.to_string().starts_with("/etc/hook.env:1: "),
                "{error}"
            );
        }
    }

    #[test]
    fn a_file_that_others_can_change_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("hook.env");
        let own = rustix::process::geteuid().as_raw();
        assert_eq!(read(&path, &[own]).expect("read"), None);
        std::fs::write(&path, "A=b\n").expect("written");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).expect("chmod");
        assert_eq!(read(&path, &[own]).expect("read").as_deref(), Some("A=b\n"));
        let error = read(&path, &[own + 1]).expect_err("another's").to_string();
        assert!(error.contains("belongs to user"), "{error}");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o664)).expect("chmod");
        let error = read(&path, &[own]).expect_err("writable").to_string();
        assert!(error.contains("other users can write to"), "{error}");
    }
}
