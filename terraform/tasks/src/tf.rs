//! `cargo xtask tf`: Terraform on an environment, and what CI checks about all of them.

mod check;

use std::io::{BufRead as _, IsTerminal as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use xtask::{EXIT_CODE_BAD_INPUT, say, workspace};

/// Run Terraform on an environment of terraform/environments, or check all of its files
///
/// It is the user's own terraform, because the state remembers the version that wrote it. Every
/// change goes through a plan file: what was shown is what is done.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Fetch providers and connect to the state
    Init {
        #[arg(value_name = "ENVIRONMENT")]
        environment: String,
    },
    /// Show what would change
    Plan {
        #[arg(value_name = "ENVIRONMENT")]
        environment: String,
    },
    /// Show the plan, request confirmation, and apply it
    Apply {
        #[arg(value_name = "ENVIRONMENT")]
        environment: String,
        /// Proceed without a confirmation
        #[arg(long)]
        yes: bool,
    },
    /// Show what is removed, request confirmation, and remove it
    Destroy {
        #[arg(value_name = "ENVIRONMENT")]
        environment: String,
        /// Proceed without a confirmation
        #[arg(long)]
        yes: bool,
    },
    /// Check format, validity, tests and policies of all files; needs no AWS and no Terraform
    Check,
}

pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    match act(&arguments.action) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say!("error: {error:#}");
            let bad_input = error.downcast_ref::<BadInput>().is_some();
            ExitCode::from(if bad_input { EXIT_CODE_BAD_INPUT } else { 1 })
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

fn act(action: &Action) -> anyhow::Result<()> {
    match action {
        Action::Init { environment } => Environment::find(environment)?.init(),
        Action::Plan { environment } => {
            let environment = Environment::find(environment)?;
            if environment.plan(&[])? {
                say!("to do this: cargo xtask tf apply {}", environment.name);
            }
            environment.forget_plan()
        }
        Action::Apply { environment, yes } => {
            Environment::find(environment)?.change(&[], *yes, "make these changes to")
        }
        Action::Destroy { environment, yes } => {
            Environment::find(environment)?.change(&["-destroy"], *yes, "remove all of")
        }
        Action::Check => check::run(),
    }
}

fn environments() -> PathBuf {
    workspace::root().join("terraform/environments")
}

/// A folder of terraform/environments, and the terraform that works in it.
#[derive(Debug)]
struct Environment {
    name: String,
    folder: PathBuf,
    plan_file: PathBuf,
}

impl Environment {
    fn find(name: &str) -> anyhow::Result<Environment> {
        let mut names: Vec<String> = std::fs::read_dir(environments())?
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        if !names.iter().any(|it| it == name) {
            bail!(BadInput(format!(
                "`{name}` is none of the environments in terraform/environments: {}",
                names.join(", ")
            )));
        }
        check_version()?;
        let plans = workspace::target().join("terraform");
        std::fs::create_dir_all(&plans)
            .with_context(|| format!("{} cannot be made", plans.display()))?;
        Ok(Environment {
            name: name.to_owned(),
            folder: environments().join(name),
            // A plan holds values of the state, so each process has its own and removes it.
            plan_file: plans.join(format!("{name}-{}.tfplan", std::process::id())),
        })
    }

    fn terraform(&self) -> Command {
        let mut command = Command::new("terraform");
        command.arg(format!("-chdir={}", self.folder.display()));
        command
    }

    fn init(&self) -> anyhow::Result<()> {
        let mut command = self.terraform();
        command.arg("init");
        // An environment without a backend of its own keeps its state next to its files.
        if self.folder.join("backend.hcl.example").exists() {
            if !self.folder.join("backend.hcl").exists() {
                bail!(BadInput(format!(
                    "terraform/environments/{0}/backend.hcl is missing, which names the bucket of the state; copy backend.hcl.example beside it (docs/terraform.md)",
                    self.name
                )));
            }
            command.arg("-backend-config=backend.hcl");
        }
        succeed(command)
    }

