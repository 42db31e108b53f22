//! A healthy host and CUDA driver library.

use crate::facts::{Facts, HostFacts};

/// What the host and libcuda of a healthy machine say.
pub(super) fn add_host_and_cuda(facts: &mut Facts) {
    facts.host = HostFacts::default();
}
