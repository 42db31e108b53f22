//! Xid errors.

use std::sync::LazyLock;

use serde::Deserialize;

use crate::diagnosis::{CauseKind, RecommendedAction};

/// The meaning of an Xid and its evidence about the GPU.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Xid {
    pub number: u32,
    pub name: String,
    pub class: XidClass,
    /// NVIDIA's immediate resolution, as its catalogue names it: `RESET_GPU`; `NONE_PUBLISHED`
    /// where it names none.
    pub resolution: String,
    /// What a person should do.
    pub remedy: String,
    /// How other tools treat it, where they differ from this class.
    #[serde(default)]
    pub others: Option<String>,
}

/// Default class of an Xid; a profile may move numbers between fail, warn and ignore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum XidClass {
    /// The application's own doing: reported, never blames the GPU.
    Application,
    /// A memory error that was contained; the application must restart, the GPU stays usable.
    Contained,
    /// For information.
    Informational,
    /// The GPU must be reset.
    Reset,
    /// The machine must be restarted or replaced.
    Reboot,
    /// The hardware must be inspected.
    Hardware,
    /// Driver or firmware must be updated.
    Software,
    /// NVLink 5 messages, whose text states fatal or not.
    NvlinkBySeverity,
    /// No public source has its meaning.
    Unknown,
}

impl Xid {
    /// What to do after it: NVIDIA's immediate resolution, by class.
    pub fn recommended_action(&self) -> RecommendedAction {
        match self.class {
            XidClass::Reset | XidClass::NvlinkBySeverity => RecommendedAction::Reset,
            XidClass::Reboot => RecommendedAction::Reboot,
            XidClass::Hardware => RecommendedAction::Rma,
            XidClass::Software => RecommendedAction::FixSoftware,
            XidClass::Application
            | XidClass::Contained
            | XidClass::Informational
            | XidClass::Unknown => RecommendedAction::Drain,
        }
    }
}

/// What an Xid shows. Source of the grouping: the sections of NVIDIA's Xid catalogue (memory,
/// NVLink, GSP and microcontrollers, PCIe).
pub fn cause_of_xid(number: u32) -> CauseKind {
    match number {
        79 | 167 => CauseKind::GpuLost,
        48 | 63 | 64 | 92 | 94 | 95 | 140 | 156 | 157 | 160 | 161 | 171 | 172 => {
            CauseKind::GpuMemory
        }
        61 | 62 | 109 | 110 | 119 | 120 | 143 | 158 | 169 => CauseKind::GpuFirmware,
        74 | 121 | 137 | 144..=150 | 155 | 173 => CauseKind::Nvlink,
        54 | 162..=165 => CauseKind::PowerAndThermal,
        154 => CauseKind::RecoveryRequested,
        _ => CauseKind::GpuHardware,
    }
}

static XIDS: LazyLock<Vec<Xid>> = LazyLock::new(|| {
    serde_yaml::from_str(include_str!("../../data/xids.yaml"))
        .expect("a test parses the embedded table")
});

/// The row of this Xid.
pub fn xid(number: u32) -> Option<&'static Xid> {
    XIDS.iter().find(|row| row.number == number)
}

/// All Xids of the table, by number.
pub fn xids() -> &'static [Xid] {
    &XIDS
}
