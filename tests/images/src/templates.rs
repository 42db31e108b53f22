//! What Packer takes of the templates without AWS: each of them, in each way to reach its build
//! instance.

use anyhow::ensure;

use packer_tasks::ami;

const PRIVATE_SUBNET: &str = "subnet_id=subnet-0123456789abcdef0";
const BY_SESSION: &str = "ssh_interface=session_manager";
const PROFILE: &str = "iam_instance_profile=gpu-bringup-github-build";

/// Variables that Packer must refuse, each with the reason.
const REFUSED: [(&[&str], &str); 4] = [
    (
        &[PRIVATE_SUBNET, BY_SESSION],
        "a session without an instance profile",
    ),
    (&["ssh_interface=public_ip"], "another way to connect"),
    (
        &[BY_SESSION, "iam_instance_profile=arn:aws:iam::0:x/y"],
        "an ARN for a name",
    ),
    (&["ssh_from_cidrs=[\"0.0.0.0/0\"]"], "the whole internet"),
];

pub(super) fn check() -> anyhow::Result<()> {
    ami::fmt(true)?;
    validate(&[])?;
    validate(&[PRIVATE_SUBNET, BY_SESSION, PROFILE])?;
    validate(&[PRIVATE_SUBNET, "ssh_interface=private_ip"])?;
    for (variables, what) in REFUSED {
        ensure!(
            validate(variables).is_err(),
            "Packer takes {what}: {variables:?}"
        );
    }
    Ok(())
}

fn validate(variables: &[&str]) -> anyhow::Result<()> {
    let variables: Vec<String> = variables.iter().map(|it| (*it).to_owned()).collect();
    ami::validate(&[], &variables)
}
