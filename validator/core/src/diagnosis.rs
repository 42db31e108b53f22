//! The diagnosis of a run: root causes ranked, each with its evidence, its GPUs and one recommended
//! action.
//!
//! Findings are evidence. [`diagnose`] groups them into root causes and folds consequences into the
//! cause that explains them: a GPU that fell off the bus also fails `gpu_count`, ends the burn and
//! leaves checks without values, and is one cause. Pure: the same run gives the same diagnosis.
//! Verdicts do not depend on it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use schemars::JsonSchema;
use serde::Serialize;

use crate::facts::{Facts, GpuFacts};
use crate::findings::{Evidence, Finding, GpuSubject, Run, Subject, Verdict};

pub use crate::cause::{CauseKind, RecommendedAction};

/// A GPU of a root cause.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, JsonSchema)]
pub struct CauseGpu {
    /// NVML's index at the time of the run; `None` for a GPU that NVML does not list.
    pub index: Option<usize>,
    pub pci_address: Option<String>,
    pub serial: Option<String>,
    pub uuid: Option<String>,
    pub name: Option<String>,
}

impl CauseGpu {
    pub(crate) fn of(gpu: &GpuFacts, index: usize) -> Self {
        Self {
            index: Some(index),
            pci_address: gpu.pci_address.value().cloned(),
            serial: gpu.serial.value().cloned(),
            uuid: gpu.uuid.value().cloned(),
            name: gpu.name.value().cloned(),
        }
    }

    fn unlisted(subject: &GpuSubject) -> Self {
        Self {
            index: None,
            pci_address: subject.pci_address.clone(),
            serial: None,
            uuid: subject.uuid.clone(),
            name: subject.name.clone(),
        }
    }
}

/// `GPU 0 (0000:53:00.0)`.
impl std::fmt::Display for CauseGpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let place = self.pci_address.as_ref().or(self.uuid.as_ref());
        match (self.index, place) {
            (Some(index), Some(place)) => write!(f, "GPU {index} ({place})"),
            (Some(index), None) => write!(f, "GPU {index}"),
            (None, Some(place)) => write!(f, "GPU at {place}"),
            (None, None) => f.write_str("a GPU without a readable address"),
        }
    }
}

/// A finding of a root cause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct CauseFinding {
    pub check: String,
    pub subject: Subject,
    pub verdict: Verdict,
    pub summary: String,
}

/// One root cause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct RootCause {
    pub kind: CauseKind,
    /// The worst verdict of its evidence: `fail`, `error` or `warn`.
    pub verdict: Verdict,
    /// One sentence: the summary of the finding that names it best.
    pub summary: String,
    /// The GPUs that have it; empty for a cause of the host.
    pub gpus: Vec<CauseGpu>,
    pub recommended_action: RecommendedAction,
    /// What to do in detail, from the finding that names the cause.
    pub remedy: Option<String>,
    /// Findings that show the cause, the first one first.
    pub evidence: Vec<CauseFinding>,
    /// Lines of the kernel log that show it.
    pub log_lines: Vec<String>,
    /// Findings that follow from the cause.
    pub consequences: Vec<CauseFinding>,
}

