//! The nodes that `gpu-simulator` keeps by name, for as long as the program that each was made for
//! runs.

use crate::state::start_time;
use anyhow::{Context, Result, bail, ensure};
use std::path::{Path, PathBuf};

/// In a node's folder: the process that it was made for, as its id and start time, or `kept`.
const OWNER: &str = "owner";
const KEPT: &str = "kept";

/// A folder with a node's folder for each name.
#[derive(Debug, Clone)]
pub struct Instances {
    root: PathBuf,
}

impl Instances {
    /// The user's own: `GPU_SIMULATOR_DIR`, else below the runtime folder, else below `/tmp`.
    pub fn of_user() -> Self {
        let named = |variable: &str| {
            let path = std::env::var_os(variable).map(PathBuf::from);
            path.filter(|path| path.is_absolute())
        };
        let root = named("GPU_SIMULATOR_DIR")
            .or_else(|| named("XDG_RUNTIME_DIR").map(|path| path.join("gpu-simulator")));
        Self::at(root.unwrap_or_else(|| {
            #[allow(unsafe_code, reason = "reads the user id")]
            // SAFETY: takes and writes no memory.
            let user = unsafe { libc::geteuid() };
            std::env::temp_dir().join(format!("gpu-simulator-{user}"))
        }))
    }

    pub fn at(root: PathBuf) -> Self {
        Self { root }
    }

    /// The names of the nodes that there are. Those of processes that have ended are removed first.
    pub fn names(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        if !self.root.exists() {
            return Ok(names);
        }
        let entries = std::fs::read_dir(&self.root)
            .with_context(|| format!("list {}", self.root.display()))?;
        for entry in entries {
            let path = entry.context("list the simulated nodes")?.path();
            if is_abandoned(&path) {
                // Another `gpu-simulator` may be doing the same.
                let _ = std::fs::remove_dir_all(&path);
                continue;
            }
            let name = path.file_name().map(|it| it.to_string_lossy().into_owned());
            names.extend(name);
        }
        names.sort();
        Ok(names)
    }

    /// The folder of the node with this name.
    pub fn find(&self, name: &str) -> Result<PathBuf> {
        let names = self.names()?;
        if names.iter().any(|it| it == name) {
            return Ok(self.root.join(name));
        }
        if names.is_empty() {
            bail!(
                "no node `{name}` runs, nor any other; `gpu-simulator run NODE -- PROGRAM` starts one"
            );
        }
        bail!("no node `{name}` runs; these do: {}", names.join(", "))
    }

    /// A folder for a new node of this process: under the requested name, which must be free, or
    /// else under the node's own name, with a number where that is taken.
    pub fn reserve(&self, asked: Option<&str>, node: &str) -> Result<(String, PathBuf)> {
        let taken = self.names()?;
        let is_free = |name: &str| !taken.iter().any(|it| it == name);
        let name = match asked {
            Some(name) => {
                let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
                ensure!(
                    name.chars().all(is_plain)
                        && name.starts_with(|c: char| c.is_ascii_alphanumeric()),
                    "`{name}` is no name of a node: letters, digits, `.`, `_` and `-`, not first one of the last three"
                );
                ensure!(
                    is_free(name),
                    "a node `{name}` runs already; `gpu-simulator remove {name}` ends it"
                );
                name.to_owned()
            }
            None => (1..=u32::MAX)
                .map(|number| match number {
                    1 => node.to_owned(),
                    number => format!("{node}-{number}"),
                })
                .find(|name| is_free(name))
                .context("no name is free")?,
        };
        let folder = self.root.join(&name);
        std::fs::create_dir_all(&self.root)
            .with_context(|| format!("create {}", self.root.display()))?;
        Ok((name, folder))
    }

    /// Removes a node, also one in use.
    pub fn remove(&self, name: &str) -> Result<()> {
        let folder = self.find(name)?;
        std::fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))
    }
}

/// Notes that the node is this process's, or that it stays until it is removed.
pub fn own(folder: &Path, is_kept: bool) -> Result<()> {
    let owner = if is_kept {
        KEPT.to_owned()
    } else {
        let pid = std::process::id();
        let start = start_time(pid).context("this process is not in /proc")?;
        format!("{pid} {start}")
    };
    let path = folder.join(OWNER);
    std::fs::write(&path, owner).with_context(|| format!("write {}", path.display()))
}

pub fn is_kept(folder: &Path) -> bool {
    std::fs::read_to_string(folder.join(OWNER)).is_ok_and(|owner| owner == KEPT)
}

/// Whether the process that a node was made for has ended. A folder without an owner is one that is
/// being made.
fn is_abandoned(folder: &Path) -> bool {
    let Ok(owner) = std::fs::read_to_string(folder.join(OWNER)) else {
        return false;
    };
    let Some((pid, start)) = owner.split_once(' ') else {
        return false;
    };
    let lives = pid.parse().ok().and_then(start_time);
    lives.map(|it| it.to_string()).as_deref() != Some(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_there_while_their_process_lives_or_they_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let instances = Instances::at(folder.path().join("nodes"));
        assert_eq!(instances.names().unwrap(), [""; 0]);
        for (name, owner) in [("mine", None), ("dead", Some("1 1")), ("kept", Some(KEPT))] {
            let (_, folder) = instances.reserve(Some(name), "p5").unwrap();
            std::fs::create_dir(&folder).unwrap();
            match owner {
                None => own(&folder, false).unwrap(),
                Some(text) => std::fs::write(folder.join(OWNER), text).unwrap(),
            }
        }
        assert_eq!(instances.names().unwrap(), ["kept", "mine"]);
        let error = instances.find("dead").unwrap_err().to_string();
        assert!(error.ends_with("these do: kept, mine"), "{error}");
        instances.remove("kept").unwrap();
        assert_eq!(instances.names().unwrap(), ["mine"]);
    }

    #[test]
    fn a_name_is_taken_once() {
        let folder = tempfile::tempdir().unwrap();
        let instances = Instances::at(folder.path().to_owned());
        for expected in ["p5", "p5-2"] {
            let (name, folder) = instances.reserve(None, "p5").unwrap();
            assert_eq!(name, expected);
            std::fs::create_dir(&folder).unwrap();
            own(&folder, true).unwrap();
        }
        assert!(instances.reserve(Some("p5"), "p5").is_err());
        assert!(instances.reserve(Some("../p5"), "p5").is_err());
    }
}
