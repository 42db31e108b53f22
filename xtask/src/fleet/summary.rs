//! The fleet: its nodes, what is usual among its GPUs, and which are unlike the others.

use std::collections::BTreeMap;

use super::node_report::{NodeReport, NodeVerdict};
use super::outliers::{Measurement, Usual};

/// Everything that the fleet's report says.
#[derive(Debug)]
pub(super) struct Fleet {
    pub(super) nodes: Vec<NodeReport>,
    pub(super) compared: Vec<Compared>,
    /// What differs between nodes that should be alike, and what cannot be, in words.
    pub(super) remarks: Vec<String>,
    /// One GPU reported by two nodes, or one node twice: the reports contradict each other.
    pub(super) contradictions: Vec<String>,
    pub(super) outliers_fail: bool,
}

/// One measurement of one model.
#[derive(Debug)]
pub(super) struct Compared {
    pub(super) model: String,
    pub(super) measurement: String,
    pub(super) usual: Usual,
    /// Farthest first.
    pub(super) outliers: Vec<Outlier>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Outlier {
    pub(super) node: String,
    pub(super) uuid: String,
    pub(super) value: f64,
    pub(super) score: f64,
}

impl Fleet {
    pub(super) fn of(mut nodes: Vec<NodeReport>, outliers_fail: bool) -> Fleet {
        nodes.sort_by(|a, b| (&a.name, &a.source).cmp(&(&b.name, &b.source)));
        Fleet {
            compared: compare(&nodes),
            remarks: remarks(&nodes),
            contradictions: contradictions(&nodes),
            nodes,
            outliers_fail,
        }
    }

    pub(super) fn count(&self, verdict: NodeVerdict) -> usize {
        self.nodes.iter().filter(|it| it.verdict == verdict).count()
    }

    pub(super) fn gpus(&self) -> usize {
        self.nodes.iter().map(|it| it.gpus.len()).sum()
    }

    pub(super) fn outliers(&self) -> impl Iterator<Item = (&Compared, &Outlier)> {
        self.compared.iter().flat_map(|compared| {
            compared
                .outliers
                .iter()
                .map(move |outlier| (compared, outlier))
        })
    }

    /// That of the worst node; reports that contradict each other are no pass, and neither is no report.
    pub(super) fn exit_code(&self) -> u8 {
        let worst = self.nodes.iter().map(|it| it.verdict).max();
        let worst = worst.unwrap_or(NodeVerdict::NotJudged);
        if self.outliers_fail && self.outliers().next().is_some() {
            return NodeVerdict::Fail.exit_code();
        }
        if self.contradictions.is_empty() {
            worst.exit_code()
        } else {
            worst.max(NodeVerdict::NotJudged).exit_code()
        }
    }

    pub(super) fn simulated(&self) -> usize {
        self.nodes.iter().filter(|it| it.simulated).count()
    }
}

/// Simulated GPUs are compared with each other only: next to real ones they would be the outliers, or make them.
fn model_of<'a>(node: &NodeReport, model: &'a str) -> std::borrow::Cow<'a, str> {
    if node.simulated {
        format!("{model} (SIMULATED)").into()
    } else {
        model.into()
    }
}

fn compare(nodes: &[NodeReport]) -> Vec<Compared> {
    type Values<'a> = Vec<(&'a NodeReport, &'a str, f64)>;
    let mut values: BTreeMap<(String, &str), Values<'_>> = BTreeMap::new();
    for node in nodes {
        for gpu in node.gpus.iter().filter(|it| !it.model.is_empty()) {
            let model = model_of(node, &gpu.model);
            for (name, value) in &gpu.measurements {
                if Measurement::named(name).is_some() && value.is_finite() {
                    values
                        .entry((model.clone().into_owned(), name))
                        .or_default()
                        .push((node, &gpu.uuid, *value));
                }
            }
        }
    }
    let compared = values.into_iter().filter_map(|((model, name), values)| {
        let measurement = Measurement::named(name)?;
        let numbers: Vec<f64> = values.iter().map(|(.., value)| *value).collect();
        let usual = Usual::of(&numbers)?;
        let mut outliers: Vec<Outlier> = values
            .iter()
            .filter_map(|(node, uuid, value)| {
                Some(Outlier {
                    node: node.name.clone(),
                    uuid: (*uuid).to_owned(),
                    value: *value,
                    score: usual.outlier(*value, measurement)?,
                })
            })
            .collect();
        outliers.sort_by(|a, b| b.score.abs().total_cmp(&a.score.abs()));
        Some(Compared {
            model,
            measurement: name.to_owned(),
            usual,
            outliers,
        })
    });
    compared.collect()
}

/// Versions that few nodes have.
fn remarks(nodes: &[NodeReport]) -> Vec<String> {
    type Version = fn(&NodeReport) -> Option<&String>;
    let versions: [(&str, Version); 2] = [
        ("driver", |it| it.driver_version.as_ref()),
        ("gpu-validator", |it| it.validator_version.as_ref()),
    ];
    let mut remarks = Vec::new();
    for (what, version) in versions {
        let mut of_version: BTreeMap<&String, Vec<&str>> = BTreeMap::new();
        for node in nodes {
            if let Some(version) = version(node) {
                of_version.entry(version).or_default().push(&node.name);
            }
        }
        let Some(most) = of_version
            .iter()
            .max_by_key(|(_, nodes)| nodes.len())
            .map(|it| *it.0)
        else {
            continue;
        };
        for (version, names) in of_version.iter().filter(|it| *it.0 != most) {
            remarks.push(format!(
                "{what} {version} on {}, {most} on most others",
                some_of(names)
            ));
        }
    }
    remarks
}

fn contradictions(nodes: &[NodeReport]) -> Vec<String> {
    let mut names: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut uuids: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for node in nodes {
        names.entry(&node.name).or_default().push(&node.source);
        for gpu in node.gpus.iter().filter(|it| !it.uuid.is_empty()) {
            uuids.entry(&gpu.uuid).or_default().push(&node.name);
        }
    }
    let twice = |them: &[&str]| them.len() > 1;
    let mut contradictions: Vec<String> = names
        .iter()
        .filter(|(_, sources)| twice(sources))
        .map(|(name, sources)| format!("node {name} has several reports: {}", some_of(sources)))
        .collect();
    contradictions.extend(
        uuids
            .iter()
            .filter(|(_, nodes)| twice(nodes))
            .map(|(uuid, nodes)| format!("{uuid} is in several reports: {}", some_of(nodes))),
    );
    contradictions
}

/// The first few, and how many more.
pub(super) fn some_of(names: &[&str]) -> String {
    const SHOWN: usize = 8;
    let shown = names
        .iter()
        .take(SHOWN)
        .copied()
        .collect::<Vec<_>>()
        .join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
