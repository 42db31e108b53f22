//! `gpu-validator worker gpu-users`: who uses GPUs, and how much of their memory, again and again.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::calls::Calls;
use super::library::{Device, NvmlLibrary};
use super::protocol::Output;
use super::read::{DriverNumber, GpuReader};
use crate::driver_libraries;
use validator_core::facts::GpuUse;

/// Poll interval. Each list holds locks of the driver, some 5 ms for the graphics list.
// Source: flightlessmango/MangoHud#2104, 4.5 ms on an RTX 4090.
const PERIOD: Duration = Duration::from_millis(200);
/// Poll interval for SIGTERM.
const END_POLL: Duration = Duration::from_millis(10);

/// One line on the worker's stdout.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum UsersMessage {
    /// One GPU as it is now, the processes of this validator included.
    Use { uuid: String, gpu: GpuUse },
    /// Every GPU was read once more.
    Round {},
    /// Nothing can be read, and why.
    Trouble(String),
}

/// Reads the GPUs with these UUIDs until SIGTERM.
pub(crate) fn run_worker(uuids: &[String]) {
    if let Err(trouble) = watch(uuids) {
        send(&UsersMessage::Trouble(trouble));
    }
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
    // A lost GPU has no handle; the others are read.
    let devices: Vec<(String, Device<'_>)> = (0..count)
        .filter_map(|index| nvml.device(index, &calls).ok())
        .filter_map(|device| Some((device.uuid().ok()?, device)))
        .filter(|(uuid, _)| uuids.contains(uuid))
        .collect();
    while !stop.load(Ordering::Relaxed) {
        let next = Instant::now() + PERIOD;
        for (uuid, device) in &devices {
            let reader = GpuReader {
                device,
                index: 0,
                output: &output,
                driver,
            };
            send(&UsersMessage::Use {
                uuid: uuid.clone(),
                gpu: reader.all_users(),
            });
        }
        send(&UsersMessage::Round {});
        // A signal does not end a sleep, so that it is cut into pieces.
        while !stop.load(Ordering::Relaxed) && Instant::now() < next {
            std::thread::sleep(END_POLL);
        }
    }
    Ok(())
}

/// The end of the process where there is no reader any more.
fn send(message: &UsersMessage) {
    let Ok(mut line) = serde_json::to_vec(message) else {
        return;
    };
    line.push(b'\n');
    let mut stdout = std::io::stdout().lock();
    if stdout
        .write_all(&line)
        .and_then(|()| stdout.flush())
        .is_err()
    {
        std::process::exit(1);
    }
}

impl GpuReader<'_> {
    /// Every process on the GPU, the validator's own included, and the memory in use.
    fn all_users(&self) -> GpuUse {
        let pids = self.all_processes().ok();
        let memory = self.memory().ok();
        GpuUse {
            memory_used_bytes: memory.as_ref().map(|it| it.used_bytes),
            memory_free_bytes: memory.as_ref().map(|it| it.free_bytes),
            pids: pids.map(|it| it.iter().map(|it| it.pid).collect::<BTreeSet<u32>>()),
        }
    }
}
