//! Which GPUs are this runner's, and a judgement of those alone.
//!
//! Several runners may share a machine, each with GPUs of its own. A fault of another runner's GPU is not this one's.

use anyhow::bail;

use crate::facts::{Facts, GpuFacts};
use crate::findings::{Finding, Run, Subject, Verdict};
use crate::kernel_log::without_gpus;
use crate::level::Level;
use crate::machine::{counted, in_container};
use crate::profile::Profile;

const CUDA_VARIABLE: &str = "CUDA_VISIBLE_DEVICES";
const NVIDIA_VARIABLE: &str = "NVIDIA_VISIBLE_DEVICES";

/// Who may say which GPUs are the runner's, the first that says something first.
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
    /// What said so, for a person: `CUDA_VISIBLE_DEVICES`.
    source: &'static str,
    /// By numbers, which mean other GPUs when one is missing.
    by_number: bool,
    /// Why what was named could not be found among the GPUs that are here. The whole machine is judged then, and is no
    /// pass.
    pub(crate) trouble: Option<String>,
}

impl Assignment {
    /// What the environment says, behind what was named.
    pub(crate) fn from_environment(named: &[String]) -> Self {
        Self {
            named: named.to_vec(),
            cuda_visible_devices: std::env::var(CUDA_VARIABLE).ok(),
            nvidia_visible_devices: std::env::var(NVIDIA_VARIABLE).ok(),
        }
    }

    /// Looks up what is said among the GPUs of `facts`. An error is a runner that was given no GPU at all.
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
            // The container runtime has followed the variable already: what is seen is what was given.
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

/// CUDA itself says what its variable leaves: its numbers are its own.
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
        match found {
            Some((uuid, device)) => {
                if !gpus.contains(&uuid) {
                    gpus.push(uuid);
                }
                assigned.mig_devices.extend(device);
            }
            None => {
                assigned.trouble = Some(format!(
                    "{name} was given to this runner by {source}, and no such GPU was found"
                ));
                return assigned;
            }
        }
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

    /// The machine's facts with the other runners' GPUs left out, with their device nodes and their lines of the kernel
    /// log.
    pub(crate) fn narrowed(&self, facts: &Facts) -> Facts {
        let mut narrowed = facts.clone();
        let Some(own) = &self.gpus else {
            return narrowed;
        };
        let is_own = |gpu: &GpuFacts| gpu.uuid.value().is_some_and(|uuid| own.contains(uuid));
        let (mut gpus, others): (Vec<_>, Vec<_>) = narrowed.gpus.into_iter().partition(is_own);
        if !self.mig_devices.is_empty() {
            for gpu in &mut gpus {
                if let crate::facts::Reading::Value(devices) = &mut gpu.mig_devices {
                    devices.retain(|it| self.mig_devices.contains(&it.uuid));
                }
            }
        }
        narrowed.gpus = gpus;
        let minors: Vec<u32> = others
            .iter()
            .filter_map(|it| it.minor_number.value().copied())
            .collect();
        if let crate::facts::Reading::Value(nodes) = &mut narrowed.host.device_nodes {
            nodes.retain(|node| {
                !minors
                    .iter()
                    .any(|it| node.path == format!("/dev/nvidia{it}"))
            });
        }
        let addresses: Vec<&str> = others
            .iter()
            .filter_map(|it| it.pci_address.value().map(String::as_str))
            .collect();
        if let crate::facts::Reading::Value(log) = &mut narrowed.host.kernel_log {
            log.records = without_gpus(std::mem::take(&mut log.records), &addresses);
        }
        narrowed
    }

    /// Judges the machine for this runner.
    ///
    /// Everything is judged as for the whole machine, except what is said of other runners' GPUs alone.
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
        let narrowed = crate::judge(&self.narrowed(&facts), &profile, level);
        let mut run = Run::judged(facts, &profile, profile_name, level);
        let is_own = |finding: &Finding| match &finding.subject {
            Subject::Host => true,
            Subject::Gpu(gpu) => gpu.uuid.as_ref().is_some_and(|uuid| own.contains(uuid)),
        };
        run.findings.retain(is_own);
        for finding in &mut run.findings {
            if OF_EACH_GPU.contains(&finding.check.as_str())
                && finding.subject == Subject::Host
                && let Some(it) = narrowed
                    .iter()
                    .find(|it| it.check == finding.check && it.subject == Subject::Host)
            {
                finding.clone_from(it);
            }
            if finding.check == GPU_COUNT && !self.by_number {
                *finding = not_this_runners(finding, own.len(), self.source);
            }
        }
        run
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
/// Checks of the host that look at GPUs one by one; any other check holds for every runner of the machine.
const OF_EACH_GPU: [&str; 5] = [
    "device_nodes",
    "gpus_uniform",
    "kernel_log_pcie",
    "kernel_log_xid",
    "vbios_uniform",
];

/// A runner whose GPUs are named by UUID and were found does not care how many others there are. By numbers it does: they
/// name other GPUs when one is missing.
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
        overridden: None,
        busy: false,
        ..finding.clone()
    }
}
