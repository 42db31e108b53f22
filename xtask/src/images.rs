//! `cargo xtask images`: proves the machine images without AWS and without a GPU.

mod bake;
mod cloud;
mod instance;
mod kubelet_taint;
mod units;

use anyhow::Context as _;
use clap::ValueEnum as _;

use crate::ami;

/// Prove the machine images: templates, systemd units, and whole bakes on a simulated machine
///
/// A bake runs the real Packer and the real provisioners. moto answers in AWS's place; the instance is a namespace behind an
/// sshd on loopback, in which stand-ins take the place of package managers (tests/images).
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Only these parts [default: all]
    #[arg(value_enum, value_name = "PART")]
    parts: Vec<Part>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Packer takes every template, and they are in its style
    Templates,
    /// systemd takes every unit, and they are shut as far as they can be
    Units,
    /// What kubelet is told on a node that did not pass
    KubeletTaint,
    /// Every template on a healthy machine, and one on broken ones
    Bake,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let parts = if arguments.parts.is_empty() {
        Part::value_variants()
    } else {
        &arguments.parts
    };
    for part in parts {
        match part {
            Part::Templates => ami::fmt(true).and_then(|()| ami::validate(&[], &[])),
            Part::Units => units::check(),
            Part::KubeletTaint => kubelet_taint::check(),
            Part::Bake => bake::check(),
        }
        .with_context(|| format!("part {part:?} of the images"))?;
    }
    Ok(())
}
