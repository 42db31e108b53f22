//! The published status of a sentinel, and its forms: text, metrics, JUnit cases.

use std::collections::VecDeque;
use std::fmt::Write as _;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::policy::State;
use crate::facts::{PrecisionCoverage, VerifiedProducts};

/// Yields of which the latencies are kept.
const LATENCIES_MAXIMUM: usize = 1000;

/// The status file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Status {
    pub version: String,
    pub pid: u32,
    /// Clock ticks from boot to the start of the process, so that a recycled process id is never
    /// taken for it.
    pub started_ticks: u64,
    /// RFC 3339.
    pub written_at: String,
    pub workload: String,
    /// The scenario of simulated driver libraries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub simulated: Option<String>,
    /// What the sentinel cannot see or do here.
    pub notes: Vec<String>,
    /// Alarms of the last ten minutes after which no GPU was taken.
    pub false_alarms: usize,
    pub gpus: Vec<GpuStatus>,
}

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GpuStatus {
    pub uuid: String,
    /// `GPU 0`: NVML's number, for people.
    pub name: String,
    pub state: State,
    pub reason: String,
    /// The worker, where there is one.
    pub pid: Option<u32>,
    /// Something withholds it (a pause, a validation, the scheduler, its mode): no worker is
    /// started.
    pub withheld: bool,
    pub memory_bytes: u64,
    pub bytes_verified: u64,
    /// Verified products by precision; empty for workloads that multiply nothing.
    #[serde(default, skip_serializing_if = "PrecisionCoverage::is_empty")]
    pub coverage: PrecisionCoverage,
    pub passes: u64,
    pub mismatches: u64,
    pub starts: u64,
    /// A worker was stopped for a foreign process.
    pub yields: u64,
    pub power_mw: Option<u32>,
    /// Share of time in which the worker computes.
    pub duty: f64,
    /// From detection to the end of the last kernel, to freed data, and to the end of the process.
    pub last_kernel: Latencies,
    pub data_free: Latencies,
    pub gone: Latencies,
    /// Why it is ill.
    pub finding: Option<String>,
}

/// Times in milliseconds: the last thousand, of which median and worst are published.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Latencies {
    pub count: u64,
    pub median_ms: f64,
    pub worst_ms: f64,
    #[serde(skip)]
    recent: VecDeque<f64>,
}

impl Latencies {
    pub fn add(&mut self, milliseconds: f64) {
        self.count += 1;
        self.recent.push_back(milliseconds);
        if self.recent.len() > LATENCIES_MAXIMUM {
            self.recent.pop_front();
        }
        let mut sorted: Vec<f64> = self.recent.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        self.median_ms = sorted[sorted.len() / 2];
        self.worst_ms = self.worst_ms.max(milliseconds);
    }
}

impl Status {
    /// For `sentinel status`.
    pub fn text(&self) -> String {
        let mut text = format!("process {}: {} workload", self.pid, self.workload);
        if let Some(scenario) = &self.simulated {
            let _ = write!(text, ", SIMULATED ({scenario})");
        }
        text.push('\n');
        for gpu in &self.gpus {
            let _ = write!(text, "  {} {}: {}", gpu.name, gpu.uuid, gpu.state.name());
            if !gpu.reason.is_empty() {
                let _ = write!(text, " ({})", gpu.reason);
            }
            let _ = writeln!(
                text,
                ", {} of memory held, {} verified in {} passes, {} mismatches, {} yields",
                gibibytes(gpu.memory_bytes),
                gibibytes(gpu.bytes_verified),
                gpu.passes,
                gpu.mismatches,
                gpu.yields
            );
            if !gpu.coverage.is_empty() {
                let _ = writeln!(text, "    {}", coverage_in_words(&gpu.coverage));
            }
            if gpu.data_free.count > 0 {
                let _ = writeln!(
                    text,
                    "    yield: last kernel {:.1} ms median, {:.1} ms worst; data free {:.1} and {:.1} ms",
                    gpu.last_kernel.median_ms,
                    gpu.last_kernel.worst_ms,
                    gpu.data_free.median_ms,
                    gpu.data_free.worst_ms
                );
            }
        }
        for note in &self.notes {
            let _ = writeln!(text, "  note: {note}");
        }
        text
    }

