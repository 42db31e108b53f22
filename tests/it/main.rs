//! The integration tests: the release binary on simulated nodes and recorded facts.

mod ssh;
mod xtask;
