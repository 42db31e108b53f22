//! Every GPU has its device node, and this user may open it.
//!
//! ## Why
//! Programs reach GPUs through `/dev/nvidia*`. A missing node, or one that the user may not open,
//! is a GPU that jobs and containers do not get, although the driver is fine.
//!
//! ## How it is judged
//! `/dev/nvidia<minor>` must be there for every GPU that the kernel module holds (in a container,
//! or where `/proc/driver/nvidia` is hidden: that NVML lists), with `/dev/nvidiactl` and
//! `/dev/nvidia-uvm`, all accessible to this process. Permission bits must be those of the module's
//! parameter `DeviceFileMode` (0666 by default), else it warns. A missing node only warns where
//! NVML read that GPU all the same (for `/dev/nvidia-uvm`: where CUDA initialised): then the
//! driver's libraries made it on first use, with root's rights or by `nvidia-modprobe`, which a
//! container cannot. A container without any of them is an `error`: it was given no GPU. With MIG
//! on there must be capability nodes in `/dev/nvidia-caps`.
//!
//! Skipped in WSL2, where `/dev/dxg` takes their place.
//!
//! ## What to do
//! `nvidia-modprobe -c 0 -u` makes the nodes; enable `nvidia-persistenced` or NVIDIA's udev rules
//! so that they are there after every boot. For access, see `DeviceFileUID`, `DeviceFileGID` and
//! `DeviceFileMode` of the module.
//!
//! ## Source
//! DCGM's deployment check "Permissions and OS-related Blocks"; NVIDIA driver README, chapter
//! "Device files", <https://download.nvidia.com/XFree86/Linux-x86_64/580.95.05/README/faq.html>

use std::collections::BTreeSet;

use crate::check::{Check, Judge};
use crate::facts::{DeviceNode, Facts, GpuFacts, KernelModules, Reading};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries::{self, CONTROL_NODE as CONTROL};
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "device_nodes",
    stage: Stage::Host,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://download.nvidia.com/XFree86/Linux-x86_64/580.95.05/README/faq.html",
};

/// The mode that the module gives its nodes unless told otherwise (driver README,
/// `NVreg_DeviceFileMode`).
const DEFAULT_DEVICE_FILE_MODE: u32 = 0o666;
/// Nodes of `/dev/nvidia-caps` that are there without any MIG device: `nvidia-cap1` (MIG
/// configuration) and `nvidia-cap2` (MIG monitor).
const CAPABILITY_NODES_WITHOUT_MIG_DEVICES: [&str; 2] = [
    "/dev/nvidia-caps/nvidia-cap1",
    "/dev/nvidia-caps/nvidia-cap2",
];
const UVM: &str = "/dev/nvidia-uvm";

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    if queries::in_wsl(facts) {
        return Ok(Outcome::skip(
            "this is WSL2: /dev/dxg takes the place of NVIDIA's device nodes",
        ));
    }
    let modules = queries::loaded_driver(facts, profile)?;
    let nodes = facts.host.device_nodes.required("device nodes")?;
    let mode = device_file_mode(modules);
    let mut tally = Tally::default();

    let gpus = wanted_gpu_nodes(facts, modules, &mut tally);
    let nvml_started = facts.nvml.initialized == Reading::Value(true);
    if gpus.is_empty() && tally.worst().is_none() {
        if nvml_started || !queries::lacks_control_node(facts) {
            return Err(queries::reported_by(
                "gpu_count",
                "the driver holds no GPU that would need a device node",
                profile,
            ));
        }
        if queries::in_container(facts) {
            return Ok(Outcome::error(format!(
                "{CONTROL} is missing: this container was given no GPU"
            ))
            .expected("the nodes of its GPUs")
            .remedy("give it GPUs: docker run --gpus all, or nvidia.com/gpu in the limits of the pod's container"));
        }
    }
    let mut look = |path: &str, of: &str, was_used| {
        judge_node(nodes, mode, (path, of, was_used), &mut tally);
    };
    let read = nodes_that_were_read(facts);
    for (path, gpu) in &gpus {
        look(path, &format!("of {gpu}"), read.contains(path));
    }
    look(CONTROL, "of the driver", nvml_started);
    let cuda_started = queries::cuda_initialised(facts);
    look(UVM, "of CUDA's unified memory", cuda_started);
    judge_mig_capabilities(nodes, facts, &mut tally);

    let worst = tally.worst();
    let outcome = tally.outcome(Outcome::error("no device node was judged"));
    Ok(match worst {
        Some(Verdict::Pass) => Outcome::pass(format!(
            "{}, {CONTROL} and {UVM} are there and accessible",
            queries::counted(gpus.len(), "GPU node")
        )),
        Some(Verdict::Fail | Verdict::Warn) => outcome.remedy(
            "make the nodes: nvidia-modprobe -c 0 -u; enable nvidia-persistenced or NVIDIA's udev rules to have them \
             after every boot; for access see the module's DeviceFileUID, DeviceFileGID and DeviceFileMode",
        ),
        _ => outcome,
    })
}

