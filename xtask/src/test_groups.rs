//! `cargo xtask test`: all tests of the workspace in groups, several test programs in parallel.
//!
//! cargo-nextest was measured for this (BENCHMARKS.md): it costs a fresh machine more than it
//! saves, and its process for each test would repeat what the tests of one program share.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context as _, anyhow, ensure};
use serde_json::Value;
use xshell::cmd;

use crate::workspace;

/// Run the tests of the workspace
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Only these groups [default: all]
    #[arg(value_enum, value_name = "GROUP")]
    groups: Vec<Group>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Group {
    /// Unit tests, documentation tests, and the integration tests that are in no other group
    Product,
    /// Integration tests that measure time: after all others, with nothing in parallel but
    /// themselves
    Timing,
    /// Integration tests of tasks that drive infrastructure
    Infrastructure,
}

const ALL: [Group; 3] = [Group::Product, Group::Infrastructure, Group::Timing];

/// The test program that is divided among the groups.
const DIVIDED: &str = "it";

/// Modules of [`DIVIDED`] whose tests wait for deadlines, or judge how long something takes.
const TIMING_MODULES: [&str; 6] = [
    "burn",
    "burn_detection",
    "burn_engines",
    "burns",
    "sentinel",
    "stopped_runs",
];

/// Modules of [`DIVIDED`] that test crates which the validator is not built from.
const INFRASTRUCTURE_MODULES: [&str; 4] = ["slurm", "ssh", "terraform", "validate_ami_aws"];

impl Group {
    /// That of a test of [`DIVIDED`], `burn::a_burn_ends`.
    fn of(test: &str) -> Group {
        let module = test.split("::").next().unwrap_or_default();
        if TIMING_MODULES.contains(&module) {
            Group::Timing
        } else if INFRASTRUCTURE_MODULES.contains(&module) {
            Group::Infrastructure
        } else {
            Group::Product
        }
    }

    fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let groups = if arguments.groups.is_empty() {
        &ALL[..]
    } else {
        &arguments.groups
    };
    let programs = build()?;
    let mut passed = true;
    let mut counts = Counts::default();
    for group in ALL.into_iter().filter(|it| groups.contains(it)) {
        let jobs = jobs(group, &programs)?;
        passed &= run_jobs(jobs, &mut counts)?;
    }
    println!("{counts}");
    // A run of which nothing was understood must not look like one in which nothing failed.
    ensure!(
        passed && counts.failed == 0 && counts.passed > 0,
        "tests failed"
    );
    Ok(())
}

/// A program that cargo built for tests.
#[derive(Debug)]
struct Program {
    name: String,
    file: PathBuf,
    /// Where cargo would start it.
    folder: PathBuf,
}

fn build() -> anyhow::Result<Vec<Program>> {
    let shell = workspace::shell()?;
    let cargo = workspace::cargo();
    let messages = cmd!(
        shell,
        "{cargo} test --workspace --locked --no-run --message-format json-render-diagnostics"
    )
    .quiet()
    .read()?;
    let programs = programs(&messages)?;
    ensure!(
        programs.iter().any(|it| it.name == DIVIDED),
        "cargo built no test program `{DIVIDED}`"
    );
    Ok(programs)
}

/// Reads cargo's messages, one JSON object a line.
fn programs(messages: &str) -> anyhow::Result<Vec<Program>> {
    let mut programs = Vec::new();
    for line in messages.lines() {
        let message: Value = serde_json::from_str(line)?;
        let Some(file) = message["executable"].as_str() else {
            continue;
        };
        if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
            continue;
        }
        let text = |value: &Value| value.as_str().map(PathBuf::from);
        let manifest = text(&message["manifest_path"]).context("a program without a package")?;
        programs.push(Program {
            name: message["target"]["name"]
                .as_str()
                .context("a program without a name")?
                .to_owned(),
            file: file.into(),
            folder: manifest
                .parent()
                .context("a package in no folder")?
                .to_path_buf(),
        });
    }
    Ok(programs)
}

/// One process.
#[derive(Debug)]
struct Job {
    name: String,
    command: Command,
}

/// The longest first.
fn jobs(group: Group, programs: &[Program]) -> anyhow::Result<Vec<Job>> {
    let mut jobs = Vec::new();
    for program in programs.iter().filter(|it| it.name == DIVIDED) {
        let tests = tests(program)?;
        let own: Vec<&String> = tests.iter().filter(|it| Group::of(it) == group).collect();
        ensure!(!own.is_empty(), "group {group:?} has no test of {DIVIDED}");
        let mut command = program.command();
        command.arg("--exact").args(own);
        jobs.push(Job {
            name: format!("{DIVIDED}-{}", group.name()),
            command,
        });
    }
    if group == Group::Product {
        let mut documentation = Command::new(workspace::cargo());
        documentation
            .args(["test", "--workspace", "--locked", "--doc", "--no-fail-fast"])
            .current_dir(workspace::root());
        jobs.push(Job {
            name: "doc".to_owned(),
            command: documentation,
        });
        let others = programs.iter().filter(|it| it.name != DIVIDED);
        jobs.extend(others.map(|program| Job {
            name: program.name.clone(),
            command: program.command(),
        }));
    }
    Ok(jobs)
}

