//! What must hold of verdicts for any facts: less evidence is never greener, other GPUs and the
//! order of things do not matter.
//!
//! Over the recorded machines of `tests/facts`, and over healthy machines with one fault each.

use std::collections::BTreeMap;

use serde_json::Value;
use validator_core::facts::{
    Facts, GpuFacts, KernelLogRecord, NodeState, PciDevice, Reading, RecoveryAction,
};
use validator_core::findings::{ExitStatus, Run, Subject, Verdict};
use validator_core::level::Level;
use validator_core::profile::Profile;
use validator_core::test_machine::{burned_node, healthy_node, healthy_t4};

fn judged(facts: &Facts) -> Run {
    Run::judged(facts.clone(), &Profile::default(), "built-in", facts.level)
}

fn recorded() -> Vec<(String, Facts)> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/facts");
    let mut machines = Vec::new();
    for entry in std::fs::read_dir(folder).expect("the recorded machines") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().map(|it| it.to_string_lossy().into_owned());
        let name = name.unwrap_or_default();
        if name.ends_with(".facts.json") {
            let text = std::fs::read(&path).expect("facts");
            machines.push((name, Facts::from_json(&text).expect("facts of any version")));
        }
    }
    assert!(machines.len() >= 5, "{} recorded machines", machines.len());
    machines
}

fn log(facts: &mut Facts, lines: &[&str]) {
    let Reading::Value(log) = &mut facts.host.kernel_log else {
        panic!("the healthy machine has a kernel log")
    };
    for line in lines {
        log.records.push(KernelLogRecord {
            age_s: Some(400.0),
            at_s: Some(86_000.0),
            text: (*line).to_owned(),
            repeats: 0,
        });
    }
}