/// `DeviceFileMode` of the loaded module, a decimal number in `/proc/driver/nvidia/params`.
fn device_file_mode(modules: &KernelModules) -> u32 {
    modules
        .nvidia_parameters
        .get("DeviceFileMode")
        .and_then(|text| text.parse().ok())
        .unwrap_or(DEFAULT_DEVICE_FILE_MODE)
}

/// The node that each GPU needs, with the GPU's name.
fn wanted_gpu_nodes(
    facts: &Facts,
    modules: &KernelModules,
    tally: &mut Tally,
) -> Vec<(String, String)> {
    // Where /proc/driver is hidden the module's own list is empty, and NVML's takes its place.
    let by_nvml = queries::in_container(facts) || modules.nvidia_gpus.is_empty();
    let minors: Vec<(String, Option<u32>)> = if by_nvml {
        facts
            .gpus
            .iter()
            .map(|gpu| (queries::name_of(gpu), gpu.minor_number.value().copied()))
            .collect()
    } else {
        modules
            .nvidia_gpus
            .iter()
            .map(|(address, minor)| (format!("GPU {address}"), *minor))
            .collect()
    };
    let mut nodes = Vec::new();
    for (gpu, minor) in minors {
        match minor {
            Some(minor) => nodes.push((format!("/dev/nvidia{minor}"), gpu)),
            None => tally.error(format!(
                "minor number of {gpu} was not read, so its node is not known"
            )),
        }
    }
    nodes
}

/// A node that was not there and `was_used` all the same was made in between.
fn judge_node(
    nodes: &[DeviceNode],
    mode: u32,
    (path, of, was_used): (&str, &str, bool),
    tally: &mut Tally,
) {
    match nodes.iter().find(|node| node.path == path) {
        None if was_used => tally.warn(format!(
            "{path} {of} was missing until it was first used; a container cannot make it"
        )),
        None => tally.fail(format!("{path} {of} is missing")),
        Some(node) if !node.accessible => tally.fail(format!(
            "{path} {of} (mode {:04o}) may not be opened by this user",
            node.mode
        )),
        Some(node) if node.mode & 0o777 != mode => tally.warn(format!(
            "{path} has mode {:04o}, the driver is configured to give {mode:04o}",
            node.mode & 0o777
        )),
        Some(_) => tally.pass(path),
    }
}

/// The nodes of the GPUs that NVML read, which it does through the node.
fn nodes_that_were_read(facts: &Facts) -> BTreeSet<String> {
    let was_read = |gpu: &&GpuFacts| gpu.uuid.value().is_some() && gpu.lost.is_none();
    let gpus = facts.gpus.iter().filter(was_read);
    gpus.filter_map(|gpu| Some(format!("/dev/nvidia{}", gpu.minor_number.value()?)))
        .collect()
}

