//! `gpu-validator worker nvml`: makes all NVML queries and reports each result at once.

use std::ffi::OsStr;

use super::calls::Calls;
use super::library::NvmlLibrary;
use super::protocol::{Message, Output, SkippedCall};
use super::read::{DriverNumber, GpuReader};
use crate::driver_libraries;
use validator_core::facts::Reading;

/// The requested readings of the GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Part {
    #[default]
    All,
    AllButInforom,
    /// Whether its checksum is right, and of which GPU
    Inforom,
}

/// The request, and what the parent knows from earlier attempts.
pub(crate) struct NvmlWorker {
    pub(crate) part: Part,
    /// Calls that are not made again, see [`SkippedCall`].
    pub(crate) skipped: Vec<String>,
    /// GPUs that were read while nothing worked them.
    pub(crate) at_rest: Vec<u32>,
    /// GPUs about which everything is known.
    pub(crate) finished: Vec<u32>,
}

impl NvmlWorker {
    pub(crate) fn run(&self) {
        let output = Output::new();
        let skipped: Vec<SkippedCall> = self
            .skipped
            .iter()
            .filter_map(|argument| SkippedCall::from_argument(argument))
            .collect();
        if let Some(nvml) = load(&output) {
            self.read(&nvml, &skipped, &output);
        }
        output.send(&Message::Done {});
    }

    fn read(&self, nvml: &NvmlLibrary, skipped: &[SkippedCall], output: &Output) {
        let calls = Calls::new(None, skipped, output);
        if let Err(failure) = nvml.initialize(&calls) {
            // Whatever it is called, an NVML that does not start is not a driver without NVML.
            output.nvml(
                "initialized",
                &Reading::<bool>::NotRead(failure.to_string()),
            );
            return;
        }
        output.nvml("initialized", &Reading::Value(true));
        let version = nvml.driver_version(&calls);
        let driver = version.as_deref().map(DriverNumber::of).unwrap_or_default();
        output.nvml("driver_version", &reading(version, driver));
        output.nvml("nvml_version", &reading(nvml.nvml_version(&calls), driver));
        let cuda = nvml.cuda_driver_version(&calls).map(i32::cast_unsigned);
        output.nvml("cuda_driver_version", &reading(cuda, driver));
        let count = nvml.device_count(&calls);
        output.nvml("gpu_count", &reading(count.clone(), driver));
        // One after another: the driver serves calls behind locks on which callers spin
        // (BENCHMARKS.md), and a hang or crash is that of the call that was announced last.
        let gpus = (0..count.unwrap_or(0)).filter(|index| !self.finished.contains(index));
        // What gets ready to work a GPU waits for this, and the rest takes ten times as long.
        let opened = gpus.filter(|index| {
            self.part == Part::Inforom
                || self.at_rest.contains(index)
                || with_gpu(nvml, *index, driver, skipped, output, |gpu| {
                    gpu.read_at_rest();
                    output.send(&Message::GpuAtRest { index: *index });
                })
        });
        for index in opened.collect::<Vec<u32>>() {
            let read = |gpu: &GpuReader<'_>| match self.part {
                Part::All => {
                    gpu.read_health();
                    gpu.read_inforom();
                }
                Part::AllButInforom => gpu.read_health(),
                Part::Inforom => {
                    gpu.read_uuid();
                    gpu.read_inforom();
                }
            };
            if with_gpu(nvml, index, driver, skipped, output, read) {
                output.send(&Message::GpuDone { index });
            }
        }
    }
}

fn load(output: &Output) -> Option<NvmlLibrary> {
    output.announce(None, "dlopen");
    let open = |name: &str| NvmlLibrary::load(OsStr::new(name));
    match driver_libraries::load("libnvidia-ml.so.1", open) {
        Ok(loaded) => {
            output.nvml(
                "library_path",
                &driver_libraries::loaded_path("libnvidia-ml.so"),
            );
            output.nvml("loaded_by_path", &loaded.by_path);
            output.nvml("unloadable", &loaded.unloadable);
            if let Some(scenario) = loaded.library.simulator_scenario() {
                output.send(&Message::Simulated { scenario });
            }
            Some(loaded.library)
        }
        Err(error) => {
            output.nvml("initialized", &Reading::<bool>::NotRead(error));
            None
        }
    }
}

/// Whether NVML has a handle for this GPU, which `read` then gets. Without one it is not queried
/// any more.
fn with_gpu(
    nvml: &NvmlLibrary,
    index: u32,
    driver: DriverNumber,
    skipped: &[SkippedCall],
    output: &Output,
    read: impl FnOnce(&GpuReader<'_>),
) -> bool {
    let calls = Calls::new(Some(index), skipped, output);
    match nvml.device(index, &calls) {
        Ok(device) => {
            read(&GpuReader {
                device: &device,
                index,
                output,
                driver,
            });
            true
        }
        Err(failure) => {
            // The parent gives this reason to every reading.
            let reason = failure.to_string();
            output.send(&Message::Unopened { index, reason });
            output.send(&Message::GpuDone { index });
            false
        }
    }
}

fn reading<T>(called: super::calls::Called<T>, driver: DriverNumber) -> Reading<T> {
    match called {
        Ok(value) => Reading::Value(value),
        Err(failure) => failure.reading(driver.branch),
    }
}
