//! `cargo xtask fleet report`: the reports of many nodes in one, and the GPUs that are unlike others of their model.

mod node_report;
mod outliers;
mod render;
mod summary;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, bail};
use node_report::{Kept, NodeReport};
use summary::Fleet;

/// Merge the reports of many nodes
#[derive(Debug, clap::Args)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, clap::Subcommand)]
enum Task {
    Report(ReportArguments),
}

/// Merge nodes' reports (JSON of `gpu-validator run --json`, or JUnit), and name the outliers
///
/// GPUs are compared with the others of their model over all nodes. The exit code is that of the worst node: 0 all passed, 1 a
/// node failed, 2 a node was not judged, 4 the only thing not judged is load on busy GPUs. An outlier alone changes it with
/// --fail-on-outliers only.
#[derive(Debug, clap::Args)]
struct ReportArguments {
    /// Reports, or folders of them (*.json and *.xml, folders in them too)
    #[arg(value_name = "FILE-OR-DIR", required = true)]
    paths: Vec<PathBuf>,
    /// Write the report as Markdown, `-` for standard output
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Write the report as a page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write the report for programs
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a `JUnit` report: a test case a node, and one a measurement
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// A GPU that is unlike its peers fails the fleet
    #[arg(long)]
    fail_on_outliers: bool,
}

/// A node that should have reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Missing {
    pub(crate) node: String,
    pub(crate) reason: String,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Task::Report(arguments) = &arguments.task;
    let files = report_files(&arguments.paths)?;
    let fleet = Fleet::of(read_all(&files), arguments.fail_on_outliers);
    for (path, format) in [
        (&arguments.markdown, render::Format::Markdown),
        (&arguments.html, render::Format::Html),
        (&arguments.json, render::Format::Json),
        (&arguments.junit, render::Format::Junit),
    ] {
        if let Some(path) = path.as_deref().filter(|path| *path != Path::new("-")) {
            write(path, &fleet, format)?;
        }
    }
    print!("{}", render::markdown(&fleet));
    Ok(ExitCode::from(fleet.exit_code()))
}

/// Merges what is in `folder` and writes every format beside it.
pub(crate) fn report_of_folder(folder: &Path, missing: &[Missing]) -> anyhow::Result<ExitCode> {
    let files = files_below(folder)?;
    let mut reports = read_all(&files);
    reports.extend(missing.iter().map(NodeReport::missing));
    let fleet = Fleet::of(reports, false);
    for (name, format) in [
        ("fleet.md", render::Format::Markdown),
        ("fleet.html", render::Format::Html),
        // Not *.json, nor *.xml: the folder can be read again.
        ("fleet.report", render::Format::Json),
        ("fleet.junit", render::Format::Junit),
    ] {
        write(&folder.join(name), &fleet, format)?;
    }
    print!("{}", render::markdown(&fleet));
    println!("\nreports: {}", folder.display());
    Ok(ExitCode::from(fleet.exit_code()))
}

/// One format at a time, straight to its file: the text of a fleet is larger than what is known of it.
fn write(path: &Path, fleet: &Fleet, format: render::Format) -> anyhow::Result<()> {
    let written = File::create(path).and_then(|file| {
        let mut file = BufWriter::new(file);
        format.write(fleet, &mut file)?;
        file.flush()
    });
    written.with_context(|| format!("{} cannot be written", path.display()))
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

/// `*.json` and `*.xml`, by name; a report in JSON makes the `JUnit` file beside it needless.
fn files_below(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(&folder)
            .with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot list {}", folder.display()))?;
            let path = entry.path();
            let kind = entry.file_type()?;
            let extension = path.extension().and_then(|it| it.to_str());
            if kind.is_dir() {
                folders.push(path);
            } else if path.is_file() && matches!(extension, Some("json" | "xml")) {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Reads on every processor, one file at a time each; only what the fleet's report needs of a file is kept.
fn read_all(files: &[PathBuf]) -> Vec<NodeReport> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicUsize::new(0);
    let kept = Kept::default();
    let reports = Mutex::new(Vec::with_capacity(files.len()));
    std::thread::scope(|scope| {
        for _ in 0..threads.min(files.len()) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(path) = files.get(index) else {
                        return;
                    };
                    let report = node_report::read(path, &kept);
                    let mut reports = reports.lock().unwrap_or_else(PoisonError::into_inner);
                    reports.push((index, report));
                }
            });
        }
    });
    let mut reports = reports.into_inner().unwrap_or_else(PoisonError::into_inner);
    reports.sort_by_key(|(index, _)| *index);
    reports
        .into_iter()
        .filter_map(|(_, report)| report)
        .collect()
}
