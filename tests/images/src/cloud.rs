//! AWS on loopback: moto, with the images that the templates start from.

use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use xtask::loopback::free_port;
use xtask::{tools, workspace};

const AMAZON: &str = "602401143452";
const CANONICAL: &str = "099720109477";
const REGION: &str = "us-west-2";
/// moto imports all of AWS before it listens.
const START_DEADLINE: Duration = Duration::from_secs(90);

#[derive(Debug)]
pub(super) struct Cloud {
    server: Child,
    port: u16,
}

impl Cloud {
    pub(super) fn start(folder: &Path) -> anyhow::Result<Cloud> {
        let python = tools::MOTO.install()?.join("python3");
        tools::AWS_CLI.install()?;
        let images = folder.join("source-images.json");
        std::fs::write(&images, source_images().to_string())?;
        let port = free_port()?;
        let log = std::fs::File::create(folder.join("moto.log"))?;
        let server = Command::new(python)
            .arg(workspace::root().join("tests/images/moto_server.py"))
            .args(["-H", "127.0.0.1", "-p", &port.to_string()])
            .env("MOTO_AMIS_PATH", images)
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("moto could not be started")?;
        let mut cloud = Cloud { server, port };
        cloud.wait()?;
        Ok(cloud)
    }

    fn wait(&mut self) -> anyhow::Result<()> {
        let started = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            if let Some(status) = self.server.try_wait()? {
                bail!("moto ended at once ({status}); see moto.log");
            }
            ensure!(
                started.elapsed() < START_DEADLINE,
                "moto does not listen after {} s",
                START_DEADLINE.as_secs()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    pub(super) fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Directs AWS clients to this server, with dummy credentials.
    pub(super) fn apply(&self, command: &mut Command) -> anyhow::Result<()> {
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("AWS_") {
                command.env_remove(name);
            }
        }
        let cli = tools::AWS_CLI.install()?;
        let path = std::env::var("PATH").unwrap_or_default();
        command
            .env("PATH", format!("{}:{path}", cli.display()))
            .env("AWS_ENDPOINT_URL", self.endpoint())
            .env("AWS_ACCESS_KEY_ID", "testing")
            .env("AWS_SECRET_ACCESS_KEY", "testing")
            .env("AWS_DEFAULT_REGION", REGION)
            .env("AWS_REGION", REGION)
            .env("AWS_CONFIG_FILE", "/dev/null")
            .env("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
            .env("AWS_EC2_METADATA_DISABLED", "true")
            // Packer would wait 15 s between two looks.
            .env("AWS_POLL_DELAY_SECONDS", "1");
        Ok(())
    }

    /// The output of the AWS CLI.
    pub(super) fn ask(&self, arguments: &[&str]) -> anyhow::Result<Value> {
        let mut command = Command::new(tools::AWS_CLI.install()?.join("aws"));
        self.apply(&mut command)?;
        let output = command.args(arguments).output()?;
        ensure!(
            output.status.success(),
            "aws {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}

impl Drop for Cloud {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// As Amazon and Canonical name and own theirs; of each an older one, which must not be taken.
fn source_images() -> Value {
    let image = |id: &str, name: &str, owner: &str, created: &str| {
        json!({
            "ami_id": id, "name": name, "description": name, "owner_id": owner, "public": true,
            "virtualization_type": "hvm", "architecture": "x86_64", "state": "available", "platform": null,
            "image_type": "machine", "hypervisor": "xen", "root_device_name": "/dev/xvda", "root_device_type": "ebs",
            "sriov": "simple", "creation_date": created,
        })
    };
    let (old, new) = ("2026-01-01T00:00:00.000Z", "2026-11-01T00:00:00.000Z");
    let eks = "amazon-eks-node-al2023-x86_64-standard-1.33";
    let jammy = "ubuntu-eks/k8s_1.33/images/hvm-ssd/ubuntu-jammy-22.04-amd64-server";
    let noble = "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server";
    json!([
        image(
            "ami-00000000000000a11",
            &format!("{eks}-v20260101"),
            AMAZON,
            old
        ),
        image(
            "ami-00000000000000a12",
            &format!("{eks}-v20261101"),
            AMAZON,
            new
        ),
        image(
            "ami-00000000000000b11",
            &format!("{jammy}-20260101"),
            CANONICAL,
            old
        ),
        image(
            "ami-00000000000000b12",
            &format!("{jammy}-20261101"),
            CANONICAL,
            new
        ),
        image(
            "ami-00000000000000c11",
            &format!("{noble}-20260101"),
            CANONICAL,
            old
        ),
        image(
            "ami-00000000000000c12",
            &format!("{noble}-20261101"),
            CANONICAL,
            new
        ),
    ])
}
