//! `gpu-validator worker sensors`: what NVML's sensors show while the GPUs are at work.

use std::ffi::OsStr;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::calls::Calls;
use super::library::{Device, NvmlLibrary, XidEvents};
use super::protocol::Output;
use super::read::{DriverNumber, GpuReader};
use crate::driver_libraries;
use crate::worker::clock;
use validator_core::facts::{ClocksEventReasons, GpuProcess, LoadCounters, Reading, SensorSample};

/// From one look at all GPUs to the next. Power is an average over a longer time on most GPUs.
const PERIOD: Duration = Duration::from_millis(100);
/// The processes are listed at every fifth look, and not at the first, when workers may still get
/// ready: it takes the driver 0.2 ms a GPU, and up to 80 where a process begins or ends
/// (BENCHMARKS.md).
const LOOKS_A_LIST: u64 = 5;
/// A burn keeps a GPU at 99 % or more (BENCHMARKS.md); with less its work begins, ends or is
/// suspended. This project's own choice.
const UTILIZATION_AT_WORK_PERCENT: u32 = 50;
/// A GPU whose events never end would keep the others from being looked at.
const XIDS_A_LOOK_MAXIMUM: usize = 100;

/// One line on the worker's stdout.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum SensorMessage {
    Before {
        uuid: String,
        power_limit_mw: Option<u32>,
        counters: Box<LoadCounters>,
    },
    Sample {
        uuid: String,
        /// By [`clock::now_s`], here and below.
        at_s: f64,
        sample: SensorSample,
    },
    /// Those that came since the last such message; the first, without any, announces the listener.
    Xids {
        uuid: String,
        xids: Reading<Vec<u32>>,
    },
    /// Of others, on a GPU that a worker works.
    Processes {
        uuid: String,
        at_s: f64,
        processes: Vec<GpuProcess>,
    },
    /// The PCIe link as it is now.
    Pcie {
        uuid: String,
        /// By [`clock::now_s`].
        at_s: f64,
        generation: u32,
        width: u32,
    },
    After {
        uuid: String,
        counters: Box<LoadCounters>,
    },
    /// Nothing more can be read, and why.
    Trouble(String),
    Done {},
}

/// Samples the GPUs with these UUIDs until SIGTERM, then reads their counters again.
pub(crate) fn run_worker(uuids: &[String]) {
    if let Err(trouble) = watch(uuids) {
        report(&SensorMessage::Trouble(trouble));
    }
    report(&SensorMessage::Done {});
}

