//! The crates that `cargo install gpu-validator` would fetch can be published: none is private, each
//! names the versions of the others, and what they are built from lies in their own folders.
//!
//! All three names were free on crates.io on 2026-11-24 (`cargo info NAME`).

use xshell::cmd;

use crate::workspace;

/// In the order in which they are published, each with a file that its build reads.
const CRATES: [(&str, &str); 3] = [
    ("validator-core", "data/gemm_rates.yaml"),
    ("validator-remote", "src/lib.rs"),
    ("gpu-validator", "build.rs"),
];

/// Packages as `cargo publish` does, with the others of this checkout in place of crates.io.
#[test]
fn the_crates_of_the_binary_can_be_published() {
    let shell = workspace::shell().expect("a shell");
    let (cargo, folder) = (workspace::cargo(), workspace::target().join("published"));
    let names = CRATES.map(|(name, _)| format!("--package={name}"));
    cmd!(
        shell,
        "{cargo} package --quiet --offline --no-verify --allow-dirty {names...} --target-dir {folder}"
    )
    .quiet()
    .run()
    .expect("cargo packages them");
    for (name, file) in CRATES {
        let version = env!("CARGO_PKG_VERSION");
        let archive = folder.join(format!("package/{name}-{version}.crate"));
        let list = cmd!(shell, "tar --list --gzip --file {archive}").quiet();
        let list = list.read().expect("a list of files");
        let wanted = format!("{name}-{version}/{file}");
        assert!(
            list.lines().any(|it| it == wanted),
            "{wanted} is not packaged"
        );
    }
}
