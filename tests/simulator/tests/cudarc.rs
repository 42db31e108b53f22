//! cudarc's safe layer, a client that others wrote, works on a simulated node unchanged, from its
//! first call to the end of its process.

use simulator::{Catalogue, NodeRequest, prepare_node};
use std::path::PathBuf;
use std::process::{Command, Output};

/// Files that cargo built of this package next to this test: `target/<profile>`.
fn built(path: &str) -> PathBuf {
    let program = std::env::current_exe().expect("this program");
    let profile = program.ancestors().nth(2).expect("target/<profile>");
    let built = profile.join(path);
    assert!(built.is_file(), "cargo did not build {}", built.display());
    built
}

fn run_client(node: &str, faults: &[&str]) -> Output {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let faults: Vec<String> = faults.iter().map(|it| (*it).to_owned()).collect();
    let node = prepare_node(&NodeRequest {
        folder: &folder.path().join("node"),
        library: &built("deps/libsimulator.so"),
        catalogue: &Catalogue::shipped(),
        node,
        faults: &faults,
        overrides: &[],
    })
    .expect("the node is prepared");
    Command::new(built("examples/cudarc-client"))
        .envs(&node.environment)
        .output()
        .expect("the client starts")
}

#[test]
fn cudarc_computes_on_every_gpu() {
    let output = run_client("h200x8", &[]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(shown.starts_with("8 devices\n0: NVIDIA H200\n"), "{shown}");
    assert_eq!(shown.lines().count(), 9, "{shown}");
}

#[test]
fn cudarc_sees_a_fault() {
    let output = run_client("h200x8", &["cuda-719"]);
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("CUDA_ERROR_LAUNCH_FAILED"), "{said}");
}
