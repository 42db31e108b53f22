//! `gpu-validator judge`: judge facts that were collected before, of one machine or of many.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, anyhow, bail};

use super::report_files::{
    ClaimedOutputs, ReportFiles, is_standard_output, save_elsewhere, write_whole,
};
use super::report_options::ReportOptions;
use super::run::refuse_simulated;
use super::selection::SelectionOptions;
use super::terminal::{to_stderr, to_stdout};
use validator_core::facts::Facts;
use validator_core::findings::{ExitStatus, Run};
use validator_core::level::Level;
use validator_core::profile::Profile;
use validator_core::report::{FleetEntry, FleetTotals, fleet_json, fleet_line};
use validator_core::selection::Selection;

/// Judge facts that were collected before
///
/// Nothing of this machine is read: the same facts and the same profile give the same verdicts
/// everywhere.
#[derive(Debug, clap::Args)]
#[command(after_long_help = crate::commands::EXIT_CODES)]
pub(crate) struct Arguments {
    /// A facts file, or a folder: each *.json in it is judged, one line each, and only --json may
    /// be written
    #[arg(value_name = "FACTS")]
    facts: PathBuf,
    /// Judge at a lower level than the facts were collected at
    #[arg(long, value_parser = crate::cli_values::level())]
    level: Option<Level>,
    #[command(flatten)]
    selection: SelectionOptions,
    #[command(flatten)]
    report: ReportOptions,
}

pub(crate) fn judge(arguments: &Arguments) -> anyhow::Result<ExitStatus> {
    let _outputs = ClaimedOutputs::of(&arguments.report, None, &[Some(&arguments.facts)])?;
    let (profile, profile_name) = arguments.report.profile()?;
    let judge = Judge {
        profile,
        profile_name,
        level: arguments.level,
        selection: arguments.selection.selection()?,
        forbid_simulated: arguments.report.refuses_simulated(),
    };
    if arguments.facts.is_dir() {
        return judge_folder(arguments, &judge);
    }
    let run = judge.file(&arguments.facts)?;
    ReportFiles::new(&arguments.report, None).finish(&run, &arguments.report);
    Ok(run.exit_status())
}

/// By what facts are judged.
struct Judge {
    profile: Profile,
    profile_name: String,
    level: Option<Level>,
    selection: Selection,
    forbid_simulated: bool,
}

impl Judge {
    fn file(&self, path: &Path) -> anyhow::Result<Run> {
        let mut facts = read_facts(path)?;
        refuse_simulated(&mut facts, self.forbid_simulated);
        let level = self.level.unwrap_or(facts.level);
        if level > facts.level {
            bail!(
                "{}: --level {level}: the facts were collected at level {} and hold nothing of a higher level",
                path.display(),
                facts.level
            );
        }
        self.selection
            .refuse_unknown_gpus(&facts)
            .map_err(|error| anyhow!("{}: {error}", path.display()))?;
        let run = Run::judged(facts, &self.profile, &self.profile_name, level);
        Ok(self.selection.applied_to(run))
    }

    fn entry(&self, path: &Path) -> FleetEntry {
        let name = path
            .file_name()
            .map_or_else(String::new, |it| it.to_string_lossy().into_owned());
        match self.file(path) {
            Ok(run) => FleetEntry::judged(&name, &run),
            Err(error) => FleetEntry::unreadable(&name, &format!("{error:#}")),
        }
    }
}

pub(crate) fn read_facts(path: &Path) -> anyhow::Result<Facts> {
    let text = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    Facts::from_json(&text).with_context(|| format!("{}", path.display()))
}

fn judge_folder(arguments: &Arguments, judge: &Judge) -> anyhow::Result<ExitStatus> {
    let folder = &arguments.facts;
    let options = &arguments.report;
    for (option, path) in [
        ("--junit", options.junit.as_ref()),
        ("--markdown", options.markdown.as_ref()),
        ("--html", options.html.as_ref()),
        ("--metrics", options.metrics.as_ref()),
        ("--report", options.more.first().map(|it| &it.path)),
    ] {
        if path.is_some() {
            bail!(
                "{option} reports on one facts file, and {} is a folder",
                folder.display()
            );
        }
    }
    let paths = facts_files(folder)?;
    if paths.is_empty() {
        bail!("no *.json file in {}", folder.display());
    }
    let entries = judge_all(&paths, judge);
    let totals = FleetTotals::of(&entries);
    let mut lines: String = entries
        .iter()
        .map(|entry| fleet_line(entry) + "\n")
        .collect();
    lines.extend(["\n", &totals.to_string(), "\n"]);
    match options.json.as_deref() {
        Some(path) if is_standard_output(path) => {
            to_stderr(&lines);
            to_stdout(&fleet_json(&entries));
        }
        Some(path) => {
            to_stdout(&lines);
            let report = fleet_json(&entries);
            if let Err(error) = write_whole(path, report.as_bytes()) {
                save_elsewhere("JSON report", path, &error, &report);
            }
        }
        None => {
            to_stdout(&lines);
        }
    }
    Ok(totals.exit_status())
}

/// The folder's `*.json`, by name.
fn facts_files(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries =
        std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry
            .with_context(|| format!("cannot list {}", folder.display()))?
            .path();
        // A pipe without a writer would be waited for without end.
        if path.extension().is_some_and(|it| it == "json") && path.is_file() {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// Judges on every processor; the entries are in the order of `paths`.
fn judge_all(paths: &[PathBuf], judge: &Judge) -> Vec<FleetEntry> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicUsize::new(0);
    let entries = Mutex::new(Vec::with_capacity(paths.len()));
    crate::threads::in_parallel(threads.min(paths.len()), || {
        while let Some((index, path)) = {
            let index = next.fetch_add(1, Ordering::Relaxed);
            paths.get(index).map(|path| (index, path))
        } {
            let entry = judge.entry(path);
            entries
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push((index, entry));
        }
    });
    let mut entries = entries.into_inner().unwrap_or_else(PoisonError::into_inner);
    entries.sort_by_key(|(index, _)| *index);
    entries.into_iter().map(|(_, entry)| entry).collect()
}

#[cfg(test)]
mod tests {
    use super::facts_files;

    #[test]
    fn only_files_are_judged() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("b.json");
        std::fs::write(&file, "{}").expect("written");
        std::fs::create_dir(folder.path().join("c.json")).expect("made");
        // Like a pipe, a device is no file and may never end.
        std::os::unix::fs::symlink("/dev/zero", folder.path().join("a.json")).expect("linked");
        assert_eq!(facts_files(folder.path()).expect("listed"), [file]);
    }
}
