//! The pinned Packer with its pinned amazon plugin.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, ensure};

use xtask::tools::go::{PACKER, PACKER_PLUGIN_AMAZON};
use xtask::workspace;

/// The folder of the templates; all are one build with one source each.
pub const FOLDER: &str = "packer";

/// The images, by the names of their sources.
pub const TEMPLATES: [&str; 3] = ["eks-gpu-al2023", "eks-gpu-ubuntu2204", "ubuntu2404-runner"];

const PLUGIN_SOURCE: &str = "github.com/hashicorp/amazon";

#[derive(Debug)]
pub struct Packer {
    program: PathBuf,
    plugins: PathBuf,
}

impl Packer {
    /// Builds what is missing, and lets Packer install the plugin with its checksum, as
    /// `packer init` would.
    pub fn install() -> anyhow::Result<Packer> {
        let packer = Packer {
            program: PACKER.install()?,
            plugins: workspace::tools().join("packer-plugins"),
        };
        let plugin = PACKER_PLUGIN_AMAZON.install()?;
        let stamp = packer.plugins.join("installed-version.txt");
        let wanted = format!("{PACKER:?}, {PACKER_PLUGIN_AMAZON:?}\n");
        if std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
            return Ok(packer);
        }
        let shell = workspace::shell()?;
        shell.remove_path(&packer.plugins)?;
        shell.create_dir(&packer.plugins)?;
        let output = packer
            .command()
            .args(["plugins", "install", "--path"])
            .arg(&plugin)
            .arg(PLUGIN_SOURCE)
            .output()?;
        ensure!(
            output.status.success(),
            "packer does not take its amazon plugin: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        std::fs::write(&stamp, wanted)
            .with_context(|| format!("{} could not be written", stamp.display()))?;
        Ok(packer)
    }

    /// Packer in the root of the checkout, with no plugin but the pinned one, and without network
    /// access by itself.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command
            .current_dir(workspace::root())
            .env("PACKER_PLUGIN_PATH", &self.plugins)
            .env("CHECKPOINT_DISABLE", "1");
        command
    }

    /// Runs it and fails with its exit code.
    pub fn run(&self, arguments: &[&str]) -> anyhow::Result<()> {
        let status = self.command().args(arguments).status()?;
        ensure!(
            status.success(),
            "packer {} failed ({status})",
            arguments.join(" ")
        );
        Ok(())
    }
}

/// `-only` with one template's source.
pub fn only(template: &str) -> String {
    format!("-only=amazon-ebs.{template}")
}
