//! What the sentinel publishes: its status in the runtime folder, the status file, the metrics
//! file, its log lines.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context as _;

use super::{SentinelGpu, SentinelOptions};
use crate::owned_folder::{OwnedFolder, replace_in};
use crate::process_stat::start_ticks;
use crate::sentinel_requests::{self, Requests};
use validator_core::facts::WorkloadRun;
use validator_core::sentinel::health;
use validator_core::sentinel::policy::State;
use validator_core::sentinel::status::{GpuStatus, Status};

pub(super) struct Published {
    status: Status,
    positions: BTreeMap<String, usize>,
    /// Verified by workers that are gone: each counts from zero.
    earlier: BTreeMap<String, Totals>,
    requests: Option<Requests>,
    status_file: Option<std::path::PathBuf>,
    metrics_file: Option<std::path::PathBuf>,
}

/// What one worker after the other adds to.
#[derive(Clone, Copy, Default)]
struct Totals {
    bytes_verified: u64,
    passes: u64,
    mismatches: u64,
}

impl Published {
    pub(super) fn new(
        options: &SentinelOptions,
        gpus: &[SentinelGpu],
        simulated: Option<String>,
        notes: Vec<String>,
    ) -> anyhow::Result<Self> {
        let pid = std::process::id();
        let status = Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid,
            started_ticks: start_ticks(pid).context("cannot read /proc/self/stat")?,
            workload: options.task.name().to_owned(),
            simulated,
            notes,
            gpus: gpus
                .iter()
                .map(|gpu| GpuStatus {
                    uuid: gpu.uuid.clone(),
                    name: gpu.name.clone(),
                    duty: 1.0,
                    ..GpuStatus::default()
                })
                .collect(),
            ..Status::default()
        };
        let positions = gpus.iter().enumerate();
        let positions = positions.map(|(at, gpu)| (gpu.uuid.clone(), at)).collect();
        Ok(Self {
            status,
            positions,
            earlier: BTreeMap::new(),
            requests: None,
            status_file: options.status_file.clone(),
            metrics_file: options.metrics_file.clone(),
        })
    }

    pub(super) fn notes(&self) -> &[String] {
        &self.status.notes
    }

    /// The status of a GPU that is watched.
    pub(super) fn gpu(&mut self, uuid: &str) -> &mut GpuStatus {
        let next = self.status.gpus.len();
        let at = *self.positions.entry(uuid.to_owned()).or_insert(next);
        if at == next {
            // NVML was queried for the watched GPUs alone; one more does no harm.
            self.status.gpus.push(GpuStatus {
                uuid: uuid.to_owned(),
                ..GpuStatus::default()
            });
        }
        let gpu = self.status.gpus.get_mut(at);
        gpu.expect("positions are those of GPUs that were added")
    }

    pub(super) fn take_run(&mut self, uuid: &str, run: &WorkloadRun) {
        let earlier = self.earlier.get(uuid).copied().unwrap_or_default();
        let gpu = self.gpu(uuid);
        // A worker counts on from what the ones before it covered.
        if let Some(detail) = health::gemm_detail(run) {
            gpu.coverage = detail.coverage;
        }
        gpu.bytes_verified = earlier.bytes_verified + run.measured.bytes_verified;
        gpu.passes = earlier.passes + run.measured.passes;
        gpu.mismatches = earlier.mismatches + run.mismatches;
    }

    /// The worker has freed its memory.
    pub(super) fn silent(
        &mut self,
        uuid: &str,
        detected_s: Option<f64>,
        last_kernel_s: f64,
        freed_s: f64,
    ) {
        let gpu = self.gpu(uuid);
        gpu.memory_bytes = 0;
        if let Some(detected) = detected_s {
            let since = |at: f64| ((at - detected) * 1000.0).max(0.0);
            gpu.last_kernel.add(since(last_kernel_s));
            gpu.data_free.add(since(freed_s));
        }
    }

    /// The worker is gone.
    pub(super) fn gone(&mut self, uuid: &str, detected_s: Option<f64>, at_s: f64) {
        let gpu = self.gpu(uuid);
        gpu.pid = None;
        gpu.memory_bytes = 0;
        if let Some(detected) = detected_s {
            gpu.gone.add(((at_s - detected) * 1000.0).max(0.0));
        }
        let totals = Totals {
            bytes_verified: gpu.bytes_verified,
            passes: gpu.passes,
            mismatches: gpu.mismatches,
        };
        self.earlier.insert(uuid.to_owned(), totals);
    }

    /// The requests, where they differ from those of the last call.
    pub(super) fn changed_requests(&mut self, folder: &OwnedFolder) -> Option<Requests> {
        let requests = Requests::read(folder);
        if self.requests.as_ref() == Some(&requests) {
            return None;
        }
        self.requests = Some(requests.clone());
        Some(requests)
    }

    /// The log line of a change.
    pub(super) fn line(&mut self, uuid: &str, state: State, reason: &str) -> String {
        let workload = self.status.workload.clone();
        let gpu = self.gpu(uuid);
        let because = if reason.is_empty() {
            String::new()
        } else {
            format!(": {reason}")
        };
        match state {
            State::Unknown => format!("unknown{because}"),
            State::Grace => format!("idle{because}"),
            State::Starting => format!("free, starting workload {workload}"),
            State::Working => {
                let mib = gpu.memory_bytes >> 20;
                format!("working, {mib} MiB allocated")
            }
            State::Yielding => format!("yielding{because}"),
            State::Away => format!("in use by another process{because}"),
            State::Withheld => format!("withheld{because}"),
            State::Ill => format!("faulty, left alone{because}"),
        }
    }

    /// Writes the status where it is wanted. A disk that is full delays and prevents nothing else.
    pub(super) fn write(&mut self, folder: &OwnedFolder, false_alarms: usize) -> Status {
        self.status.false_alarms = false_alarms;
        self.status.written_at = jiff::Timestamp::now().to_string();
        let _ = sentinel_requests::publish(folder, &self.status);
        if let Some(path) = &self.status_file
            && let Ok(text) = serde_json::to_vec_pretty(&self.status)
        {
            let _ = replace(path, &text);
        }
        if let Some(path) = &self.metrics_file {
            let _ = replace(path, self.status.metrics().as_bytes());
        }
        self.status.clone()
    }
}

fn replace(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let name = path.file_name().ok_or(std::io::ErrorKind::InvalidInput)?;
    replace_in(folder, name, content, 0o644)
}
