//! `cargo xtask monitoring`: alert rules, dashboard and the example for the `CloudWatch` agent,
//! held against Prometheus, Grafana's schema, the agent's keys and the metrics that there are.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use serde_json::Value;
use xshell::{Shell, cmd};

use crate::cloudwatch;
use crate::tools::GRAFANA_SDK;
use crate::workspace;

/// The beginning of every metric's name.
const PREFIX: &str = "gpu_validator_";

pub(crate) fn run() -> anyhow::Result<()> {
    let shell = workspace::shell()?;
    let rules = folder().join("gpu-validator.rules.yaml");
    let dashboard = folder().join("gpu-validator.dashboard.json");
    alert_rules(&shell, &rules)?;
    schema(&shell, &dashboard)?;
    let reports = reports(&shell)?;
    cloudwatch::check(&shell, &folder(), &reports)?;
    let written: BTreeSet<String> = reports.iter().flat_map(|it| metrics(it)).collect();
    ensure!(written.len() > 5, "the expected reports hold no metrics");
    for file in [rules, dashboard] {
        let unknown = unknown(&shell.read_file(&file)?, &written);
        ensure!(
            unknown.is_empty(),
            "{} reads metrics that gpu-validator does not write: {unknown:?}",
            file.display()
        );
    }
    println!(
        "alert rules, dashboard and CloudWatch agent read only metrics that gpu-validator writes"
    );
    Ok(())
}

fn folder() -> PathBuf {
    workspace::root().join("manifests/monitoring")
}

fn alert_rules(shell: &Shell, rules: &PathBuf) -> anyhow::Result<()> {
    let tests = folder().join("tests/gpu-validator.test.yaml");
    let missing = "promtool objects; where it is missing, install it (Debian and Ubuntu: apt-get install prometheus)";
    cmd!(shell, "promtool check rules {rules}")
        .quiet()
        .run()
        .context(missing)?;
    cmd!(shell, "promtool test rules {tests}")
        .quiet()
        .run()
        .context(missing)
}

/// A field that Grafana does not know must be refused first, or the comparison means nothing.
fn schema(shell: &Shell, dashboard: &PathBuf) -> anyhow::Result<()> {
    let python = GRAFANA_SDK.install()?.join("python3");
    let script = folder().join("tests/dashboard_schema.py");
    let mut wrong: Value = serde_json::from_str(&shell.read_file(dashboard)?)?;
    wrong["panels"][0]["fieldConfig"]["defaults"]["units"] = Value::from("celsius");
    let folder = workspace::target().join("monitoring");
    let copy = folder.join("wrong.dashboard.json");
    shell.create_dir(&folder)?;
    shell.write_file(&copy, wrong.to_string())?;
    let refused = cmd!(shell, "{python} {script} {copy}")
        .quiet()
        .ignore_status()
        .output()?;
    let said = String::from_utf8_lossy(&refused.stdout);
    ensure!(
        !refused.status.success() && said.contains("fieldConfig.defaults.units is unknown"),
        "a misspelt field is accepted: {said}{}",
        String::from_utf8_lossy(&refused.stderr)
    );
    cmd!(shell, "{python} {script} {dashboard}")
        .quiet()
        .run()
        .context("the dashboard does not fit Grafana's schema")
}

/// The expected reports as metrics.
fn reports(shell: &Shell) -> anyhow::Result<Vec<String>> {
    let folder = workspace::root().join("tests/golden");
    let mut reports = Vec::new();
    for file in shell.read_dir(folder)? {
        if file.extension().is_some_and(|it| it == "prom") {
            reports.push(String::from_utf8_lossy(&shell.read_binary_file(&file)?).into_owned());
        }
    }
    Ok(reports)
}

fn metrics(text: &str) -> BTreeSet<String> {
    let words = text.split(|it: char| !(it.is_ascii_alphanumeric() || it == '_'));
    let metrics = words.filter(|it| it.starts_with(PREFIX));
    metrics.map(str::to_owned).collect()
}

fn unknown(text: &str, written: &BTreeSet<String>) -> BTreeSet<String> {
    &metrics(text) - written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_that_is_not_written_is_found() {
        let written = metrics("gpu_validator_info{version=\"1\"} 1\ngpu_validator_verdict 0\n");
        let unknown = unknown(
            "gpu_validator_info == 1 or gpu_validator_infos == 1",
            &written,
        );
        assert_eq!(
            unknown.into_iter().collect::<Vec<_>>(),
            ["gpu_validator_infos"]
        );
    }
}
