//! How much is looked at, and in which order.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How much a run looks at.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// An image that is being baked, also where the build instance has no GPU: drivers, services,
    /// files and leftovers on its disk. What needs a GPU is judged as at quick where there is one.
    Image,
    /// Reads everything, works no GPU: well under a second.
    Quick,
    /// Quick, and every GPU computes something that is verified.
    #[default]
    Standard,
    /// Standard, for longer and with more kinds of load.
    Extended,
}

impl Level {
    /// Every level, the lowest first.
    pub const ALL: [Self; 4] = [Self::Image, Self::Quick, Self::Standard, Self::Extended];

    /// Its name on the command line, in profiles and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Image => "image",
            Self::Quick => "quick",
            Self::Standard => "standard",
            Self::Extended => "extended",
        }
    }

    /// One line of help.
    pub fn help(self) -> &'static str {
        match self {
            Self::Image => {
                "An image that is being baked, also on a build instance without GPU: drivers, services, files and \
                 leftovers on its disk. Checks that need a GPU run as at level quick where there is one"
            }
            Self::Quick => "Reads everything and puts no load on GPUs: well under a second",
            // The time is that of BENCHMARKS.md, "four GPUs: run --level standard".
            Self::Standard => {
                "Quick, and burns every GPU for 10 s at its power limit, every result verified: 15 s on four H200s"
            }
            Self::Extended => {
                "Standard with a burn of 60 s in five precisions, and a pattern test of all free memory"
            }
        }
    }
}

impl std::fmt::Display for Level {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The three coarse stages of a run; a later one does not run when an earlier one makes it
/// meaningless.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// The operating system's side: PCI, kernel modules, device nodes, logs.
    Host,
    /// What NVML and the CUDA driver say.
    Gpu,
    /// GPUs at work.
    Load,
}

impl std::fmt::Display for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::Gpu => "gpu",
            Self::Load => "load",
        })
    }
}