/// The kind of cause that a failure of a check shows, and the action where the check itself
/// recommends none.
///
/// One row a check; a test holds the table against the list of checks.
const CAUSES_OF_CHECKS: &[(&str, CauseKind, RecommendedAction)] = {
    use CauseKind as K;
    use RecommendedAction as A;
    &[
        ("allocation_balance", K::Performance, A::Drain),
        ("allocation_isolation", K::HostSoftware, A::FixSoftware),
        ("allocation_layouts", K::HostSoftware, A::FixSoftware),
        ("allocation_leaks", K::LoadFailed, A::Reset),
        ("allocation_oversubscription", K::LoadFailed, A::Drain),
        ("allocation_scaling", K::Performance, A::Drain),
        ("allocation_success", K::LoadFailed, A::Reset),
        ("bar1_memory", K::Pcie, A::FixSoftware),
        ("burn_completed", K::LoadFailed, A::Reset),
        ("burn_errors", K::GpuHardware, A::Reset),
        ("burn_power", K::PowerAndThermal, A::Drain),
        ("burn_temperature", K::PowerAndThermal, A::Drain),
        ("burn_throttling", K::PowerAndThermal, A::Drain),
        ("clocks", K::GpuConfiguration, A::FixSoftware),
        ("compute_mode", K::GpuConfiguration, A::FixSoftware),
        ("container_limits", K::HostSoftware, A::FixSoftware),
        ("container_runtime", K::HostSoftware, A::FixSoftware),
        ("cuda_compat_package", K::HostSoftware, A::FixSoftware),
        ("cuda_driver_library", K::Driver, A::FixSoftware),
        ("cuda_driver_version", K::HostSoftware, A::FixSoftware),
        ("cuda_kernel", K::LoadFailed, A::Reset),
        ("cuda_toolkits", K::HostSoftware, A::FixSoftware),
        ("cuda_visible_devices", K::HostSoftware, A::FixSoftware),
        ("denylisted_driver_absent", K::HostSoftware, A::FixSoftware),
        ("device_nodes", K::HostSoftware, A::FixSoftware),
        ("device_plugin_allocatable", K::Kubernetes, A::FixSoftware),
        ("device_plugin_assignments", K::Kubernetes, A::FixSoftware),
        ("device_plugin_devices", K::Kubernetes, A::FixSoftware),
        ("device_plugin_pods", K::Kubernetes, A::FixSoftware),
        ("device_plugin_registered", K::Kubernetes, A::FixSoftware),
        ("driver_components_match", K::Driver, A::FixSoftware),
        ("driver_version", K::HostSoftware, A::FixSoftware),
        ("cupy_cuda", K::HostSoftware, A::FixSoftware),
        ("jax_cuda", K::HostSoftware, A::FixSoftware),
        ("library_resolution", K::HostSoftware, A::FixSoftware),
        ("memory_pattern", K::GpuMemory, A::Rma),
        ("python_environment", K::HostSoftware, A::FixSoftware),
        ("tensorflow_cuda", K::HostSoftware, A::FixSoftware),
        ("toolkit_on_path", K::HostSoftware, A::FixSoftware),
        ("torch_cuda", K::HostSoftware, A::FixSoftware),
        ("torch_gemm", K::WrongResults, A::FixSoftware),
        ("ecc_errors", K::GpuMemory, A::Reset),
        ("ecc_mode", K::GpuConfiguration, A::FixSoftware),
        ("fabric_manager", K::Nvlink, A::FixSoftware),
        ("fabric_state", K::Nvlink, A::Reboot),
        ("foreign_processes", K::InUse, A::Wait),
        ("gemm_numerics", K::WrongResults, A::Rma),
        ("gemm_stability", K::Performance, A::Drain),
        ("gemm_throughput", K::Performance, A::Drain),
        ("gpu_architecture_supported", K::Driver, A::FixSoftware),
        ("gpu_count", K::GpuLost, A::Reboot),
        ("gpu_memory", K::GpuHardware, A::Drain),
        ("gpu_model", K::HostSoftware, A::FixSoftware),
        ("gpu_pod_runs", K::Kubernetes, A::FixSoftware),
        ("gpu_reachable", K::GpuLost, A::Reboot),
        ("gpus_uniform", K::GpuConfiguration, A::Drain),
        ("idle_memory", K::InUse, A::Wait),
        ("imex_service", K::Nvlink, A::FixSoftware),
        ("image_driver_components", K::Image, A::FixSoftware),
        ("image_files", K::Image, A::FixSoftware),
        ("image_free_disk", K::Image, A::FixSoftware),
        ("image_kernel_modules", K::Image, A::FixSoftware),
        ("image_leftovers", K::Image, A::FixSoftware),
        ("image_services", K::Image, A::FixSoftware),
        ("inforom", K::GpuHardware, A::Rma),
        ("injected_environment", K::HostSoftware, A::FixSoftware),
        ("kernel_log_pcie", K::Pcie, A::Drain),
        ("kernel_log_xid", K::GpuHardware, A::Drain),
        ("kernel_module_flavor", K::Driver, A::FixSoftware),
        ("kernel_module_loaded", K::Driver, A::FixSoftware),
        ("memory_repair", K::GpuMemory, A::Reset),
        ("mig_mode", K::GpuConfiguration, A::Reset),
        ("node_capacity", K::Kubernetes, A::FixSoftware),
        ("node_conditions", K::Kubernetes, A::FixSoftware),
        ("node_labels", K::Kubernetes, A::FixSoftware),
        ("node_taints", K::Kubernetes, A::FixSoftware),
        ("nvlink_errors", K::Nvlink, A::Drain),
        ("nvlink_state", K::Nvlink, A::Reset),
        ("nvml_library", K::Driver, A::FixSoftware),
        ("page_retirement", K::GpuMemory, A::Reset),
        ("pcie_link", K::Pcie, A::Drain),
        ("pcie_replays", K::Pcie, A::Drain),
        ("persistence_daemon", K::HostSoftware, A::FixSoftware),
        ("persistence_mode", K::GpuConfiguration, A::FixSoftware),
        ("power_limit", K::GpuConfiguration, A::FixSoftware),
        ("recovery_action", K::RecoveryRequested, A::Reset),
        ("row_remapping", K::GpuMemory, A::Reset),
        ("run_complete", K::NotRead, A::Wait),
        ("runtime_class", K::Kubernetes, A::FixSoftware),
        ("services", K::HostSoftware, A::FixSoftware),
        ("temperature", K::PowerAndThermal, A::Drain),
        ("throttle_history", K::PowerAndThermal, A::Drain),
        ("throttle_reasons", K::PowerAndThermal, A::Drain),
        ("trend", K::Performance, A::Drain),
        ("vbios_uniform", K::HostSoftware, A::FixSoftware),
    ]
};

