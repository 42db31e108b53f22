//! Runs a program on a simulated node, with no more than this crate:
//!
//! ```text
//! cargo build -p simulator && cargo run -p simulator --example simulate -- NODE[+FAULT…] PROGRAM [ARGUMENT…]
//! ```

use anyhow::{Context, Result};
use simulator::{Catalogue, NodeRequest, prepare_node};
use std::process::Command;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let scenario = arguments
        .next()
        .context("usage: simulate NODE[+FAULT…] PROGRAM [ARGUMENT…]")?;
    let program = arguments.next().context("no program to run")?;
    let mut names = scenario.split('+').map(str::to_owned);
    let node = names.next().unwrap_or_default();
    let faults: Vec<String> = names.collect();
    // Cargo keeps the library that belongs to this build here; the copy in target/<profile> is made
    // by `cargo build` alone.
    let executable = std::env::current_exe()?;
    let profile = executable
        .ancestors()
        .nth(2)
        .context("the example is not in target/<profile>/examples")?;
    let folder = std::env::temp_dir().join(format!("gpu-simulator-{}", std::process::id()));
    let prepared = prepare_node(&NodeRequest {
        folder: &folder,
        library: &profile.join("deps/libsimulator.so"),
        catalogue: &Catalogue::shipped(),
        node: &node,
        faults: &faults,
        overrides: &[],
    })?;
    let status = Command::new(&program)
        .args(arguments)
        .envs(&prepared.environment)
        .status()
        .with_context(|| format!("run {program}"));
    std::fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))?;
    std::process::exit(status?.code().unwrap_or(1))
}
