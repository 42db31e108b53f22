//! `cargo xtask fuzz`: runs the targets below `fuzz/` for a while, on the stable toolchain.
//!
//! The folder follows cargo-fuzz, so that `cargo +nightly fuzz run` works too. Here the targets are
//! built without it: coverage comes from an LLVM pass that stable rustc can run, and the address
//! sanitizer is left out, because the fuzzed code is safe Rust.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, anyhow, bail, ensure};
use xshell::{Shell, cmd};

use crate::workspace;

const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// What cargo-fuzz passes, less the sanitizer.
const COVERAGE: &str = "-Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares \
    --cfg fuzzing -Ccodegen-units=1 -Cdebug-assertions -Coverflow-checks";

/// An input that takes longer is reported as a hang.
const SLOWEST_INPUT_S: u32 = 10;

/// Feed the parsers random input, starting from the committed corpus
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Only this target
    target: Option<String>,
    /// How long to run, shared evenly among the targets, of which there are as many at once as the
    /// machine has cores
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Leave out the targets of the validator's own readers, of which validator/src/fuzzing/tests.rs
    /// tries inputs in every test run: their build takes minutes
    #[arg(long, conflicts_with = "target")]
    core_only: bool,
    /// Fail where all targets together tried fewer inputs
    #[arg(long, default_value_t = 0)]
    at_least: u64,
    /// Try so many inputs of each target instead, the same ones every time: what CI does, whose
    /// answer must not depend on luck
    #[arg(long, conflicts_with = "seconds")]
    inputs: Option<u32>,
}

/// Any number will do; it makes the inputs the same in every run.
const SEED: u32 = 1;

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let shell = workspace::shell()?;
    let mut targets = targets(&shell)?;
    if arguments.core_only {
        let manifest = shell.read_file("fuzz/Cargo.toml")?;
        targets.retain(|target| !needs_the_validator(target, &manifest));
    }
    if let Some(wanted) = &arguments.target {
        ensure!(
            targets.contains(wanted),
            "no fuzz target `{wanted}`; there are {}",
            targets.join(", ")
        );
        targets.retain(|target| target == wanted);
    }
    build(&shell, arguments.core_only)?;
    let at_once = std::thread::available_parallelism()?
        .get()
        .min(targets.len());
    let share = arguments.seconds * u32::try_from(at_once)? / u32::try_from(targets.len())?;
    let left = Mutex::new(targets);
    let tried = AtomicU64::new(0);
    // Each takes the next target, until none is left or one failed.
    let fuzz_some = || -> anyhow::Result<()> {
        let shell = workspace::shell()?;
        while let Some(target) = next(&left) {
            let fuzzed = fuzz(&shell, &target, share.max(1), arguments.inputs);
            if fuzzed.is_err() {
                locked(&left).clear();
            }
            tried.fetch_add(fuzzed?, Ordering::Relaxed);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..at_once).map(|_| scope.spawn(fuzz_some)).collect();
        let panicked = |_| Err(anyhow!("a thread that fuzzes panicked"));
        let results = threads
            .into_iter()
            .map(|it| it.join().unwrap_or_else(panicked));
        // All end before any error is reported.
        let results: Vec<anyhow::Result<()>> = results.collect();
        results.into_iter().collect::<anyhow::Result<()>>()
    })?;
    let (tried, at_least) = (tried.into_inner(), arguments.at_least);
    ensure!(
        tried >= at_least,
        "{tried} inputs were tried, expected {at_least} at least; fuzz for longer"
    );
    Ok(())
}

fn locked(targets: &Mutex<Vec<String>>) -> MutexGuard<'_, Vec<String>> {
    targets.lock().unwrap_or_else(PoisonError::into_inner)
}

fn next(targets: &Mutex<Vec<String>>) -> Option<String> {
    locked(targets).pop()
}

fn targets(shell: &Shell) -> anyhow::Result<Vec<String>> {
    let files = shell
        .read_dir("fuzz/fuzz_targets")
        .context("there are no fuzz targets")?;
    let names = files
        .iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
    let names: Vec<String> = names
        .filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()))
        .collect();
    ensure!(!names.is_empty(), "fuzz/fuzz_targets is empty");
    Ok(names)
}

/// Whether the manifest builds the target with feature `validator` only.
fn needs_the_validator(target: &str, manifest: &str) -> bool {
    let mut binaries = manifest.split("[[bin]]").skip(1);
    let named = format!("name = \"{target}\"");
    let own = binaries.find(|it| it.lines().any(|line| line == named));
    own.is_some_and(|it| it.contains("required-features = [\"validator\"]"))
}

