//! The integration tests: the real binary on simulated nodes and recorded facts, and `cargo xtask` around it.

mod burn;
mod burn_detection;
mod burn_engines;
mod burns;
mod driver_faults;
mod healthy_nodes;
mod kubernetes;
mod node;
mod processes;
mod recorded_facts;
mod report_outputs;
mod runner_hooks;
mod scarce_resources;
mod ssh;
mod stopped_runs;
mod terraform;
mod validate_ami_aws;
mod workflow_scripts;
mod xtask;
