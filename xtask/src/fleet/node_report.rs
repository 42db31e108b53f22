//! What one node's report says, without what the fleet's does not need.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use quick_xml::events::{BytesStart, Event};
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::Missing;

/// The report format that is understood; it grows when a reader of the older would misread.
const REPORT_FORMAT: u32 = 1;
/// Findings of a node that are kept; a node with more is bad enough.
const FINDINGS_KEPT: usize = 20;

/// The verdict on a node, worst last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum NodeVerdict {
    Pass,
    Busy,
    NotJudged,
    Fail,
}

impl NodeVerdict {
    /// The exit code of a run with this verdict.
    pub(super) fn exit_code(self) -> u8 {
        match self {
            Self::Pass => 0,
            Self::Fail => 1,
            Self::NotJudged => 2,
            Self::Busy => 4,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Fail => "fail",
            Self::NotJudged => "not judged",
            Self::Busy => "busy",
        }
    }
}

/// One node.
#[derive(Clone, Debug)]
pub(super) struct NodeReport {
    /// The host's name, else the file's.
    pub(super) name: String,
    /// The file, as it was found.
    pub(super) source: String,
    pub(super) verdict: NodeVerdict,
    /// The verdict in words, or why the report says nothing.
    pub(super) text: String,
    pub(super) simulated: bool,
    pub(super) collected_at: String,
    pub(super) driver_version: Option<String>,
    pub(super) validator_version: Option<String>,
    pub(super) gpus: Vec<Gpu>,
    /// What failed and what could not be judged, at most [`FINDINGS_KEPT`].
    pub(super) objections: Vec<String>,
}

#[derive(Clone, Debug)]
pub(super) struct Gpu {
    pub(super) uuid: String,
    pub(super) model: String,
    pub(super) measurements: BTreeMap<String, f64>,
}

impl NodeReport {
    /// A node of which there is no report: nobody judged it.
    pub(super) fn missing(missing: &Missing) -> Self {
        Self::without_content(&missing.node, "", format!("no report: {}", missing.reason))
    }

    fn object(&mut self, verdict: &str, check: &str, summary: &str) {
        if self.objections.len() < FINDINGS_KEPT {
            self.objections
                .push(format!("{verdict} {check}: {summary}"));
        }
    }

    fn without_content(name: &str, source: &str, text: String) -> Self {
        Self {
            name: name.to_owned(),
            source: source.to_owned(),
            verdict: NodeVerdict::NotJudged,
            text,
            simulated: false,
            collected_at: String::new(),
            driver_version: None,
            validator_version: None,
            gpus: Vec::new(),
            objections: Vec::new(),
        }
    }
}

/// Reads a file; one that cannot be read is a node that was not judged. `None` for a JUnit file whose node has reported in
/// JSON beside it.
pub(super) fn read(path: &Path) -> Option<NodeReport> {
    let is_xml = path.extension().is_some_and(|it| it == "xml");
    if is_xml && json_beside(path) {
        return None;
    }
    let source = path.display().to_string();
    let name = path
        .file_stem()
        .map_or_else(String::new, |it| it.to_string_lossy().into_owned());
    let read = std::fs::read(path)
        .context("cannot be read")
        .and_then(|bytes| {
            if is_xml {
                of_junit(&bytes, &name, &source)
            } else {
                of_json(&bytes, &name, &source)
            }
        });
    Some(read.unwrap_or_else(|error| {
        NodeReport::without_content(
            &name,
            &source,
            format!("the report is of no use: {error:#}"),
        )
    }))
}

/// `report.junit.xml` beside `report.json`, or `a.xml` beside `a.json`.
fn json_beside(path: &Path) -> bool {
    let name = path
        .file_name()
        .map_or_else(String::new, |it| it.to_string_lossy().into_owned());
    let stem = name.trim_end_matches(".xml").trim_end_matches(".junit");
    path.with_file_name(format!("{stem}.json")).is_file()
}

#[derive(Deserialize)]
struct JsonReport {
    format: u32,
    validator_version: String,
    verdict: String,
    verdict_text: String,
    exit_code: u8,
    simulated: Option<IgnoredAny>,
    incomplete: Option<String>,
    collected_at: String,
    machine: JsonMachine,
    findings: Vec<JsonFinding>,
}

#[derive(Deserialize)]
struct JsonMachine {
    hostname: Option<String>,
    driver_version: Option<String>,
    gpus: Vec<JsonGpu>,
}

#[derive(Deserialize)]
struct JsonGpu {
    uuid: Option<String>,
    name: Option<String>,
    /// Reports of older validators have none.
    #[serde(default)]
    measurements: BTreeMap<String, f64>,
}

#[derive(Deserialize)]
struct JsonFinding {
    check: String,
    verdict: String,
    summary: String,
}

