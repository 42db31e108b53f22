//! Whether a program starts on a machine: toolkit, driver, compat package, GPU architecture,
//! framework build and Python.
//!
//! - [`compatibility`]: one build of CUDA code against one machine.
//! - [`explain`]: the same from a question such as `torch 2.11 cu126 on B200 driver 570`, without a
//!   machine.
//! - [`installed`]: the packages of an environment's facts, and what their proofs returned.
//! - [`messages`]: the causes of frameworks' error messages.
//! - [`subjects`]: which environments are judged, and their names in findings.
//! - [`tree`]: what `gpu-validator environment` prints.

mod builds;
pub mod compatibility;
mod device_code;
pub mod explain;
#[cfg(test)]
mod framework_checks;
pub mod installed;
pub mod messages;
pub mod subjects;
pub mod tree;

pub use crate::reference::VersionRequirement;
pub use builds::{FrameworkBuild, FrameworkRelease, framework_release, framework_releases};
pub use device_code::{CodeFit, CodeTarget};
