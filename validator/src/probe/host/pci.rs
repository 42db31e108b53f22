//! NVIDIA functions on the PCI bus.

use super::sysroot::{Sysroot, io_reason};
use validator_core::facts::{PciDevice, Reading};

const DEVICES: &str = "/sys/bus/pci/devices";
const NVIDIA: u16 = 0x10de;

pub(super) fn pci_devices(root: &Sysroot) -> Reading<Vec<PciDevice>> {
    let addresses = match root.names(DEVICES) {
        Ok(addresses) => addresses,
        Err(error) => return Reading::NotRead(io_reason(&error, DEVICES)),
    };
    let devices = addresses.iter().filter_map(|address| device(root, address));
    Reading::Value(devices.collect())
}

/// The function at this address, if it is NVIDIA's.
fn device(root: &Sysroot, address: &str) -> Option<PciDevice> {
    let file = |name: &str| root.line(&format!("{DEVICES}/{address}/{name}"));
    let id = |name: &str| file(name).and_then(|text| hex(&text));
    if id("vendor") != Some(u32::from(NVIDIA)) {
        return None;
    }
    let short = |name: &str| id(name).and_then(|it| u16::try_from(it).ok());
    Some(PciDevice {
        address: address.to_lowercase(),
        device_id: short("device")?,
        subsystem_vendor_id: short("subsystem_vendor"),
        subsystem_device_id: short("subsystem_device"),
        class: id("class").unwrap_or(0),
        driver: root
            .link_target(&format!("{DEVICES}/{address}/driver"))
            .map(|target| super::sysroot::file_name(&target).to_owned()),
        numa_node: file("numa_node").and_then(|it| it.parse().ok()),
        upstream_ports: root
            .link_target(&format!("{DEVICES}/{address}"))
            .map(|target| upstream_ports(&target)),
        current_link_speed_gts: file("current_link_speed").and_then(|it| link_speed(&it)),
        current_link_width: file("current_link_width").and_then(|it| link_width(&it)),
        max_link_speed_gts: file("max_link_speed").and_then(|it| link_speed(&it)),
        max_link_width: file("max_link_width").and_then(|it| link_width(&it)),
        aer_correctable: file("aer_dev_correctable").and_then(|it| aer_total(&it)),
        aer_nonfatal: file("aer_dev_nonfatal").and_then(|it| aer_total(&it)),
        aer_fatal: file("aer_dev_fatal").and_then(|it| aer_total(&it)),
        largest_region_bytes: root
            .text(&format!("{DEVICES}/{address}/resource"))
            .ok()
            .and_then(|it| largest_region(&it)),
    })
}

/// The addresses above the device itself in
/// `../../../devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0`.
fn upstream_ports(target: &str) -> Vec<String> {
    let is_address = |it: &&str| it.len() == 12 && it.matches(':').count() == 2 && it.contains('.');
    let mut ports: Vec<String> = target
        .split('/')
        .filter(is_address)
        .map(str::to_lowercase)
        .collect();
    ports.pop();
    ports
}

fn hex(text: &str) -> Option<u32> {
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// `32.0 GT/s PCIe`; `Unknown` where the link is down or a hypervisor hides it.
fn link_speed(text: &str) -> Option<f64> {
    text.split_once(" GT/s")?.0.trim().parse().ok()
}

/// The largest of the lines `0x0000000094000000 0x0000000094ffffff 0x0000000000140204` (start, end
/// and flags of a region; zeros where there is none).
fn largest_region(text: &str) -> Option<u64> {
    let number = |it: &str| u64::from_str_radix(it.strip_prefix("0x")?, 16).ok();
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let (start, end) = (number(words.next()?)?, number(words.next()?)?);
            (end > start).then(|| end - start + 1)
        })
        .max()
}

/// Lanes; 0 and 255 are what the kernel shows for a link that it cannot read.
fn link_width(text: &str) -> Option<u32> {
    text.parse().ok().filter(|lanes| (1..=32).contains(lanes))
}

