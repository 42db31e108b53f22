//! `libcublasLt.so`: matrix products on a simulated node.
//!
//! Products are computed in FP64 and rounded once to the result's type (INT8 in integers), so they
//! are exact wherever the hardware's own sums are. A product of operands that were multiplied
//! before is taken from memory.

#![allow(unsafe_code, reason = "cuBLASLt's C interface")]
#![allow(non_snake_case, reason = "NVIDIA's names")]
#![allow(
    clippy::missing_safety_doc,
    reason = "as NVIDIA's documentation asks of each pointer"
)]

pub mod api;
mod matrix;
mod product;
