//! `fault-matrix`: runs the validator on every healthy node and on every fault, and compares each
//! verdict with the fault's file: exactly those checks are not green, with those verdicts, on those
//! GPUs. A fault with `sentinel` comes while the sentinel works its node, too. `cargo xtask
//! fault-matrix` runs it with the release binary.

#![allow(clippy::print_stdout, reason = "what it prints is what it is for")]
#![allow(clippy::print_stderr, reason = "errors of a command line")]

mod sentinel;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use serde_json::Value;
use simulator::faults::{ExpectedVerdict, Fault};
use simulator::{Catalogue, Kind, NodeRequest, PreparedNode, prepare_node};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Runs the validator on every node and fault.
#[derive(Debug, Parser)]
struct Arguments {
    /// The `gpu-validator` to run.
    #[arg(long)]
    validator: PathBuf,
    /// `libsimulator.so`.
    #[arg(long)]
    library: PathBuf,
    /// `manifests/profiles`.
    #[arg(long)]
    profiles: PathBuf,
    /// Where the tables are written: `fault-matrix.md` and `fault-matrix.html`.
    #[arg(long)]
    out: PathBuf,
    /// Only cases whose name contains one of these.
    filter: Vec<String>,
}

/// One run of the validator.
#[derive(Debug)]
struct Case {
    /// `xid-79`, or `p5.48xlarge with p5.yaml` for a healthy node.
    name: String,
    node: String,
    fault: Option<(String, Fault)>,
    /// Every check that is not green, and its verdict.
    trips: BTreeMap<String, ExpectedVerdict>,
    profile: Option<PathBuf>,
    mode: Mode,
}

/// The command of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// `run` at a level.
    Run(&'static str),
    Sentinel,
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Self::Run(level) => level,
            Self::Sentinel => "sentinel",
        }
    }
}

/// What a case showed.
#[derive(Debug)]
struct Shown {
    /// Verdicts that are neither pass nor skip, by check.
    tripped: BTreeMap<String, String>,
    /// What differs from the expectation; empty when the case passed.
    differences: Vec<String>,
    seconds: f64,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: &Arguments) -> Result<bool> {
    let catalogue = Catalogue::shipped();
    let mut cases = healthy_cases(&catalogue, &arguments.profiles)?;
    cases.extend(fault_cases(&catalogue)?);
    if !arguments.filter.is_empty() {
        cases.retain(|case| {
            arguments
                .filter
                .iter()
                .any(|part| case.name.contains(part.as_str()))
        });
    }
    ensure!(!cases.is_empty(), "no case has such a name");
    std::fs::create_dir_all(&arguments.out)
        .with_context(|| format!("create {}", arguments.out.display()))?;
    let shown = run_all(&catalogue, arguments, &cases);
    let passed = shown.iter().filter(|it| it.differences.is_empty()).count();
    for (case, shown) in cases.iter().zip(&shown) {
        for difference in &shown.differences {
            println!("{}: {difference}", case.name);
        }
    }
    std::fs::write(
        arguments.out.join("fault-matrix.md"),
        markdown(&cases, &shown),
    )?;
    std::fs::write(
        arguments.out.join("fault-matrix.html"),
        html(&cases, &shown),
    )?;
    let slowest = shown.iter().map(|it| it.seconds).fold(0.0, f64::max);
    println!(
        "tables in {}, the slowest run took {slowest:.2} s",
        arguments.out.display()
    );
    println!("{passed} of {} cases as expected", cases.len());
    Ok(passed == cases.len())
}

/// Every node without a profile, and with the profile of its family where one ships.
fn healthy_cases(catalogue: &Catalogue, profiles: &Path) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for node in catalogue.names(Kind::Node)? {
        let trips = catalogue.node(&node)?.1.trips;
        let case = |name: String, profile| Case {
            name,
            node: node.clone(),
            fault: None,
            trips: trips.clone(),
            profile,
            mode: Mode::Run("standard"),
        };
        cases.push(case(format!("healthy {node}"), None));
        let family = node.split('.').next().unwrap_or_default();
        for file in [
            format!("{node}.yaml"),
            format!("{family}.yaml"),
            "generic.yaml".to_owned(),
        ] {
            let path = profiles.join(&file);
            if path.is_file() {
                cases.push(case(format!("healthy {node} with {file}"), Some(path)));
            }
        }
    }
    Ok(cases)
}

