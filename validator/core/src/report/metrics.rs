//! The report for Prometheus: a file for `node_exporter`'s textfile collector.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::burn_rows::{BurnRow, burn_rows};
use super::node_summary::Machine;
use super::verdict;
use crate::diagnosis::{CauseKind, RecommendedAction, diagnose, recommended_action_of};
use crate::facts::GpuFacts;
use crate::findings::{ExitStatus, Run, Verdict};

/// The metrics in Prometheus' text format.
pub fn metrics(run: &Run) -> String {
    let mut page = Page(String::new());
    page.run(run);
    page.diagnosis(run);
    page.checks(run);
    page.gpus(run);
    page.burn(run);
    page.0
}

struct Page(String);

type Labels<'a> = Vec<(&'a str, &'a str)>;

impl Page {
    fn metric(&mut self, name: &str, help: &str, samples: &[(Labels<'_>, f64)]) {
        if samples.is_empty() {
            return;
        }
        let _ = writeln!(self.0, "# HELP gpu_validator_{name} {help}");
        let _ = writeln!(self.0, "# TYPE gpu_validator_{name} gauge");
        for (labels, value) in samples {
            let labels: Vec<String> = labels
                .iter()
                .map(|(label, value)| format!("{label}=\"{}\"", label_value(value)))
                .collect();
            let labels = if labels.is_empty() {
                String::new()
            } else {
                format!("{{{}}}", labels.join(","))
            };
            let _ = writeln!(self.0, "gpu_validator_{name}{labels} {value}");
        }
    }

    fn run(&mut self, run: &Run) {
        let machine = Machine::of(&run.facts);
        let status = run.exit_status();
        let yes_no = |yes: bool| if yes { "true" } else { "false" };
        let level = run.level.to_string();
        self.metric(
            "info",
            "What was judged, and by which version; always 1.",
            &[(
                vec![
                    ("version", env!("CARGO_PKG_VERSION")),
                    ("level", &level),
                    ("profile", &run.profile),
                    (
                        "driver_version",
                        machine.driver_version.as_deref().unwrap_or_default(),
                    ),
                    (
                        "cuda_version",
                        machine.cuda_version.as_deref().unwrap_or_default(),
                    ),
                    ("simulated", yes_no(run.facts.simulated.is_some())),
                    ("incomplete", yes_no(run.incomplete.is_some())),
                    ("anonymized", yes_no(run.facts.anonymized)),
                ],
                1.0,
            )],
        );
        let verdicts: Vec<(Labels<'_>, f64)> = [
            ExitStatus::Passed,
            ExitStatus::Failed,
            ExitStatus::NotJudged,
            ExitStatus::Busy,
        ]
        .into_iter()
        .map(|it| {
            let labels = vec![("verdict", verdict::key(it))];
            (labels, f64::from(u8::from(it == status)))
        })
        .collect();
        self.metric(
            "verdict",
            "1 for the verdict of the run, 0 for the others.",
            &verdicts,
        );
        self.metric(
            "exit_code",
            "Exit code of the run: 0 pass, 1 fail, 2 not judged, 4 busy.",
            &[(Vec::new(), f64::from(status as u8))],
        );
        if let Ok(time) = run.facts.collected_at.parse::<jiff::Timestamp>() {
            #[expect(
                clippy::cast_precision_loss,
                reason = "seconds since 1970 fit into 53 bits"
            )]
            let seconds = time.as_second() as f64;
            self.metric(
                "collected_timestamp_seconds",
                "When the facts were collected, in seconds since 1970.",
                &[(Vec::new(), seconds)],
            );
        }
    }

