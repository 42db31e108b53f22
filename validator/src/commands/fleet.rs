//! `gpu-validator fleet report`: the reports of many nodes in one.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, bail};

use super::report_files::write_whole;
use super::terminal::{to_stderr, to_stdout};
use validator_core::facts::Facts;
use validator_core::findings::{ExitStatus, Run};
use validator_core::fleet::{Fleet, Format, Kept, NodeReport, markdown};
use validator_core::profile::Profile;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum FleetCommand {
    Report(Box<ReportArguments>),
}

/// Merge the reports of many nodes, and name the GPUs that are unlike others of their model
///
/// Reads what `gpu-validator run` and `collect` write: JSON reports, JUnit reports, facts. Facts
/// are judged here; facts and JUnit files of a folder that holds report.json are left out. GPUs are
/// compared with the others of their model over all nodes. The exit code is that of the worst node:
/// 0 all passed, 1 a node failed, 2 a node was not judged, 4 the only thing not judged is load on
/// busy GPUs. An outlier alone changes it with --fail-on-outliers only.
#[derive(Debug, clap::Args)]
pub(crate) struct ReportArguments {
    /// Reports or facts, or folders of them (*.json and *.xml, folders in them too)
    #[arg(value_name = "FILE-OR-DIR", required = true)]
    paths: Vec<PathBuf>,
    /// What the nodes of facts files must be
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Write the report in every format into this folder: fleet.md, fleet.html, fleet.report
    /// (JSON), fleet.junit
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Write the report as Markdown, `-` for standard output
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Write the report as a page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write the report for programs
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a JUnit report: a test case a node, and one a measurement
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// A GPU that is unlike its peers fails the fleet
    #[arg(long)]
    fail_on_outliers: bool,
    /// A node that should have reported and did not: it was not judged; may be given several times
    #[arg(long, value_name = "NODE=REASON", value_parser = missing)]
    missing: Vec<Missing>,
}

/// A node without a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Missing {
    pub(crate) node: String,
    pub(crate) reason: String,
}

fn missing(text: &str) -> Result<Missing, String> {
    match text.split_once('=') {
        Some((node, reason)) if !node.is_empty() && !reason.is_empty() => Ok(Missing {
            node: node.to_owned(),
            reason: reason.to_owned(),
        }),
        _ => Err("expected NODE=REASON".to_owned()),
    }
}

pub(crate) fn fleet(command: &FleetCommand) -> anyhow::Result<ExitStatus> {
    let FleetCommand::Report(arguments) = command;
    let profile = match arguments.profile.as_deref() {
        Some(path) => (crate::profile_file::load(path)?, path.display().to_string()),
        None => (Profile::default(), Run::BUILT_IN_PROFILE.to_owned()),
    };
    let files = report_files(&arguments.paths)?;
    let mut nodes = read_all(&files, &profile);
    nodes.extend(missing_nodes(&arguments.missing));
    let fleet = Fleet::of(nodes, arguments.fail_on_outliers);
    for (path, format) in [
        (&arguments.markdown, Format::Markdown),
        (&arguments.html, Format::Html),
        (&arguments.json, Format::Json),
        (&arguments.junit, Format::Junit),
    ] {
        if let Some(path) = path.as_deref().filter(|path| *path != Path::new("-")) {
            write(path, &fleet, format)?;
        }
    }
    if let Some(folder) = &arguments.out {
        write_all(folder, &fleet)?;
    }
    to_stdout(&markdown(&fleet));
    Ok(status(&fleet))
}

/// Merges what is in `folder`, and writes every format there.
pub(crate) fn report_of_folder(folder: &Path, missing: &[Missing]) -> anyhow::Result<ExitStatus> {
    let built_in = (Profile::default(), Run::BUILT_IN_PROFILE.to_owned());
    let mut nodes = read_all(&files_below(folder)?, &built_in);
    nodes.extend(missing_nodes(missing));
    let fleet = Fleet::of(nodes, false);
    write_all(folder, &fleet)?;
    to_stdout(&markdown(&fleet));
    Ok(status(&fleet))
}

fn missing_nodes(missing: &[Missing]) -> impl Iterator<Item = NodeReport> {
    missing
        .iter()
        .map(|it| NodeReport::missing(&it.node, &it.reason))
}