fn fault_cases(catalogue: &Catalogue) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for name in catalogue.names(Kind::Fault)? {
        let (_, fault) = catalogue.fault(&name)?;
        let level = match fault.level {
            simulator::faults::Level::Quick => "quick",
            simulator::faults::Level::Standard => "standard",
            simulator::faults::Level::Extended => "extended",
        };
        let case = |title: String, mode, trips| Case {
            name: title,
            node: fault.node.clone(),
            trips,
            fault: Some((name.clone(), fault.clone())),
            profile: None,
            mode,
        };
        cases.push(case(name.clone(), Mode::Run(level), fault.trips.clone()));
        if fault.sentinel.is_some() {
            cases.push(case(
                format!("sentinel, {name}"),
                Mode::Sentinel,
                BTreeMap::new(),
            ));
        }
    }
    Ok(cases)
}

/// Two at a time: the validator itself uses several processes.
fn run_all(catalogue: &Catalogue, arguments: &Arguments, cases: &[Case]) -> Vec<Shown> {
    let next = AtomicUsize::new(0);
    let results: Mutex<BTreeMap<usize, Shown>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(case) = cases.get(index) else { return };
                    let folder = arguments.out.join(format!("node-{index}"));
                    // A case that cannot be run is one that is not as expected; the others run all
                    // the same.
                    let result =
                        run_case(catalogue, arguments, case, &folder).unwrap_or_else(|error| {
                            Shown {
                                tripped: BTreeMap::new(),
                                differences: vec![format!("{error:#}")],
                                seconds: 0.0,
                            }
                        });
                    // What a passed case leaves is of no use.
                    if result.differences.is_empty() {
                        let _ = std::fs::remove_dir_all(&folder);
                    }
                    results
                        .lock()
                        .unwrap_or_else(std::sync::PoisonError::into_inner)
                        .insert(index, result);
                }
            });
        }
    });
    let results = results
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    results.into_values().collect()
}

fn run_case(
    catalogue: &Catalogue,
    arguments: &Arguments,
    case: &Case,
    folder: &Path,
) -> Result<Shown> {
    match case.mode {
        Mode::Run(level) => run_at_level(catalogue, arguments, case, level, folder),
        Mode::Sentinel => run_sentinel(catalogue, arguments, case, folder),
    }
}

fn run_sentinel(
    catalogue: &Catalogue,
    arguments: &Arguments,
    case: &Case,
    folder: &Path,
) -> Result<Shown> {
    let (name, fault) = case
        .fault
        .as_ref()
        .context("a sentinel's case has a fault")?;
    let expected = fault
        .sentinel
        .as_ref()
        .context("the fault has no `sentinel`")?;
    let node = prepare_node(&NodeRequest {
        folder,
        library: &arguments.library,
        catalogue,
        node: &case.node,
        faults: &[],
        overrides: &[],
    })?;
    let resolved = simulator::resolve::resolve(catalogue, &case.node, &[], &[])?;
    let count = simulator::resolve::scenario_at_start(&resolved)?.gpus.len();
    let ill = fault.selection().indices(count);
    let started = Instant::now();
    let differences = sentinel::differences(
        &arguments.validator,
        catalogue,
        &node,
        name,
        expected,
        (&ill, count),
    )?;
    let tripped = [("sentinel".to_owned(), expected.state.word().to_owned())].into();
    Ok(Shown {
        tripped,
        differences,
        seconds: started.elapsed().as_secs_f64(),
    })
}

