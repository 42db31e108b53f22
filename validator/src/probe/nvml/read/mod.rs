//! Reads one GPU, field by field, inside the worker.
//!
//! Left out because no check judges by them: utilisation rates (they are averages over up to a
//! second, and the call can wait for the next sample), encoder and decoder statistics, PCIe
//! throughput (samples for 20 ms each), accounting, supported clocks (hundreds of values).

mod identity;
mod links;
mod load;
mod memory;
mod processes;

use serde::Serialize;
use validator_core::facts::{
    ComputeMode, GpuFacts, GpuProcess, LoadCounters, MemoryUse, Reading, SensorSample,
};

use super::calls::Called;
use super::library::Device;
use super::protocol::Output;
use identity::compute_mode;
use load::{CLOCK_MEMORY, CLOCK_SM, FIELD_MEMORY_TEMPERATURE, SENSOR_GPU};
use memory::{AGGREGATE, VOLATILE};

/// Reads one GPU and reports every field as soon as it is known.
pub(super) struct GpuReader<'a> {
    pub(super) device: &'a Device<'a>,
    pub(super) index: u32,
    pub(super) output: &'a Output,
    /// Version of the driver: what its library should have, and how it numbers some fields.
    pub(super) driver: DriverNumber,
}

/// Branch and minor number of a driver; `None` where the version could not be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DriverNumber {
    pub(super) branch: Option<u32>,
    pub(super) minor: Option<u32>,
}

impl DriverNumber {
    pub(super) fn of(version: &str) -> Self {
        let mut parts = version.split('.').map(|part| part.parse().ok());
        Self {
            branch: parts.next().flatten(),
            minor: parts.next().flatten(),
        }
    }

    /// Fields for time lost to hardware thermal slowdown and to the power brake.
    ///
    /// NVIDIA renumbered fields 251 to 273 between 580.65 and 580.82, so that the number depends on
    /// the driver.
    // Source: docs.nvidia.com/deploy/nvml-api/known-issues.html.
    fn hardware_slowdown_fields(self) -> Option<[u32; 2]> {
        match (self.branch?, self.minor?) {
            (branch, _) if branch < 555 => None,
            (branch, minor) if (branch, minor) < (580, 82) => Some([252, 253]),
            _ => Some([270, 271]),
        }
    }
}

impl GpuReader<'_> {
    /// Who the GPU is, and everything that work on it would change. Identity first, so that a GPU
    /// that hangs later has its name.
    pub(super) fn read_at_rest(&self) {
        self.identity();
        self.modes();
        self.report("memory", self.memory());
        self.load();
    }

    /// Everything else, most of which takes longer.
    pub(super) fn read_health(&self) {
        self.memory_health();
        self.links();
    }

    /// Whose readings these are.
    pub(super) fn read_uuid(&self) {
        self.report("uuid", self.device.uuid());
    }

    /// What the driver reads from the board's flash memory.
    pub(super) fn read_inforom(&self) {
        self.report("inforom_valid", self.device.validate_inforom());
    }

    /// What changes under load. A sensor that does not answer now is missing from this sample
    /// alone.
    pub(super) fn sample(&self) -> SensorSample {
        let device = self.device;
        let memory_c = self.field(FIELD_MEMORY_TEMPERATURE).ok();
        SensorSample {
            t: 0.0,
            power_mw: device.power_usage_mw().ok(),
            sm_mhz: device.clock_mhz(CLOCK_SM).ok(),
            memory_mhz: device.clock_mhz(CLOCK_MEMORY).ok(),
            gpu_c: device.temperature(SENSOR_GPU).ok().map(u32::cast_signed),
            // The field is 0 on memory that has no sensor.
            memory_c: memory_c
                .filter(|it| *it != 0)
                .and_then(|it| i32::try_from(it).ok()),
            reasons: self.clocks_event_reasons().ok().map(|it| it.0),
            utilization_percent: device.gpu_utilization_percent().ok(),
        }
    }

    /// What a load must not move.
    pub(super) fn counters(&self) -> LoadCounters {
        LoadCounters {
            ecc_volatile: self.reading(self.ecc_errors(VOLATILE)),
            ecc_aggregate: self.reading(self.ecc_errors(AGGREGATE)),
            pcie_replays: self.reading(self.device.pcie_replay_counter().map(u64::from)),
            row_remapping: self.reading(self.row_remapping()),
            retired_pages: self.reading(self.retired_pages()),
            violations: self.reading(self.violations()),
        }
    }

    /// Who uses the GPU, and how much of its memory.
    pub(super) fn users(&self) -> GpuFacts {
        GpuFacts {
            processes: self.reading(self.processes()),
            memory: self.reading(self.memory()),
            compute_mode: self.reading(self.device.compute_mode().map(compute_mode)),
            ..GpuFacts::default()
        }
    }

    /// The memory, and where `with_lists` all processes, own ones included. The reason where a call
    /// failed.
    pub(super) fn users_of_all(
        &self,
        with_lists: bool,
    ) -> Result<(MemoryUse, Option<Vec<GpuProcess>>), String> {
        let memory = self.memory().map_err(|it| it.to_string())?;
        let processes = with_lists.then(|| self.all_processes()).transpose();
        Ok((memory, processes.map_err(|it| it.to_string())?))
    }

    pub(super) fn compute_mode_now(&self) -> Reading<ComputeMode> {
        self.reading(self.device.compute_mode().map(compute_mode))
    }

    pub(super) fn power_limit_mw(&self) -> Option<u32> {
        self.device.enforced_power_limit_mw().ok()
    }

    fn reading<T>(&self, called: Called<T>) -> Reading<T> {
        match called {
            Ok(value) => Reading::Value(value),
            Err(failure) => failure.reading(self.driver.branch),
        }
    }

    fn report<T: Serialize>(&self, field: &str, called: Called<T>) {
        self.report_reading(field, &self.reading(called));
    }

    fn report_reading<T: Serialize>(&self, field: &str, reading: &Reading<T>) {
        self.output.gpu(self.index, field, reading);
    }

    /// `None` where the GPU or driver has no such thing; everything else that goes wrong spoils the
    /// whole reading, so that a part which was not read is never taken for one that does not exist.
    fn optional<T>(&self, called: Called<T>) -> Called<Option<T>> {
        match called {
            Ok(value) => Ok(Some(value)),
            Err(failure) if failure.is_not_supported(self.driver.branch) => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// A value for readers of the report that no check judges by: `None`, too, where the library
    /// lacks the function.
    fn informative<T>(&self, called: Called<T>) -> Called<Option<T>> {
        match called {
            Err(failure) if failure.is_missing_function() => Ok(None),
            called => self.optional(called),
        }
    }

    fn field(&self, field: u32) -> Called<u64> {
        let mut values = self.device.field_values(&[(field, 0)])?;
        values.remove(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowdown_fields_follow_the_driver() {
        let fields = |version| DriverNumber::of(version).hardware_slowdown_fields();
        assert_eq!(fields("580.65.06"), Some([252, 253]));
        assert_eq!(fields("570.86.15"), Some([252, 253]));
        assert_eq!(fields("580.82.07"), Some([270, 271]));
        assert_eq!(fields("590.44.01"), Some([270, 271]));
        assert_eq!(fields("535.104.05"), None);
        assert_eq!(fields("?"), None);
    }
}