fn judge_mig_capabilities(nodes: &[DeviceNode], facts: &Facts, tally: &mut Tally) {
    let has_mig_devices = facts
        .gpus
        .iter()
        .any(|gpu| gpu.mig_devices.value().is_some_and(|it| !it.is_empty()));
    if !has_mig_devices {
        return;
    }
    let has_capabilities = nodes.iter().any(|node| {
        node.path.starts_with("/dev/nvidia-caps/nvidia-cap")
            && !CAPABILITY_NODES_WITHOUT_MIG_DEVICES.contains(&node.path.as_str())
    });
    if has_capabilities {
        tally.pass("/dev/nvidia-caps");
    } else {
        tally.fail("MIG devices exist, but /dev/nvidia-caps has no node for them");
    }
}

#[cfg(test)]
mod tests {
    use crate::facts::{DeviceNode, Facts, KernelModules, MigDevice, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check};

    fn judge(facts: &Facts) -> Finding {
        judge_host_check(&super::CHECK, facts, "{}")
    }

    fn nodes(facts: &mut Facts) -> &mut Vec<DeviceNode> {
        match &mut facts.host.device_nodes {
            Reading::Value(nodes) => nodes,
            _ => unreachable!("the healthy machine has nodes"),
        }
    }

    fn modules(facts: &mut Facts) -> &mut KernelModules {
        match &mut facts.host.kernel_modules {
            Reading::Value(modules) => modules,
            _ => unreachable!("the healthy machine has modules"),
        }
    }

    fn remove(facts: &mut Facts, path: &str) {
        nodes(facts).retain(|node| node.path != path);
    }

    #[test]
    fn passes_when_all_are_there() {
        let finding = judge(&healthy_node());
        assert_eq!(finding.verdict, Verdict::Pass);
        assert_eq!(
            finding.summary,
            "8 GPU nodes, /dev/nvidiactl and /dev/nvidia-uvm are there and accessible"
        );
    }

    #[test]
    fn nodes_that_are_missing_closed_or_unread() {
        type Change = fn(&mut Facts);
        let cases: [(&str, Change, Verdict); 8] = [
            (
                "may not be opened",
                |facts| nodes(facts)[1].accessible = false,
                Verdict::Fail,
            ),
            (
                "control node, which NVML makes",
                |facts| remove(facts, "/dev/nvidiactl"),
                Verdict::Warn,
            ),
            (
                "control node, without NVML",
                |facts| {
                    remove(facts, "/dev/nvidiactl");
                    facts.nvml.initialized = Reading::NotRead("driver not loaded".to_owned());
                },
                Verdict::Fail,
            ),
            (
                "unified memory, which CUDA makes",
                |facts| remove(facts, "/dev/nvidia-uvm"),
                Verdict::Warn,
            ),
            (
                "unified memory, without CUDA",
                |facts| {
                    remove(facts, "/dev/nvidia-uvm");
                    facts.cuda.init = Reading::NotRead("not probed".to_owned());
                },
                Verdict::Fail,
            ),
            (
                "no minor numbers",
                |facts| {
                    let modules = modules(facts);
                    modules.nvidia_gpus.values_mut().for_each(|it| *it = None);
                },
                Verdict::Error,
            ),
            (
                "no nodes were read",
                |facts| facts.host.device_nodes = Reading::NotRead("no /dev".to_owned()),
                Verdict::Error,
            ),
            (
                "no GPU, which its own check reports",
                |facts| {
                    modules(facts).nvidia_gpus.clear();
                    facts.gpus.clear();
                },
                Verdict::Skip,
            ),
        ];
        for (name, change, verdict) in cases {
            let mut facts = healthy_node();
            change(&mut facts);
            let finding = judge(&facts);
            assert_eq!(finding.verdict, verdict, "{name}: {}", finding.summary);
        }
    }

