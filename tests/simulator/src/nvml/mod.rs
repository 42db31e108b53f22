//! libnvidia-ml: NVML's C interface, answered from the scenario and the node's shared state.
//!
//! One module a topic; `call` holds what every function shares. Functions of NVML that no module answers are in
//! `not_supported`, each by its name.

#![allow(non_snake_case, reason = "functions carry NVML's names")]

mod call;
mod clocks;
mod device;
mod ecc;
mod events;
mod fabric;
mod fields;
mod memory;
mod mig;
mod not_supported;
mod nvlink;
mod pcie;
mod power;
mod processes;
mod settings;
mod system;
pub(crate) mod topology;
