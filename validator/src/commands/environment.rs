//! `gpu-validator environment`: CUDA toolkits, libraries and Python environments, judged and
//! started.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;

use super::run::{probe_options, refuse_missing_sysroot, stop_on_signals};
use super::terminal::to_stdout;
use crate::probe::environment as discovery;
use crate::session;
use validator_core::environment::compatibility::{Compatibility, Machine};
use validator_core::environment::{explain, installed, tree};
use validator_core::facts::{EnvironmentFacts, Facts};
use validator_core::findings::{ExitStatus, Finding, Run, Subject, Verdict};
use validator_core::level::Level;
use validator_core::profile::{Profile, PythonRequirement};
use validator_core::report::one_line;

/// CUDA toolkits, libraries and Python environments: find, judge and start them
///
/// Prints what is installed as a tree, each part judged against the driver and the GPUs, and starts
/// the Python environments that have a GPU framework. Exits with 1 when something that is named or
/// selected cannot work.
#[derive(Debug, clap::Args)]
#[command(after_long_help = crate::commands::EXIT_CODES)]
pub(crate) struct Arguments {
    /// Also judge and start this environment (its folder or its interpreter); may be repeated
    #[arg(long, value_name = "PATH")]
    python: Vec<PathBuf>,
    /// Start no interpreter: judge by the files alone
    #[arg(long)]
    no_start: bool,
    /// Seconds that one framework of one environment may take
    #[arg(long, value_name = "SECONDS", default_value_t = 180, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    time_limit: u64,
    /// Resident memory in MiB that one framework of one environment may take
    #[arg(long, value_name = "MIB", default_value_t = 24_576, value_parser = clap::value_parser!(u64).range(1..))]
    memory_limit: u64,
    /// Rows and columns of the products, for tests on simulated GPUs
    #[arg(long, value_name = "NUMBER", default_value_t = 1024, hide = true, value_parser = clap::value_parser!(u32).range(8..=4096))]
    size: u32,
    /// Answer a question without reading this machine: "torch 2.11 cu126 on B200 driver 570"
    #[arg(long, value_name = "QUESTION", conflicts_with_all = ["python", "no_start", "image", "sysroot", "profile"])]
    explain: Option<String>,
    /// Judge a container image on the disk against this machine's driver and GPUs: the folder of
    /// its root file system, or an OCI archive
    #[arg(long, value_name = "DIR|FILE", conflicts_with_all = ["python", "sysroot"])]
    image: Option<PathBuf>,
    /// Judge the files against these GPUs and this driver instead of this machine's, and start
    /// nothing: "B200 driver 570.124.06"
    #[arg(long, value_name = "MACHINE", conflicts_with = "explain")]
    on: Option<String>,
    /// The profile names environments that must be there
    #[arg(long, value_name = "FILE", env = "GPU_VALIDATOR_PROFILE")]
    profile: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Read the host's files below this folder
    #[arg(long, value_name = "DIR")]
    sysroot: Option<PathBuf>,
}

/// The checks of this command.
const CHECKS: [&str; 8] = [
    "toolkit_on_path",
    "library_resolution",
    "python_environment",
    "torch_cuda",
    "torch_gemm",
    "jax_cuda",
    "tensorflow_cuda",
    "cupy_cuda",
];

pub(crate) fn environment(arguments: &Arguments) -> anyhow::Result<ExitStatus> {
    if let Some(question) = &arguments.explain {
        return explain(question, arguments.json);
    }
    let profile = match arguments.profile.as_deref() {
        Some(path) => crate::profile_file::load(path)?,
        None => Profile::default(),
    };
    if let Some(text) = &arguments.on {
        explain::parse_machine(text).map_err(anyhow::Error::msg)?;
    }
    refuse_missing_sysroot(arguments.sysroot.as_deref())?;
    let profile = with_named(profile, &arguments.python)?;
    let facts = collect(arguments, &profile)?;
    let machine = installed::machine(&facts);
    let run = Run::judged(facts, &profile, "environment", Level::Standard);
    let findings: Vec<&Finding> = run
        .findings
        .iter()
        .filter(|it| CHECKS.contains(&it.check.as_str()))
        .collect();
    let Some(found) = &run.facts.environment else {
        anyhow::bail!("the environments of this machine could not be read");
    };
    let packages = judged_packages(found, &machine);
    let status = status_of(&findings);
    let text = if arguments.json {
        json(&run.facts, found, &packages, &findings)?
    } else {
        human(&run.facts, found, &machine, &findings)
    };
    to_stdout(&text);
    Ok(status)
}

fn explain(question: &str, json: bool) -> anyhow::Result<ExitStatus> {
    use validator_core::environment::compatibility::Start;
    let question = explain::parse(question).map_err(anyhow::Error::msg)?;
    let answer = explain::answer(&question);
    let text = if json {
        format!("{}\n", serde_json::to_string_pretty(&answer)?)
    } else {
        answer.text()
    };
    to_stdout(&text);
    Ok(match answer.compatibility.start {
        Start::Full | Start::Limited => ExitStatus::Passed,
        Start::Unknown => ExitStatus::NotJudged,
        Start::Impossible => ExitStatus::Failed,
    })
}

