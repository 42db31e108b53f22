//! Disks to boot from, made by the provisioners themselves.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use xshell::cmd;

use crate::instance::{self, OperatingSystem};
use crate::{bake, simulated_gpus};
use xtask::workspace;

/// systemd 252, as on Amazon Linux 2023.
const SUITE: &str = "bookworm";
/// What the provisioners call, what a machine boots with, and a network that comes up.
const PACKAGES: &str = "dbus,jq,linux-image-cloud-amd64,systemd-sysv,udev";
/// cloud-init's units, whose order with ours is what matters; the rest of it is Python and slow
/// under emulation.
const CLOUD_INIT_UNITS: &str = "cd /tmp && apt-get download cloud-init && dpkg --extract cloud-init_*.deb cloud-init && \
    cp --recursive cloud-init/lib/systemd/. /usr/lib/systemd/ && rm -r cloud-init cloud-init_*.deb";

#[derive(Debug)]
pub(super) struct ImageOptions<'a> {
    pub(super) folder: PathBuf,
    /// The archive of [`userland`].
    pub(super) userland: &'a Path,
    /// The folder of the simulator's programs and library.
    pub(super) simulator: &'a Path,
    pub(super) validator_folder: &'a Path,
    pub(super) template: &'static str,
    pub(super) operating_system: OperatingSystem,
    pub(super) gated_unit: &'static str,
    /// The profile's choice.
    pub(super) on_failure: &'static str,
    pub(super) deadline_s: u32,
}

/// A disk and the kernel that boots it.
#[derive(Debug)]
pub(super) struct Image {
    folder: PathBuf,
    pub(super) gated_unit: &'static str,
}

impl Image {
    pub(super) fn make(options: &ImageOptions<'_>) -> anyhow::Result<Self> {
        let folder = &options.folder;
        let simulated = folder.join("simulated");
        std::fs::create_dir_all(simulated.join("downloads"))?;
        let runner_sha256 = bake::runner_archive(folder, &simulated.join("downloads"))?;
        instance::describe(
            &simulated,
            options.operating_system,
            bake::DRIVER_VERSION,
            "",
        )?;
        let simulator = folder.join("simulator");
        simulated_gpus::install(options.simulator, &simulator)?;
        let uploaded = folder.join("uploaded");
        upload(options, &uploaded)?;
        let root = workspace::root();
        let log = folder.join("make-image.log");
        let output = std::fs::File::create(&log)?;
        let status = as_root()?
            .arg(root.join("tests/images/boot/make-image.sh"))
            .env("USERLAND", options.userland)
            .env("SIMULATED", &simulated)
            .env("UPLOADED", &uploaded)
            .env("PROVISIONERS", root.join("packer/provisioners"))
            .env("BOOT", root.join("tests/images/boot"))
            .env("SIMULATOR", &simulator)
            .env("TEMPLATE", options.template)
            .env("GPU_FAMILY", "g6")
            .env("GATED_UNIT", options.gated_unit)
            .env("NVIDIA_DRIVER_VERSION", bake::DRIVER_VERSION)
            .env("CUDA_KEYRING_SHA256", bake::CUDA_KEYRING_SHA256)
            .env("ACTIONS_RUNNER_VERSION", bake::RUNNER_VERSION)
            .env("ACTIONS_RUNNER_SHA256", runner_sha256)
            .env("OUT", folder)
            .stdout(output.try_clone()?)
            .stderr(output)
            .status()
            .context("unshare could not be started")?;
        ensure!(status.success(), "no disk was made; see {}", log.display());
        Ok(Self {
            folder: folder.clone(),
            gated_unit: options.gated_unit,
        })
    }

    /// A copy of the disk for a new instance.
    pub(super) fn new_disk(&self, path: &Path) -> anyhow::Result<PathBuf> {
        let shell = workspace::shell()?;
        let disk = self.folder.join("disk");
        cmd!(shell, "cp --sparse=always --reflink=auto {disk} {path}")
            .quiet()
            .run()?;
        Ok(path.to_path_buf())
    }

    pub(super) fn kernel(&self) -> PathBuf {
        self.folder.join("vmlinuz")
    }

    pub(super) fn initrd(&self) -> PathBuf {
        self.folder.join("initrd")
    }
}

/// Root of a mount namespace, with the user's subordinate ids for a user other than root: files
/// must have owners.
fn as_root() -> anyhow::Result<Command> {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--kill-child"]);
    let shell = workspace::shell()?;
    if cmd!(shell, "id --user").quiet().read()? != "0" {
        command.args(["--map-root-user", "--map-auto"]);
    }
    Ok(command)
}

/// The archive of a Debian that boots; made once.
pub(super) fn userland() -> anyhow::Result<PathBuf> {
    let tools = workspace::tools();
    let (archive, stamp) = (
        tools.join("boot-userland.tar"),
        tools.join("boot-userland.txt"),
    );
    let wanted = format!("{SUITE} {PACKAGES} {CLOUD_INIT_UNITS}\n");
    if archive.exists() && std::fs::read_to_string(&stamp).is_ok_and(|made| made == wanted) {
        return Ok(archive);
    }
    let shell = workspace::shell()?;
    shell.create_dir(&tools)?;
    eprintln!(
        "making a Debian {SUITE} that boots in {}",
        archive.display()
    );
    let hook = format!("chroot \"$1\" sh -c '{CLOUD_INIT_UNITS}'");
    let without = [
        "/usr/share/doc/*",
        "/usr/share/locale/*",
        "/usr/share/man/*",
    ]
    .map(|it| format!("--dpkgopt=path-exclude={it}"));
    cmd!(
        shell,
        "mmdebstrap --quiet --variant=minbase --include={PACKAGES} {without...} --customize-hook={hook} {SUITE} {archive}"
    )
    .quiet()
    .run()
    .context("no Debian; install mmdebstrap (Debian and Ubuntu: apt-get install mmdebstrap) and check that deb.debian.org answers")?;
    std::fs::write(&stamp, wanted)?;
    Ok(archive)
}

/// What Packer uploads, with the profile's choices that this image is about.
fn upload(options: &ImageOptions<'_>, folder: &Path) -> anyhow::Result<()> {
    use std::io::Write as _;
    let shell = workspace::shell()?;
    shell.create_dir(folder)?;
    for name in ["gpu-validator", "gpu-validator.1"] {
        shell.copy_file(options.validator_folder.join(name), folder)?;
    }
    for (from, name) in [
        ("packer/files", "files"),
        ("workflows/hooks", "hooks"),
        ("manifests/profiles", "profiles"),
    ] {
        let to = folder.join(name);
        cmd!(shell, "cp --recursive {from} {to}").quiet().run()?;
    }
    let mut profile = std::fs::File::options()
        .append(true)
        .open(folder.join("profiles/g6.yaml"))?;
    write!(
        profile,
        "levels: {{standard: {{deadline_s: {}}}}}\nfirstboot: {{on_failure: {}}}\n",
        options.deadline_s, options.on_failure
    )?;
    Ok(())
}
