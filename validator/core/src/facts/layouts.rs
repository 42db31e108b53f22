//! A user's own command under several layouts of GPUs.

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Reading;

/// Which GPUs a command is given.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// The last GPU, so that a command which takes GPU 0 regardless is found.
    Single,
    /// Every GPU.
    All,
    /// Every other GPU from the first on, so that numbers inside and outside differ.
    Subset,
    /// No GPU: the command must fall back to the CPU.
    None,
}

impl Layout {
    pub const EACH: [Self; 4] = [Self::Single, Self::All, Self::Subset, Self::None];

    pub fn name(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::All => "all",
            Self::Subset => "subset",
            Self::None => "none",
        }
    }
}

/// The request, and one entry for each layout.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LayoutFacts {
    /// The command with its arguments.
    pub command: Vec<String>,
    pub time_limit_s: f64,
    /// GPUs that no layout has because other processes use them, by UUID.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub busy: Vec<String>,
    pub runs: Vec<LayoutRun>,
}

/// The command under one layout.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LayoutRun {
    pub layout: Layout,
    /// UUIDs of the GPUs.
    pub given: Vec<String>,
    /// The value of `CUDA_VISIBLE_DEVICES`: UUIDs of GPUs or of MIG devices.
    pub visible_devices: String,
    /// Why the layout does not apply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// `NotRead` where it was not started, or not followed to its end.
    pub end: Reading<LayoutEnd>,
    pub seconds: f64,
    /// The end of standard output, and of standard error.
    pub stdout: String,
    pub stderr: String,
    /// Of both, from the beginning.
    pub output_bytes: u64,
    /// Lines of the output with a known cause, the first one of each cause.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub messages: Vec<String>,
    /// Every GPU of the node, by UUID.
    pub gpus: BTreeMap<String, LayoutGpuUse>,
    /// How often NVML was read for all GPUs while the command ran.
    pub rounds: u64,
    /// Why NVML was not read to the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub view_trouble: Option<String>,
    /// Processes that the command left when it had ended, which were ended then.
    pub survivors: u32,
    /// Shared memory segments of this user that were not there before, by name.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub shared_memory_left: BTreeSet<String>,
    /// Processes of this control group that the kernel ended for want of memory meanwhile.
    pub oom_kills: Reading<u64>,
}

impl LayoutRun {
    pub fn of(layout: Layout, given: Vec<String>) -> Self {
        Self {
            layout,
            given,
            visible_devices: String::new(),
            skipped: None,
            end: Reading::NotRead("the command was not started".to_owned()),
            seconds: 0.0,
            stdout: String::new(),
            stderr: String::new(),
            output_bytes: 0,
            messages: Vec::new(),
            gpus: BTreeMap::new(),
            rounds: 0,
            view_trouble: None,
            survivors: 0,
            shared_memory_left: BTreeSet::new(),
            oom_kills: Reading::NotSupported,
        }
    }
}

/// How a command ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum LayoutEnd {
    Exited {
        status: i32,
    },
    Killed {
        signal: i32,
    },
    TimedOut {
        seconds: f64,
    },
    /// The program does not exist, or may not be started.
    NotStarted {
        reason: String,
    },
}

/// What a GPU showed while the command ran.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LayoutGpuUse {
    /// Processes of the command.
    pub own: BTreeSet<u32>,
    /// Processes that were not there before and are not of the command.
    pub others: BTreeSet<u32>,
    /// Memory in use beyond that before, at most.
    pub peak_bytes: u64,
    /// The same within 2 s after the end; `None` where it was not read.
    pub left_bytes: Option<u64>,
}
