//! The fleet's report in each format. Pure.

use std::fmt::Write as _;
use std::io::{self, Write};

use maud::{DOCTYPE, html as markup};
use quick_xml::Writer;
use quick_xml::events::BytesText;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::node_report::{NodeReport, NodeVerdict};
use super::outliers::{Measurement, VALUES_MINIMUM, Worse};
use super::summary::{Compared, Fleet, Outlier};

/// The version of the JSON format; it grows when a reader of the older would misread.
const FORMAT: u32 = 1;
/// Nodes and outliers that a report for people lists; the one for programs lists all.
const LINES_MAXIMUM: usize = 200;

pub fn markdown(fleet: &Fleet) -> String {
    let mut text = format!("# GPU fleet: {}\n\n{}\n", headline(fleet), totals(fleet));
    section(
        &mut text,
        "Contradictions",
        fleet
            .contradictions
            .iter()
            .map(|it| format!("- {}", cell(it))),
    );
    let bad = fleet
        .nodes
        .iter()
        .filter(|it| it.verdict != NodeVerdict::Pass);
    section(
        &mut text,
        "Nodes that did not pass",
        bad.flat_map(|node| {
            let first = format!(
                "- **{}** {}: {}",
                cell(&node.name),
                node.verdict.name(),
                cell(&node.text)
            );
            let more = node
                .failures
                .iter()
                .map(|it| format!("  - {}", cell(&it.to_string())));
            std::iter::once(first).chain(more).collect::<Vec<_>>()
        }),
    );
    section(
        &mut text,
        "Outliers",
        fleet
            .outliers()
            .map(|(compared, it)| format!("- {}", cell(&sentence(compared, it)))),
    );
    section(
        &mut text,
        "Differences between nodes",
        fleet.remarks.iter().map(|it| format!("- {}", cell(it))),
    );
    if !fleet.compared.is_empty() {
        text.push_str("\n## What is usual\n\n| model | measurement | GPUs | median | deviation | outliers |\n|---|---|---:|---:|---:|---:|\n");
        for it in &fleet.compared {
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {} | {} |",
                cell(&it.model),
                cell(&it.measurement),
                it.usual.count,
                number(it.usual.median),
                number(it.usual.deviation),
                it.outliers.len()
            );
        }
    }
    text
}

fn section(text: &mut String, title: &str, lines: impl Iterator<Item = String>) {
    let lines: Vec<String> = lines.collect();
    if lines.is_empty() {
        return;
    }
    let _ = writeln!(text, "\n## {title}\n");
    for line in lines.iter().take(LINES_MAXIMUM) {
        text.push_str(line);
        text.push('\n');
    }
    if lines.len() > LINES_MAXIMUM {
        let _ = writeln!(
            text,
            "- … and {} lines more, in the JSON report",
            lines.len() - LINES_MAXIMUM
        );
    }
}

/// The verdict on the fleet in words.
fn headline(fleet: &Fleet) -> String {
    match fleet.exit_code() {
        0 => "every node passed".to_owned(),
        1 if fleet.count(NodeVerdict::Fail) == 0 => "some GPUs are unlike their peers".to_owned(),
        1 => format!("{} failed", nodes(fleet.count(NodeVerdict::Fail))),
        4 => format!(
            "none failed, and {} had GPUs at work",
            nodes(fleet.count(NodeVerdict::Busy))
        ),
        _ if fleet.count(NodeVerdict::NotJudged) == 0 => {
            "the reports contradict each other".to_owned()
        }
        _ => format!(
            "none failed, and {} not judged",
            are(fleet.count(NodeVerdict::NotJudged))
        ),
    }
}

fn totals(fleet: &Fleet) -> String {
    let mut text = format!(
        "{}, {} GPUs: {} pass, {} fail, {} not judged, {} busy; {} outliers",
        nodes(fleet.nodes.len()),
        fleet.gpus(),
        fleet.count(NodeVerdict::Pass),
        fleet.count(NodeVerdict::Fail),
        fleet.count(NodeVerdict::NotJudged),
        fleet.count(NodeVerdict::Busy),
        fleet.outliers().count(),
    );
    if fleet.simulated() > 0 {
        let _ = write!(text, "; {} of the nodes SIMULATED", fleet.simulated());
    }
    if fleet.compared.is_empty() {
        let _ = write!(
            text,
            "; nothing was compared: no model has {VALUES_MINIMUM} GPUs with measurements"
        );
    }
    text
}

