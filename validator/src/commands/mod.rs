//! The commands, one module each: the edge where arguments, files and the terminal are.

// Comments on arguments are the help text, where backticks are noise.
#[allow(clippy::doc_markdown)]
pub(crate) mod allocation;
#[allow(clippy::doc_markdown)]
pub(crate) mod burn;
mod burn_options;
mod burn_view;
#[allow(clippy::doc_markdown)]
pub(crate) mod checks;
pub(crate) mod collect;
pub(crate) mod diff;
#[allow(clippy::doc_markdown)]
pub(crate) mod environment;
#[allow(clippy::doc_markdown)]
pub(crate) mod fleet;
pub(crate) mod generate;
mod history;
#[allow(clippy::doc_markdown)]
pub(crate) mod hook;
pub(crate) mod judge;
#[allow(clippy::doc_markdown)]
pub(crate) mod kubernetes;
pub(crate) mod profile;
mod progress;
pub(crate) mod refused_arguments;
mod report_files;
#[allow(clippy::doc_markdown)]
mod report_options;
pub(crate) mod run;
#[allow(clippy::doc_markdown)]
pub(crate) mod run_remote;
pub(crate) mod running_burns;
pub(crate) mod schema;
mod selection;
#[allow(clippy::doc_markdown)]
pub(crate) mod sentinel;
mod simulated_ok;
#[allow(clippy::doc_markdown)]
pub(crate) mod terminal;
pub(crate) mod variables;
pub(crate) mod worker;

pub(crate) const EXIT_CODES: &str = "\
Exit codes:
  0  everything was judged and nothing failed; warnings are allowed
  1  at least one check failed: the node is not ready
  2  nothing failed, but something could not be judged (or the run was stopped): this is not a pass
  3  bad input: the profile or the arguments are wrong; nothing was judged
  4  nothing failed, and the only thing not judged is load on GPUs that others are using";
