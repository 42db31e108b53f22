//! `cargo xtask dist`: the files that ship. One portable binary, its man page, completions and
//! checksums.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use xshell::cmd;

use crate::{debian_userland, glibc_floor, sbom, tools, workspace};

/// The oldest glibc that we promise to run on: that of RHEL 8 and Debian 10. Ubuntu 20.04 has 2.31,
/// Amazon Linux 2023 has 2.34.
pub(crate) const OLDEST_GLIBC: glibc_floor::Version = glibc_floor::Version {
    major: 2,
    minor: 28,
};

const TRIPLE: &str = if cfg!(target_arch = "aarch64") {
    "aarch64-unknown-linux-gnu"
} else {
    "x86_64-unknown-linux-gnu"
};

/// The size that we promise for the stripped binary (BENCHMARKS.md): it is copied to every machine
/// that it judges. 12 MB before environments, sentinel, allocation test and remote runs were in it.
const LARGEST_BINARY_BYTES: u64 = 15_000_000;

/// Build the portable release binary, its man page and completions into target/dist
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Also prove that the binary needs nothing newer than glibc 2.28, and start it on Debian 11
    #[arg(long)]
    verify: bool,
    /// Also list what the binary is made of: gpu-validator.cdx.json (`CycloneDX`)
    #[arg(long)]
    sbom: bool,
    /// Link with thin LTO, into target/dist-thin: for CI, where the link of the binary that ships
    /// would take minutes. The binary is larger, and its size is not checked
    #[arg(long)]
    thin_lto: bool,
}

/// How the portable binary is linked.
#[derive(Clone, Copy, Debug)]
enum Lto {
    /// The binary that ships.
    Fat,
    Thin,
}

impl Lto {
    /// Of Cargo.toml.
    fn profile(self) -> &'static str {
        match self {
            Lto::Fat => "portable",
            Lto::Thin => "portable-thin",
        }
    }

    fn folder(self) -> PathBuf {
        workspace::target().join(match self {
            Lto::Fat => "dist",
            Lto::Thin => "dist-thin",
        })
    }
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let lto = if arguments.thin_lto {
        Lto::Thin
    } else {
        Lto::Fat
    };
    let binary = build_with(lto)?;
    if arguments.sbom {
        sbom::write(&lto.folder(), TRIPLE)?;
    }
    if arguments.verify {
        glibc_floor::verify(&binary, OLDEST_GLIBC)?;
        debian_userland::verify(&binary)?;
    }
    Ok(())
}

/// Builds and writes everything below `target/dist`; returns the path of the binary.
pub fn build() -> anyhow::Result<PathBuf> {
    build_with(Lto::Fat)
}

fn build_with(lto: Lto) -> anyhow::Result<PathBuf> {
    let built = build_portable(lto)?;
    let folder = lto.folder();
    write_files(&built, &folder)
        .with_context(|| format!("{} could not be filled", folder.display()))?;
    let binary = folder.join("gpu-validator");
    check_size(&binary, lto)?;
    Ok(binary)
}

/// The release binary of this machine's own toolchain. It may need a newer glibc than the portable
/// one.
pub fn build_native() -> anyhow::Result<PathBuf> {
    let shell = workspace::shell()?;
    let cargo = workspace::cargo();
    cmd!(
        shell,
        "{cargo} build --release --package gpu-validator --bin gpu-validator"
    )
    .quiet()
    .run()?;
    Ok(workspace::target().join("release/gpu-validator"))
}

fn build_portable(lto: Lto) -> anyhow::Result<PathBuf> {
    ensure!(
        cfg!(all(
            target_os = "linux",
            any(target_arch = "x86_64", target_arch = "aarch64")
        )),
        "the portable binary is built on Linux of its own architecture, x86_64 or aarch64; this is {} {}",
        std::env::consts::ARCH,
        std::env::consts::OS
    );
    zigbuild(&[
        "--profile",
        lto.profile(),
        "--locked",
        "--package",
        "gpu-validator",
        "--bin",
        "gpu-validator",
    ])?;
    Ok(workspace::target()
        .join(TRIPLE)
        .join(lto.profile())
        .join("gpu-validator"))
}

