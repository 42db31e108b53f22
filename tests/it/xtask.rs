//! `cargo xtask` as a person meets it: what it answers to good and bad arguments, and a run on this
//! machine.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use crate::ssh::Folder;

/// A program of the workspace's tasks, built once for all tests: `xtask`, or the one that it starts
/// for a task.
pub(crate) fn program(name: &str) -> PathBuf {
    static BUILT: OnceLock<()> = OnceLock::new();
    BUILT.get_or_init(|| {
        let status = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--workspace", "--bin", "xtask"])
            .args(["--bin", "packer-tasks", "--bin", "terraform-tasks"])
            .status();
        assert!(
            status.expect("cargo can be started").success(),
            "xtask does not build"
        );
    });
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .parent()
        .expect("the temporary folder is below target");
    target.join("debug").join(name)
}

/// `validate-ami` with a stand-in for the validator.
pub(crate) fn validate_ami(stand_in: &Path, out: &Path) -> Command {
    let mut command = Command::new(program("packer-tasks"));
    command
        .arg("validate-ami")
        .arg("--binary")
        .arg(stand_in)
        .arg("--out")
        .arg(out)
        .env_remove("NO_COLOR");
    command
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn xtask(arguments: &[&str]) -> Output {
    Command::new(program("xtask"))
        .args(arguments)
        .output()
        .expect("xtask runs")
}

/// A stand-in that writes every requested report, then does `ending`.
pub(crate) fn stand_in(folder: &Folder, ending: &str) -> PathBuf {
    let script = format!(
        r#"#!/bin/sh
echo "folder: $PWD"
echo "process: $$"
echo "arguments: $*"
echo "said on stderr" >&2
write_reports() {{
  while [ $# -gt 0 ]; do
    case "$1" in
    --junit | --json | --markdown | --html | --facts)
      printf '{{"asked for by": "%s", "exit_code": %s}}\n' "$1" "${{code:-0}}" >"$2"
      shift
      ;;
    esac
    shift
  done
}}
{ending}
"#
    );
    folder.write_executable("stand-in", &script)
}

#[test]
fn wrong_arguments_end_with_3_and_name_the_argument() {
    let cases: [(&[&str], &str); 11] = [
        (
            &["validate-ami", "--target", "gpu-17"],
            "ssh://user@host:port",
        ),
        (
            &["validate-ami", "--target", "ssh://host:70000"],
            "port `70000`",
        ),
        (
            &["validate-ami", "--level", "thorough"],
            "quick, standard, extended",
        ),
        (
            &["validate-ami", "--profile", "no/such.yaml"],
            "--profile no/such.yaml cannot be read",
        ),
        (&["validate-ami", "--fault", "xid-79"], "--simulate"),
        (
            &[
                "validate-ami",
                "--simulate",
                "p5.48xlarge",
                "--target",
                "ssh://host",
            ],
            "this machine only",
        ),
        (
            &["validate-ami", "--ssh-config", "/dev/null"],
            "--target ssh://",
        ),
        (
            &["ami", "build", "eks-gpu-al2023", "--var", "gpu_family"],
            "expected NAME=VALUE",
        ),
        (&["ami", "build", "windows"], "ubuntu2404-runner"),
        (
            &["ami", "publish", "eks-gpu-al2023", "--share-with", "12"],
            "12 digits",
        ),
        (&["no-such-task"], "no-such-task"),
    ];
    for (arguments, expected) in cases {
        let output = xtask(arguments);
        assert_eq!(
            output.status.code(),
            Some(3),
            "{arguments:?}: {}",
            stderr(&output)
        );
        assert!(
            stderr(&output).contains(expected),
            "{arguments:?}: {}",
            stderr(&output)
        );
    }
}

#[test]
fn help_names_every_task() {
    let output = xtask(&["--help"]);
    assert_eq!(output.status.code(), Some(0));
    let help = String::from_utf8_lossy(&output.stdout).into_owned();
    for task in [
        "validate-ami",
        "dist",
        "simulate",
        "codegen",
        "ci",
        "fuzz",
        "tools",
        "junit-readers",
    ] {
        assert!(help.contains(task), "{help}");
    }
}

#[test]
fn a_local_run_keeps_every_report_and_the_exit_code() {
    for code in 0..=4 {
        let folder = Folder::new("local");
        let stand_in = stand_in(
            &folder,
            &format!("code={code}; write_reports \"$@\"; exit $code"),
        );
        let out = folder.path("reports");
        let output = validate_ami(&stand_in, &out)
            .args(["--level", "quick"])
            .output()
            .expect("xtask runs");
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        for name in [
            "report.junit.xml",
            "report.json",
            "report.md",
            "report.html",
            "facts.json",
        ] {
            let text = std::fs::read_to_string(out.join(name)).expect(name);
            assert!(text.contains("asked for by"), "{name}: {text}");
        }
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(printed.contains("--level quick"), "{printed}");
        assert!(
            printed.contains("--color never"),
            "a pipe is not a terminal: {printed}"
        );
        assert_eq!(
            std::fs::read_to_string(out.join("stdout.txt")).expect("stdout.txt"),
            printed
        );
        assert_eq!(
            std::fs::read_to_string(out.join("stderr.txt")).expect("stderr.txt"),
            "said on stderr\n"
        );
    }
}

#[test]
fn an_exit_code_that_no_report_backs_up_is_not_a_pass() {
    let cases = [
        ("exit 0", "did not come back"),
        ("code=1; write_reports \"$@\"; exit 0", "report.json has 1"),
        (
            "write_reports \"$@\"; for it; do case $it in */report.json) : >\"$it\" ;; esac; done; exit 0",
            "report.json did not come back",
        ),
        (
            "write_reports \"$@\"; for it; do case $it in */report.json) echo '{' >\"$it\" ;; esac; done; exit 0",
            "report.json is not JSON",
        ),
        ("write_reports \"$@\"; exit 101", "panicked"),
        ("write_reports \"$@\"; kill -9 $$", "killed by signal 9"),
    ];
    for (ending, expected) in cases {
        let folder = Folder::new("unbacked");
        let stand_in = stand_in(&folder, ending);
        let output = validate_ami(&stand_in, &folder.path("reports"))
            .current_dir(folder.path(""))
            .output()
            .expect("xtask runs");
        assert_eq!(
            output.status.code(),
            Some(2),
            "{ending}: {}",
            stderr(&output)
        );
        assert!(
            stderr(&output).contains(expected),
            "{ending}: {}",
            stderr(&output)
        );
    }
}

#[test]
fn reports_of_an_earlier_run_are_not_taken_for_this_ones() {
    let folder = Folder::new("earlier");
    let out = folder.path("reports");
    let good = stand_in(&folder, "write_reports \"$@\"; exit 0");
    assert_eq!(
        validate_ami(&good, &out)
            .output()
            .expect("xtask runs")
            .status
            .code(),
        Some(0)
    );
    let silent = stand_in(&folder, "exit 0");
    let output = validate_ami(&silent, &out).output().expect("xtask runs");
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(!out.join("report.json").exists());
}

#[test]
fn a_machine_without_a_gpu_is_not_green_and_hears_of_simulation() {
    let folder = Folder::new("no-gpu");
    let facts = r#"{"gpus": [], "host": {"pci_devices": {"value": []}}}"#;
    let ending = format!(
        "write_reports \"$@\"; for it; do case $it in */facts.json) echo '{facts}' >\"$it\" ;; esac; done; exit 2"
    );
    let output = validate_ami(&stand_in(&folder, &ending), &folder.path("reports"))
        .output()
        .expect("xtask runs");
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("--simulate p5.48xlarge"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn generated_files_are_up_to_date() {
    let output = xtask(&["codegen", "--check"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[test]
fn the_workflows_that_github_reads_are_those_of_the_workflows_folder() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut compared = 0;
    for entry in root
        .join("workflows")
        .read_dir()
        .expect("workflows")
        .flatten()
    {
        let source = entry.path();
        if source.extension().is_some_and(|it| it == "yml") {
            let copy = root.join(".github/workflows").join(entry.file_name());
            let read = |path: &Path| {
                std::fs::read_to_string(path)
                    .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
            };
            assert!(
                read(&source) == read(&copy),
                "{} differs from {}: copy the source over it",
                copy.display(),
                source.display()
            );
            compared += 1;
        }
    }
    assert!(compared > 0);
}
