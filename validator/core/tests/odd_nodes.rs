//! Ill nodes, and odd ones that are healthy, as changes to the facts of a healthy node: each with
//! all of its objections.
//!
//! What a fault in the simulator can express is in `tests/simulator/faults`; here are states that
//! no single scenario reaches, and words of kernels and drivers.

use std::collections::BTreeSet;

use validator_core::facts::{
    DeviceNode, Facts, GpuFacts, KernelLogRecord, MigMode, NodeState, PciDevice, Reading,
    RecoveryAction, ServiceState,
};
use validator_core::findings::{Run, Verdict};
use validator_core::profile::Profile;
use validator_core::reference::{GpuModel, gpu_models};
use validator_core::test_machine::{burned_node, healthy_t4, python_process};

type Change = fn(&mut Facts);
/// A name, the node, what is changed, and the objections as `verdict check`, in order of the checks.
type Case = (&'static str, fn() -> Facts, Change, &'static [&'static str]);

/// Failures, errors and warnings, each check once.
fn objections(facts: &Facts) -> Vec<String> {
    let run = Run::judged(facts.clone(), &Profile::default(), "built-in", facts.level);
    let objections: BTreeSet<(String, Verdict)> = run
        .findings
        .iter()
        .filter(|it| !matches!(it.verdict, Verdict::Pass | Verdict::Skip))
        .map(|it| (it.check.clone(), it.verdict))
        .collect();
    let objections = objections.into_iter();
    objections
        .map(|(check, verdict)| format!("{verdict} {check}"))
        .collect()
}

fn judge(cases: &[Case]) {
    let mut wrong = Vec::new();
    for (name, node, change, expected) in cases {
        let mut facts = node();
        change(&mut facts);
        let seen = objections(&facts);
        if seen != *expected {
            wrong.push(format!("{name}: expected {expected:?}, seen {seen:?}"));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {} wrong:\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n")
    );
}

/// Eight H200s on a board of a vendor's server, without a profile or an instance type.
fn bare_board() -> Facts {
    let mut facts = burned_node();
    facts.host.ec2 = Reading::NotSupported;
    facts.host.product_name = Reading::Value("SYS-821GE-TNHR".to_owned());
    for gpu in &mut facts.gpus {
        gpu.virtualization_mode = Reading::Value("none".to_owned());
    }
    let Reading::Value(devices) = &mut facts.host.pci_devices else {
        panic!("the healthy machine has a bus")
    };
    for device in devices {
        let bus = u8::from_str_radix(&device.address[5..7], 16).expect("a bus");
        device.upstream_ports = Some(vec![format!("0000:{:02x}:00.0", bus - 1)]);
    }
    facts
}

/// Keeps `count` of the GPUs of a board, in every layer and as another model, and `switches` of its
/// NVSwitches.
fn board_of(count: usize, switches: usize, model: &GpuModel) -> Facts {
    let mut facts = bare_board();
    facts.load.burn.clear();
    facts.load.sensors.clear();
    facts.load.burn_plan = None;
    facts.gpus.truncate(count);
    facts.nvml.gpu_count = Reading::Value(u32::try_from(count).expect("few"));
    for gpu in &mut facts.gpus {
        gpu.name = Reading::Value(model.product_names[0].clone());
        gpu.pci_device_id = Reading::Value(model.pci_device_ids[0]);
        gpu.compute_capability = Reading::Value(model.compute_capability);
        if let (Reading::Value(memory), Some(mib)) = (&mut gpu.memory, model.memory_mib) {
            memory.total_bytes = mib << 20;
        }
        if let Reading::Value(links) = &mut gpu.nvlinks {
            links.truncate(model.nvlinks.unwrap_or(0) as usize);
            for link in links {
                link.speed_mbps = Some(53_125);
            }
        }
    }
    if let Reading::Value(devices) = &mut facts.cuda.devices {
        devices.truncate(count);
        for device in devices {
            device.compute_capability = model.compute_capability;
            device.multiprocessors = model.multiprocessors.unwrap_or(148);
        }
    }
    let addresses: Vec<String> = facts
        .gpus
        .iter()
        .filter_map(|gpu| gpu.pci_address.value().cloned())
        .collect();
    let mut left = switches;
    bus(&mut facts).retain_mut(|device| {
        if device.is_gpu() {
            device.device_id = model.pci_device_ids[0];
            return addresses.contains(&device.address);
        }
        let is_kept = left > 0;
        left = left.saturating_sub(1);
        is_kept
    });
    if let Reading::Value(modules) = &mut facts.host.kernel_modules {
        modules.nvidia_gpus.retain(|it, _| addresses.contains(it));
    }
    facts
}

/// A tray of a GB200 rack with so many GPUs, of a fabric that spans nodes.
fn tray_of(count: usize) -> Facts {
    let mut facts = board_of(count, 0, model("GB200"));
    for gpu in &mut facts.gpus {
        if let Reading::Value(fabric) = &mut gpu.fabric {
            fabric.cluster_uuid = Some("2b7a4c10-95e3-4f0a-8d61-7c3e5a9b1f02".to_owned());
        }
    }
    let running = ServiceState {
        installed: true,
        enabled: true,
        active: true,
    };
    facts
        .host
        .services
        .insert("nvidia-imex".to_owned(), Reading::Value(running));
    facts
}

fn model(name: &str) -> &'static GpuModel {
    let mut models = gpu_models().iter();
    models.find(|it| it.name == name).expect("a model")
}

fn bus(facts: &mut Facts) -> &mut Vec<PciDevice> {
    match &mut facts.host.pci_devices {
        Reading::Value(devices) => devices,
        _ => panic!("the healthy machine has a bus"),
    }
}

fn log(facts: &mut Facts, lines: &[&str]) {
    log_at(facts, 80_000.0, lines);
}

fn log_at(facts: &mut Facts, at_s: f64, lines: &[&str]) {
    let Reading::Value(log) = &mut facts.host.kernel_log else {
        panic!("the healthy machine has a kernel log")
    };
    log.records.extend(lines.iter().map(|line| KernelLogRecord {
        age_s: Some(86_400.0 - at_s),
        at_s: Some(at_s),
        text: (*line).to_owned(),
        repeats: 0,
    }));
    log.newest_record_at_s = Some(at_s);
}

/// The node after the load, as it was before but for `change`.
fn after(facts: &mut Facts, change: impl FnOnce(&mut NodeState)) {
    let mut state = NodeState {
        gpu_count: facts.nvml.gpu_count.clone(),
        gpus: Reading::Value(facts.gpus.clone()),
        pci_devices: facts.host.pci_devices.clone(),
        kernel_log: facts.host.kernel_log.clone(),
        kernel_modules: facts.host.kernel_modules.clone(),
        device_nodes: facts.host.device_nodes.clone(),
        services: facts.host.services.clone(),
    };
    change(&mut state);
    facts.after_load = Some(Box::new(state));
}

fn gpu_after(facts: &mut Facts, change: impl FnOnce(&mut GpuFacts)) {
    after(facts, |state| match &mut state.gpus {
        Reading::Value(gpus) => change(&mut gpus[2]),
        other => panic!("the state has GPUs, not {other:?}"),
    });
}

/// The burn's run of each GPU.
fn runs(facts: &mut Facts, change: impl Fn(usize, &mut validator_core::facts::BurnRun)) {
    for (index, run) in facts.load.burn.values_mut().enumerate() {
        if let Reading::Value(run) = run {
            change(index, run);
        }
    }
}

fn set_rate(run: &mut validator_core::facts::BurnRun, tflops: f32) {
    run.precisions[0].tflops = f64::from(tflops);
    run.precisions[0].tflops_intervals.fill(tflops);
}

#[test]
fn what_the_load_left() {
    judge(&[
        (
            "another GPU answers at the address",
            burned_node,
            |facts| {
                gpu_after(facts, |gpu| {
                    gpu.uuid =
                        Reading::Value("GPU-ffffffff-0000-0000-0000-000000000000".to_owned());
                });
            },
            &["fail gpu_reachable"],
        ),
        (
            "power limit lowered",
            burned_node,
            |facts| {
                gpu_after(facts, |gpu| {
                    if let Reading::Value(power) = &mut gpu.power {
                        power.limit_mw = 400_000;
                    }
                });
            },
            &["warn power_limit"],
        ),
        (
            "MIG turned on",
            burned_node,
            |facts| {
                gpu_after(facts, |gpu| {
                    gpu.mig = Reading::Value(MigMode {
                        current: true,
                        pending: true,
                    });
                });
            },
            &["fail mig_mode"],
        ),
        (
            "BAR1 shrank",
            burned_node,
            |facts| {
                after(facts, |state| {
                    if let Reading::Value(devices) = &mut state.pci_devices {
                        devices[2].largest_region_bytes = Some(256 << 20);
                    }
                });
            },
            &["fail bar1_memory"],
        ),
        (
            "two NVSwitches gone",
            bare_board,
            |facts| {
                after(facts, |state| {
                    if let Reading::Value(devices) = &mut state.pci_devices {
                        devices.truncate(10);
                    }
                });
            },
            &["fail gpu_count"],
        ),
        (
            "fabric manager died",
            bare_board,
            |facts| {
                after(facts, |state| {
                    state.services.insert(
                        "nvidia-fabricmanager".to_owned(),
                        Reading::Value(ServiceState {
                            installed: true,
                            enabled: true,
                            active: false,
                        }),
                    );
                });
            },
            &["fail fabric_manager"],
        ),
        (
            "device node gone",
            burned_node,
            |facts| {
                after(facts, |state| {
                    if let Reading::Value(nodes) = &mut state.device_nodes {
                        nodes.retain(|it| it.path != "/dev/nvidia3");
                    }
                });
            },
            &["warn device_nodes"],
        ),
        (
            "UVM unloaded by an idle host",
            burned_node,
            |facts| {
                after(facts, |state| {
                    if let Reading::Value(modules) = &mut state.kernel_modules {
                        modules.loaded.remove("nvidia_uvm");
                    }
                });
            },
            &[],
        ),
        (
            "clique changed",
            burned_node,
            |facts| {
                gpu_after(facts, |gpu| {
                    if let Reading::Value(fabric) = &mut gpu.fabric {
                        fabric.clique_id = Some(9);
                    }
                });
            },
            &["fail fabric_state"],
        ),
        (
            "no spare row left",
            burned_node,
            |facts| {
                gpu_after(facts, |gpu| {
                    if let Reading::Value(rows) = &mut gpu.row_remapping {
                        rows.histogram.as_mut().expect("one").none = 1;
                    }
                });
            },
            &["fail row_remapping"],
        ),
        (
            "unknown recovery action",
            burned_node,
            |facts| {
                gpu_after(facts, |gpu| {
                    gpu.recovery_action = Reading::Value(RecoveryAction::Unknown(9));
                });
            },
            &["fail recovery_action"],
        ),
        (
            "an NVLink recovered",
            burned_node,
            |facts| {
                gpu_after(facts, |gpu| {
                    if let Reading::Value(links) = &mut gpu.nvlinks {
                        links[4].recovery_errors = Some(1);
                    }
                });
            },
            &["warn nvlink_errors"],
        ),
        (
            "power brake between the burn and the end",
            burned_node,
            |facts| {
                gpu_after(facts, |gpu| {
                    if let Reading::Value(times) = &mut gpu.violations {
                        times.hw_power_brake_ns = Some(9_000_000_000);
                    }
                });
            },
            &["warn throttle_history"],
        ),
        (
            "a switch lost its driver",
            bare_board,
            |facts| {
                after(facts, |state| {
                    if let Reading::Value(devices) = &mut state.pci_devices {
                        devices[9].driver = None;
                    }
                });
            },
            &["fail gpu_count"],
        ),
        (
            "power limit counter of the load itself",
            burned_node,
            |facts| {
                gpu_after(facts, |gpu| {
                    if let Reading::Value(times) = &mut gpu.violations {
                        times.power_ns = Some(9_000_000_000);
                    }
                });
            },
            &[],
        ),
    ]);
}

#[test]
fn what_the_burn_saw() {
    judge(&[
        (
            "all GPUs a third slower",
            burned_node,
            |facts| runs(facts, |_, run| set_rate(run, 460.0)),
            &["fail gemm_throughput"],
        ),
        (
            "half of the products unverified",
            burned_node,
            |facts| {
                runs(facts, |index, run| {
                    if index == 2 {
                        run.precisions[0].products_verified /= 2;
                    }
                });
            },
            &["error gemm_numerics"],
        ),
        (
            "no operand block was compared",
            burned_node,
            |facts| {
                runs(facts, |index, run| {
                    if index == 2 {
                        run.precisions[0].reference.operand_blocks = Some(0);
                    }
                });
            },
            &["error gemm_numerics"],
        ),
        (
            "residual is no number",
            burned_node,
            |facts| {
                runs(facts, |index, run| {
                    if index == 2 {
                        run.precisions[0].reference.freivalds_worst = f64::NAN;
                    }
                });
            },
            &["fail gemm_numerics"],
        ),
        (
            "a copy to the device is wrong",
            burned_node,
            |facts| {
                runs(facts, |index, run| {
                    if index == 2 {
                        run.copies.as_mut().expect("copies").bytes = 0;
                    }
                });
            },
            &["error gemm_numerics"],
        ),
        (
            "a GPU lacks a precision that the others multiplied",
            burned_node,
            |facts| {
                runs(facts, |index, run| {
                    if index != 2 {
                        let mut fp64 = run.precisions[0].clone();
                        fp64.precision = validator_core::facts::Precision::Fp64;
                        fp64.tflops = 54.0;
                        fp64.tflops_intervals.fill(54.0);
                        run.precisions.push(fp64);
                    }
                });
            },
            &["error gemm_numerics"],
        ),
        (
            "memory clock at half under load",
            burned_node,
            |facts| {
                let log = facts.load.sensors.values_mut().nth(2).expect("sensors");
                for sample in &mut log.samples {
                    sample.memory_mhz = Some(1600);
                }
            },
            &["warn clocks"],
        ),
        (
            "clocks locked by an administrator",
            burned_node,
            |facts| {
                for log in facts.load.sensors.values_mut() {
                    for sample in &mut log.samples {
                        sample.reasons = Some(0x2);
                        sample.sm_mhz = Some(1005);
                    }
                }
            },
            &["warn burn_throttling"],
        ),
        (
            "one GPU 25 degrees hotter than the others",
            burned_node,
            |facts| {
                let log = facts.load.sensors.values_mut().nth(2).expect("sensors");
                for sample in &mut log.samples {
                    sample.gpu_c = Some(87);
                    sample.memory_c = Some(93);
                }
            },
            &["warn burn_temperature"],
        ),
        (
            "one GPU six degrees warmer",
            burned_node,
            |facts| {
                let log = facts.load.sensors.values_mut().nth(2).expect("sensors");
                for sample in &mut log.samples {
                    sample.gpu_c = Some(68);
                    sample.memory_c = Some(75);
                }
            },
            &[],
        ),
        (
            "lanes lost in one sample",
            burned_node,
            |facts| {
                let log = facts.load.sensors.values_mut().nth(2).expect("sensors");
                log.pcie.as_mut().expect("sampled").widths.insert(8, 1);
            },
            &["fail pcie_link"],
        ),
        (
            "aggregate errors alone grew",
            burned_node,
            |facts| {
                let log = facts.load.sensors.values_mut().nth(2).expect("sensors");
                if let Reading::Value(errors) = &mut log.after.ecc_aggregate {
                    errors.dram_uncorrectable = Some(1);
                    errors.total_uncorrectable = Some(1);
                }
            },
            &["fail burn_errors"],
        ),
        (
            "the event of an Xid that the log lacks",
            burned_node,
            |facts| {
                let log = facts.load.sensors.values_mut().nth(2).expect("sensors");
                log.xid_events = Reading::Value(vec![109]);
            },
            &["fail burn_errors"],
        ),
    ]);
}

#[test]
fn words_of_the_kernel_log() {
    judge(&[
        (
            "GSP heartbeat",
            bare_board,
            |facts| {
                log(
                    facts,
                    &[
                        "NVRM: GPU0 _kgspIsHeartbeatTimedOut: Heartbeat timed out, diff 5201 timeout 5200",
                        "NVRM: GPU0 _kgspRpcRecvPoll: GSP RM heartbeat timed out",
                    ],
                );
            },
            &["fail kernel_log_xid"],
        ),
        (
            "LibOS heartbeat",
            bare_board,
            |facts| {
                log(
                    facts,
                    &["NVRM: GPU3 _kgspRpcRecvPoll: LibOS heartbeat timed out"],
                );
            },
            &["fail kernel_log_xid"],
        ),
        (
            "Xid 119 in the driver's newer words",
            bare_board,
            |facts| {
                log(
                    facts,
                    &[
                        "NVRM: Xid (PCI:0000:12:00): 119, pid=881, name=nvidia-smi, Timeout after 45s of waiting for RPC response from GPU2 GSP! Expected function 4097 (GSP_INIT_DONE) (0x0 0x0).",
                    ],
                );
            },
            &["fail kernel_log_xid"],
        ),
        (
            "a register without permission",
            bare_board,
            |facts| {
                log(
                    facts,
                    &[
                        "NVRM: GPU2 gpuHandleSanityCheckRegReadError_GM107: Possible bad register read: addr: 0x21ac,  regvalue: 0xbadf5108,  error code: Unknown SYS_PRI_ERROR_CODE",
                    ],
                );
            },
            &[],
        ),
        (
            "expedited RCU stall in the driver",
            bare_board,
            |facts| {
                log(
                    facts,
                    &[
                        "rcu: INFO: rcu_preempt detected expedited stalls on CPUs/tasks: { 12-...D } 6021 jiffies s: 1337 root: 0x1/.",
                        " ? _nv043210rm+0x1b/0x90 [nvidia]",
                    ],
                );
            },
            &["warn kernel_log_xid"],
        ),
        (
            "RCU stall in the driver",
            bare_board,
            |facts| {
                log(
                    facts,
                    &[
                        "rcu: INFO: rcu_sched self-detected stall on CPU",
                        "rcu: \t5-....: (14999 ticks this GP) idle=77c/1/0x4000000000000000 softirq=123/123 fqs=7000",
                        " os_schedule+0x15/0x20 [nvidia]",
                    ],
                );
            },
            &["warn kernel_log_xid"],
        ),
        (
            "RCU stall of a network driver",
            bare_board,
            |facts| {
                log(
                    facts,
                    &[
                        "rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:",
                        " mlx5e_napi_poll+0xd1/0x6c0 [mlx5_core]",
                    ],
                );
            },
            &[],
        ),
        (
            "hard lockup in the driver",
            bare_board,
            |facts| {
                log(
                    facts,
                    &[
                        "NMI watchdog: Watchdog detected hard LOCKUP on cpu 12",
                        " _nv009219rm+0x4/0x10 [nvidia]",
                    ],
                );
            },
            &["warn kernel_log_xid"],
        ),
        (
            "soft lockup of a job beside the driver's modules",
            bare_board,
            |facts| {
                log(
                    facts,
                    &[
                        "watchdog: BUG: soft lockup - CPU#5 stuck for 26s! [java:4242]",
                        "Modules linked in: nvidia_uvm(PO) nvidia_drm(PO) nvidia(PO) nfsv4 [last unloaded: nvidia_peermem]",
                    ],
                );
            },
            &[],
        ),
        (
            "probe failed for one device",
            bare_board,
            |facts| {
                log(
                    facts,
                    &["NVRM: The NVIDIA probe routine failed for 1 device(s)."],
                );
            },
            &["warn kernel_log_xid"],
        ),
        (
            "a region that the firmware did not assign",
            bare_board,
            |facts| {
                log(
                    facts,
                    &[
                        "NVRM: This PCI I/O region assigned to your NVIDIA device is invalid:",
                        "NVRM: BAR1 is 0M @ 0x0 (PCI:0000:12:00.0)",
                    ],
                );
            },
            &["warn kernel_log_xid"],
        ),
        (
            "recovery of a GPU's function failed",
            bare_board,
            |facts| {
                log(
                    facts,
                    &[
                        "nvidia 0000:12:00.0: AER: can't recover (no error_detected callback)",
                        "pcieport 0000:11:00.0: AER: device recovery failed",
                    ],
                );
            },
            &["warn kernel_log_pcie"],
        ),
        (
            "recovery of a network card failed",
            bare_board,
            |facts| {
                log(
                    facts,
                    &[
                        "mlx5_core 0000:a1:00.0: AER: can't recover (no error_detected callback)",
                        "pcieport 0000:a0:00.0: AER: device recovery failed",
                    ],
                );
            },
            &[],
        ),
        (
            "containment at a drive, ports known",
            bare_board,
            |facts| {
                log(
                    facts,
                    &["pcieport 0000:e0:01.0: DPC: containment event, status:0x1f01 source:0x0000"],
                );
            },
            &[],
        ),
        (
            "containment at a drive, ports not known",
            burned_node,
            |facts| {
                log(
                    facts,
                    &["pcieport 0000:e0:01.0: DPC: containment event, status:0x1f05 source:0xe100"],
                );
            },
            &[],
        ),
        (
            "containment of a GPU, ports not known",
            burned_node,
            |facts| {
                log(
                    facts,
                    &["pcieport 0000:0f:01.0: DPC: containment event, status:0x1f05 source:0x1200"],
                );
            },
            &["fail kernel_log_pcie"],
        ),
        (
            "fatal error of a network card that the firmware reports",
            burned_node,
            |facts| {
                log(
                    facts,
                    &[
                        "{1}[Hardware Error]: event severity: fatal",
                        "{1}[Hardware Error]:   device_id: 0000:a1:00.0",
                    ],
                );
            },
            &[],
        ),
        (
            "a drive was pulled",
            burned_node,
            |facts| {
                log(
                    facts,
                    &[
                        "pcieport 0000:e0:01.0: pciehp: Slot(21): Link Down",
                        "pcieport 0000:e0:01.0: pciehp: Slot(21): Card not present",
                    ],
                );
            },
            &[],
        ),
        (
            "a slot is empty where nothing states how many GPUs there are",
            bare_board,
            |facts| {
                log(
                    facts,
                    &["pcieport 0000:e0:01.0: pciehp: Slot(21): Link Down"],
                );
            },
            &["warn kernel_log_pcie"],
        ),
        (
            "a card's USB controller",
            bare_board,
            |facts| {
                log(
                    facts,
                    &[
                        "nvidia-gpu 0000:01:00.3: i2c timeout error e0000000",
                        "ucsi_ccg 0-0008: i2c_transfer failed -110",
                    ],
                );
            },
            &[],
        ),
        (
            "nouveau on the kernel's command line",
            bare_board,
            |facts| {
                log(
                    facts,
                    &[
                        "Kernel command line: BOOT_IMAGE=/vmlinuz root=/dev/sda1 nouveau.modeset=0 rd.driver.blacklist=nouveau",
                    ],
                );
            },
            &[],
        ),
        (
            "memory of the host",
            bare_board,
            |facts| {
                log(
                    facts,
                    &[
                        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0",
                        "mce: [Hardware Error]: Machine check events logged",
                    ],
                );
            },
            &[],
        ),
        (
            "a slow work queue",
            bare_board,
            |facts| {
                log(
                    facts,
                    &[
                        "workqueue: nv_drm_handle_hotplug_event [nvidia_drm] hogged CPU for >10000us 4 times, consider switching to WQ_UNBOUND",
                    ],
                );
            },
            &[],
        ),
        (
            "the greeting before an Xid of a job",
            bare_board,
            |facts| {
                log(
                    facts,
                    &[
                        "NVRM: GPU at PCI:0000:12:00: GPU-00000000-0000-0000-0000-000000000002",
                        "NVRM: GPU Board Serial Number: 1650000000002",
                        "NVRM: Xid (PCI:0000:12:00): 31, pid=77, name=python3, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_8 faulted @ 0x7f_00000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
                    ],
                );
            },
            &[],
        ),
        (
            "an NVSwitch that its driver could not start",
            bare_board,
            |facts| {
                log(
                    facts,
                    &[
                        "nvidia-nvswitch 0000:81:00.0: probe with driver nvidia-nvswitch failed with error -5",
                    ],
                );
                bus(facts)[9].driver = None;
            },
            &["fail gpu_count", "fail kernel_log_xid"],
        ),
        (
            "a fatal SXid cleared by a new load of the driver",
            bare_board,
            |facts| {
                log(
                    facts,
                    &[
                        "nvidia-nvswitch1: SXid (PCI:0000:81:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
                    ],
                );
                log_at(
                    facts,
                    81_000.0,
                    &[
                        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build",
                    ],
                );
            },
            &["warn kernel_log_xid"],
        ),
    ]);
}

#[test]
fn boards_that_nothing_describes() {
    judge(&[
        ("a whole bare board", bare_board, |_| {}, &[]),
        (
            "no NVSwitch on the bus, and no fabric",
            bare_board,
            |facts| {
                bus(facts).truncate(8);
                for gpu in &mut facts.gpus {
                    if let Reading::Value(fabric) = &mut gpu.fabric {
                        fabric.state = "in_progress".to_owned();
                    }
                }
            },
            &["fail fabric_state"],
        ),
        (
            "a virtual machine whose host has the NVSwitches",
            burned_node,
            |facts| {
                facts.host.ec2 = Reading::NotSupported;
                bus(facts).truncate(8);
            },
            &[],
        ),
        (
            "a switch without a driver",
            bare_board,
            |facts| bus(facts)[10].driver = None,
            &["fail gpu_count"],
        ),
        (
            "a switch given to a virtual machine",
            bare_board,
            |facts| {
                for device in bus(facts).iter_mut().skip(8) {
                    device.driver = Some("vfio-pci".to_owned());
                }
            },
            &[],
        ),
        (
            "six of eight A100s",
            || board_of(6, 4, model("A100 SXM 80GB")),
            |_| {},
            &["fail gpu_count"],
        ),
        ("a tray of an NVL72", || tray_of(4), |_| {}, &[]),
        (
            "three GPUs of a tray of an NVL72",
            || tray_of(3),
            |_| {},
            &["fail gpu_count"],
        ),
        (
            "two GPUs of a tray of an NVL72",
            || tray_of(2),
            |_| {},
            &["fail gpu_count"],
        ),
        (
            "four of eight B200s on bare metal",
            || board_of(4, 0, model("B200")),
            |_| {},
            &["fail gpu_count"],
        ),
        (
            "one GPU of a DGX B200 is gone",
            || board_of(7, 0, model("B200")),
            |facts| {
                facts.host.product_name = Reading::Value("DGXB200".to_owned());
            },
            &["fail gpu_count"],
        ),
        (
            "one link of every GPU is down",
            bare_board,
            |facts| {
                for gpu in &mut facts.gpus {
                    if let Reading::Value(links) = &mut gpu.nvlinks {
                        links[7].active = false;
                    }
                }
            },
            &["fail nvlink_state"],
        ),
        (
            "every GPU lost a memory stack",
            bare_board,
            |facts| {
                for gpu in &mut facts.gpus {
                    if let Reading::Value(memory) = &mut gpu.memory {
                        memory.total_bytes = memory.total_bytes / 6 * 5;
                    }
                }
            },
            &["fail gpu_memory"],
        ),
        (
            "a link with half a million CRC errors",
            bare_board,
            |facts| {
                for gpu in &mut facts.gpus {
                    if let Reading::Value(links) = &mut gpu.nvlinks {
                        for link in links {
                            link.crc_flit_errors = Some(120);
                        }
                    }
                }
                if let Reading::Value(links) = &mut facts.gpus[3].nvlinks {
                    links[5].crc_flit_errors = Some(500_000);
                }
            },
            &["warn nvlink_errors"],
        ),
        (
            "every link has a few hundred CRC errors",
            bare_board,
            |facts| {
                for (index, gpu) in facts.gpus.iter_mut().enumerate() {
                    if let Reading::Value(links) = &mut gpu.nvlinks {
                        for link in links {
                            link.crc_flit_errors = Some(33 + 28 * index as u64);
                        }
                    }
                }
            },
            &[],
        ),
        (
            "fabric registration failed on one GPU",
            bare_board,
            |facts| {
                if let Reading::Value(fabric) = &mut facts.gpus[3].fabric {
                    fabric.status = "NVML_ERROR_UNKNOWN".to_owned();
                }
            },
            &["fail fabric_state"],
        ),
        (
            "one GPU of a board knows no fabric",
            bare_board,
            |facts| facts.gpus[3].fabric = Reading::NotSupported,
            &["error fabric_state"],
        ),
        (
            "the probe ended before the last GPU",
            bare_board,
            |facts| {
                facts.gpus.pop();
            },
            &["fail gpu_count"],
        ),
        (
            "remapped rows of years",
            bare_board,
            |facts| {
                if let Reading::Value(rows) = &mut facts.gpus[3].row_remapping {
                    rows.correctable_rows = 3;
                    rows.uncorrectable_rows = 1;
                }
            },
            &[],
        ),
        (
            "an inventory of different InfoROMs",
            bare_board,
            |facts| {
                facts.gpus[3].inforom_image_version = Reading::Value("G520.0282.02.03".to_owned());
            },
            &[],
        ),
        (
            "a board with a lower default power limit",
            bare_board,
            |facts| {
                if let Reading::Value(power) = &mut facts.gpus[3].power {
                    power.limit_mw = 650_000;
                    power.default_limit_mw = Some(650_000);
                }
            },
            &["warn power_limit"],
        ),
        (
            "eight hours of thermal slowdown in a year",
            bare_board,
            |facts| {
                facts.host.uptime_s = Reading::Value(31_536_000.0);
                if let Reading::Value(times) = &mut facts.gpus[3].violations {
                    times.hw_thermal_ns = Some(28_800_000_000_000);
                }
            },
            &["warn throttle_history"],
        ),
        (
            "a console session on a server's T4",
            || {
                let mut facts = validator_core::test_machine::node_with(healthy_t4());
                facts.host.pci_devices = Reading::Value(vec![PciDevice {
                    address: "0000:10:00.0".to_owned(),
                    device_id: 0x1eb8,
                    class: 0x03_0200,
                    driver: Some("nvidia".to_owned()),
                    aer_correctable: Some(0),
                    aer_nonfatal: Some(0),
                    aer_fatal: Some(0),
                    ..PciDevice::default()
                }]);
                facts.nvml.gpu_count = Reading::Value(1);
                if let Reading::Value(devices) = &mut facts.cuda.devices {
                    devices.truncate(1);
                    devices[0].multiprocessors = 40;
                }
                facts
            },
            |facts| facts.gpus[0].processes = Reading::Value(vec![python_process(4)]),
            &["warn foreign_processes"],
        ),
        (
            "a node of an older image has device nodes of GPUs that it never had",
            bare_board,
            |facts| {
                if let Reading::Value(nodes) = &mut facts.host.device_nodes {
                    nodes.push(DeviceNode {
                        path: "/dev/nvidia15".to_owned(),
                        accessible: true,
                        mode: 0o666,
                    });
                }
            },
            &[],
        ),
    ]);
}