fn status(fleet: &Fleet) -> ExitStatus {
    match fleet.exit_code() {
        0 => ExitStatus::Passed,
        1 => ExitStatus::Failed,
        4 => ExitStatus::Busy,
        _ => ExitStatus::NotJudged,
    }
}

fn write_all(folder: &Path, fleet: &Fleet) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder)
        .with_context(|| format!("{} cannot be made", folder.display()))?;
    for (name, format) in [
        ("fleet.md", Format::Markdown),
        ("fleet.html", Format::Html),
        // Not *.json, nor *.xml: the folder can be read again.
        ("fleet.report", Format::Json),
        ("fleet.junit", Format::Junit),
    ] {
        write(&folder.join(name), fleet, format)?;
    }
    to_stderr(&format!("reports: {}\n", folder.display()));
    Ok(())
}

fn write(path: &Path, fleet: &Fleet, format: Format) -> anyhow::Result<()> {
    let mut content = Vec::new();
    let written = format.write(fleet, &mut content);
    written
        .and_then(|()| write_whole(path, &content))
        .with_context(|| format!("{} cannot be written", path.display()))
}

fn report_files(paths: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            let found = files_below(path)?;
            if found.is_empty() {
                bail!("no *.json and no *.xml in {}", path.display());
            }
            files.extend(found);
        } else {
            files.push(path.clone());
        }
    }
    Ok(files)
}

/// `*.json` and `*.xml`, by name, less those that a report in JSON makes needless.
fn files_below(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(&folder)
            .with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot list {}", folder.display()))?;
            let path = entry.path();
            let extension = path.extension().and_then(|it| it.to_str());
            if entry.file_type()?.is_dir() {
                folders.push(path);
            } else if path.is_file()
                && matches!(extension, Some("json" | "xml"))
                && !is_needless(&path)
            {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// `a.junit.xml` and `a.xml` where there is `a.json`, and the facts of a run where there is its
/// `report.json`.
fn is_needless(path: &Path) -> bool {
    let name = path
        .file_name()
        .map_or_else(String::new, |it| it.to_string_lossy().into_owned());
    if name == "facts.json" {
        return path.with_file_name("report.json").is_file();
    }
    let Some(stem) = name.strip_suffix(".xml") else {
        return false;
    };
    let stem = stem.trim_end_matches(".junit");
    path.with_file_name(format!("{stem}.json")).is_file()
}

/// Reads on every processor, one file at a time each; only what the fleet's report needs of a file
/// is kept.
fn read_all(files: &[PathBuf], profile: &(Profile, String)) -> Vec<NodeReport> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicUsize::new(0);
    let kept = Kept::default();
    let reports = Mutex::new(Vec::with_capacity(files.len()));
    crate::threads::in_parallel(threads.min(files.len()), || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(path) = files.get(index) else {
                return;
            };
            let report = read(path, profile, &kept);
            let mut reports = reports.lock().unwrap_or_else(PoisonError::into_inner);
            reports.push((index, report));
        }
    });
    let mut reports = reports.into_inner().unwrap_or_else(PoisonError::into_inner);
    reports.sort_by_key(|(index, _)| *index);
    reports.into_iter().map(|(_, report)| report).collect()
}

/// A file that cannot be read is a node that was not judged.
fn read(path: &Path, profile: &(Profile, String), kept: &Kept) -> NodeReport {
    let source = path.display().to_string();
    let name = path
        .file_stem()
        .map_or_else(String::new, |it| it.to_string_lossy().into_owned());
    let of_bytes = |bytes: Vec<u8>| {
        if path.extension().is_some_and(|it| it == "xml") {
            return NodeReport::of_junit(&bytes, &name, &source);
        }
        if is_facts(&bytes) {
            let facts = Facts::from_json(&bytes)?;
            let level = facts.level;
            let run = Run::judged(facts, &profile.0, &profile.1, level);
            return NodeReport::of_run(&run, &name, &source, kept);
        }
        NodeReport::of_json(&bytes, &name, &source, kept)
    };
    let read = std::fs::read(path).context("cannot be read");
    read.and_then(of_bytes)
        .unwrap_or_else(|error| NodeReport::unreadable(&name, &source, &error))
}