/// Healthy machines with one fault each, none of which may take work.
fn ill() -> Vec<(&'static str, Facts)> {
    type Change = fn(&mut Facts);
    let changes: [(&'static str, Change); 16] = [
        ("recovery action", |facts| {
            facts.gpus[2].recovery_action = Reading::Value(RecoveryAction::GpuReset);
        }),
        ("remapping pending", |facts| {
            if let Reading::Value(rows) = &mut facts.gpus[2].row_remapping {
                rows.pending = true;
            }
        }),
        ("lost", |facts| {
            facts.gpus[2].lost = Some("nvmlDeviceGetName".to_owned());
        }),
        ("not listed", |facts| {
            facts.gpus.remove(2);
        }),
        ("lanes", |facts| {
            if let Reading::Value(link) = &mut facts.gpus[2].pcie {
                link.current_width = 4;
            }
        }),
        ("NVLink", |facts| {
            if let Reading::Value(links) = &mut facts.gpus[2].nvlinks {
                links[0].active = false;
            }
        }),
        ("fabric", |facts| {
            if let Reading::Value(fabric) = &mut facts.gpus[2].fabric {
                "in_progress".clone_into(&mut fabric.state);
            }
        }),
        ("Xid 79", |facts| {
            log(
                facts,
                &["NVRM: Xid (PCI:0000:12:00): 79, GPU has fallen off the bus."],
            );
        }),
        ("UVM", |facts| {
            log(
                facts,
                &[
                    "NVRM: nvGpuOpsReportFatalError: uvm encountered global fatal error 0x60, requiring os reboot to recover.",
                ],
            );
        }),
        ("fatal AER", |facts| {
            if let Reading::Value(devices) = &mut facts.host.pci_devices {
                devices[2].aer_fatal = Some(2);
            }
        }),
        ("wrong results", |facts| {
            let uuid = facts.gpus[2].uuid.value().cloned().unwrap_or_default();
            if let Some(Reading::Value(run)) = facts.load.burn.get_mut(&uuid) {
                run.precisions[0].mismatches = 3;
            }
        }),
        ("NVSwitch without a driver", |facts| {
            if let Reading::Value(devices) = &mut facts.host.pci_devices {
                devices[9].driver = None;
            }
        }),
        ("GSP", |facts| {
            log(
                facts,
                &["NVRM: GPU2 _kgspRpcRecvPoll: GSP RM heartbeat timed out"],
            );
        }),
        ("all GPUs slow", |facts| {
            for run in facts.load.burn.values_mut() {
                if let Reading::Value(run) = run {
                    run.precisions[0].tflops = 460.0;
                    run.precisions[0].tflops_intervals.fill(460.0);
                }
            }
        }),
        ("all GPUs slow in small products", |facts| {
            for run in facts.load.burn.values_mut() {
                if let Reading::Value(run) = run {
                    let products = &mut run.precisions[0];
                    (products.m, products.n, products.k) = (2048, 2048, 4096);
                    products.tflops = 290.0;
                    products.tflops_intervals.fill(290.0);
                }
            }
        }),
        ("lost during the load", |facts| {
            let mut gpus = facts.gpus.clone();
            gpus[2].lost = Some("nvmlDeviceGetName".to_owned());
            facts.after_load = Some(Box::new(NodeState {
                gpus: Reading::Value(gpus),
                ..NodeState::default()
            }));
        }),
    ];
    changes
        .into_iter()
        .map(|(name, change)| {
            let mut facts = burned_node();
            change(&mut facts);
            assert_eq!(judged(&facts).exit_status(), ExitStatus::Failed, "{name}");
            (name, facts)
        })
        .collect()
}

/// The paths of all readings that hold a value. Of the GPUs the first and the third stand for all.
fn readings(value: &Value, path: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
    match value {
        Value::Object(fields) => {
            if fields.len() == 1 && fields.contains_key("value") && !path.is_empty() {
                found.push(path.clone());
            }
            for (name, value) in fields {
                path.push(name.clone());
                readings(value, path, found);
                path.pop();
            }
        }
        Value::Array(items) => {
            let of_gpus = path.last().is_some_and(|it| it == "gpus");
            for (index, item) in items.iter().enumerate() {
                if of_gpus && !matches!(index, 0 | 2) {
                    continue;
                }
                path.push(index.to_string());
                readings(item, path, found);
                path.pop();
            }
        }
        _ => {}
    }
}

fn without(facts: &Value, path: &[String]) -> Option<Facts> {
    let mut facts = facts.clone();
    let mut place = &mut facts;
    for step in path {
        place = match place {
            Value::Object(fields) => fields.get_mut(step)?,
            Value::Array(items) => items.get_mut(step.parse::<usize>().ok()?)?,
            _ => return None,
        };
    }
    *place = serde_json::json!({"not_read": "removed"});
    serde_json::from_value(facts).ok()
}

/// Verdicts by check and subject. A GPU is known by its address where its UUID is what was removed.
fn verdicts(run: &Run) -> BTreeMap<(String, String), Verdict> {
    run.findings
        .iter()
        .map(|it| {
            let subject = match &it.subject {
                Subject::Host => "host".to_owned(),
                Subject::Gpu(gpu) => gpu
                    .pci_address
                    .clone()
                    .or_else(|| gpu.uuid.clone())
                    .unwrap_or_default(),
                Subject::Environment(environment) => environment.path.clone(),
            };
            ((it.check.clone(), subject), it.verdict)
        })
        .collect()
}

/// Judges `facts` with readings removed one at a time: each [`STEP`]th, the machines of a test
/// beginning at different ones.
fn for_each_removal(facts: &Facts, machine: usize, mut judge: impl FnMut(&[String], &Run)) {
    /// Every reading of every machine takes minutes in a debug build.
    const STEP: usize = 4;
    let json = serde_json::to_value(facts).expect("facts are JSON");
    let mut paths = Vec::new();
    readings(&json, &mut Vec::new(), &mut paths);
    assert!(paths.len() > 50, "{} readings", paths.len());
    for path in paths.into_iter().skip(machine % STEP).step_by(STEP) {
        if let Some(less) = without(&json, &path) {
            judge(&path, &judged(&less));
        }
    }
}

/// Which value the machine is judged by where this one is missing: removing it may only change what
/// is expected.
fn states_an_expectation(path: &[String]) -> bool {
    let last = path.last().map(String::as_str);
    // Without the instance type less is expected; without addresses a GPU has another name here.
    matches!(last, Some("ec2" | "pci_address" | "uuid"))
}

#[test]
fn less_evidence_adds_no_pass_to_a_recorded_machine() {
    for (machine, (name, facts)) in recorded().into_iter().enumerate() {
        let whole = verdicts(&judged(&facts));
        for_each_removal(&facts, machine, |path, less| {
            if states_an_expectation(path) {
                return;
            }
            for (key, verdict) in verdicts(less) {
                let was = whole.get(&key).copied();
                let is_new = verdict == Verdict::Pass && was != Some(Verdict::Pass);
                // A check that did not apply because of the value may apply without it.
                assert!(
                    !is_new || was == Some(Verdict::Skip) || was == Some(Verdict::Warn),
                    "{name} without {path:?}: {key:?} passes, was {was:?}"
                );
            }
        });
    }
}

#[test]
fn less_evidence_never_clears_an_ill_node() {
    for (machine, (name, facts)) in ill().into_iter().enumerate() {
        for_each_removal(&facts, machine, |path, less| {
            assert_ne!(
                less.exit_status(),
                ExitStatus::Passed,
                "{name} without {path:?}"
            );
        });
    }
}

/// Paths of the values in `ill` that `healthy` has otherwise, or has not.
fn differences(healthy: &Value, ill: &Value, path: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
    let mut compare = |name: String, healthy: Option<&Value>, ill: &Value| {
        path.push(name);
        differences(healthy.unwrap_or(&Value::Null), ill, path, found);
        path.pop();
    };
    match (healthy, ill) {
        (healthy, ill) if healthy == ill => {}
        (Value::Object(before), Value::Object(after)) => {
            for (name, value) in after {
                compare(name.clone(), before.get(name), value);
            }
        }
        (Value::Array(before), Value::Array(after)) if before.len() == after.len() => {
            for (index, value) in after.iter().enumerate() {
                compare(index.to_string(), before.get(index), value);
            }
        }
        _ => found.push(path.clone()),
    }
}

/// Paths of plain values, those of readings as well as those that a probe may leave out. Of lists
/// the first and the third item stand for all.
fn plain_values(value: &Value, path: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
    let mut look = |name: String, value: &Value| {
        path.push(name);
        plain_values(value, path, found);
        path.pop();
    };
    match value {
        Value::Object(fields) => {
            for (name, value) in fields.iter().filter(|(name, _)| *name != "samples") {
                look(name.clone(), value);
            }
        }
        Value::Array(items) => {
            for index in [0, 2] {
                if let Some(item) = items.get(index) {
                    look(index.to_string(), item);
                }
            }
        }
        Value::Null => {}
        _ => found.push(path.clone()),
    }
}

/// The facts with `null` at this path; `None` where the value is not one that may be absent.
fn with_nothing_at(facts: &Value, path: &[String]) -> Option<Facts> {
    let mut facts = facts.clone();
    let pointer: String = path
        .iter()
        .flat_map(|step| ["/".to_owned(), step.replace('~', "~0").replace('/', "~1")])
        .collect();
    *facts.pointer_mut(&pointer)? = Value::Null;
    serde_json::from_value(facts).ok()
}

#[test]
fn an_absent_value_never_clears_an_ill_node() {
    /// Every value of every machine takes minutes in a debug build.
    const STEP: usize = 5;
    let healthy = serde_json::to_value(burned_node()).expect("facts are JSON");
    let mut judged_without = 0;
    for (machine, (name, facts)) in ill().into_iter().enumerate() {
        let json = serde_json::to_value(&facts).expect("facts are JSON");
        let (mut evidence, mut paths) = (Vec::new(), Vec::new());
        differences(&healthy, &json, &mut Vec::new(), &mut evidence);
        plain_values(&json, &mut Vec::new(), &mut paths);
        // What makes the node ill is not taken away, nor is a list that is longer or shorter.
        paths.retain(|path| !evidence.iter().any(|it| path.starts_with(it)));
        let absent = paths
            .iter()
            .filter_map(|path| Some((path, with_nothing_at(&json, path)?)))
            .skip(machine % STEP)
            .step_by(STEP);
        for (path, less) in absent {
            assert_ne!(
                judged(&less).exit_status(),
                ExitStatus::Passed,
                "{name} without {path:?}"
            );
            judged_without += 1;
        }
    }
    assert!(judged_without > 200, "{judged_without} absent values");
}

#[test]
fn a_gpu_that_nvml_does_not_list_never_clears_an_ill_node() {
    for (name, facts) in ill() {
        for index in 0..facts.gpus.len() {
            let mut less = facts.clone();
            less.gpus.remove(index);
            assert_ne!(
                judged(&less).exit_status(),
                ExitStatus::Passed,
                "{name} {index}"
            );
        }
    }
}

/// A healthy T4 in addition to the other GPUs, in every layer.
fn with_another_gpu(facts: &Facts) -> Facts {
    let mut more = facts.clone();
    let (uuid, address) = ("GPU-5c1f0000-0000-4000-8000-0000000000ff", "0000:f0:00.0");
    let gpu = GpuFacts {
        uuid: Reading::Value(uuid.to_owned()),
        pci_address: Reading::Value(address.to_owned()),
        serial: Reading::Value("1650000000099".to_owned()),
        minor_number: Reading::Value(99),
        ..healthy_t4()
    };
    more.gpus.push(gpu);
    if let Reading::Value(devices) = &mut more.host.pci_devices {
        devices.push(PciDevice {
            address: address.to_owned(),
            device_id: 0x1eb8,
            class: 0x03_0200,
            driver: Some("nvidia".to_owned()),
            ..PciDevice::default()
        });
    }
    more
}

fn of_gpus(run: &Run) -> BTreeMap<(String, String), Verdict> {
    let mut verdicts = verdicts(run);
    verdicts.retain(|(_, subject), _| subject != "host" && subject != "0000:f0:00.0");
    verdicts
}

#[test]
fn an_unrelated_gpu_changes_no_verdict_of_another() {
    let healthy = [("healthy", burned_node())];
    for (name, mut facts) in ill().into_iter().chain(healthy) {
        // The instance type states how many GPUs there are, and of which model.
        facts.host.ec2 = Reading::NotSupported;
        let before = of_gpus(&judged(&facts));
        let after = of_gpus(&judged(&with_another_gpu(&facts)));
        for (key, verdict) in before {
            assert_eq!(after.get(&key), Some(&verdict), "{name}: {key:?}");
        }
    }
}

#[test]
fn the_order_of_gpus_does_not_matter() {
    let machines = ill()
        .into_iter()
        .map(|(name, facts)| (name.to_owned(), facts));
    for (name, facts) in machines.chain(recorded()) {
        let mut turned = facts.clone();
        turned.gpus.reverse();
        if let Reading::Value(devices) = &mut turned.host.pci_devices {
            devices.reverse();
        }
        if let Reading::Value(devices) = &mut turned.cuda.devices {
            devices.reverse();
        }
        if let Some(state) = &mut turned.after_load
            && let Reading::Value(gpus) = &mut state.gpus
        {
            gpus.reverse();
        }
        assert_eq!(
            verdicts(&judged(&turned)),
            verdicts(&judged(&facts)),
            "{name}"
        );
    }
}

const LINES: [&str; 14] = [
    "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build",
    "NVRM: Xid (PCI:0000:12:00): 95, pid=7, name=python3, Uncontained memory error. RST: Yes, D-RST: No",
    "NVRM: Xid (PCI:0000:12:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
    "NVRM: Xid (PCI:0000:12:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
    "NVRM: Xid (PCI:0000:13:00): 45, pid=9, name=python3, Ch 00000008 caused by previous Xid 119",
    "NVRM: Xid (PCI:0000:13:00): 119, pid=9, name=python3, Timeout after 6s of waiting for RPC response from GPU3 GSP!",
    "nvidia-nvswitch0: SXid (PCI:0000:80:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
    "nvidia-nvswitch0: SXid (PCI:0000:80:00.0): 20034, Severity 1 Engine instance 30 Sub-engine instance 00",
    "pcieport 0000:c0:00.0: pciehp: Slot(33): Link Down",
    "pcieport 0000:c0:00.0: pciehp: Slot(33): Link Up",
    "NVRM: GPU3 _kgspRpcRecvPoll: LibOS heartbeat timed out",
    "NVRM: The NVIDIA probe routine failed for 1 device(s).",
    "NVRM: BAR1 is 0M @ 0x0 (PCI:0000:14:00.0)",
    "pcieport 0000:15:00.0: AER: device recovery failed",
];

#[test]
fn the_order_of_lines_with_equal_stamps_does_not_matter() {
    let of = |lines: &[&str]| {
        let mut facts = healthy_node();
        log(&mut facts, lines);
        verdicts(&judged(&facts))
    };
    let expected = of(&LINES);
    for turn in 0..LINES.len() {
        let mut lines = LINES;
        lines.rotate_left(turn);
        assert_eq!(of(&lines), expected, "turned by {turn}");
        lines.reverse();
        assert_eq!(of(&lines), expected, "turned by {turn} and reversed");
    }
}

#[test]
fn duplicated_lines_never_make_a_node_greener() {
    let rank = |verdict: &Verdict| match verdict {
        Verdict::Pass | Verdict::Skip => 0,
        Verdict::Warn => 1,
        Verdict::Error => 2,
        Verdict::Fail => 3,
    };
    for from in 0..LINES.len() {
        for to in from + 1..=LINES.len().min(from + 3) {
            let lines = &LINES[from..to];
            let of = |lines: &[&str]| {
                let mut facts = healthy_node();
                log(&mut facts, lines);
                verdicts(&judged(&facts))
            };
            let once = of(lines);
            let twice = of(&[lines, lines].concat());
            for (key, verdict) in once {
                let again = twice.get(&key).map(rank);
                assert!(again >= Some(rank(&verdict)), "{lines:?}: {key:?}");
            }
        }
    }
}

#[test]
fn facts_are_judged_at_the_level_at_which_they_were_collected() {
    for (name, facts) in recorded() {
        assert!(facts.level >= Level::Standard, "{name}");
    }
}
