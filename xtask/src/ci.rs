//! `cargo xtask ci`: everything that CI checks, in order, stopping at the first failure.
//!
//! A step that names its inputs is skipped where none of them changed since it passed in this build
//! folder: a fresh clone runs all steps, and so does `--all`.

mod inputs;

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use inputs::{Change, Inputs, Record};

use crate::test_groups::Counts;
use crate::workspace;

/// Run everything that CI checks; needs no GPU
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Only these steps, whether or not their inputs changed [default: all]
    #[arg(value_name = "STEP", value_parser = step_names())]
    steps: Vec<String>,
    /// Run steps, too, of which no input changed since they passed in this build folder
    #[arg(long)]
    all: bool,
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
    /// Of a step that is skipped while they do not change.
    inputs: Option<Inputs>,
}

impl Step {
    fn with_inputs(self, inputs: Inputs) -> Self {
        Self {
            inputs: Some(inputs),
            ..self
        }
    }
}

const VALIDATOR: &str = "validator/Cargo.toml";
const SIMULATOR: &str = "tests/simulator/Cargo.toml";

/// The order is that of cost: what takes seconds comes first.
///
/// The advisories of cargo-deny are left out: they come from a database on GitHub that changes
/// under a commit, so they belong to a scheduled job (`workflows/nightly.yml`) and not to the
/// question whether this commit is right.
fn steps(fuzz_inputs: u32) -> Vec<Step> {
    let tools = workspace::tools();
    let (deny, linters) = (
        tools.join("cargo-deny/bin/cargo-deny"),
        tools.join("linters/bin"),
    );
    let dist = workspace::target().join("dist-thin");
    let dist = dist.display();
    let step = |name, command: &str| Step {
        name,
        command: command.to_owned(),
        beside: None,
        inputs: None,
    };
    vec![
        step("fmt", "cargo fmt --all --check"),
        step("codegen", "cargo xtask codegen --check"),
        step("import-circles", "cargo xtask import-circles"),
        step(
            "shell",
            &format!(
                "cargo xtask tools linters && git ls-files -z .ci/run '*.sh' | xargs -0 {}/shellcheck",
                linters.display()
            ),
        ),
        step(
            "report-schemas",
            &format!(
                "cargo xtask tools linters \
                 && {}/check-jsonschema --schemafile tests/schemas/ctrf.schema.json tests/golden/*.ctrf.json",
                linters.display()
            ),
        ),
        step("accessibility", "cargo xtask accessibility").with_inputs(Inputs {
            paths: &["tests/golden"],
            packages: &["xtask/Cargo.toml"],
            outputs: &[],
        }),
        // The folder's copies in .github are what GitHub reads; a test compares both.
        step(
            "workflows",
            &format!(
                "cargo xtask tools linters actionlint \
                 && {actionlint} -shellcheck {linters}/shellcheck -pyflakes= \
                 && {linters}/shellcheck --version >/dev/null \
                 && {linters}/zizmor --offline --strict-collection --persona auditor --quiet .github workflows action.yml \
                 && {linters}/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml \
                 && {linters}/check-jsonschema --builtin-schema vendor.github-actions action.yml workflows/*/action.yml",
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
        step("terraform", "cargo xtask tf check").with_inputs(Inputs {
            paths: &["terraform"],
            packages: &["terraform/tasks/Cargo.toml"],
            outputs: &[],
        }),
        step(
            "manifests",
            &format!(
                "cargo xtask k8s check && cargo xtask tools linters && {}/hadolint manifests/kubernetes/Dockerfile",
                linters.display()
            ),
        )
        .with_inputs(Inputs {
            paths: &["manifests"],
            // The validator lists the rights that it needs.
            packages: &["manifests/tasks/Cargo.toml", VALIDATOR],
            outputs: &[],
        }),
        step("monitoring", "cargo xtask monitoring").with_inputs(Inputs {
            paths: &["manifests/monitoring"],
            packages: &["xtask/Cargo.toml", VALIDATOR],
            outputs: &[],
        }),
        step("test", "cargo xtask test product timing"),
        step("infrastructure-tests", "cargo xtask test infrastructure").with_inputs(Inputs {
            paths: &[
                "terraform",
                "packer",
                "manifests/profiles",
                "manifests/slurm",
                "tests/golden",
            ],
            packages: &[
                "tests/it/Cargo.toml",
                "packer/tasks/Cargo.toml",
                "terraform/tasks/Cargo.toml",
            ],
            outputs: &[],
        }),
        // With thin LTO: the binary that ships is built, and its size checked, at a release and
        // every night.
        step("dist", "cargo xtask dist --thin-lto --verify --sbom").with_inputs(Inputs {
            paths: &["manifests/profiles"],
            packages: &[VALIDATOR, "xtask/Cargo.toml"],
            outputs: &["dist-thin/gpu-validator", "dist-thin/gpu-validator.cdx.json"],
        }),
        // The portable binary's linker is one thread for minutes, and so is the compiler of what is
        // fuzzed.
        Step {
            beside: Some("dist"),
            ..step("fuzz", &format!("cargo xtask fuzz --core-only --inputs {fuzz_inputs}")).with_inputs(Inputs {
                paths: &["fuzz", "manifests/profiles"],
                packages: &["fuzz/Cargo.toml", "xtask/Cargo.toml"],
                outputs: &[],
            })
        },
        step(
            "packages",
            &format!("cargo xtask packages --check --validator-folder {dist}"),
        )
        .with_inputs(Inputs {
            paths: &["packaging", "manifests/profiles"],
            packages: &[VALIDATOR, "xtask/Cargo.toml"],
            outputs: &[],
        }),
        step(
            "validator-image",
            &format!("cargo xtask validator-image check --validator-folder {dist}"),
        )
        .with_inputs(Inputs {
            paths: &["manifests"],
            packages: &["manifests/tasks/Cargo.toml", VALIDATOR, SIMULATOR],
            outputs: &[],
        }),
        step(
            "images",
            &format!("cargo xtask images --validator-folder {dist}"),
        )
        .with_inputs(Inputs {
            paths: &["packer", "workflows", "tests/images", "manifests/profiles"],
            packages: &["tests/images/Cargo.toml", VALIDATOR, SIMULATOR],
            outputs: &[],
        }),
        step(
            "fault-matrix",
            &format!("cargo xtask fault-matrix --validator-folder {dist}"),
        )
        .with_inputs(Inputs {
            paths: &["manifests/profiles"],
            packages: &["tests/harness/Cargo.toml", VALIDATOR, SIMULATOR],
            outputs: &[],
        }),
        step("junit-readers", "cargo xtask junit-readers").with_inputs(Inputs {
            paths: &["tests/golden"],
            packages: &["tests/harness/Cargo.toml"],
            outputs: &[],
        }),
        step("nvml-clients", "cargo xtask nvml-clients").with_inputs(Inputs {
            paths: &[],
            packages: &["tests/harness/Cargo.toml", SIMULATOR],
            outputs: &[],
        }),
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
    let mut tests = Counts::default();
    let all = arguments.all || !arguments.steps.is_empty();
    let outcome = run_steps(&steps, all, &mut tests);
    let code = match outcome {
        Ok(skipped) => {
            println!(
                "\nall {} steps passed in {:.0} s{}",
                steps.len(),
                started.elapsed().as_secs_f64(),
                match skipped {
                    0 => String::new(),
                    _ => format!(
                        ", {skipped} of them earlier, on the same inputs (--all runs them again)"
                    ),
                }
            );
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("\n{error:#}");
            ExitCode::FAILURE
        }
    };
    // The very last line, alone: readers of the log look for it there.
    if tests != Counts::default() {
        println!("{tests}");
    }
    code
}

/// Returns how many steps were skipped.
fn run_steps(steps: &[Step], all: bool, tests: &mut Counts) -> anyhow::Result<usize> {
    let mut left = steps.iter().zip(1..).peekable();
    let mut skipped = 0;
    while let Some((step, number)) = left.next() {
        let announce = |number: usize, Step { name, command, .. }: &Step| {
            println!("\n== {number}/{} {name}: {command}", steps.len());
        };
        let mut beside = None;
        if let Some((step, number)) = left.next_if(|(it, _)| it.beside == Some(step.name)) {
            match Planned::of(step, all)? {
                Plan::Skip(passed) => {
                    announce(number, step);
                    skipped += 1;
                    passed.tell(tests);
                }
                Plan::Run(planned) => beside = Some((Beside::start(step)?, number, planned)),
            }
        }
        announce(number, step);
        let outcome = match Planned::of(step, all)? {
            Plan::Skip(passed) => {
                skipped += 1;
                passed.tell(tests);
                Ok(())
            }
            Plan::Run(planned) => run_step(step, tests).and_then(|passed| planned.passed(passed)),
        };
        // Waited for in any case: nothing keeps running after a failure.
        let beside = beside.map_or(Ok(()), |(it, number, planned)| {
            announce(number, it.step);
            it.finish().and_then(|()| planned.passed(0))
        });
        outcome.and(beside)?;
    }
    Ok(skipped)
}

/// What becomes of a step.
enum Plan {
    Skip(Record),
    Run(Planned),
}

/// A step that is about to run, on inputs that are recorded when it passes.
struct Planned {
    step: &'static str,
    record: Option<Record>,
}

impl Planned {
    fn of(step: &Step, all: bool) -> anyhow::Result<Plan> {
        let Some(inputs) = &step.inputs else {
            return Ok(Plan::Run(Self {
                step: step.name,
                record: None,
            }));
        };
        let record = inputs.record(&workspace::shell()?, &step.command)?;
        let passed = Record::read(step.name);
        let change = record.since(passed.as_ref());
        match (change, passed) {
            (Change::Unchanged, Some(passed)) if !all && inputs.outputs_exist() => {
                return Ok(Plan::Skip(passed));
            }
            (Change::Changed(what), _) => println!("\n{} runs again: {what}", step.name),
            _ => {}
        }
        Record::remove(step.name)?;
        Ok(Plan::Run(Self {
            step: step.name,
            record: Some(record),
        }))
    }

    /// Records that the step passed so many tests.
    fn passed(self, tests: u64) -> anyhow::Result<()> {
        let Some(mut record) = self.record else {
            return Ok(());
        };
        record.tests = tests;
        record.write(self.step)
    }
}

/// Returns how many tests the step passed.
fn run_step(step: &Step, tests: &mut Counts) -> anyhow::Result<u64> {
    let started = Instant::now();
    let before = tests.passed;
    let passed = if step.command.starts_with("cargo xtask test ") {
        run_tests(&step.command, tests)?
    } else {
        shell(&step.command).status()?.success()
    };
    step.tell(passed, started.elapsed())?;
    Ok(tests.passed - before)
}

impl Record {
    /// Reports a step that is skipped; its tests were not run now, and are counted so.
    fn tell(&self, tests: &mut Counts) {
        tests.skipped += self.tests;
        println!("== skipped: passed before, and no input changed since");
    }
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

/// A step that runs in parallel with another, whose output is shown when both have ended.
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

/// Runs the tests, passing their output on, and adds up the results of each test binary.
fn run_tests(command: &str, tests: &mut Counts) -> anyhow::Result<bool> {
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

#[cfg(test)]
mod tests {
    use super::{Counts, Inputs, Step, run_steps, steps};

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
                inputs: None,
            };
            let steps = [
                step("first-of-two", first, None),
                step("second-of-two", second, Some("first-of-two")),
                step("behind", "exit 7", None),
            ];
            let error =
                run_steps(&steps, true, &mut Counts::default()).expect_err("the last fails");
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

    #[test]
    fn a_step_is_skipped_while_its_inputs_are_those_that_it_passed_on() {
        let name = "of-a-unit-test";
        let step = |command: &str| Step {
            name,
            command: command.to_owned(),
            beside: None,
            inputs: Some(Inputs {
                paths: &["fuzz/corpus"],
                ..Inputs::default()
            }),
        };
        let run = |command: &str, all| {
            let mut counts = Counts::default();
            let skipped = run_steps(&[step(command)], all, &mut counts).ok();
            (skipped, counts.passed, counts.skipped)
        };
        super::Record::remove(name).expect("no record");
        assert_eq!(run("exit 1", false), (None, 0, 0));
        assert_eq!(run("exit 1", false), (None, 0, 0));
        assert_eq!(run("true", false), (Some(0), 0, 0));
        assert_eq!(run("true", false), (Some(1), 0, 0));
        assert_eq!(run("true", true), (Some(0), 0, 0));
        assert_eq!(run("true # changed", false), (Some(0), 0, 0));
        assert_eq!(run("exit 1", false), (None, 0, 0));
        // What failed last has not passed, whatever passed before.
        assert_eq!(run("true # changed", false), (Some(0), 0, 0));
        super::Record::remove(name).expect("the record goes");
    }

    #[test]
    fn inputs_of_all_steps_exist_and_their_names_are_distinct() {
        let shell = crate::workspace::shell().expect("a shell");
        let steps = steps(1);
        for step in &steps {
            if let Some(inputs) = &step.inputs {
                let record = inputs.record(&shell, &step.command);
                assert!(record.is_ok(), "{}: {record:?}", step.name);
            }
            let same = steps.iter().filter(|it| it.name == step.name);
            assert_eq!(same.count(), 1, "{}", step.name);
        }
    }
}