/// Facts have a host, and no verdict.
fn is_facts(bytes: &[u8]) -> bool {
    #[derive(serde::Deserialize)]
    struct Keys {
        host: Option<serde::de::IgnoredAny>,
        verdict: Option<serde::de::IgnoredAny>,
    }
    let keys = serde_json::from_slice::<Keys>(bytes);
    keys.is_ok_and(|it| it.host.is_some() && it.verdict.is_none())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Missing, files_below, fleet, missing};
    use validator_core::findings::{ExitStatus, Run};
    use validator_core::profile::Profile;
    use validator_core::test_machine::healthy_node;

    fn report_of(arguments: &[&str]) -> anyhow::Result<ExitStatus> {
        #[derive(clap::Parser)]
        struct CommandLine {
            #[command(subcommand)]
            command: super::FleetCommand,
        }
        let words = ["fleet", "report"]
            .into_iter()
            .chain(arguments.iter().copied());
        fleet(&<CommandLine as clap::Parser>::try_parse_from(words)?.command)
    }

    fn written(folder: &Path, name: &str, content: &str) {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        std::fs::write(path, content).expect("written");
    }

    #[test]
    fn reports_facts_and_missing_nodes_are_one_fleet() {
        let folder = tempfile::tempdir().expect("a folder");
        let facts = healthy_node();
        let level = facts.level;
        let json = serde_json::to_string(&facts).expect("JSON");
        let run = Run::judged(facts, &Profile::default(), "built-in", level);
        let at = folder.path().display().to_string();
        // One node that was run, with all that a run leaves.
        written(
            folder.path(),
            "a/report.json",
            &validator_core::report::json(&run),
        );
        written(
            folder.path(),
            "a/report.junit.xml",
            &validator_core::report::junit(&run).expect("a report"),
        );
        written(folder.path(), "a/facts.json", &json);
        let one = report_of(&[&at]).expect("a report");
        assert_eq!(one as u8, run.exit_status() as u8);
        // One of which there are facts only, under another name; the same GPUs would contradict.
        let hostname = run.facts.host.hostname.value().expect("a name");
        let mut other = json.replace(hostname, "other");
        for gpu in &run.facts.gpus {
            let uuid = gpu.uuid.value().expect("a UUID");
            other = other.replace(uuid, &format!("GPU-f{}", &uuid[5..]));
        }
        written(folder.path(), "b/facts.json", &other);
        let out = folder.path().join("out").display().to_string();
        let both = report_of(&[&at, "--out", &out]).expect("a report");
        assert_eq!(both as u8, run.exit_status() as u8);
        let read = |name: &str| std::fs::read_to_string(folder.path().join("out").join(name));
        let fleet: serde_json::Value =
            serde_json::from_str(&read("fleet.report").expect("there")).expect("JSON");
        assert_eq!(
            (&fleet["totals"]["nodes"], &fleet["totals"]["gpus"]),
            (&2.into(), &16.into())
        );
        for name in ["fleet.md", "fleet.html", "fleet.junit"] {
            assert!(!read(name).expect("there").is_empty(), "{name}");
        }
        let gone = report_of(&[&at, "--missing", "gpu-9=no connection"]).expect("a report");
        assert_eq!(gone, ExitStatus::NotJudged);
        assert!(
            report_of(&[&folder.path().join("nothing").display().to_string()])
                .is_ok_and(|it| it == ExitStatus::NotJudged)
        );
    }

    #[test]
    fn facts_and_junit_files_are_left_out_where_there_is_a_json_report() {
        let folder = tempfile::tempdir().expect("a folder");
        for name in [
            "a.xml",
            "b.junit.xml",
            "b.json",
            "c/facts.json",
            "d/facts.json",
            "d/report.json",
            "e.txt",
        ] {
            written(folder.path(), name, "");
        }
        let found = files_below(folder.path()).expect("listed");
        let found: Vec<_> = found
            .iter()
            .map(|it| {
                it.strip_prefix(folder.path())
                    .expect("below")
                    .display()
                    .to_string()
            })
            .collect();
        assert_eq!(found, ["a.xml", "b.json", "c/facts.json", "d/report.json"]);
    }

    #[test]
    fn a_missing_node_has_a_reason() {
        let expected = Missing {
            node: "gpu-17".to_owned(),
            reason: "a=b".to_owned(),
        };
        assert_eq!(missing("gpu-17=a=b"), Ok(expected));
        assert!(missing("gpu-17").is_err());
        assert!(missing("=x").is_err());
    }
}
