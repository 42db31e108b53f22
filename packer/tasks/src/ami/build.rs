//! `cargo xtask ami build`: bakes one image. The validator's verdict decides whether there is one.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use xshell::cmd;

use super::{BadInput, EXIT_CODE_TROUBLE, builds, manifest};
use crate::packer::{self, Packer, TEMPLATES};
use validator_remote::interrupts::Interrupts;
use xtask::{dist, workspace};

/// Bake an image and validate it; needs AWS
///
/// Reports, Packer's manifest and ami.json are in target/ami/TEMPLATE/TIME, or at --out. Ends with
/// the validator's exit code where that kept the image from being made, and with 2 where something
/// else did. Credentials come from the AWS CLI's own chain.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[arg(value_parser = TEMPLATES)]
    template: String,
    /// A variable of packer/variables.pkr.hcl; may be given several times
    #[arg(long = "var", value_name = "NAME=VALUE")]
    variables: Vec<String>,
    /// Bake what `cargo xtask dist` left in this folder before, instead of building it now
    #[arg(long, value_name = "DIR")]
    validator_folder: Option<PathBuf>,
    /// Folder for reports and manifest [default: one named by the time, in UTC, below
    /// target/ami/TEMPLATE]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub(super) fn build(arguments: &Arguments) -> anyhow::Result<u8> {
    for variable in &arguments.variables {
        check_variable(variable)?;
    }
    let packer = Packer::install()?;
    let folder = match &arguments.validator_folder {
        Some(folder) => folder.clone(),
        None => dist::build()?
            .parent()
            .context("the binary lies in no folder")?
            .to_path_buf(),
    };
    let version = version_of(&folder.join("gpu-validator"))?;
    let out = out_folder(arguments)?;

    let mut command = packer.command();
    command
        .args(["build", "-color=false", "-timestamp-ui"])
        .arg(packer::only(&arguments.template));
    for (name, value) in [
        ("validator_folder", folder.display().to_string()),
        ("validator_version", version.clone()),
        ("report_folder", out.display().to_string()),
    ] {
        command.arg("-var").arg(format!("{name}={value}"));
    }
    for variable in &arguments.variables {
        command.args(["-var", variable]);
    }
    // Ctrl-C reaches Packer by the terminal, and it takes its instance down; this task must live
    // until that is done.
    let interrupts = Interrupts::catch()?;
    let mut child = command.arg(packer::FOLDER).spawn()?;
    let process = i32::try_from(child.id()).ok();
    let status = interrupts.while_waiting(
        move |_| {
            let process = process.and_then(rustix::process::Pid::from_raw);
            if let Some(process) = process {
                let _ = rustix::process::kill_process(process, rustix::process::Signal::TERM);
            }
        },
        || child.wait(),
    )?;

    let reports = out.join(manifest::REPORTS);
    if !status.success() {
        return tell_failure(&out, &reports, status.code());
    }
    let image = manifest::write(&out, &arguments.template, &version)?;
    println!(
        "{} in {} passed; its reports and {} are in {}",
        image.id,
        image.region,
        manifest::NAME,
        out.display()
    );
    Ok(0)
}

/// Reports why there is no image; the exit code of the task.
fn tell_failure(out: &Path, reports: &Path, code: Option<i32>) -> anyhow::Result<u8> {
    if let Some((level, code)) = manifest::failed_level(out)? {
        eprintln!(
            "no image: gpu-validator ended level {level} with exit code {code}; the reports are in {}",
            reports.display()
        );
        return Ok(code);
    }
    let code = code.map_or_else(|| "a signal".to_owned(), |code| format!("exit code {code}"));
    eprintln!("no image: packer ended with {code} before gpu-validator said anything");
    Ok(EXIT_CODE_TROUBLE)
}

/// Variables that this task sets itself, because a manifest or a tag would be wrong otherwise.
fn check_variable(variable: &str) -> Result<(), BadInput> {
    const SET_HERE: [&str; 3] = ["validator_folder", "validator_version", "report_folder"];
    let Some((name, _)) = variable.split_once('=') else {
        return Err(BadInput(format!("--var {variable}: expected NAME=VALUE")));
    };
    if SET_HERE.contains(&name) {
        return Err(BadInput(format!(
            "--var {name}: this task sets it itself, see --validator-folder and --out"
        )));
    }
    Ok(())
}

/// The second word of `gpu-validator --version`.
fn version_of(binary: &Path) -> anyhow::Result<String> {
    let shell = workspace::shell()?;
    let text = cmd!(shell, "{binary} --version")
        .quiet()
        .read()
        .with_context(|| format!("{} is not a gpu-validator that runs here", binary.display()))?;
    let version = text.split_whitespace().nth(1);
    version
        .map(str::to_owned)
        .with_context(|| format!("{} tells no version: {text:?}", binary.display()))
}

fn out_folder(arguments: &Arguments) -> anyhow::Result<PathBuf> {
    let shell = workspace::shell()?;
    let path = if let Some(path) = &arguments.out {
        std::path::absolute(path)?
    } else {
        let time = cmd!(shell, "date --utc +%Y-%m-%dT%H-%M-%SZ")
            .quiet()
            .read()?;
        builds(&arguments.template).join(time)
    };
    // A report of an earlier build must not be taken for this one's.
    let is_empty = std::fs::read_dir(&path).map_or(true, |mut entries| entries.next().is_none());
    ensure!(
        is_empty,
        BadInput(format!("{} is not empty", path.display()))
    );
    std::fs::create_dir_all(&path)
        .with_context(|| format!("{} could not be made", path.display()))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::check_variable;

    #[test]
    fn a_variable_is_a_name_and_a_value_and_none_of_the_tasks_own() {
        assert!(check_variable("gpu_family=p5").is_ok());
        assert!(check_variable("ssh_from_cidrs=[\"10.0.0.0/8\"]").is_ok());
        assert!(check_variable("gpu_family").is_err());
        assert!(check_variable("validator_version=9.9.9").is_err());
    }
}
