//! The symbol that marks a driver library as simulated.

#![allow(unsafe_code, reason = "an exported C symbol")]

use crate::node::Node;
use std::ffi::{CString, c_char};
use std::sync::OnceLock;

/// The scenario's name with its faults, such as `p5.48xlarge+xid-79`; the empty string when there
/// is no node.
///
/// Real driver libraries have no such symbol, so its presence alone shows that a run is simulated.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_simulator_scenario() -> *const c_char {
    static NAME: OnceLock<CString> = OnceLock::new();
    NAME.get_or_init(|| {
        let name = Node::of_this_process().map_or("", Node::name);
        CString::new(name).unwrap_or_default()
    })
    .as_ptr()
}
