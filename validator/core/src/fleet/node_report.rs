//! One node's report, without what the fleet's does not need.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, bail, ensure};
use quick_xml::events::{BytesStart, Event};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::outliers::Measurement;
use crate::findings::{Run, Subject, Verdict};
use crate::report::{MachineGpu, REPORT_FORMAT, Report};

/// Findings of a node that are kept; a node with more is bad enough.
const FINDINGS_KEPT: usize = 20;

/// The verdict on a node, worst last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum NodeVerdict {
    Pass,
    Busy,
    NotJudged,
    Fail,
}

impl NodeVerdict {
    /// The exit code of a run with this verdict.
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            Self::Pass => 0,
            Self::Fail => 1,
            Self::NotJudged => 2,
            Self::Busy => 4,
        }
    }

    pub(crate) fn name(self) -> &'static str {
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
pub struct NodeReport {
    /// The host's name, else the file's.
    pub(crate) name: String,
    /// The file, as it was found.
    pub(crate) source: String,
    pub(crate) verdict: NodeVerdict,
    /// The verdict in words, or why the report has none.
    pub(crate) text: String,
    pub(crate) simulated: bool,
    pub(crate) collected_at: String,
    pub(crate) driver_version: Option<Arc<str>>,
    pub(crate) validator_version: Option<Arc<str>>,
    pub(crate) gpus: Gpus,
    /// What failed and what could not be judged, at most [`FINDINGS_KEPT`].
    pub(crate) failures: Vec<Failure>,
}

/// A finding that speaks against a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Failure {
    /// `fail` or `error`.
    pub(crate) verdict: &'static str,
    pub(crate) check: String,
    /// Absent where the finding is about the host.
    pub(crate) gpu: Option<FailedGpu>,
    pub(crate) summary: String,
}

/// The GPU of a finding, as a person finds it in the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct FailedGpu {
    /// Position among the node's GPUs.
    pub(crate) index: Option<usize>,
    pub(crate) pci_address: Option<String>,
    pub(crate) serial: Option<String>,
    pub(crate) uuid: Option<String>,
}

impl std::fmt::Display for FailedGpu {
    /// `GPU 3 (0000:53:00.0), serial 1650223012345, GPU-4711…`
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GPU")?;
        if let Some(index) = self.index {
            write!(f, " {index}")?;
        }
        if let Some(address) = &self.pci_address {
            write!(f, " ({address})")?;
        }
        match &self.serial {
            Some(serial) => write!(f, ", serial {serial}")?,
            None => f.write_str(", serial not reported")?,
        }
        match &self.uuid {
            Some(uuid) => write!(f, ", {uuid}"),
            None => Ok(()),
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.verdict, self.check)?;
        if let Some(gpu) = &self.gpu {
            write!(f, " on {gpu}")?;
        }
        write!(f, ": {}", self.summary)
    }
}

impl FailedGpu {
    fn of(subject: &Subject, gpus: &[MachineGpu]) -> Option<FailedGpu> {
        let Subject::Gpu(gpu) = subject else {
            return None;
        };
        let same = |it: &&MachineGpu| match (&gpu.uuid, &gpu.pci_address) {
            (Some(uuid), _) => it.uuid.as_ref() == Some(uuid),
            (None, Some(address)) => it.pci_address.as_ref() == Some(address),
            (None, None) => false,
        };
        let found = gpus.iter().find(same);
        Some(FailedGpu {
            index: gpus.iter().position(|it| same(&it)),
            pci_address: found
                .and_then(|it| it.pci_address.clone())
                .or_else(|| gpu.pci_address.clone()),
            serial: found.and_then(|it| it.serial.clone()),
            uuid: gpu.uuid.clone(),
        })
    }
}

/// The GPUs of a node, in little memory: a fleet has thousands.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gpus {
    /// One line each, in order.
    uuids: Box<str>,
    shape: Arc<Shape>,
    /// Measurements of all GPUs one after another, in the order of their shapes. Seven digits are
    /// more than any sensor has.
    values: Box<[f32]>,
}

/// Models, and the names of what was measured, by GPU: the same for all nodes of a kind, so that it
/// is kept once.
pub(crate) type Shape = Vec<GpuShape>;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct GpuShape {
    pub(crate) model: String,
    pub(crate) measurements: Vec<String>,
}

/// One GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gpu<'a> {
    pub(crate) uuid: &'a str,
    pub(crate) shape: &'a GpuShape,
    values: &'a [f32],
}