/// The kind of a check's failures, and the default of its recommended action.
fn cause_of_check(check: &str) -> (CauseKind, RecommendedAction) {
    CAUSES_OF_CHECKS
        .iter()
        .find(|(id, ..)| *id == check)
        .map_or((CauseKind::NotRead, RecommendedAction::Drain), |row| {
            (row.1, row.2)
        })
}

/// What a finding recommends: what its check states, else the default of the check. `None` for
/// findings that object to nothing.
pub fn recommended_action(
    check: &str,
    verdict: Verdict,
    stated: Option<RecommendedAction>,
    busy: bool,
) -> Option<RecommendedAction> {
    match verdict {
        Verdict::Pass | Verdict::Skip => None,
        _ if busy => Some(RecommendedAction::Wait),
        Verdict::Error => stated.or(Some(RecommendedAction::Drain)),
        Verdict::Fail | Verdict::Warn => stated.or(Some(cause_of_check(check).1)),
    }
}

/// Root causes, the one to act on first: failures before errors before warnings, and by rank within
/// these.
pub fn diagnose(run: &Run) -> Vec<RootCause> {
    let mut causes = merged(signs(run));
    fold_consequences(&mut causes);
    let mut causes = alike_in_several_environments(alike_on_several_gpus(causes));
    causes.sort_by_key(|it| (std::cmp::Reverse(precedence(it.verdict)), it.kind));
    causes
}

/// The action of the first root cause of a run that does not pass; `None` for a run that passes.
pub fn recommended_action_of(run: &Run) -> Option<RecommendedAction> {
    diagnose(run)
        .first()
        .filter(|it| it.verdict != Verdict::Warn)
        .map(|it| it.recommended_action)
}

fn precedence(verdict: Verdict) -> u8 {
    match verdict {
        Verdict::Fail => 3,
        Verdict::Error => 2,
        Verdict::Warn => 1,
        Verdict::Pass | Verdict::Skip => 0,
    }
}

/// Every objection as a cause of its own, parts of a host's finding by the GPU that they name.
fn signs(run: &Run) -> Vec<RootCause> {
    let mut signs = Vec::new();
    for finding in &run.findings {
        if matches!(finding.verdict, Verdict::Pass | Verdict::Skip) {
            continue;
        }
        let lines: Vec<&Evidence> = finding
            .evidence
            .iter()
            .filter(|it| !matches!(it.verdict, Verdict::Pass | Verdict::Skip))
            .collect();
        // A profile may soften the finding; its lines are softened with it.
        let softened = |verdict: Verdict| match (finding.verdict, verdict) {
            (Verdict::Warn, Verdict::Fail) => Verdict::Warn,
            (_, verdict) => verdict,
        };
        for line in &lines {
            signs.push(of_evidence(
                line,
                softened(line.verdict),
                finding,
                &run.facts,
            ));
        }
        let told_by_lines = lines
            .iter()
            .any(|it| precedence(softened(it.verdict)) >= precedence(finding.verdict));
        if !told_by_lines {
            signs.push(of_finding(finding, &run.facts));
        }
    }
    signs
}

