//! Simulated libraries in the environment must not open a node (threat model: T4).

use crate::node::{Node, said};

/// A hook as a runner starts it, with what a job has put into the environment.
fn hook(node: &Node, name: &str, accepted: bool, variables: &[(&str, &str)]) -> crate::node::Said {
    let mut hook = node.validator();
    hook.args(["hook", name, "--state"])
        .arg(node.out.path("state"));
    hook.arg("--sysroot").arg(node.sysroot());
    if name == "pre-job" {
        hook.args(["--burn", "0"]);
    }
    if accepted {
        hook.arg("--simulated-ok");
    }
    said(hook.env("RUNNER_NAME", "r").envs(variables.iter().copied()))
}

#[test]
fn simulated_libraries_in_the_environment_do_not_reach_a_hook() {
    let node = Node::healthy("h200x1");
    let (code, stdout, stderr) = hook(&node, "pre-job", false, &[]);
    assert_ne!(code, 0, "{stdout}{stderr}");
    assert!(!stdout.contains("SIMULATED"), "{stdout}");
    let (code, stdout, stderr) = hook(&node, "pre-job", true, &[]);
    assert_eq!(code, 0, "{stdout}{stderr}");
    assert!(stdout.contains("SIMULATED PASS"), "{stdout}");
}

#[test]
fn what_a_job_sets_decides_nothing_of_a_hook() {
    let node = Node::with_fault("h200x1", "ecc-volatile-uncorrectable");
    for (name, value) in [
        ("GPU_VALIDATOR_HOOK_FAIL_ON", "never"),
        ("GPU_VALIDATOR_HOOK_GPUS", "GPU-none"),
        ("GPU_VALIDATOR_HOOK_STATE", "/tmp/elsewhere"),
        ("GPU_VALIDATOR_PROFILE", "/nonexistent"),
        ("CUDA_VISIBLE_DEVICES", "0"),
    ] {
        let (code, _, stderr) = hook(&node, "pre-job", true, &[(name, value)]);
        assert_eq!(code, 3, "{name}: {stderr}");
        let says = format!("{name} is set in the environment, where a job can set it");
        assert!(stderr.contains(&says), "{stderr}");
        let (code, stdout, stderr) = hook(&node, "post-job", true, &[(name, value)]);
        assert_eq!(code, 0, "{name}: {stdout}{stderr}");
        assert!(stderr.contains("it is ignored"), "{stderr}");
        assert!(stdout.contains("no record of this job"), "{stdout}");
    }
    // Nothing that cannot be read as an option keeps the hook from cleaning.
    let (code, _, stderr) = hook(
        &node,
        "post-job",
        true,
        &[("GPU_VALIDATOR_HOOK_GRACE", "x")],
    );
    assert_eq!(code, 0, "{stderr}");
}

#[test]
fn a_simulated_run_is_no_pass_and_no_variable_changes_that() {
    let node = Node::healthy("h200x1");
    let facts = node.out.path("facts.json");
    let sysroot = node.sysroot().to_str().expect("UTF-8").to_owned();
    let commands: [&[&str]; 2] = [
        &["run", "--level", "quick", "--sysroot", &sysroot],
        &["burn", "--duration", "0.2s", "--sysroot", &sysroot],
    ];
    for arguments in commands {
        let mut command = node.validator();
        command.args(arguments).arg("--facts").arg(&facts);
        for name in [
            "GPU_VALIDATOR_SIMULATED_OK",
            "GPU_VALIDATOR_ALLOW_SIMULATED",
        ] {
            command.env(name, "true");
        }
        command.env("GPU_VALIDATOR_FORBID_SIMULATED", "false");
        let (code, stdout, stderr) = said(&mut command);
        assert_eq!(code, 2, "{arguments:?}: {stdout}{stderr}");
        assert!(
            stdout.contains("the driver libraries are simulated"),
            "{stdout}"
        );
        command.arg("--simulated-ok");
        let (code, stdout, stderr) = said(&mut command);
        assert_eq!(code, 0, "{arguments:?}: {stdout}{stderr}");
    }
    let mut judge = node.validator();
    judge.arg("judge").arg(&facts);
    assert_eq!(said(&mut judge).0, 2);
}