/// The line `TOTAL_ERR_COR 7` (or `_NONFATAL`, `_FATAL`) of an AER counter file.
fn aer_total(text: &str) -> Option<u64> {
    text.lines()
        .find(|line| line.starts_with("TOTAL_ERR_"))?
        .split_whitespace()
        .nth(1)?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::super::sysroot::tests::tree;
    use super::*;

    #[test]
    fn the_largest_region_of_a_function_is_its_bar1() {
        let text = "0x0000000094000000 0x0000000094ffffff 0x0000000000140204\n\
                    0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                    0x0000380000000000 0x0000383fffffffff 0x000000000014220c\n";
        assert_eq!(largest_region(text), Some(256 << 30));
        assert_eq!(largest_region("0x0 0x0 0x0\n"), None);
        assert_eq!(largest_region("nonsense"), None);
    }

    #[test]
    fn an_h200_and_nothing_of_other_vendors() {
        let (_folder, root) = tree(&[
            ("/sys/bus/pci/devices/0000:00:03.0/vendor", "0x1d0f\n"),
            ("/sys/bus/pci/devices/0000:3b:00.0/vendor", "0x10de\n"),
            ("/sys/bus/pci/devices/0000:3b:00.0/device", "0x2335\n"),
            (
                "/sys/bus/pci/devices/0000:3b:00.0/subsystem_vendor",
                "0x10de\n",
            ),
            (
                "/sys/bus/pci/devices/0000:3b:00.0/subsystem_device",
                "0x18be\n",
            ),
            ("/sys/bus/pci/devices/0000:3b:00.0/class", "0x030200\n"),
            (
                "/sys/bus/pci/devices/0000:3b:00.0/driver",
                "->../../../../bus/pci/drivers/nvidia",
            ),
            ("/sys/bus/pci/devices/0000:3b:00.0/numa_node", "-1\n"),
            (
                "/sys/bus/pci/devices/0000:3b:00.0/current_link_speed",
                "32.0 GT/s PCIe\n",
            ),
            (
                "/sys/bus/pci/devices/0000:3b:00.0/current_link_width",
                "16\n",
            ),
            (
                "/sys/bus/pci/devices/0000:3b:00.0/max_link_speed",
                "Unknown\n",
            ),
            ("/sys/bus/pci/devices/0000:3b:00.0/max_link_width", "255\n"),
            (
                "/sys/bus/pci/devices/0000:3b:00.0/aer_dev_correctable",
                "RxErr 3\nBadTLP 4\nTOTAL_ERR_COR 7\n",
            ),
        ]);
        let Reading::Value(devices) = pci_devices(&root) else {
            panic!("not read")
        };
        assert_eq!(devices.len(), 1);
        let gpu = &devices[0];
        assert_eq!(
            (gpu.address.as_str(), gpu.device_id),
            ("0000:3b:00.0", 0x2335)
        );
        assert!(gpu.is_gpu());
        assert_eq!(gpu.driver.as_deref(), Some("nvidia"));
        assert_eq!(gpu.numa_node, Some(-1));
        assert_eq!(gpu.current_link_speed_gts, Some(32.0));
        assert_eq!(
            (gpu.current_link_width, gpu.max_link_width),
            (Some(16), None)
        );
        assert_eq!(gpu.max_link_speed_gts, None);
        assert_eq!((gpu.aer_correctable, gpu.aer_fatal), (Some(7), None));
    }

    #[test]
    fn no_sysfs_is_not_no_gpus() {
        let (_folder, root) = tree(&[]);
        assert_eq!(
            pci_devices(&root),
            Reading::NotRead("no such file: /sys/bus/pci/devices".to_owned())
        );
    }

    #[test]
    fn the_ports_above_a_device_are_in_its_path() {
        let target = "../../../devices/pci0000:3a/0000:3a:00.0/0000:3B:00.0/0000:3c:00.0";
        assert_eq!(upstream_ports(target), ["0000:3a:00.0", "0000:3b:00.0"]);
        assert!(upstream_ports("../../../devices/pci0000:00/0000:00:06.0").is_empty());
    }
}
