//! A fault: what goes wrong, on which GPUs, when, and which checks must see it.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A fault file (`faults/*.yaml`).
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// One line for `simulate list`.
    pub description: String,
    /// The node that `fault-matrix` puts it on; one with the hardware that can have this fault.
    #[serde(default = "default_node")]
    pub node: String,
    /// What `fault-matrix` must run to see it.
    #[serde(default)]
    pub level: Level,
    /// The GPU that it is on; 0 when neither this nor `gpus` is given.
    #[serde(default)]
    pub gpu: Option<u32>,
    /// `all`, or a list of GPUs.
    #[serde(default)]
    pub gpus: Option<GpuSelection>,
    /// From this long after the start of the node (`3s`).
    #[serde(default)]
    pub at: Option<String>,
    /// From this many launches on the GPU (`1000 launches`), or so much load (`1s of load`).
    #[serde(default)]
    pub after: Option<String>,
    /// New values by layer and path, such as `gpu.ecc.volatile.dram_uncorrectable: 2`.
    #[serde(default)]
    pub changes: serde_json::Map<String, serde_json::Value>,
    /// An Xid: a line in the kernel log, and an event of NVML's event sets.
    #[serde(default)]
    pub xid: Option<Xid>,
    /// Further messages in the kernel log; `{pci}` stands for the GPU's address, `{port}` for that
    /// of the port above it.
    #[serde(default)]
    pub kernel_log: Vec<String>,
    /// How many times the messages come, at once; `{n}` in a message is the number of the time,
    /// from 0.
    #[serde(default = "once")]
    pub kernel_log_times: u32,
    /// What follows later.
    #[serde(default)]
    pub then: Vec<Step>,
    /// Why no check trips, for faults that a GPU node must take without blaming its GPUs.
    #[serde(default)]
    pub harmless: Option<String>,
    /// Every check that is not green on a node with this fault, and its verdict. No other may be.
    /// Empty only with `harmless`.
    pub trips: BTreeMap<String, ExpectedVerdict>,
    /// The reaction of a sentinel that works the node's GPUs when the fault comes.
    #[serde(default)]
    pub sentinel: Option<SentinelExpectation>,
}

/// The state of the fault's GPUs below a sentinel, while it goes on working all others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SentinelExpectation {
    pub state: SentinelState,
    /// A part of the published reason or finding.
    pub because: String,
    /// That of `gpu-validator sentinel --workload`.
    #[serde(default = "memory_workload")]
    pub workload: String,
}

fn memory_workload() -> String {
    "memory".to_owned()
}

/// A state of the sentinel's status in which a GPU is not worked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SentinelState {
    /// Another process has the GPU.
    Away,
    /// The GPU's mode, or something else than a process, forbids the work.
    Withheld,
    /// A finding: it is left alone from then on.
    Ill,
}

impl SentinelState {
    /// The word in the status.
    pub fn word(self) -> &'static str {
        match self {
            Self::Away => "away",
            Self::Withheld => "withheld",
            Self::Ill => "ill",
        }
    }
}

fn default_node() -> String {
    "h200x8".to_owned()
}

/// A later part of a fault, on the same GPUs.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    #[serde(default)]
    pub at: Option<String>,
    #[serde(default)]
    pub after: Option<String>,
    #[serde(default)]
    pub changes: serde_json::Map<String, serde_json::Value>,
    #[serde(default)]
    pub xid: Option<Xid>,
    #[serde(default)]
    pub kernel_log: Vec<String>,
    #[serde(default = "once")]
    pub kernel_log_times: u32,
}

fn once() -> u32 {
    1
}

/// An Xid by its number and the text that follows it in the kernel log.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Xid {
    pub code: u32,
    /// What follows the number, such as
    /// `pid='<unknown>', name=<unknown>, GPU has fallen off the bus.`
    pub message: String,
}

/// The level of `gpu-validator run` that sees a fault.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    #[default]
    Quick,
    Standard,
    Extended,
}

/// The verdict that a check must have. A pass or a skip is never listed: everything that is not
/// listed must be one of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExpectedVerdict {
    Fail,
    Error,
    Warn,
}

/// GPUs by number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuSelection {
    All,
    These(Vec<u32>),
}

impl GpuSelection {
    /// The selected GPUs of a node with `count` GPUs.
    pub fn indices(&self, count: usize) -> Vec<u32> {
        match self {
            Self::All => (0..u32::try_from(count).unwrap_or(0)).collect(),
            Self::These(list) => list.clone(),
        }
    }
}

impl Serialize for GpuSelection {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::All => serializer.serialize_str("all"),
            Self::These(list) => list.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for GpuSelection {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SelectionVisitor;
        impl<'de> serde::de::Visitor<'de> for SelectionVisitor {
            type Value = GpuSelection;
            fn expecting(&self, formatter: &mut std::fmt::Formatter) -> std::fmt::Result {
                formatter.write_str("`all` or a list of GPU numbers")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<GpuSelection, E> {
                if text == "all" {
                    Ok(GpuSelection::All)
                } else {
                    Err(E::custom(format!(
                        "`{text}` is neither `all` nor a list of GPU numbers"
                    )))
                }
            }
            fn visit_seq<A: serde::de::SeqAccess<'de>>(
                self,
                mut seq: A,
            ) -> Result<GpuSelection, A::Error> {
                let mut list = Vec::new();
                while let Some(gpu) = seq.next_element()? {
                    list.push(gpu);
                }
                Ok(GpuSelection::These(list))
            }
        }
        deserializer.deserialize_any(SelectionVisitor)
    }
}

impl Fault {
    pub fn selection(&self) -> GpuSelection {
        match (&self.gpus, self.gpu) {
            (Some(selection), _) => selection.clone(),
            (None, gpu) => GpuSelection::These(vec![gpu.unwrap_or(0)]),
        }
    }

    /// The fault as steps, the first of which is its own values.
    pub fn steps(&self) -> Vec<Step> {
        let first = Step {
            at: self.at.clone(),
            after: self.after.clone(),
            changes: self.changes.clone(),
            xid: self.xid.clone(),
            kernel_log: self.kernel_log.clone(),
            kernel_log_times: self.kernel_log_times,
        };
        std::iter::once(first)
            .chain(self.then.iter().cloned())
            .collect()
    }
}
