//! Steps that are skipped while none of their inputs changed since they passed.
//!
//! What passed is recorded below `target/ci`, so that a fresh clone runs every step. The record is
//! the list of all files with their hashes, not one hash of them: a step that runs again names the
//! file that made it.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use xshell::{Shell, cmd};

use crate::{packages, workspace};

/// What a step reads.
#[derive(Clone, Debug, Default)]
pub(super) struct Inputs {
    /// Files and folders, from the root of the checkout.
    pub(super) paths: &'static [&'static str],
    /// Manifests of packages: their folders, and those of all packages here that they are built
    /// from.
    pub(super) packages: &'static [&'static str],
    /// Folders below target that the step writes and later steps read.
    pub(super) outputs: &'static [&'static str],
}

/// Inputs of every step: versions of all dependencies, profiles of the compiler.
const OF_ALL: [&str; 4] = ["Cargo.lock", "Cargo.toml", ".cargo", "rust-toolchain.toml"];

/// What a step was run on, and how many tests it passed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) tests: u64,
    listing: String,
}

/// Why a step runs.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// It has not passed in this build folder.
    New,
    Changed(String),
    Unchanged,
}

impl Inputs {
    /// All inputs as they are now, and `command`.
    pub(super) fn record(&self, shell: &Shell, command: &str) -> anyhow::Result<Record> {
        let mut paths: BTreeSet<PathBuf> = OF_ALL.map(PathBuf::from).into();
        paths.extend(self.paths.iter().map(PathBuf::from));
        for manifest in self.packages {
            paths.extend(packages::folders(shell, manifest)?);
        }
        for path in self.paths {
            ensure!(
                workspace::root().join(path).exists(),
                "`{path}` is named as an input of a step and does not exist"
            );
        }
        let compiler = cmd!(shell, "rustc --version").quiet().read()?;
        let files = files(shell, &paths)?;
        let hashes = hashes(&files)?;
        let mut listing = format!("{command}\n{compiler}\n");
        for (file, hash) in files.iter().zip(hashes.lines()) {
            let _ = writeln!(listing, "{hash} {}", file.display());
        }
        Ok(Record { tests: 0, listing })
    }

    pub(super) fn outputs_exist(&self) -> bool {
        let target = workspace::target();
        self.outputs.iter().all(|it| target.join(it).exists())
    }
}

impl Record {
    fn file(step: &str) -> PathBuf {
        workspace::target()
            .join("ci")
            .join(format!("{step}.passed"))
    }

    /// That of the last time that `step` passed.
    pub(super) fn read(step: &str) -> Option<Record> {
        Self::parse(&std::fs::read_to_string(Self::file(step)).ok()?)
    }

    fn parse(text: &str) -> Option<Record> {
        let (tests, listing) = text.split_once('\n')?;
        Some(Record {
            tests: tests.parse().ok()?,
            listing: listing.to_owned(),
        })
    }

    /// Called when the step passed.
    pub(super) fn write(&self, step: &str) -> anyhow::Result<()> {
        let file = Self::file(step);
        std::fs::create_dir_all(file.parent().unwrap_or(Path::new("")))?;
        let text = format!("{}\n{}", self.tests, self.listing);
        std::fs::write(&file, text).with_context(|| file.display().to_string())
    }

    /// Called before the step runs: a step that fails, or is killed, has not passed.
    pub(super) fn remove(step: &str) -> anyhow::Result<()> {
        match std::fs::remove_file(Self::file(step)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| Self::file(step).display().to_string())
            }
            _ => Ok(()),
        }
    }

    /// What changed since `passed`.
    pub(super) fn since(&self, passed: Option<&Record>) -> Change {
        let Some(passed) = passed else {
            return Change::New;
        };
        let before: BTreeSet<&str> = passed.listing.lines().collect();
        let now: BTreeSet<&str> = self.listing.lines().collect();
        let of = |line: &str| match line.split_once(' ') {
            Some((hash, file)) if hash.len() == 40 => file.to_owned(),
            _ => line.to_owned(),
        };
        let first = now.symmetric_difference(&before).next();
        first.map_or(Change::Unchanged, |line| Change::Changed(of(line)))
    }
}

