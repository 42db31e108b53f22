//! The integration tests: the real binary on simulated nodes and recorded facts, and `cargo xtask`
//! around it.

mod allocation;
mod api_server_tls;
mod attack;
mod burn;
mod burn_detection;
mod burn_engines;
mod burns;
mod device_plugin;
mod driver_faults;
mod environment;
mod environment_links;
mod guides;
mod healthy_nodes;
mod install_script;
mod job_control;
mod kubernetes;
mod layouts;
mod node;
mod processes;
mod recorded_facts;
mod report_outputs;
mod run_remote;
mod runner_hooks;
mod scarce_resources;
mod selected_and_compared;
mod sentinel;
mod slurm;
mod ssh;
mod stopped_runs;
mod terraform;
mod validate_ami_aws;
mod workflow_scripts;
mod workloads;
mod xtask;
