//! Which GPUs are this runner's, and a judgement of those alone.
//!
//! Several runners may share a machine, each with GPUs of its own. A fault of another runner's GPU
//! is not this one's.

use anyhow::bail;

use validator_core::facts::{Facts, GpuFacts, Reading};
use validator_core::findings::{Finding, Run, Subject, Verdict};
use validator_core::kernel_log_events::without_gpus;
use validator_core::level::Level;
use validator_core::profile::Profile;
use validator_core::queries::{counted, in_container};

const CUDA_VARIABLE: &str = "CUDA_VISIBLE_DEVICES";
const NVIDIA_VARIABLE: &str = "NVIDIA_VISIBLE_DEVICES";

/// The sources of the runner's GPUs; the first that names any wins.
#[derive(Clone, Debug, Default)]
pub(crate) struct Assignment {
    /// UUIDs or PCI addresses, from the command line.
    pub(crate) named: Vec<String>,
    pub(crate) cuda_visible_devices: Option<String>,
    pub(crate) nvidia_visible_devices: Option<String>,
}

/// The GPUs of this runner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AssignedGpus {
    /// UUIDs of the GPUs; `None` for all GPUs of the machine.
    pub(crate) gpus: Option<Vec<String>>,
    /// UUIDs of MIG devices, where those were named instead of whole GPUs.
    mig_devices: Vec<String>,
    /// The source, for a person: `CUDA_VISIBLE_DEVICES`.
    source: &'static str,
    /// By numbers, which mean other GPUs when one is missing.
    by_number: bool,
    /// Why what was named could not be found among the GPUs that are here. The whole machine is
    /// judged then, and is no pass.
    pub(crate) trouble: Option<String>,
}

impl Assignment {
    /// The environment's value, after named ones.
    pub(crate) fn from_environment(named: &[String]) -> Self {
        Self {
            named: named.to_vec(),
            cuda_visible_devices: std::env::var(CUDA_VARIABLE).ok(),
            nvidia_visible_devices: std::env::var(NVIDIA_VARIABLE).ok(),
        }
    }

    /// Looks the names up among the GPUs of `facts`. An error is a runner that was given no GPU at
    /// all.
    pub(crate) fn resolve(&self, facts: &Facts) -> anyhow::Result<AssignedGpus> {
        if !self.named.is_empty() {
            return Ok(by_name(&self.named, facts));
        }
        if let Some(value) = &self.cuda_visible_devices {
            if ["", "-1", "NoDevFiles"].contains(&value.trim()) {
                bail!(
                    "{CUDA_VARIABLE} is `{value}`: this runner was given no GPU, so there is nothing to validate"
                );
            }
            return Ok(by_cuda(value, facts));
        }
        let Some(value) = self.nvidia_visible_devices.as_deref().map(str::trim) else {
            return Ok(AssignedGpus::default());
        };
        match value {
            "" | "all" => Ok(AssignedGpus::default()),
            "none" | "void" => bail!(
                "{NVIDIA_VARIABLE} is `{value}`: this runner was given no GPU, so there is nothing to validate"
            ),
            // The container runtime has followed the variable already: what is seen is what was
            // given.
            _ if in_container(facts) => Ok(AssignedGpus::default()),
            list => Ok(by_nvml_number(list, facts)),
        }
    }
}

/// GPUs by UUID or PCI address, MIG devices by UUID.
fn by_name(names: &[String], facts: &Facts) -> AssignedGpus {
    collect("--gpu", names.iter().map(String::as_str), |name, _| {
        find(name, facts)
    })
}

/// CUDA itself reports what its variable leaves: its numbers are its own.
fn by_cuda(value: &str, facts: &Facts) -> AssignedGpus {
    let by_number = value
        .split(',')
        .any(|it| it.trim().bytes().all(|b| b.is_ascii_digit()));
    let wanted = value.split(',').count();
    let offered = facts
        .cuda
        .devices
        .value()
        .filter(|it| it.len() == wanted && !facts.cuda.first_gpu_only);
    let Some(offered) = offered else {
        return AssignedGpus {
            source: CUDA_VARIABLE,
            trouble: Some(format!(
                "{CUDA_VARIABLE} is `{value}`, and CUDA does not offer what it names"
            )),
            ..AssignedGpus::default()
        };
    };
    let mut assigned = collect(
        CUDA_VARIABLE,
        offered.iter().map(|it| it.uuid.as_str()),
        |uuid, _| find(uuid, facts),
    );
    assigned.by_number = by_number;
    assigned
}

