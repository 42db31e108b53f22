//! `gpu-validator` answers one question about a machine: may this GPU node take work?
//!
//! ```text
//! probe -> facts -> checks -> findings -> report
//! ```
//!
//! - [`probe`] is the only part that reads the node; it fills [`validator_core::facts`], one plain
//!   value.
//! - [`workload`]s put verified work on the GPUs in [`worker`] processes; their results are facts
//!   too.
//! - A [`session`] runs the stages: it owns probes, workers that stand by, and probes that are
//!   deferred until after the load.
//! - Checks, findings and reports are the crate `validator_core`: pure functions, without IO.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]
// What comes from outside may be of any length: an index past its end would be a panic.
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

pub mod cli;
mod cli_values;
mod commands;
#[expect(
    clippy::indexing_slicing,
    reason = "tables of this crate and of the size that it requested"
)]
mod cuda;
mod driver_libraries;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod interrupt;
mod job_control;
mod owned_folder;
mod plan;
mod probe;
mod process_stat;
mod profile_file;
mod runner_hook;
mod runtime_folder;
mod sentinel_requests;
mod session;
mod threads;
mod timed;
mod worker;
#[expect(
    clippy::indexing_slicing,
    reason = "operands and products of sizes that the workload chose"
)]
mod workload;
