//! A run of gpu-validator on another machine: the binary is copied there through the system's
//! OpenSSH, runs, its reports are brought back, and the other machine is left as it was.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

/// Writes a line to standard error. Unlike `eprintln!` it does not panic when the terminal is gone:
/// what was begun must still be brought to its end then.
macro_rules! say {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($words)*);
    }};
}

pub mod command;
mod destination;
pub mod interrupts;
mod profile_files;
pub mod reports;
pub mod session;

pub use destination::Destination;