/// The container toolkit's numbers are NVML's, as is the order of the facts.
fn by_nvml_number(list: &str, facts: &Facts) -> AssignedGpus {
    let all_are_listed = facts
        .nvml
        .gpu_count
        .value()
        .is_some_and(|it| *it as usize == facts.gpus.len());
    collect(
        NVIDIA_VARIABLE,
        list.split(',').map(str::trim),
        |name, by_number| {
            let (gpu, instance) = name.split_once(':').unwrap_or((name, ""));
            let Ok(number) = gpu.parse::<usize>() else {
                return find(name, facts);
            };
            *by_number = true;
            let gpu = facts.gpus.get(number).filter(|_| all_are_listed)?;
            if instance.is_empty() {
                return Some((gpu, None));
            }
            let device = gpu
                .mig_devices
                .value()?
                .get(instance.parse::<usize>().ok()?)?;
            Some((gpu, Some(device.uuid.clone())))
        },
    )
}

type Found<'a> = Option<(&'a GpuFacts, Option<String>)>;

fn collect<'a, 'n>(
    source: &'static str,
    names: impl Iterator<Item = &'n str>,
    find: impl Fn(&str, &mut bool) -> Found<'a>,
) -> AssignedGpus {
    let mut assigned = AssignedGpus {
        source,
        ..AssignedGpus::default()
    };
    let mut gpus = Vec::new();
    for name in names {
        let found = find(name, &mut assigned.by_number)
            .and_then(|(gpu, device)| Some((gpu.uuid.value()?.clone(), device)));
        let Some((uuid, device)) = found else {
            assigned.trouble = Some(format!(
                "{name} was given to this runner by {source}, and no such GPU was found"
            ));
            return assigned;
        };
        if !gpus.contains(&uuid) {
            gpus.push(uuid);
        }
        assigned.mig_devices.extend(device);
    }
    assigned.gpus = Some(gpus);
    assigned
}

fn find<'a>(name: &str, facts: &'a Facts) -> Found<'a> {
    let lower = name.to_lowercase();
    facts.gpus.iter().find_map(|gpu| {
        let is_uuid = |uuid: &String| uuid.eq_ignore_ascii_case(name);
        let is_address = |address: &String| {
            *address == lower || address.strip_prefix("0000:") == Some(lower.as_str())
        };
        if gpu.uuid.value().is_some_and(is_uuid) || gpu.pci_address.value().is_some_and(is_address)
        {
            return Some((gpu, None));
        }
        let device = gpu
            .mig_devices
            .value()?
            .iter()
            .find(|it| is_uuid(&it.uuid))?;
        Some((gpu, Some(device.uuid.clone())))
    })
}

impl AssignedGpus {
    /// These GPUs, by UUID; `None` for all of the machine.
    pub(crate) fn whole(gpus: Option<Vec<String>>) -> Self {
        Self {
            gpus,
            ..Self::default()
        }
    }

    /// The machine's facts with the other runners' GPUs left out, with their places on the bus and
    /// their lines of the kernel log.
    pub(crate) fn narrowed(&self, facts: &Facts) -> Facts {
        let mut narrowed = facts.clone();
        let Some(own) = &self.gpus else {
            return narrowed;
        };
        let is_own = |gpu: &GpuFacts| gpu.uuid.value().is_some_and(|uuid| own.contains(uuid));
        let (mut gpus, others): (Vec<_>, Vec<_>) = narrowed.gpus.into_iter().partition(is_own);
        if !self.mig_devices.is_empty() {
            for gpu in &mut gpus {
                if let Reading::Value(devices) = &mut gpu.mig_devices {
                    devices.retain(|it| self.mig_devices.contains(&it.uuid));
                }
            }
        }
        narrowed.gpus = gpus;
        let own_addresses: Vec<String> = narrowed
            .gpus
            .iter()
            .filter_map(|it| it.pci_address.value().cloned())
            .collect();
        let is_own = |address: &String| own_addresses.contains(address);
        if let Reading::Value(devices) = &mut narrowed.host.pci_devices {
            devices.retain(|it| !it.is_gpu() || is_own(&it.address));
        }
        if let Reading::Value(modules) = &mut narrowed.host.kernel_modules {
            modules.nvidia_gpus.retain(|address, _| is_own(address));
        }
        let others = others.iter().filter_map(|it| it.pci_address.value());
        let on_bus = facts.host.pci_devices.value().into_iter().flatten();
        let on_bus = on_bus.filter(|it| it.is_gpu()).map(|it| &it.address);
        let addresses: Vec<&str> = others
            .chain(on_bus)
            .filter(|it| !is_own(it))
            .map(String::as_str)
            .collect();
        if let Reading::Value(log) = &mut narrowed.host.kernel_log {
            log.records = without_gpus(std::mem::take(&mut log.records), &addresses);
        }
        narrowed
    }