/// `--python` demands that the environment is there, as a profile does.
fn with_named(mut profile: Profile, named: &[PathBuf]) -> anyhow::Result<Profile> {
    for path in named {
        let path =
            std::path::absolute(path).with_context(|| format!("--python {}", path.display()))?;
        let path = path.to_str().context("--python is not UTF-8")?;
        let path = path.trim_end_matches('/').to_owned();
        if !profile.python.iter().any(|it| it.path == path) {
            profile.python.push(PythonRequirement::at(path));
        }
    }
    Ok(profile)
}

/// The machine as level quick reads it, and its environments.
fn collect(arguments: &Arguments, profile: &Profile) -> anyhow::Result<Facts> {
    let interrupt = stop_on_signals()?;
    let options = probe_options(Level::Quick, arguments.sysroot.clone(), profile);
    let named: Vec<String> = profile.python.iter().map(|it| it.path.clone()).collect();
    // Before the machine is read: a file that is no image is bad input.
    let of_image = match &arguments.image {
        Some(path) => Some(discovery::image::discover(path, named.clone())?),
        None => None,
    };
    let mut facts = session::collect(&options.into(), &interrupt, &mut |_| {});
    facts.level = Level::Standard;
    if let Some(mut image) = of_image {
        discovery::image::hide_machine(&mut facts, &image);
        image.by_files = true;
        image.on.clone_from(&arguments.on);
        facts.environment = Some(image);
        return Ok(facts);
    }
    let is_this_machine = arguments.sysroot.is_none();
    let request = discovery::Request::of_this_process(is_this_machine, named);
    let mut found = discovery::discover(arguments.sysroot.clone(), request);
    // What starts here proves nothing about another machine.
    found.by_files = arguments.on.is_some();
    found.on.clone_from(&arguments.on);
    if arguments.no_start || found.by_files {
        let option = if found.by_files { "--on" } else { "--no-start" };
        for environment in &mut found.pythons {
            environment.not_started = Some(format!("{option} was given"));
        }
    } else {
        let limits = discovery::ProofLimits {
            time: Duration::from_secs(arguments.time_limit),
            resident_mib: arguments.memory_limit,
            size: arguments.size,
            ..discovery::ProofLimits::default()
        };
        discovery::prove(&mut found, is_this_machine, &limits, &interrupt);
    }
    facts.environment = Some(found);
    facts.interrupted = interrupt.reason();
    Ok(facts)
}

/// A package with its judgement, as the JSON output has it.
#[derive(Debug, Serialize)]
struct JudgedPackage<'f> {
    environment: &'f str,
    package: &'f str,
    version: &'f str,
    compatibility: Compatibility,
}

fn judged_packages<'f>(found: &'f EnvironmentFacts, machine: &Machine) -> Vec<JudgedPackage<'f>> {
    let mut judged = Vec::new();
    for environment in &found.pythons {
        for package in &environment.packages {
            if let Some(compatibility) = installed::judge_package(package, environment, machine) {
                judged.push(JudgedPackage {
                    environment: &environment.prefix,
                    package: &package.name,
                    version: &package.version,
                    compatibility,
                });
            }
        }
    }
    judged
}

/// A machine without GPUs is no fault of its environments: what was judged decides.
fn status_of(findings: &[&Finding]) -> ExitStatus {
    let has = |verdict: Verdict| findings.iter().any(|it| it.verdict == verdict);
    if has(Verdict::Fail) {
        ExitStatus::Failed
    } else if has(Verdict::Error) {
        ExitStatus::NotJudged
    } else {
        ExitStatus::Passed
    }
}

fn human(
    facts: &Facts,
    found: &EnvironmentFacts,
    machine: &Machine,
    findings: &[&Finding],
) -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    if let Some(scenario) = &facts.simulated {
        let _ = writeln!(text, "SIMULATED: {scenario}");
    }
    text.push_str(&tree::tree(found, machine));
    for finding in findings.iter().filter(|it| it.verdict != Verdict::Skip) {
        let verdict = finding.verdict.to_string().to_uppercase();
        let subject = match &finding.subject {
            Subject::Environment(environment) => format!(" {}", environment.path),
            Subject::Host | Subject::Gpu(_) => String::new(),
        };
        let line = format!(
            "{verdict:5} {}{subject}: {}",
            finding.check, finding.summary
        );
        let _ = writeln!(text, "{}", one_line(&line));
        if let Some(remedy) = &finding.remedy {
            let _ = writeln!(text, "      remedy: {}", one_line(remedy));
        }
    }
    text
}

fn json(
    facts: &Facts,
    found: &EnvironmentFacts,
    packages: &[JudgedPackage<'_>],
    findings: &[&Finding],
) -> anyhow::Result<String> {
    let value = serde_json::json!({
        "simulated": facts.simulated,
        "on": found.on,
        "environment": found,
        "packages": packages,
        "findings": findings,
    });
    Ok(format!("{}\n", serde_json::to_string_pretty(&value)?))
}
