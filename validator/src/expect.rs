//! What is expected of this machine, and who says so: the profile first, then what the EC2 instance type and the GPU
//! model imply.

use crate::facts::{Facts, GpuFacts};
use crate::profile::Profile;
use crate::reference::{self, Ec2InstanceRow, GpuModel};

/// A value that a machine must have, and who says so.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Expected<T> {
    pub(crate) value: T,
    /// `the profile`, `EC2 instance type p5.48xlarge`, `GPU model H200 SXM`.
    pub(crate) source: String,
}

/// The row of the instance type, on EC2.
pub(crate) fn ec2_instance(facts: &Facts) -> Option<&'static Ec2InstanceRow> {
    reference::ec2_instance(&facts.host.ec2.value()?.instance_type)
}

/// The reference model of this GPU.
pub(crate) fn gpu_model(gpu: &GpuFacts) -> Option<&'static GpuModel> {
    reference::gpu_model(
        gpu.name.value().map(String::as_str),
        gpu.pci_device_id.value().copied(),
    )
}

/// What the profile says, else what the EC2 instance type says, else what the GPU model says.
pub(crate) fn expected<T>(
    profile: Option<T>,
    instance: Option<(&Ec2InstanceRow, T)>,
    model: Option<(&GpuModel, T)>,
) -> Option<Expected<T>> {
    if let Some(value) = profile {
        return Some(Expected {
            value,
            source: "the profile".to_owned(),
        });
    }
    if let Some((row, value)) = instance {
        return Some(Expected {
            value,
            source: format!("EC2 instance type {}", row.instance_type),
        });
    }
    model.map(|(row, value)| Expected {
        value,
        source: format!("GPU model {}", row.name),
    })
}

/// How many GPUs the machine must have; `None` leaves only the machine's own consistency to judge.
pub(crate) fn gpu_count(facts: &Facts, profile: &Profile) -> Option<Expected<u32>> {
    expected(
        profile.gpus.count,
        ec2_instance(facts).map(|row| (row, row.gpu_count)),
        None,
    )
}