    /// In Prometheus' text format, for `node_exporter`'s textfile collector.
    pub fn metrics(&self) -> String {
        let mut page = String::new();
        let mut family = |name: &str, kind: &str, help: &str, value: &dyn Fn(&GpuStatus) -> f64| {
            let _ = writeln!(page, "# HELP gpu_validator_sentinel_{name} {help}");
            let _ = writeln!(page, "# TYPE gpu_validator_sentinel_{name} {kind}");
            for gpu in &self.gpus {
                let uuid = label(&gpu.uuid);
                let value = value(gpu);
                let _ = writeln!(
                    page,
                    "gpu_validator_sentinel_{name}{{uuid=\"{uuid}\"}} {value}"
                );
            }
        };
        let yes_no = f64::from;
        family(
            "ill",
            "gauge",
            "The sentinel found the GPU faulty and left it alone.",
            &|gpu| yes_no(gpu.state == State::Ill),
        );
        family(
            "memory_bytes",
            "gauge",
            "Memory that the sentinel's worker holds.",
            &|gpu| number(gpu.memory_bytes),
        );
        family(
            "verified_bytes_total",
            "counter",
            "Memory that was written, read back and compared.",
            &|gpu| number(gpu.bytes_verified),
        );
        family(
            "mismatches_total",
            "counter",
            "Values that differed from the expected ones.",
            &|gpu| number(gpu.mismatches),
        );
        family(
            "starts_total",
            "counter",
            "Workers that were started.",
            &|gpu| number(gpu.starts),
        );
        family(
            "yields_total",
            "counter",
            "Workers that were stopped for another process.",
            &|gpu| number(gpu.yields),
        );
        family(
            "yield_data_free_worst_seconds",
            "gauge",
            "Longest time from the detection of another process to freed memory.",
            &|gpu| gpu.data_free.worst_ms / 1000.0,
        );
        self.coverage_metrics(&mut page);
        let _ = writeln!(
            page,
            "# HELP gpu_validator_sentinel_state State of the GPU; 1 for the one it is in."
        );
        let _ = writeln!(page, "# TYPE gpu_validator_sentinel_state gauge");
        for gpu in &self.gpus {
            for state in State::ALL {
                let (uuid, is) = (label(&gpu.uuid), u8::from(gpu.state == state));
                let state = state.name();
                let _ = writeln!(
                    page,
                    "gpu_validator_sentinel_state{{uuid=\"{uuid}\",state=\"{state}\"}} {is}"
                );
            }
        }
        let _ = writeln!(
            page,
            "# HELP gpu_validator_sentinel_false_alarms Alarms of the last ten minutes after which no GPU was taken."
        );
        let _ = writeln!(page, "# TYPE gpu_validator_sentinel_false_alarms gauge");
        let _ = writeln!(
            page,
            "gpu_validator_sentinel_false_alarms {}",
            self.false_alarms
        );
        page
    }
}

impl Status {
    fn coverage_metrics(&self, page: &mut String) {
        type Value = fn(&VerifiedProducts) -> f64;
        let families: [(&str, &str, Value); 2] = [
            (
                "verified_products_total",
                "Products of this precision whose every element was compared.",
                |it| number(it.products),
            ),
            (
                "verified_seconds_total",
                "Time of these products on the GPU.",
                |it| it.seconds,
            ),
        ];
        for (name, help, value) in families {
            let _ = writeln!(page, "# HELP gpu_validator_sentinel_{name} {help}");
            let _ = writeln!(page, "# TYPE gpu_validator_sentinel_{name} counter");
            for gpu in &self.gpus {
                let uuid = label(&gpu.uuid);
                for (precision, verified) in &gpu.coverage {
                    let value = value(verified);
                    let _ = writeln!(
                        page,
                        "gpu_validator_sentinel_{name}{{uuid=\"{uuid}\",precision=\"{precision}\"}} {value}"
                    );
                }
            }
        }
    }
}

