//! Verified products of all precisions in turn: the detail of a run of workload `gemm`.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{CopyProof, Precision, PrecisionRun};

/// How much of each precision was verified; every precision that the GPU has kernels of is there.
pub type PrecisionCoverage = BTreeMap<Precision, VerifiedProducts>;

/// Products whose every element was compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VerifiedProducts {
    pub products: u64,
    /// Time of the products on the GPU.
    pub seconds: f64,
}

/// What only the workload `gemm` knows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmDetail {
    pub coverage: PrecisionCoverage,
    /// Copies between host and GPU, before the first product.
    pub copies: Option<CopyProof>,
    /// The first products that were wrong, or whose reference was.
    pub wrong: Option<Box<PrecisionRun>>,
}

impl GemmDetail {
    /// Its name in [`super::WorkloadRun::detail`].
    pub const NAME: &str = "gemm";
}
