//! `cargo xtask junit-readers`: third-party parsers must count in our `JUnit` the same as our JSON
//! has.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail, ensure};

use xtask::{tools, workspace};

const SCRIPT: &str = include_str!("junit_readers.py");
const GOLDEN: &str = "tests/golden";

/// Read JUnit reports with junitparser, junit2html and a strict XML parser, and compare their
/// counts with the JSON
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Folders with *.junit.xml and *.json files [default: tests/golden]
    folders: Vec<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let golden = [workspace::root().join(GOLDEN)];
    let folders = if arguments.folders.is_empty() {
        &golden[..]
    } else {
        &arguments.folders
    };
    let mut pairs = Vec::new();
    for folder in folders {
        let found = pairs_below(folder)?;
        ensure!(
            !found.is_empty(),
            "{} holds no *.junit.xml",
            folder.display()
        );
        pairs.extend(found);
    }
    let python = tools::JUNIT_READERS.install()?.join("python3");
    let mut readers = Command::new(python)
        .args(["-I", "-"])
        .args(pairs)
        .stdin(Stdio::piped())
        .spawn()?;
    readers
        .stdin
        .take()
        .context("stdin is not a pipe")?
        .write_all(SCRIPT.as_bytes())?;
    ensure!(
        readers.wait()?.success(),
        "the readers do not agree with our JSON, or cannot read our JUnit; see above"
    );
    Ok(())
}

/// Each `JUnit` file followed by the JSON report of the same run.
fn pairs_below(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut pairs = Vec::new();
    let entries = std::fs::read_dir(folder)
        .with_context(|| format!("{} cannot be read", folder.display()))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        if path.is_dir() {
            pairs.extend(pairs_below(&path)?);
        } else if let Some(stem) = name.strip_suffix(".junit.xml") {
            let json = path.with_file_name(format!("{stem}.json"));
            if !json.exists() {
                bail!("{} has no {} beside it", path.display(), json.display());
            }
            pairs.extend([path, json]);
        }
    }
    Ok(pairs)
}
