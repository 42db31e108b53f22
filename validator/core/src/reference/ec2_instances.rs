//! EC2 instance types with NVIDIA GPUs.

use std::sync::LazyLock;

use serde::Deserialize;

/// An EC2 instance type with NVIDIA GPUs.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ec2InstanceRow {
    /// `p5.48xlarge`.
    pub instance_type: String,
    /// [`super::GpuModel::name`]; `None` where no source has it.
    #[serde(default)]
    pub gpu_model: Option<String>,
    pub gpu_count: u32,
    /// NVSwitches are in the instance, so fabric manager must run (the switches may be hidden from
    /// the guest).
    pub fabric_manager: bool,
    /// NVLinks of each GPU that the instance connects; `None` where no source has it.
    #[serde(default)]
    pub nvlinks: Option<u32>,
    pub source: String,
}

static EC2_INSTANCES: LazyLock<Vec<Ec2InstanceRow>> = LazyLock::new(|| {
    serde_yaml::from_str(include_str!("../../data/ec2_instances.yaml"))
        .expect("a test parses the embedded table")
});

/// The row of this instance type.
pub fn ec2_instance(instance_type: &str) -> Option<&'static Ec2InstanceRow> {
    EC2_INSTANCES
        .iter()
        .find(|row| row.instance_type == instance_type)
}

/// All instance types with NVIDIA GPUs.
pub fn ec2_instances() -> &'static [Ec2InstanceRow] {
    &EC2_INSTANCES
}