/// `precisions verified: 2 of 3: fp64 4.0 s, fp32 2.1 s, bf16 0.0 s`.
fn coverage_in_words(coverage: &PrecisionCoverage) -> String {
    let verified = coverage.values().filter(|it| it.products > 0).count();
    let times: Vec<String> = coverage
        .iter()
        .map(|(precision, it)| format!("{precision} {:.1} s", it.seconds))
        .collect();
    let (all, times) = (coverage.len(), times.join(", "));
    format!("precisions verified: {verified} of {all}: {times}")
}

fn label(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', " ")
}

#[expect(clippy::cast_precision_loss, reason = "Prometheus' numbers are floats")]
fn number(value: u64) -> f64 {
    value as f64
}

fn gibibytes(bytes: u64) -> String {
    format!("{:.2} GiB", number(bytes) / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Precision;

    fn status() -> Status {
        Status {
            pid: 7,
            workload: "memory".to_owned(),
            gpus: vec![GpuStatus {
                uuid: "GPU-a".to_owned(),
                name: "GPU 0".to_owned(),
                state: State::Ill,
                reason: "3 mismatches".to_owned(),
                memory_bytes: 1 << 30,
                mismatches: 3,
                coverage: [
                    (Precision::Fp64, VerifiedProducts::default()),
                    (
                        Precision::Bf16,
                        VerifiedProducts {
                            products: 7,
                            seconds: 1.5,
                        },
                    ),
                ]
                .into(),
                ..GpuStatus::default()
            }],
            ..Status::default()
        }
    }

    #[test]
    fn median_and_worst_are_those_of_the_latencies() {
        let mut latencies = Latencies::default();
        for value in [5.0, 1.0, 9.0] {
            latencies.add(value);
        }
        assert_eq!(latencies.count, 3);
        assert!((latencies.median_ms - 5.0).abs() < f64::EPSILON);
        for _ in 0..LATENCIES_MAXIMUM {
            latencies.add(2.0);
        }
        assert!((latencies.median_ms - 2.0).abs() < f64::EPSILON);
        assert!(
            (latencies.worst_ms - 9.0).abs() < f64::EPSILON,
            "the worst of all"
        );
    }

    #[test]
    fn text_and_metrics_name_what_is_wrong() {
        let text = status().text();
        assert!(
            text.contains("GPU 0 GPU-a: ill (3 mismatches), 1.00 GiB of memory held"),
            "{text}"
        );
        assert!(
            text.contains("precisions verified: 1 of 2: fp64 0.0 s, bf16 1.5 s"),
            "{text}"
        );
        let metrics = status().metrics();
        for line in [
            "gpu_validator_sentinel_ill{uuid=\"GPU-a\"} 1",
            "gpu_validator_sentinel_mismatches_total{uuid=\"GPU-a\"} 3",
            "gpu_validator_sentinel_verified_products_total{uuid=\"GPU-a\",precision=\"bf16\"} 7",
            "gpu_validator_sentinel_state{uuid=\"GPU-a\",state=\"ill\"} 1",
            "gpu_validator_sentinel_state{uuid=\"GPU-a\",state=\"working\"} 0",
        ] {
            assert!(metrics.lines().any(|it| it == line), "{line} in {metrics}");
        }
        // The alert rules are held against the metrics of this folder.
        let golden = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/golden/sentinel.prom"
        );
        expect_test::expect_file![golden].assert_eq(&metrics);
    }

    #[test]
    fn a_status_is_read_back() {
        let text = serde_json::to_string(&status()).expect("JSON");
        assert_eq!(
            serde_json::from_str::<Status>(&text).expect("read"),
            status()
        );
    }
}
