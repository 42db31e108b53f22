//! What must hold for every job of every workflow, beyond what zizmor and actionlint know.

use serde_json::Value;

use crate::workspace;

/// Programs that run code from elsewhere: crates' build scripts, packages' installers, modules. xtask
/// starts cargo for the programs of its tasks (`delegated`).
const BUILDERS: [&str; 9] = [
    "cargo", "go", "make", "npm", "npx", "pip", "pipx", "rustup", "xtask",
];

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
        .find(|program| BUILDERS.contains(&program.rsplit('/').next().unwrap_or_default()))
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
    let built = job("write", "target/debug/packer-tasks ami build cargo");
    assert_eq!(builder_with_rights(&built), None);
    let found = builder_with_rights(&job("write", "target/debug/xtask ami build x"));
    assert_eq!(found.as_deref(), Some("target/debug/xtask"));
}

/// Seconds that a job's credentials of AWS outlast its time limit; `None` without credentials.
fn credentials_margin(job: &Value) -> Option<i64> {
    let steps = job["steps"].as_array().into_iter().flatten();
    let mut configured = steps.filter(|it| {
        let action = it["uses"].as_str().unwrap_or_default();
        action.starts_with("aws-actions/configure-aws-credentials@")
    });
    // The action's default is an hour.
    let seconds = configured.next()?["with"]["role-duration-seconds"].as_i64();
    let limit = job["timeout-minutes"].as_i64().unwrap_or(360) * 60;
    Some(seconds.unwrap_or(3600) - limit)
}

#[test]
fn no_job_outlives_its_credentials() {
    let mut count = 0;
    for (file, workflow) in workflows() {
        for (name, job) in workflow["jobs"].as_object().expect("jobs") {
            if let Some(margin) = credentials_margin(job) {
                assert!(margin >= 0, "{file}: job {name}: {margin} s");
                count += 1;
            }
        }
    }
    assert!(count >= 3, "{count} jobs have credentials");
    let job = |with: Value| {
        let uses = "aws-actions/configure-aws-credentials@v6";
        serde_json::json!({"timeout-minutes": 110, "steps": [{"uses": uses, "with": with}]})
    };
    let long = serde_json::json!({"role-duration-seconds": 7200});
    assert_eq!(credentials_margin(&job(long)), Some(600));
    assert_eq!(credentials_margin(&job(Value::Null)), Some(-3000));
}
