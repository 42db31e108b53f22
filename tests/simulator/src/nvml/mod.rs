//! libnvidia-ml: NVML's C interface, answered from the scenario and the node's shared state.
//!
//! One module a topic; `call` holds what every function shares. Functions of NVML that no module
//! answers are in `not_supported`, each by its name.

#![allow(non_snake_case, reason = "functions carry NVML's names")]

mod call;
mod clocks;
mod device;
mod ecc;
mod events;
mod export_table;
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
mod topology;

/// Every function of NVML that the library exports, a line each (`clients/nvml_symbols.py`).
const SYMBOLS: &str = include_str!("symbols.txt");

/// Whether NVML has a function of this name.
pub(crate) fn is_function(name: &str) -> bool {
    name == "nvmlInternalGetExportTable" || SYMBOLS.lines().any(|symbol| symbol == name)
}
