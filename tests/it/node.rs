//! Simulated nodes, and the validator run on them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use simulator::{Catalogue, NodeRequest, PreparedNode, prepare_node};

/// The validator's executable, built once for all tests.
pub(crate) fn executable() -> &'static Path {
    static EXECUTABLE: OnceLock<PathBuf> = OnceLock::new();
    EXECUTABLE.get_or_init(|| {
        let status = Command::new(env!("CARGO"))
            // The workspace's choice of features, which `cargo test --workspace` has built already:
            // with those of the package alone, thirty crates and the validator itself would be
            // compiled once more.
            .args(["build", "--quiet", "--workspace", "--bin", "gpu-validator"])
            .status();
        assert!(
            status.expect("cargo can be started").success(),
            "the validator does not build"
        );
        let target = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .parent()
            .expect("the temporary folder is below target");
        target.join("debug/gpu-validator")
    })
}

/// The validator as it is started on a machine without any NVIDIA library, and without what the
/// caller's environment would change.
pub(crate) fn validator() -> Command {
    let mut command = Command::new(executable());
    for (name, _) in std::env::vars_os() {
        let foreign = [
            "GPU_", "GITHUB_", "NO_COLOR", "CUDA_", "NVIDIA_", "LD_", "LC_", "LANG", "TZ", "CI",
        ];
        if foreign
            .iter()
            .any(|it| name.to_string_lossy().starts_with(it))
        {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null());
    command
}

/// Another program with the environment that `command` would have.
pub(crate) fn in_place_of(command: &Command, program: &str) -> Command {
    let mut other = Command::new(program);
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => other.env(name, value),
            None => other.env_remove(name),
        };
    }
    other.stdin(Stdio::null());
    other
}