impl Gpus {
    fn of(gpus: Vec<MachineGpu>, kept: &Kept) -> Gpus {
        let (mut uuids, mut shape, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for gpu in gpus {
            // A report may hold anything; what is no UUID names no GPU.
            let uuid = gpu.uuid.filter(|it| !it.contains(char::is_control));
            uuids.push(uuid.unwrap_or_default());
            let compared = gpu
                .measurements
                .into_iter()
                .filter(|(name, value)| Measurement::named(name).is_some() && value.is_finite());
            let mut measurements = Vec::new();
            for (name, value) in compared {
                measurements.push(name);
                values.push(nearest(value));
            }
            shape.push(GpuShape {
                model: gpu.name.unwrap_or_default(),
                measurements,
            });
        }
        Gpus {
            uuids: uuids.join("\n").into(),
            shape: kept.shape(&shape),
            values: values.into(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.shape.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Gpu<'_>> {
        let mut rest = &*self.values;
        self.shape
            .iter()
            .zip(self.uuids.split('\n'))
            .map(move |(shape, uuid)| {
                let (values, others) = rest.split_at(shape.measurements.len());
                rest = others;
                Gpu {
                    uuid,
                    shape,
                    values,
                }
            })
    }
}

impl Gpu<'_> {
    pub(crate) fn measured(&self, name: &str) -> Option<f32> {
        let names = &self.shape.measurements;
        let index = names.binary_search_by(|it| it.as_str().cmp(name)).ok()?;
        self.values.get(index).copied()
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "seven digits are more than any sensor has"
)]
fn nearest(value: f64) -> f32 {
    value as f32
}

/// The number with the fewest digits that is kept as this: 648.3, and not 648.2999877929688.
pub(crate) fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

/// What many nodes have in common, kept once.
#[derive(Debug, Default)]
pub struct Kept {
    shapes: Mutex<HashSet<Arc<Shape>>>,
    texts: Mutex<HashSet<Arc<str>>>,
}

impl Kept {
    fn shape(&self, shape: &Shape) -> Arc<Shape> {
        keep(&self.shapes, shape, |it| Arc::new(it.clone()))
    }

    fn text(&self, text: &str) -> Arc<str> {
        keep(&self.texts, text, |it| Arc::from(it))
    }
}

fn keep<T: ?Sized + Eq + Hash>(
    kept: &Mutex<HashSet<Arc<T>>>,
    value: &T,
    share: impl FnOnce(&T) -> Arc<T>,
) -> Arc<T> {
    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = kept.get(value) {
        return Arc::clone(known);
    }
    let shared = share(value);
    kept.insert(Arc::clone(&shared));
    shared
}

impl NodeReport {
    /// The bytes of a `JUnit` report, which holds no measurement.
    pub fn of_junit(bytes: &[u8], name: &str, source: &str) -> anyhow::Result<Self> {
        of_junit(bytes, name, source)
    }

    /// A node without a report: it was not judged.
    pub fn missing(node: &str, reason: &str) -> Self {
        Self::without_content(node, "", format!("no report: {reason}"))
    }

    /// A file that cannot be read is a node that was not judged.
    pub fn unreadable(name: &str, source: &str, error: &anyhow::Error) -> Self {
        let text = format!("the report is of no use: {error:#}");
        Self::without_content(name, source, text)
    }

    /// The bytes of a JSON report; `name` is the node's where the report has none, `source` the
    /// file.
    pub fn of_json(bytes: &[u8], name: &str, source: &str, kept: &Kept) -> anyhow::Result<Self> {
        let report: JsonReport =
            serde_json::from_slice(bytes).context("this is no JSON report of gpu-validator")?;
        of_report(report, name, source, kept)
    }

    /// Facts that were judged here.
    pub fn of_run(run: &Run, name: &str, source: &str, kept: &Kept) -> anyhow::Result<Self> {
        let report = Report::of(run);
        let findings = report.findings.into_iter();
        let report = JsonReport {
            format: report.format,
            validator_version: report.validator_version,
            verdict: report.verdict,
            verdict_text: report.verdict_text,
            exit_code: report.exit_code,
            simulated: report.simulated.map(|_| IgnoredAny),
            incomplete: report.incomplete,
            collected_at: report.collected_at,
            machine: JsonMachine {
                hostname: report.machine.hostname,
                driver_version: report.machine.driver_version,
                gpus: report.machine.gpus,
            },
            findings: findings
                .map(|it| JsonFinding {
                    check: it.check,
                    subject: it.subject,
                    verdict: it.verdict,
                    summary: it.summary,
                })
                .collect(),
        };
        of_report(report, name, source, kept)
    }

    fn object(&mut self, failure: Failure) {
        if self.failures.len() < FINDINGS_KEPT {
            self.failures.push(failure);
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
            gpus: Gpus::default(),
            failures: Vec::new(),
        }
    }
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
    gpus: Vec<MachineGpu>,
}

#[derive(Deserialize)]
struct JsonFinding {
    check: String,
    subject: Subject,
    verdict: Verdict,
    summary: String,
}

fn of_report(
    report: JsonReport,
    name: &str,
    source: &str,
    kept: &Kept,
) -> anyhow::Result<NodeReport> {
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
    let mut node = NodeReport {
        name: report.machine.hostname.unwrap_or_else(|| name.to_owned()),
        source: source.to_owned(),
        verdict,
        text: report.verdict_text,
        simulated: report.simulated.is_some(),
        collected_at: report.collected_at,
        driver_version: report.machine.driver_version.map(|it| kept.text(&it)),
        validator_version: Some(kept.text(&report.validator_version)),
        gpus: Gpus::default(),
        failures: Vec::new(),
    };
    for finding in report.findings {
        let verdict = match finding.verdict {
            Verdict::Fail => "fail",
            Verdict::Error => "error",
            Verdict::Pass | Verdict::Warn | Verdict::Skip => continue,
        };
        node.object(Failure {
            verdict,
            gpu: FailedGpu::of(&finding.subject, &report.machine.gpus),
            check: finding.check,
            summary: match &finding.subject {
                Subject::Environment(it) => format!("{it}: {}", finding.summary),
                Subject::Host | Subject::Gpu(_) => finding.summary,
            },
        });
    }
    node.gpus = Gpus::of(report.machine.gpus, kept);
    Ok(node)
}

/// A node's results from a `JUnit` file: names of what failed, and whether a GPU was judged; it
/// holds no measurement.
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
                node.object(self.failure("fail", attribute(element, "message")?));
            }
            b"error" => {
                self.errors += 1;
                node.object(self.failure("error", attribute(element, "message")?));
            }
            b"skipped" => {
                self.skipped += 1;
                self.is_skipped = true;
            }
            _ => {}
        }
        Ok(())
    }

    /// The message of a GPU's test case names the GPU.
    fn failure(&self, verdict: &'static str, summary: String) -> Failure {
        Failure {
            verdict,
            check: self.name.clone(),
            gpu: None,
            summary,
        }
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
