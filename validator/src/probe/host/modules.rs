//! Kernel modules and device nodes.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};

use rustix::fs::{Access, access};

use super::sysroot::{Sysroot, io_reason};
use validator_core::facts::{DeviceNode, KernelModuleFlavor, KernelModules, Reading};

const MODULES: [&str; 8] = [
    "nvidia",
    "nvidia_uvm",
    "nvidia_modeset",
    "nvidia_drm",
    "nvidia_peermem",
    "nouveau",
    "nova_core",
    "nvidiafb",
];

/// Parameters of the nvidia module that change how GPUs and their device nodes behave.
const PARAMETERS: [&str; 10] = [
    "DeviceFileMode",
    "DynamicPowerManagement",
    "EnableGpuFirmware",
    "EnableMSI",
    "ExcludedGpus",
    "ModifyDeviceFiles",
    "NvLinkDisable",
    "OpenRmEnableUnsupportedGpus",
    "RegistryDwords",
    "RmProfilingAdminOnly",
];

pub(super) fn kernel_modules(root: &Sysroot) -> Reading<KernelModules> {
    let names = match root.names("/sys/module") {
        Ok(names) => names,
        Err(error) => return Reading::NotRead(io_reason(&error, "/sys/module")),
    };
    // A module that was only given parameters on the kernel's command line can have a folder; a
    // loaded one has a state.
    let loaded: BTreeMap<String, Option<String>> = names
        .into_iter()
        .filter(|name| MODULES.contains(&name.as_str()))
        .filter(|name| {
            ["initstate", "refcnt", "version"]
                .iter()
                .any(|file| root.exists(&format!("/sys/module/{name}/{file}")))
        })
        .map(|name| {
            let version = root.line(&format!("/sys/module/{name}/version"));
            (name, version)
        })
        .collect();
    let proc_version = root.text("/proc/driver/nvidia/version").ok();
    let is_loaded = loaded.contains_key("nvidia") || proc_version.is_some();
    let (nvidia_version, nvidia_flavor) = if is_loaded {
        (
            nvidia_version(loaded.get("nvidia"), proc_version.as_deref()),
            nvidia_flavor(root, proc_version.as_deref()),
        )
    } else {
        (Reading::NotSupported, Reading::NotSupported)
    };
    Reading::Value(KernelModules {
        loaded,
        nvidia_version,
        nvidia_flavor,
        nvidia_parameters: nvidia_parameters(root),
        nvidia_gpus: nvidia_gpus(root),
    })
}

fn nvidia_version(
    sysfs_version: Option<&Option<String>>,
    proc_version: Option<&str>,
) -> Reading<String> {
    let version = sysfs_version
        .cloned()
        .flatten()
        .or_else(|| proc_version.and_then(version_in));
    version.map_or_else(
        || {
            Reading::NotRead(
                "neither /sys/module/nvidia/version nor /proc/driver/nvidia/version names one"
                    .to_owned(),
            )
        },
        Reading::Value,
    )
}

/// `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build …`: the
/// first word that is nothing but numbers and dots, since the words around it changed over the
/// years.
fn version_in(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM version"))?;
    line.split_whitespace()
        .find(|word| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok()))
        .map(str::to_owned)
}

/// `/proc` has "Open Kernel Module"; where it is hidden, the taint flags of the module show its
/// licence: the open one does not set `P`.
fn nvidia_flavor(root: &Sysroot, proc_version: Option<&str>) -> Reading<KernelModuleFlavor> {
    let flavor = |open| {
        Reading::Value(if open {
            KernelModuleFlavor::Open
        } else {
            KernelModuleFlavor::Proprietary
        })
    };
    if let Some(line) = proc_version.and_then(|text| text.lines().next()) {
        return flavor(line.contains("Open Kernel Module"));
    }
    match root.text("/sys/module/nvidia/taint") {
        Ok(taint) => flavor(!taint.contains('P')),
        Err(error) => Reading::NotRead(io_reason(&error, "/proc/driver/nvidia/version")),
    }
}

fn nvidia_parameters(root: &Sysroot) -> BTreeMap<String, String> {
    let text = root.text("/proc/driver/nvidia/params").unwrap_or_default();
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.trim(), value.trim().trim_matches('"')))
        .filter(|(name, _)| PARAMETERS.contains(name))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

fn nvidia_gpus(root: &Sysroot) -> BTreeMap<String, Option<u32>> {
    const GPUS: &str = "/proc/driver/nvidia/gpus";
    let addresses = root.names(GPUS).unwrap_or_default();
    addresses
        .into_iter()
        .map(|address| {
            let text = root.text(&format!("{GPUS}/{address}/information"));
            let minor = text.ok().and_then(|text| {
                let line = text
                    .lines()
                    .find_map(|line| line.strip_prefix("Device Minor:"))?;
                line.trim().parse().ok()
            });
            (address.to_lowercase(), minor)
        })
        .collect()
}

