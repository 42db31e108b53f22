//! What the simulator made wrong on purpose: the truth that a verification is measured by.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;

/// In the node's folder, a line a result.
const FILE: &str = "wrong-results.jsonl";

/// The result of one launch that was spoiled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WrongResult {
    /// As the scenario numbers them.
    pub gpu: usize,
    pub kernel: String,
    /// Number of the launch among those of the kernels that the fault is about.
    pub launch: u64,
    pub areas: Vec<WrongArea>,
}

/// A rectangle of elements of which every one is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WrongArea {
    pub row: u64,
    pub column: u64,
    pub rows: u64,
    pub columns: u64,
    /// The multiprocessor that computed it, where the kernel's tiles are known.
    pub sm: Option<u32>,
    /// Bits of the first element that are not what they were.
    pub flipped_bits: u64,
}

/// Everything that was spoiled on the node, in the order in which it was.
pub fn read(node_folder: &Path) -> Result<Vec<WrongResult>> {
    let path = node_folder.join(FILE);
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text =
        std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let parse = |line: &str| {
        serde_json::from_str(line).with_context(|| format!("parse {}: {line}", path.display()))
    };
    text.lines().map(parse).collect()
}

/// Adds one; a line is one write, so that processes do not mix theirs.
pub(crate) fn append(node_folder: &Path, result: &WrongResult) -> Result<()> {
    let mut line = serde_json::to_vec(result).context("write as JSON")?;
    line.push(b'\n');
    let mut file = OpenOptions::new()
        .append(true)
        .create(true)
        .open(node_folder.join(FILE))?;
    file.write_all(&line)?;
    Ok(())
}
