//! The Dockerfile of the runner's image.

use anyhow::Context as _;
use xshell::Shell;

/// The default of an ARG.
pub(super) fn argument(shell: &Shell, name: &str) -> anyhow::Result<String> {
    let text = shell.read_file("packer/runner-gpu/Dockerfile")?;
    text.lines()
        .find_map(|line| line.strip_prefix(&format!("ARG {name}=")))
        .map(str::to_owned)
        .with_context(|| format!("the Dockerfile has no ARG {name}"))
}
