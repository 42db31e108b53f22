//! `cargo xtask images`: proves the machine images without AWS and without a GPU.

mod bake;
mod boot;
mod cloud;
mod instance;
mod kubelet_taint;
mod provision;
mod runner_dockerfile;
mod runner_image_build;
mod runner_image_run;
mod simulated_gpus;
mod templates;
mod units;
mod withheld;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;

use packer_tasks::runner_image;
use xtask::{command_line, dist};

/// Prove the machine images: templates, systemd units, and whole bakes on a simulated machine
///
/// A bake runs the real Packer and the real provisioners. moto answers in AWS's place; the instance
/// is a namespace served by an sshd on loopback, in which stand-ins take the place of package
/// managers (tests/images).
#[derive(Debug, clap::Args)]
struct Arguments {
    /// Only these parts [default: all but boot]
    #[arg(value_enum, value_name = "PART")]
    parts: Vec<Part>,
    /// Bake what `cargo xtask dist` left in this folder before, instead of building it now
    #[arg(long, value_name = "DIR")]
    validator_folder: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Packer takes every template, in each way to reach its instance, and they are in its style
    Templates,
    /// systemd takes every unit, and they are shut as far as they can be
    Units,
    /// The kubelet's configuration on a node that did not pass
    KubeletTaint,
    /// What an instance that did not pass reports
    Withheld,
    /// hadolint reports nothing for the runner's Dockerfile
    Dockerfile,
    /// What the provisioners leave on a simulated machine: how it joins its cluster, and what a job
    /// may do there
    Provision,
    /// Every template on a healthy machine, and one on broken ones
    Bake,
    /// Build the runner's Dockerfile with buildah on a small Debian with stand-ins, and use what is
    /// built
    RunnerImage,
    /// Boot machines under software emulation, well and broken ones; only when it is named
    Boot,
}

/// Everything but what needs qemu and minutes.
const USUAL_PARTS: [Part; 8] = [
    Part::Templates,
    Part::Units,
    Part::KubeletTaint,
    Part::Withheld,
    Part::Dockerfile,
    Part::Provision,
    Part::Bake,
    Part::RunnerImage,
];

#[derive(Debug, clap::Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct CommandLine {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, clap::Subcommand)]
enum Task {
    Images(Arguments),
}

fn main() -> ExitCode {
    match command_line::parse::<CommandLine>() {
        Ok(CommandLine {
            task: Task::Images(arguments),
        }) => command_line::code(run(&arguments)),
        Err(code) => code,
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let parts = if arguments.parts.is_empty() {
        &USUAL_PARTS[..]
    } else {
        &arguments.parts
    };
    for part in parts {
        match part {
            Part::Templates => templates::check(),
            Part::Units => units::check(),
            Part::KubeletTaint => kubelet_taint::check(),
            Part::Withheld => withheld::check(),
            Part::Dockerfile => runner_image::lint(),
            Part::Provision => provision::check(),
            Part::Bake => validator_folder(arguments).and_then(|folder| bake::check(&folder)),
            Part::Boot => validator_folder(arguments).and_then(|folder| boot::check(&folder)),
            Part::RunnerImage => {
                validator_folder(arguments).and_then(|folder| runner_image_build::check(&folder))
            }
        }
        .with_context(|| format!("part {part:?} of the images"))?;
    }
    Ok(())
}

fn validator_folder(arguments: &Arguments) -> anyhow::Result<PathBuf> {
    if let Some(folder) = &arguments.validator_folder {
        return Ok(std::path::absolute(folder)?);
    }
    let binary = dist::build()?;
    let folder = binary.parent().context("the binary lies in no folder")?;
    Ok(folder.to_path_buf())
}