fn of_evidence(line: &Evidence, verdict: Verdict, finding: &Finding, facts: &Facts) -> RootCause {
    let gpu = line
        .pci_address
        .as_deref()
        .and_then(|address| gpu_at(address, facts));
    let subject = match gpu.as_ref().and_then(|it| it.index) {
        Some(index) => Subject::Gpu(GpuSubject::of(&facts.gpus[index])),
        None => finding.subject.clone(),
    };
    RootCause {
        kind: line.kind,
        verdict,
        summary: line.summary.clone(),
        gpus: gpu.into_iter().collect(),
        recommended_action: line.recommended_action,
        remedy: finding.remedy.clone(),
        evidence: vec![CauseFinding {
            check: finding.check.clone(),
            subject,
            verdict,
            summary: line.summary.clone(),
        }],
        log_lines: line.line.iter().cloned().collect(),
        consequences: Vec::new(),
    }
}

fn of_finding(finding: &Finding, facts: &Facts) -> RootCause {
    let (kind, default_action) = cause_of_check(&finding.check);
    let kind = match finding.verdict {
        _ if finding.busy => CauseKind::InUse,
        Verdict::Error => CauseKind::NotRead,
        _ => finding.cause.unwrap_or(kind),
    };
    RootCause {
        kind,
        verdict: finding.verdict,
        summary: match &finding.subject {
            Subject::Environment(it) => format!("{it}: {}", finding.summary),
            Subject::Host | Subject::Gpu(_) => finding.summary.clone(),
        },
        gpus: match &finding.subject {
            Subject::Host | Subject::Environment(_) => Vec::new(),
            Subject::Gpu(subject) => vec![gpu_of(subject, facts)],
        },
        recommended_action: finding.recommended_action.unwrap_or(default_action),
        remedy: finding.remedy.clone(),
        evidence: vec![CauseFinding {
            check: finding.check.clone(),
            subject: finding.subject.clone(),
            verdict: finding.verdict,
            summary: finding.summary.clone(),
        }],
        log_lines: Vec::new(),
        consequences: Vec::new(),
    }
}

/// The GPU of a subject with its index and serial number.
pub(crate) fn gpu_of(subject: &GpuSubject, facts: &Facts) -> CauseGpu {
    subject.position_in(facts).map_or_else(
        || CauseGpu::unlisted(subject),
        |index| CauseGpu::of(&facts.gpus[index], index),
    )
}

/// How reports name a subject: `GPU 0 (0000:53:00.0)`, or `host`.
pub(crate) fn name_of(subject: &Subject, facts: &Facts) -> String {
    match subject {
        Subject::Host => "host".to_owned(),
        Subject::Gpu(gpu) => gpu_of(gpu, facts).to_string(),
        Subject::Environment(environment) => environment.to_string(),
    }
}

/// The GPU with this address: as NVML lists it, else as the PCI bus has it; `None` for a switch or
/// a port.
fn gpu_at(address: &str, facts: &Facts) -> Option<CauseGpu> {
    let is_it = |gpu: &GpuFacts| gpu.pci_address.value().is_some_and(|it| it == address);
    let listed = facts.position_of((None, Some(address)), is_it);
    if let Some(index) = listed {
        return Some(CauseGpu::of(&facts.gpus[index], index));
    }
    let devices = facts.host.pci_devices.value();
    let device = devices.and_then(|it| it.iter().find(|device| device.address == address));
    // A GPU that left the bus is in no list; an address that the bus has for something else is no
    // GPU.
    (device.is_none_or(crate::facts::PciDevice::is_gpu)).then(|| CauseGpu {
        pci_address: Some(address.to_owned()),
        ..CauseGpu::default()
    })
}

