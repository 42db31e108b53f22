//! Facts about a GPU node, and the pure functions from facts to verdicts and reports.
//!
//! ```text
//! facts + profile -> checks -> findings -> report
//! ```
//!
//! - [`facts`]: what a probe read, one serializable value; [`profile`]: what a node must be.
//! - [`judge()`] applies every check to every subject; [`findings::Run::judged`] is the same for a
//!   whole report.
//! - [`diagnosis`]: root causes, each with its evidence and one recommended action.
//! - [`report`]: functions from a run to text.
//!
//! Nothing here does IO, reads a clock or the environment; the crate depends on nothing that does.
//!
//! ```
//! use validator_core::facts::Facts;
//! use validator_core::findings::{ExitStatus, Run};
//! use validator_core::level::Level;
//! use validator_core::parse_profile;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // `gpu-validator collect -o facts.json` on the node writes facts.
//! let facts = Facts { level: Level::Standard, ..Facts::default() };
//! let profile = parse_profile("gpus: {count: 8}", "eight-gpus.yaml")?;
//! let run = Run::judged(facts, &profile, "eight-gpus.yaml", Level::Standard);
//! // These facts hold no GPU, so that no verdict passes.
//! assert_ne!(run.exit_status(), ExitStatus::Passed);
//! # Ok(())
//! # }
//! ```

// Tests read files; the functions under test do not.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod after_load;
pub mod allocation;
pub mod burned;
mod cause;
pub mod check;
mod checks;
pub mod comparison;
// Here and below: its texts come from outside, and an index past their end would be a panic.
#[cfg_attr(not(test), deny(clippy::indexing_slicing))]
pub mod device_ids;
pub mod diagnosis;
#[cfg_attr(not(test), deny(clippy::indexing_slicing))]
pub mod environment;
mod expect;
#[cfg_attr(not(test), deny(clippy::indexing_slicing))]
pub mod facts;
pub mod findings;
pub mod fleet;
pub mod gpu_names;
pub mod history;
mod judge;
#[cfg_attr(not(test), deny(clippy::indexing_slicing))]
pub mod kernel_log_events;
#[cfg_attr(not(test), deny(clippy::indexing_slicing))]
pub mod kernel_log_selection;
pub mod layouts;
pub mod level;
pub mod nearest_name;
pub mod plan;
pub mod profile;
pub mod queries;
pub mod reference;
pub mod report;
pub mod selection;
pub mod sentinel;
mod siblings;
mod tally;
#[doc(hidden)]
pub mod test_machine;
#[cfg_attr(not(test), deny(clippy::indexing_slicing))]
pub mod visible_devices;
mod words;
pub mod worker_id;
pub mod wrong_products;

pub use checks::ALL as CHECKS;
pub use judge::{check_ids, judge};

use std::path::Path;

use profile::{Profile, ProfileError, ProfileFiles};

/// Parses one profile's text; `name` stands for the file in errors. See [`profile::parse`].
pub fn parse_profile(text: &str, name: &str) -> Result<Profile, ProfileError> {
    profile::parse(text, name, &check_ids().collect::<Vec<_>>())
}

/// Reads a profile and the profiles that it extends. See [`profile::load`].
pub fn load_profile(path: &Path, files: &dyn ProfileFiles) -> Result<Profile, ProfileError> {
    profile::load(path, files, &check_ids().collect::<Vec<_>>())
}
