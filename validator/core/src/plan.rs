//! Choices about load that profile, command line and facts share.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The GEMM implementation of a burn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EngineChoice {
    /// The one that draws more power when both are tried; at equal power, cuBLASLt if it is clearly
    /// faster
    #[default]
    Auto,
    /// cuBLASLt, which must be installed
    Cublaslt,
    /// The embedded kernels, which need the driver alone
    Ptx,
}

impl EngineChoice {
    /// Every choice.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Cublaslt, Self::Ptx];

    /// Its name on the command line and in a profile, and one line of help.
    pub fn name_and_help(self) -> (&'static str, &'static str) {
        match self {
            Self::Auto => (
                "auto",
                "The one that draws more power when both are tried; at equal power, cuBLASLt if it is clearly faster",
            ),
            Self::Cublaslt => ("cublaslt", "cuBLASLt, which must be installed"),
            Self::Ptx => ("ptx", "The embedded kernels, which need the driver alone"),
        }
    }
}
