//! CUDA driver API errors that a node can be blamed for.

use std::sync::LazyLock;

use serde::Deserialize;

/// The meaning of a `CUresult` for the machine.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CudaErrorExplanation {
    pub code: u32,
    /// `CUDA_ERROR_SYSTEM_NOT_READY`.
    pub name: String,
    pub meaning: String,
    pub remedy: String,
}

static CUDA_ERRORS: LazyLock<Vec<CudaErrorExplanation>> = LazyLock::new(|| {
    serde_yaml::from_str(include_str!("../../data/cuda_errors.yaml"))
        .expect("a test parses the embedded table")
});

/// The explanation of this `CUresult`, where there is one.
pub fn explain_cuda_error(code: u32) -> Option<&'static CudaErrorExplanation> {
    CUDA_ERRORS.iter().find(|row| row.code == code)
}

#[cfg(test)]
pub(super) fn cuda_errors() -> &'static [CudaErrorExplanation] {
    &CUDA_ERRORS
}
