//! `cargo xtask validate-ami`: runs the binary that ships on a machine and brings its reports back.

mod aws;
mod local;
mod target;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, bail, ensure};

use harness::simulate;
use xtask::{EXIT_CODE_BAD_INPUT, dist, say, tools, workspace};

use target::Target;
use validator_remote::command::{self, Ending};
use validator_remote::interrupts::Interrupts;
use validator_remote::{reports, session};

const EXAMPLES: &str = "\
Examples:
  cargo xtask validate-ami
  cargo xtask validate-ami --target ssh://ubuntu@gpu-17 --sudo --profile manifests/profiles/p5.yaml
  cargo xtask validate-ami --simulate p5.48xlarge --fault xid-79
  cargo xtask validate-ami --ami ami-0123456789abcdef0 --instance-type g6.xlarge --profile manifests/profiles/g6.yaml
  cargo xtask validate-ami --sweep";

/// Judge a machine with the release binary: build it, run it there, bring the reports back
///
/// Ends with the validator's exit code: 0 everything judged and nothing failed; 1 something failed;
/// 2 something could not be judged, or this task itself did not get through; 3 bad arguments or
/// profile; 4 the only thing not judged is load on GPUs that others are using.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "independent switches of a command line"
)]
pub(crate) struct Arguments {
    /// The machine: local, or ssh://user@host:port (user and port may be left to the ssh
    /// configuration)
    #[arg(long, default_value = "local", value_name = "TARGET")]
    target: Target,
    /// What the machine must be, a file of this machine (manifests/profiles has one per AWS
    /// instance family)
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// How thoroughly the machine is judged
    #[arg(long, value_parser = ["quick", "standard", "extended"], value_name = "quick|standard|extended")]
    level: Option<String>,
    /// Folder for the reports [default: one named by the time, in UTC, below target/validation]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Run the validator as root through `sudo -n`, which must not request a password
    #[arg(long)]
    sudo: bool,
    /// Judge a simulated node on this machine instead (`cargo xtask simulate list` names them);
    /// marked SIMULATED
    #[arg(long, value_name = "NODE")]
    simulate: Option<String>,
    /// A fault of the simulated node, by name or from a file; may be given several times
    #[arg(long, value_name = "NAME-OR-FILE", requires = "simulate")]
    fault: Vec<String>,
    /// A change to the simulated node (gpu.memory=2GiB); may be given several times
    #[arg(long, value_name = "KEY=VALUE", requires = "simulate")]
    set: Vec<String>,
    /// Configuration file for ssh, as in `ssh -F`
    #[arg(long, value_name = "FILE")]
    ssh_config: Option<PathBuf>,
    /// Run this gpu-validator instead of building one: what `cargo xtask dist` made on another
    /// machine
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    #[command(flatten)]
    aws: aws::Options,
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

/// The exit code of a run that did not get through; the validator uses the same code for what it
/// could not judge.
const EXIT_CODE_NOT_JUDGED: u8 = 2;

pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    match validate(arguments) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            say!("error: {error:#}");
            let bad_input = error.downcast_ref::<BadInput>().is_some();
            ExitCode::from(if bad_input {
                EXIT_CODE_BAD_INPUT
            } else {
                EXIT_CODE_NOT_JUDGED
            })
        }
    }
}

fn validate(arguments: &Arguments) -> anyhow::Result<u8> {
    check(arguments)?;
    if arguments.aws.sweep {
        return aws::sweep(&arguments.aws);
    }
    if let Some(ami) = &arguments.aws.ami {
        return aws::validate(arguments, ami);
    }
    let simulator = arguments
        .simulate
        .as_ref()
        .map(|_| simulate::Simulator::build())
        .transpose()?;
    // Made once to find a wrong name before minutes of building, and again below, because a node's
    // time starts then.
    drop(prepare_node(simulator.as_ref(), arguments)?);
    let binary = binary(arguments)?;
    let reports = reports_folder(arguments)?;
    let node = prepare_node(simulator.as_ref(), arguments)?;
    if let Some(node) = &node {
        say!(
            "SIMULATED node {}: the verdict is not about this machine",
            node.scenario
        );
    }
    let interrupts = Interrupts::catch().context("signals cannot be caught")?;
    let run = command::Run {
        binary: &binary,
        level: arguments.level.as_deref(),
        profile: arguments.profile.as_deref(),
        more: &[],
        sudo: arguments.sudo,
        reports: &reports,
        label: None,
        interrupts: &interrupts,
    };
    let ending = match &arguments.target {
        Target::Local => local::run(&run, node.as_ref()),
        Target::Ssh(destination) => {
            session::run(&run, destination, arguments.ssh_config.as_deref())
        }
    };
    conclude(ending, &reports, arguments, &arguments.target.to_string())
}

