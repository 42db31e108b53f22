//! How an instance is reached: by ssh inside a session of Systems Manager, with a key of the run's
//! own.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use serde_json::json;

use super::cli::Cli;
use xtask::workspace;

/// The user that the instance gets for us; images differ in the name of their own.
const USER: &str = "gpu-bringup";

/// Key and configuration of a run. They go with it.
#[derive(Debug)]
pub(super) struct Access {
    folder: PathBuf,
    public_key: String,
    keep: bool,
}

impl Access {
    pub(super) fn create(
        run: &str,
        cli: &Cli,
        users_configuration: Option<&Path>,
    ) -> anyhow::Result<Access> {
        let parent = workspace::target().join("validate-ami");
        std::fs::create_dir_all(&parent)
            .with_context(|| format!("{} cannot be made", parent.display()))?;
        let folder = parent.join(run);
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&folder)
            .with_context(|| format!("{} cannot be made", folder.display()))?;
        let mut access = Access {
            folder,
            public_key: String::new(),
            keep: false,
        };
        access.public_key = access.make_key(run)?;
        let users = users_configuration.map(std::path::absolute).transpose()?;
        let text = configuration(&access.folder, cli, users.as_deref());
        std::fs::write(access.configuration(), text)?;
        Ok(access)
    }

    fn make_key(&self, run: &str) -> anyhow::Result<String> {
        let key = self.folder.join("key");
        let output = Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-C", run, "-f"])
            .arg(&key)
            .stdin(Stdio::null())
            .output()
            .context("ssh-keygen could not be started; install it (Debian and Ubuntu: apt-get install openssh-client)")?;
        ensure!(
            output.status.success(),
            "ssh-keygen made no key: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        let public_key = std::fs::read_to_string(key.with_extension("pub"))?;
        Ok(public_key.trim().to_owned())
    }

    pub(super) fn configuration(&self) -> PathBuf {
        self.folder.join("ssh_config")
    }

    /// Keeps key and configuration for further use of the instance.
    pub(super) fn keep(&mut self) {
        self.keep = true;
        // Without it a sweep would remove the key, which the instance's end does as well.
        let _ = std::fs::write(self.folder.join(KEPT), "");
    }

    /// Written to a file, so that its length does not matter to a command line.
    pub(super) fn user_data(&self, time_limit_min: u32) -> anyhow::Result<PathBuf> {
        let path = self.folder.join("user-data");
        std::fs::write(&path, cloud_config(&self.public_key, time_limit_min))?;
        Ok(path)
    }
}

/// Removes what killed runs of this machine left. A run's name holds its process; one that was kept
/// stays for its user.
pub(super) fn remove_abandoned() {
    let Ok(entries) = std::fs::read_dir(workspace::target().join("validate-ami")) else {
        return;
    };
    for folder in entries.flatten().map(|entry| entry.path()) {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let process = name.split('-').nth(1).unwrap_or_default();
        let alive = Path::new("/proc").join(process).exists();
        if !alive && !folder.join(KEPT).exists() {
            let _ = std::fs::remove_dir_all(&folder);
        }
    }
}

/// An empty file that marks key and configuration as still in use.
const KEPT: &str = "kept";

impl Drop for Access {
    fn drop(&mut self) {
        if !self.keep {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }
}

/// For cloud-init, in JSON, which is YAML. The timer comes first, in the earliest stage and at
/// every boot: it powers the instance off, which ends it, because it was launched so.
fn cloud_config(public_key: &str, time_limit_min: u32) -> String {
    let config = json!({
        "bootcmd": [[
            "systemd-run",
            "--unit=gpu-bringup-self-destruct",
            format!("--on-active={time_limit_min}min"),
            "--timer-property=AccuracySec=1s",
            "systemctl", "poweroff", "--force",
        ]],
        "users": ["default", {
            "name": USER,
            "shell": "/bin/sh",
            "lock_passwd": true,
            "sudo": "ALL=(ALL) NOPASSWD:ALL",
            "ssh_authorized_keys": [public_key],
        }],
    });
    format!("#cloud-config\n{config}\n")
}

/// ssh takes the first value of an option, so the user's configuration comes before ours.
///
/// The session ends in the instance that AWS knows by this id, and AWS has checked both ends of it.
/// So the instance's new host key is taken at first sight, into a file of this run, and must then
/// stay the same.
fn configuration(folder: &Path, cli: &Cli, users: Option<&Path>) -> String {
    let folder = folder.display();
    let include = users
        .map(|users| format!("Include \"{}\"\n", users.display()))
        .unwrap_or_default();
    let region = cli
        .region
        .as_ref()
        .map(|region| format!(" --region {region}"))
        .unwrap_or_default();
    format!(
        "{include}Host i-*\n\
         User {USER}\n\
         IdentityFile \"{folder}/key\"\n\
         IdentitiesOnly yes\n\
         IdentityAgent none\n\
         StrictHostKeyChecking accept-new\n\
         UserKnownHostsFile \"{folder}/known_hosts\"\n\
         GlobalKnownHostsFile /dev/null\n\
         LogLevel ERROR\n\
         ProxyCommand '{}'{region} ssm start-session --target %h --document-name AWS-StartSSHSession --parameters portNumber=%p\n",
        cli.program.display(),
    )
}

#[cfg(test)]
mod tests {
    use super::cloud_config;

    #[test]
    fn the_instance_ends_itself_and_lets_the_key_in() {
        let text = cloud_config("ssh-ed25519 AAAA run", 45);
        let json = text
            .strip_prefix("#cloud-config\n")
            .expect("the first line");
        let config: serde_json::Value = serde_json::from_str(json).expect("JSON");
        let timer: Vec<&str> = config["bootcmd"][0]
            .as_array()
            .expect("a command")
            .iter()
            .filter_map(|word| word.as_str())
            .collect();
        assert!(timer.contains(&"--on-active=45min"), "{timer:?}");
        assert_eq!(
            timer[timer.len() - 3..],
            ["systemctl", "poweroff", "--force"]
        );
        assert_eq!(
            config["users"][1]["ssh_authorized_keys"][0],
            "ssh-ed25519 AAAA run"
        );
    }
}