fn run_at_level(
    catalogue: &Catalogue,
    arguments: &Arguments,
    case: &Case,
    level: &str,
    folder: &Path,
) -> Result<Shown> {
    let faults: Vec<String> = case.fault.iter().map(|(name, _)| name.clone()).collect();
    let node = prepare_node(&NodeRequest {
        folder,
        library: &arguments.library,
        catalogue,
        node: &case.node,
        faults: &faults,
        overrides: &[],
    })?;
    // A fault that comes later is judged once it is there; faults in the middle of a load are
    // counted in launches.
    if let Some(delay) = case
        .fault
        .as_ref()
        .and_then(|(_, fault)| fault.at.as_deref())
    {
        std::thread::sleep(parse_delay(delay)?);
    }
    let started = Instant::now();
    let report = run_validator(arguments, case, level, &node)?;
    let seconds = started.elapsed().as_secs_f64();
    let mut differences = Vec::new();
    if report["simulated"].as_str() != Some(node.scenario_name.as_str()) {
        differences.push(format!(
            "the report does not say that it is simulated as {}",
            node.scenario_name
        ));
    }
    let tripped = tripped(&report)?;
    differences.extend(verdict_differences(case, &tripped));
    differences.extend(subject_differences(catalogue, case, &report)?);
    Ok(Shown {
        tripped,
        differences,
        seconds,
    })
}

fn parse_delay(text: &str) -> Result<Duration> {
    let seconds = text.strip_suffix("ms").map_or_else(
        || text.strip_suffix('s').and_then(|it| it.parse::<f64>().ok()),
        |it| it.parse::<f64>().ok().map(|it| it / 1000.0),
    );
    Ok(Duration::from_secs_f64(seconds.with_context(|| {
        format!("`{text}` is not a time such as 3s")
    })?))
}

fn run_validator(
    arguments: &Arguments,
    case: &Case,
    level: &str,
    node: &PreparedNode,
) -> Result<Value> {
    let json = node.folder.join("report.json");
    let mut command = Command::new(&arguments.validator);
    // No simulated driver is slow, so that one which does not answer need not be waited for as long
    // as a real one.
    command
        .args([
            "run",
            "--simulated-ok",
            "--deadline-scale",
            "0.2",
            "--level",
            level,
            "--sysroot",
        ])
        .arg(&node.sysroot)
        .arg("--json")
        .arg(&json)
        .arg("--facts")
        .arg(node.folder.join("facts.json"))
        .envs(&node.environment)
        .stdin(Stdio::null());
    if let Some(profile) = &case.profile {
        command.arg("--profile").arg(profile);
    }
    let output = command
        .output()
        .with_context(|| format!("run {}", arguments.validator.display()))?;
    let code = output.status.code();
    let said = || String::from_utf8_lossy(&output.stderr).into_owned();
    let text = std::fs::read(&json)
        .with_context(|| format!("no report, exit code {code:?}: {}", said()))?;
    let report: Value = serde_json::from_slice(&text).context("parse the report")?;
    ensure!(
        report["exit_code"].as_i64() == code.map(i64::from),
        "the exit code is {code:?}, the report says {}: {}",
        report["exit_code"],
        said()
    );
    Ok(report)
}

fn findings(report: &Value) -> Result<&Vec<Value>> {
    report["findings"]
        .as_array()
        .context("the report has no findings")
}

fn is_green(finding: &Value) -> bool {
    matches!(finding["verdict"].as_str(), Some("pass" | "skip"))
}

/// The verdicts of each check that is not green; several of one check are listed together.
fn tripped(report: &Value) -> Result<BTreeMap<String, String>> {
    let mut tripped: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for finding in findings(report)?.iter().filter(|it| !is_green(it)) {
        let (Some(check), Some(verdict)) = (finding["check"].as_str(), finding["verdict"].as_str())
        else {
            bail!("a finding has no check or verdict: {finding}");
        };
        let verdicts = tripped.entry(check.to_owned()).or_default();
        if !verdicts.iter().any(|it| it == verdict) {
            verdicts.push(verdict.to_owned());
        }
    }
    Ok(tripped
        .into_iter()
        .map(|(check, verdicts)| (check, verdicts.join("+")))
        .collect())
}

fn verdict_differences(case: &Case, tripped: &BTreeMap<String, String>) -> Vec<String> {
    let expected: BTreeMap<String, String> = case
        .trips
        .iter()
        .map(|(check, verdict)| (check.clone(), word(*verdict).to_owned()))
        .collect();
    let mut differences = Vec::new();
    for (check, verdict) in tripped {
        match expected.get(check) {
            Some(wanted) if wanted == verdict => {}
            Some(wanted) => differences.push(format!("{check} is {verdict}, expected {wanted}")),
            None => differences.push(format!("{check} is {verdict}, expected green")),
        }
    }
    for (check, wanted) in &expected {
        if !tripped.contains_key(check) {
            differences.push(format!("{check} is green, expected {wanted}"));
        }
    }
    differences
}

