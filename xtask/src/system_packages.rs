//! `cargo xtask packages`: the validator as a package for Debian and Ubuntu, and for distributions
//! with RPM.
//!
//! Their contents are listed in validator/Cargo.toml. The checks install, run and remove both by
//! the distributions' own programs.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use xshell::{Shell, cmd};

use crate::tools::{CARGO_DEB, CARGO_GENERATE_RPM};
use crate::workspace;

/// Debian 12: dpkg for the one package and rpm for the other. No mirror of an RPM distribution is
/// needed.
const SUITE: &str = "bookworm";
/// What the validator answers where there is no GPU to judge.
const NOT_JUDGED: i32 = 2;

/// Files of `cargo xtask dist` that the packages install.
const STAGED: [&str; 5] = [
    "gpu-validator",
    "gpu-validator.1",
    "completions/bash",
    "completions/zsh",
    "completions/fish",
];
/// Files that both packages install.
const INSTALLED: [&str; 7] = [
    "/usr/bin/gpu-validator",
    "/usr/share/bash-completion/completions/gpu-validator",
    "/usr/lib/systemd/system/gpu-validator.service",
    "/usr/lib/systemd/system/gpu-validator-health.service",
    "/usr/lib/systemd/system/gpu-validator-health.timer",
    "/etc/gpu-validator/environment",
    "/etc/gpu-validator/profiles/p5.yaml",
];
/// The man page, which one of the packages compresses.
const MAN_PAGES: [&str; 2] = [
    "/usr/share/man/man1/gpu-validator.1",
    "/usr/share/man/man1/gpu-validator.1.gz",
];
/// A file of the administrator's own once it is installed.
const CONFIGURATION: &str = "/etc/gpu-validator/environment";

/// Make the packages of what `cargo xtask dist` built
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Folder of the binary, its man page and completions [default: target/dist]
    #[arg(long, value_name = "DIR")]
    validator_folder: Option<PathBuf>,
    /// Also install, run and remove each in a small Debian
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let shell = workspace::shell()?;
    let built = arguments.validator_folder.clone();
    let built = built.unwrap_or_else(|| workspace::target().join("dist"));
    let (deb, rpm) = make(&shell, &built)?;
    if arguments.check {
        check_deb(&shell, &deb)?;
        check_rpm(&shell, &rpm)?;
    }
    Ok(())
}

fn make(shell: &Shell, built: &Path) -> anyhow::Result<(PathBuf, PathBuf)> {
    let folder = workspace::target().join("packages");
    shell.remove_path(&folder)?;
    // The paths in validator/Cargo.toml are fixed, the folder of the binary is not.
    let staged = folder.join("files");
    shell.create_dir(staged.join("completions"))?;
    for file in STAGED {
        let from = built.join(file);
        ensure!(
            from.exists(),
            "{} is missing; `cargo xtask dist` makes it",
            from.display()
        );
        shell.copy_file(from, staged.join(file))?;
    }
    let deb = folder.join("gpu-validator.deb");
    let rpm = folder.join("gpu-validator.rpm");
    let (cargo_deb, cargo_rpm) = (CARGO_DEB.install()?, CARGO_GENERATE_RPM.install()?);
    cmd!(
        shell,
        "{cargo_deb} --package gpu-validator --no-build --no-strip --output {deb}"
    )
    .env("CARGO", workspace::cargo())
    .quiet()
    .run()
    .context("cargo-deb made no package")?;
    cmd!(
        shell,
        "{cargo_rpm} generate-rpm --package validator --output {rpm}"
    )
    .quiet()
    .run()
    .context("cargo-generate-rpm made no package")?;
    println!("{}\n{}", deb.display(), rpm.display());
    Ok((deb, rpm))
}

/// A small Debian in which packages are installed and removed; made anew for each package.
#[derive(Debug)]
struct Userland<'a> {
    shell: &'a Shell,
    root: PathBuf,
}

