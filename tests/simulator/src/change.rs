//! Faults set on a node while programs run on it.

use crate::node::Node;
use crate::resolve::{NodeChange, resolve_change};
use crate::scenario::SCENARIO_FILE;
use anyhow::{Context, Result};
use std::path::Path;

/// Changes a prepared node, for the programs that run on it as for those to come. Returns the
/// scenario's new name.
pub fn change_node(folder: &Path, change: &NodeChange<'_>) -> Result<String> {
    let lock = std::fs::File::create(folder.join("change.lock"))
        .with_context(|| format!("there is no simulated node in {}", folder.display()))?;
    lock.lock().context("wait for another change of the node")?;
    let node = Node::open(folder)?;
    let (_, resolved) = node.resolved();
    let changed = resolve_change(&resolved, change, node.state())?;
    let path = folder.join(SCENARIO_FILE);
    let new = path.with_extension("json.new");
    std::fs::write(&new, serde_json::to_vec(&changed)?)
        .with_context(|| format!("write {}", new.display()))?;
    std::fs::rename(&new, &path).with_context(|| format!("replace {}", path.display()))?;
    node.state().next_generation();
    node.advance();
    Ok(changed.name)
}
