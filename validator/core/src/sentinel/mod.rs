//! The sentinel's policy: when idle GPUs are worked, and when they are yielded. Pure: observations
//! carry their times.
//!
//! - [`policy`]: the state machine of every GPU, from observations to orders
//! - [`memory_account`]: which of a GPU's memory the sentinel's own worker explains
//! - [`duty`]: the duty cycle that keeps a GPU below a power cap
//! - [`health`]: what is a finding about a GPU
//! - [`status`]: the published status, its metrics and its text

pub mod duty;
pub mod health;
pub mod memory_account;
pub mod policy;
pub mod status;
