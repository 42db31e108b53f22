//! What `nvml-transcript` prints on a simulated node.

use serde_json::Value;
use simulator::{Catalogue, NodeRequest, prepare_node};
use std::path::PathBuf;
use std::process::Command;

/// The transcript of a healthy node, in a folder of the calling test's own.
pub(crate) fn transcript_of(node: &str, test: &str) -> Value {
    let tests = std::env::current_exe().unwrap();
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("{test}-{node}-{}", std::process::id()));
    let prepared = prepare_node(&NodeRequest {
        folder: &folder,
        // Cargo builds the shared library next to the tests.
        library: &tests.with_file_name("libsimulator.so"),
        catalogue: &Catalogue::shipped(),
        node,
        faults: &[],
        overrides: &[],
    })
    .unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_nvml-transcript"))
        .envs(&prepared.environment)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    std::fs::remove_dir_all(&folder).unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}
