//! The runner's Dockerfile built by buildah, on a small Debian in which stand-ins take the place of
//! what needs the network.

use std::path::Path;

use anyhow::{Context as _, ensure};
use xshell::{Shell, cmd};

use super::{runner_dockerfile, runner_image_run};
use packer_tasks::runner_image::{self, BuildArguments};
use xtask::{debian_userland, workspace};

const BASE: &str = "localhost/gpu-bringup-test-base";
const IMAGE: &str = "localhost/gpu-bringup-test-runner";
/// What the Dockerfile's own lines need, and what compiles: Debian's cmake and ninja stand where
/// pip3 puts newer ones.
const PACKAGES: &str = "bash,coreutils,dash,findutils,gawk,grep,gzip,libc-bin,sed,tar,util-linux,perl-base,libgcc-s1,login,passwd,\
    ccache,cmake,gcc,libc6-dev,ninja-build";

/// What the Dockerfile runs and this machine cannot: packages and downloads. The call is written
/// down.
const STAND_IN: &str = r#"#!/bin/bash
set -euo pipefail
name=${0##*/}
echo "$name $*" >>/stand-ins.log
case "$name" in
  curl)
    while [ $# -gt 1 ]; do
      if [ "$1" = --output ]; then output=$2; fi
      shift
    done
    cp "/downloads/${1##*/}" "$output"
    ;;
  apt-get)
    # What the package's trigger does.
    case "$*" in *" ccache "*) ln -sf ../../bin/ccache /usr/lib/ccache/gcc ;; esac
    ;;
esac
"#;

pub(super) fn check(validator_folder: &Path) -> anyhow::Result<()> {
    let shell = workspace::shell()?;
    cmd!(shell, "buildah --version")
        .quiet()
        .ignore_stdout()
        .run()
        .context("buildah is missing; install it (Debian and Ubuntu: apt-get install buildah)")?;
    let folder = workspace::target().join("images/runner-image");
    shell.remove_path(&folder)?;
    let sums = make_base(&shell, &folder)?;
    let build_arguments = [
        format!("BASE={BASE}"),
        format!("ACTIONS_RUNNER_SHA256={}", sums[0]),
        format!("CUDA_KEYRING_SHA256={}", sums[1]),
    ];
    let arguments = |build_arguments: &[String]| BuildArguments {
        name: IMAGE.to_owned(),
        tag: "test".to_owned(),
        dockerfile_arguments: build_arguments.to_vec(),
        validator_folder: Some(validator_folder.to_path_buf()),
        engine_options: ["--isolation=chroot", "--pull-never", "--format=docker"]
            .map(str::to_owned)
            .to_vec(),
        engine: Some("buildah".to_owned()),
    };
    runner_image::build(&arguments(&build_arguments))?;
    runner_image_run::check(&shell, &format!("{IMAGE}:test"))?;
    let mut wrong = build_arguments.clone();
    wrong[1] = format!("ACTIONS_RUNNER_SHA256={}", "0".repeat(64));
    ensure!(
        runner_image::build(&arguments(&wrong)).is_err(),
        "the image is built with a runner of another checksum"
    );
    cmd!(shell, "buildah rmi {IMAGE}:test {BASE}")
        .quiet()
        .ignore_stdout()
        .run()?;
    println!(
        "runner-image: buildah builds it, its hooks and compilers work as its user, and a runner of another checksum is refused"
    );
    Ok(())
}

/// Makes the base image; the checksums of the downloads that it has.
fn make_base(shell: &Shell, folder: &Path) -> anyhow::Result<[String; 2]> {
    let userland = debian_userland::bootstrap(shell, "container-base", "bookworm", PACKAGES)?;
    let extra = folder.join("extra");
    for program in ["apt-get", "apt-mark", "curl", "dpkg", "pip3"] {
        let path = extra.join("usr/local/sbin").join(program);
        shell.write_file(&path, STAND_IN)?;
        cmd!(shell, "chmod +x {path}").quiet().run()?;
    }
    let runner = folder.join("runner");
    for name in ["run.sh", "bin/installdependencies.sh"] {
        shell.write_file(runner.join(name), "#!/bin/sh\n")?;
    }
    cmd!(shell, "chmod --recursive +x {runner}").quiet().run()?;
    let downloads = shell.create_dir(extra.join("downloads"))?;
    let archive = downloads.join(format!(
        "actions-runner-linux-x64-{}.tar.gz",
        runner_dockerfile::argument(shell, "ACTIONS_RUNNER_VERSION")?
    ));
    cmd!(
        shell,
        "tar --create --gzip --file {archive} --directory {runner} ."
    )
    .quiet()
    .run()?;
    let keyring = downloads.join("cuda-keyring_1.1-1_all.deb");
    shell.write_file(&keyring, "package")?;
    shell.write_file(
        extra.join("etc/passwd"),
        "root:x:0:0:root:/root:/bin/bash\n",
    )?;
    shell.write_file(extra.join("etc/group"), "root:x:0:\n")?;
    shell.create_dir(extra.join("tmp"))?;

    let container = cmd!(shell, "buildah from scratch").quiet().read()?;
    for source in [&userland, &extra] {
        cmd!(shell, "buildah copy --quiet {container} {source} /")
            .quiet()
            .ignore_stdout()
            .run()?;
    }
    cmd!(shell, "buildah run --isolation=chroot {container} /bin/bash -c 'ln -sf bash /bin/sh; ln -sf gawk /usr/bin/awk; chmod 1777 /tmp'")
        .quiet()
        .run()?;
    cmd!(shell, "buildah commit --quiet --rm {container} {BASE}")
        .quiet()
        .ignore_stdout()
        .run()?;
    Ok([sum(shell, &archive)?, sum(shell, &keyring)?])
}

fn sum(shell: &Shell, path: &Path) -> anyhow::Result<String> {
    let line = cmd!(shell, "sha256sum {path}").quiet().read()?;
    Ok(line
        .split_whitespace()
        .next()
        .unwrap_or_default()
        .to_owned())
}
