//! Variables of the environment that configure nothing: a mistyped name would otherwise be ignored
//! in silence.

use std::collections::BTreeSet;

use super::terminal::to_stderr;
use validator_core::nearest_name::nearest_name;
use validator_core::report::one_line;

const PREFIX: &str = "GPU_VALIDATOR_";
/// Read by other code than the command line's, and by the scripts that start this program.
const OTHERS: [&str; 3] = [
    crate::runtime_folder::FOLDER_VARIABLE,
    "GPU_VALIDATOR_HOOK_TOKEN",
    "GPU_VALIDATOR_BINARY",
];

/// Warns of every variable that begins as this program's and is none.
pub(crate) fn warn_of_unknown(program: &clap::Command) {
    let set = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
    for warning in warnings(program, set) {
        to_stderr(&warning);
    }
}

fn warnings(program: &clap::Command, set: impl Iterator<Item = String>) -> Vec<String> {
    let known = known_variables(program);
    let unknown = set.filter(|it| it.starts_with(PREFIX) && !known.contains(it));
    let warnings = unknown.map(|name| {
        let near = nearest_name(&name, known.iter().map(String::as_str));
        let near = near.map_or_else(String::new, |it| format!("; did you mean {it}?"));
        format!(
            "warning: {} is no variable of gpu-validator and has no effect{near}\n",
            one_line(&name)
        )
    });
    warnings.collect()
}

fn known_variables(command: &clap::Command) -> BTreeSet<String> {
    let own = command.get_arguments().filter_map(clap::Arg::get_env);
    let mut known: BTreeSet<String> = own.map(|it| it.to_string_lossy().into_owned()).collect();
    known.extend(command.get_subcommands().flat_map(known_variables));
    known.extend(OTHERS.map(str::to_owned));
    known
}

#[cfg(test)]
mod tests {
    use super::warnings;

    #[test]
    fn a_mistyped_variable_is_named_with_the_nearest() {
        let program = clap::Command::new("x").subcommand(
            clap::Command::new("y").arg(
                clap::Arg::new("junit")
                    .long("junit")
                    .env("GPU_VALIDATOR_JUNIT"),
            ),
        );
        let of = |names: &[&str]| warnings(&program, names.iter().map(|&it| it.to_owned()));
        let none: [String; 0] = [];
        assert_eq!(
            of(&["GPU_VALIDATOR_JUNIT", "GPU_VALIDATOR_RUNTIME_DIR", "PATH"]),
            none
        );
        assert_eq!(
            of(&["GPU_VALIDATOR_JUNT"]),
            [
                "warning: GPU_VALIDATOR_JUNT is no variable of gpu-validator and has no effect; did you mean \
              GPU_VALIDATOR_JUNIT?\n"
            ]
        );
    }
}
