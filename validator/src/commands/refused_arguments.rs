//! Reports of an earlier run, when the arguments of this one are refused: they must not be taken
//! for this one's.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use super::report_files::ClaimedOutputs;

/// Options that name an output, with their variables.
const OUTPUTS: [(&str, &str); 6] = [
    ("--junit", "GPU_VALIDATOR_JUNIT"),
    ("--json", "GPU_VALIDATOR_JSON"),
    ("--markdown", "GPU_VALIDATOR_MARKDOWN"),
    ("--html", "GPU_VALIDATOR_HTML"),
    ("--metrics", "GPU_VALIDATOR_METRICS"),
    ("--facts", "GPU_VALIDATOR_FACTS"),
];
/// The option whose value is a format, a colon and an output.
const FORMATTED_OUTPUT: &str = "--report";
/// The same of `collect`.
const OUTPUTS_OF_COLLECT: [&str; 2] = ["--output", "-o"];

/// Removes the files that a command with these refused arguments would have written.
pub(crate) fn discard_outputs(arguments: &[OsString]) -> anyhow::Result<()> {
    let variable = |name: &str| std::env::var_os(name).filter(|it| !it.is_empty());
    let outputs = outputs_of(arguments, &variable);
    let outputs: Vec<&Path> = outputs.iter().map(PathBuf::as_path).collect();
    ClaimedOutputs::of_paths(&outputs, &[])?;
    Ok(())
}

fn words(arguments: &[OsString]) -> impl Iterator<Item = &str> {
    let words = arguments.iter().skip(1).filter_map(|it| it.to_str());
    words.filter(|it| !it.starts_with('-'))
}

/// Whether these are the arguments of a command that writes reports.
pub(crate) fn writes_reports(arguments: &[OsString]) -> bool {
    let mut words = words(arguments);
    match words.next().unwrap_or_default() {
        "run" | "judge" | "collect" | "allocation" => true,
        "burn" => !words.any(|it| matches!(it, "status" | "stop" | "wait")),
        "hook" => words.any(|it| it == "pre-job"),
        "kubernetes" => words.any(|it| it == "gate"),
        _ => false,
    }
}

/// Whether such a command still writes its reports when a signal stops it. The judgement of facts
/// and the parent of a burn in the background end at once.
pub(crate) fn stops_on_signals(arguments: &[OsString]) -> bool {
    writes_reports(arguments)
        && words(arguments).next() != Some("judge")
        && !arguments.iter().any(|it| it == "--detach")
}

/// clap gives nothing of arguments that it refuses, so that they are read once more, and leniently.
fn outputs_of(arguments: &[OsString], variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    if !writes_reports(arguments) {
        return Vec::new();
    }
    let command = words(arguments).next().unwrap_or_default();
    let is_output = |name: &str| {
        OUTPUTS.iter().any(|(option, _)| *option == name)
            || name == FORMATTED_OUTPUT
            || (command == "collect" && OUTPUTS_OF_COLLECT.contains(&name))
    };
    let mut outputs: Vec<PathBuf> = Vec::new();
    let mut rest = arguments.iter().skip(1);
    while let Some(argument) = rest.next() {
        match split(argument) {
            (name, Some(value)) if is_output(name) => outputs.push(path_of(name, value)),
            (name, None) if is_output(name) => {
                let value = rest.clone().next();
                // An option that lacks its value is followed by the next option.
                let value = value.filter(|it| !it.as_encoded_bytes().starts_with(b"--"));
                outputs.extend(value.map(|it| path_of(name, it)));
            }
            _ => {}
        }
    }
    let names = OUTPUTS.iter().map(|(_, name)| *name);
    outputs.extend(names.filter_map(variable).map(PathBuf::from));
    outputs
}

/// The path in an option's value: all of it, or what follows the format.
fn path_of(option: &str, value: &OsStr) -> PathBuf {
    let text = value.to_str().filter(|_| option == FORMATTED_OUTPUT);
    match text.and_then(|it| it.split_once(':')) {
        Some((_, path)) => path.into(),
        None => value.into(),
    }
}

/// `--json=a` as name and value.
fn split(argument: &OsStr) -> (&str, Option<&OsStr>) {
    use std::os::unix::ffi::OsStrExt as _;
    let bytes = argument.as_bytes();
    let Some(at) = bytes.iter().position(|it| *it == b'=') else {
        return (argument.to_str().unwrap_or_default(), None);
    };
    let (name, value) = bytes.split_at(at);
    let name = std::str::from_utf8(name).unwrap_or_default();
    (name, value.get(1..).map(OsStr::from_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outputs(line: &str, variables: &[(&str, &str)]) -> Vec<String> {
        let arguments: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        let variable = |name: &str| {
            let found = variables.iter().find(|(it, _)| *it == name);
            found.map(|(_, value)| OsString::from(*value))
        };
        let outputs = outputs_of(&arguments, &variable).into_iter();
        outputs.map(|it| it.display().to_string()).collect()
    }

    #[test]
    fn outputs_are_found_wherever_they_are_named() {
        assert_eq!(
            outputs("gpu-validator run --bogus --json a --junit=b --facts", &[]),
            ["a", "b"]
        );
        assert_eq!(outputs("gpu-validator collect -o a --x", &[]), ["a"]);
        let line = "gpu-validator judge --x --report ctrf:a --report=ocptv:b:c --json ctrf:d";
        assert_eq!(outputs(line, &[]), ["a", "b:c", "ctrf:d"]);
        assert_eq!(
            outputs("gpu-validator hook pre-job --x --json a", &[]),
            ["a"]
        );
        let set = [("GPU_VALIDATOR_METRICS", "m")];
        assert_eq!(outputs("gpu-validator kubernetes gate --x", &set), ["m"]);
        assert_eq!(
            outputs("gpu-validator run --json --junit b", &set),
            ["b", "m"]
        );
    }

    #[test]
    fn commands_that_write_no_report_discard_none() {
        let set = [("GPU_VALIDATOR_JSON", "a")];
        for line in [
            "gpu-validator",
            "gpu-validator burn-it --json a",
            "gpu-validator checks explain --json a",
            "gpu-validator hook post-job --json a",
            "gpu-validator kubernetes rbac --json a",
        ] {
            assert!(outputs(line, &set).is_empty(), "{line}");
        }
    }
}
