//! Servers of this machine's own, for as long as a task needs them.

use std::net::TcpListener;

/// A port of 127.0.0.1 that nothing listens on now.
pub fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}
