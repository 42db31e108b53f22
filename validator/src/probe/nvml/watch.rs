//! `gpu-validator worker watch`: reads again and again who uses the GPUs, and how they are.
//!
//! Memory is read at a high rate, since that is cheap; the process lists once a second, since each
//! read holds the driver's locks, and every 20 ms for a moment when the parent requests it.

use std::ffi::OsStr;
use std::io::{BufRead as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::calls::Calls;
use super::library::{NvmlLibrary, XidEvents};
use super::protocol::Output;
use super::read::{DriverNumber, GpuReader};
use crate::driver_libraries;
use crate::worker::clock;
use validator_core::facts::{ComputeMode, GpuProcess, LoadCounters, Reading};

/// Poll interval of the memory while a worker is there, and while none is.
// Source: nvmlDeviceGetMemoryInfo_v2 takes 12 us (flightlessmango/MangoHud#2104, RTX 4090).
const MEMORY_POLL: Duration = Duration::from_millis(10);
const MEMORY_POLL_AT_REST: Duration = Duration::from_millis(100);
/// A reading is reported at this interval though nothing changed.
const REPORT: Duration = Duration::from_millis(100);
/// Poll interval of the process lists, and that after a request, for so long.
// Source: 4.5 ms a call; forty a second kept a global lock for 10 of 15 s
// (flightlessmango/MangoHud#2104).
const LISTS_POLL: Duration = Duration::from_secs(1);
const LISTS_POLL_CLOSE: Duration = Duration::from_millis(20);
const CLOSE_LOOK: Duration = Duration::from_secs(2);
/// Poll interval of modes, power and counters.
const CONDITION_POLL: Duration = Duration::from_secs(1);
/// A GPU whose events never end would keep the others from being read.
const XIDS_A_LOOK_MAXIMUM: usize = 100;

/// Requests of the parent, a line each.
pub(crate) const LOOK_CLOSELY: &str = "look";
pub(crate) const WORKERS: &str = "workers";
pub(crate) const NO_WORKERS: &str = "no workers";

/// One line on the worker's stdout.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum WatchMessage {
    Memory {
        uuid: String,
        at_s: f64,
        used_bytes: u64,
        without_reserved: bool,
        /// All of them, where the lists were read.
        processes: Option<Vec<GpuProcess>>,
    },
    Condition {
        uuid: String,
        condition: Box<Condition>,
    },
    Xids {
        uuid: String,
        xids: Vec<u32>,
    },
    /// This GPU returns no readings, and why.
    Unreadable {
        uuid: String,
        reason: String,
    },
    /// Nothing can be read, and why.
    Trouble(String),
}

/// How a GPU is, apart from its users.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Condition {
    pub(crate) compute_mode: Reading<ComputeMode>,
    pub(crate) power_mw: Option<u32>,
    pub(crate) power_limit_mw: Option<u32>,
    /// [`validator_core::facts::ClocksEventReasons`].
    pub(crate) reasons: Option<u64>,
    pub(crate) counters: LoadCounters,
}

/// Reads the GPUs with these UUIDs until its input ends or the parent does.
pub(crate) fn run_worker(uuids: &[String]) {
    if let Err(trouble) = watch(uuids) {
        tell(&WatchMessage::Trouble(trouble));
    }
}

/// What the parent requested last.
#[derive(Default)]
struct Requests {
    has_workers: AtomicBool,
    close_looks: AtomicU64,
    is_over: AtomicBool,
}

impl Requests {
    fn listen() -> std::io::Result<Arc<Self>> {
        let requests = Arc::new(Self::default());
        let told = Arc::clone(&requests);
        crate::threads::spawn("to read requests", move || {
            for line in std::io::stdin().lock().lines().map_while(Result::ok) {
                match line.trim() {
                    LOOK_CLOSELY => {
                        told.close_looks.fetch_add(1, Ordering::Relaxed);
                    }
                    WORKERS => told.has_workers.store(true, Ordering::Relaxed),
                    NO_WORKERS => told.has_workers.store(false, Ordering::Relaxed),
                    _ => {}
                }
            }
            told.is_over.store(true, Ordering::Relaxed);
        })?;
        Ok(requests)
    }
}