    fn diagnosis(&mut self, run: &Run) {
        let of_run = recommended_action_of(run);
        let actions: Vec<(Labels<'_>, f64)> = RecommendedAction::ALL
            .into_iter()
            .map(|it| {
                let labels = vec![("action", it.name())];
                (labels, f64::from(u8::from(Some(it) == of_run)))
            })
            .collect();
        self.metric(
            "recommended_action",
            "1 for the action that the diagnosis recommends, 0 for the others; all 0 where the node may take work.",
            &actions,
        );
        let causes = diagnose(run);
        let mut seen: BTreeSet<(String, CauseKind)> = BTreeSet::new();
        let mut of_gpus = Vec::new();
        for cause in &causes {
            for gpu in &cause.gpus {
                let uuid = gpu.uuid.as_deref().unwrap_or_default();
                let address = gpu.pci_address.as_deref().unwrap_or_default();
                let identity = (format!("{uuid} {address}"), cause.kind);
                // Two samples with the same labels would spoil the whole file.
                if identity.0 == " " || !seen.insert(identity) {
                    continue;
                }
                let labels = vec![
                    ("gpu_uuid", uuid),
                    ("pci_address", address),
                    ("serial", gpu.serial.as_deref().unwrap_or_default()),
                    ("cause", cause.kind.name()),
                    ("action", cause.recommended_action.name()),
                ];
                of_gpus.push((labels, 1.0));
            }
        }
        self.metric(
            "gpu_recommended_action",
            "What to do about a root cause on this GPU; always 1.",
            &of_gpus,
        );
    }

    fn checks(&mut self, run: &Run) {
        let mut ids: Vec<&str> = Vec::new();
        for finding in &run.findings {
            if !ids.contains(&finding.check.as_str()) {
                ids.push(&finding.check);
            }
        }
        let verdicts = [
            (Verdict::Pass, "pass"),
            (Verdict::Warn, "warn"),
            (Verdict::Fail, "fail"),
            (Verdict::Error, "error"),
            (Verdict::Skip, "skip"),
        ];
        let mut samples = Vec::new();
        for id in ids {
            for (verdict, name) in verdicts {
                let count = run
                    .findings
                    .iter()
                    .filter(|it| it.check == id && it.verdict == verdict)
                    .count();
                #[expect(clippy::cast_precision_loss, reason = "a handful of findings")]
                samples.push((vec![("check", id), ("verdict", name)], count as f64));
            }
        }
        self.metric(
            "test_cases",
            "Test cases (a check on the host or on one GPU) by check and verdict.",
            &samples,
        );
    }

    fn gpus(&mut self, run: &Run) {
        type Value = fn(&GpuFacts) -> Option<f64>;
        #[expect(
            clippy::cast_precision_loss,
            reason = "bytes below 2^53 are exact, and no memory is larger"
        )]
        let values: [(&str, &str, Value); 8] = [
            (
                "gpu_temperature_celsius",
                "Temperature of the GPU.",
                |gpu| Some(gpu.temperature.value()?.gpu_c.into()),
            ),
            (
                "gpu_memory_temperature_celsius",
                "Temperature of the GPU's memory.",
                |gpu| Some(gpu.temperature.value()?.memory_c?.into()),
            ),
            ("gpu_power_watts", "Power draw of the GPU.", |gpu| {
                Some(f64::from(gpu.power.value()?.draw_mw?) / 1000.0)
            }),
            ("gpu_power_limit_watts", "Power limit in force.", |gpu| {
                Some(f64::from(gpu.power.value()?.limit_mw) / 1000.0)
            }),
            ("gpu_memory_total_bytes", "Memory of the GPU.", |gpu| {
                Some(gpu.memory.value()?.total_bytes as f64)
            }),
            (
                "gpu_memory_used_bytes",
                "Memory of the GPU in use.",
                |gpu| Some(gpu.memory.value()?.used_bytes as f64),
            ),
            (
                "gpu_ecc_uncorrected_errors",
                "Uncorrectable ECC errors since the driver was loaded.",
                |gpu| Some(gpu.ecc_volatile.value()?.total_uncorrectable? as f64),
            ),
            ("gpu_nvlinks_active", "Active NVLinks of the GPU.", |gpu| {
                let links = gpu.nvlinks.value()?;
                Some(links.iter().filter(|it| it.active).count() as f64)
            }),
        ];
        for (name, help, value) in values {
            let samples: Vec<(Labels<'_>, f64)> = run
                .facts
                .gpus
                .iter()
                .filter_map(|gpu| Some((gpu_labels(gpu)?, value(gpu)?)))
                .collect();
            self.metric(name, help, &samples);
        }
    }
}

impl Page {
    fn burn(&mut self, run: &Run) {
        type Value = fn(&BurnRow) -> Option<f64>;
        #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
        let values: [(&str, &str, Value); 5] = [
            (
                "burn_tflops",
                "Median throughput of verified products, in 1e12 operations a second.",
                |row| row.tflops,
            ),
            (
                "burn_reference_ratio",
                "Throughput over what a healthy GPU of the model was measured to reach.",
                |row| Some(row.reference_percent? / 100.0),
            ),
            (
                "burn_products_verified",
                "Products of which every element was compared with the reference.",
                |row| Some(row.products_verified as f64),
            ),
            (
                "burn_mismatches",
                "Blocks of results that were wrong, and results that were not finite.",
                |row| Some(row.mismatches as f64),
            ),
            (
                "burn_power_watts",
                "Mean power over the second half of the burn.",
                |row| row.power_w,
            ),
        ];
        let rows = burn_rows(&run.facts);
        for (name, help, value) in values {
            let samples: Vec<(Labels<'_>, f64)> = rows
                .iter()
                .filter_map(|row| {
                    let labels = vec![
                        ("gpu_uuid", row.gpu_uuid.as_str()),
                        (
                            "pci_address",
                            row.pci_address.as_deref().unwrap_or_default(),
                        ),
                        ("precision", row.precision.as_str()),
                    ];
                    Some((labels, value(row)?))
                })
                .collect();
            self.metric(name, help, &samples);
        }
    }
}

/// `None` for a GPU that cannot be distinguished from another: two samples of one name would spoil
/// the whole file.
fn gpu_labels(gpu: &GpuFacts) -> Option<Labels<'_>> {
    let uuid = gpu.uuid.value().map(String::as_str);
    let address = gpu.pci_address.value().map(String::as_str);
    uuid.or(address)?;
    Some(vec![
        ("gpu_uuid", uuid.unwrap_or_default()),
        ("pci_address", address.unwrap_or_default()),
        (
            "name",
            gpu.name.value().map(String::as_str).unwrap_or_default(),
        ),
    ])
}

/// Source of the escapes: Prometheus' text-based exposition format.
fn label_value(text: &str) -> String {
    super::text::printable(text)
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}
