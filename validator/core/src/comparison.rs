//! What differs between two runs: of one node at two times, of two images, of two nodes of one
//! type.
//!
//! GPUs are matched by PCI address: a board that was replaced stands at the address of the one
//! before, and nodes of one type have the same addresses.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use schemars::JsonSchema;
use serde::Serialize;

use crate::diagnosis::name_of;
use crate::facts::{Facts, GpuFacts};
use crate::findings::{Finding, Run, Subject, Verdict};
use crate::history::THROUGHPUT_NOISE;
use crate::report::{Machine, one_line};

/// Everything that differs between two runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Comparison {
    /// Of the machine and its GPUs: driver, kernel, serial numbers.
    pub facts: Vec<Change>,
    pub verdicts: Vec<VerdictChange>,
    /// Measured figures that differ by more than their noise.
    pub figures: Vec<FigureChange>,
    /// A verdict of the second run is worse than that of the first.
    pub is_worse: bool,
}

/// A value that differs; absent where it was not read.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Change {
    /// `host`, or `GPU 0 (0000:53:00.0)`.
    pub subject: String,
    pub name: String,
    pub before: Option<String>,
    pub after: Option<String>,
}

/// A check with another verdict; absent where the run has no finding of it.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct VerdictChange {
    pub check: String,
    pub subject: String,
    pub before: Option<Verdict>,
    pub after: Option<Verdict>,
    /// Of the second run, or of the first where the second has none.
    pub summary: String,
}

/// A figure of a GPU.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct FigureChange {
    pub subject: String,
    /// As in the JSON report, the unit at the end: `burn_bf16_tflops`.
    pub name: String,
    pub before: f64,
    pub after: f64,
    pub percent: f64,
}

/// What `after` has that `before` had otherwise.
pub fn compare(before: &Run, after: &Run) -> Comparison {
    let verdicts = verdict_changes(before, after);
    let is_worse = verdicts.iter().any(VerdictChange::is_worse);
    Comparison {
        facts: fact_changes(&before.facts, &after.facts),
        figures: figure_changes(&before.facts, &after.facts),
        verdicts,
        is_worse,
    }
}

impl VerdictChange {
    fn is_worse(&self) -> bool {
        severity(self.after) > severity(self.before)
    }
}

/// What does not apply is no worse than what is right.
fn severity(verdict: Option<Verdict>) -> u8 {
    match verdict {
        None | Some(Verdict::Pass | Verdict::Skip) => 0,
        Some(Verdict::Warn) => 1,
        Some(Verdict::Error) => 2,
        Some(Verdict::Fail) => 3,
    }
}

fn fact_changes(before: &Facts, after: &Facts) -> Vec<Change> {
    let (one, other) = (Machine::of(before), Machine::of(after));
    let (before_gpus, after_gpus) = (one.gpus_in_words(), other.gpus_in_words());
    let host = [
        ("hostname", one.hostname, other.hostname),
        (
            "operating_system",
            one.operating_system,
            other.operating_system,
        ),
        ("kernel_release", one.kernel_release, other.kernel_release),
        (
            "ec2_instance_type",
            one.ec2_instance_type,
            other.ec2_instance_type,
        ),
        (
            "ec2_instance_id",
            one.ec2_instance_id,
            other.ec2_instance_id,
        ),
        ("ec2_ami_id", one.ec2_ami_id, other.ec2_ami_id),
        ("driver_version", one.driver_version, other.driver_version),
        (
            "kernel_module_flavor",
            one.kernel_module_flavor,
            other.kernel_module_flavor,
        ),
        ("cuda_version", one.cuda_version, other.cuda_version),
        ("gpus", Some(before_gpus), Some(after_gpus)),
    ];
    let mut changes: Vec<Change> = host
        .into_iter()
        .filter(|(_, before, after)| before != after)
        .map(|(name, before, after)| Change {
            subject: "host".to_owned(),
            name: name.to_owned(),
            before,
            after,
        })
        .collect();
    for (subject, one, other) in matched_gpus(before, after) {
        let (was, is) = (one.map(gpu_values), other.map(gpu_values));
        let names: BTreeSet<&str> = [&was, &is]
            .into_iter()
            .flatten()
            .flat_map(|it| it.iter().map(|(name, _)| *name))
            .collect();
        for name in names {
            let of = |values: &Option<GpuValues>| {
                let mut values = values.iter().flatten();
                values
                    .find(|(it, _)| *it == name)
                    .map(|(_, value)| value.clone())
            };
            if of(&was) != of(&is) {
                changes.push(Change {
                    subject: subject.clone(),
                    name: name.to_owned(),
                    before: of(&was),
                    after: of(&is),
                });
            }
        }
    }
    changes
}