    /// Judges the machine for this runner.
    ///
    /// Everything is judged as for the whole machine, except findings on other runners' GPUs alone.
    pub(crate) fn judged(
        &self,
        mut facts: Facts,
        profile: &Profile,
        profile_name: &str,
        level: Level,
    ) -> Run {
        if let (Some(trouble), None) = (&self.trouble, &facts.interrupted) {
            facts.interrupted = Some(trouble.clone());
        }
        let Some(own) = &self.gpus else {
            return Run::judged(facts, profile, profile_name, level);
        };
        let mut profile = profile.clone();
        // Hiding the others' GPUs is what the variable is for here.
        profile.environment.allowed.push(CUDA_VARIABLE.to_owned());
        let narrowed = validator_core::judge(&self.narrowed(&facts), &profile, level);
        let mut run = Run::judged(facts, &profile, profile_name, level);
        let is_own = |finding: &Finding| match &finding.subject {
            Subject::Host | Subject::Environment(_) => true,
            Subject::Gpu(gpu) => gpu.uuid.as_ref().is_some_and(|uuid| own.contains(uuid)),
        };
        run.findings.retain(is_own);
        for finding in run
            .findings
            .iter_mut()
            .filter(|it| it.subject == Subject::Host)
        {
            let check = finding.check.as_str();
            if check == GPU_COUNT && !self.by_number {
                *finding = not_this_runners(finding, own.len(), self.source);
            } else if OF_EACH_GPU.contains(&check)
                || (check == CUDA_VARIABLE_CHECK && self.is_by_cuda_uuid())
            {
                let own = narrowed
                    .iter()
                    .find(|it| it.check == check && it.subject == Subject::Host);
                if let Some(own) = own {
                    finding.clone_from(own);
                }
            }
        }
        run
    }

    fn is_by_cuda_uuid(&self) -> bool {
        self.source == CUDA_VARIABLE && !self.by_number
    }

    /// For messages: `2 GPUs (by CUDA_VISIBLE_DEVICES)`.
    pub(crate) fn in_words(&self) -> String {
        match &self.gpus {
            None => "all GPUs of the machine".to_owned(),
            Some(gpus) => format!("{} (by {})", counted(gpus.len(), "GPU"), self.source),
        }
    }
}

const GPU_COUNT: &str = "gpu_count";
const CUDA_VARIABLE_CHECK: &str = "cuda_visible_devices";
/// Checks of the host that look at GPUs one by one; any other check holds for every runner of the
/// machine.
const OF_EACH_GPU: [&str; 7] = [
    "cuda_toolkits",
    "device_nodes",
    "gpu_architecture_supported",
    "gpus_uniform",
    "kernel_log_pcie",
    "kernel_log_xid",
    "vbios_uniform",
];

