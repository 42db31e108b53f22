//! What must hold for every job of every workflow, beyond what zizmor and actionlint know.

use serde_json::Value;

use crate::workspace;

/// Programs that run code from elsewhere: crates' build scripts, packages' installers, modules.
const BUILDERS: [&str; 8] = ["cargo", "go", "make", "npm", "npx", "pip", "pipx", "rustup"];

fn workflows() -> Vec<(String, Value)> {
    let folder = workspace::root().join("workflows");
    let mut found = Vec::new();
    for entry in folder.read_dir().expect("workflows").flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|it| it == "yml") {
            let text = std::fs::read_to_string(&path).expect("it is read");
            let workflow = serde_yaml::from_str(&text).expect("YAML");
            found.push((path.display().to_string(), workflow));
        }
    }
    assert!(!found.is_empty());
    found
}

/// The programs that a step's script starts: the first word of each command.
fn programs(script: &str) -> Vec<&str> {
    let commands = script.split(['\n', ';', '|', '&', '(']);
    let words = commands.filter_map(|it| {
        let is_prefix = |word: &str| {
            word.contains('=') || ["sudo", "env", "exec", "if", "then", "do"].contains(&word)
        };
        it.split_whitespace().find(|word| !is_prefix(word))
    });
    words.collect()
}

fn may_write(job: &Value) -> bool {
    let permissions = job["permissions"].as_object();
    permissions.is_some_and(|them| them.values().any(|it| it == "write"))
}

/// What a job with rights must not start, if it does.
fn builder_with_rights(job: &Value) -> Option<String> {
    if !may_write(job) {
        return None;
    }
    let steps = job["steps"].as_array().into_iter().flatten();
    let scripts = steps.filter_map(|it| it["run"].as_str());
    scripts
        .flat_map(programs)
        .find(|program| BUILDERS.contains(program))
        .map(str::to_owned)
}

#[test]
fn no_job_with_rights_builds_what_others_wrote() {
    let mut with_rights = 0;
    for (file, workflow) in workflows() {
        for (name, job) in workflow["jobs"].as_object().expect("jobs") {
            with_rights += usize::from(may_write(job));
            assert_eq!(builder_with_rights(job), None, "{file}: job {name}");
        }
    }
    assert!(with_rights >= 4, "{with_rights} jobs have rights");
}

#[test]
fn a_build_with_rights_is_found() {
    let job = |permission: &str, run: &str| serde_json::json!({"permissions": {"id-token": permission}, "steps": [{"run": run}]});
    let found = builder_with_rights(&job("write", "set -e\nversion=1; sudo cargo xtask dist"));
    assert_eq!(found.as_deref(), Some("cargo"));
    assert_eq!(builder_with_rights(&job("read", "cargo build")), None);
    let built = job("write", "target/debug/xtask ami build cargo");
    assert_eq!(builder_with_rights(&built), None);
}