/// Signs of one kind on one GPU (or on the host) as one cause; the worst sign names it.
fn merged(signs: Vec<RootCause>) -> Vec<RootCause> {
    let mut causes: Vec<RootCause> = Vec::new();
    let mut alike: HashMap<(CauseKind, Vec<CauseGpu>), Vec<usize>> = HashMap::new();
    for sign in signs {
        // Different software of a host needs different remedies: these stay apart, as do Python
        // environments.
        let (one, is_of_gpu) = (&sign.evidence[0], !sign.gpus.is_empty());
        let mergeable = |it: &RootCause| {
            is_of_gpu
                || it.evidence[0].subject == one.subject
                    && (one.subject != Subject::Host || it.evidence[0].check == one.check)
        };
        let alike = alike.entry((sign.kind, sign.gpus.clone())).or_default();
        if let Some(index) = alike.iter().find(|it| mergeable(&causes[**it])) {
            absorb(&mut causes[*index], sign);
        } else {
            alike.push(causes.len());
            causes.push(sign);
        }
    }
    causes
}

fn absorb(cause: &mut RootCause, sign: RootCause) {
    // A line of the kernel log names a cause better than the state that it left.
    let names_it_better = |it: &RootCause| (precedence(it.verdict), !it.log_lines.is_empty());
    if names_it_better(&sign) > names_it_better(cause) {
        cause.summary = sign.summary;
        cause.remedy = sign.remedy;
        cause.evidence.splice(0..0, sign.evidence);
    } else {
        cause.evidence.extend(sign.evidence);
    }
    if precedence(sign.verdict) == precedence(cause.verdict) {
        cause.recommended_action = cause.recommended_action.max(sign.recommended_action);
    } else if precedence(sign.verdict) > precedence(cause.verdict) {
        cause.recommended_action = sign.recommended_action;
    }
    if precedence(sign.verdict) > precedence(cause.verdict) {
        cause.verdict = sign.verdict;
    }
    cause.log_lines.extend(sign.log_lines);
    cause.consequences.extend(sign.consequences);
}

/// Moves every cause that another one explains into that one. Only a failure explains: a warning or
/// an error does not hide a failure.
fn fold_consequences(causes: &mut Vec<RootCause>) {
    let mut order: Vec<usize> = (0..causes.len()).collect();
    order.sort_by_key(|index| (causes[*index].kind, causes[*index].gpus.is_empty()));
    // Of a node with thousands of GPUs not every cause is held against every other one: that of a
    // GPU explains causes of this GPU and of the host.
    let gpu_of = |it: &RootCause| {
        let gpu = it.gpus.first()?;
        Some((gpu.pci_address.clone(), gpu.uuid.clone()))
    };
    let mut by_gpu: HashMap<_, Vec<usize>> = HashMap::new();
    for (place, index) in order.iter().enumerate() {
        by_gpu
            .entry(gpu_of(&causes[*index]))
            .or_default()
            .push(place);
    }
    let mut folded: BTreeSet<usize> = BTreeSet::new();
    for explaining in &order {
        if folded.contains(explaining) || causes[*explaining].verdict != Verdict::Fail {
            continue;
        }
        let gpu = gpu_of(&causes[*explaining]);
        let mut places: Vec<usize> = match gpu {
            Some(_) => [gpu, None]
                .iter()
                .filter_map(|it| by_gpu.get(it))
                .flatten()
                .copied()
                .collect(),
            None => (0..order.len()).collect(),
        };
        places.sort_unstable();
        for other in places.iter().map(|place| &order[*place]) {
            let is_explained = other != explaining
                && !folded.contains(other)
                && explains(&causes[*explaining], &causes[*other]);
            if is_explained {
                folded.insert(*other);
                let consequence = causes[*other].clone();
                fold(&mut causes[*explaining], consequence);
            }
        }
    }
    let mut index = 0;
    causes.retain(|_| {
        index += 1;
        !folded.contains(&(index - 1))
    });
}

fn fold(cause: &mut RootCause, consequence: RootCause) {
    // What the driver requests after an error is evidence on what to do about it.
    if consequence.kind == CauseKind::RecoveryRequested && consequence.verdict == Verdict::Fail {
        cause.recommended_action = cause.recommended_action.max(consequence.recommended_action);
    }
    cause.consequences.extend(consequence.evidence);
    cause.consequences.extend(consequence.consequences);
    cause.log_lines.extend(consequence.log_lines);
}

