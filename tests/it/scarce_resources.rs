//! A process that gets less from its machine than it needs: a value that it could not read is an
//! error, never a pass nor a fail.

use std::os::unix::fs::MetadataExt as _;
use std::process::Command;

use serde_json::Value;

use crate::node::{Node, Ran, Scratch, in_place_of, said};

/// `command`, started by a shell after `preparation`.
fn behind_shell(command: &Command, preparation: &str) -> Command {
    let mut shell = in_place_of(command, "sh");
    shell.args(["-c", &format!("{preparation} && exec \"$@\""), "sh"]);
    shell.arg(command.get_program()).args(command.get_args());
    shell
}

#[test]
fn too_few_open_files_are_errors_and_nothing_else() {
    let node = Node::healthy("h200x8");
    let healthy = node.run(&["--level", "standard"]);
    assert_eq!(healthy.code, 0, "{}", healthy.stdout);
    let mut codes = Vec::new();
    for open_files in (7..40).step_by(4) {
        let run = node.run_command(&["--level", "standard"]);
        let mut command = behind_shell(&run, &format!("ulimit -n {open_files}"));
        // Where the report could not be opened either, it is on stdout.
        let scarcity = format!("{open_files} open files");
        codes.push(code_of_scarce_run(&node, &healthy, &mut command, &scarcity));
    }
    assert!(codes.iter().all(|code| [0, 2].contains(code)), "{codes:?}");
    assert_eq!(codes[0], 2, "seven open files are not enough");
}

/// Runs `command`, which gets less than it needs: what it read otherwise is an error or skipped.
fn code_of_scarce_run(node: &Node, healthy: &Ran, command: &mut Command, scarcity: &str) -> i32 {
    let output = command.output().expect("sh starts");
    let stdout = String::from_utf8(output.stdout).expect("UTF-8");
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(!stderr.contains("panicked"), "{scarcity}: {stderr}");
    let code = output.status.code().expect("it was not killed");
    let written = match stdout.split_once("----- JSON report for ") {
        Some((_, after)) => after.split_once('\n').expect("a line").1.to_owned(),
        None => node.out.read("report.json"),
    };
    let report: Value = serde_json::from_str(&written).expect("JSON");
    assert_eq!(report["exit_code"], code, "{scarcity}");
    for finding in report["findings"].as_array().expect("findings") {
        let verdict = finding["verdict"].as_str().expect("text");
        // Without its UUID a GPU is another subject, so that the check alone is compared.
        let check = finding["check"].as_str().expect("text");
        let mut usual = healthy.report.of_check(check).map(|it| &it["verdict"]);
        let is_usual = usual.any(|it| it == verdict);
        let is_trouble = check == "nvml_library" && verdict == "warn";
        assert!(
            is_usual || is_trouble || ["error", "skip"].contains(&verdict),
            "{scarcity}: {finding}"
        );
    }
    code
}

/// A user of their own for a command, since the limit counts all processes and threads of a user,
/// and does not hold for root.
const USER: &str = "54321";

/// `command` with so many processes and threads at most.
fn with_processes(node: &Node, command: &Command, processes: u32) -> Command {
    let is_root = std::fs::metadata("/proc/self").expect("/proc").uid() == 0;
    let mut limited = if is_root {
        for folder in [node.folder(), &node.out.path("")] {
            let mut chown = Command::new("chown");
            chown.arg("-R").arg(format!("{USER}:{USER}")).arg(folder);
            assert!(chown.status().expect("chown").success());
        }
        let mut setpriv = in_place_of(command, "setpriv");
        setpriv.args(["--reuid", USER, "--regid", USER, "--clear-groups"]);
        setpriv
    } else {
        // In a user namespace of its own the count begins at zero.
        let mut unshare = in_place_of(command, "unshare");
        unshare.args(["--user", "--map-current-user"]);
        unshare
    };
    limited.args(["prlimit", &format!("--nproc={processes}:{processes}")]);
    limited.arg(command.get_program()).args(command.get_args());
    limited
}

#[test]
fn too_few_processes_and_threads_are_errors_and_nothing_else() {
    let node = Node::healthy("h200x8");
    let healthy = node.run(&["--level", "standard"]);
    let mut codes = Vec::new();
    for processes in [2, 6, 13, 24, 44, 90] {
        let run = node.run_command(&["--level", "standard"]);
        let mut command = with_processes(&node, &run, processes);
        let scarcity = format!("{processes} processes");
        codes.push(code_of_scarce_run(&node, &healthy, &mut command, &scarcity));
    }
    assert!(codes.iter().all(|code| [0, 2].contains(code)), "{codes:?}");
    assert_eq!(codes[0], 2, "two processes are not enough");
}

#[test]
fn a_hook_with_too_few_processes_quarantines_nothing() {
    let node = Node::healthy("h100-pcie-2");
    for processes in [3, 12, 24] {
        let mut hook = node.validator();
        hook.args(["hook", "pre-job", "--simulated-ok", "--sysroot"]);
        hook.arg(node.sysroot());
        hook.arg("--state").arg(node.out.path("state"));
        let mut command = with_processes(&node, &hook, processes);
        let (code, stdout, stderr) = said(&mut command);
        let text = format!("{processes} processes: {stdout}{stderr}");
        assert!([0, 2].contains(&code), "exit code {code}: {text}");
        assert!(!stderr.contains("panicked"), "{text}");
        assert!(!node.out.path("state/quarantine").exists(), "{text}");
    }
}

#[test]
fn neither_a_working_folder_nor_standard_streams_are_needed() {
    let node = Node::healthy("h200x1");
    let gone = Scratch::new();
    let folder = gone.path("gone");
    for preparation in [
        format!("mkdir '{0}' && cd '{0}' && rmdir '{0}'", folder.display()),
        "exec <&- >&- 2>&-".to_owned(),
    ] {
        let _ = std::fs::remove_file(node.out.path("report.json"));
        let run = node.run_command(&["--level", "standard"]);
        let ran: Ran = node.finish(&mut behind_shell(&run, &preparation));
        assert_eq!(ran.code, 0, "{preparation}: {}{}", ran.stdout, ran.stderr);
        assert_eq!(ran.report.finding("cuda_kernel")["verdict"], "pass");
    }
}

/// Workers then open the nodes of all GPUs, as any program does.
#[test]
fn a_kernel_without_landlock_costs_no_verdict() {
    let node = Node::healthy("h200x8");
    let healthy = node.run(&["--level", "standard"]);
    let run = node.run_command(&["--level", "standard"]);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/without_landlock.py");
    let mut without = in_place_of(&run, "python3");
    without.arg(script).arg(run.get_program());
    without.args(run.get_args());
    let ran = node.finish(&mut without);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    assert_eq!(ran.report.verdicts(), healthy.report.verdicts());
}
