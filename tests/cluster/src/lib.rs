//! A kubelet and an API server of the tests' own. Each is right unless a test makes it wrong.

pub mod api_server;
mod device_taint_rules;
pub mod kubelet;
