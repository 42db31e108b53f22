//! A simulated GPU node: NVIDIA's driver libraries (NVML, the CUDA driver, cuBLASLt) with their
//! real C interfaces, driven by a scenario, and the host's files around them.
//!
//! The shared library is what programs under test load in place of the driver's; this crate's Rust
//! interface lists nodes and faults, prepares a node's folder, and reads its state. See README.md.

#![allow(
    clippy::struct_excessive_bools,
    reason = "each flag stands for one of the hardware's own"
)]
#![allow(
    clippy::doc_markdown,
    reason = "NVLink, InfoROM and their like are words of the field, not code"
)]

pub mod catalogue;
pub mod change;
pub mod cublaslt;
pub mod cuda;
pub(crate) mod dotted_path;
pub mod dynamics;
pub(crate) mod elf;
pub mod faults;
pub mod gpu;
pub mod host;
pub mod instances;
pub mod marker;
pub mod node;
pub mod number;
pub mod nvml;
pub mod prepare;
pub(crate) mod product;
pub mod quantity;
pub mod resolve;
pub mod scenario;
pub mod state;
mod system_path;
mod threads;
pub mod wrong_results;

pub use catalogue::{Catalogue, Kind};
pub use prepare::{NodeRequest, PreparedNode, prepare_node};
