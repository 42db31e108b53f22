//! The example for the `CloudWatch` agent, held against the agent's keys, Prometheus and the
//! metrics that there are.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context as _, ensure};
use serde_json::Value;
use xshell::{Shell, cmd};

use crate::tools::LINTERS;
use crate::{json_schema, workspace};

/// Labels that the scrape adds: a dimension may be one of these, or a label of the metric.
const OF_THE_SCRAPE: [&str; 2] = ["InstanceId", "job"];

/// `folder` is manifests/monitoring, and `reports` are metrics as the validator writes them.
pub(crate) fn check(shell: &Shell, folder: &Path, reports: &[String]) -> anyhow::Result<()> {
    let agent = folder.join("cloudwatch/amazon-cloudwatch-agent.json");
    keys(shell, folder, &agent)?;
    let scrape = folder.join("cloudwatch/prometheus.yaml");
    // Its file of targets is made on the instance.
    cmd!(shell, "promtool check config --syntax-only {scrape}")
        .quiet()
        .run()
        .context("promtool objects to what the CloudWatch agent scrapes")?;
    let agent: Value = serde_json::from_str(&shell.read_file(&agent)?)?;
    let scrape = shell.read_file(&scrape)?;
    declarations(&agent, &scrape, reports)
}

/// A measurement that the agent does not have, and a misspelt key, must be refused first.
fn keys(shell: &Shell, folder: &Path, agent: &Path) -> anyhow::Result<()> {
    let checker = LINTERS.install()?.join("check-jsonschema");
    let schema = folder.join("tests/cloudwatch-agent.schema.json");
    let written = shell.read_file(agent)?;
    let copies = shell.create_dir(workspace::target().join("monitoring"))?;
    for misspelling in [
        ("utilization_gpu", "gpu_utilization"),
        ("metric_selectors", "metric_selector"),
    ] {
        let copy = copies.join("wrong.amazon-cloudwatch-agent.json");
        json_schema::refuses(shell, &schema, &written, misspelling, &copy)?;
    }
    cmd!(shell, "{checker} --quiet --schemafile {schema} {agent}")
        .quiet()
        .run()
        .context("the CloudWatch agent does not know all of the example")
}

/// Every metric that is declared is scraped and written, and has the labels that are its
/// dimensions.
fn declarations(agent: &Value, scrape: &str, reports: &[String]) -> anyhow::Result<()> {
    let prometheus = &agent["logs"]["metrics_collected"]["prometheus"];
    let declared = prometheus["emf_processor"]["metric_declaration"].as_array();
    let declared = declared.context("no metric_declaration")?;
    let job = only(scrape, "job_name:")?;
    let kept: BTreeSet<&str> = only(scrape, "regex:")?.split('|').collect();
    let mut names = BTreeSet::new();
    for declaration in declared {
        let matcher = declaration["label_matcher"].as_str().unwrap_or_default();
        ensure!(
            job == matcher.trim_matches(['^', '$']),
            "label_matcher {matcher} selects no job"
        );
        for selector in texts(&declaration["metric_selectors"]) {
            let name = selector.trim_matches(['^', '$']);
            names.insert(name);
            let labels = labels(name, reports)
                .with_context(|| format!("gpu-validator does not write {name}"))?;
            let dimensions = declaration["dimensions"].as_array().into_iter().flatten();
            for dimension in dimensions.flat_map(texts) {
                ensure!(
                    labels.contains(dimension) || OF_THE_SCRAPE.contains(&dimension),
                    "{name} has no label {dimension}, which is a dimension: it has {labels:?}"
                );
            }
        }
    }
    ensure!(
        names == kept,
        "the scrape keeps {kept:?}, and the agent declares {names:?}"
    );
    Ok(())
}

/// The value of a key that the file has once. promtool has parsed the file before.
fn only<'t>(text: &'t str, key: &str) -> anyhow::Result<&'t str> {
    let lines = text.lines().map(|it| it.trim_start_matches([' ', '-']));
    let values: Vec<&str> = lines.filter_map(|it| it.strip_prefix(key)).collect();
    let [value] = values[..] else {
        anyhow::bail!("the scrape has {key} {} times, expected once", values.len());
    };
    Ok(value.trim())
}

fn texts(list: &Value) -> impl Iterator<Item = &str> {
    let list = list.as_array().into_iter().flatten();
    list.filter_map(Value::as_str)
}

/// The labels of a metric, where a report has it.
fn labels(metric: &str, reports: &[String]) -> Option<BTreeSet<String>> {
    let lines = reports.iter().flat_map(|it| it.lines());
    let mut found = lines.filter_map(|line| {
        let rest = line.strip_prefix(metric)?;
        match rest.strip_prefix('{') {
            Some(rest) => Some(rest.split_once('}')?.0),
            None => rest.starts_with(' ').then_some(""),
        }
    });
    let pairs = found.next()?.split("\",");
    let names = pairs.filter_map(|it| Some(it.split_once("=\"")?.0.to_owned()));
    Some(names.collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_would_not_arrive_in_cloudwatch_is_named() {
        let reports = [
            "# TYPE m_verdict gauge\nm_verdict{verdict=\"pass\",level=\"a}b\"} 1\nm_code 0\n"
                .to_owned(),
        ];
        let check = |metric: &str, dimension: &str, kept: &str, job: &str| {
            let agent = json!({"logs": {"metrics_collected": {"prometheus": {"emf_processor": {
                "metric_declaration": [{
                    "label_matcher": "^gpu$",
                    "metric_selectors": [metric],
                    "dimensions": [["InstanceId", dimension]],
                }],
            }}}}});
            let scrape =
                format!("  - job_name: {job}\n      - source_labels: [a]\n        regex: {kept}\n");
            declarations(&agent, &scrape, &reports).map_err(|it| it.to_string())
        };
        check("^m_verdict$", "verdict", "m_verdict", "gpu").expect("right");
        for (metric, dimension, kept, job, message) in [
            (
                "^m_verdicts$",
                "verdict",
                "m_verdicts",
                "gpu",
                "does not write m_verdicts",
            ),
            (
                "^m_code$",
                "verdict",
                "m_code",
                "gpu",
                "m_code has no label verdict",
            ),
            (
                "^m_verdict$",
                "verdict",
                "m_code",
                "gpu",
                "the scrape keeps {\"m_code\"}",
            ),
            (
                "^m_verdict$",
                "verdict",
                "m_verdict",
                "node",
                "selects no job",
            ),
        ] {
            let error = check(metric, dimension, kept, job).expect_err(message);
            assert!(error.contains(message), "{error}");
        }
    }
}
