//! `cargo xtask images`: proves the machine images without AWS and without a GPU.

mod bake;
mod boot;
mod cloud;
mod instance;
mod kubelet_taint;
mod runner_image_build;
mod runner_image_run;
mod simulated_gpus;
mod units;

use std::path::PathBuf;

use anyhow::Context as _;

use crate::{ami, dist, runner_image};

/// Prove the machine images: templates, systemd units, and whole bakes on a simulated machine
///
/// A bake runs the real Packer and the real provisioners. moto answers in AWS's place; the instance is a namespace behind an
/// sshd on loopback, in which stand-ins take the place of package managers (tests/images).
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Only these parts [default: all but boot]
    #[arg(value_enum, value_name = "PART")]
    parts: Vec<Part>,
    /// Bake what `cargo xtask dist` left in this folder before, instead of building it now
    #[arg(long, value_name = "DIR")]
    validator_folder: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Packer takes every template, and they are in its style
    Templates,
    /// systemd takes every unit, and they are shut as far as they can be
    Units,
    /// What kubelet is told on a node that did not pass
    KubeletTaint,
    /// hadolint has nothing to say of the runner's Dockerfile
    Dockerfile,
    /// Every template on a healthy machine, and one on broken ones
    Bake,
    /// Build the runner's Dockerfile with buildah on a small Debian with stand-ins, and use what is built
    RunnerImage,
    /// Boot machines under software emulation, well and broken ones; only when it is named
    Boot,
}

/// Everything but what needs qemu and minutes.
const USUAL_PARTS: [Part; 6] = [
    Part::Templates,
    Part::Units,
    Part::KubeletTaint,
    Part::Dockerfile,
    Part::Bake,
    Part::RunnerImage,
];

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let parts = if arguments.parts.is_empty() {
        &USUAL_PARTS[..]
    } else {
        &arguments.parts
    };
    for part in parts {
        match part {
            Part::Templates => ami::fmt(true).and_then(|()| ami::validate(&[], &[])),
            Part::Units => units::check(),
            Part::KubeletTaint => kubelet_taint::check(),
            Part::Dockerfile => runner_image::lint(),
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