fn of_json(bytes: &[u8], name: &str, source: &str) -> anyhow::Result<NodeReport> {
    let report: JsonReport =
        serde_json::from_slice(bytes).context("this is no JSON report of gpu-validator")?;
    ensure!(
        report.format == REPORT_FORMAT,
        "its format is {}, expected {REPORT_FORMAT}",
        report.format
    );
    let verdict = match (report.verdict.as_str(), report.exit_code) {
        ("pass", 0) => NodeVerdict::Pass,
        ("fail", 1) => NodeVerdict::Fail,
        ("not_judged", 2) => NodeVerdict::NotJudged,
        ("busy", 4) => NodeVerdict::Busy,
        (verdict, code) => bail!("verdict `{verdict}` and exit code {code} contradict each other"),
    };
    ensure!(
        verdict != NodeVerdict::Pass
            || (report.incomplete.is_none() && !report.machine.gpus.is_empty()),
        "it passes a run that is incomplete or has no GPU"
    );
    let gpus = report.machine.gpus.into_iter().map(|gpu| Gpu {
        uuid: gpu.uuid.unwrap_or_default(),
        model: gpu.name.unwrap_or_default(),
        measurements: gpu.measurements,
    });
    let mut node = NodeReport {
        name: report.machine.hostname.unwrap_or_else(|| name.to_owned()),
        source: source.to_owned(),
        verdict,
        text: report.verdict_text,
        simulated: report.simulated.is_some(),
        collected_at: report.collected_at,
        driver_version: report.machine.driver_version,
        validator_version: Some(report.validator_version),
        gpus: gpus.collect(),
        objections: Vec::new(),
    };
    for it in report
        .findings
        .iter()
        .filter(|it| matches!(it.verdict.as_str(), "fail" | "error"))
    {
        node.object(&it.verdict, &it.check, &it.summary);
    }
    Ok(node)
}

/// What a `JUnit` file tells of a node: names of what failed, and whether a GPU was judged; it holds no measurement.
fn of_junit(bytes: &[u8], name: &str, source: &str) -> anyhow::Result<NodeReport> {
    let mut node = NodeReport::without_content(name, source, String::new());
    let mut cases = Cases::default();
    let mut reader = quick_xml::Reader::from_reader(bytes);
    let mut depth = 0_u32;
    loop {
        match reader.read_event().context("this is no well-formed XML")? {
            Event::Start(element) => {
                depth += 1;
                cases.element(&element, &mut node)?;
            }
            Event::Empty(element) => {
                cases.element(&element, &mut node)?;
                cases.end(element.name().as_ref());
            }
            Event::End(element) => {
                depth = depth.saturating_sub(1);
                cases.end(element.name().as_ref());
            }
            Event::Eof => break,
            _ => {}
        }
    }
    ensure!(depth == 0, "the XML ends early");
    ensure!(cases.count > 0, "it holds no test case of gpu-validator");
    node.verdict = match (cases.failed, cases.errors, cases.gpus_judged) {
        (0, 0, 1..) => NodeVerdict::Pass,
        (0, ..) => NodeVerdict::NotJudged,
        _ => NodeVerdict::Fail,
    };
    node.text = format!(
        "JUnit only: {} test cases, {} failed, {} errors, {} skipped; no measurements",
        cases.count, cases.failed, cases.errors, cases.skipped
    );
    Ok(node)
}

/// The test cases of a file so far.
#[derive(Default)]
struct Cases {
    count: u32,
    failed: u32,
    errors: u32,
    skipped: u32,
    /// Cases of a GPU that were looked at.
    gpus_judged: u32,
    name: String,
    is_gpus: bool,
    is_skipped: bool,
}

impl Cases {
    fn element(&mut self, element: &BytesStart<'_>, node: &mut NodeReport) -> anyhow::Result<()> {
        match element.name().as_ref() {
            b"testsuite" => {
                let hostname = attribute(element, "hostname")?;
                if !hostname.is_empty() {
                    node.name = hostname;
                }
                node.collected_at = attribute(element, "timestamp")?;
                node.simulated |= attribute(element, "name")?.starts_with("SIMULATED");
            }
            b"testcase" => {
                let class = attribute(element, "classname")?;
                ensure!(
                    class.starts_with("gpu-validator."),
                    "it holds a test case of `{class}`, which is not gpu-validator's"
                );
                self.count += 1;
                self.name = attribute(element, "name")?;
                self.is_gpus = class != "gpu-validator.host";
                self.is_skipped = false;
            }
            b"failure" => {
                self.failed += 1;
                node.object("fail", &self.name, &attribute(element, "message")?);
            }
            b"error" => {
                self.errors += 1;
                node.object("error", &self.name, &attribute(element, "message")?);
            }
            b"skipped" => {
                self.skipped += 1;
                self.is_skipped = true;
            }
            _ => {}
        }
        Ok(())
    }

    fn end(&mut self, element: &[u8]) {
        if element == b"testcase" && self.is_gpus && !self.is_skipped {
            self.gpus_judged += 1;
        }
    }
}

fn attribute(element: &BytesStart<'_>, name: &str) -> anyhow::Result<String> {
    let Some(attribute) = element.try_get_attribute(name).context("a bad attribute")? else {
        return Ok(String::new());
    };
    let value = std::str::from_utf8(&attribute.value).context("an attribute is not UTF-8")?;
    Ok(quick_xml::escape::unescape(value)
        .context("a bad attribute")?
        .into_owned())
}
