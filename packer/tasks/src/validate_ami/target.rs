//! The machine to judge, as on the command line.

use std::str::FromStr;

use validator_remote::Destination;

/// The machine to judge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// This machine.
    Local,
    /// Another machine, through the system's OpenSSH.
    Ssh(Destination),
}

impl std::fmt::Display for Target {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Target::Local => formatter.write_str("this machine"),
            Target::Ssh(destination) => destination.fmt(formatter),
        }
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Target, String> {
        match text {
            "local" => Ok(Target::Local),
            _ if text.starts_with("ssh://") => Destination::of_url(text).map(Target::Ssh),
            _ => Err("expected `local` or `ssh://user@host:port`".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Target;

    #[test]
    fn a_target_is_this_machine_or_one_behind_ssh() {
        assert_eq!("local".parse(), Ok(Target::Local));
        let ssh = "ssh://ubuntu@10.0.0.7:2222".parse::<Target>();
        assert_eq!(
            ssh.map(|it| it.to_string()).as_deref(),
            Ok("ubuntu@10.0.0.7:2222")
        );
        let refused = "gpu-17".parse::<Target>().expect_err("no target");
        assert!(refused.contains("ssh://user@host:port"));
    }
}
