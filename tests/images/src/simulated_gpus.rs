//! Simulated GPUs for machines that are simulated as a whole: the files that
//! `tests/images/simulated-gpus.sh` needs in its folder.

use std::path::Path;

use xshell::cmd;

use xtask::workspace;

/// Fills `folder`. `built` has the simulator's programs and library, for any glibc that a machine
/// may have.
pub(super) fn install(built: &Path, folder: &Path) -> anyhow::Result<()> {
    let shell = workspace::shell()?;
    shell.create_dir(folder)?;
    shell.copy_file("tests/images/simulated-gpus.sh", folder)?;
    for name in ["gpu-simulator", "libsimulator.so"] {
        shell.copy_file(built.join(name), folder)?;
    }
    for name in ["models", "nodes", "faults"] {
        cmd!(shell, "cp --recursive tests/simulator/{name} {folder}")
            .quiet()
            .run()?;
    }
    Ok(())
}