impl Program {
    fn command(&self) -> Command {
        let mut command = Command::new(&self.file);
        command.current_dir(&self.folder);
        command
    }
}

/// Names of all tests of a program.
fn tests(program: &Program) -> anyhow::Result<Vec<String>> {
    let output = program
        .command()
        .args(["--list", "--format", "terse"])
        .output()?;
    ensure!(output.status.success(), "{} lists no tests", program.name);
    let text = String::from_utf8(output.stdout)?;
    let tests = text.lines().filter_map(|line| line.strip_suffix(": test"));
    Ok(tests.map(str::to_owned).collect())
}

/// As many at once as there are cores; each one's output is printed when it has ended.
fn run_jobs(jobs: Vec<Job>, counts: &mut Counts) -> anyhow::Result<bool> {
    let at_once = std::thread::available_parallelism()?.get();
    let left = Mutex::new(VecDeque::from(jobs));
    let outcome = Mutex::new((true, std::mem::take(counts)));
    let run_some = || -> anyhow::Result<()> {
        loop {
            let next = left
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .pop_front();
            let Some(job) = next else { return Ok(()) };
            let started = Instant::now();
            let (passed, output) = run_job(job)?;
            let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
            outcome.0 &= passed;
            output.lines().for_each(|line| outcome.1.add(line));
            println!("{output}({:.1} s)", started.elapsed().as_secs_f64());
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..at_once).map(|_| scope.spawn(run_some)).collect();
        let results = threads.into_iter().map(|it| {
            it.join()
                .unwrap_or_else(|_| Err(anyhow!("a thread that runs tests panicked")))
        });
        results
            .collect::<Vec<_>>()
            .into_iter()
            .collect::<anyhow::Result<()>>()
    })?;
    let (passed, sum) = outcome.into_inner().unwrap_or_else(PoisonError::into_inner);
    *counts = sum;
    Ok(passed)
}

/// The output goes through a file, which is there, too, when this process is killed.
fn run_job(mut job: Job) -> anyhow::Result<(bool, String)> {
    let folder = workspace::target().join("ci");
    std::fs::create_dir_all(&folder)?;
    let path = folder.join(format!("test-{}.log", job.name));
    let mut file = File::create(&path).with_context(|| path.display().to_string())?;
    writeln!(file, "\n== {}", job.name)?;
    let status = job
        .command
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .status()
        .with_context(|| job.name.clone())?;
    let mut output = String::from_utf8_lossy(&std::fs::read(&path)?).into_owned();
    if !status.success() {
        let _ = writeln!(output, "== {} FAILED: {status}", job.name);
    }
    Ok((status.success(), output))
}

/// The sum over all test programs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl Counts {
    /// Reads `test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; …`.
    pub(crate) fn add(&mut self, line: &str) {
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

impl std::fmt::Display for Counts {
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
    use std::process::Command;

    use super::{
        Counts, Group, INFRASTRUCTURE_MODULES, Job, TIMING_MODULES, programs, run_jobs, workspace,
    };

    #[test]
    fn the_closing_lines_of_all_test_binaries_are_added_up() {
        let mut counts = Counts::default();
        for line in [
            "running 3 tests",
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.02s",
            "test result: FAILED. 2 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s",
        ] {
            counts.add(line);
        }
        assert_eq!(counts.to_string(), "14 passed, 3 failed, 1 skipped");
    }

    #[test]
    fn each_module_that_a_group_names_exists() {
        let main = workspace::root().join("tests/it/main.rs");
        let main = std::fs::read_to_string(main).expect("the test program");
        for module in TIMING_MODULES.iter().chain(&INFRASTRUCTURE_MODULES) {
            assert!(main.contains(&format!("\nmod {module};\n")), "{module}");
        }
        assert_eq!(Group::of("burn::a_burn_ends"), Group::Timing);
        assert_eq!(Group::of("burned::x"), Group::Product);
        assert_eq!(Group::of("ssh::burn::x"), Group::Infrastructure);
    }

    #[test]
    fn of_cargos_messages_test_programs_count() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","target":{"name":"a"},"profile":{"test":false},"executable":"/t/a"}"#,
            "\n",
            r#"{"reason":"compiler-artifact","target":{"name":"b"},"profile":{"test":true},"executable":null}"#,
            "\n",
            r#"{"reason":"compiler-artifact","target":{"name":"c"},"profile":{"test":true},"executable":"/t/c","manifest_path":"/w/c/Cargo.toml"}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
        );
        let found = programs(messages).expect("programs");
        let [c] = &found[..] else { panic!("{found:?}") };
        assert_eq!((&*c.name, c.folder.to_str()), ("c", Some("/w/c")));
        assert!(programs("no JSON").is_err());
    }

    #[test]
    fn every_job_runs_and_one_that_fails_is_not_forgotten() {
        let job = |name: &str, script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            Job {
                name: format!("own-{name}"),
                command,
            }
        };
        let line = "echo 'test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured'";
        let mut counts = Counts::default();
        let jobs = vec![
            job("a", &format!("{line}; exit 3")),
            job("b", line),
            job("c", line),
        ];
        assert!(!run_jobs(jobs, &mut counts).expect("they run"));
        assert_eq!(counts.passed, 3);
        assert!(run_jobs(vec![job("a", line)], &mut counts).expect("it runs"));
        assert_eq!(counts.passed, 4);
    }
}