fn explains(cause: &RootCause, other: &RootCause) -> bool {
    match (cause.gpus.first(), other.gpus.first()) {
        // A cause of the host explains its own kind, and that kind on GPUs.
        (None, None) => {
            cause.kind < other.kind && cause.kind.explains(other.kind)
                || cause.kind == CauseKind::Driver && other.kind == CauseKind::Driver
        }
        (None, Some(_)) => {
            let is_of_the_host = matches!(
                cause.kind,
                CauseKind::Driver | CauseKind::Nvlink | CauseKind::InUse
            );
            is_of_the_host && cause.kind < other.kind && cause.kind.explains(other.kind)
        }
        // A lost GPU explains that the node counts one less; no other cause of a GPU explains one
        // of the host.
        (Some(_), None) => {
            cause.kind == CauseKind::GpuLost
                && (matches!(other.kind, CauseKind::GpuLost | CauseKind::Kubernetes)
                    || other.verdict == Verdict::Error
                    || warns_of_a_lost_gpu(other))
        }
        (Some(gpu), Some(of)) => {
            gpu.pci_address == of.pci_address
                && gpu.uuid == of.uuid
                && cause.kind != other.kind
                && cause.kind.explains(other.kind)
        }
    }
}

/// NVML's calls returned that a GPU is lost, and nothing else: `nvml_library` warns of every call
/// that returned an error.
fn warns_of_a_lost_gpu(cause: &RootCause) -> bool {
    let calls = cause.summary.split_once(": ").map(|(_, calls)| calls);
    cause.verdict == Verdict::Warn
        && cause.evidence.iter().all(|it| it.check == "nvml_library")
        && calls.is_some_and(|it| {
            it.split("; ")
                .all(|call| call.ends_with("ERROR_GPU_IS_LOST"))
        })
}

/// The same cause with the same action on several GPUs, each time with the same checks, as one.
fn alike_on_several_gpus(causes: Vec<RootCause>) -> Vec<RootCause> {
    let checks = |it: &RootCause| -> BTreeSet<(String, Verdict)> {
        let found = it.evidence.iter();
        found.map(|it| (it.check.clone(), it.verdict)).collect()
    };
    let mut alike: Vec<RootCause> = Vec::new();
    let mut of_several = BTreeMap::new();
    for cause in causes {
        let (verdict, action) = (cause.verdict, cause.recommended_action);
        let next = alike.len();
        let index = if cause.gpus.is_empty() {
            next
        } else {
            *of_several
                .entry((cause.kind, verdict, action, checks(&cause)))
                .or_insert(next)
        };
        match alike.get_mut(index) {
            Some(same) => {
                same.gpus.extend(cause.gpus);
                same.evidence.extend(cause.evidence);
                same.log_lines.extend(cause.log_lines);
                same.consequences.extend(cause.consequences);
            }
            None => alike.push(cause),
        }
    }
    alike
}

