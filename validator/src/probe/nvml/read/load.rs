//! What a load changes: clocks, violations, temperature and power.

use validator_core::facts::{
    Clocks, ClocksEventReasons, Power, Reading, Temperature, Utilization, ViolationTimes,
};

use super::super::calls::Called;
use super::super::status;
use super::GpuReader;

// Source of all numbers: nvml.h.
pub(super) const FIELD_MEMORY_TEMPERATURE: u32 = 82;
pub(super) const CLOCK_SM: u32 = 1;
pub(super) const CLOCK_MEMORY: u32 = 2;
pub(super) const SENSOR_GPU: u32 = 0;
const THRESHOLD_SHUTDOWN: u32 = 0;
const THRESHOLD_SLOWDOWN: u32 = 1;
const THRESHOLD_MEMORY_MAX: u32 = 2;
const THRESHOLD_GPU_MAX: u32 = 3;
const POLICY_POWER: u32 = 0;
const POLICY_THERMAL: u32 = 1;
const POLICY_SYNC_BOOST: u32 = 2;
const POLICY_RELIABILITY: u32 = 5;

impl GpuReader<'_> {
    pub(super) fn load(&self) {
        self.report("clocks", self.clocks());
        self.report("clocks_event_reasons", self.clocks_event_reasons());
        self.report("violations", self.violations());
        self.report("temperature", self.temperature());
        self.report("power", self.power());
        self.report("performance_state", self.device.performance_state());
        let not_asked = Reading::<Utilization>::NotRead("not read: no check uses it".to_owned());
        self.report_reading("utilization", &not_asked);
        self.report("processes", self.processes());
    }

    fn clocks(&self) -> Called<Clocks> {
        let device = self.device;
        Ok(Clocks {
            sm_mhz: device.clock_mhz(CLOCK_SM)?,
            memory_mhz: device.clock_mhz(CLOCK_MEMORY)?,
            max_sm_mhz: self.optional(device.max_clock_mhz(CLOCK_SM))?,
            max_memory_mhz: self.optional(device.max_clock_mhz(CLOCK_MEMORY))?,
        })
    }

    /// Renamed in R535; older drivers know the old name only.
    pub(super) fn clocks_event_reasons(&self) -> Called<ClocksEventReasons> {
        match self.device.clocks_event_reasons() {
            Err(failure) if failure.is_missing_function() => self.device.clocks_throttle_reasons(),
            other => other,
        }
        .map(ClocksEventReasons)
    }

    pub(super) fn violations(&self) -> Called<ViolationTimes> {
        let policy = |policy| self.optional(self.device.violation_ns(policy));
        let mut times = ViolationTimes {
            power_ns: policy(POLICY_POWER)?,
            thermal_ns: policy(POLICY_THERMAL)?,
            sync_boost_ns: policy(POLICY_SYNC_BOOST)?,
            reliability_ns: policy(POLICY_RELIABILITY)?,
            ..ViolationTimes::default()
        };
        if let Some([thermal, power_brake]) = self.driver.hardware_slowdown_fields() {
            let asked = [(thermal, 0), (power_brake, 0)];
            let mut values = self.device.field_values(&asked)?.into_iter();
            let mut next = || values.next().map_or(Ok(None), |value| self.optional(value));
            times.hw_thermal_ns = next()?;
            times.hw_power_brake_ns = next()?;
        }
        Ok(times)
    }

    fn temperature(&self) -> Called<Temperature> {
        let device = self.device;
        let threshold = |threshold| {
            let read = self.optional(device.temperature_threshold(threshold));
            // GPUs that speak of T.Limit instead answer "invalid argument" on some drivers.
            match read {
                Err(failure) if failure.status() == Some(status::ERROR_INVALID_ARGUMENT) => {
                    Ok(None)
                }
                other => other.map(|it| it.map(u32::cast_signed).filter(|it| is_threshold(*it))),
            }
        };
        let memory = self.optional(self.field(FIELD_MEMORY_TEMPERATURE))?;
        Ok(Temperature {
            gpu_c: device.temperature(SENSOR_GPU)?.cast_signed(),
            // The field is 0 on memory that has no sensor.
            memory_c: memory.filter(|it| *it != 0).map(degrees),
            slowdown_c: threshold(THRESHOLD_SLOWDOWN)?,
            shutdown_c: threshold(THRESHOLD_SHUTDOWN)?,
            gpu_max_c: threshold(THRESHOLD_GPU_MAX)?,
            memory_max_c: threshold(THRESHOLD_MEMORY_MAX)?,
            tlimit_c: self.optional(device.margin_temperature_c())?,
        })
    }

    fn power(&self) -> Called<Power> {
        let device = self.device;
        let range = self.optional(device.power_limit_range_mw())?;
        Ok(Power {
            draw_mw: self.optional(device.power_usage_mw())?,
            limit_mw: device.enforced_power_limit_mw()?,
            default_limit_mw: self.optional(device.default_power_limit_mw())?,
            min_limit_mw: range.map(|(min, _)| min),
            max_limit_mw: range.map(|(_, max)| max),
        })
    }
}

/// A number that no `i32` holds is no temperature either; it must look too hot rather than not
/// read.
fn degrees(celsius: u64) -> i32 {
    i32::try_from(celsius).unwrap_or(i32::MAX)
}

/// Drivers answer 0, offsets from another threshold or plain nonsense for thresholds that a GPU
/// does not keep. Below 40 C a GPU would slow down when idle, and above 150 C silicon does not
/// live.
fn is_threshold(celsius: i32) -> bool {
    (40..=150).contains(&celsius)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_temperature_beyond_all_numbers_is_hot() {
        assert_eq!(degrees(1 << 40), i32::MAX);
        assert_eq!(degrees(95), 95);
    }

    #[test]
    fn nonsense_is_no_threshold() {
        assert!([40, 89, 95, 150].into_iter().all(is_threshold));
        let offset = 0xffff_fffe_u32.cast_signed();
        assert!(![0, 39, 151, offset].into_iter().any(is_threshold));
    }
}
