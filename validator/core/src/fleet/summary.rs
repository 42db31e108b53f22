//! The fleet: its nodes, what is usual among its GPUs, and which are unlike the others.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use super::node_report::{NodeReport, NodeVerdict, shortest};
use super::outliers::{Measurement, Usual};

/// The contents of the fleet's report.
#[derive(Debug)]
pub struct Fleet {
    pub(crate) nodes: Vec<NodeReport>,
    pub(crate) compared: Vec<Compared>,
    /// What differs between nodes that should be alike, and what cannot be, in words.
    pub(crate) remarks: Vec<String>,
    /// One GPU reported by two nodes, or one node twice: the reports contradict each other.
    pub(crate) contradictions: Vec<String>,
    pub(crate) outliers_fail: bool,
}

/// One measurement of one model.
#[derive(Debug)]
pub(crate) struct Compared {
    pub(crate) model: String,
    pub(crate) measurement: String,
    pub(crate) usual: Usual,
    /// Farthest first.
    pub(crate) outliers: Vec<Outlier>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outlier {
    pub(crate) node: String,
    pub(crate) uuid: String,
    pub(crate) value: f64,
    pub(crate) score: f64,
}

impl Fleet {
    pub fn of(mut nodes: Vec<NodeReport>, outliers_fail: bool) -> Fleet {
        nodes.sort_by(|a, b| (&a.name, &a.source).cmp(&(&b.name, &b.source)));
        Fleet {
            compared: compare(&nodes),
            remarks: remarks(&nodes),
            contradictions: contradictions(&nodes),
            nodes,
            outliers_fail,
        }
    }

    pub(crate) fn count(&self, verdict: NodeVerdict) -> usize {
        self.nodes.iter().filter(|it| it.verdict == verdict).count()
    }

    pub(crate) fn gpus(&self) -> usize {
        self.nodes.iter().map(|it| it.gpus.len()).sum()
    }

    pub(crate) fn outliers(&self) -> impl Iterator<Item = (&Compared, &Outlier)> {
        self.compared.iter().flat_map(|compared| {
            compared
                .outliers
                .iter()
                .map(move |outlier| (compared, outlier))
        })
    }

    /// That of the worst node; reports that contradict each other are no pass, and neither is no
    /// report.
    pub fn exit_code(&self) -> u8 {
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

    pub(crate) fn simulated(&self) -> usize {
        self.nodes.iter().filter(|it| it.simulated).count()
    }
}

/// Simulated GPUs are compared with each other only: next to real ones they would be the outliers,
/// or make them.
fn model_of<'a>(node: &NodeReport, model: &'a str) -> Cow<'a, str> {
    if node.simulated {
        format!("{model} (SIMULATED)").into()
    } else {
        model.into()
    }
}

/// One measurement at a time, so that no more than one is in memory a second time.
fn compare(nodes: &[NodeReport]) -> Vec<Compared> {
    let mut measured: BTreeSet<(Cow<'_, str>, &str)> = BTreeSet::new();
    for node in nodes {
        for gpu in node.gpus.iter().filter(|it| !it.shape.model.is_empty()) {
            for name in &gpu.shape.measurements {
                measured.insert((model_of(node, &gpu.shape.model), name));
            }
        }
    }
    let compared = measured
        .into_iter()
        .filter_map(|(model, name)| compare_one(nodes, &model, name));
    compared.collect()
}

fn compare_one(nodes: &[NodeReport], model: &str, name: &str) -> Option<Compared> {
    let measurement = Measurement::named(name)?;
    let values = || {
        nodes.iter().flat_map(|node| {
            let gpus = node.gpus.iter();
            let of_model = gpus.filter(|gpu| model_of(node, &gpu.shape.model) == model);
            of_model.filter_map(move |gpu| Some((node, gpu.uuid, gpu.measured(name)?)))
        })
    };
    let numbers: Vec<f64> = values().map(|(.., value)| f64::from(value)).collect();
    let usual = Usual::of(&numbers)?;
    drop(numbers);
    let outliers = values().filter_map(|(node, uuid, value)| {
        Some(Outlier {
            node: node.name.clone(),
            uuid: uuid.to_owned(),
            value: shortest(value),
            score: usual.outlier(f64::from(value), measurement)?,
        })
    });
    let mut outliers: Vec<Outlier> = outliers.collect();
    outliers.sort_by(|a, b| b.score.abs().total_cmp(&a.score.abs()));
    Some(Compared {
        model: model.to_owned(),
        measurement: name.to_owned(),
        usual,
        outliers,
    })
}

/// Versions that few nodes have.
fn remarks(nodes: &[NodeReport]) -> Vec<String> {
    type Version = fn(&NodeReport) -> Option<&str>;
    let versions: [(&str, Version); 2] = [
        ("driver", |it| it.driver_version.as_deref()),
        ("gpu-validator", |it| it.validator_version.as_deref()),
    ];
    let mut remarks = Vec::new();
    for (what, version) in versions {
        let mut of_version: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
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
    let names = nodes
        .iter()
        .map(|it| (it.name.as_str(), it.source.as_str()));
    let mut contradictions: Vec<String> = twice(names)
        .into_iter()
        .map(|(name, sources)| format!("node {name} has several reports: {}", some_of(&sources)))
        .collect();
    let uuids = nodes.iter().flat_map(|node| {
        let uuids = node.gpus.iter().map(|gpu| gpu.uuid);
        uuids
            .filter(|it| !it.is_empty())
            .map(|uuid| (uuid, node.name.as_str()))
    });
    contradictions.extend(
        twice(uuids)
            .into_iter()
            .map(|(uuid, nodes)| format!("{uuid} is in several reports: {}", some_of(&nodes))),
    );
    contradictions
}

/// What comes more than once, with where.
fn twice<'a>(them: impl Iterator<Item = (&'a str, &'a str)>) -> Vec<(&'a str, Vec<&'a str>)> {
    let mut them: Vec<_> = them.collect();
    // Stable: where it comes stays in the order of the nodes.
    them.sort_by_key(|(it, _)| *it);
    them.chunk_by(|one, next| one.0 == next.0)
        .filter(|same| same.len() > 1)
        .map(|same| (same[0].0, same.iter().map(|(_, place)| *place).collect()))
        .collect()
}

/// The first few, and how many more.
pub(crate) fn some_of(names: &[&str]) -> String {
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
