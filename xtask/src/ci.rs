//! `cargo xtask ci`: everything that CI checks, in order, stopping at the first failure.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use crate::workspace;

/// Run everything that CI checks; needs no GPU
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Only these steps [default: all]
    #[arg(value_name = "STEP", value_parser = step_names())]
    steps: Vec<String>,
    /// How many inputs each fuzz target tries
    #[arg(long, default_value_t = 50_000)]
    fuzz_inputs: u32,
}

/// One step. What is shown is what is run, so it can be repeated by hand.
#[derive(Debug)]
struct Step {
    name: &'static str,
    command: String,
    /// The step before it, if both run at the same time.
    beside: Option<&'static str>,
}

/// The order is that of cost: what takes seconds comes first.
///
/// The advisories of cargo-deny are left out: they come from a database on GitHub that changes under a commit, so they
/// belong to a scheduled job and not to the question whether this commit is right.
fn steps(fuzz_inputs: u32) -> Vec<Step> {
    let tools = workspace::tools();
    let (deny, linters) = (
        tools.join("cargo-deny/bin/cargo-deny"),
        tools.join("linters/bin"),
    );
    let step = |name, command: &str| Step {
        name,
        command: command.to_owned(),
        beside: None,
    };
    vec![
        step("fmt", "cargo fmt --all --check"),
        step("codegen", "cargo xtask codegen --check"),
        step(
            "shell",
            &format!(
                "cargo xtask tools linters && git ls-files -z .ci/run '*.sh' | xargs -0 {}/shellcheck",
                linters.display()
            ),
        ),
        // The folder's copies in .github are what GitHub reads; a test says that both are the same.
        step(
            "workflows",
            &format!(
                "cargo xtask tools linters actionlint \
                 && {actionlint} -shellcheck {linters}/shellcheck -pyflakes= \
                 && {linters}/shellcheck --version >/dev/null \
                 && {linters}/zizmor --offline --strict-collection --persona auditor --quiet .github workflows \
                 && {linters}/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml \
                 && {linters}/check-jsonschema --builtin-schema vendor.github-actions workflows/*/action.yml",
                actionlint = tools.join("actionlint/actionlint").display(),
                linters = linters.display(),
            ),
        ),
        step(
            "clippy",
            "cargo clippy --workspace --all-targets --locked -- -D warnings",
        ),
        step(
            "doc",
            "RUSTDOCFLAGS='-D warnings -A rustdoc::private_intra_doc_links' cargo doc --workspace --no-deps --document-private-items --locked",
        ),
        step(
            "deny",
            &format!(
                "cargo xtask tools cargo-deny && {} check licenses bans sources",
                deny.display()
            ),
        ),
        step("terraform", "cargo xtask tf check"),
        step(
            "manifests",
            &format!(
                "cargo xtask k8s check && cargo xtask tools linters && {}/hadolint manifests/kubernetes/Dockerfile",
                linters.display()
            ),
        ),
        step("test", "cargo test --workspace --locked --no-fail-fast"),
        step("dist", "cargo xtask dist --verify --sbom"),
        // The portable binary's linker is one thread for minutes, and so is the compiler of what is fuzzed.
        Step {
            beside: Some("dist"),
            ..step("fuzz", &format!("cargo xtask fuzz --inputs {fuzz_inputs}"))
        },
        step("validator-image", "cargo xtask validator-image check"),
        step("images", "cargo xtask images"),
        step("fault-matrix", "cargo xtask fault-matrix"),
        step("junit-readers", "cargo xtask junit-readers"),
        step("nvml-clients", "cargo xtask nvml-clients"),
    ]
}

fn step_names() -> clap::builder::PossibleValuesParser {
    steps(0)
        .iter()
        .map(|step| step.name)
        .collect::<Vec<_>>()
        .into()
}

pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    let mut steps = steps(arguments.fuzz_inputs);
    if !arguments.steps.is_empty() {
        steps.retain(|step| arguments.steps.iter().any(|wanted| wanted == step.name));
    }
    let started = Instant::now();
    let mut tests = Tests::default();
    let outcome = run_steps(&steps, &mut tests);
    let code = match outcome {
        Ok(()) => {
            println!(
                "\nall {} steps passed in {:.0} s",
                steps.len(),
                started.elapsed().as_secs_f64()
            );
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("\n{error:#}");
            ExitCode::FAILURE
        }
    };
    // The very last line, alone: readers of the log look for it there.
    if tests != Tests::default() {
        println!("{tests}");
    }
    code
}

fn run_steps(steps: &[Step], tests: &mut Tests) -> anyhow::Result<()> {
    let mut left = steps.iter().zip(1..).peekable();
    while let Some((step, number)) = left.next() {
        let announce = |number: usize, Step { name, command, .. }: &Step| {
            println!("\n== {number}/{} {name}: {command}", steps.len());
        };
        let beside = match left.next_if(|(it, _)| it.beside == Some(step.name)) {
            Some((step, number)) => Some((Beside::start(step)?, number)),
            None => None,
        };
        announce(number, step);
        let outcome = run_step(step, tests);
        // Waited for in any case: nothing is left running behind a failure.
        let beside = beside.map_or(Ok(()), |(it, number)| {
            announce(number, it.step);
            it.finish()
        });
        outcome.and(beside)?;
    }
    Ok(())
}

