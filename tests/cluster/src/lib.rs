//! A kubelet and an API server of the tests' own. Each is right unless a test makes it wrong.

pub mod api_server;
pub mod kubelet;
