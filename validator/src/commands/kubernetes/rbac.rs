//! `gpu-validator kubernetes rbac`: the roles, made from the requests that the code makes.

use crate::commands::terminal::to_stdout;
use crate::probe::kubernetes::{Purpose, role_yaml};
use validator_core::findings::ExitStatus;

/// Print the role with exactly the rights that a purpose needs, as YAML
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// What the rights are for
    #[arg(value_enum, value_name = "PURPOSE")]
    purpose: Purpose,
    /// Name of the role [default: gpu-validator-PURPOSE]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// A Role in this namespace instead of a ClusterRole
    #[arg(long, value_name = "NAMESPACE")]
    namespace: Option<String>,
}

pub(crate) fn rbac(arguments: &Arguments) -> ExitStatus {
    use clap::ValueEnum as _;
    let name = arguments.name.clone().unwrap_or_else(|| {
        let purpose = arguments.purpose.to_possible_value();
        format!(
            "gpu-validator-{}",
            purpose.as_ref().map_or("", |it| it.get_name())
        )
    });
    to_stdout(&role_yaml(
        arguments.purpose,
        &name,
        arguments.namespace.as_deref(),
    ));
    ExitStatus::Passed
}
