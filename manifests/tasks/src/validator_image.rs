//! `cargo xtask validator-image`: the container image of the validator
//! (manifests/kubernetes/Dockerfile).

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use xshell::{Shell, cmd};

use harness::simulate::Simulator;
use xtask::{debian_userland, dist, workspace};

const DOCKERFILE: &str = "manifests/kubernetes/Dockerfile";
const NAME: &str = concat!("gpu-bringup/gpu-validator:", env!("CARGO_PKG_VERSION"));
/// A base for both stages, made of Debian packages: nothing is pulled.
const LOCAL_BASE: &str = "localhost/gpu-bringup-validator-base";
const LOCAL_IMAGE: &str = "localhost/gpu-bringup-validator:test";
const LOCAL_PACKAGES: &str = "base-files,libc6,libgcc-s1,libtinfo6,util-linux";

/// Build the validator's container image, or prove its Dockerfile without a registry
#[derive(Debug, clap::Args)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, clap::Subcommand)]
enum Task {
    /// Build it on distroless with buildah, docker or podman
    Build(BuildArguments),
    /// Build it with buildah on a small Debian made here, start the validator in it, and check
    /// its user
    Check(CheckArguments),
}

#[derive(Debug, clap::Args)]
struct BuildArguments {
    /// Name and tag of the image
    #[arg(long, value_name = "NAME:TAG", default_value = NAME)]
    tag: String,
    /// What builds
    #[arg(long, value_parser = ["buildah", "docker", "podman"], default_value = "buildah")]
    engine: String,
    /// A base in place of distroless
    #[arg(long, value_name = "IMAGE")]
    base: Option<String>,
    /// The folder with the portable binary, instead of building it now
    #[arg(long, value_name = "DIR")]
    validator_folder: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
struct CheckArguments {
    /// A folder with the binary, instead of building it now
    #[arg(long, value_name = "DIR")]
    validator_folder: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let shell = workspace::shell()?;
    match &arguments.task {
        Task::Build(arguments) => {
            let folder = validator_folder(arguments.validator_folder.as_deref())?;
            let bases: Vec<String> = arguments
                .base
                .iter()
                .map(|it| format!("BASE={it}"))
                .collect();
            build(
                &shell,
                &arguments.engine,
                &arguments.tag,
                &bases,
                &[],
                &folder,
            )
        }
        Task::Check(arguments) => {
            let folder = validator_folder(arguments.validator_folder.as_deref())?;
            check(&shell, &folder)
        }
    }
}

fn validator_folder(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(folder) = given {
        return Ok(std::path::absolute(folder)?);
    }
    let binary = dist::build()?;
    let folder = binary.parent().context("the binary lies in no folder")?;
    Ok(folder.to_path_buf())
}

fn build(
    shell: &Shell,
    engine: &str,
    tag: &str,
    build_arguments: &[String],
    options: &[&str],
    folder: &Path,
) -> anyhow::Result<()> {
    let build_arguments: Vec<String> = build_arguments
        .iter()
        .map(|it| format!("--build-arg={it}"))
        .collect();
    cmd!(
        shell,
        "{engine} build {options...} {build_arguments...} --file {DOCKERFILE} --tag {tag} {folder}"
    )
    .quiet()
    .run()
    .with_context(|| format!("{engine} cannot build {DOCKERFILE}; is it installed?"))
}

fn check(shell: &Shell, folder: &Path) -> anyhow::Result<()> {
    let userland =
        debian_userland::bootstrap(shell, "validator-image-base", "bookworm", LOCAL_PACKAGES)?;
    let container = cmd!(shell, "buildah from scratch")
        .quiet()
        .read()
        .context("buildah is missing; install it (Debian and Ubuntu: apt-get install buildah)")?;
    cmd!(shell, "buildah copy --quiet {container} {userland} /")
        .quiet()
        .ignore_stdout()
        .run()?;
    cmd!(
        shell,
        "buildah commit --quiet --rm {container} {LOCAL_BASE}"
    )
    .quiet()
    .ignore_stdout()
    .run()?;
    let bases = [format!("BASE={LOCAL_BASE}"), format!("DEBIAN={LOCAL_BASE}")];
    let options = ["--isolation=chroot", "--pull-never", "--format=docker"];
    build(shell, "buildah", LOCAL_IMAGE, &bases, &options, folder)?;
    let image = cmd!(shell, "buildah inspect --type image {LOCAL_IMAGE}")
        .quiet()
        .read()?;
    let image: serde_json::Value = serde_json::from_str(&image)?;
    let user = &image["OCIv1"]["config"]["User"];
    ensure!(
        user == "65532:65532",
        "the image runs as {user}, expected 65532:65532"
    );
    let container = cmd!(shell, "buildah from --pull-never {LOCAL_IMAGE}")
        .quiet()
        .read()?;
    for program in [["gpu-validator", "--version"], ["dmesg", "--version"]] {
        cmd!(
            shell,
            "buildah run --isolation=chroot {container} {program...}"
        )
        .quiet()
        .run()
        .with_context(|| format!("{} does not start in the image", program[0]))?;
    }
    let gated = gate_in_container(&container);
    cmd!(shell, "buildah rm {container}")
        .quiet()
        .ignore_stdout()
        .run()?;
    gated?;
    cmd!(shell, "buildah rmi --force {LOCAL_IMAGE} {LOCAL_BASE}")
        .quiet()
        .ignore_stdout()
        .run()?;
    println!(
        "validator-image: buildah builds it, its programs start, its user is no root, and the gate judges a node from inside it"
    );
    Ok(())
}

/// Runs a program in a container's root, as the image's user, with nothing to write to but `/tmp`
/// and the simulated node, which is shared memory of its driver's processes. `$1` is the container,
/// `$2` the node's folder.
const IN_CONTAINER: &str = r#"set -eu
root=$(buildah mount "$1") node=$2; shift 2
chmod -R a+rwX "$node"
mkdir -p "$root/proc" "$root/dev" "$root/tmp"
mount --bind "$root" "$root"
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
# After /tmp, which the node may lie in.
mkdir -p "$root$node"
mount --bind "$node" "$root$node"
mount -o remount,bind,ro "$root"
if touch "$root/written" 2>/dev/null; then echo 'the root can be written to' >&2; exit 99; fi
exec chroot --userspec=65532:65532 "$root" "$@"
"#;

/// The gate in the image, on a healthy node and on one with ECC errors. It reports to no cluster:
/// `cargo xtask k8s e2e` does that.
fn gate_in_container(container: &str) -> anyhow::Result<()> {
    let simulator = Simulator::build()?;
    for (faults, code, words) in [
        (vec![], 0, "would get GpuValidated=True"),
        (
            vec!["ecc-volatile-uncorrectable".to_owned()],
            1,
            "would get GpuValidated=False",
        ),
    ] {
        let node = simulator.prepare("h200x1", &faults, &[])?;
        let mut command = in_namespace();
        command.args(["--mount", "sh", "-c", IN_CONTAINER, "sh", container]);
        command.arg(node.folder());
        command.args(["/usr/local/bin/gpu-validator", "kubernetes", "gate"]);
        command.args(["--dry-run", "--allow-simulated", "--node-name=node"]);
        command.arg("--json=/tmp/report.json");
        workspace::without_cargos_library_path(&mut command);
        node.apply(&mut command);
        let output = command.output().context("unshare does not start")?;
        let said = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        ensure!(
            output.status.code() == Some(code) && said.contains(words),
            "the gate in the image ended with {}, expected {code} and `{words}`:\n{said}",
            output.status
        );
    }
    Ok(())
}

/// Any other user than root is root in a namespace of buildah's, where containers can be mounted.
fn in_namespace() -> Command {
    if rustix::process::geteuid().is_root() {
        return Command::new("unshare");
    }
    let mut command = Command::new("buildah");
    command.args(["unshare", "unshare"]);
    command
}
