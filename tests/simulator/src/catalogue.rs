//! The nodes, GPU models and faults in a folder: their names, and their files read with errors that
//! a person can act on.

use crate::faults::{ExpectedVerdict, Fault};
use crate::scenario::{Driver, Host, SimulatedProcess};
use anyhow::{Context, Result, anyhow, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A node file (`nodes/*.yaml`): a GPU model times a count, the driver, and the host.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeFile {
    /// One line for `simulate list`.
    pub description: String,
    /// Name of a file in `models`.
    pub model: String,
    /// PCI addresses of the GPUs, one each: their number is the number of GPUs.
    pub pci_addresses: Vec<String>,
    /// Start of the GPUs' UUIDs, which end in their number; null derives UUIDs from the node's
    /// name.
    #[serde(default)]
    pub uuid_prefix: Option<String>,
    pub driver: Driver,
    pub host: Host,
    /// Values that differ from the model's on every GPU.
    #[serde(default)]
    pub gpu: serde_json::Map<String, serde_json::Value>,
    /// Values of single GPUs, by number.
    #[serde(default)]
    pub gpus: BTreeMap<u32, serde_json::Map<String, serde_json::Value>>,
    #[serde(default)]
    pub processes: BTreeMap<String, SimulatedProcess>,
    /// Checks of gpu-validator that are not green although the node is healthy, with `because`:
    /// what is worth a warning on such a node, or what the validator does not know yet.
    #[serde(default)]
    pub trips: BTreeMap<String, ExpectedVerdict>,
    #[serde(default)]
    pub because: Option<String>,
}

/// A folder with `nodes`, `models` and `faults`.
#[derive(Debug, Clone)]
pub struct Catalogue {
    root: PathBuf,
}

/// The three kinds of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Node,
    Model,
    Fault,
}

impl Kind {
    fn folder(self) -> &'static str {
        match self {
            Self::Node => "nodes",
            Self::Model => "models",
            Self::Fault => "faults",
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Model => "GPU model",
            Self::Fault => "fault",
        }
    }
}

impl Catalogue {
    /// The files that came with the program: those of its archive (`share/gpu-simulator` next to
    /// `bin`), else of the repository that it was built from.
    pub fn shipped() -> Self {
        let program = std::env::current_exe().unwrap_or_default();
        let of_archive = program.ancestors().nth(2);
        let of_archive = of_archive.map(|folder| folder.join("share/gpu-simulator"));
        match of_archive.filter(|folder| folder.join("nodes").is_dir()) {
            Some(folder) => Self::at(&folder),
            None => Self::at(Path::new(env!("CARGO_MANIFEST_DIR"))),
        }
    }