fn word(verdict: ExpectedVerdict) -> &'static str {
    match verdict {
        ExpectedVerdict::Fail => "fail",
        ExpectedVerdict::Error => "error",
        ExpectedVerdict::Warn => "warn",
    }
}

/// Healthy GPUs of a node with an ill one must stay green.
fn subject_differences(catalogue: &Catalogue, case: &Case, report: &Value) -> Result<Vec<String>> {
    let Some((_, fault)) = &case.fault else {
        return Ok(Vec::new());
    };
    let resolved = simulator::resolve::resolve(catalogue, &case.node, &[], &[])?;
    let healthy = simulator::resolve::scenario_at_start(&resolved)?;
    let ill: Vec<&str> = fault
        .selection()
        .indices(healthy.gpus.len())
        .iter()
        .filter_map(|index| healthy.gpus.get(*index as usize))
        .map(|gpu| gpu.pci_address.as_str())
        .collect();
    let blamed = findings(report)?
        .iter()
        .filter(|it| !is_green(it))
        .filter_map(|it| Some((it, it["subject"]["gpu"]["pci_address"].as_str()?)))
        .filter(|(_, address)| !ill.contains(address));
    Ok(blamed
        .map(|(it, address)| format!("{} blames the healthy GPU {address}", it["check"]))
        .collect())
}

/// The checks that any case tripped: the columns.
fn columns(shown: &[Shown]) -> Vec<&str> {
    let mut columns: Vec<&str> = shown
        .iter()
        .flat_map(|it| it.tripped.keys())
        .map(String::as_str)
        .collect();
    columns.sort_unstable();
    columns.dedup();
    columns
}

fn markdown(cases: &[Case], shown: &[Shown]) -> String {
    let mut text = String::from(
        "# Faults and the checks that see them\n\n| case | node | level or command | not green | as expected |\n|---|---|---|---|---|\n",
    );
    for (case, shown) in cases.iter().zip(shown) {
        let tripped: Vec<String> = shown
            .tripped
            .iter()
            .map(|(check, verdict)| format!("{check}: {verdict}"))
            .collect();
        let expected = if shown.differences.is_empty() {
            "yes".to_owned()
        } else {
            shown.differences.join("; ")
        };
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {expected} |",
            case.name,
            case.node,
            case.mode.name(),
            tripped.join(", ")
        );
    }
    text
}

fn html(cases: &[Case], shown: &[Shown]) -> String {
    let columns = columns(shown);
    let mut text = String::from(concat!(
        "<!doctype html><meta charset=utf-8><title>Faults and the checks that see them</title><style>",
        ":root{color-scheme:light dark}body{font:13px system-ui;margin:1rem}table{border-collapse:collapse}",
        "th,td{border:1px solid #8884;padding:2px 5px}thead th{writing-mode:vertical-rl;position:sticky;top:0;background:Canvas}",
        "tbody th{text-align:left;font-weight:normal;white-space:nowrap}",
        ".fail{background:#c62828;color:#fff}.error{background:#6a1b9a;color:#fff}.warn{background:#f9a825;color:#000}",
        ".ill{background:#c62828;color:#fff}.away,.withheld{background:#1565c0;color:#fff}.wrong{outline:2px solid red}</style><h1>Faults and the checks that see them</h1><table><thead><tr><td>case</td>"
    ));
    for column in &columns {
        let _ = write!(text, "<th>{column}</th>");
    }
    text.push_str("</tr></thead><tbody>\n");
    for (case, shown) in cases.iter().zip(shown) {
        let class = if shown.differences.is_empty() {
            ""
        } else {
            " class=wrong"
        };
        let _ = write!(text, "<tr{class}><th>{}</th>", escape(&case.name));
        for column in &columns {
            let verdict = shown.tripped.get(*column).map_or("", String::as_str);
            let class = verdict.split('+').next().unwrap_or_default();
            let _ = write!(text, "<td class=\"{class}\">{verdict}</td>");
        }
        text.push_str("</tr>\n");
    }
    text.push_str("</tbody></table>\n");
    text
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
