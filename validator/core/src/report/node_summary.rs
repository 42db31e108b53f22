//! The machine itself in a report.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::text::one_line;
use crate::facts::{Facts, Reading};
use crate::profile::CudaVersion;

/// The machine in a few values; what was not read is absent.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Machine {
    pub hostname: Option<String>,
    pub operating_system: Option<String>,
    pub kernel_release: Option<String>,
    /// `p5.48xlarge`, on EC2.
    pub ec2_instance_type: Option<String>,
    pub ec2_region: Option<String>,
    pub ec2_instance_id: Option<String>,
    /// The image that the instance was started from.
    pub ec2_ami_id: Option<String>,
    /// NVML's, else the kernel module's.
    pub driver_version: Option<String>,
    /// `open` or `proprietary`.
    pub kernel_module_flavor: Option<String>,
    /// The newest CUDA version that the driver offers: `13.0`.
    pub cuda_version: Option<String>,
    /// In the order of the facts.
    pub gpus: Vec<MachineGpu>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MachineGpu {
    pub uuid: Option<String>,
    pub pci_address: Option<String>,
    pub name: Option<String>,
    pub serial: Option<String>,
    /// Numbers by which the GPU can be compared with others of its model, the unit at the end of
    /// each name: `burn_bf16_tflops`, `idle_temperature_c`. What was not read is absent.
    // Reports of older validators have none.
    #[serde(default)]
    pub measurements: BTreeMap<String, f64>,
}

impl Machine {
    pub(crate) fn of(facts: &Facts) -> Self {
        let modules = facts.host.kernel_modules.value();
        let module_version = modules.and_then(|it| it.nvidia_version.value().cloned());
        let ec2 = facts.host.ec2.value();
        let cuda_number = facts
            .nvml
            .cuda_driver_version
            .value()
            .or(facts.cuda.driver_version.value());
        Self {
            hostname: read(&facts.host.hostname),
            operating_system: read(&facts.host.operating_system),
            kernel_release: read(&facts.host.kernel_release),
            ec2_instance_type: ec2.map(|it| it.instance_type.clone()),
            ec2_region: ec2.and_then(|it| it.region.clone()),
            ec2_instance_id: ec2.and_then(|it| it.instance_id.clone()),
            ec2_ami_id: ec2.and_then(|it| it.ami_id.clone()),
            driver_version: read(&facts.nvml.driver_version).or(module_version),
            kernel_module_flavor: modules
                .and_then(|it| it.nvidia_flavor.value())
                .map(ToString::to_string),
            cuda_version: cuda_number
                .map(|number| CudaVersion::from_driver_number(*number).to_string()),
            gpus: facts
                .gpus
                .iter()
                .map(|gpu| MachineGpu {
                    uuid: read(&gpu.uuid),
                    pci_address: read(&gpu.pci_address),
                    name: read(&gpu.name),
                    serial: read(&gpu.serial),
                    measurements: super::measurements::of(gpu, facts),
                })
                .collect(),
        }
    }

    /// `8 x NVIDIA H200`, several models after one another; `none` without a GPU.
    pub(crate) fn gpus_in_words(&self) -> String {
        let mut models: Vec<(&str, usize)> = Vec::new();
        for gpu in &self.gpus {
            let name = gpu.name.as_deref().unwrap_or("GPU without a readable name");
            match models.iter_mut().find(|(model, _)| *model == name) {
                Some((_, count)) => *count += 1,
                None => models.push((name, 1)),
            }
        }
        if models.is_empty() {
            return "none".to_owned();
        }
        let words: Vec<String> = models
            .iter()
            .map(|(model, count)| format!("{count} x {}", one_line(model)))
            .collect();
        words.join(", ")
    }

    /// Two lines that identify the machine; [`Self::lines`] has the rest.
    pub(super) fn short_lines(&self) -> [String; 2] {
        let or_not_read = |value: &Option<String>| {
            value
                .as_deref()
                .map_or_else(|| "not read".to_owned(), one_line)
        };
        let instance = self
            .ec2_instance_type
            .as_deref()
            .map(|it| format!(", EC2 {}", one_line(it)));
        let gpus = match self.gpus_in_words().as_str() {
            "none" => "no GPU in NVML".to_owned(),
            gpus => gpus.to_owned(),
        };
        [
            format!(
                "{}{}",
                or_not_read(&self.hostname),
                instance.unwrap_or_default()
            ),
            format!(
                "{gpus}, driver {}, CUDA {}",
                or_not_read(&self.driver_version),
                or_not_read(&self.cuda_version)
            ),
        ]
    }

    /// Lines of (what, value) that describe the machine, for any report.
    pub(crate) fn lines(&self) -> Vec<(&'static str, String)> {
        let or_not_read = |value: &Option<String>| {
            value
                .as_deref()
                .map_or_else(|| "not read".to_owned(), one_line)
        };
        let kernel = self
            .kernel_release
            .as_deref()
            .map(|it| format!("kernel {}", one_line(it)));
        let instance = self
            .ec2_instance_type
            .as_deref()
            .map(|it| format!("EC2 {}", one_line(it)));
        let host = [
            Some(or_not_read(&self.hostname)),
            instance,
            self.operating_system.as_deref().map(one_line),
            kernel,
        ];
        let module = self
            .kernel_module_flavor
            .as_deref()
            .map(|it| format!(" ({} kernel module)", one_line(it)));
        vec![
            (
                "host",
                host.into_iter().flatten().collect::<Vec<_>>().join(", "),
            ),
            ("GPUs", self.gpus_in_words()),
            (
                "driver",
                format!(
                    "{}{}, CUDA {}",
                    or_not_read(&self.driver_version),
                    module.unwrap_or_default(),
                    or_not_read(&self.cuda_version)
                ),
            ),
        ]
    }
}

/// One line each for the layers that are missing on a machine where NVML lists no GPU; empty where
/// it lists one.
pub(crate) fn missing(facts: &Facts) -> Vec<String> {
    if !facts.gpus.is_empty() {
        return Vec::new();
    }
    let mut missing = Vec::new();
    match &facts.host.pci_devices {
        Reading::Value(devices) if devices.iter().any(crate::facts::PciDevice::is_gpu) => {}
        Reading::NotRead(reason) => {
            missing.push(format!("PCI bus: could not be read: {}", one_line(reason)));
        }
        Reading::Value(_) | Reading::NotSupported => {
            missing.push("GPU: no NVIDIA GPU on the PCI bus".to_owned());
        }
    }
    match &facts.host.kernel_modules {
        Reading::Value(modules) if modules.loaded.contains_key("nvidia") => {}
        Reading::NotRead(reason) => missing.push(format!(
            "kernel module: could not be searched for: {}",
            one_line(reason)
        )),
        Reading::Value(_) | Reading::NotSupported => {
            missing.push("kernel module: nvidia is not loaded".to_owned());
        }
    }
    missing.extend(library("NVML", &facts.nvml.initialized));
    missing.extend(library("CUDA driver", &facts.cuda.library));
    missing
}

fn library<T>(name: &str, reading: &Reading<T>) -> Option<String> {
    match reading {
        Reading::Value(_) => None,
        Reading::NotSupported => Some(format!("{name} library: not on this machine")),
        Reading::NotRead(reason) => Some(format!("{name} library: {}", one_line(reason))),
    }
}

fn read<T: Clone>(reading: &Reading<T>) -> Option<T> {
    reading.value().cloned()
}
