//! The second reading of the node, after the load, as facts that every check can judge.
//!
//! A check judges one reading and has no part in this: [`facts_after`] lays the second reading over
//! the first, the judge applies the check to both, and [`worse_of`] keeps the worse outcome.

use serde_json::Value;

use crate::facts::{Facts, GpuFacts, NodeState, Reading};
use crate::findings::{Judgement, Outcome, Verdict};

/// What a load changes by itself, or what differs from moment to moment: it is judged before the
/// load, and during it by the checks of stage load.
const TRANSIENT: [&str; 7] = [
    "clocks",
    "clocks_event_reasons",
    "performance_state",
    "processes",
    "temperature",
    "utilization",
    "violations",
];

/// What names a GPU. A GPU that no longer answers keeps its name.
const IDENTITY: [&str; 6] = [
    "minor_number",
    "name",
    "pci_address",
    "pci_device_id",
    "serial",
    "uuid",
];

/// The facts with the second reading laid over the first; `None` where the node was not read again.
///
/// The GPUs are the same in number and order: one that NVML no longer lists is there as lost.
pub(crate) fn facts_after(facts: &Facts) -> Option<Facts> {
    let state = facts.after_load.as_deref()?;
    let mut after = facts.clone();
    after.after_load = None;
    after.gpus = facts.gpus.iter().map(|gpu| gpu_after(gpu, state)).collect();
    lay_over(&mut after.nvml.gpu_count, &state.gpu_count);
    lay_over(&mut after.host.pci_devices, &state.pci_devices);
    lay_over(&mut after.host.kernel_log, &state.kernel_log);
    lay_over(&mut after.host.kernel_modules, &state.kernel_modules);
    lay_over(&mut after.host.device_nodes, &state.device_nodes);
    for (name, service) in &state.services {
        match after.host.services.get_mut(name) {
            Some(before) => lay_over(before, service),
            None => {
                after.host.services.insert(name.clone(), service.clone());
            }
        }
    }
    Some(after)
}

/// A value that was not attempted, or that could not be read before either, leaves the first
/// reading as it is.
fn lay_over<T: Clone + PartialEq>(before: &mut Reading<T>, after: &Reading<T>) {
    let was_attempted = *after != Reading::default();
    match after {
        Reading::Value(_) if before.value().is_some() => before.clone_from(after),
        Reading::NotRead(reason) if was_attempted && before.value().is_some() => {
            *before = Reading::NotRead(reason.clone());
        }
        Reading::NotSupported if before.value().is_some() => {
            *before = Reading::NotRead(NO_LONGER_SUPPORTED.to_owned());
        }
        _ => {}
    }
}

/// A value that was there before and is not supported now is one that was lost.
const NO_LONGER_SUPPORTED: &str = "not supported after the load, though it was read before";

fn gpu_after(gpu: &GpuFacts, state: &NodeState) -> GpuFacts {
    match &state.gpus {
        Reading::Value(gpus) => match gpus.iter().find(|it| is_the_same(it, gpu)) {
            Some(after) => laid_over(gpu, after),
            None => lost(gpu, "NVML does not list it any more"),
        },
        Reading::NotRead(reason) if state.gpus != Reading::default() => GpuFacts {
            calls_hung: vec![format!("the reading after the load ({reason})")],
            ..gpu.clone()
        },
        Reading::NotRead(_) | Reading::NotSupported => gpu.clone(),
    }
}

fn is_the_same(one: &GpuFacts, other: &GpuFacts) -> bool {
    let uuids = one.uuid.value().zip(other.uuid.value());
    let addresses = one.pci_address.value().zip(other.pci_address.value());
    // A UUID decides where both have one.
    uuids.or(addresses).is_some_and(|(one, other)| one == other)
}

fn lost(gpu: &GpuFacts, how: &str) -> GpuFacts {
    GpuFacts {
        lost: Some(how.to_owned()),
        ..gpu.clone()
    }
}

