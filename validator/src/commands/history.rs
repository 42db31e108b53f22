//! The figures of earlier runs of this node, which `run` keeps in a folder and judges trends by.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};

use validator_core::facts::{EarlierRun, Facts, Reading};
use validator_core::history::figures_of;

use super::terminal::to_stderr;
use crate::owned_folder::OwnedFolder;

const DEFAULT_FOLDER: &str = "/var/lib/gpu-bringup/history";
/// A month of daily runs; each is some 2 KiB on a node with eight GPUs.
const RUNS_MAXIMUM: usize = 32;
const BYTES_MAXIMUM: usize = 1 << 20;
/// A file that is still written is younger.
const LEFTOVER_AGE_S: i64 = 3600;
/// No file that other users can write to is read.
const MODE: u32 = 0o755;

#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct HistoryOptions {
    /// Keep the figures of this run in this folder, and judge trends against the earlier runs in
    /// it [default: /var/lib/gpu-bringup/history for root; none for other users and with --sysroot]
    #[arg(long, value_name = "DIR")]
    history: Option<PathBuf>,
    /// Keep no history, and judge no trend
    #[arg(long, conflicts_with = "history")]
    no_history: bool,
}

impl HistoryOptions {
    pub(crate) fn is_given(&self) -> bool {
        self.history.is_some() || self.no_history
    }

    /// `has_sysroot`: the files that are read may be another machine's.
    pub(crate) fn folder(&self, has_sysroot: bool) -> Option<HistoryFolder> {
        let by_default = !self.no_history && !has_sysroot && rustix::process::geteuid().is_root();
        let folder = |path: &Path, is_named| HistoryFolder {
            path: path.to_owned(),
            is_named,
        };
        match &self.history {
            Some(path) => Some(folder(path, true)),
            None => by_default.then(|| folder(Path::new(DEFAULT_FOLDER), false)),
        }
    }
}

/// The folder of the history: the newest runs, one file each, whose names sort by time.
#[derive(Clone, Debug)]
pub(crate) struct HistoryFolder {
    path: PathBuf,
    /// Named by the user; simulated nodes are kept in no other.
    is_named: bool,
}

impl HistoryFolder {
    /// The earlier runs, the oldest first. A file that is no run of this version's format is left
    /// out; the next run removes it.
    pub(crate) fn read(&self) -> Reading<Vec<EarlierRun>> {
        let read = || -> io::Result<Vec<EarlierRun>> {
            let Some(folder) = OwnedFolder::open(&self.path)? else {
                return Ok(Vec::new());
            };
            let files = run_files(&folder)?;
            Ok(files.iter().filter_map(|it| parsed(&it.content)).collect())
        };
        read()
            .map_err(|error| format!("{}: {error}", self.path.display()))
            .into()
    }

    /// Keeps the figures of a run that was not stopped. A history that cannot be written changes
    /// no verdict.
    pub(crate) fn keep(&self, facts: &Facts) {
        let figures = figures_of(facts);
        let is_whole = facts.interrupted.is_none() && !figures.gpus.is_empty();
        if !is_whole || (figures.simulated && !self.is_named) {
            return;
        }
        if let Err(error) = self.write(&figures) {
            to_stderr(&format!(
                "warning: the history of this node could not be written to {}: {error}\n",
                self.path.display()
            ));
        }
    }

    fn write(&self, figures: &EarlierRun) -> io::Result<()> {
        let content = serde_json::to_vec(figures)?;
        let folder = OwnedFolder::create(&self.path, MODE)?;
        remove_leftovers(&folder)?;
        let mut kept = Vec::new();
        for file in run_files(&folder)? {
            if parsed(&file.content).is_some() {
                kept.push((file.name, file.content.len()));
            } else {
                folder.remove(&file.name)?;
            }
        }
        for name in superfluous(&kept, content.len()) {
            folder.remove(name)?;
        }
        let time: String = figures
            .collected_at
            .chars()
            .filter(char::is_ascii_alphanumeric)
            .collect();
        let name = format!("{time}-{}.json", std::process::id());
        folder.write(OsStr::new(&name), &content)
    }
}

struct RunFile {
    name: OsString,
    content: Vec<u8>,
}