type GpuValues = Vec<(&'static str, String)>;

/// What a GPU is and how it is set; what was not read is absent.
fn gpu_values(gpu: &GpuFacts) -> GpuValues {
    let values = [
        ("uuid", gpu.uuid.value().cloned()),
        ("serial", gpu.serial.value().cloned()),
        ("name", gpu.name.value().cloned()),
        ("vbios", gpu.vbios_version.value().cloned()),
        (
            "persistence_mode",
            gpu.persistence_mode.value().map(ToString::to_string),
        ),
        ("mig", gpu.mig.value().map(|it| it.current.to_string())),
        ("lost", gpu.lost.clone()),
    ];
    let read = values.into_iter();
    read.filter_map(|(name, value)| Some((name, value?)))
        .collect()
}

/// The GPUs of both runs in PCI order, with the name of the later one.
fn matched_gpus<'f>(
    before: &'f Facts,
    after: &'f Facts,
) -> Vec<(String, Option<&'f GpuFacts>, Option<&'f GpuFacts>)> {
    let place = |gpu: &GpuFacts, index: usize| {
        let address = gpu.pci_address.value().cloned();
        address.unwrap_or_else(|| format!("GPU {index}"))
    };
    let of = |facts: &'f Facts| -> Vec<(String, &'f GpuFacts, String)> {
        let gpus = facts.gpus.iter().enumerate();
        gpus.map(|(index, gpu)| (place(gpu, index), gpu, crate::queries::gpu_name(gpu, index)))
            .collect()
    };
    let (one, other) = (of(before), of(after));
    let places: BTreeSet<&String> = one.iter().chain(&other).map(|(place, ..)| place).collect();
    let at = |gpus: &[(String, &'f GpuFacts, String)], place: &String| {
        let found = gpus.iter().find(|(it, ..)| it == place);
        found.map(|(_, gpu, name)| (*gpu, name.clone()))
    };
    let matched = places.into_iter().map(|place| {
        let (was, is) = (at(&one, place), at(&other, place));
        let name = is.as_ref().or(was.as_ref());
        let name = name.map_or_else(String::new, |(_, name)| name.clone());
        (name, was.map(|it| it.0), is.map(|it| it.0))
    });
    matched.collect()
}

/// The same check on the host, on the GPU at the same address, or in the same environment.
fn verdict_changes(before: &Run, after: &Run) -> Vec<VerdictChange> {
    let place = |finding: &Finding| match &finding.subject {
        Subject::Host => None,
        Subject::Gpu(gpu) => Some(gpu.pci_address.clone().or_else(|| gpu.uuid.clone())),
        Subject::Environment(environment) => Some(Some(environment.path.clone())),
    };
    let is_same =
        |one: &Finding, other: &Finding| one.check == other.check && place(one) == place(other);
    let change = |run: &Run, finding: &Finding, before, after| VerdictChange {
        check: finding.check.clone(),
        subject: name_of(&finding.subject, &run.facts),
        before,
        after,
        summary: finding.summary.clone(),
    };
    let mut changes = Vec::new();
    for finding in &after.findings {
        let was = before.findings.iter().find(|it| is_same(it, finding));
        let was = was.map(|it| it.verdict);
        if was != Some(finding.verdict) {
            changes.push(change(after, finding, was, Some(finding.verdict)));
        }
    }
    for finding in &before.findings {
        if !after.findings.iter().any(|it| is_same(it, finding)) {
            changes.push(change(before, finding, Some(finding.verdict), None));
        }
    }
    changes.sort_by_key(|it| std::cmp::Reverse(severity(it.after).max(severity(it.before))));
    changes
}

/// How much a figure of a healthy GPU differs from one run to the next.
enum Noise {
    /// Any difference is one.
    None,
    Share(f64),
    Degrees(f64),
    /// It is no evidence about the GPU.
    NotCompared,
}

/// This project's own choice: power is averaged by the driver over a second, and idle power depends
/// on the clocks of the moment.
const POWER_NOISE: f64 = 0.10;
/// This project's own choice: the temperature follows that of the room and what ran before.
const TEMPERATURE_NOISE_C: f64 = 10.0;

fn noise_of(name: &str) -> Noise {
    match name {
        "power_limit_w" | "sm_clock_maximum_mhz" => Noise::None,
        _ if name.ends_with("_tflops") || name.ends_with("_mhz") => Noise::Share(THROUGHPUT_NOISE),
        _ if name.ends_with("_w") => Noise::Share(POWER_NOISE),
        _ if name.ends_with("_c") => Noise::Degrees(TEMPERATURE_NOISE_C),
        _ if name.ends_with("_ms") => Noise::NotCompared,
        _ => Noise::None,
    }
}

fn is_beyond_noise(name: &str, before: f64, after: f64) -> bool {
    let difference = (after - before).abs();
    match noise_of(name) {
        Noise::None => difference > 0.0,
        Noise::Share(share) => difference > before.abs() * share,
        Noise::Degrees(degrees) => difference > degrees,
        Noise::NotCompared => false,
    }
}

