//! docs/audit.md has a row for each crate of the binary, in its version: a new one is read before it
//! ships.

use std::collections::BTreeSet;

use xshell::cmd;

use crate::workspace;

/// The platforms that are built for.
const TRIPLES: [&str; 2] = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"];

/// Name and version.
type Crate = (String, String);

/// The crates whose code is in the binary: not those of macros and build scripts.
fn crates_of_the_binary() -> BTreeSet<Crate> {
    let shell = workspace::shell().expect("the workspace");
    let cargo = workspace::cargo();
    let mut crates = BTreeSet::new();
    for triple in TRIPLES {
        let format = "{p}";
        let tree = cmd!(
            shell,
            "{cargo} tree --locked --package gpu-validator --edges normal,no-proc-macro --target {triple} --prefix none --format {format}"
        );
        let tree = tree.quiet().read().expect("cargo lists what it builds");
        // `rustix v1.1.6`; those of this workspace are followed by their folder.
        for line in tree.lines().filter(|it| !it.contains(" (/")) {
            let mut words = line.split_whitespace();
            if let (Some(name), Some(version)) = (words.next(), words.next()) {
                let version = version.strip_prefix('v').unwrap_or(version);
                crates.insert((name.to_owned(), version.to_owned()));
            }
        }
    }
    crates
}

/// Rows `| rustix | 1.1.6 | … |` of the tables.
fn audited(text: &str) -> BTreeSet<Crate> {
    let rows = text.lines().filter_map(|line| {
        let mut cells = line.strip_prefix('|')?.split('|').map(str::trim);
        let (name, version) = (cells.next()?, cells.next()?);
        version
            .starts_with(|it: char| it.is_ascii_digit())
            .then(|| (name.to_owned(), version.to_owned()))
    });
    rows.collect()
}

#[test]
fn every_crate_of_the_binary_is_in_docs_audit() {
    let text = std::fs::read_to_string(workspace::root().join("docs/audit.md"));
    let (crates, audited) = (
        crates_of_the_binary(),
        audited(&text.expect("docs/audit.md")),
    );
    assert!(crates.len() > 100, "{crates:?}");
    let missing: Vec<_> = crates.difference(&audited).collect();
    assert!(missing.is_empty(), "not in docs/audit.md: {missing:?}");
    let gone: Vec<_> = audited.difference(&crates).collect();
    assert!(gone.is_empty(), "not in the binary any more: {gone:?}");
}

#[test]
fn a_row_is_a_crate_and_its_version() {
    let text = "| crate | version |\n|---|---|\n| tar | 0.4.46 | archives | 26 | |\ntext\n";
    let expected = BTreeSet::from([("tar".to_owned(), "0.4.46".to_owned())]);
    assert_eq!(audited(text), expected);
}
