//! The commands, one module each: the edge where arguments, files and the terminal are.

// Comments on arguments are the help text, where backticks are noise.
#[allow(clippy::doc_markdown)]
pub(crate) mod burn;
mod burn_options;
mod burn_view;
#[allow(clippy::doc_markdown)]
pub(crate) mod checks;
pub(crate) mod collect;
pub(crate) mod generate;
#[allow(clippy::doc_markdown)]
pub(crate) mod hook;
pub(crate) mod judge;
pub(crate) mod profile;
mod progress;
mod report_files;
#[allow(clippy::doc_markdown)]
mod report_options;
pub(crate) mod run;
mod running_burns;
pub(crate) mod schema;
#[allow(clippy::doc_markdown)]
pub(crate) mod terminal;

pub(crate) use report_files::write_whole;