fn run_files(folder: &OwnedFolder) -> io::Result<Vec<RunFile>> {
    let mut files = Vec::new();
    for name in folder.names()? {
        let text = name.to_string_lossy();
        if text.starts_with('.') || !text.ends_with(".json") {
            continue;
        }
        match folder.read(&name) {
            Ok(content) => files.push(RunFile { name, content }),
            // Another run has removed it meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(files)
}

fn parsed(content: &[u8]) -> Option<EarlierRun> {
    serde_json::from_slice(content).ok()
}

/// The oldest files, without which there is room for one more of `bytes`.
fn superfluous(kept: &[(OsString, usize)], bytes: usize) -> impl Iterator<Item = &OsStr> {
    let mut room = BYTES_MAXIMUM.saturating_sub(bytes);
    let fits = |(_, length): &&(OsString, usize)| {
        let left = room.checked_sub(*length);
        room = left.unwrap_or_default();
        left.is_some()
    };
    let newest = kept.iter().rev().take(RUNS_MAXIMUM - 1).take_while(fits);
    let count = kept.len() - newest.count();
    kept.iter().take(count).map(|(name, _)| name.as_os_str())
}

/// Temporary files of runs that were killed.
fn remove_leftovers(folder: &OwnedFolder) -> io::Result<()> {
    let now = jiff::Timestamp::now().as_second();
    for name in folder.names()? {
        let text = name.to_string_lossy();
        let is_temporary = text.starts_with('.') && text.ends_with(".tmp");
        let is_old = |written: jiff::Timestamp| now - written.as_second() > LEFTOVER_AGE_S;
        if is_temporary && folder.modified(&name).is_some_and(is_old) {
            folder.remove(&name)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use validator_core::test_machine::burned_node;

    fn node(collected_at: &str) -> Facts {
        Facts {
            collected_at: collected_at.to_owned(),
            ..burned_node()
        }
    }

    fn history(parent: &tempfile::TempDir) -> HistoryFolder {
        HistoryFolder {
            path: parent.path().join("kept/history"),
            is_named: true,
        }
    }

    #[test]
    fn the_newest_runs_are_kept_and_read_in_their_order() {
        let parent = tempfile::tempdir().expect("a folder");
        let history = history(&parent);
        assert_eq!(history.read(), Reading::Value(Vec::new()));
        let time = |minute: usize| format!("2026-11-20T03:{minute:02}:05Z");
        for minute in 0..RUNS_MAXIMUM + 3 {
            history.keep(&node(&time(minute)));
        }
        let Reading::Value(runs) = history.read() else {
            panic!("{:?}", history.read());
        };
        let times: Vec<String> = runs.iter().map(|it| it.collected_at.clone()).collect();
        let expected: Vec<String> = (3..RUNS_MAXIMUM + 3).map(time).collect();
        assert_eq!(times, expected);
        assert_eq!(runs[0], figures_of(&node(&times[0])));
        assert_eq!(runs[0].gpus.len(), 8);
    }

    #[test]
    fn a_run_that_was_stopped_or_is_simulated_elsewhere_is_not_kept() {
        let parent = tempfile::tempdir().expect("a folder");
        let named = history(&parent);
        let mut facts = node("2026-11-20T03:04:05Z");
        facts.simulated = Some("eight H200s".to_owned());
        let by_default = HistoryFolder {
            is_named: false,
            ..named.clone()
        };
        by_default.keep(&facts);
        assert!(!named.path.exists());
        named.keep(&facts);
        facts.interrupted = Some("signal 15".to_owned());
        facts.collected_at = "2026-11-20T03:04:06Z".to_owned();
        named.keep(&facts);
        assert_eq!(named.read().value().map(Vec::len), Some(1));
    }

    #[test]
    fn a_file_of_another_format_is_left_out_and_removed_by_the_next_run() {
        let parent = tempfile::tempdir().expect("a folder");
        let history = history(&parent);
        history.keep(&node("2026-11-20T03:04:05Z"));
        let foreign = history.path.join("20261120T030406Z-1.json");
        std::fs::write(&foreign, "{}garbage").expect("written");
        assert_eq!(history.read().value().map(Vec::len), Some(1));
        history.keep(&node("2026-11-20T03:04:07Z"));
        assert!(!foreign.exists());
        assert_eq!(history.read().value().map(Vec::len), Some(2));
    }

    #[test]
    fn a_folder_that_others_can_write_to_is_refused() {
        use std::os::unix::fs::PermissionsExt as _;
        let parent = tempfile::tempdir().expect("a folder");
        let history = history(&parent);
        history.keep(&node("2026-11-20T03:04:05Z"));
        let open = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(&history.path, open).expect("changed");
        let Reading::NotRead(reason) = history.read() else {
            panic!("a folder of others is read");
        };
        assert!(reason.contains("other users can write to it"), "{reason}");
    }

    #[test]
    fn the_bytes_are_bounded_and_the_oldest_go_first() {
        let name = |index: usize| OsString::from(format!("{index}.json"));
        let third = BYTES_MAXIMUM / 3;
        let kept: Vec<(OsString, usize)> = (0..4).map(|it| (name(it), third)).collect();
        let removed: Vec<&OsStr> = superfluous(&kept, third).collect();
        assert_eq!(removed, [name(0), name(1)]);
        assert_eq!(superfluous(&kept[..2], third).count(), 0);
    }
}
