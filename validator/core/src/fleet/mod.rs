//! The reports of many nodes in one: every node's verdict, every failure with its GPU, and the GPUs
//! that are unlike others of their model.

mod node_report;
mod outliers;
mod render;
mod summary;
#[cfg(test)]
mod tests;

pub use node_report::{Kept, NodeReport};
pub use render::{Format, markdown};
pub use summary::Fleet;
