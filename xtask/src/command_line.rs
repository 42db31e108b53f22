//! What all crates of tasks do alike with a command line.

use std::process::ExitCode;

/// Prints a line for the user. Unlike `eprintln!` it does not panic when the terminal is gone: what
/// was begun must still be brought to its end then.
#[macro_export]
macro_rules! say {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($words)*);
    }};
}

/// What the shell sees when the arguments themselves are wrong; the validator uses the same number.
pub const EXIT_CODE_BAD_INPUT: u8 = 3;

/// This process's arguments; the exit code where they are wrong, or where only help was wanted.
pub fn parse<CommandLine: clap::Parser>() -> Result<CommandLine, ExitCode> {
    CommandLine::try_parse().map_err(|error| {
        // Nothing is left to do when the terminal is gone.
        let _ = error.print();
        ExitCode::from(if error.use_stderr() {
            EXIT_CODE_BAD_INPUT
        } else {
            0
        })
    })
}

/// For tasks that succeed or fail.
pub fn code(outcome: anyhow::Result<()>) -> ExitCode {
    let outcome = outcome.map(|()| ExitCode::SUCCESS);
    outcome.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

/// For tasks whose exit code 1 is a verdict.
pub fn code_or_bad_input(outcome: anyhow::Result<ExitCode>) -> ExitCode {
    outcome.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::from(EXIT_CODE_BAD_INPUT)
    })
}

/// The `cargo xtask` lines of the guides, less these two words, for a test that parses them: those
/// of `tasks`, or all.
///
/// # Panics
/// Where a guide has lost its commands.
pub fn of_guides(tasks: &[&str]) -> Vec<&'static str> {
    let guides = [
        (include_str!("../../docs/ami.md"), 7),
        (include_str!("../../docs/github-actions.md"), 3),
        (include_str!("../../docs/kubernetes.md"), 12),
        (include_str!("../../docs/terraform.md"), 9),
    ];
    let mut all = Vec::new();
    for (guide, least) in guides {
        let lines = guide.lines();
        let commands: Vec<&str> = lines
            .filter_map(|line| line.strip_prefix("cargo xtask "))
            .collect();
        assert!(commands.len() >= least, "{commands:?}");
        all.extend(commands);
    }
    all.retain(|line| {
        let task = line.split_whitespace().next();
        tasks.is_empty() || task.is_some_and(|task| tasks.contains(&task))
    });
    all
}

/// Asserts that `CommandLine` parses every line of the guides that begins with one of `tasks`.
///
/// # Panics
/// Where it does not, or where fewer than `least` lines are found.
pub fn assert_parses_guides<CommandLine: clap::Parser>(tasks: &[&str], least: usize) {
    CommandLine::command().debug_assert();
    let commands = of_guides(tasks);
    assert!(commands.len() >= least, "{commands:?}");
    for command in commands {
        let words = ["xtask"].into_iter().chain(command.split_whitespace());
        if let Err(error) = CommandLine::try_parse_from(words) {
            panic!("cargo xtask {command}: {error}");
        }
    }
}
