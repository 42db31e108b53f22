//! A kubelet and an API server of the tests' own. Each is right unless it is told how to be wrong.

pub mod api_server;
pub mod kubelet;
