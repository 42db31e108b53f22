//! `cargo xtask runner-image`: the container image of a GitHub Actions runner with GPUs.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};
use xshell::cmd;

use xtask::{dist, tools, workspace};

const DOCKERFILE: &str = "packer/runner-gpu/Dockerfile";
const NAME: &str = "gpu-bringup/runner-gpu";

/// Container engines that take the same options here, in the order in which they are looked for.
const ENGINES: [&str; 3] = ["docker", "podman", "buildah"];

/// Build, push and validate the runner's container image (packer/runner-gpu)
#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, clap::Subcommand)]
enum Task {
    /// Build it, with the gpu-validator of this checkout in it
    Build(BuildArguments),
    /// Push it, under the name that it was built with
    Push {
        #[arg(long, default_value = NAME)]
        name: String,
        #[arg(long, default_value = "latest")]
        tag: String,
    },
    /// Check the Dockerfile; with --image also the GPUs as a container of the image sees them
    /// (needs docker or podman, and a GPU)
    Validate {
        #[arg(long, value_name = "IMAGE")]
        image: Option<String>,
        /// Profile below /etc/gpu-validator/profiles of the image, such as p5
        #[arg(long, value_name = "NAME", requires = "image")]
        profile: Option<String>,
    },
}

#[derive(Debug, clap::Args)]
pub struct BuildArguments {
    /// Name of the image, with the registry it will be pushed to
    #[arg(long, default_value = NAME)]
    pub name: String,
    #[arg(long, default_value = "latest")]
    pub tag: String,
    /// An ARG of the Dockerfile (`CUDA_VERSION=12.8`); may be given several times
    #[arg(long = "build-arg", value_name = "NAME=VALUE")]
    pub dockerfile_arguments: Vec<String>,
    /// Take what `cargo xtask dist` left in this folder before, instead of building it now
    #[arg(long, value_name = "DIR")]
    pub validator_folder: Option<PathBuf>,
    /// An option for the engine itself (--isolation=chroot); may be given several times
    #[arg(
        long = "engine-option",
        value_name = "OPTION",
        allow_hyphen_values = true
    )]
    pub engine_options: Vec<String>,
    /// The container engine [default: docker, podman or buildah, whichever is there]
    #[arg(long, value_parser = ENGINES)]
    pub engine: Option<String>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    match &arguments.task {
        Task::Build(arguments) => build(arguments),
        Task::Push { name, tag } => push(&format!("{name}:{tag}")),
        Task::Validate { image, profile } => {
            lint()?;
            image
                .as_ref()
                .map_or(Ok(()), |image| validate(image, profile.as_deref()))
        }
    }
}

pub fn build(arguments: &BuildArguments) -> anyhow::Result<()> {
    let engine = match &arguments.engine {
        Some(engine) => engine.clone(),
        None => engine(&ENGINES)?,
    };
    let folder = match &arguments.validator_folder {
        Some(folder) => folder.clone(),
        None => dist::build()?
            .parent()
            .context("the binary lies in no folder")?
            .to_path_buf(),
    };
    let context = context(&folder)?;
    let image = format!("{}:{}", arguments.name, arguments.tag);
    let mut command = Command::new(&engine);
    command
        .arg("build")
        .args(&arguments.engine_options)
        .arg("--file")
        .arg(workspace::root().join(DOCKERFILE))
        .args(["--tag", &image]);
    for argument in &arguments.dockerfile_arguments {
        command.args(["--build-arg", argument]);
    }
    let status = command
        .arg(&context)
        .status()
        .with_context(|| format!("{engine} could not be started"))?;
    ensure!(
        status.success(),
        "{engine} did not build {image} ({status})"
    );
    println!("{image} is built");
    Ok(())
}

/// What the Dockerfile copies, and nothing else of the checkout.
fn context(validator_folder: &Path) -> anyhow::Result<PathBuf> {
    let shell = workspace::shell()?;
    let context = workspace::target().join("runner-image/context");
    shell.remove_path(&context)?;
    shell.create_dir(workspace::target().join("runner-image"))?;
    let dist = std::path::absolute(validator_folder)?;
    cmd!(
        shell,
        "bash workflows/runner-image-context.sh {dist} {context}"
    )
    .quiet()
    .run()
    .context("`cargo xtask dist` makes what goes into the image")?;
    Ok(context)
}

fn push(image: &str) -> anyhow::Result<()> {
    let engine = engine(&ENGINES)?;
    let status = Command::new(&engine).args(["push", image]).status()?;
    ensure!(status.success(), "{engine} did not push {image} ({status})");
    Ok(())
}

pub fn lint() -> anyhow::Result<()> {
    let hadolint = tools::LINTERS.install()?.join("hadolint");
    let shell = workspace::shell()?;
    cmd!(shell, "{hadolint} {DOCKERFILE}")
        .quiet()
        .run()
        .context("hadolint objects to the Dockerfile")?;
    println!("dockerfile: hadolint takes {DOCKERFILE}");
    Ok(())
}

/// Level standard in a container with all GPUs; the exit code decides.
fn validate(image: &str, profile: Option<&str>) -> anyhow::Result<()> {
    let engine = engine(&["docker", "podman"])?;
    let gpus: &[&str] = if engine == "docker" {
        &["--gpus", "all"]
    } else {
        &["--device", "nvidia.com/gpu=all"]
    };
    let mut command = Command::new(&engine);
    command.args(["run", "--rm"]).args(gpus).args([
        image,
        "/usr/bin/gpu-validator",
        "run",
        "--level",
        "standard",
    ]);
    if let Some(profile) = profile {
        command.args([
            "--profile",
            &format!("/etc/gpu-validator/profiles/{profile}.yaml"),
        ]);
    }
    let status = command.status()?;
    ensure!(
        status.success(),
        "the GPUs of this machine do not pass in a container of {image} ({status})"
    );
    Ok(())
}

fn engine(known: &[&str]) -> anyhow::Result<String> {
    match known.iter().find(|name| workspace::in_path(name).is_some()) {
        Some(name) => Ok((*name).to_owned()),
        None => bail!("no container engine; install one of {}", known.join(", ")),
    }
}