/// Files in `paths` that git knows or would add; what it ignores is no input.
fn files(shell: &Shell, paths: &BTreeSet<PathBuf>) -> anyhow::Result<Vec<PathBuf>> {
    let listed = cmd!(
        shell,
        "git ls-files -z --cached --others --exclude-standard -- {paths...}"
    )
    .quiet()
    .read()?;
    let files = listed.split('\0').filter(|it| !it.is_empty());
    let mut files: Vec<PathBuf> = files
        .map(PathBuf::from)
        // One that is deleted and not yet committed.
        .filter(|file| workspace::root().join(file).is_file())
        .collect();
    files.sort();
    files.dedup();
    Ok(files)
}

/// One line a file.
fn hashes(files: &[PathBuf]) -> anyhow::Result<String> {
    let mut hash = Command::new("git")
        .args(["hash-object", "--no-filters", "--stdin-paths"])
        .current_dir(workspace::root())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("git could not be started")?;
    let mut stdin = hash.stdin.take().context("stdin is not a pipe")?;
    let names: Vec<String> = files.iter().map(|it| it.display().to_string()).collect();
    let text = names.join("\n") + "\n";
    let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()));
    let output = hash.wait_with_output()?;
    let written = writer.join().unwrap_or(Ok(()));
    let hashes = String::from_utf8(output.stdout)?;
    written.context("git did not read all names")?;
    ensure!(
        output.status.success() && hashes.lines().count() == files.len(),
        "git did not hash every file"
    );
    Ok(hashes)
}

#[cfg(test)]
mod tests {
    use super::{Change, Inputs, Record};
    use crate::workspace;

    const OWN: Inputs = Inputs {
        paths: &["fuzz/corpus"],
        packages: &["terraform/tasks/Cargo.toml"],
        outputs: &[],
    };

    #[test]
    fn the_record_lists_each_file_of_paths_and_packages() {
        let shell = workspace::shell().expect("a shell");
        let record = OWN
            .record(&shell, "cargo xtask tf check")
            .expect("a record");
        for part in [
            "cargo xtask tf check\n",
            "rustc ",
            " Cargo.lock\n",
            " fuzz/corpus/facts/",
            " terraform/tasks/Cargo.toml\n",
            " xtask/src/ci/inputs.rs\n",
        ] {
            assert!(record.listing.contains(part), "{part}: {}", record.listing);
        }
        assert!(
            !record.listing.contains(" validator/"),
            "{}",
            record.listing
        );
        let missing = Inputs {
            paths: &["no/such/folder"],
            ..OWN
        };
        let error = missing
            .record(&shell, "true")
            .expect_err("an input that is gone");
        assert!(error.to_string().contains("no/such/folder"), "{error}");
    }

    #[test]
    fn a_changed_a_new_and_a_removed_file_and_another_command_are_changes() {
        let hash = |digit: &str| digit.repeat(40);
        let record = |lines: &[String]| Record {
            tests: 3,
            listing: lines.join("\n") + "\n",
        };
        let one = format!("{} a", hash("1"));
        let passed = record(&["cargo x".to_owned(), one.clone()]);
        let change = |lines: &[String]| record(lines).since(Some(&passed));
        let command = || "cargo x".to_owned();
        assert_eq!(change(&[command(), one.clone()]), Change::Unchanged);
        let changed = |what: &str| Change::Changed(what.to_owned());
        assert_eq!(
            change(&[command(), format!("{} a", hash("2"))]),
            changed("a")
        );
        assert_eq!(
            change(&[command(), one.clone(), format!("{} b", hash("1"))]),
            changed("b")
        );
        assert_eq!(change(&[command()]), changed("a"));
        assert_eq!(change(&["cargo x --y".to_owned(), one]), changed("cargo x"));
        assert_eq!(passed.since(None), Change::New);
        let text = format!("{}\n{}", passed.tests, passed.listing);
        assert_eq!(Record::parse(&text), Some(passed));
        assert_eq!(Record::parse(""), None);
    }
}
