//! The host side: files in the form that the kernel, systemd and NVIDIA's packages give them, and
//! what faults do to them.

use simulator::node::Node;
use simulator::{Catalogue, NodeRequest, PreparedNode, prepare_node};
use std::path::{Path, PathBuf};

fn prepare(name: &str, node: &str, faults: &[&str], overrides: &[&str]) -> PreparedNode {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("sysroot-{name}"));
    let library = folder.with_extension("library");
    std::fs::write(&library, b"not a library").unwrap();
    let strings = |list: &[&str]| list.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
    prepare_node(&NodeRequest {
        folder: &folder,
        library: &library,
        catalogue: &Catalogue::shipped(),
        node,
        faults: &strings(faults),
        overrides: &strings(overrides),
    })
    .unwrap()
}

fn read(node: &PreparedNode, path: &str) -> String {
    let path = node.sysroot.join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn a_healthy_instance_has_what_its_kernel_and_packages_would_write() {
    let node = prepare("healthy", "p5.48xlarge", &[], &[]);
    assert_eq!(
        read(&node, "sys/class/dmi/id/product_name"),
        "p5.48xlarge\n"
    );
    let version = read(&node, "proc/driver/nvidia/version");
    assert!(
        version
            .starts_with("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  "),
        "{version}"
    );
    assert_eq!(read(&node, "sys/module/nvidia/version"), "580.159.04\n");

    let devices = names(&node.sysroot.join("sys/bus/pci/devices"));
    assert_eq!(devices.len(), 8 + 4, "GPUs and NVSwitches: {devices:?}");
    let gpu = "sys/bus/pci/devices/0000:53:00.0";
    for (file, value) in [
        ("vendor", "0x10de\n"),
        ("device", "0x2330\n"),
        ("class", "0x030200\n"),
        ("current_link_speed", "32.0 GT/s PCIe\n"),
        ("current_link_width", "16\n"),
    ] {
        assert_eq!(read(&node, &format!("{gpu}/{file}")), value, "{file}");
    }
    let driver = std::fs::read_link(node.sysroot.join(gpu).join("driver")).unwrap();
    assert!(driver.ends_with("bus/pci/drivers/nvidia"));
    let information = read(&node, "proc/driver/nvidia/gpus/0000:53:00.0/information");
    assert!(
        information.contains("Device Minor: \t 0\n")
            && information.contains("GPU Firmware: \t 580.159.04\n")
    );

    let nodes = names(&node.sysroot.join("dev"));
    for name in [
        "nvidia0",
        "nvidia7",
        "nvidiactl",
        "nvidia-uvm",
        "nvidia-nvswitch3",
        "kmsg",
    ] {
        assert!(nodes.contains(&name.to_owned()), "{name} in {nodes:?}");
    }
    assert!(read(&node, "usr/local/cuda/version.json").contains("13.0.2"));
    let unit = "nvidia-fabricmanager.service";
    assert!(
        node.sysroot
            .join(format!("usr/lib/systemd/system/{unit}"))
            .is_file()
    );
    assert!(
        node.sysroot
            .join(format!("etc/systemd/system/multi-user.target.wants/{unit}"))
            .is_symlink()
    );
    assert!(
        read(
            &node,
            &format!("sys/fs/cgroup/system.slice/{unit}/cgroup.procs")
        )
        .trim()
        .parse::<u32>()
        .is_ok()
    );
    assert_eq!(
        node.library_dir.join("libcuda.so.1").read_link().unwrap(),
        Path::new("libcuda.so.580.159.04")
    );
}

#[test]
fn each_layer_can_be_ill_by_itself() {
    let node = prepare("pci", "p5.48xlarge", &["gpu-missing-on-pci"], &[]);
    assert!(
        !node
            .sysroot
            .join("sys/bus/pci/devices/0000:ca:00.0")
            .exists()
    );
    assert!(!node.sysroot.join("dev/nvidia7").exists());

    let node = prepare("dev", "h200x8", &["gpu-missing-device-node"], &[]);
    assert!(!node.sysroot.join("dev/nvidia5").exists());
    assert!(
        node.sysroot
            .join("sys/bus/pci/devices/0000:00:0b.0")
            .is_dir()
    );

    let node = prepare("narrow", "h200x8", &["pcie-link-narrow"], &[]);
    assert_eq!(
        read(&node, "sys/bus/pci/devices/0000:00:0a.0/current_link_width"),
        "8\n"
    );
    assert_eq!(
        read(&node, "sys/bus/pci/devices/0000:00:0a.0/max_link_width"),
        "16\n"
    );

    let node = prepare("unit", "p5.48xlarge", &["fabric-manager-inactive"], &[]);
    assert!(
        !node
            .sysroot
            .join("sys/fs/cgroup/system.slice/nvidia-fabricmanager.service")
            .exists()
    );
    assert!(
        node.sysroot
            .join("sys/fs/cgroup/system.slice/nvidia-persistenced.service")
            .is_dir()
    );

    let node = prepare("nouveau", "h200x8", &["nouveau-bound"], &[]);
    let driver =
        std::fs::read_link(node.sysroot.join("sys/bus/pci/devices/0000:00:06.0/driver")).unwrap();
    assert!(driver.ends_with("nouveau"));
    assert!(!node.sysroot.join("sys/module/nvidia").exists());
    assert!(!node.sysroot.join("dev/nvidia0").exists());

    let node = prepare("log", "h200x8", &["kernel-log-unreadable"], &[]);
    assert!(std::fs::read_to_string(node.sysroot.join("dev/kmsg")).is_err());

    let node = prepare("toolkit", "p3.16xlarge", &["toolkit-drops-gpu"], &[]);
    assert!(read(&node, "usr/local/cuda/version.json").contains("13.0.2"));
    // Null removes an entry of a map, although its name holds a dot.
    let node = prepare("toolkits", "h200x8", &[], &["host.toolkits.13.0=null"]);
    assert!(!node.sysroot.join("usr/local/cuda").exists());
}

#[test]
fn a_compat_package_is_found_before_the_driver() {
    let node = prepare("compat", "h200x8", &["compat-package-shadows-driver"], &[]);
    let folder = "usr/local/cuda-12.8/compat";
    let link = node
        .sysroot
        .join(folder)
        .join("libcuda.so.1")
        .read_link()
        .unwrap();
    assert_eq!(link, Path::new("libcuda.so.570.124.06"));
    let search_path = &node.environment["LD_LIBRARY_PATH"];
    assert!(
        search_path.starts_with(&node.sysroot.join(folder).display().to_string()),
        "{search_path}"
    );
    let cache = std::fs::read(node.sysroot.join("etc/ld.so.cache")).unwrap();
    assert!(cache.starts_with(b"glibc-ld.so.cache1.1"));
    let text = String::from_utf8_lossy(&cache).into_owned();
    let position = |path: &str| text.find(path).unwrap_or_else(|| panic!("no {path}"));
    assert!(
        position("/usr/local/cuda-12.8/compat/libcuda.so.1")
            < position("/usr/lib/x86_64-linux-gnu/libcuda.so.1")
    );
}

#[test]
fn the_kernel_log_reaches_back_to_boot_and_grows_without_a_gap() {
    let fault = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("two-xids.yaml");
    std::fs::write(
        &fault,
        "description: two\nxid: {code: 63, message: first}\nthen:\n  - after: 1 launch\n    xid: {code: 64, message: second}\n\
         trips: {kernel_log_xid: fail}\n",
    )
    .unwrap();
    let prepared = prepare("growing", "h200x8", &[fault.to_str().unwrap()], &[]);
    assert!(!read(&prepared, "dev/kmsg").contains("second"));
    let node = Node::open(&prepared.folder).unwrap();
    node.state().gpu(0).count_launch();
    node.advance();
    let log = read(&prepared, "dev/kmsg");
    let mut before_us = 0;
    for (expected, record) in log.lines().enumerate() {
        let (head, message) = record.split_once(';').unwrap();
        let fields: Vec<&str> = head.split(',').collect();
        assert_eq!(fields.len(), 4, "{record}");
        assert_eq!(fields[1].parse::<usize>().unwrap(), expected, "{record}");
        let time_us: u64 = fields[2].parse().unwrap();
        assert!(time_us >= before_us, "{record}");
        assert!(!message.is_empty());
        before_us = time_us;
    }
    let uptime_s: f64 = read(&prepared, "proc/uptime")
        .split(' ')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    #[allow(
        clippy::cast_precision_loss,
        reason = "an uptime in microseconds is far below 2^53"
    )]
    let last_s = before_us as f64 / 1e6;
    assert!(
        last_s <= uptime_s && last_s > uptime_s - 60.0,
        "{last_s} of {uptime_s}"
    );
    assert!(
        log.contains("NVRM: Xid (PCI:0000:00:06): 63, first\n") && log.contains("): 64, second\n")
    );
}
