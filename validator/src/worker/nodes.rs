//! The device nodes that a worker may open, as arguments of its command line.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use super::device_isolation::{Attempt, keep_to};
use super::process::worker_program;

/// The argument of [`Nodes::only`].
const ONLY: &str = "--node";

/// The device nodes that a worker may open.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Nodes {
    /// Of the GPUs' nodes in its folder, the only one that this worker is to open
    #[arg(long = "node", value_name = "PATH")]
    pub(crate) only: Vec<PathBuf>,
    /// Why an attempt with that one alone failed
    #[arg(long, value_name = "REASON", conflicts_with = "only")]
    pub(crate) alone_failed: Option<String>,
}

impl Nodes {
    /// The arguments that keep a worker to the GPU with this minor number: to CUDA's own node of
    /// it, and that of a simulated one.
    pub(crate) fn of(minor: u32, sysroot: Option<&Path>) -> Vec<OsString> {
        let folders = [Some(Path::new("/")), sysroot];
        let node = |folder: &Path| folder.join(format!("dev/nvidia{minor}")).into_os_string();
        let nodes = folders.into_iter().flatten().map(node);
        nodes.flat_map(|it| [ONLY.into(), it]).collect()
    }
}

/// Works with one GPU's node alone where requested, and where CUDA does not start so, once more
/// with all.
pub(crate) fn with_nodes(
    nodes: &Nodes,
    work: impl FnOnce(bool) -> Attempt + Send + 'static,
) -> ExitCode {
    let Attempt::RetryWithAllNodes(reason) = keep_to(&nodes.only, work) else {
        return ExitCode::SUCCESS;
    };
    // Neither the rules can be taken back nor what the driver keeps of a start that failed.
    let error = Command::new(worker_program(None))
        .arg0("gpu-validator")
        .args(without_nodes(std::env::args_os().skip(1)))
        .args(["--alone-failed", &reason])
        .exec();
    eprintln!("cannot start anew: {error}");
    ExitCode::FAILURE
}

/// Arguments of a worker less those that keep it to a node.
fn without_nodes(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut is_path = false;
    arguments
        .filter(|argument| {
            let leave_out = is_path || argument == ONLY;
            is_path = !is_path && argument == ONLY;
            !leave_out
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_begins_anew_does_the_same_with_every_node() {
        let own: Vec<OsString> = ["worker", "workload", "--assignment", "{}"]
            .map(OsString::from)
            .to_vec();
        let nodes = Nodes::of(3, Some(Path::new("/host")));
        assert_eq!(
            nodes,
            ["--node", "/dev/nvidia3", "--node", "/host/dev/nvidia3"]
        );
        let all = own.iter().chain(&nodes).cloned();
        assert_eq!(without_nodes(all), own);
        // A path that is spelled like the argument is a path.
        let odd = ["--node", "--node", "--gpu"].map(OsString::from);
        assert_eq!(without_nodes(odd.into_iter()), ["--gpu"]);
    }
}