/// Field by field in the serialized form, so that a new field is laid over without a line here.
fn laid_over(before: &GpuFacts, after: &GpuFacts) -> GpuFacts {
    let not_attempted = serde_json::to_value(Reading::<()>::default()).unwrap_or_default();
    let (Ok(Value::Object(mut fields)), Ok(Value::Object(again))) =
        (serde_json::to_value(before), serde_json::to_value(after))
    else {
        return before.clone();
    };
    for (name, reading) in again {
        let is_value = |it: &Value| it.get("value").is_some();
        let was_read = fields.get(&name).is_some_and(is_value);
        let is_identity = IDENTITY.contains(&name.as_str()) && was_read && !is_value(&reading);
        if TRANSIENT.contains(&name.as_str()) || is_identity || reading == not_attempted {
            continue;
        }
        let is_reading =
            is_value(&reading) || reading == "not_supported" || reading.get("not_read").is_some();
        if !is_reading {
            fields.insert(name, reading);
        } else if was_read && reading == "not_supported" {
            fields.insert(name, serde_json::json!({"not_read": NO_LONGER_SUPPORTED}));
        } else if was_read {
            fields.insert(name, reading);
        }
    }
    let mut laid: GpuFacts =
        serde_json::from_value(Value::Object(fields)).unwrap_or_else(|_| before.clone());
    // Of these a part is the load's own doing.
    if let (Reading::Value(power), Some(was)) = (&mut laid.power, before.power.value()) {
        power.draw_mw = was.draw_mw;
    }
    if let (Reading::Value(memory), Some(was)) = (&mut laid.memory, before.memory.value()) {
        memory.used_bytes = was.used_bytes;
        memory.free_bytes = was.free_bytes;
    }
    // An idle GPU lowers the generation; under load pcie_link has its own samples.
    if let (Reading::Value(link), Some(was)) = (&mut laid.pcie, before.pcie.value()) {
        link.current_generation = was.current_generation;
    }
    laid
}

/// The outcome of the first reading, or that of the second where it is worse: it then carries
/// "after the load".
pub(crate) fn worse_of(before: Judgement, after: Option<Judgement>) -> Judgement {
    let Some(after) = after else {
        return before;
    };
    let before = before.unwrap_or_else(|outcome| outcome);
    let mut after = after.unwrap_or_else(|outcome| outcome);
    let objects = matches!(
        after.verdict,
        Verdict::Warn | Verdict::Error | Verdict::Fail
    );
    let has_more_evidence =
        after.verdict == before.verdict && after.evidence.len() > before.evidence.len();
    // An error does not hide what failed before, and a skip before is no pass.
    if objects && (severity(&after) > severity(&before) || has_more_evidence) {
        after.summary = format!("after the load: {}", after.summary);
        for evidence in &mut after.evidence {
            if !before.evidence.iter().any(|it| it.line == evidence.line) {
                evidence.summary = format!("after the load: {}", evidence.summary);
            }
        }
        return Ok(after);
    }
    Ok(before)
}

