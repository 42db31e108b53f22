//! GPU models.

use std::sync::LazyLock;

use serde::Deserialize;

use crate::facts::{ComputeCapability, KernelModuleFlavor};

/// What a GPU model is when it is healthy.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "a row of a table")]
pub struct GpuModel {
    /// The short name that tables use: `H200 SXM`.
    pub name: String,
    /// Product names as NVML gives them; older drivers leave out the leading `NVIDIA `.
    pub product_names: Vec<String>,
    /// PCI device ids; several models may share one (A16 and A2 do), so the product name decides
    /// first.
    pub pci_device_ids: Vec<u16>,
    #[serde(deserialize_with = "super::compute_capability")]
    pub compute_capability: ComputeCapability,
    /// Multiprocessors of the product, `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
    #[serde(default)]
    pub multiprocessors: Option<u32>,
    /// Total memory as `nvidia-smi` shows it, in MiB; judge by [`GpuModel::memory_minimum_mib`].
    #[serde(default)]
    pub memory_mib: Option<u64>,
    /// What the card can do by its data sheet; boards and clouds often connect less.
    #[serde(default)]
    pub pcie_generation: Option<u32>,
    /// Lanes that the card has.
    #[serde(default)]
    pub pcie_width: Option<u32>,
    /// The least link with which NVIDIA's own diagnostics (DCGM) are content.
    #[serde(default)]
    pub pcie_floor: Option<PcieFloor>,
    /// NVLinks of the GPU; boards and virtual machines may connect fewer.
    #[serde(default)]
    pub nvlinks: Option<u32>,
    /// A board of eight such GPUs connects all NVLinks of each of them.
    #[serde(default)]
    pub whole_board_nvlinks: bool,
    /// Default power limit in watts.
    #[serde(default)]
    pub power_limit_w: Option<u32>,
    pub kernel_module: KernelModuleSupport,
    /// Memory with ECC.
    pub ecc: bool,
    /// Row remapping (Ampere and newer data center GPUs); page retirement before.
    pub row_remapping: bool,
    pub mig: bool,
    /// A data center product, to which forward compatibility (`cuda-compat`) applies.
    pub data_center: bool,
    /// Dense peak rates in TFLOP/s (or TOP/s) by precision (`fp64`, `fp32`, `tf32`, `bf16`, `fp16`,
    /// `fp8`, `int8`).
    pub peak_tflops: std::collections::BTreeMap<String, f64>,
    /// Memory bandwidth in GB/s.
    #[serde(default)]
    pub memory_bandwidth_gbs: Option<f64>,
    /// Where the row comes from.
    pub source: String,
}

/// The least PCIe link that is not a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PcieFloor {
    #[serde(default)]
    pub generation: Option<u32>,
    /// Lanes.
    pub width: u32,
}

/// Which kernel module flavours support a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelModuleSupport {
    OpenOnly,
    ProprietaryOnly,
    Either,
}

impl KernelModuleSupport {
    /// This flavour and no other.
    pub fn only(flavor: KernelModuleFlavor) -> Self {
        match flavor {
            KernelModuleFlavor::Open => Self::OpenOnly,
            KernelModuleFlavor::Proprietary => Self::ProprietaryOnly,
        }
    }

    pub fn supports(self, flavor: KernelModuleFlavor) -> bool {
        match self {
            Self::OpenOnly => flavor == KernelModuleFlavor::Open,
            Self::ProprietaryOnly => flavor == KernelModuleFlavor::Proprietary,
            Self::Either => true,
        }
    }
}

static GPU_MODELS: LazyLock<Vec<GpuModel>> = LazyLock::new(|| {
    serde_yaml::from_str(include_str!("../../data/gpu_models.yaml"))
        .expect("a test parses the embedded table")
});

impl GpuModel {
    /// The least total memory that a healthy card shows, in MiB.
    ///
    /// 97 % of the usual total: older drivers leave out what they reserve (a T4 shows 15360 or
    /// 15079 MiB, an L4 23034 or 22491), while losing a memory stack or getting the smaller variant
    /// costs a sixth and more.
    pub fn memory_minimum_mib(&self) -> Option<u64> {
        self.memory_mib.map(|total| total * 97 / 100)
    }

    /// The product name is one of this model's, with or without the leading `NVIDIA ` that drivers
    /// since 470 add.
    pub fn is_named(&self, product_name: &str) -> bool {
        fn bare(name: &str) -> &str {
            name.strip_prefix("NVIDIA ").unwrap_or(name)
        }
        self.product_names
            .iter()
            .any(|it| bare(it) == bare(product_name))
    }
}

/// All models.
pub fn gpu_models() -> &'static [GpuModel] {
    &GPU_MODELS
}

/// The model with this product name, or else the only one with this PCI device id.
pub fn gpu_model(
    product_name: Option<&str>,
    pci_device_id: Option<u16>,
) -> Option<&'static GpuModel> {
    let by_name = |name: &str| GPU_MODELS.iter().find(|model| model.is_named(name));
    let by_id = |id: u16| {
        let mut models = GPU_MODELS
            .iter()
            .filter(move |model| model.pci_device_ids.contains(&id));
        models.next().filter(|_| models.next().is_none())
    };
    product_name
        .and_then(by_name)
        .or_else(|| pci_device_id.and_then(by_id))
}
