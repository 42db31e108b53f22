//! A simulated GPU node.
