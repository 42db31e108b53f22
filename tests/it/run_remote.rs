//! `gpu-validator run --target ssh://…` and `--targets` against a real sshd on loopback: the binary
//! copies itself there.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::node::{Node, Said, said, validator};
use crate::ssh::{Server, free_port};

/// `run` on other machines, with the reports in `reports`.
fn run_there(server: &Server, arguments: &[&str]) -> Command {
    let mut command = validator();
    command
        .args(["run", "--level", "quick", "--ssh-config"])
        .arg(server.folder.path("ssh_config"))
        .arg("--out")
        .arg(server.folder.path("reports"))
        .args(arguments);
    command
}

fn json(path: &Path) -> Value {
    let text =
        std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).expect("JSON")
}

/// The temporary folder that standard error names,
/// `copying gpu-validator (… MB) to gpu-under-test:/tmp/…`.
fn remote_folder(stderr: &str) -> &str {
    let line = stderr
        .lines()
        .find(|it| it.contains("copying gpu-validator"));
    let line = line.unwrap_or_else(|| panic!("nothing was copied: {stderr}"));
    line.rsplit(':').next().expect("a folder")
}

#[test]
fn verdict_and_reports_of_another_machine_come_back_and_nothing_stays_there() {
    let node = Node::with_fault("h200x1", "nvml-hang");
    let server = Server::start_with(&node.environment());
    let sysroot = node.sysroot().display().to_string();
    let (code, stdout, stderr): Said = said(&mut run_there(
        &server,
        &["--target", "ssh://gpu-under-test", "--sysroot", &sysroot],
    ));
    assert_eq!(code, 2, "{stdout}{stderr}");
    let report = json(&server.folder.path("reports/report.json"));
    assert_eq!(report["exit_code"], 2);
    assert_eq!(report["level"], "quick");
    assert!(
        report["simulated"].is_string(),
        "the node was seen there: {stdout}"
    );
    for name in [
        "report.junit.xml",
        "report.md",
        "report.html",
        "facts.json",
        "stdout.txt",
    ] {
        let file = server.folder.path("reports").join(name);
        assert!(
            std::fs::metadata(&file).is_ok_and(|it| it.len() > 0),
            "{name}"
        );
    }
    assert!(
        stdout.contains("SIMULATED"),
        "the other machine's output is shown: {stdout}"
    );
    let folder = remote_folder(&stderr);
    assert!(
        folder.contains("/gpu-validator.") && !Path::new(folder).exists(),
        "{folder}"
    );
}

/// Environments are found and started on the other machine, by the profile that went there.
#[test]
fn python_environments_of_another_machine_are_judged_there() {
    let node = Node::healthy("h200x1");
    let server = Server::start_with(&node.environment());
    let works = crate::environment::torch_venv(&node.out, "works", "");
    let broken = crate::environment::torch_venv(&node.out, "broken", "import error");
    let profile = server.folder.write(
        "profile.yaml",
        &format!(
            "python: [{{path: {}}}, {{path: {}}}]\n",
            works.display(),
            broken.display()
        ),
    );
    let profile = profile.display().to_string();
    let sysroot = node.sysroot().display().to_string();
    let mut command = validator();
    command
        .args(["run", "--level", "standard", "--no-burn", "--ssh-config"])
        .arg(server.folder.path("ssh_config"))
        .arg("--out")
        .arg(server.folder.path("reports"))
        .args(["--target", "ssh://gpu-under-test"])
        .args(["--sysroot", &sysroot, "--profile", &profile]);
    let (code, stdout, stderr) = said(&mut command);
    assert_eq!(code, 1, "{stdout}{stderr}");
    let report = json(&server.folder.path("reports/report.json"));
    let findings = report["findings"].as_array().expect("findings");
    let of = |check: &str, path: &Path| {
        let path = path.to_str().expect("UTF-8");
        let found = findings
            .iter()
            .find(|it| it["check"] == check && it["subject"]["environment"]["path"] == path);
        found.unwrap_or_else(|| panic!("no {check} of {path}: {stdout}{stderr}"))
    };
    for check in ["python_environment", "torch_cuda", "torch_gemm"] {
        assert_eq!(
            of(check, &works)["verdict"],
            "pass",
            "{:#}",
            of(check, &works)
        );
    }
    let failed = of("torch_cuda", &broken);
    assert_eq!(failed["verdict"], "fail", "{failed:#}");
    let summary = failed["summary"].as_str().expect("a summary");
    assert!(
        summary.contains("import failed: ImportError: libcudnn.so.9"),
        "{summary}"
    );
    let junit = std::fs::read_to_string(server.folder.path("reports/report.junit.xml"));
    let class = format!("gpu-validator.environment.{}", broken.display());
    assert!(junit.expect("a JUnit report").contains(&class));
}

