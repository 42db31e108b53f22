//! A host of `ssh`, as command lines and files name it.

use std::str::FromStr;

/// A host for `ssh`. What is left out is decided by the user's ssh configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    pub user: Option<String>,
    pub host: String,
    pub port: Option<u16>,
}

impl std::fmt::Display for Destination {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(user) = &self.user {
            write!(formatter, "{user}@")?;
        }
        match (self.port, self.host.contains(':')) {
            (Some(port), true) => write!(formatter, "[{}]:{port}", self.host),
            (Some(port), false) => write!(formatter, "{}:{port}", self.host),
            (None, _) => formatter.write_str(&self.host),
        }
    }
}

impl Destination {
    /// Reads `ssh://user@host:port`.
    pub fn of_url(text: &str) -> Result<Destination, String> {
        text.strip_prefix("ssh://")
            .ok_or("expected `ssh://user@host:port`".to_owned())?
            .parse()
    }
}

impl FromStr for Destination {
    type Err = String;

    fn from_str(text: &str) -> Result<Destination, String> {
        let text = text.strip_suffix('/').unwrap_or(text);
        let (user, address) = match text.rsplit_once('@') {
            Some((user, address)) => (Some(plain("user", user)?), address),
            None => (None, text),
        };
        let (host, port) = split_port(address)?;
        let port = port.map(|port| {
            port.parse()
                .ok()
                .filter(|&port| port != 0)
                .ok_or(format!("port `{port}` is not a number from 1 to 65535"))
        });
        Ok(Destination {
            user,
            host: plain("host", host)?,
            port: port.transpose()?,
        })
    }
}

/// Splits `host:port` and `[address]:port`; an IPv6 address without brackets has no port.
fn split_port(address: &str) -> Result<(&str, Option<&str>), String> {
    if let Some(rest) = address.strip_prefix('[') {
        let (host, rest) = rest
            .split_once(']')
            .ok_or("`[` without `]` around the address")?;
        return match rest {
            "" => Ok((host, None)),
            _ => rest
                .strip_prefix(':')
                .map(|port| (host, Some(port)))
                .ok_or(format!("`{rest}` after the address is not a port")),
        };
    }
    match address.split_once(':') {
        Some((_, rest)) if rest.contains(':') => Ok((address, None)),
        Some((host, port)) => Ok((host, Some(port))),
        None => Ok((address, None)),
    }
}

/// A word that ssh cannot take for an option, and a remote shell never sees.
fn plain(what: &str, text: &str) -> Result<String, String> {
    let allowed = |c: char| c.is_alphanumeric() || "._-+\\@%:".contains(c);
    if text.is_empty() {
        Err(format!("the {what} is empty"))
    } else if text.starts_with('-') || !text.chars().all(allowed) {
        Err(format!("`{text}` is not a {what} name"))
    } else {
        Ok(text.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::Destination;

    fn ssh(user: Option<&str>, host: &str, port: Option<u16>) -> Destination {
        Destination {
            user: user.map(str::to_owned),
            host: host.to_owned(),
            port,
        }
    }

    #[test]
    fn targets_that_people_write() {
        assert_eq!(
            Destination::of_url("ssh://gpu-17"),
            Ok(ssh(None, "gpu-17", None))
        );
        assert_eq!(
            Destination::of_url("ssh://ubuntu@10.0.0.7:2222"),
            Ok(ssh(Some("ubuntu"), "10.0.0.7", Some(2222)))
        );
        assert_eq!(
            Destination::of_url("ssh://ec2-user@ip-10-0-0-7.ec2.internal/"),
            Ok(ssh(Some("ec2-user"), "ip-10-0-0-7.ec2.internal", None))
        );
        assert_eq!(
            Destination::of_url("ssh://[2001:db8::1]:22"),
            Ok(ssh(None, "2001:db8::1", Some(22)))
        );
        assert_eq!(
            Destination::of_url("ssh://root@2001:db8::1"),
            Ok(ssh(Some("root"), "2001:db8::1", None))
        );
        assert_eq!(
            Destination::of_url("ssh://user@domain@host"),
            Ok(ssh(Some("user@domain"), "host", None))
        );
    }

    #[test]
    fn targets_that_are_refused_with_a_reason() {
        let refused = |text: &str| Destination::of_url(text).expect_err(text);
        assert!(refused("gpu-17").contains("ssh://user@host:port"));
        assert!(refused("ssh://").contains("the host is empty"));
        assert!(refused("ssh://@host").contains("the user is empty"));
        assert!(refused("ssh://host:0").contains("port `0`"));
        assert!(refused("ssh://host:70000").contains("port `70000`"));
        assert!(refused("ssh://host:ssh").contains("port `ssh`"));
        assert!(refused("ssh://[::1").contains("without `]`"));
        assert!(refused("ssh://[::1]22").contains("is not a port"));
        assert!(refused("ssh://-oProxyCommand=reboot").contains("is not a host name"));
        assert!(refused("ssh://host/path").contains("is not a host name"));
        assert!(refused("ssh://us er@host").contains("is not a user name"));
    }

    #[test]
    fn a_destination_reads_as_it_was_written() {
        for text in [
            "gpu-17",
            "ubuntu@10.0.0.7:2222",
            "[2001:db8::1]:22",
            "root@2001:db8::1",
        ] {
            assert_eq!(
                text.parse::<Destination>()
                    .map(|destination| destination.to_string())
                    .as_deref(),
                Ok(text)
            );
        }
    }
}
