//! The commands, one module each: the edge where arguments, files and the terminal are.

pub(crate) mod checks;
pub(crate) mod collect;
pub(crate) mod generate;
pub(crate) mod judge;
pub(crate) mod profile;
mod progress;
mod report_files;
mod report_options;
pub(crate) mod run;
pub(crate) mod schema;
pub(crate) mod terminal;
