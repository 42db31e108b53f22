//! `gpu-validator` answers one question about a machine: may this GPU node take work?
//!
//! ```text
//! probe -> facts -> checks -> findings -> report
//! ```
//!
//! - [`probe`] is the only part that looks at the world; it fills [`facts`], one plain value.
//! - load works the GPUs; what it saw is facts too.
//! - checks are pure: facts and [`profile`] in, [`findings`] out; see [`judge`].
//! - [`report`]s are pure: a [`findings::Run`] in, text out.

#[deny(clippy::disallowed_methods)]
mod burned;
#[deny(clippy::disallowed_methods)]
mod check;
#[deny(clippy::disallowed_methods)]
mod checks;
pub mod cli;
mod commands;
#[deny(clippy::disallowed_methods)]
mod device_ids;
#[deny(clippy::disallowed_methods)]
mod expect;
pub mod facts;
pub mod findings;
pub mod kernel_log;
pub mod level;
mod load;
#[deny(clippy::disallowed_methods)]
mod machine;
mod nearest_name;
pub mod probe;
mod process_stat;
pub mod profile;
pub mod reference;
#[deny(clippy::disallowed_methods)]
pub mod report;
mod runner_hook;
#[deny(clippy::disallowed_methods)]
mod tally;
#[cfg(test)]
mod test_machine;
#[deny(clippy::disallowed_methods)]
mod visible_devices;
pub mod worker;

pub use check::judge;