impl<'a> Userland<'a> {
    fn make(shell: &'a Shell, name: &str, include: &[&str]) -> anyhow::Result<Userland<'a>> {
        let root = workspace::target().join(format!("packages/{name}"));
        let archive = workspace::tools().join(format!("userland-{name}.tar"));
        if !archive.exists() {
            let include = include.iter().map(|it| format!("--include={it}"));
            let unfinished = archive.with_extension("unfinished.tar");
            cmd!(
                shell,
                "mmdebstrap --quiet --variant=essential {include...} {SUITE} {unfinished}"
            )
            .quiet()
            .run()
            .context("no userland of Debian; install mmdebstrap (Debian and Ubuntu: apt-get install mmdebstrap) and check that deb.debian.org answers")?;
            std::fs::rename(&unfinished, &archive)?;
        }
        shell.create_dir(&root)?;
        // Device nodes need root. What is installed here opens /dev/null alone.
        cmd!(
            shell,
            "tar --extract --file {archive} --directory {root} --no-same-owner --exclude=./dev/*"
        )
        .quiet()
        .run()?;
        shell.write_file(root.join("dev/null"), "")?;
        Ok(Userland { shell, root })
    }

    /// Runs a command in it, as root of a namespace; gives exit code and everything that was
    /// printed.
    fn run(&self, command: &[&str]) -> anyhow::Result<(Option<i32>, String)> {
        let (shell, root) = (self.shell, &self.root);
        let mount_proc = format!("--mount-proc={}", root.join("proc").display());
        let namespaces = [
            "--map-root-user",
            "--mount",
            "--pid",
            "--fork",
            &mount_proc,
            "chroot",
        ];
        let output = cmd!(shell, "unshare {namespaces...} {root} {command...}")
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("LC_ALL", "C")
            .quiet()
            .ignore_status()
            .output()?;
        let printed = [output.stdout, output.stderr].concat();
        Ok((
            output.status.code(),
            String::from_utf8_lossy(&printed).into_owned(),
        ))
    }

    fn succeeds(&self, command: &[&str]) -> anyhow::Result<String> {
        let (code, printed) = self.run(command)?;
        ensure!(
            code == Some(0),
            "`{}` ended with {code:?}:\n{printed}",
            command.join(" ")
        );
        Ok(printed)
    }

    fn path(&self, absolute: &str) -> PathBuf {
        self.root.join(absolute.trim_start_matches('/'))
    }

    /// Everything is there, starts, and judges the profiles that came with it.
    fn works(&self) -> anyhow::Result<()> {
        for file in INSTALLED {
            ensure!(self.path(file).is_file(), "{file} is not installed");
        }
        ensure!(
            MAN_PAGES.iter().any(|it| self.path(it).is_file()),
            "{} is not installed",
            MAN_PAGES[0]
        );
        let version = self.succeeds(&["gpu-validator", "--version"])?;
        ensure!(
            version.contains(env!("CARGO_PKG_VERSION")),
            "the installed program is {version}"
        );
        self.succeeds(&[
            "gpu-validator",
            "profile",
            "check",
            "/etc/gpu-validator/profiles/p5.yaml",
        ])?;
        let (code, printed) = self.run(&["gpu-validator", "run", "--level", "quick"])?;
        ensure!(
            code == Some(NOT_JUDGED),
            "without a GPU the installed program ended with {code:?}:\n{printed}"
        );
        Ok(())
    }

    fn is_gone(&self) -> anyhow::Result<()> {
        let outside_etc = INSTALLED.iter().filter(|it| !it.starts_with("/etc/"));
        for file in outside_etc.chain(&MAN_PAGES) {
            ensure!(!self.path(file).exists(), "{file} is left behind");
        }
        Ok(())
    }

    /// As an administrator does, so that a removal must not take it away.
    fn change_configuration(&self) -> anyhow::Result<()> {
        let path = self.path(CONFIGURATION);
        let text = self.shell.read_file(&path)? + "GPU_VALIDATOR_LEVEL=quick\n";
        Ok(self.shell.write_file(&path, text)?)
    }
}

fn check_deb(shell: &Shell, deb: &Path) -> anyhow::Result<()> {
    let userland = Userland::make(shell, "debian", &["libgcc-s1"])?;
    shell.copy_file(deb, userland.path("/gpu-validator.deb"))?;
    userland.succeeds(&["dpkg", "--install", "/gpu-validator.deb"])?;
    userland.works()?;
    let listed = userland.succeeds(&[
        "dpkg-query",
        "--show",
        "--showformat=${Conffiles}",
        "gpu-validator",
    ])?;
    for file in INSTALLED.iter().filter(|it| it.starts_with("/etc/")) {
        ensure!(
            listed.contains(file),
            "{file} is no configuration file of the package:\n{listed}"
        );
    }
    userland.succeeds(&["dpkg", "--verify", "gpu-validator"])?;
    userland.change_configuration()?;
    userland.succeeds(&["dpkg", "--remove", "gpu-validator"])?;
    userland.is_gone()?;
    ensure!(
        userland.path(CONFIGURATION).exists(),
        "removal took the changed {CONFIGURATION} away"
    );
    userland.succeeds(&["dpkg", "--purge", "gpu-validator"])?;
    ensure!(
        !userland.path("/etc/gpu-validator").exists(),
        "/etc/gpu-validator is left behind after a purge"
    );
    println!("deb: installed, run, removed and purged on Debian {SUITE}");
    Ok(())
}

fn check_rpm(shell: &Shell, rpm: &Path) -> anyhow::Result<()> {
    let userland = Userland::make(shell, "rpm", &["libgcc-s1", "rpm"])?;
    shell.copy_file(rpm, userland.path("/gpu-validator.rpm"))?;
    userland.succeeds(&["rpm", "--initdb"])?;
    let requires = userland.succeeds(&[
        "rpm",
        "--query",
        "--requires",
        "--package",
        "/gpu-validator.rpm",
    ])?;
    for needed in ["glibc >= 2.28", "libgcc"] {
        ensure!(
            requires.lines().any(|it| it.trim() == needed),
            "the package does not require {needed}:\n{requires}"
        );
    }
    // Debian's packages are not in RPM's database, so that what is required is seen above and not
    // resolved here.
    userland.succeeds(&["rpm", "--install", "--nodeps", "/gpu-validator.rpm"])?;
    userland.works()?;
    userland.succeeds(&["rpm", "--verify", "--nodeps", "gpu-validator"])?;
    let configuration = userland.succeeds(&["rpm", "--query", "--configfiles", "gpu-validator"])?;
    for file in INSTALLED.iter().filter(|it| it.starts_with("/etc/")) {
        ensure!(
            configuration.contains(file),
            "{file} is no configuration file of the package:\n{configuration}"
        );
    }
    userland.change_configuration()?;
    userland.succeeds(&["rpm", "--erase", "gpu-validator"])?;
    userland.is_gone()?;
    let saved = format!("{CONFIGURATION}.rpmsave");
    ensure!(
        userland.path(&saved).exists(),
        "removal took the changed {CONFIGURATION} away"
    );
    println!("rpm: installed, verified, run and removed by rpm on Debian {SUITE}");
    Ok(())
}
