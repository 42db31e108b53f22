//! Reports: pure functions of a [`Run`](crate::findings::Run), one module a format.
//!
//! What several formats show (the verdict in words, the faults, the coverage) is worked out once,
//! here, so that no two reports of one run can disagree.

mod allocation_table;
mod answer;
mod burn_rows;
mod coverage;
mod ctrf;
mod faults;
mod fleet;
mod github;
#[cfg(test)]
mod golden;
mod gpu_table;
mod html;
mod html_allocation;
mod html_burn;
mod human;
mod human_details;
mod json;
mod junit;
mod junit_xml;
mod layouts_table;
mod markdown;
mod measurements;
mod metrics;
mod node_summary;
mod ocptv;
mod page;
mod plot;
#[cfg(test)]
mod sample;
mod sentinel;
mod text;
mod text_columns;
mod time_span;
mod verdict;

pub use allocation_table::allocation_table;
pub use answer::answer_of;
pub use burn_rows::BurnRow;
pub use ctrf::ctrf;
pub use fleet::{FleetEntry, FleetTotals, fleet_json, fleet_line};
pub use github::github_annotations;
pub use github::workflow_command;
pub use html::html;
pub use human::human;
pub use json::{REPORT_FORMAT, Report, json};
pub use junit::junit;
pub use layouts_table::layouts_table;
pub use markdown::markdown;
pub(crate) use measurements::of as measurements_of;
pub use metrics::metrics;
pub(crate) use node_summary::Machine;
pub use node_summary::MachineGpu;
pub use ocptv::ocptv;
pub use page::HumanStyle;
pub use sentinel::sentinel_junit;
pub use text::{markdown as markdown_text, one_line, printable, visible_json};
pub use verdict::sentence as verdict_sentence;
pub use verdict::word as verdict_word;
