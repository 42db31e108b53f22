//! The host side of a node, as files below a sysroot.

use crate::scenario::{Scenario, ScheduledEvent};
use anyhow::{Context, Result};
use std::fmt::Write as _;
use std::path::Path;

/// NVSwitch bridges are on the buses from this one on.
pub(crate) const FIRST_NVSWITCH_BUS: u32 = 0xc0;

/// Writes the host's files. Events that happened before the start go to the kernel log.
pub fn write_sysroot(sysroot: &Path, scenario: &Scenario, events: &[ScheduledEvent]) -> Result<()> {
    let lines: Vec<String> = scenario
        .host
        .kernel_log
        .iter()
        .cloned()
        .chain(
            events
                .iter()
                .filter(|event| event.change.is_none())
                .flat_map(|event| event.kernel_log.clone()),
        )
        .collect();
    let mut log = String::new();
    for (index, line) in lines.iter().enumerate() {
        let (sequence, time_us) = (1000 + index, 5_000_000 + index * 1000);
        writeln!(log, "6,{sequence},{time_us},-;{line}")?;
    }
    let path = sysroot.join("dev");
    std::fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
    std::fs::write(path.join("kmsg"), log).context("write the kernel log")
}
