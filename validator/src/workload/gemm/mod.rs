//! Verified matrix products: with nothing but the driver by the kernels of `KERNELS.md`, or by
//! cuBLASLt, and what the host does around them.

mod arena;
pub(crate) mod burn;
pub(crate) mod cublaslt;
pub(crate) mod images;
mod intervals;
pub(crate) mod kernels;
mod localize;
pub(crate) mod operand;
pub(crate) mod operand_proof;
mod product;
mod proof;
mod reference;
mod report;
pub(crate) mod rotation;
mod shape;
mod sizing;
mod strip;
pub(crate) mod sweep;
mod trial;