fn prepare_node(
    simulator: Option<&simulate::Simulator>,
    arguments: &Arguments,
) -> anyhow::Result<Option<simulate::PreparedNode>> {
    let (Some(simulator), Some(node)) = (simulator, &arguments.simulate) else {
        return Ok(None);
    };
    match simulator.prepare(node, &arguments.fault, &arguments.set) {
        Ok(node) => Ok(Some(node)),
        Err(error) => bail!(BadInput(format!("{error:#}"))),
    }
}

/// What clap cannot see: contradictions, and files that are not there.
fn check(arguments: &Arguments) -> anyhow::Result<()> {
    let remote = matches!(arguments.target, Target::Ssh(_));
    if remote && arguments.simulate.is_some() {
        bail!(BadInput(
            "--simulate works on this machine only; leave --target out".to_owned()
        ));
    }
    if !remote && arguments.aws.ami.is_none() && arguments.ssh_config.is_some() {
        bail!(BadInput(
            "--ssh-config is for --target ssh://… and --ami only".to_owned()
        ));
    }
    let files = [
        ("--profile", &arguments.profile),
        ("--ssh-config", &arguments.ssh_config),
        ("--binary", &arguments.binary),
    ];
    for (option, file) in files {
        if let Some(file) = file
            && let Err(error) = std::fs::File::open(file)
        {
            bail!(BadInput(format!(
                "{option} {} cannot be read: {error}",
                file.display()
            )));
        }
    }
    Ok(())
}

fn binary(arguments: &Arguments) -> anyhow::Result<PathBuf> {
    if let Some(binary) = &arguments.binary {
        return std::path::absolute(binary).context("--binary has no absolute path");
    }
    let Some(reason) = tools::python_is_missing() else {
        return dist::build();
    };
    ensure!(
        arguments.aws.ami.is_none() && matches!(arguments.target, Target::Local),
        "the portable binary for another machine needs Python to build: {reason}"
    );
    say!(
        "note: no portable binary without Python ({reason}); running this machine's native release build instead"
    );
    dist::build_native()
}

/// The folder that the user named, or a new one named after the time.
fn reports_folder(arguments: &Arguments) -> anyhow::Result<reports::Folder> {
    if let Some(out) = &arguments.out {
        return reports::Folder::create(out);
    }
    let shell = workspace::shell()?;
    let time = xshell::cmd!(shell, "date --utc +%Y-%m-%dT%H-%M-%SZ")
        .quiet()
        .read()?;
    reports::Folder::create_in(&workspace::target().join("validation"), &time)
}

/// Reports where the reports are, and verifies that they agree with the exit code.
fn conclude(
    ending: anyhow::Result<Ending>,
    reports: &reports::Folder,
    arguments: &Arguments,
    machine: &str,
) -> anyhow::Result<u8> {
    let written = reports.written();
    if written.is_empty() {
        reports.remove_if_empty();
    } else {
        say!(
            "reports: {} ({})",
            reports.path().display(),
            written.join(", ")
        );
    }
    let code = ending?.exit_code()?;
    reports.back_up(code, arguments.simulate.is_some())?;
    if code == EXIT_CODE_NOT_JUDGED && arguments.simulate.is_none() && reports.found_no_gpu() {
        say!(
            "hint: no GPU was found on {machine}, so nothing was judged there; to try gpu-validator without one: cargo xtask validate-ami --simulate p5.48xlarge (`cargo xtask simulate list` names all nodes)"
        );
    }
    Ok(code)
}