/// The same findings in several Python environments as one cause.
fn alike_in_several_environments(causes: Vec<RootCause>) -> Vec<RootCause> {
    let said = |it: &RootCause| -> Vec<(String, Verdict, String)> {
        let found = it.evidence.iter();
        found
            .map(|it| (it.check.clone(), it.verdict, it.summary.clone()))
            .collect()
    };
    let is_of_one = |it: &RootCause| matches!(it.evidence[0].subject, Subject::Environment(_));
    let mut alike: Vec<(RootCause, usize)> = Vec::new();
    for cause in causes {
        let same = alike.iter_mut().find(|(it, environments)| {
            // The evidence of the first environment, as further ones follow it.
            let mut first = it.clone();
            first.evidence.truncate(it.evidence.len() / environments);
            is_of_one(it)
                && is_of_one(&cause)
                && it.kind == cause.kind
                && it.remedy == cause.remedy
                && said(&first) == said(&cause)
        });
        match same {
            Some((same, environments)) => {
                let (first, more) = (&same.evidence[0], *environments);
                same.summary = format!("{} and {more} more: {}", first.subject, first.summary);
                *environments += 1;
                same.evidence.extend(cause.evidence);
                same.consequences.extend(cause.consequences);
            }
            None => alike.push((cause, 1)),
        }
    }
    alike.into_iter().map(|(cause, _)| cause).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{KernelLogRecord, Reading, RecoveryAction};
    use crate::level::Level;
    use crate::test_machine::healthy_node;

    fn run_of(facts: Facts) -> Run {
        let profile = crate::parse_profile("{}", "test profile").expect("an empty profile");
        Run::judged(facts, &profile, "test profile", Level::Extended)
    }

    fn log(facts: &mut Facts, text: &str) {
        let Reading::Value(log) = &mut facts.host.kernel_log else {
            panic!("the healthy machine has a kernel log")
        };
        log.records.push(KernelLogRecord {
            repeats: 0,
            age_s: Some(600.0),
            at_s: Some(80_000.0),
            text: text.to_owned(),
        });
    }

    fn in_short(run: &Run) -> Vec<String> {
        let causes = diagnose(run).into_iter();
        causes
            .map(|it| {
                let gpus: Vec<String> = it.gpus.iter().map(ToString::to_string).collect();
                format!(
                    "{} {} {} {}",
                    it.verdict,
                    it.kind.name(),
                    it.recommended_action,
                    gpus.join(",")
                )
                .trim_end()
                .to_owned()
            })
            .collect()
    }

    fn lose(facts: &mut Facts, index: usize) {
        facts.gpus[index] = GpuFacts {
            uuid: facts.gpus[index].uuid.clone(),
            pci_address: facts.gpus[index].pci_address.clone(),
            lost: Some("nvmlDeviceGetName returned NVML_ERROR_GPU_IS_LOST".to_owned()),
            ..GpuFacts::default()
        };
    }

    #[test]
    fn every_check_has_a_cause_and_none_is_invented() {
        let ids: Vec<&str> = crate::checks::ALL.iter().map(|it| it.check.id).collect();
        let rows: Vec<&str> = CAUSES_OF_CHECKS.iter().map(|row| row.0).collect();
        for id in &ids {
            assert_eq!(rows.iter().filter(|it| *it == id).count(), 1, "{id}");
        }
        for row in rows {
            assert!(ids.contains(&row), "{row} is no check");
        }
    }

    #[test]
    fn a_healthy_node_has_no_cause() {
        let run = run_of(healthy_node());
        assert_eq!(diagnose(&run), []);
        assert_eq!(recommended_action_of(&run), None);
    }

    #[test]
    fn names_match_the_serialized_form() {
        for action in RecommendedAction::ALL {
            assert_eq!(serde_json::json!(action), action.name());
        }
        for (.., kind, _) in CAUSES_OF_CHECKS {
            assert_eq!(serde_json::json!(kind), kind.name());
        }
    }

    #[test]
    fn a_lost_gpu_is_one_cause_with_its_line_and_consequences() {
        let mut facts = healthy_node();
        lose(&mut facts, 3);
        facts.load.cuda_kernel.clear();
        log(
            &mut facts,
            "NVRM: Xid (PCI:0000:13:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        );
        let run = run_of(facts);
        let causes = diagnose(&run);
        let first = &causes[0];
        assert_eq!(first.kind, CauseKind::GpuLost, "{:#?}", in_short(&run));
        assert_eq!(first.recommended_action, RecommendedAction::Reboot);
        assert!(first.summary.starts_with("Xid 79 ("), "{}", first.summary);
        assert_eq!(first.gpus.len(), 1);
        assert_eq!(first.gpus[0].to_string(), "GPU 3 (0000:13:00.0)");
        assert_eq!(first.log_lines.len(), 1);
        let checks: Vec<&str> = first.evidence.iter().map(|it| it.check.as_str()).collect();
        assert_eq!(checks, ["kernel_log_xid", "gpu_reachable"]);
        assert_eq!(recommended_action_of(&run), Some(RecommendedAction::Reboot));
    }

    #[test]
    fn calls_that_returned_a_lost_gpu_follow_from_it_and_others_do_not() {
        let causes_with = |trouble: &[&str]| {
            let mut facts = healthy_node();
            lose(&mut facts, 3);
            facts.nvml.probe_trouble = trouble.iter().map(|&it| it.to_owned()).collect();
            diagnose(&run_of(facts))
        };
        let lost = "nvmlDeviceGetHandleByIndex_v2 returned NVML_ERROR_GPU_IS_LOST";
        let causes = causes_with(&[lost, lost]);
        let warns = |it: &RootCause| it.evidence[0].check == "nvml_library";
        assert!(!causes.iter().any(warns), "{causes:#?}");
        assert!(
            causes[0]
                .consequences
                .iter()
                .any(|it| it.check == "nvml_library")
        );
        let other = "nvmlSystemGetDriverVersion returned NVML_ERROR_UNKNOWN";
        assert!(causes_with(&[lost, other]).iter().any(warns));
    }

    #[test]
    fn a_gpu_that_left_the_bus_explains_the_count() {
        let mut facts = healthy_node();
        facts.gpus.remove(3);
        if let Reading::Value(devices) = &mut facts.host.pci_devices {
            devices.retain(|it| it.address != "0000:13:00.0");
        }
        facts.nvml.gpu_count = Reading::Value(7);
        log(
            &mut facts,
            "NVRM: GPU 0000:13:00.0: GPU has fallen off the bus.",
        );
        let run = run_of(facts);
        assert_eq!(
            in_short(&run)[0],
            "fail gpu_lost reboot GPU at 0000:13:00.0",
            "{:#?}",
            in_short(&run)
        );
        let counts = diagnose(&run)[0]
            .consequences
            .iter()
            .filter(|it| it.check == "gpu_count")
            .count();
        assert_eq!(counts, 1);
    }

    #[test]
    fn what_the_driver_requests_raises_the_action_of_the_cause() {
        let mut facts = healthy_node();
        facts.gpus[1].recovery_action = Reading::Value(RecoveryAction::NodeReboot);
        assert_eq!(
            in_short(&run_of(facts.clone())),
            ["fail recovery_requested reboot GPU 1 (0000:11:00.0)"]
        );
        log(
            &mut facts,
            "NVRM: Xid (PCI:0000:11:00): 95, pid=7, name=python3, Uncontained memory error",
        );
        assert_eq!(
            in_short(&run_of(facts)),
            ["fail gpu_memory reboot GPU 1 (0000:11:00.0)"]
        );
    }

    #[test]
    fn the_same_fault_of_several_gpus_is_one_cause_and_two_faults_are_two() {
        let mut facts = healthy_node();
        for gpu in &mut facts.gpus {
            gpu.persistence_mode = Reading::Value(false);
        }
        facts.gpus[5].unrepairable_memory = Reading::Value(true);
        let run = run_of(facts);
        let causes = diagnose(&run);
        assert_eq!(causes.len(), 2, "{:#?}", in_short(&run));
        assert_eq!(
            in_short(&run)[0],
            "fail gpu_memory rma GPU 5 (0000:15:00.0)"
        );
        assert_eq!(causes[1].gpus.len(), 8);
        assert_eq!(causes[1].recommended_action, RecommendedAction::FixSoftware);
    }

    #[test]
    fn every_objection_is_in_exactly_one_cause() {
        let mut facts = healthy_node();
        lose(&mut facts, 3);
        facts.gpus[1].recovery_action = Reading::Value(RecoveryAction::GpuReset);
        facts.gpus[2].temperature = Reading::NotRead("no answer".to_owned());
        log(
            &mut facts,
            "NVRM: Xid (PCI:0000:14:00): 48, DBE (double bit error)",
        );
        let run = run_of(facts);
        let causes = diagnose(&run);
        for finding in &run.findings {
            let expected = !matches!(finding.verdict, Verdict::Pass | Verdict::Skip);
            let named = causes
                .iter()
                .flat_map(|it| it.evidence.iter().chain(&it.consequences))
                .filter(|it| it.check == finding.check)
                .filter(|it| it.subject == finding.subject || finding.subject == Subject::Host)
                .count();
            assert_eq!(usize::from(expected), named.min(1), "{finding:#?}");
        }
    }

    #[test]
    fn without_a_driver_there_is_one_cause() {
        let mut facts = healthy_node();
        crate::test_machine::unload_driver(&mut facts);
        let run = run_of(facts);
        assert_eq!(
            in_short(&run)[0],
            "fail driver fix_software",
            "{:#?}",
            in_short(&run)
        );
        assert_eq!(in_short(&run).len(), 1, "{:#?}", in_short(&run));
    }
}