    pub fn at(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    /// The names of a kind, sorted.
    pub fn names(&self, kind: Kind) -> Result<Vec<String>> {
        let folder = self.root.join(kind.folder());
        let mut names = Vec::new();
        for entry in
            std::fs::read_dir(&folder).with_context(|| format!("list {}", folder.display()))?
        {
            let path = entry
                .with_context(|| format!("list {}", folder.display()))?
                .path();
            if path
                .extension()
                .is_some_and(|extension| extension == "yaml")
            {
                names.extend(
                    path.file_stem()
                        .map(|stem| stem.to_string_lossy().into_owned()),
                );
            }
        }
        names.sort();
        Ok(names)
    }

    /// The file of a name; a name that holds a `/` or ends in `.yaml` or `.yml` is a path, to a
    /// file anywhere.
    pub fn find(&self, kind: Kind, name: &str) -> Result<PathBuf> {
        if is_path(name) {
            let path = PathBuf::from(name);
            if !path.is_file() {
                bail!("there is no {} file {name}", kind.word());
            }
            return Ok(path);
        }
        let path = self.root.join(kind.folder()).join(format!("{name}.yaml"));
        if path.is_file() {
            return Ok(path);
        }
        let names = self.names(kind)?;
        let nearest = nearest(name, names.iter().map(String::as_str))
            .map_or(String::new(), |nearest| {
                format!(", the nearest is `{nearest}`")
            });
        bail!(
            "there is no {} `{name}`{nearest} (`gpu-simulator list` shows them all)",
            kind.word()
        )
    }

    pub fn node(&self, name: &str) -> Result<(PathBuf, NodeFile)> {
        let path = self.find(Kind::Node, name)?;
        let node: NodeFile = read_yaml(&path)?;
        if node.trips.is_empty() != node.because.is_none() {
            bail!("{}: `trips` and `because` belong together", path.display());
        }
        Ok((path, node))
    }

    pub fn fault(&self, name: &str) -> Result<(PathBuf, Fault)> {
        let path = self.find(Kind::Fault, name)?;
        let fault: Fault = read_yaml(&path)?;
        if fault.gpu.is_some() && fault.gpus.is_some() {
            bail!(
                "{}: `gpu` and `gpus` contradict each other; give one",
                path.display()
            );
        }
        if fault.trips.is_empty() != fault.harmless.is_some() {
            bail!(
                "{}: either `trips` names a check, or it is empty and `harmless` says why",
                path.display()
            );
        }
        Ok((path, fault))
    }

    pub(crate) fn model(&self, name: &str) -> Result<(PathBuf, serde_json::Value)> {
        let path = self.find(Kind::Model, name)?;
        let model: serde_json::Value = read_yaml(&path)?;
        Ok((path, model))
    }
}

fn is_path(name: &str) -> bool {
    let extension = Path::new(name).extension();
    name.contains('/')
        || extension.is_some_and(|extension| extension == "yaml" || extension == "yml")
}

/// The short name of a node or fault that may be a path.
pub fn short_name(name: &str) -> String {
    if is_path(name) {
        Path::new(name).file_stem().map_or_else(
            || name.to_owned(),
            |stem| stem.to_string_lossy().into_owned(),
        )
    } else {
        name.to_owned()
    }
}

fn read_yaml<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let deserializer = serde_yaml::Deserializer::from_str(&text);
    serde_path_to_error::deserialize(deserializer).map_err(|error| {
        let field = error.path().to_string();
        let inner = error.into_inner();
        let place = inner.location().map_or_else(
            || path.display().to_string(),
            |location| {
                format!(
                    "{}:{}:{}",
                    path.display(),
                    location.line(),
                    location.column()
                )
            },
        );
        let field = if field == "." {
            String::new()
        } else {
            format!("{field}: ")
        };
        anyhow!("{place}: {field}{}", with_nearest(&inner.to_string()))
    })
}

/// Adds the nearest valid name to serde's "unknown field" and "unknown variant" messages.
pub(crate) fn with_nearest(message: &str) -> String {
    let mut quoted = message.split('`').skip(1).step_by(2);
    if !message.contains("unknown field") && !message.contains("unknown variant") {
        return message.to_owned();
    }
    let Some(given) = quoted.next() else {
        return message.to_owned();
    };
    let valid: Vec<&str> = quoted.collect();
    match nearest(given, valid.iter().copied()) {
        Some(name) => format!("{message}; the nearest valid name is `{name}`"),
        None => message.to_owned(),
    }
}

/// The name that takes the fewest edits to reach, if it is at all like the one given.
pub(crate) fn nearest<'name>(
    given: &str,
    names: impl Iterator<Item = &'name str>,
) -> Option<&'name str> {
    names
        .map(|name| (edit_distance(given, name), name))
        .filter(|(distance, name)| *distance <= (name.len().max(given.len()) / 2).max(1))
        .min()
        .map(|(_, name)| name)
}

fn edit_distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, l) in left.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, r) in right.iter().enumerate() {
            let substituted = diagonal + usize::from(l != *r);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_found_and_nonsense_has_none() {
        let names = ["xid-79", "xid-74", "ecc-off"];
        assert_eq!(nearest("xid79", names.into_iter()), Some("xid-79"));
        assert_eq!(nearest("ec-off", names.into_iter()), Some("ecc-off"));
        assert_eq!(nearest("zzzzzzzzzzzz", names.into_iter()), None);
    }

    #[test]
    fn paths_are_told_from_names() {
        assert!(is_path("./mine"));
        assert!(is_path("mine.yaml"));
        assert!(!is_path("p5.48xlarge"));
        assert_eq!(short_name("/some/where/mine.yaml"), "mine");
        assert_eq!(short_name("p5.48xlarge"), "p5.48xlarge");
    }
}
