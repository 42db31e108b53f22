//! The folder that a run's reports are brought back to.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use serde_json::Value;

/// Each report: the validator's option for it, and its file name.
pub const REPORTS: [(&str, &str); 5] = [
    ("--junit", "report.junit.xml"),
    ("--json", "report.json"),
    ("--markdown", "report.md"),
    ("--html", "report.html"),
    ("--facts", "facts.json"),
];

/// What the validator printed.
pub const STDOUT: &str = "stdout.txt";
pub const STDERR: &str = "stderr.txt";

/// A folder of one run.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// Makes the folder that the user named; reports of an earlier run in it are removed.
    pub fn create(path: &Path) -> anyhow::Result<Folder> {
        Ok(Folder {
            path: existing_or_new(path)?,
        })
    }

    /// Makes a new folder in `parent`, named `name`, or `name-2` where that exists.
    pub fn create_in(parent: &Path, name: &str) -> anyhow::Result<Folder> {
        Ok(Folder {
            path: new_in(parent, name)?,
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The names of the reports that are there and not empty.
    pub fn written(&self) -> Vec<&'static str> {
        let names = REPORTS.iter().map(|(_, name)| *name);
        names
            .filter(|name| std::fs::metadata(self.file(name)).is_ok_and(|file| file.len() > 0))
            .collect()
    }

    /// A run that never started leaves no folder.
    pub fn remove_if_empty(&self) {
        let _ = std::fs::remove_dir(&self.path);
    }

    /// Fails when `code` claims that the machine was judged well and a report that would show it is
    /// not there. A simulated run must say so, and no other may.
    pub fn back_up(&self, code: u8, simulated: bool) -> anyhow::Result<()> {
        let written = self.written();
        let missing: Vec<&str> = REPORTS
            .iter()
            .map(|(_, name)| *name)
            .filter(|name| !written.contains(name))
            .collect();
        if matches!(code, 0 | 4) && !missing.is_empty() {
            bail!(
                "the validator ended with exit code {code}, but {} did not come back, so this is not a pass",
                missing.join(", ")
            );
        }
        if matches!(code, 0 | 4) {
            let report = self.json("report.json");
            if let Ok(report) = &report
                && report["simulated"].is_string() != simulated
            {
                bail!(
                    "report.json has {} for a run {} --simulate, so this is not a pass",
                    report["simulated"],
                    if simulated { "with" } else { "without" }
                );
            }
            let reported = report.map(|report| report["exit_code"].as_u64());
            match reported {
                Ok(Some(reported)) if reported == u64::from(code) => {}
                Ok(Some(reported)) => bail!(
                    "the validator ended with exit code {code}, but report.json has {reported}, so this is not a pass"
                ),
                Ok(None) => bail!(
                    "the validator ended with exit code {code}, but report.json holds no exit_code, so this is not a pass"
                ),
                Err(error) => bail!(
                    "the validator ended with exit code {code}, but {error:#}, so this is not a pass"
                ),
            }
        }
        Ok(())
    }

    /// Whether the facts say that no layer of the machine knows a GPU.
    pub fn found_no_gpu(&self) -> bool {
        self.json("facts.json")
            .is_ok_and(|facts| knows_no_gpu(&facts))
    }

    fn json(&self, name: &str) -> anyhow::Result<Value> {
        let text = std::fs::read_to_string(self.file(name))
            .with_context(|| format!("{name} cannot be read"))?;
        serde_json::from_str(&text).with_context(|| format!("{name} is not JSON"))
    }
}

/// Empties nothing: only old reports of the same names are removed, so that none is taken for this
/// run's.
fn existing_or_new(path: &Path) -> anyhow::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    std::fs::create_dir_all(&path)
        .with_context(|| format!("--out {} cannot be made", path.display()))?;
    for name in REPORTS
        .iter()
        .map(|(_, name)| *name)
        .chain([STDOUT, STDERR])
    {
        match std::fs::remove_file(path.join(name)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| {
                    format!("an old {name} in {} cannot be removed", path.display())
                });
            }
            _ => {}
        }
    }
    Ok(path)
}

fn new_in(parent: &Path, name: &str) -> anyhow::Result<PathBuf> {
    let parent = std::path::absolute(parent)?;
    std::fs::create_dir_all(&parent)
        .with_context(|| format!("{} cannot be made", parent.display()))?;
    // Two runs may start in the same second.
    for attempt in 1..100 {
        let path = match attempt {
            1 => parent.join(name),
            _ => parent.join(format!("{name}-{attempt}")),
        };
        match std::fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => {
                return Err(error).with_context(|| format!("{} cannot be made", path.display()));
            }
        }
    }
    bail!("{} holds a hundred runs of this second", parent.display())
}

fn knows_no_gpu(facts: &Value) -> bool {
    // PCI class 0x03 is a display controller, which is what a GPU is, also one that its driver does
    // not know.
    let is_gpu = |device: &Value| {
        device["class"]
            .as_u64()
            .is_some_and(|class| class >> 16 == 0x03)
    };
    let on_pci = facts["host"]["pci_devices"]["value"]
        .as_array()
        .is_some_and(|devices| devices.iter().any(is_gpu));
    let in_nvml = facts["gpus"]
        .as_array()
        .is_some_and(|gpus| !gpus.is_empty());
    !on_pci && !in_nvml
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::knows_no_gpu;

    #[test]
    fn a_gpu_that_any_layer_knows_is_a_gpu() {
        let pci = |class: u32| json!({"gpus": [], "host": {"pci_devices": {"value": [{"class": class}]}}});
        assert!(
            !knows_no_gpu(&pci(0x03_0200)),
            "a GPU without a driver is still there"
        );
        assert!(knows_no_gpu(&pci(0x02_0000)), "a network card is not a GPU");
        assert!(knows_no_gpu(
            &json!({"gpus": [], "host": {"pci_devices": {"not_read": "no /sys"}}})
        ));
        assert!(!knows_no_gpu(
            &json!({"gpus": [{"uuid": {"value": "GPU-1"}}]})
        ));
    }
}
