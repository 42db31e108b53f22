//! The folder in which one job's hook keeps records for the next: the quarantine and the record of
//! the running job.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context as _, bail};

use crate::owned_folder::OwnedFolder;

/// Of the image, owned by the runner's user.
pub(crate) const SYSTEM_FOLDER: &str = "/var/lib/gpu-validator";
/// Others may read why a runner is quarantined.
const FOLDER_MODE: u32 = 0o755;

/// The folders that may hold state, the one to write to first.
#[derive(Clone, Debug)]
pub(crate) struct StateFolders {
    candidates: Vec<PathBuf>,
}

/// A file that is there.
#[derive(Clone, Debug)]
pub(crate) struct StateFile {
    folder: Rc<OwnedFolder>,
    name: OsString,
}

impl StateFile {
    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path_of(&self.name)
    }

    pub(crate) fn read(&self) -> std::io::Result<Vec<u8>> {
        self.folder.read(&self.name)
    }

    pub(crate) fn modified(&self) -> Option<jiff::Timestamp> {
        self.folder.modified(&self.name)
    }

    pub(crate) fn remove(&self) -> std::io::Result<()> {
        self.folder.remove(&self.name)
    }
}

impl StateFolders {
    /// The folder that was named; without one [`SYSTEM_FOLDER`], and the user's own state folder
    /// where the first cannot be written.
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

    /// The folders that are there. One that another user can write to is an error: what it holds
    /// cannot be trusted, and a quarantine that it holds must not be overlooked.
    fn folders(&self) -> anyhow::Result<Vec<Rc<OwnedFolder>>> {
        let mut folders = Vec::new();
        for path in &self.candidates {
            let folder = OwnedFolder::open(path)
                .with_context(|| format!("state folder {} cannot be used", path.display()))?;
            folders.extend(folder.map(Rc::new));
        }
        Ok(folders)
    }

    /// Every file of this name that is there.
    ///
    /// A folder that cannot be read is an error: what it may hold must not be overlooked.
    pub(crate) fn existing(&self, name: &str) -> anyhow::Result<Vec<StateFile>> {
        let mut found = Vec::new();
        for folder in self.folders()? {
            let name = OsString::from(name);
            let is_there = folder.contains(&name).with_context(|| {
                let path = folder.path_of(&name);
                format!("whether {} exists cannot be read", path.display())
            })?;
            if is_there {
                found.push(StateFile { folder, name });
            }
        }
        Ok(found)
    }

    /// All files of all folders, with their names.
    pub(crate) fn list(&self) -> anyhow::Result<Vec<(OsString, StateFile)>> {
        let mut files = Vec::new();
        for folder in self.folders()? {
            let names = folder
                .names()
                .with_context(|| format!("{} cannot be read", folder.path_of("").display()))?;
            files.extend(names.into_iter().map(|name| {
                let folder = Rc::clone(&folder);
                (name.clone(), StateFile { folder, name })
            }));
        }
        Ok(files)
    }

    /// Writes a file into the first folder that takes it.
    pub(crate) fn write(&self, name: &str, content: &[u8]) -> anyhow::Result<StateFile> {
        let mut reasons = String::new();
        let name = OsString::from(name);
        for path in &self.candidates {
            let written = OwnedFolder::create(path, FOLDER_MODE)
                .and_then(|folder| folder.write(&name, content).map(|()| folder));
            match written {
                Ok(folder) => {
                    let folder = Rc::new(folder);
                    return Ok(StateFile { folder, name });
                }
                Err(error) => {
                    let _ = write!(reasons, "; {}: {error}", path.join(&name).display());
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
        let file = folders
            .write("job.json", b"{}")
            .expect("the second takes it");
        assert_eq!(file.path(), folder.path().join("second/job.json"));
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