fn run_step(step: &Step, tests: &mut Tests) -> anyhow::Result<()> {
    let started = Instant::now();
    let passed = if step.name == "test" {
        run_tests(&step.command, tests)?
    } else {
        shell(&step.command).status()?.success()
    };
    step.tell(passed, started.elapsed())
}

impl Step {
    fn tell(&self, passed: bool, took: Duration) -> anyhow::Result<()> {
        let Self { name, command, .. } = self;
        let seconds = took.as_secs_f64();
        if !passed {
            bail!("FAILED: {name}, after {seconds:.1} s; to repeat it:\n  {command}");
        }
        println!("== ok, {seconds:.1} s");
        Ok(())
    }
}

/// A step that runs beside another, whose output is shown when both have ended.
#[derive(Debug)]
struct Beside<'s> {
    step: &'s Step,
    started: Instant,
    output: PathBuf,
    child: Child,
}

impl<'s> Beside<'s> {
    fn start(step: &'s Step) -> anyhow::Result<Self> {
        let output = workspace::target().join(format!("ci-{}.log", step.name));
        let file = File::create(&output).with_context(|| output.display().to_string())?;
        let mut command = shell(&step.command);
        command.stdout(file.try_clone()?).stderr(file);
        Ok(Self {
            step,
            started: Instant::now(),
            output,
            child: command.stdin(Stdio::null()).spawn()?,
        })
    }

    fn finish(mut self) -> anyhow::Result<()> {
        let passed = self.child.wait()?.success();
        let took = self.started.elapsed();
        let output = std::fs::read(&self.output)?;
        print!("{}", String::from_utf8_lossy(&output));
        self.step.tell(passed, took)
    }
}

fn shell(command: &str) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).current_dir(workspace::root());
    shell
}

/// Runs the tests, passing their output on, and adds up what each test binary says at its end.
fn run_tests(command: &str, tests: &mut Tests) -> anyhow::Result<bool> {
    let mut child = shell(command).stdout(Stdio::piped()).spawn()?;
    let stdout = child.stdout.take().context("stdout is not a pipe")?;
    for line in BufReader::new(stdout).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        println!("{line}");
        tests.add(&line);
    }
    let status = child.wait()?;
    // A run of which nothing was understood must not look like one in which nothing failed.
    Ok(status.success() && tests.failed == 0 && tests.passed > 0)
}

/// The sum over all test binaries.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tests {
    passed: u64,
    failed: u64,
    skipped: u64,
}

impl Tests {
    /// Reads `test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; …`.
    fn add(&mut self, line: &str) {
        let Some((_, counts)) = line
            .strip_prefix("test result: ")
            .and_then(|rest| rest.split_once(". "))
        else {
            return;
        };
        for count in counts.split("; ") {
            let Some((number, what)) = count.split_once(' ') else {
                continue;
            };
            let Ok(number) = number.parse::<u64>() else {
                continue;
            };
            match what {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.skipped += number,
                _ => {}
            }
        }
    }
}

impl std::fmt::Display for Tests {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            formatter,
            "{} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        )
    }
}

#[cfg(test)]
mod tests {
    use super::{Step, Tests, run_steps, steps};

    #[test]
    fn the_closing_lines_of_all_test_binaries_are_added_up() {
        let mut tests = Tests::default();
        for line in [
            "running 3 tests",
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.02s",
            "test result: FAILED. 2 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s",
        ] {
            tests.add(line);
        }
        assert_eq!(tests.to_string(), "14 passed, 3 failed, 1 skipped");
    }

    #[test]
    fn what_runs_beside_a_step_comes_right_behind_it() {
        let steps = steps(1);
        let beside: Vec<_> = steps
            .windows(2)
            .filter(|it| it[1].beside.is_some())
            .collect();
        assert!(!beside.is_empty());
        assert!(beside.iter().all(|it| it[1].beside == Some(it[0].name)));
    }

    #[test]
    fn of_two_steps_side_by_side_either_may_fail() {
        let outcome = |first: &str, second: &str| {
            let step = |name, command: &str, beside| Step {
                name,
                command: command.to_owned(),
                beside,
            };
            let steps = [
                step("first-of-two", first, None),
                step("second-of-two", second, Some("first-of-two")),
                step("behind", "exit 7", None),
            ];
            let error = run_steps(&steps, &mut Tests::default()).expect_err("the last fails");
            let text = error.to_string();
            text.split(',').next().unwrap_or_default().to_owned()
        };
        assert_eq!(outcome("true", "true"), "FAILED: behind");
        assert_eq!(outcome("true", "exit 3"), "FAILED: second-of-two");
        assert_eq!(outcome("exit 3", "true"), "FAILED: first-of-two");
        assert_eq!(outcome("exit 3", "exit 3"), "FAILED: first-of-two");
        // Both at once: each waits for what only the other does.
        let shell = xshell::Shell::new().expect("a shell");
        let folder = shell.create_temp_dir().expect("a folder");
        let path = |name: &str| folder.path().join(name).display().to_string();
        let (one, other) = (path("one"), path("other"));
        let meet = |own: &str, its: &str| {
            format!(
                "touch {own}; for i in $(seq 500); do [ -e {its} ] && exit 0; sleep 0.02; done; exit 1"
            )
        };
        assert_eq!(
            outcome(&meet(&one, &other), &meet(&other, &one)),
            "FAILED: behind"
        );
    }
}
