//! Verified matrix products with nothing but the driver: the kernels of `KERNELS.md`, and what the host does around them.

pub(crate) mod kernels;
pub(crate) mod images;
mod localize;
pub(crate) mod operand;
mod proof;
mod report;
mod shape;
mod strip;
pub(crate) mod sweep;

pub(crate) use shape::Layout;