    #[test]
    fn fails_when_a_gpu_has_none() {
        let mut facts = healthy_node();
        remove(&mut facts, "/dev/nvidia3");
        let late = judge(&facts);
        assert_eq!(late.verdict, Verdict::Warn);
        assert!(
            late.summary
                .ends_with("was missing until it was first used; a container cannot make it"),
            "{}",
            late.summary
        );
        facts.gpus.remove(3);
        let finding = judge(&facts);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(
            finding.summary.starts_with("/dev/nvidia3 of GPU 0000:"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn asks_nvml_where_the_modules_own_list_is_hidden() {
        let mut facts = healthy_node();
        modules(&mut facts).nvidia_gpus.clear();
        let finding = judge(&facts);
        assert_eq!(finding.verdict, Verdict::Pass);
        assert!(finding.summary.starts_with("8 GPU nodes"));
        remove(&mut facts, "/dev/nvidia3");
        assert_eq!(judge(&facts).verdict, Verdict::Warn);
        facts.gpus[3].lost = Some("the driver lost it".to_owned());
        assert_eq!(judge(&facts).verdict, Verdict::Fail);
        facts.gpus[3].minor_number = Reading::NotRead("unknown error".to_owned());
        assert_eq!(judge(&facts).verdict, Verdict::Error);
    }

    #[test]
    fn the_mode_must_be_the_one_that_the_driver_is_told_to_give() {
        let mut facts = healthy_node();
        nodes(&mut facts)[0].mode = 0o660;
        assert_eq!(judge(&facts).verdict, Verdict::Warn);
        for node in nodes(&mut facts) {
            node.mode = 0o660;
        }
        let octal_0660 = "432".to_owned();
        modules(&mut facts)
            .nvidia_parameters
            .insert("DeviceFileMode".to_owned(), octal_0660);
        assert_eq!(judge(&facts).verdict, Verdict::Pass);
    }

    #[test]
    fn mig_devices_need_capability_nodes() {
        let mut facts = healthy_node();
        facts.gpus[0].mig_devices = Reading::Value(vec![MigDevice::default()]);
        assert_eq!(judge(&facts).verdict, Verdict::Fail);
        let node = |number| DeviceNode {
            path: format!("/dev/nvidia-caps/nvidia-cap{number}"),
            accessible: true,
            mode: 0o444,
        };
        nodes(&mut facts).extend([node(1), node(2)]);
        assert_eq!(judge(&facts).verdict, Verdict::Fail);
        nodes(&mut facts).push(node(21));
        assert_eq!(judge(&facts).verdict, Verdict::Pass);
    }

    #[test]
    fn a_container_needs_the_nodes_of_its_own_gpus() {
        let mut facts = healthy_node();
        facts.host.in_container = Reading::Value(true);
        facts.gpus.truncate(1);
        facts.gpus[0].minor_number = Reading::Value(5);
        for minor in [0, 1, 2, 3, 4, 6, 7] {
            remove(&mut facts, &format!("/dev/nvidia{minor}"));
        }
        assert_eq!(judge(&facts).verdict, Verdict::Pass);
        facts.gpus[0].minor_number = Reading::Value(4);
        assert_eq!(judge(&facts).verdict, Verdict::Warn);
    }

    #[test]
    fn a_container_without_any_was_given_no_gpu() {
        let mut facts = healthy_node();
        facts.host.in_container = Reading::Value(true);
        facts.gpus.clear();
        facts.nvml.initialized = Reading::NotRead("driver not loaded".to_owned());
        assert_eq!(judge(&facts).verdict, Verdict::Skip);
        nodes(&mut facts).clear();
        let finding = judge(&facts);
        assert_eq!(finding.verdict, Verdict::Error);
        assert_eq!(
            finding.summary,
            "/dev/nvidiactl is missing: this container was given no GPU"
        );
        // On the machine itself nobody gives GPUs.
        facts.host.in_container = Reading::Value(false);
        for hidden in [false, true] {
            if let (true, Reading::Value(modules)) = (hidden, &mut facts.host.kernel_modules) {
                modules.nvidia_gpus.clear();
            }
            assert_eq!(judge(&facts).verdict, Verdict::Fail);
        }
    }
}