/// The simulator's programs and library for machines with any glibc from [`OLDEST_GLIBC`] on; the
/// folder that they lie in.
pub fn build_portable_simulator() -> anyhow::Result<PathBuf> {
    zigbuild(&[
        "--release",
        "--locked",
        "--package",
        "simulator",
        "--lib",
        "--bin",
        "gpu-simulator",
    ])?;
    Ok(workspace::target().join(TRIPLE).join("release"))
}

fn zigbuild(arguments: &[&str]) -> anyhow::Result<()> {
    let bin = tools::ZIGBUILD.install()?;
    let shell = workspace::shell()?;
    let cargo = workspace::cargo();
    let target = format!("{TRIPLE}.{OLDEST_GLIBC}");
    // cargo-zigbuild takes zig from the first `python3`: that of the environment it was installed
    // in.
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{path}", bin.display());
    let cargo_zigbuild = bin.join("cargo-zigbuild");
    cmd!(
        shell,
        "{cargo_zigbuild} zigbuild {arguments...} --target {target}"
    )
    .env("PATH", path)
    .env("CARGO", cargo)
    .env("RUSTFLAGS", remap_paths())
    .env_remove("CARGO_ENCODED_RUSTFLAGS")
    .quiet()
    .run()
    .context("the portable build failed")
}

/// Keeps the builder's home folder out of the panic messages, so that two builders get the same
/// bytes.
fn remap_paths() -> String {
    let home = std::env::var("HOME").unwrap_or_default();
    let cargo_home = std::env::var("CARGO_HOME").unwrap_or_else(|_| format!("{home}/.cargo"));
    format!(
        "--remap-path-prefix={cargo_home}=/cargo --remap-path-prefix={}=/gpu-bringup",
        workspace::root().display()
    )
}

fn write_files(built: &Path, folder: &Path) -> anyhow::Result<()> {
    let shell = workspace::shell()?;
    shell.remove_path(folder)?;
    let completions = shell.create_dir(folder.join("completions"))?;
    let binary = folder.join("gpu-validator");
    shell.copy_file(built, &binary)?;
    let man_page = cmd!(shell, "{binary} generate man").quiet().read()?;
    shell.write_file(folder.join("gpu-validator.1"), man_page + "\n")?;
    for name in ["bash", "zsh", "fish"] {
        let text = cmd!(shell, "{binary} generate completions {name}")
            .quiet()
            .read()?;
        ensure!(
            !text.is_empty(),
            "`gpu-validator generate completions {name}` printed nothing"
        );
        shell.write_file(completions.join(name), text + "\n")?;
    }
    shell.change_dir(folder);
    let files = [
        "gpu-validator",
        "gpu-validator.1",
        "completions/bash",
        "completions/fish",
        "completions/zsh",
    ];
    let sums = cmd!(shell, "sha256sum {files...}").quiet().read()?;
    shell.write_file(folder.join("SHA256SUMS"), sums + "\n")?;
    Ok(())
}

fn check_size(binary: &Path, lto: Lto) -> anyhow::Result<()> {
    let bytes = std::fs::metadata(binary)?.len();
    let megabytes = format!("{}.{:02} MB", bytes / 1_000_000, bytes % 1_000_000 / 10_000);
    if matches!(lto, Lto::Fat) && bytes > LARGEST_BINARY_BYTES {
        bail!(
            "{} is {megabytes}, more than the promised {} MB; `cargo tree --package gpu-validator --edges normal` shows what came in",
            binary.display(),
            LARGEST_BINARY_BYTES / 1_000_000
        );
    }
    eprintln!(
        "{} ({megabytes}, glibc {OLDEST_GLIBC} or newer)",
        binary.display()
    );
    Ok(())
}
