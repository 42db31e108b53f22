//! `cargo xtask ami publish`: lets other accounts start an image that passed, and publishes its id
//! for deployments.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::manifest::{self, Image};
use super::{BadInput, builds, gpu_reports};
use crate::packer::TEMPLATES;
use xtask::tools;

/// Publish an image that was baked and passed; needs AWS
///
/// Only an image whose reports are as its ami.json names them is published, and only one that was
/// judged on a GPU: on its build instance, or on an instance of the image (`--gpu-reports`). Uses
/// the AWS CLI and its credentials.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[arg(value_parser = TEMPLATES)]
    template: String,
    /// The ami.json of the build [default: the newest of this template]
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,
    /// Let this AWS account start the image; may be given several times
    #[arg(long, value_name = "ACCOUNT")]
    share_with: Vec<String>,
    /// Reports of runs on instances of the image, such as the folder that `validate-ami --ami`
    /// wrote; may be given several times
    #[arg(long, value_name = "PATH")]
    gpu_reports: Vec<PathBuf>,
    /// The SSM parameter that gets the image's id [default: /gpu-bringup/ami/TEMPLATE/GPU-FAMILY]
    #[arg(long, value_name = "NAME")]
    parameter: Option<String>,
}

pub(super) fn publish(arguments: &Arguments) -> anyhow::Result<()> {
    for account in &arguments.share_with {
        let is_account = account.len() == 12 && account.bytes().all(|it| it.is_ascii_digit());
        ensure!(
            is_account,
            BadInput(format!(
                "--share-with {account}: an AWS account has 12 digits"
            ))
        );
    }
    let path = match &arguments.manifest {
        Some(path) => path.clone(),
        None => manifest::newest(&builds(&arguments.template))?,
    };
    let image = manifest::read(&path)?;
    let aws = Aws {
        program: tools::aws_cli()?,
        region: image.region.clone(),
    };
    let described = describe(&aws, &image)?;
    let tags = &described["Tags"];
    ensure!(
        tag(tags, "gpu-bringup.dev/verdict") == Some("pass"),
        "{} does not carry the tag gpu-bringup.dev/verdict=pass, so it was not baked by this project",
        image.id
    );
    let levels = tag(tags, "gpu-bringup.dev/validated-levels").unwrap_or_default();
    gpu_reports::ensure_judged(
        &image.id,
        levels,
        &gpu_reports::read(&arguments.gpu_reports)?,
    )?;
    for account in &arguments.share_with {
        share(&aws, &image, &described, account)?;
        println!("{}: account {account} may start it", image.id);
    }
    let parameter = if let Some(name) = &arguments.parameter {
        name.clone()
    } else {
        let family = tag(tags, "gpu-bringup.dev/gpu-family")
            .context("the image's tags name no GPU family; name --parameter")?;
        format!("/gpu-bringup/ami/{}/{family}", arguments.template)
    };
    // The data type makes SSM itself refuse an id that is no image of the account.
    aws.call(&[
        "ssm",
        "put-parameter",
        "--name",
        &parameter,
        "--value",
        &image.id,
        "--type",
        "String",
        "--data-type",
        "aws:ec2:image",
        "--overwrite",
    ])?;
    println!("{}: {parameter} in {}", image.id, image.region);
    Ok(())
}

fn describe(aws: &Aws, image: &Image) -> anyhow::Result<Value> {
    let answer = aws.call(&["ec2", "describe-images", "--image-ids", &image.id])?;
    let described = answer["Images"][0].clone();
    let state = described["State"].as_str().unwrap_or("unknown");
    ensure!(
        state == "available",
        "{} is {state}, it must be available",
        image.id
    );
    Ok(described)
}

/// Another account needs the image and the snapshots that it is made of.
fn share(aws: &Aws, image: &Image, described: &Value, account: &str) -> anyhow::Result<()> {
    let permission = format!("Add=[{{UserId={account}}}]");
    aws.call(&[
        "ec2",
        "modify-image-attribute",
        "--image-id",
        &image.id,
        "--launch-permission",
        &permission,
    ])?;
    let mappings = described["BlockDeviceMappings"].as_array();
    let snapshots = mappings
        .into_iter()
        .flatten()
        .filter_map(|it| it["Ebs"]["SnapshotId"].as_str());
    for snapshot in snapshots {
        aws.call(&[
            "ec2",
            "modify-snapshot-attribute",
            "--snapshot-id",
            snapshot,
            "--attribute",
            "createVolumePermission",
            "--operation-type",
            "add",
            "--user-ids",
            account,
        ])?;
    }
    Ok(())
}

fn tag<'a>(tags: &'a Value, key: &str) -> Option<&'a str> {
    tags.as_array()?.iter().find(|tag| tag["Key"] == key)?["Value"].as_str()
}

/// The AWS CLI, which finds credentials by its own chain.
struct Aws {
    program: PathBuf,
    region: String,
}

impl Aws {
    fn call(&self, arguments: &[&str]) -> anyhow::Result<Value> {
        let output = Command::new(&self.program)
            .args(["--region", &self.region, "--output", "json"])
            .args(arguments)
            .output()
            .with_context(|| format!("{} could not be started", self.program.display()))?;
        let words = arguments[..2].join(" ");
        ensure!(
            output.status.success(),
            "aws {words}: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        if output.stdout.iter().all(u8::is_ascii_whitespace) {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&output.stdout)
            .with_context(|| format!("aws {words} did not answer with JSON"))
    }
}
