//! A machine of any number of GPUs, which no node has: facts from outside may claim it.

use crate::facts::{Facts, GpuFacts, Reading};

use super::burned_node;

/// The burned node with as many GPUs, each with everything that a GPU of the node has and an
/// identity of its own.
pub fn burned_node_of(gpus: usize) -> Facts {
    let node = burned_node();
    let mut facts = node.clone();
    facts.gpus.clear();
    facts.load.cuda_kernel.clear();
    facts.load.burn.clear();
    facts.load.sensors.clear();
    let (mut pci_devices, mut cuda_devices) = (Vec::new(), Vec::new());
    for (index, gpu) in node.gpus.iter().cycle().take(gpus).enumerate() {
        let uuid = format!("GPU-5c1f0000-0000-4000-8000-{index:012x}");
        let address = format!("{:04x}:{:02x}:00.0", index / 256, index % 256);
        let (old_uuid, old_address) = (gpu.uuid.value(), gpu.pci_address.value());
        let old_uuid = old_uuid.expect("a healthy GPU has a UUID");
        let devices = node.host.pci_devices.value().into_iter().flatten();
        pci_devices.extend(
            devices
                .filter(|it| Some(&it.address) == old_address)
                .map(|it| {
                    let mut device = it.clone();
                    device.address.clone_from(&address);
                    device
                }),
        );
        let devices = node.cuda.devices.value().into_iter().flatten();
        cuda_devices.extend(devices.filter(|it| it.uuid == *old_uuid).map(|it| {
            let mut device = it.clone();
            device.uuid.clone_from(&uuid);
            device.pci_address = Some(address.clone());
            device
        }));
        let load = &mut facts.load;
        if let Some(run) = node.load.cuda_kernel.get(old_uuid) {
            load.cuda_kernel.insert(uuid.clone(), run.clone());
        }
        if let Some(run) = node.load.burn.get(old_uuid) {
            load.burn.insert(uuid.clone(), run.clone());
        }
        if let Some(log) = node.load.sensors.get(old_uuid) {
            load.sensors.insert(uuid.clone(), log.clone());
        }
        facts.gpus.push(GpuFacts {
            uuid: Reading::Value(uuid),
            pci_address: Reading::Value(address),
            serial: Reading::Value(format!("{index:013}")),
            minor_number: Reading::Value(u32::try_from(index).expect("few enough")),
            ..gpu.clone()
        });
    }
    let count = u32::try_from(gpus).expect("few enough");
    facts.nvml.gpu_count = Reading::Value(count);
    facts.host.pci_devices = Reading::Value(pci_devices);
    facts.cuda.devices = Reading::Value(cuda_devices);
    facts
}
