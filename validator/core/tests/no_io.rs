//! The crate's dependencies do no IO: with none of them at hand, no check or report can read the
//! machine.

use std::collections::BTreeSet;
use std::process::Command;

/// Crates that open files, sockets or libraries, start processes or call the system. What pulls one
/// of these in belongs to the binary.
const DOES_IO: [&str; 20] = [
    "async-io",
    "clap",
    "curl",
    "hyper",
    "inotify",
    "landlock",
    "libloading",
    "memmap2",
    "mio",
    "nix",
    "nvml-wrapper-sys",
    "polling",
    "reqwest",
    "rustix",
    "signal-hook",
    "socket2",
    "tokio",
    "tonic",
    "ureq",
    "xshell",
];

/// The crates that `package` is built from, by `cargo tree`.
fn crates_of(package: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args([
            "tree",
            "--locked",
            "--offline",
            "--edges",
            "normal",
            "--prefix",
            "none",
        ])
        .args(["--package", package, "--format", "{p}"])
        .output()
        .expect("cargo starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo tree: {errors}");
    let text = String::from_utf8(output.stdout).expect("cargo tree prints UTF-8");
    let names = text.lines().filter_map(|it| it.split_whitespace().next());
    names.map(str::to_owned).collect()
}

#[test]
fn no_dependency_does_io() {
    let crates = crates_of("validator-core");
    assert!(crates.contains("serde_json"), "{crates:?}");
    let found: Vec<&str> = DOES_IO
        .into_iter()
        .filter(|it| crates.contains(*it))
        .collect();
    assert!(found.is_empty(), "validator-core depends on {found:?}");
}

#[test]
fn the_list_names_crates_that_the_binary_has() {
    let crates = crates_of("gpu-validator");
    for name in ["clap", "libloading", "reqwest", "rustix", "tokio"] {
        assert!(
            crates.contains(name),
            "{name} is not in the binary: the name is wrong"
        );
    }
}