fn nodes(count: usize) -> String {
    format!("{count} node{}", if count == 1 { "" } else { "s" })
}

fn are(count: usize) -> String {
    format!(
        "{} {}",
        nodes(count),
        if count == 1 { "was" } else { "were" }
    )
}

/// `GPU-1 on node-7: burn_bf16_tflops is 512, 648 is usual among 8000 x NVIDIA H200 (score -9.1)`
fn sentence(compared: &Compared, outlier: &Outlier) -> String {
    format!(
        "{} on {}: {} is {}, {} is usual among {} x {} (score {:.1})",
        outlier.uuid,
        outlier.node,
        compared.measurement,
        number(outlier.value),
        number(compared.usual.median),
        compared.usual.count,
        compared.model,
        outlier.score
    )
}

/// At most three digits after the point, and no trailing zeros.
fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Text from a report, which may be anything, in one line of Markdown.
fn cell(text: &str) -> String {
    let mut cell = String::new();
    for character in text.chars() {
        match character {
            '|' | '<' | '>' | '`' | '*' | '_' | '[' | ']' | '\\' => {
                cell.push('\\');
                cell.push(character);
            }
            character if character.is_control() => cell.push(' '),
            character => cell.push(character),
        }
    }
    cell
}

pub(crate) fn html(fleet: &Fleet) -> String {
    let bad = || {
        fleet
            .nodes
            .iter()
            .filter(|it| it.verdict != NodeVerdict::Pass)
    };
    markup! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "GPU fleet: " (headline(fleet)) }
                style { (maud::PreEscaped(STYLE)) }
            }
            body {
                h1 { "GPU fleet: " (headline(fleet)) }
                p { (totals(fleet)) }
                @if !fleet.contradictions.is_empty() {
                    h2 { "Contradictions" }
                    ul { @for it in &fleet.contradictions { li { (it) } } }
                }
                @if bad().next().is_some() {
                    h2 { "Nodes that did not pass" }
                    table {
                        tr { th { "node" } th { "verdict" } th { "why" } }
                        @for node in bad() {
                            tr class=(node.verdict.name().replace(' ', "-")) {
                                td { (node.name) }
                                td { (node.verdict.name()) @if node.simulated { " SIMULATED" } }
                                td { (node.text) @if !node.failures.is_empty() { ul { @for it in &node.failures { li { (it) } } } } }
                            }
                        }
                    }
                }
                @if fleet.outliers().next().is_some() {
                    h2 { "Outliers" }
                    ul { @for (compared, it) in fleet.outliers() { li { (sentence(compared, it)) } } }
                }
                @if !fleet.remarks.is_empty() {
                    h2 { "Differences between nodes" }
                    ul { @for it in &fleet.remarks { li { (it) } } }
                }
                @if !fleet.compared.is_empty() {
                    h2 { "What is usual" }
                    table {
                        tr { th { "model" } th { "measurement" } th { "GPUs" } th { "median" } th { "deviation" } th { "outliers" } }
                        @for it in &fleet.compared {
                            tr {
                                td { (it.model) } td { (it.measurement) } td { (it.usual.count) }
                                td { (number(it.usual.median)) } td { (number(it.usual.deviation)) } td { (it.outliers.len()) }
                            }
                        }
                    }
                }
            }
        }
    }
    .into_string()
}

const STYLE: &str = "body{font:14px/1.5 system-ui,sans-serif;margin:2rem;max-width:70rem}table{border-collapse:collapse}\
td,th{border:1px solid #ccc;padding:.2rem .6rem;text-align:left;vertical-align:top}.fail td{background:#fdecea}\
.not-judged td{background:#fff4e0}.busy td{background:#eef3fb}";

/// How a fleet's report is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Markdown,
    Html,
    Json,
    Junit,
}