    /// Writes the plan file; whether it would change anything.
    fn plan(&self, options: &[&str]) -> anyhow::Result<bool> {
        let mut command = self.terraform();
        command
            .args(["plan", "-input=false", "-detailed-exitcode"])
            .args(options)
            .arg(format!("-out={}", self.plan_file.display()));
        match started(&mut command)?.code() {
            Some(0) => Ok(false),
            Some(2) => Ok(true),
            _ => {
                let _ = self.forget_plan();
                bail!("terraform made no plan; what it says is above")
            }
        }
    }

    fn change(&self, options: &[&str], yes: bool, what: &str) -> anyhow::Result<()> {
        if !yes && !std::io::stdin().is_terminal() {
            bail!(BadInput(
                "nobody can be asked here; give --yes after reading the output of `cargo xtask tf plan`"
                    .to_owned()
            ));
        }
        let outcome = self.plan(options).and_then(|changes| {
            if !changes {
                say!("nothing to change in {}", self.name);
                return Ok(());
            }
            ensure!(
                yes || confirmed(what, &self.name)?,
                "nothing was changed in {}",
                self.name
            );
            let mut command = self.terraform();
            command.args(["apply", "-input=false"]).arg(&self.plan_file);
            succeed(command)
        });
        self.forget_plan()?;
        outcome
    }

    fn forget_plan(&self) -> anyhow::Result<()> {
        match std::fs::remove_file(&self.plan_file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error)
                .with_context(|| format!("{} could not be removed", self.plan_file.display())),
            _ => Ok(()),
        }
    }
}

/// Only the environment's name confirms: a `y` is typed before it is read.
fn confirmed(what: &str, name: &str) -> anyhow::Result<bool> {
    say!("\nto {what} {name}, type its name:");
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    Ok(line.trim() == name)
}

fn started(command: &mut Command) -> anyhow::Result<std::process::ExitStatus> {
    command.status().context(
        "terraform could not be started; install version 1.10 or newer: https://developer.hashicorp.com/terraform/install",
    )
}

fn succeed(mut command: Command) -> anyhow::Result<()> {
    let status = started(&mut command)?;
    ensure!(status.success(), "terraform failed; what it says is above");
    Ok(())
}

/// Terraform 1.10 brought locks next to the state (`use_lockfile`), which the environments use.
const OLDEST_VERSION: (u64, u64) = (1, 10);

fn check_version() -> anyhow::Result<()> {
    let output = Command::new("terraform")
        .args(["version", "-json"])
        .output()
        .context("terraform could not be started; install version 1.10 or newer: https://developer.hashicorp.com/terraform/install")?;
    let answer: Value =
        serde_json::from_slice(&output.stdout).context("terraform says no version")?;
    let text = answer["terraform_version"].as_str().unwrap_or_default();
    let version = version(text).with_context(|| format!("`{text}` is no version of terraform"))?;
    ensure!(
        version >= OLDEST_VERSION,
        "terraform in PATH is {text}; the environments need {}.{} or newer, which locks the state without a table",
        OLDEST_VERSION.0,
        OLDEST_VERSION.1
    );
    Ok(())
}

fn version(text: &str) -> Option<(u64, u64)> {
    let mut parts = text.split(['.', '-']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Every folder of one kind below terraform/.
fn folders(of: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut folders: Vec<PathBuf> = std::fs::read_dir(of)
        .with_context(|| format!("{} cannot be read", of.display()))?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect();
    folders.sort();
    Ok(folders)
}

#[cfg(test)]
mod tests {
    use super::{OLDEST_VERSION, version};

    #[test]
    fn versions_are_compared_by_number() {
        assert!(version("1.13.3").expect("a version") > OLDEST_VERSION);
        assert!(version("1.9.8").expect("a version") < OLDEST_VERSION);
        assert_eq!(version("1.10.0-rc1"), Some((1, 10)));
        assert_eq!(version(""), None);
    }
}
