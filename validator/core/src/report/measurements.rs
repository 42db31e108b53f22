//! The numbers of a GPU by which it can be compared with others of its model.

use std::collections::BTreeMap;

use crate::burned;
use crate::facts::{Facts, GpuFacts, SensorSample};

/// By name, with the unit at the name's end. What was not read is absent.
pub(crate) fn of(gpu: &GpuFacts, facts: &Facts) -> BTreeMap<String, f64> {
    let mut measured = Measured::default();
    measured.idle(gpu);
    if let Some(uuid) = gpu.uuid.value() {
        measured.loaded(uuid, facts);
    }
    measured.0
}

#[derive(Default)]
struct Measured(BTreeMap<String, f64>);

impl Measured {
    fn add(&mut self, name: &str, value: Option<impl Into<f64>>) {
        let value = value.map(Into::into).filter(|it: &f64| it.is_finite());
        if let Some(value) = value {
            self.0.insert(name.to_owned(), value);
        }
    }

    fn idle(&mut self, gpu: &GpuFacts) {
        let pcie = gpu.pcie.value();
        self.add("pcie_generation_maximum", pcie.map(|it| it.max_generation));
        self.add("pcie_width", pcie.map(|it| it.current_width));
        let clocks = gpu.clocks.value();
        self.add("sm_clock_maximum_mhz", clocks.and_then(|it| it.max_sm_mhz));
        let power = gpu.power.value();
        self.add("power_limit_w", power.map(|it| watts(it.limit_mw)));
        self.add("idle_power_w", power.and_then(|it| it.draw_mw).map(watts));
        let temperature = gpu.temperature.value();
        self.add("idle_temperature_c", temperature.map(|it| it.gpu_c));
        // Whole mebibytes of a GPU fit a u32 by far.
        let memory = gpu.memory.value().map(|it| it.total_bytes >> 20);
        self.add(
            "memory_total_mib",
            memory.and_then(|mib| u32::try_from(mib).ok()),
        );
    }

    fn loaded(&mut self, uuid: &str, facts: &Facts) {
        let kernel = facts.load.cuda_kernel.get(uuid).and_then(|it| it.value());
        self.add("cuda_kernel_wall_ms", kernel.map(|it| it.wall_ms));
        let burn = facts.load.burn.get(uuid).and_then(|it| it.value());
        for run in burn.into_iter().flat_map(|it| &it.precisions) {
            // No product is no throughput of zero.
            let tflops = (run.products > 0).then_some(run.tflops);
            self.add(&format!("burn_{}_tflops", run.precision), tflops);
        }
        let Some(log) = facts.load.sensors.get(uuid) else {
            return;
        };
        let under_load = || log.samples.iter().filter(|it| it.t >= 0.0);
        let power = median_of(under_load().filter_map(|it: &SensorSample| it.power_mw));
        self.add("burn_power_median_w", power.map(|it| it / 1000.0));
        self.add(
            "burn_sm_clock_median_mhz",
            median_of(under_load().filter_map(|it| it.sm_mhz)),
        );
        self.add(
            "burn_temperature_maximum_c",
            under_load().filter_map(|it| it.gpu_c).max(),
        );
        self.add(
            "burn_memory_temperature_maximum_c",
            under_load().filter_map(|it| it.memory_c).max(),
        );
    }
}

fn watts(milliwatts: u32) -> f64 {
    f64::from(milliwatts) / 1000.0
}

fn median_of(values: impl Iterator<Item = u32>) -> Option<f64> {
    let mut values: Vec<f64> = values.map(f64::from).collect();
    burned::median(&mut values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{Reading, SensorLog};
    use crate::test_machine::healthy_node;

    #[test]
    fn what_was_not_read_is_absent() {
        let mut facts = healthy_node();
        let uuid = facts.gpus[0].uuid.value().expect("a UUID").clone();
        let before = of(&facts.gpus[0], &facts);
        assert!(before["pcie_width"] >= 8.0, "{before:?}");
        assert!(before["power_limit_w"] > 50.0, "{before:?}");
        assert!(!before.contains_key("burn_power_median_w"), "{before:?}");
        let sample = |t, power_mw, gpu_c| SensorSample {
            t,
            power_mw: Some(power_mw),
            gpu_c: Some(gpu_c),
            ..SensorSample::default()
        };
        let samples = vec![
            sample(-1.0, 90_000, 99),
            sample(0.5, 700_000, 50),
            sample(1.0, 690_500, 61),
            sample(1.5, 650_000, 60),
        ];
        let log = SensorLog {
            samples,
            ..SensorLog::default()
        };
        facts.load.sensors.insert(uuid, log);
        facts.gpus[0].pcie = Reading::NotRead("hung".to_owned());
        let after = of(&facts.gpus[0], &facts);
        assert!(!after.contains_key("pcie_width"), "{after:?}");
        assert!((after["burn_power_median_w"] - 690.5).abs() < 1e-9);
        assert!((after["burn_temperature_maximum_c"] - 61.0).abs() < 1e-9);
    }
}