/// `/dev/nvidia*` and `/dev/nvidia-caps/*`.
///
/// Access is judged by the permission bits. A container's device rules can still deny to open a
/// node; the NVML and CUDA probes then say so.
pub(super) fn device_nodes(root: &Sysroot) -> Reading<Vec<DeviceNode>> {
    let names = match root.names("/dev") {
        Ok(names) => names,
        Err(error) => return Reading::NotRead(io_reason(&error, "/dev")),
    };
    let in_dev = names
        .into_iter()
        .filter(|name| name.starts_with("nvidia"))
        .map(|name| format!("/dev/{name}"));
    let caps = root.names("/dev/nvidia-caps").unwrap_or_default();
    let in_caps = caps
        .into_iter()
        .map(|name| format!("/dev/nvidia-caps/{name}"));
    let channels = root
        .names("/dev/nvidia-caps-imex-channels")
        .unwrap_or_default();
    let of_imex = channels
        .into_iter()
        .map(|name| format!("/dev/nvidia-caps-imex-channels/{name}"));
    let in_folders = in_caps.chain(of_imex);
    let nodes = in_dev.chain(in_folders).filter_map(|path| node(root, path));
    Reading::Value(nodes.collect())
}

fn node(root: &Sysroot, path: String) -> Option<DeviceNode> {
    let real = root.real_path(&path);
    let metadata = std::fs::metadata(&real).ok()?;
    // A tree that stands for a machine can hold plain files only.
    let is_node =
        metadata.file_type().is_char_device() || (metadata.is_file() && !root.is_this_machine());
    is_node.then(|| DeviceNode {
        path,
        accessible: access(&real, Access::READ_OK | Access::WRITE_OK).is_ok(),
        mode: metadata.permissions().mode() & 0o7777,
    })
}

#[cfg(test)]
mod tests {
    use super::super::sysroot::tests::tree;
    use super::*;

    const OPEN: &str = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs-builder@U16)  Tue Mar 10\nGCC version:  gcc version 13.3.0\n";
    const PROPRIETARY: &str = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version:  gcc version 11.4.0\n";

    fn modules(files: &[(&str, &str)]) -> KernelModules {
        let (_folder, root) = tree(files);
        let Reading::Value(modules) = kernel_modules(&root) else {
            panic!("not read")
        };
        modules
    }

    #[test]
    fn the_open_module() {
        let modules = modules(&[
            ("/sys/module/nvidia/initstate", "live\n"),
            ("/sys/module/nvidia/version", "580.159.04\n"),
            ("/sys/module/nvidia_uvm/initstate", "live\n"),
            ("/sys/module/nouveau/parameters/modeset", "0\n"),
            ("/proc/driver/nvidia/version", OPEN),
            (
                "/proc/driver/nvidia/params",
                "ResmanDebugLevel: 4294967295\nEnableGpuFirmware: 18\nRegistryDwords: \"\"\n",
            ),
            (
                "/proc/driver/nvidia/gpus/0000:3B:00.0/information",
                "Model: \t\t NVIDIA H200\nDevice Minor: \t 3\n",
            ),
        ]);
        assert_eq!(
            modules.nvidia_version,
            Reading::Value("580.159.04".to_owned())
        );
        assert_eq!(
            modules.nvidia_flavor,
            Reading::Value(KernelModuleFlavor::Open)
        );
        assert_eq!(
            modules.loaded.keys().collect::<Vec<_>>(),
            ["nvidia", "nvidia_uvm"]
        );
        assert_eq!(modules.nvidia_parameters["EnableGpuFirmware"], "18");
        assert_eq!(modules.nvidia_parameters.len(), 2);
        assert_eq!(modules.nvidia_gpus["0000:3b:00.0"], Some(3));
    }

    #[test]
    fn the_proprietary_module_by_its_text_and_by_its_taint() {
        let by_text = modules(&[
            ("/sys/module/nvidia/initstate", "live\n"),
            ("/proc/driver/nvidia/version", PROPRIETARY),
        ]);
        assert_eq!(
            by_text.nvidia_version,
            Reading::Value("535.104.05".to_owned())
        );
        assert_eq!(
            by_text.nvidia_flavor,
            Reading::Value(KernelModuleFlavor::Proprietary)
        );
        for (taint, flavor) in [
            ("POE\n", KernelModuleFlavor::Proprietary),
            ("OE\n", KernelModuleFlavor::Open),
        ] {
            let by_taint = modules(&[
                ("/sys/module/nvidia/initstate", "live\n"),
                ("/sys/module/nvidia/taint", taint),
            ]);
            assert_eq!(by_taint.nvidia_flavor, Reading::Value(flavor));
            assert!(matches!(by_taint.nvidia_version, Reading::NotRead(_)));
        }
    }

    #[test]
    fn without_the_module_there_is_nothing_to_read() {
        let modules = modules(&[("/sys/module/ext4/initstate", "live\n")]);
        assert_eq!(modules.nvidia_version, Reading::NotSupported);
        assert_eq!(modules.nvidia_flavor, Reading::NotSupported);
        let (_folder, root) = tree(&[]);
        assert!(matches!(kernel_modules(&root), Reading::NotRead(_)));
    }

    #[test]
    fn device_nodes_and_their_permissions() {
        let (folder, root) = tree(&[
            ("/dev/nvidia0", ""),
            ("/dev/nvidiactl", ""),
            ("/dev/nvidia-caps/nvidia-cap1", ""),
            ("/dev/null", ""),
        ]);
        let mode = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(folder.path().join("dev/nvidia0"), mode).expect("a mode");
        let Reading::Value(nodes) = device_nodes(&root) else {
            panic!("not read")
        };
        let paths: Vec<&str> = nodes.iter().map(|it| it.path.as_str()).collect();
        assert_eq!(
            paths,
            [
                "/dev/nvidia0",
                "/dev/nvidiactl",
                "/dev/nvidia-caps/nvidia-cap1"
            ]
        );
        assert_eq!((nodes[0].mode, nodes[0].accessible), (0o600, true));
    }
}
