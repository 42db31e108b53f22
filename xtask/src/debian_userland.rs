//! Starts the binary in the userland of Debian 11: glibc 2.31, no NVIDIA library, nothing but libc
//! and libgcc.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use xshell::{Shell, cmd};

use crate::workspace;

const SUITE: &str = "bullseye";

/// What the validator answers where there is no GPU to judge: not green, not broken.
const EXIT_CODE_NOT_JUDGED: i32 = 2;

/// Fails unless `binary` runs there to its end and writes a report.
pub fn verify(binary: &Path) -> anyhow::Result<()> {
    let shell = workspace::shell()?;
    let root = bootstrap(&shell, "debian-11", SUITE, "libc6,libgcc-s1")?;
    shell.copy_file(binary, root.join("gpu-validator"))?;
    // A mapped user may chroot and mount /proc without being root outside.
    let mount_proc = format!("--mount-proc={}", root.join("proc").display());
    let in_userland = [
        "--map-root-user",
        "--mount",
        "--pid",
        "--fork",
        &mount_proc,
        "chroot",
    ];
    let version = cmd!(
        shell,
        "unshare {in_userland...} {root} /gpu-validator --version"
    )
    .quiet()
    .read()
    .with_context(|| {
        format!(
            "the binary does not start on Debian 11 ({})",
            root.display()
        )
    })?;

    let report = root.join("report.json");
    shell.remove_path(&report)?;
    let output = cmd!(
        shell,
        "unshare {in_userland...} {root} /gpu-validator run --level quick --json /report.json"
    )
    .quiet()
    .ignore_status()
    .output()?;
    let printed = || {
        format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )
    };
    ensure!(
        output.status.code() == Some(EXIT_CODE_NOT_JUDGED),
        "on Debian 11 with no GPU the binary ended with {}, expected exit code {EXIT_CODE_NOT_JUDGED}:\n{}",
        output.status,
        printed()
    );
    let text = shell
        .read_file(&report)
        .with_context(|| format!("no report was written:\n{}", printed()))?;
    serde_json::from_str::<serde_json::Value>(&text)
        .context("the report written on Debian 11 is not JSON")?;
    eprintln!("{version} starts and reports on Debian 11 with no NVIDIA library");
    Ok(())
}

/// The folder of a userland with these packages and what they need, unpacked and not configured;
/// made once.
pub fn bootstrap(
    shell: &Shell,
    name: &str,
    suite: &str,
    packages: &str,
) -> anyhow::Result<PathBuf> {
    let root = workspace::tools().join(name);
    let stamp = root.join("complete");
    let wanted = format!("{suite} {packages}\n");
    if std::fs::read_to_string(&stamp).is_ok_and(|made| made == wanted) {
        return Ok(root);
    }
    shell.remove_path(&root)?;
    shell.create_dir(&root)?;
    let archive = workspace::tools().join(format!("{name}.tar"));
    eprintln!("making a userland of Debian {suite} in {}", root.display());
    cmd!(shell, "mmdebstrap --quiet --variant=extract --include={packages} {suite} {archive}")
        .quiet()
        .run()
        .context("no userland of Debian; install mmdebstrap (Debian and Ubuntu: apt-get install mmdebstrap) and check that deb.debian.org answers")?;
    // Device nodes need root and nothing here opens them.
    cmd!(
        shell,
        "tar --extract --file {archive} --directory {root} --no-same-owner --exclude=./dev/*"
    )
    .quiet()
    .run()?;
    shell.remove_path(&archive)?;
    shell.create_dir(root.join("proc"))?;
    shell.write_file(&stamp, wanted)?;
    Ok(root)
}
