//! `gpu-validator kubernetes`: what a cluster runs on its GPU nodes.

mod closure;
mod device_taint;
mod gate;
mod health_watch;
mod rbac;

use validator_core::findings::ExitStatus;

/// What a cluster runs on its GPU nodes
#[derive(Debug, clap::Subcommand)]
pub(crate) enum KubernetesCommand {
    Gate(Box<gate::Arguments>),
    Rbac(rbac::Arguments),
}

pub(crate) fn kubernetes(command: &KubernetesCommand) -> anyhow::Result<ExitStatus> {
    match command {
        KubernetesCommand::Gate(arguments) => gate::gate(arguments),
        KubernetesCommand::Rbac(arguments) => Ok(rbac::rbac(arguments)),
    }
}
