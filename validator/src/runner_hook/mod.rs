//! What a CI runner's hooks work with: the runner's own GPUs, the record of its job, its
//! quarantine, what a job left.
//!
//! The hooks themselves are commands (`commands/hook`).

pub(crate) mod assigned_gpus;
pub(crate) mod job_record;
pub(crate) mod leftovers;
pub(crate) mod quarantine;
pub(crate) mod runner_labels;
pub(crate) mod state_folder;