fn watch(uuids: &[String]) -> Result<(), String> {
    let stop = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&stop))
        .map_err(|error| format!("SIGTERM cannot be handled: {error}"))?;
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
    // A lost GPU has no handle; the others are watched.
    let devices: Vec<(String, Device<'_>)> = (0..count)
        .filter_map(|index| nvml.device(index, &calls).ok())
        .filter_map(|device| Some((device.uuid().ok()?, device)))
        .filter(|(uuid, _)| uuids.contains(uuid))
        .collect();
    let readers: Vec<(&String, GpuReader<'_>)> = devices
        .iter()
        .map(|(uuid, device)| {
            let reader = GpuReader {
                device,
                index: 0,
                output: &output,
                driver,
            };
            (uuid, reader)
        })
        .collect();
    let mut xids: Vec<XidListener<'_>> = devices
        .iter()
        .map(|(uuid, device)| XidListener::start(uuid, device, driver))
        .collect();
    for (uuid, reader) in &readers {
        report(&SensorMessage::Before {
            uuid: (*uuid).clone(),
            power_limit_mw: reader.power_limit_mw(),
            counters: Box::new(reader.counters()),
        });
    }
    sample_until(&stop, &readers, &mut xids);
    for (uuid, reader) in &readers {
        report(&SensorMessage::After {
            uuid: (*uuid).clone(),
            counters: Box::new(reader.counters()),
        });
    }
    Ok(())
}

fn sample_until(
    stop: &AtomicBool,
    readers: &[(&String, GpuReader<'_>)],
    xids: &mut [XidListener<'_>],
) {
    for look in 0_u64.. {
        // Before it is left, too: what came last counts.
        for listener in &mut *xids {
            listener.report_new();
        }
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let next = Instant::now() + PERIOD;
        for (uuid, reader) in readers {
            let sample = reader.sample();
            report(&SensorMessage::Sample {
                uuid: (*uuid).clone(),
                at_s: clock::now_s(),
                sample,
            });
            if look % LOOKS_A_LIST == LOOKS_A_LIST - 1 {
                tell_processes(uuid, reader);
                if is_working(&sample) {
                    tell_pcie(uuid, reader);
                }
            }
        }
        // A signal does not end a sleep, so that it is cut into pieces.
        while !stop.load(Ordering::Relaxed) && Instant::now() < next {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn tell_processes(uuid: &str, reader: &GpuReader<'_>) {
    let at_s = clock::now_s();
    let processes = reader.processes_beside_a_worker();
    if !processes.is_empty() {
        report(&SensorMessage::Processes {
            uuid: uuid.to_owned(),
            at_s,
            processes,
        });
    }
}

/// Whether the link of a GPU with this sample is under load. A worker may be suspended or have
/// ended, and an idle GPU lowers the generation to save power.
fn is_working(sample: &SensorSample) -> bool {
    sample
        .utilization_percent
        .is_none_or(|it| it > UTILIZATION_AT_WORK_PERCENT)
        && sample
            .reasons
            .is_none_or(|it| !ClocksEventReasons(it).contains(ClocksEventReasons::GPU_IDLE))
}

/// Nothing where NVML does not report the link, as on a virtual GPU.
fn tell_pcie(uuid: &str, reader: &GpuReader<'_>) {
    let at_s = clock::now_s();
    if let Some((generation, width)) = reader.current_pcie_link() {
        report(&SensorMessage::Pcie {
            uuid: uuid.to_owned(),
            at_s,
            generation,
            width,
        });
    }
}

/// Listens for the Xids of one GPU, and reports them.
struct XidListener<'a> {
    uuid: &'a str,
    /// Nothing more where NVML has no events.
    events: Option<XidEvents<'a>>,
    driver: DriverNumber,
}

impl<'a> XidListener<'a> {
    fn start(uuid: &'a str, device: &'a Device<'a>, driver: DriverNumber) -> Self {
        let events = XidEvents::of(device);
        let mut listener = Self {
            uuid,
            events: None,
            driver,
        };
        match events {
            Ok(events) => {
                listener.events = Some(events);
                listener.report(Reading::Value(Vec::new()));
            }
            Err(failure) => listener.report(failure.reading(driver.branch)),
        }
        listener
    }

    fn report_new(&mut self) {
        let mut new = Vec::new();
        while let Some(events) = &self.events
            && new.len() < XIDS_A_LOOK_MAXIMUM
        {
            match events.next() {
                Ok(Some(xid)) => new.push(xid),
                Ok(None) => break,
                Err(failure) => {
                    self.report(failure.reading(self.driver.branch));
                    self.events = None;
                }
            }
        }
        if !new.is_empty() {
            self.report(Reading::Value(new));
        }
    }

    fn report(&self, xids: Reading<Vec<u32>>) {
        report(&SensorMessage::Xids {
            uuid: self.uuid.to_owned(),
            xids,
        });
    }
}

/// When the parent is gone there is no reader, and the worker dies with it.
fn report(message: &SensorMessage) {
    let Ok(mut line) = serde_json::to_vec(message) else {
        return;
    };
    line.push(b'\n');
    let mut stdout = std::io::stdout().lock();
    if stdout.write_all(&line).is_err() || stdout.flush().is_err() {
        std::process::exit(1);
    }
}