#[test]
fn a_simulated_pass_of_another_machine_is_no_pass() {
    let node = Node::healthy("h200x1");
    let server = Server::start_with(&node.environment());
    let sysroot = node.sysroot().display().to_string();
    let (code, stdout, stderr) = said(&mut run_there(
        &server,
        &["--target", "ssh://gpu-under-test", "--sysroot", &sysroot],
    ));
    let report = json(&server.folder.path("reports/report.json"));
    assert_eq!(report["exit_code"], 2, "{stdout}");
    assert_eq!(code, 2, "{stdout}{stderr}");
    let reason = report["incomplete"].as_str().unwrap_or_default();
    assert!(
        reason.contains("driver libraries are simulated"),
        "{reason}"
    );
}

#[test]
fn a_fleet_is_judged_in_parallel_and_reported_in_one() {
    let node = Node::with_fault("h200x1", "row-remap-failure");
    let server = Server::start_with(&node.environment());
    let sysroot = node.sysroot().display().to_string();
    let hosts = server.folder.write(
        "hosts",
        &format!(
            "# two machines\nssh://gpu-under-test\n127.0.0.1:{} # nothing listens\n",
            free_port()
        ),
    );
    let hosts = hosts.display().to_string();
    let (code, stdout, stderr) = said(&mut run_there(
        &server,
        &["--targets", &hosts, "--sysroot", &sysroot],
    ));
    assert_eq!(code, 1, "{stdout}{stderr}");
    let fleet = json(&server.folder.path("reports/fleet.report"));
    assert_eq!(
        (&fleet["totals"]["nodes"], &fleet["totals"]["fail"]),
        (&2.into(), &1.into())
    );
    let nodes = fleet["nodes"].as_array().expect("nodes");
    let missing = nodes
        .iter()
        .find(|it| it["source"] == "")
        .expect("the one that is down");
    let text = missing["text"].as_str().expect("text");
    assert!(
        text.starts_with("no report: no connection to 127.0.0.1:"),
        "{text}"
    );
    let failed = nodes
        .iter()
        .find(|it| it["verdict"] == "fail")
        .expect("the one that failed");
    let failures = failed["failures"].as_array().expect("failures");
    let of_gpu = failures.iter().find(|it| it["gpu"]["index"] == 0);
    assert!(of_gpu.is_some(), "{failures:#?}");
    assert!(
        stdout.contains("gpu-under-test: "),
        "whole lines with the machine's name: {stdout}"
    );
    assert!(
        stdout.contains("Nodes that did not pass"),
        "one summary: {stdout}"
    );
    for name in [
        "fleet.md",
        "fleet.html",
        "fleet.junit",
        "gpu-under-test/report.json",
    ] {
        assert!(server.folder.path("reports").join(name).exists(), "{name}");
    }
}

#[test]
fn what_does_not_fit_together_is_refused_before_any_connection() {
    let refused = |arguments: &[&str]| {
        let mut command = validator();
        let (code, _, stderr) = said(command.arg("run").args(arguments));
        assert_eq!(code, 3, "{arguments:?}: {stderr}");
        stderr
    };
    assert!(refused(&["--target", "gpu-17"]).contains("ssh://user@host:port"));
    assert!(refused(&["--sudo"]).contains("--sudo needs --target"));
    let local = ["--target", "ssh://gpu-17", "--junit", "x.xml"];
    assert!(refused(&local).contains("--out DIR"));
    let both = ["--target", "ssh://gpu-17", "--targets", "hosts"];
    assert!(refused(&both).contains("cannot be used with"));
    assert!(refused(&["--targets", "no/such/file"]).contains("no/such/file cannot be read"));
    assert!(refused(&["--parallel", "3"]).contains("--targets"));
    let profile = ["--target", "ssh://gpu-17", "--profile", "no/such.yaml"];
    assert!(refused(&profile).contains("no/such.yaml"));
}