impl Format {
    pub fn write(self, fleet: &Fleet, file: &mut impl Write) -> io::Result<()> {
        match self {
            Self::Markdown => file.write_all(markdown(fleet).as_bytes()),
            Self::Html => file.write_all(html(fleet).as_bytes()),
            Self::Json => json(fleet, file),
            Self::Junit => junit(fleet, file),
        }
    }
}

/// Node by node, as it is written.
pub(crate) fn json(fleet: &Fleet, file: &mut impl Write) -> io::Result<()> {
    let count = |verdict| fleet.count(verdict);
    let report = Report {
        format: FORMAT,
        exit_code: fleet.exit_code(),
        verdict_text: headline(fleet),
        totals: json!({
            "nodes": fleet.nodes.len(),
            "gpus": fleet.gpus(),
            "pass": count(NodeVerdict::Pass),
            "fail": count(NodeVerdict::Fail),
            "not_judged": count(NodeVerdict::NotJudged),
            "busy": count(NodeVerdict::Busy),
            "simulated": fleet.simulated(),
            "outliers": fleet.outliers().count(),
        }),
        contradictions: &fleet.contradictions,
        remarks: &fleet.remarks,
        compared: &fleet.compared,
        nodes: &fleet.nodes,
    };
    serde_json::to_writer_pretty(&mut *file, &report)?;
    writeln!(file)
}

#[derive(Serialize)]
struct Report<'a> {
    format: u32,
    exit_code: u8,
    verdict_text: String,
    totals: Value,
    contradictions: &'a [String],
    remarks: &'a [String],
    #[serde(serialize_with = "all_compared")]
    compared: &'a [Compared],
    #[serde(serialize_with = "all_nodes")]
    nodes: &'a [NodeReport],
}

fn all_compared<S: Serializer>(compared: &[Compared], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(compared.iter().map(compared_json))
}

fn all_nodes<S: Serializer>(nodes: &[NodeReport], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(nodes.iter().map(node_json))
}

fn compared_json(compared: &Compared) -> Value {
    json!({
        "model": compared.model,
        "measurement": compared.measurement,
        "worse": match Measurement::named(&compared.measurement).map(|it| it.worse) {
            Some(Worse::Lower) => "lower",
            Some(Worse::Higher) => "higher",
            Some(Worse::Different) | None => "different",
        },
        "gpus": compared.usual.count,
        "median": compared.usual.median,
        "deviation": compared.usual.deviation,
        "outliers": compared.outliers.iter().map(|it| json!({
            "node": it.node,
            "uuid": it.uuid,
            "value": it.value,
            // Infinite where all others are the same; JSON has no such number.
            "score": it.score.is_finite().then_some(it.score),
        })).collect::<Vec<_>>(),
    })
}

fn node_json(node: &NodeReport) -> Value {
    json!({
        "name": node.name,
        "source": node.source,
        "verdict": node.verdict.name().replace(' ', "_"),
        "exit_code": node.verdict.exit_code(),
        "text": node.text,
        "simulated": node.simulated,
        "collected_at": node.collected_at,
        "driver_version": node.driver_version.as_deref(),
        "gpus": node.gpus.len(),
        "objections": node.failures.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "failures": node.failures,
    })
}

/// A suite of the nodes and one of the comparisons.
pub(crate) fn junit(fleet: &Fleet, file: &mut impl Write) -> io::Result<()> {
    let nodes = || fleet.nodes.iter().map(Case::of_node);
    let contradictions = (!fleet.contradictions.is_empty()).then(|| Case {
        name: "reports agree with each other".to_owned(),
        class: "fleet",
        outcome: Outcome::Error,
        text: fleet.contradictions.join("\n"),
    });
    let peers = || {
        let compared = fleet.compared.iter();
        let peers = compared.map(|it| Case::of_comparison(it, fleet.outliers_fail));
        peers.chain(contradictions.clone())
    };
    let mut writer = Writer::new_with_indent(file, b' ', 1);
    writer
        .get_mut()
        .write_all(b"<?xml version=\"1.0\" encoding=\"utf-8\"?>\n")?;
    writer
        .create_element("testsuites")
        .with_attributes([("name", "gpu-fleet"), ("time", "0")])
        .with_attributes(
            counts(nodes().chain(peers()))
                .iter()
                .map(|(name, count)| (*name, count.as_str())),
        )
        .write_inner_content(|writer| {
            suite(writer, "nodes", nodes)?;
            suite(writer, "peers", peers)
        })?;
    writeln!(writer.into_inner())
}