fn figure_changes(before: &Facts, after: &Facts) -> Vec<FigureChange> {
    let mut changes = Vec::new();
    for (subject, one, other) in matched_gpus(before, after) {
        let (Some(one), Some(other)) = (one, other) else {
            continue;
        };
        let was = crate::report::measurements_of(one, before);
        for (name, is) in crate::report::measurements_of(other, after) {
            let Some(was) = was.get(&name).copied() else {
                continue;
            };
            if is_beyond_noise(&name, was, is) {
                changes.push(FigureChange {
                    subject: subject.clone(),
                    percent: (is - was) / was * 100.0,
                    name,
                    before: was,
                    after: is,
                });
            }
        }
    }
    changes
}

/// For a person, one difference a line.
impl std::fmt::Display for Comparison {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut text = String::new();
        let value = |it: &Option<String>| it.as_deref().map_or_else(|| "-".to_owned(), one_line);
        let verdict = |it: Option<Verdict>| it.map_or_else(|| "-".to_owned(), |it| it.to_string());
        for it in &self.verdicts {
            writeln!(
                text,
                "verdict  {}: {}: {} -> {}: {}",
                one_line(&it.subject),
                one_line(&it.check),
                verdict(it.before),
                verdict(it.after),
                one_line(&it.summary)
            )?;
        }
        for it in &self.facts {
            writeln!(
                text,
                "fact     {}: {}: {} -> {}",
                one_line(&it.subject),
                it.name,
                value(&it.before),
                value(&it.after)
            )?;
        }
        for it in &self.figures {
            writeln!(
                text,
                "figure   {}: {}: {:.1} -> {:.1} ({:+.1} %)",
                one_line(&it.subject),
                it.name,
                it.before,
                it.after,
                it.percent
            )?;
        }
        writeln!(
            text,
            "{}, {}, {}",
            crate::words::counted(self.verdicts.len(), "verdict"),
            crate::words::counted(self.facts.len(), "fact"),
            crate::words::counted(self.figures.len(), "figure") + " differ",
        )?;
        f.write_str(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::{Comparison, compare};
    use crate::facts::{Facts, Reading};
    use crate::findings::{Run, Verdict};
    use crate::level::Level;
    use crate::profile::Profile;
    use crate::test_machine::burned_node;

    fn compared(change: impl FnOnce(&mut Facts)) -> Comparison {
        let judged = |facts| {
            Run::judged(
                facts,
                &Profile::default(),
                Run::BUILT_IN_PROFILE,
                Level::Standard,
            )
        };
        let mut after = burned_node();
        change(&mut after);
        compare(&judged(burned_node()), &judged(after))
    }

    #[test]
    fn a_node_does_not_differ_from_itself() {
        assert_eq!(compared(|_| {}), Comparison::default());
    }

    #[test]
    fn a_new_driver_and_a_failure_are_named() {
        let compared = compared(|facts| {
            facts.host.kernel_release = Reading::Value("6.99.0".to_owned());
            facts.gpus[3].persistence_mode = Reading::Value(false);
        });
        assert!(compared.is_worse);
        assert_eq!(compared.verdicts.len(), 1, "{compared}");
        assert_eq!(compared.verdicts[0].check, "persistence_mode");
        assert_eq!(compared.verdicts[0].before, Some(Verdict::Pass));
        assert_eq!(compared.verdicts[0].after, Some(Verdict::Fail));
        assert_eq!(compared.verdicts[0].subject, "GPU 3 (0000:13:00.0)");
        let facts: Vec<&str> = compared.facts.iter().map(|it| it.name.as_str()).collect();
        assert_eq!(facts, ["kernel_release", "persistence_mode"]);
    }

    #[test]
    fn a_replaced_board_is_matched_by_its_address() {
        let compared = compared(|facts| {
            facts.gpus[2].serial = Reading::Value("1650000000009".to_owned());
        });
        assert!(!compared.is_worse);
        assert_eq!(compared.facts.len(), 1, "{compared}");
        assert_eq!(compared.facts[0].name, "serial");
        assert_eq!(compared.facts[0].after.as_deref(), Some("1650000000009"));
    }

    #[test]
    fn throughput_within_the_noise_does_not_differ_and_beyond_it_does() {
        let slowed = |share: f64| {
            compared(move |facts| {
                let uuid = facts.gpus[1].uuid.value().expect("a UUID").clone();
                if let Some(Reading::Value(run)) = facts.load.burn.get_mut(&uuid) {
                    for products in &mut run.precisions {
                        products.tflops *= share;
                    }
                }
            })
        };
        assert_eq!(slowed(0.97).figures, []);
        let figures = slowed(0.95).figures;
        assert!(!figures.is_empty());
        assert!(
            figures.iter().all(|it| it.name.ends_with("_tflops")),
            "{figures:?}"
        );
        assert!((figures[0].percent + 5.0).abs() < 0.1, "{figures:?}");
    }
}
