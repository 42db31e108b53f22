//! Runs a test on a simulated node.

use simulator::{Catalogue, NodeRequest, prepare_node};
use std::process::Command;

/// The variable that marks the process on the node.
pub(crate) const NODE: &str = "GPU_SIMULATOR_NODE";

/// Runs `body` on a node: this test runs itself again in a process whose environment names the
/// node.
pub(crate) fn on_node(
    test: &str,
    node: &str,
    faults: &[&str],
    overrides: &[&str],
    body: impl FnOnce(),
) {
    if std::env::var_os(NODE).is_some() {
        body();
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let strings = |list: &[&str]| list.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
    let this_program = std::env::current_exe().expect("this program");
    let prepared = prepare_node(&NodeRequest {
        folder: &folder.path().join("node"),
        // The functions are linked into this test, so no library file is loaded.
        library: &this_program,
        catalogue: &Catalogue::shipped(),
        node,
        faults: &strings(faults),
        overrides: &strings(overrides),
    })
    .expect("the node is prepared");
    let output = Command::new(&this_program)
        .args(["--exact", test, "--nocapture"])
        .env(NODE, &prepared.folder)
        .output()
        .expect("the test starts again");
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}"
    );
}
