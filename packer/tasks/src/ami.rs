//! `cargo xtask ami`: checks the image templates, bakes an image that was validated, and publishes
//! it.

mod build;
mod gpu_reports;
pub mod manifest;
mod publish;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;

use crate::packer::{self, Packer, TEMPLATES};
use xtask::{EXIT_CODE_BAD_INPUT, workspace};

/// What a task answers that did not get through for another reason than a verdict; the validator's
/// code for "not judged".
const EXIT_CODE_TROUBLE: u8 = 2;

const EXAMPLES: &str = "\
Examples:
  cargo xtask ami validate
  cargo xtask ami build eks-gpu-al2023 --var gpu_family=g6 --var region=us-west-2
  cargo xtask ami publish eks-gpu-al2023 --share-with 123456789012";

/// Check, bake and publish the machine images of packer/
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, clap::Subcommand)]
enum Task {
    /// Write the templates in Packer's own style
    Fmt {
        /// Write nothing; fail when a template is not in that style
        #[arg(long)]
        check: bool,
    },
    /// Check the templates without AWS
    Validate {
        #[arg(value_name = "TEMPLATE", value_parser = TEMPLATES)]
        templates: Vec<String>,
        /// A variable of packer/variables.pkr.hcl; may be given several times
        #[arg(long = "var", value_name = "NAME=VALUE")]
        variables: Vec<String>,
    },
    Build(build::Arguments),
    Publish(publish::Arguments),
}

pub fn run(arguments: &Arguments) -> ExitCode {
    let outcome = match &arguments.task {
        Task::Fmt { check } => fmt(*check).map(|()| 0),
        Task::Validate {
            templates,
            variables,
        } => validate(templates, variables).map(|()| 0),
        Task::Build(arguments) => build::build(arguments),
        Task::Publish(arguments) => publish::publish(arguments).map(|()| 0),
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("error: {error:#}");
            let bad_input = error.is::<BadInput>();
            ExitCode::from(if bad_input {
                EXIT_CODE_BAD_INPUT
            } else {
                EXIT_CODE_TROUBLE
            })
        }
    }
}

/// The user's own mistake, as opposed to trouble on the way.
#[derive(Debug)]
struct BadInput(String);

impl std::fmt::Display for BadInput {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for BadInput {}

pub fn fmt(check: bool) -> anyhow::Result<()> {
    let packer = Packer::install()?;
    if check {
        return packer
            .run(&["fmt", "-check", "-diff", packer::FOLDER])
            .context("`cargo xtask ami fmt` writes them right");
    }
    packer.run(&["fmt", packer::FOLDER])
}

/// All templates when none is named.
pub fn validate(templates: &[String], variables: &[String]) -> anyhow::Result<()> {
    let packer = Packer::install()?;
    // Packer wants the files that it would upload to be there; their contents are not read.
    let folder = workspace::target().join("ami/placeholders");
    std::fs::create_dir_all(&folder)?;
    for name in ["gpu-validator", "gpu-validator.1"] {
        std::fs::write(folder.join(name), "")?;
    }
    let validator_folder = format!("validator_folder={}", folder.display());
    let all = TEMPLATES.map(str::to_owned);
    let templates = if templates.is_empty() {
        &all[..]
    } else {
        templates
    };
    for template in templates {
        let only = packer::only(template);
        let mut arguments = vec!["validate", &only, "-var", &validator_folder];
        for variable in variables {
            arguments.extend(["-var", variable]);
        }
        arguments.push(packer::FOLDER);
        packer.run(&arguments).with_context(|| template.clone())?;
    }
    Ok(())
}

/// Where the builds of a template leave their reports and manifests, one folder a build.
fn builds(template: &str) -> PathBuf {
    workspace::target().join("ami").join(template)
}