fn build(shell: &Shell, core_only: bool) -> anyhow::Result<()> {
    let cargo = workspace::cargo();
    let features: &[&str] = if core_only {
        &[]
    } else {
        &["--features", "validator"]
    };
    let target_folder = workspace::target().join("fuzz");
    // With --target, build scripts and macros are not instrumented.
    cmd!(shell, "{cargo} build --release --manifest-path fuzz/Cargo.toml {features...} --bins --target {TRIPLE} --target-dir {target_folder}")
        .env("RUSTFLAGS", COVERAGE)
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .quiet()
        .run()
        .context("the fuzz targets do not build (libFuzzer also needs a C++ compiler: apt-get install g++)")
}

/// How many inputs of other targets take as long as one of this.
fn slowness(target: &str) -> u32 {
    match target {
        // A judged run and nine reports of it.
        "text_outputs" => 20,
        _ => 1,
    }
}

fn fuzz(shell: &Shell, target: &str, seconds: u32, inputs: Option<u32>) -> anyhow::Result<u64> {
    let binary = workspace::target()
        .join("fuzz")
        .join(TRIPLE)
        .join("release")
        .join(target);
    let corpus = format!("fuzz/corpus/{target}");
    let seeds = shell
        .read_dir(&corpus)
        .map(|files| files.len())
        .unwrap_or_default();
    ensure!(
        seeds > 0,
        "{corpus} is empty: fuzzing from nothing finds nothing"
    );
    // libFuzzer adds what it finds to the first folder; the committed corpus stays as it is.
    let found = if inputs.is_none() {
        workspace::target().join("fuzz/corpus").join(target)
    } else {
        let fresh = workspace::target().join("fuzz/same-inputs").join(target);
        shell.remove_path(&fresh)?;
        fresh
    };
    let found = shell.create_dir(found)?;
    let failures = shell.create_dir(workspace::target().join("fuzz/failures").join(target))?;
    let prefix = format!("{}/", failures.display());
    let mut limits = vec![format!("-timeout={SLOWEST_INPUT_S}")];
    if let Some(inputs) = inputs {
        let inputs = inputs / slowness(target);
        eprintln!("fuzzing {target} with {inputs} inputs from {seeds} files");
        limits.extend([format!("-runs={inputs}"), format!("-seed={SEED}")]);
    } else {
        eprintln!("fuzzing {target} for {seconds} s from {seeds} files");
        limits.push(format!("-max_total_time={seconds}"));
    }
    let output = cmd!(
        shell,
        "{binary} {limits...} -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix={prefix} {found} {corpus}"
    )
    .quiet()
    .ignore_status()
    .output()?;
    let log = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!(
            "{target} failed; the input is below {}\n{}\n{}",
            failures.display(),
            last_lines(&log, 40),
            repeat(&binary, &log)
        );
    }
    let runs = log
        .lines()
        .find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
    let runs: u64 = runs.and_then(|it| it.trim().parse().ok()).unwrap_or(0);
    ensure!(runs > 0, "{target} ran no input:\n{}", last_lines(&log, 20));
    eprintln!("{target}: {runs} inputs, no failure");
    Ok(runs)
}

/// How to run the failing input again, from libFuzzer's `Test unit written to …`.
fn repeat(binary: &Path, log: &str) -> String {
    let written = log
        .lines()
        .find_map(|line| line.split_once("Test unit written to "));
    written.map_or_else(String::new, |(_, input)| {
        format!("to repeat: {} {input}", binary.display())
    })
}

fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::{needs_the_validator, targets};
    use crate::workspace;

    #[test]
    fn every_target_is_in_the_manifest_and_has_a_corpus() {
        let shell = workspace::shell().expect("the workspace");
        let manifest = shell.read_file("fuzz/Cargo.toml").expect("the manifest");
        let targets = targets(&shell).expect("the targets");
        let of_validator = |it: &&String| needs_the_validator(it, &manifest);
        assert_eq!(
            targets.iter().filter(of_validator).count(),
            8,
            "{targets:?}"
        );
        for target in &targets {
            let named = format!("name = \"{target}\"");
            assert!(manifest.contains(&named), "fuzz/Cargo.toml lacks {target}");
            let corpus = shell.read_dir(format!("fuzz/corpus/{target}"));
            assert!(
                corpus.is_ok_and(|it| !it.is_empty()),
                "no corpus of {target}"
            );
        }
        assert!(!needs_the_validator("facts", &manifest));
    }
}
