//! `gpu-validator schema`: the JSON Schema of what is read and written.

use schemars::schema_for;

use super::terminal::to_stdout;
use validator_core::findings::ExitStatus;

/// Print the JSON Schema of a file format
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[arg(value_enum)]
    format: Format,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Format {
    /// Node requirements (profile)
    Profile,
    /// The JSON report
    Report,
    /// What was seen of a machine
    Facts,
}

pub(crate) fn schema(arguments: &Arguments) -> ExitStatus {
    let schema = match arguments.format {
        Format::Profile => schema_for!(validator_core::profile::Profile),
        Format::Report => schema_for!(validator_core::report::Report),
        Format::Facts => schema_for!(validator_core::facts::Facts),
    };
    let mut text = serde_json::to_string_pretty(&schema).unwrap_or_default();
    text.push('\n');
    to_stdout(&text);
    ExitStatus::Passed
}
