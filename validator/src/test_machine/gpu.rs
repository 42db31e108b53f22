//! A healthy GPU.

use crate::facts::{GpuFacts, Reading};

/// An H200; every reading that NVML gives on a real one has its value here.
pub(super) fn healthy_gpu(index: u32) -> GpuFacts {
    GpuFacts {
        uuid: Reading::Value(format!("GPU-00000000-0000-0000-0000-00000000000{index}")),
        pci_address: Reading::Value(format!("0000:{:02x}:00.0", 0x10 + index)),
        name: Reading::Value("NVIDIA H200".to_owned()),
        persistence_mode: Reading::Value(true),
        ..GpuFacts::default()
    }
}