fn severity(outcome: &Outcome) -> u8 {
    match outcome.verdict {
        Verdict::Pass | Verdict::Skip => 0,
        Verdict::Warn => 1,
        Verdict::Error => 2,
        Verdict::Fail => 3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{KernelLogRecord, MemoryUse, RecoveryAction, RepairStatus, Temperature};
    use crate::findings::Finding;
    use crate::level::Level;
    use crate::test_machine::burned_node;

    fn state_of(facts: &Facts) -> NodeState {
        NodeState {
            gpu_count: facts.nvml.gpu_count.clone(),
            gpus: Reading::Value(facts.gpus.clone()),
            pci_devices: facts.host.pci_devices.clone(),
            kernel_log: facts.host.kernel_log.clone(),
            kernel_modules: facts.host.kernel_modules.clone(),
            device_nodes: facts.host.device_nodes.clone(),
            services: facts.host.services.clone(),
        }
    }

    fn objections(change: impl FnOnce(&mut NodeState)) -> Vec<Finding> {
        let mut facts = burned_node();
        let mut state = state_of(&facts);
        change(&mut state);
        facts.after_load = Some(Box::new(state));
        let profile = crate::parse_profile("{}", "test profile").expect("an empty profile");
        crate::judge(&facts, &profile, Level::Extended)
            .into_iter()
            .filter(|it| !matches!(it.verdict, Verdict::Pass | Verdict::Skip))
            .collect()
    }

    fn in_short(findings: &[Finding]) -> Vec<String> {
        let findings = findings.iter();
        findings
            .map(|it| {
                assert!(it.summary.starts_with("after the load: "), "{}", it.summary);
                format!("{} {}", it.verdict, it.check)
            })
            .collect()
    }

    fn gpu(state: &mut NodeState) -> &mut GpuFacts {
        match &mut state.gpus {
            Reading::Value(gpus) => &mut gpus[2],
            other => panic!("the state has GPUs, not {other:?}"),
        }
    }

    #[test]
    fn the_same_state_after_the_load_changes_nothing() {
        assert_eq!(objections(|_| {}), []);
        // What a load warms up and what was not read again is no reason either.
        assert_eq!(objections(|state| *state = NodeState::default()), []);
        let warm = objections(|state| {
            let gpu = gpu(state);
            gpu.temperature = Reading::Value(Temperature {
                gpu_c: 80,
                tlimit_c: Some(7),
                ..Temperature::default()
            });
            gpu.clocks_event_reasons = Reading::Value(crate::facts::ClocksEventReasons(0x4));
            if let Reading::Value(memory) = &mut gpu.memory {
                memory.used_bytes = 1 << 30;
            }
        });
        assert_eq!(warm, []);
    }

    /// One broken thing after the load, and the one check that reports it.
    #[test]
    fn every_check_judges_what_the_load_left() {
        type Change = fn(&mut GpuFacts);
        let cases: [(&str, Change); 12] = [
            ("fail recovery_action", |gpu| {
                gpu.recovery_action = Reading::Value(RecoveryAction::GpuReset);
            }),
            ("fail row_remapping", |gpu| {
                if let Reading::Value(rows) = &mut gpu.row_remapping {
                    rows.pending = true;
                }
            }),
            ("fail memory_repair", |gpu| {
                gpu.repair_status = Reading::Value(RepairStatus {
                    channel_repair_pending: true,
                    tpc_repair_pending: false,
                });
            }),
            ("fail fabric_state", |gpu| {
                if let Reading::Value(fabric) = &mut gpu.fabric {
                    "in_progress".clone_into(&mut fabric.state);
                }
            }),
            ("error fabric_state", |gpu| {
                gpu.fabric = Reading::NotSupported;
            }),
            ("fail persistence_mode", |gpu| {
                gpu.persistence_mode = Reading::Value(false);
            }),
            ("fail inforom", |gpu| {
                gpu.inforom_valid = Reading::Value(false);
            }),
            ("fail nvlink_state", |gpu| {
                if let Reading::Value(links) = &mut gpu.nvlinks {
                    links[3].active = false;
                }
            }),
            ("fail pcie_link", |gpu| {
                if let Reading::Value(link) = &mut gpu.pcie {
                    link.current_width = 8;
                }
            }),
            ("fail ecc_errors", |gpu| {
                if let Reading::Value(errors) = &mut gpu.ecc_volatile {
                    errors.total_uncorrectable = Some(1);
                }
            }),
            ("error row_remapping", |gpu| {
                gpu.row_remapping = Reading::NotRead("no answer".to_owned());
            }),
            ("fail gpu_memory", |gpu| {
                if let Reading::Value(MemoryUse { total_bytes, .. }) = &mut gpu.memory {
                    *total_bytes /= 2;
                }
            }),
        ];
        for (expected, change) in cases {
            let found = objections(|state| change(gpu(state)));
            assert!(
                in_short(&found).contains(&expected.to_owned()),
                "{expected}: {found:#?}"
            );
            assert!(found.len() <= 2, "{expected}: {found:#?}");
        }
    }

    #[test]
    fn a_gpu_that_the_load_lost_is_one_finding() {
        let found = objections(|state| {
            gpu(state).lost = Some("nvmlDeviceGetName returned NVML_ERROR_GPU_IS_LOST".to_owned());
        });
        assert_eq!(in_short(&found), ["fail gpu_reachable"]);
        // NVML lists one less, and the bus has one less.
        let found = objections(|state| {
            if let Reading::Value(gpus) = &mut state.gpus {
                gpus.remove(2);
            }
            state.gpu_count = Reading::Value(7);
        });
        assert_eq!(in_short(&found), ["fail gpu_reachable"]);
        let found = objections(|state| {
            state.gpus = Reading::NotRead("killed after 5 s in nvmlInit".to_owned());
        });
        assert!(
            found.iter().all(|it| it.check == "gpu_reachable"),
            "{found:#?}"
        );
        assert_eq!(found.len(), 8);
    }

    #[test]
    fn messages_and_bus_errors_that_came_during_the_load_count() {
        let found = objections(|state| {
            if let Reading::Value(log) = &mut state.kernel_log {
                log.records.push(KernelLogRecord {
                    age_s: Some(1.0),
                    at_s: Some(86_399.0),
                    repeats: 0,
                    text: "nvidia-nvswitch0: SXid (PCI:0000:80:00.0): 20034, Fatal, Link 30 LTSSM Fault Up".to_owned(),
                });
            }
        });
        assert_eq!(in_short(&found), ["fail kernel_log_xid"]);
        let found = objections(|state| {
            if let Reading::Value(devices) = &mut state.pci_devices {
                devices[2].aer_fatal = Some(1);
            }
        });
        assert_eq!(in_short(&found), ["fail kernel_log_pcie"]);
    }

    #[test]
    fn facts_with_a_second_reading_are_read_back() {
        let mut facts = burned_node();
        facts.after_load = Some(Box::new(state_of(&facts)));
        let text = serde_json::to_vec(&facts).expect("JSON");
        assert_eq!(Facts::from_json(&text).expect("read back"), facts);
        let anonymous = facts.anonymized().expect("anonymous facts");
        assert!(anonymous.after_load.is_some());
    }
}
