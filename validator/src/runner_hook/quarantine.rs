//! The mark that keeps a runner from taking jobs until a person or a fleet's tool lifts it.

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use super::job_record::Job;
use super::state_folder::{StateFile, StateFolders, file_of_runner};

/// The contents of the quarantine file: why a runner takes no jobs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Quarantine {
    /// RFC 3339 in UTC.
    pub(crate) since: String,
    pub(crate) reason: String,
    /// Before which job it was found.
    pub(crate) job: Job,
    /// Labels that were taken from the runner, for a person to give back. Jobs run as the user who
    /// can write this file, so nothing acts on them.
    pub(crate) labels_removed: Vec<String>,
    pub(crate) validator_version: String,
}

const FILE: &str = "quarantine";
/// Holds for every runner of the machine. A person may make it:
/// `echo "GPU 3 is replaced" >…/quarantine`.
const FILE_OF_MACHINE: &str = "quarantine";
/// Characters that are shown of a reason that was written by hand.
const REASON_CHARACTERS_SHOWN: usize = 500;

impl Quarantine {
    pub(crate) fn now(reason: String, job: Job) -> Self {
        Self {
            since: jiff::Timestamp::now()
                .strftime("%Y-%m-%dT%H:%M:%SZ")
                .to_string(),
            reason,
            job,
            labels_removed: Vec::new(),
            validator_version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    /// Writes the mark; returns its file.
    pub(crate) fn save(&self, folders: &StateFolders) -> anyhow::Result<StateFile> {
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        folders.write(&file_of_runner(FILE, &self.job.runner), text.as_bytes())
    }

    /// Reads a mark. It holds whatever is in it: an empty file, a sentence, or what only a newer
    /// version understands.
    fn read(file: &StateFile) -> Self {
        let text = match file.read() {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) => format!("the reason cannot be read: {error}"),
        };
        let mut mark = Self::of_text(&text);
        if mark.since.is_empty() {
            let modified = file.modified().map(|it| it.strftime("%Y-%m-%dT%H:%M:%SZ"));
            mark.since = modified.map_or("an unknown time".to_owned(), |it| it.to_string());
        }
        mark
    }

    pub(crate) fn of_text(text: &str) -> Self {
        let mut mark = serde_json::from_str(text).unwrap_or_else(|_| Self {
            reason: text.trim().chars().take(REASON_CHARACTERS_SHOWN).collect(),
            ..Self::default()
        });
        if mark.reason.is_empty() {
            "no reason was written down".clone_into(&mut mark.reason);
        }
        mark
    }

    /// The mark that keeps this runner from taking jobs, with its file.
    ///
    /// An error means that it is unknown, which must not be taken for "none".
    pub(crate) fn of_runner(
        runner: &str,
        folders: &StateFolders,
    ) -> anyhow::Result<Option<(StateFile, Self)>> {
        for name in [file_of_runner(FILE, runner), FILE_OF_MACHINE.to_owned()] {
            if let Some(file) = folders.existing(&name)?.into_iter().next() {
                let mark = Self::read(&file);
                return Ok(Some((file, mark)));
            }
        }
        Ok(None)
    }

    /// Every mark of the machine.
    pub(crate) fn all(folders: &StateFolders) -> anyhow::Result<Vec<(StateFile, Self)>> {
        let of_runner = |name: &str| {
            let name = name.strip_prefix("quarantine-");
            name.is_some_and(|it| it.strip_suffix(".json").is_some())
        };
        let is_mark = |name: &str| name == FILE_OF_MACHINE || of_runner(name);
        let files = folders.list()?.into_iter();
        let marks = files.filter(|(name, _)| name.to_str().is_some_and(is_mark));
        Ok(marks
            .map(|(_, file)| {
                let mark = Self::read(&file);
                (file, mark)
            })
            .collect())
    }

    pub(crate) fn lift(file: &StateFile) -> anyhow::Result<()> {
        file.remove().with_context(|| {
            format!(
                "{} cannot be removed; do it as the user who owns it, or as root",
                file.path().display()
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(runner: &str) -> Job {
        Job {
            runner: runner.to_owned(),
            ..Job::default()
        }
    }

    #[test]
    fn a_mark_holds_for_its_runner_until_it_is_lifted() {
        let folder = tempfile::tempdir().expect("a folder");
        let folders = StateFolders::new(Some(folder.path()));
        let mark = Quarantine::now("kernel_log_xid: Xid 79".to_owned(), job("gpu-1"));
        let file = mark.save(&folders).expect("saved");
        let of_runner = |runner: &str| {
            let found = Quarantine::of_runner(runner, &folders).expect("read");
            found.map(|(file, mark)| (file.path(), mark))
        };
        assert_eq!(of_runner("gpu-1"), Some((file.path(), mark)));
        assert_eq!(of_runner("gpu-2"), None);
        Quarantine::lift(&file).expect("lifted");
        assert_eq!(of_runner("gpu-1"), None);
    }

    #[test]
    fn a_mark_that_cannot_be_read_holds() {
        let folder = tempfile::tempdir().expect("a folder");
        let folders = StateFolders::new(Some(folder.path()));
        for target in ["/dev/zero", "/nonexistent"] {
            let link = folder.path().join("quarantine");
            std::os::unix::fs::symlink(target, &link).expect("linked");
            let (_, mark) = Quarantine::of_runner("any", &folders)
                .expect("read")
                .expect("held");
            assert!(mark.reason.contains("symbolic link"), "{}", mark.reason);
            std::fs::remove_file(link).expect("removed");
        }
    }

    #[test]
    fn what_a_person_wrote_holds_for_every_runner() {
        let folder = tempfile::tempdir().expect("a folder");
        let folders = StateFolders::new(Some(folder.path()));
        for (content, reason) in [
            ("GPU 3 is replaced\n", "GPU 3 is replaced"),
            ("", "no reason was written down"),
            ("{\"half\": ", "{\"half\":"),
        ] {
            std::fs::write(folder.path().join("quarantine"), content).expect("written");
            let (_, mark) = Quarantine::of_runner("any", &folders)
                .expect("told")
                .expect("held");
            assert_eq!(mark.reason, reason);
            assert!(mark.since.ends_with('Z'), "{}", mark.since);
        }
        assert_eq!(Quarantine::all(&folders).expect("listed").len(), 1);
    }
}
