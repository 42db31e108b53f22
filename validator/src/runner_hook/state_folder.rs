//! Where hooks keep what one job's hook must tell the next: the quarantine and the record of the running job.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

use crate::commands::write_whole;

/// Of the image, owned by the runner's user.
pub(crate) const SYSTEM_FOLDER: &str = "/var/lib/gpu-validator";

/// The folders that may hold state, the one to write to first.
#[derive(Clone, Debug)]
pub(crate) struct StateFolders {
    candidates: Vec<PathBuf>,
}

impl StateFolders {
    /// The folder that was named; without one [`SYSTEM_FOLDER`], and the user's own state folder where the first cannot be
    /// written.
    pub(crate) fn new(named: Option<&Path>) -> Self {
        let candidates = match named {
            Some(folder) => vec![folder.to_owned()],
            None => [Some(PathBuf::from(SYSTEM_FOLDER)), users_folder()]
                .into_iter()
                .flatten()
                .collect(),
        };
        Self { candidates }
    }

    /// Every file of this name that is there.
    ///
    /// A folder that cannot be looked into is an error: what it may hold must not be overlooked.
    pub(crate) fn existing(&self, name: &str) -> anyhow::Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        for path in self.candidates.iter().map(|folder| folder.join(name)) {
            let is_there = path
                .try_exists()
                .with_context(|| format!("whether {} is there cannot be told", path.display()))?;
            if is_there {
                found.push(path);
            }
        }
        Ok(found)
    }

    /// The names of all files of all folders, with their paths.
    pub(crate) fn list(&self) -> anyhow::Result<Vec<(OsString, PathBuf)>> {
        let mut files = Vec::new();
        for folder in &self.candidates {
            let entries = match std::fs::read_dir(folder) {
                Ok(entries) => entries,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("{} cannot be read", folder.display()));
                }
            };
            files.extend(entries.flatten().map(|it| (it.file_name(), it.path())));
        }
        Ok(files)
    }

    /// Writes a file into the first folder that takes it, and returns its path.
    pub(crate) fn write(&self, name: &str, content: &[u8]) -> anyhow::Result<PathBuf> {
        let mut reasons = String::new();
        for folder in &self.candidates {
            let path = folder.join(name);
            let written =
                std::fs::create_dir_all(folder).and_then(|()| write_whole(&path, content));
            match written {
                Ok(()) => return Ok(path),
                Err(error) => {
                    let _ = write!(reasons, "; {}: {error}", path.display());
                }
            }
        }
        bail!("no folder for the state of this runner can be written{reasons}")
    }

    /// For messages: the folders, in their order.
    pub(crate) fn in_words(&self) -> String {
        let folders: Vec<String> = self
            .candidates
            .iter()
            .map(|it| it.display().to_string())
            .collect();
        folders.join(" and ")
    }
}

/// Source: XDG Base Directory Specification, `XDG_STATE_HOME`.
fn users_folder() -> Option<PathBuf> {
    let set = |name| {
        std::env::var_os(name)
            .filter(|it| !it.is_empty())
            .map(PathBuf::from)
    };
    let state = set("XDG_STATE_HOME")
        .filter(|it| it.is_absolute())
        .or_else(|| Some(set("HOME")?.join(".local/state")))?;
    Some(state.join("gpu-validator"))
}

/// `name-RUNNER.json`. What a file's name cannot hold of the runner's is written as `%2F`.
pub(crate) fn file_of_runner(name: &str, runner: &str) -> String {
    let mut file = format!("{name}-");
    for byte in runner.bytes() {
        if byte.is_ascii_alphanumeric() || b"._-".contains(&byte) {
            file.push(char::from(byte));
        } else {
            let _ = write!(file, "%{byte:02X}");
        }
    }
    file.push_str(".json");
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runners_name_stays_inside_the_folder() {
        assert_eq!(
            file_of_runner("quarantine", "gpu-17.a_b"),
            "quarantine-gpu-17.a_b.json"
        );
        assert_eq!(file_of_runner("job", "../x y"), "job-..%2Fx%20y.json");
        assert_ne!(file_of_runner("job", "a b"), file_of_runner("job", "a%20b"));
    }

    #[test]
    fn the_first_folder_that_takes_it_is_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let blocked = folder.path().join("file");
        std::fs::write(&blocked, "").expect("written");
        let folders = StateFolders {
            candidates: vec![blocked.join("below"), folder.path().join("second")],
        };
        let path = folders
            .write("job.json", b"{}")
            .expect("the second takes it");
        assert_eq!(path, folder.path().join("second/job.json"));
        let only = StateFolders::new(Some(&blocked.join("below")));
        let error = only
            .write("job.json", b"{}")
            .expect_err("a file is no folder");
        assert!(
            error.to_string().contains("file/below/job.json: "),
            "{error}"
        );
    }

    #[test]
    fn a_folder_that_cannot_be_looked_into_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("file");
        std::fs::write(&file, "").expect("written");
        // A name below a file is "not a directory", neither there nor certainly absent.
        assert!(
            StateFolders::new(Some(&file))
                .existing("quarantine")
                .is_err()
        );
        let empty = StateFolders::new(Some(folder.path()));
        assert!(empty.existing("quarantine").expect("readable").is_empty());
    }
}