#[derive(Clone)]
struct Case {
    name: String,
    class: &'static str,
    outcome: Outcome,
    text: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed,
    Error,
}

impl Case {
    fn of_node(node: &NodeReport) -> Case {
        let mut text = node.text.clone();
        if node.simulated {
            text.insert_str(0, "SIMULATED: ");
        }
        for failure in &node.failures {
            let _ = write!(text, "\n{failure}");
        }
        Case {
            name: node.name.clone(),
            class: "fleet.node",
            outcome: match node.verdict {
                NodeVerdict::Pass => Outcome::Passed,
                NodeVerdict::Fail => Outcome::Failed,
                NodeVerdict::NotJudged | NodeVerdict::Busy => Outcome::Error,
            },
            text,
        }
    }

    fn of_comparison(compared: &Compared, outliers_fail: bool) -> Case {
        let sentences = compared.outliers.iter().map(|it| sentence(compared, it));
        Case {
            name: format!("{} of {}", compared.measurement, compared.model),
            class: "fleet.peers",
            outcome: if outliers_fail && !compared.outliers.is_empty() {
                Outcome::Failed
            } else {
                Outcome::Passed
            },
            text: sentences.collect::<Vec<_>>().join("\n"),
        }
    }
}

fn counts(cases: impl Iterator<Item = Case>) -> [(&'static str, String); 4] {
    let (mut tests, mut failures, mut errors) = (0, 0, 0);
    for case in cases {
        tests += 1;
        failures += usize::from(case.outcome == Outcome::Failed);
        errors += usize::from(case.outcome == Outcome::Error);
    }
    [
        ("tests", tests.to_string()),
        ("failures", failures.to_string()),
        ("errors", errors.to_string()),
        ("skipped", "0".to_owned()),
    ]
}

fn suite<I: Iterator<Item = Case>>(
    writer: &mut Writer<impl Write>,
    name: &str,
    cases: impl Fn() -> I,
) -> io::Result<()> {
    writer
        .create_element("testsuite")
        .with_attributes([("name", name), ("time", "0")])
        .with_attributes(
            counts(cases())
                .iter()
                .map(|(name, count)| (*name, count.as_str())),
        )
        .write_inner_content(|writer| cases().try_for_each(|case| write_case(writer, &case)))
        .map(drop)
}

fn write_case(writer: &mut Writer<impl Write>, case: &Case) -> io::Result<()> {
    let text = xml_characters(&case.text);
    let message = text.lines().next().unwrap_or_default().to_owned();
    let name = xml_characters(&case.name);
    let element = writer.create_element("testcase").with_attributes([
        ("name", name.as_str()),
        ("classname", case.class),
        ("time", "0"),
    ]);
    let (tag, message) = match case.outcome {
        Outcome::Passed => ("system-out", None),
        Outcome::Failed => ("failure", Some(message)),
        Outcome::Error => ("error", Some(message)),
    };
    let written = element.write_inner_content(|writer| {
        let inner = writer.create_element(tag);
        let inner = match &message {
            Some(message) => inner.with_attributes([("type", tag), ("message", message.as_str())]),
            None => inner,
        };
        inner.write_text_content(BytesText::new(&text)).map(drop)
    });
    written.map(drop)
}

/// What XML 1.0 can hold; other characters make the whole file unreadable.
fn xml_characters(text: &str) -> String {
    let is_allowed = |it: char| matches!(it, '\t' | '\n' | '\r' | '\u{20}'..='\u{d7ff}' | '\u{e000}'..='\u{fffd}' | '\u{10000}'..);
    text.chars()
        .map(|it| if is_allowed(it) { it } else { '\u{fffd}' })
        .collect()
}
