//! Values of the command line whose types are in `validator_core`, which does not depend on clap.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use validator_core::facts::Precision;
use validator_core::level::Level;
use validator_core::plan::EngineChoice;

/// The values of one option: each with its name and one line of help.
fn one_of<T>(
    values: &'static [T],
    describe: fn(T) -> PossibleValue,
) -> impl TypedValueParser<Value = T>
where
    T: Copy + Send + Sync + 'static,
{
    let names = values.iter().map(move |it| describe(*it));
    PossibleValuesParser::new(names).try_map(move |name| {
        let mut matching = values
            .iter()
            .filter(|it| describe(**it).matches(&name, false));
        matching.next().copied().ok_or("unknown value")
    })
}

/// `image`, `quick`, `standard`, `extended`.
pub(crate) fn level() -> impl TypedValueParser<Value = Level> {
    one_of(&Level::ALL, |it| {
        PossibleValue::new(name(it)).help(it.help())
    })
}

/// `fp64` to `fp8`.
pub(crate) fn precision() -> impl TypedValueParser<Value = Precision> {
    one_of(&Precision::ALL, |it| PossibleValue::new(it.name()))
}

/// `auto`, `cublaslt`, `ptx`.
pub(crate) fn engine() -> impl TypedValueParser<Value = EngineChoice> {
    one_of(&EngineChoice::ALL, |it| {
        let (name, help) = it.name_and_help();
        PossibleValue::new(name).help(help)
    })
}

fn name(level: Level) -> &'static str {
    level.name()
}