fn watch(uuids: &[String]) -> Result<(), String> {
    let requests = Requests::listen().map_err(|error| error.to_string())?;
    let output = Output::quiet();
    let open = |name: &str| NvmlLibrary::load(OsStr::new(name));
    let nvml = driver_libraries::load("libnvidia-ml.so.1", open)
        .map_err(|error| format!("libnvidia-ml.so.1 could not be loaded: {error}"))?
        .library;
    let calls = Calls::new(None, &[], &output);
    nvml.initialize(&calls).map_err(|it| it.to_string())?;
    let version = nvml.driver_version(&calls);
    let driver = version.as_deref().map(DriverNumber::of).unwrap_or_default();
    let count = nvml.device_count(&calls).map_err(|it| it.to_string())?;
    let devices: Vec<_> = (0..count)
        .filter_map(|index| nvml.device(index, &calls).ok())
        .filter_map(|device| Some((device.uuid().ok()?, device)))
        .filter(|(uuid, _)| uuids.contains(uuid))
        .collect();
    for uuid in uuids {
        if !devices.iter().any(|(it, _)| it == uuid) {
            let reason = "NVML has no handle for the GPU".to_owned();
            let uuid = uuid.clone();
            tell(&WatchMessage::Unreadable { uuid, reason });
        }
    }
    let mut watched: Vec<Watched<'_>> = devices
        .iter()
        .map(|(uuid, device)| Watched {
            uuid,
            reader: GpuReader {
                device,
                index: 0,
                output: &output,
                driver,
            },
            events: XidEvents::of(device).ok(),
            told: None,
        })
        .collect();
    let mut lists_at = Instant::now();
    let mut condition_at = Instant::now();
    let mut close_until = Instant::now();
    let mut close_looks = 0;
    while !requests.is_over.load(Ordering::Relaxed) {
        let began = Instant::now();
        let requested = requests.close_looks.load(Ordering::Relaxed);
        if requested != close_looks {
            close_looks = requested;
            close_until = began + CLOSE_LOOK;
            lists_at = began;
        }
        let reads_lists = began >= lists_at;
        if reads_lists {
            let is_close = began < close_until;
            lists_at = began
                + if is_close {
                    LISTS_POLL_CLOSE
                } else {
                    LISTS_POLL
                };
        }
        let reads_condition = began >= condition_at;
        if reads_condition {
            condition_at = began + CONDITION_POLL;
        }
        for gpu in &mut watched {
            gpu.read_memory(reads_lists);
            if reads_condition {
                gpu.read_condition();
            }
        }
        let poll = if requests.has_workers.load(Ordering::Relaxed) {
            MEMORY_POLL
        } else {
            MEMORY_POLL_AT_REST
        };
        let next = (began + poll).min(lists_at);
        // A request shortens the wait.
        while Instant::now() < next && requests.close_looks.load(Ordering::Relaxed) == close_looks {
            let left = next.saturating_duration_since(Instant::now());
            std::thread::sleep(left.min(MEMORY_POLL));
        }
    }
    Ok(())
}

struct Watched<'a> {
    uuid: &'a str,
    reader: GpuReader<'a>,
    events: Option<XidEvents<'a>>,
    /// The used bytes that were reported last, and when.
    told: Option<(u64, Instant)>,
}

impl Watched<'_> {
    fn read_memory(&mut self, reads_lists: bool) {
        let at_s = clock::now_s();
        let (memory, processes) = match self.reader.users_of_all(reads_lists) {
            Ok(read) => read,
            Err(reason) => {
                let uuid = self.uuid.to_owned();
                tell(&WatchMessage::Unreadable { uuid, reason });
                return;
            }
        };
        let is_new = self
            .told
            .is_none_or(|(bytes, at)| bytes != memory.used_bytes || at.elapsed() >= REPORT);
        if !is_new && processes.is_none() {
            return;
        }
        self.told = Some((memory.used_bytes, Instant::now()));
        tell(&WatchMessage::Memory {
            uuid: self.uuid.to_owned(),
            at_s,
            used_bytes: memory.used_bytes,
            without_reserved: memory.reserved_bytes.is_some(),
            processes,
        });
    }

    fn read_condition(&mut self) {
        let sample = self.reader.sample();
        tell(&WatchMessage::Condition {
            uuid: self.uuid.to_owned(),
            condition: Box::new(Condition {
                compute_mode: self.reader.compute_mode_now(),
                power_mw: sample.power_mw,
                power_limit_mw: self.reader.power_limit_mw(),
                reasons: sample.reasons,
                counters: self.reader.counters(),
            }),
        });
        let mut xids = Vec::new();
        while let Some(events) = &self.events
            && xids.len() < XIDS_A_LOOK_MAXIMUM
        {
            match events.next() {
                Ok(Some(xid)) => xids.push(xid),
                Ok(None) => break,
                Err(_) => self.events = None,
            }
        }
        if !xids.is_empty() {
            let uuid = self.uuid.to_owned();
            tell(&WatchMessage::Xids { uuid, xids });
        }
    }
}

/// When the parent is gone there is no reader, and the worker ends with it.
fn tell(message: &WatchMessage) {
    let Ok(mut line) = serde_json::to_vec(message) else {
        return;
    };
    line.push(b'\n');
    let mut stdout = std::io::stdout().lock();
    if stdout.write_all(&line).is_err() || stdout.flush().is_err() {
        std::process::exit(1);
    }
}