/// A folder below target that vanishes with the test.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("it-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder below target");
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        std::fs::write(&path, content).expect("a file");
        path
    }

    pub(crate) fn read(&self, name: &str) -> String {
        let path = self.path(name);
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A simulated node, and a folder for what runs on it write.
pub(crate) struct Node {
    prepared: PreparedNode,
    pub(crate) out: Scratch,
}

impl Node {
    pub(crate) fn healthy(name: &str) -> Self {
        Self::with(name, &[], &[])
    }

    pub(crate) fn with_fault(name: &str, fault: &str) -> Self {
        Self::with(name, &[fault], &[])
    }

    /// A node with faults by their names, and with changes such as
    /// `nvml.hang=[nvmlDeviceGetTemperature]`.
    pub(crate) fn with(name: &str, faults: &[&str], changes: &[&str]) -> Self {
        let out = Scratch::new();
        let owned =
            |texts: &[&str]| -> Vec<String> { texts.iter().map(|&text| text.to_owned()).collect() };
        let prepared = prepare_node(&NodeRequest {
            folder: &out.path("node"),
            library: &library(),
            catalogue: &Catalogue::shipped(),
            node: name,
            faults: &owned(faults),
            overrides: &owned(changes),
        });
        Self {
            prepared: prepared.unwrap_or_else(|error| panic!("{name}: {error:#}")),
            out,
        }
    }

    pub(crate) fn sysroot(&self) -> &Path {
        &self.prepared.sysroot
    }

    /// What a process needs in its environment to see the node.
    pub(crate) fn environment(&self) -> Vec<(&str, &str)> {
        let environment = self.prepared.environment.iter();
        environment
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect()
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.prepared.folder
    }

    /// What its processes share, seen from outside.
    pub(crate) fn state(&self) -> simulator::node::Node {
        simulator::node::Node::open(&self.prepared.folder).expect("a prepared node")
    }

    /// Adds lines to the kernel log, as the kernel would now.
    pub(crate) fn append_to_kernel_log(&self, messages: &[&[u8]]) {
        let path = self.sysroot().join("dev/kmsg");
        let mut log = std::fs::read(&path).expect("the node has a kernel log");
        let text = String::from_utf8_lossy(&log).into_owned();
        let last = text.lines().last().expect("a record");
        let mut fields = last.split(',').skip(1);
        let mut number = || -> u64 {
            let field = fields.next().expect("a field");
            field.parse().expect("a number")
        };
        let (sequence, time_us) = (number(), number());
        for (index, message) in (1..).zip(messages) {
            let prefix = format!("4,{},{},-;", sequence + index, time_us + index);
            log.extend_from_slice(prefix.as_bytes());
            log.extend_from_slice(message);
            log.push(b'\n');
        }
        std::fs::write(&path, log).expect("the kernel log is written");
    }

    /// The validator with the node's libraries and environment.
    pub(crate) fn validator(&self) -> Command {
        let mut command = validator();
        command.envs(&self.prepared.environment);
        command
    }

    /// `gpu-validator run` on this node, with a JSON report at `report.json` in the node's folder.
    pub(crate) fn run_command(&self, arguments: &[&str]) -> Command {
        let mut command = self.validator();
        command
            .args(["run", "--simulated-ok", "--sysroot"])
            .arg(self.sysroot())
            .arg("--json")
            .arg(self.out.path("report.json"))
            .args(arguments);
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Ran {
        self.finish(&mut self.run_command(arguments))
    }

    /// `gpu-validator burn` on this node, with `report.json` and `facts.json` in the node's folder.
    pub(crate) fn burn_command(&self, arguments: &[&str]) -> Command {
        let mut command = self.validator();
        command
            .args(["burn", "--simulated-ok", "--sysroot"])
            .arg(self.sysroot())
            .arg("--json")
            .arg(self.out.path("report.json"))
            .arg("--facts")
            .arg(self.out.path("facts.json"))
            .args(arguments);
        command
    }

    /// Runs `command`, which writes `report.json`.
    pub(crate) fn finish(&self, command: &mut Command) -> Ran {
        Ran::of(command, || self.out.read("report.json"))
    }
}

/// Cargo keeps the library that belongs to this build next to the test's own executable.
fn library() -> PathBuf {
    let executable = std::env::current_exe().expect("the test knows its executable");
    executable.with_file_name("libsimulator.so")
}

/// A run that ended.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) took: Duration,
    pub(crate) report: Report,
}

impl Ran {
    pub(crate) fn of(command: &mut Command, report: impl FnOnce() -> String) -> Self {
        let started = Instant::now();
        let said = said(command);
        Self::ended(said, started.elapsed(), &report())
    }

    pub(crate) fn ended((code, stdout, stderr): Said, took: Duration, report: &str) -> Self {
        let report: Value = serde_json::from_str(report).expect("a JSON report");
        assert_eq!(
            report["exit_code"], code,
            "the report and the process end alike: {stdout}{stderr}"
        );
        Self {
            code,
            stdout,
            stderr,
            took,
            report: Report(report),
        }
    }
}

/// Exit code, stdout and stderr.
pub(crate) type Said = (i32, String, String);

pub(crate) fn said(command: &mut Command) -> Said {
    texts(command.output().expect("the validator starts"))
}

pub(crate) fn texts(output: Output) -> Said {
    (
        output.status.code().expect("it was not killed"),
        String::from_utf8(output.stdout).expect("UTF-8"),
        String::from_utf8(output.stderr).expect("UTF-8"),
    )
}

/// A JSON report.
#[derive(Clone, Debug)]
pub(crate) struct Report(pub(crate) Value);

impl Report {
    pub(crate) fn findings(&self) -> &[Value] {
        self.0["findings"].as_array().expect("findings")
    }

    pub(crate) fn of_check<'a>(&'a self, check: &'a str) -> impl Iterator<Item = &'a Value> {
        self.findings()
            .iter()
            .filter(move |it| it["check"] == check)
    }

    /// The only finding of a check.
    pub(crate) fn finding<'a>(&'a self, check: &'a str) -> &'a Value {
        let mut findings = self.of_check(check);
        let finding = findings
            .next()
            .unwrap_or_else(|| panic!("no finding of {check}"));
        assert!(findings.next().is_none(), "{check} has several findings");
        finding
    }

    /// The verdicts by check and subject.
    pub(crate) fn verdicts(&self) -> BTreeMap<(String, String), String> {
        let verdicts = self.findings().iter().map(|it| {
            let text = |value: &Value| value.as_str().expect("text").to_owned();
            (
                (text(&it["check"]), it["subject"].to_string()),
                text(&it["verdict"]),
            )
        });
        verdicts.collect()
    }

    /// `check: verdict` of everything that neither passed nor was skipped.
    pub(crate) fn not_green(&self) -> BTreeSet<String> {
        let verdicts = self.verdicts().into_iter();
        verdicts
            .filter(|(_, verdict)| !["pass", "skip"].contains(&verdict.as_str()))
            .map(|((check, _), verdict)| format!("{check}: {verdict}"))
            .collect()
    }
}

/// `["check: verdict"]` as [`Report::not_green`] gives it.
pub(crate) fn set(texts: &[&str]) -> BTreeSet<String> {
    texts.iter().map(|&text| text.to_owned()).collect()
}