/// A runner whose GPUs are named by UUID and were found does not care how many others there are. By
/// numbers it does: they name other GPUs when one is missing.
fn not_this_runners(finding: &Finding, gpus: usize, source: &str) -> Finding {
    Finding {
        verdict: Verdict::Skip,
        summary: format!(
            "this runner has {} by {source}, which were found; how many the machine has is not its matter",
            counted(gpus, "GPU")
        ),
        expected: None,
        observed: None,
        remedy: None,
        recommended_action: None,
        cause: None,
        evidence: Vec::new(),
        overridden: None,
        busy: false,
        ..finding.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use validator_core::facts::KernelLogRecord;
    use validator_core::test_machine::healthy_node;

    fn uuid(facts: &Facts, number: usize) -> String {
        facts.gpus[number].uuid.value().cloned().expect("healthy")
    }

    fn resolved(assignment: &Assignment, facts: &Facts) -> AssignedGpus {
        assignment.resolve(facts).expect("there are GPUs")
    }

    fn by_nvidia(value: &str) -> Assignment {
        Assignment {
            nvidia_visible_devices: Some(value.to_owned()),
            ..Assignment::default()
        }
    }

    #[test]
    fn nobody_says_anything_means_all() {
        let facts = healthy_node();
        for assignment in [Assignment::default(), by_nvidia("all"), by_nvidia("")] {
            assert_eq!(resolved(&assignment, &facts), AssignedGpus::default());
        }
    }

    #[test]
    fn numbers_are_nvmls_where_the_variable_is_nvidias() {
        let facts = healthy_node();
        let assigned = resolved(&by_nvidia("2,5"), &facts);
        assert_eq!(assigned.gpus, Some(vec![uuid(&facts, 2), uuid(&facts, 5)]));
        assert!(assigned.by_number);
        let named = resolved(&by_nvidia(&uuid(&facts, 3)), &facts);
        assert_eq!(named.gpus, Some(vec![uuid(&facts, 3)]));
        assert!(!named.by_number);
        assert!(resolved(&by_nvidia("8"), &facts).trouble.is_some());
        // One GPU was not listed, so that a number may mean another.
        let mut cut_short = facts.clone();
        cut_short.gpus.truncate(7);
        assert!(resolved(&by_nvidia("2"), &cut_short).trouble.is_some());
    }

    #[test]
    fn in_a_container_what_is_seen_is_what_was_given() {
        let mut facts = healthy_node();
        facts.host.in_container = Reading::Value(true);
        assert_eq!(resolved(&by_nvidia("7"), &facts).gpus, None);
    }

    #[test]
    fn cuda_says_what_its_variable_means() {
        let mut facts = healthy_node();
        facts.cuda.first_gpu_only = false;
        let offered: Vec<_> = facts
            .cuda
            .devices
            .value()
            .cloned()
            .expect("healthy")
            .drain(4..5)
            .collect();
        let name = offered[0].uuid.clone();
        facts.cuda.devices = Reading::Value(offered);
        let by_cuda = |value: &str| Assignment {
            cuda_visible_devices: Some(value.to_owned()),
            // CUDA's variable wins.
            nvidia_visible_devices: Some("0".to_owned()),
            ..Assignment::default()
        };
        let assigned = resolved(&by_cuda("0"), &facts);
        assert_eq!(
            (assigned.gpus, assigned.by_number),
            (Some(vec![name.clone()]), true)
        );
        assert!(!resolved(&by_cuda(&name), &facts).by_number);
        // It names two, and CUDA offers one.
        assert!(resolved(&by_cuda("0,1"), &facts).trouble.is_some());
        for nothing in ["", "-1", "NoDevFiles"] {
            assert!(by_cuda(nothing).resolve(&facts).is_err(), "{nothing}");
        }
    }

    #[test]
    fn only_the_others_gpus_are_left_out() {
        let mut facts = healthy_node();
        let address = |facts: &Facts, number: usize| {
            facts.gpus[number]
                .pci_address
                .value()
                .cloned()
                .expect("healthy")
        };
        let message = |address: &str| KernelLogRecord {
            repeats: 0,
            age_s: Some(1.0),
            at_s: None,
            text: format!(
                "NVRM: Xid (PCI:{}): 79, GPU has fallen off the bus.",
                address.trim_end_matches(".0")
            ),
        };
        let (own, other) = (address(&facts, 2), address(&facts, 0));
        if let Reading::Value(log) = &mut facts.host.kernel_log {
            log.records = vec![message(&own), message(&other)];
        }
        let assigned = AssignedGpus::whole(Some(vec![uuid(&facts, 2)]));
        let narrowed = assigned.narrowed(&facts);
        assert_eq!(narrowed.gpus, [facts.gpus[2].clone()]);
        let log = narrowed.host.kernel_log.value().expect("read");
        assert_eq!(log.records, [message(&own)]);
        let devices = narrowed.host.pci_devices.value().expect("read");
        assert!(
            devices
                .iter()
                .filter(|it| it.is_gpu())
                .all(|it| it.address == own)
        );
        assert_eq!(AssignedGpus::default().narrowed(&facts), facts);
    }

    #[test]
    fn what_was_not_found_is_no_pass() {
        let facts = healthy_node();
        let missing = AssignedGpus {
            trouble: Some("GPU-x is gone".to_owned()),
            ..AssignedGpus::default()
        };
        let run = missing.judged(facts, &Profile::default(), "p", Level::Quick);
        assert_eq!(run.incomplete.as_deref(), Some("GPU-x is gone"));
        assert_eq!(
            run.exit_status(),
            validator_core::findings::ExitStatus::NotJudged
        );
    }
}
