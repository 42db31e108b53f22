//! The closing of a node that the API server has not heard of yet: kept on disk, so that neither a
//! restart of the gate nor a reboot of the node forgets it.

use std::path::Path;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use crate::owned_folder::OwnedFolder;

const FILE: &str = "closure.json";
const FOLDER_MODE: u32 = 0o755;

/// The state of a node that must not take work, as it is reported to the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Closure {
    pub(super) node: String,
    /// The condition's reason.
    pub(super) reason: String,
    pub(super) message: String,
    /// The annotation.
    pub(super) summary: String,
}

/// Where the closure is kept; nowhere without a folder.
#[derive(Debug)]
pub(super) struct ClosureFile(Option<OwnedFolder>);

impl ClosureFile {
    pub(super) fn open(folder: Option<&Path>) -> anyhow::Result<Self> {
        let Some(path) = folder else {
            return Ok(Self(None));
        };
        let folder = OwnedFolder::create(path, FOLDER_MODE)
            .with_context(|| format!("state folder {} cannot be used", path.display()))?;
        Ok(Self(Some(folder)))
    }

    pub(super) fn read(&self) -> anyhow::Result<Option<Closure>> {
        let Some(folder) = &self.0 else {
            return Ok(None);
        };
        if !folder.contains(FILE.as_ref())? {
            return Ok(None);
        }
        let path = folder.path_of(FILE);
        let text = folder
            .read(FILE.as_ref())
            .with_context(|| format!("{} cannot be read", path.display()))?;
        let closure = serde_json::from_slice(&text)
            .with_context(|| format!("{} is not the closure of a node", path.display()))?;
        Ok(Some(closure))
    }

    pub(super) fn keep(&self, closure: &Closure) -> anyhow::Result<()> {
        let Some(folder) = &self.0 else {
            return Ok(());
        };
        let text = serde_json::to_vec(closure)?;
        folder
            .write(FILE.as_ref(), &text)
            .with_context(|| format!("{} cannot be written", folder.path_of(FILE).display()))
    }

    /// The cluster knows, or a pass came after it.
    pub(super) fn clear(&self) -> anyhow::Result<()> {
        let Some(folder) = &self.0 else {
            return Ok(());
        };
        folder
            .remove(FILE.as_ref())
            .with_context(|| format!("{} cannot be removed", folder.path_of(FILE).display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closure_stays_until_it_is_cleared() {
        let temporary = tempfile::tempdir().expect("a folder");
        let path = temporary.path().join("gate");
        let closure = Closure {
            node: "a".to_owned(),
            reason: "ValidationFailed".to_owned(),
            message: "Xid 79".to_owned(),
            summary: "{}".to_owned(),
        };
        let file = ClosureFile::open(Some(&path)).expect("opened");
        assert_eq!(file.read().expect("read"), None);
        file.keep(&closure).expect("kept");
        // As after a reboot.
        let again = ClosureFile::open(Some(&path)).expect("opened");
        assert_eq!(again.read().expect("read"), Some(closure));
        again.clear().expect("cleared");
        assert_eq!(file.read().expect("read"), None);
        std::fs::write(path.join(FILE), "{").expect("written");
        assert!(file.read().is_err(), "what cannot be read is not nothing");
    }
}
