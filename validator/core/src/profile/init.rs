//! Writes a profile from what a healthy node is.

use crate::facts::{ComputeMode, CudaToolkitKind, Facts, GpuFacts, Reading};
use crate::profile::{CudaVersion, parse};

/// A value for the profile, or why there is none, as a fragment for a comment.
type Found<T> = Result<T, String>;

/// A commented profile of this node: every value that was read and is the same on all GPUs; what
/// was not read is there as a comment with the reason. The text is a valid profile whatever the
/// facts are.
pub fn init(facts: &Facts) -> String {
    let mut draft = Draft::new(facts);
    write_driver(&mut draft, facts);
    write_cuda(&mut draft, facts);
    write_gpus(&mut draft, facts);
    write_services(&mut draft, facts);
    draft.text
}

/// The text so far. It stays a valid profile with every line that is added.
struct Draft {
    text: String,
}

impl Draft {
    fn new(facts: &Facts) -> Self {
        let mut text = "# What a node like this one must be. Written by `gpu-validator profile init`; take out what may\n\
             # differ between the nodes that share this profile.\n"
            .to_owned();
        if let Some(simulated) = &facts.simulated {
            text.push_str("# SIMULATED: the node was the scenario ");
            text.push_str(&one_line(simulated));
            text.push('\n');
        }
        if let Some(ec2) = facts.host.ec2.value() {
            text.push_str("name: ");
            text.push_str(&quoted(&ec2.instance_type));
            text.push('\n');
        }
        Self { text }
    }

    fn add(&mut self, text: std::fmt::Arguments) {
        use std::fmt::Write as _;
        self.text
            .write_fmt(text)
            .expect("writing to a string cannot fail");
    }

    fn section(&mut self, name: &str) {
        self.text.push('\n');
        self.text.push_str(name);
        self.text.push_str(":\n");
    }

    /// `  # why`, then `  key: value`, or the key as a comment with the reason why there is no
    /// value.
    fn line(&mut self, why: &str, key: &str, value: &Found<String>) {
        self.text.push_str("  # ");
        self.text.push_str(why);
        self.text.push('\n');
        let before = self.text.len();
        let refused = match value {
            Ok(value) => {
                self.add(format_args!("  {key}: {value}\n"));
                parse(&self.text, "this node", &[])
                    .err()
                    .map(|error| error.0.lines().next().unwrap_or_default().to_owned())
            }
            Err(reason) => Some(reason.clone()),
        };
        if let Some(reason) = refused {
            self.text.truncate(before);
            self.comment(key, &reason);
        }
    }

    fn comment(&mut self, key: &str, reason: &str) {
        self.add(format_args!(
            "  # {key}: not stated, {}\n",
            one_line(reason)
        ));
    }
}

fn write_driver(draft: &mut Draft, facts: &Facts) {
    let modules = facts.host.kernel_modules.value();
    let version = modules
        .and_then(|it| it.nvidia_version.value())
        .or_else(|| facts.nvml.driver_version.value())
        .ok_or_else(|| "the driver's version was not read".to_owned());
    let branch = version.clone().and_then(|it| {
        Ok(it
            .split('.')
            .next()
            .unwrap_or_default()
            .parse::<u32>()
            .map_err(|_| format!("{it} is not a driver version"))?
            .to_string())
    });
    let flavor = modules
        .ok_or_else(|| "kernel modules were not read".to_owned())
        .and_then(|it| read(&it.nvidia_flavor))
        .map(ToString::to_string);
    draft.section("driver");
    draft.line(
        "Older drivers fail.",
        "minimum",
        &version.map(|it| quoted(it)),
    );
    draft.line("Take this out to allow newer branches.", "branch", &branch);
    draft.line("Open or proprietary.", "kernel_module", &flavor);
}

fn write_cuda(draft: &mut Draft, facts: &Facts) {
    let offered = read(&facts.nvml.cuda_driver_version)
        .or_else(|_| read(&facts.cuda.driver_version))
        .map(|number| quoted(&CudaVersion::from_driver_number(*number).to_string()));
    draft.section("cuda");
    draft.line("What the driver offers.", "driver_minimum", &offered);
    let toolkits = read(&facts.host.cuda_toolkits).and_then(|toolkits| {
        let mut versions: Vec<CudaVersion> = toolkits
            .iter()
            .filter(|it| it.kind == CudaToolkitKind::Toolkit)
            .filter_map(|it| it.version.value()?.parse().ok())
            .map(|it: CudaVersion| CudaVersion { update: None, ..it })
            .collect();
        versions.sort();
        versions.dedup();
        if versions.is_empty() {
            return Err("none is installed".to_owned());
        }
        let versions: Vec<String> = versions.iter().map(|it| quoted(&it.to_string())).collect();
        Ok(format!("[{}]", versions.join(", ")))
    });
    draft.line(
        "Toolkits that must be installed, whatever their update.",
        "toolkits",
        &toolkits,
    );
}

fn write_gpus(draft: &mut Draft, facts: &Facts) {
    let gpus = &facts.gpus;
    draft.section("gpus");
    let count = match facts.nvml.gpu_count.value() {
        _ if gpus.is_empty() => Err("no GPU was read".to_owned()),
        Some(counted) if *counted as usize != gpus.len() => Err(format!(
            "NVML counts {counted} GPUs, {} were read",
            gpus.len()
        )),
        _ => Ok(gpus.len().to_string()),
    };
    let bool_text = |value: Found<bool>| value.map(|it| it.to_string());
    draft.line(
        "The product name as NVML gives it.",
        "model",
        &same(gpus, |it| read(&it.name).cloned()).map(|it| quoted(&it)),
    );
    draft.line("How many.", "count", &count);
    let memory = gpus
        .iter()
        .map(|it| read(&it.memory).map(|memory| memory.total_bytes >> 20))
        .collect::<Found<Vec<u64>>>()
        .and_then(|it| {
            it.into_iter()
                .min()
                .ok_or_else(|| "no GPU was read".to_owned())
        });
    draft.line(
        "The least total memory of each.",
        "memory_minimum_mib",
        &memory.map(|it| it.to_string()),
    );
    draft.line(
        "Kept initialised between jobs.",
        "persistence_mode",
        &bool_text(same(gpus, |it| read(&it.persistence_mode).copied())),
    );
    draft.line(
        "Errors in memory are corrected or at least seen.",
        "ecc",
        &bool_text(same(gpus, |it| read(&it.ecc_mode).map(|mode| mode.current))),
    );
    let mig = same(gpus, |it| read(&it.mig).map(|mode| mode.current));
    draft.line("Divided into MIG devices.", "mig", &bool_text(mig.clone()));
    if mig == Ok(true) {
        let devices = same(gpus, |it| read(&it.mig_devices).map(Vec::len));
        draft.line(
            "MIG devices on each GPU.",
            "mig_devices",
            &devices.map(|it| it.to_string()),
        );
    }
    let compute_mode =
        same(gpus, |it| read(&it.compute_mode).copied()).and_then(|mode| match mode {
            ComputeMode::Unknown(number) => Err(format!("{number} is no mode that is known")),
            mode => Ok(mode.to_string()),
        });
    draft.line("Who may use a GPU at once.", "compute_mode", &compute_mode);
    let power = same(gpus, |it| read(&it.power).map(|power| power.limit_mw)).and_then(|limit_mw| {
        if limit_mw % 1000 != 0 {
            return Err(format!("{limit_mw} mW are no whole watts"));
        }
        Ok((limit_mw / 1000).to_string())
    });
    draft.line("The limit in force, exactly.", "power_limit_w", &power);
    let pcie = same(gpus, |it| {
        read(&it.pcie).map(|link| (link.max_generation, link.current_width))
    })
    .map(|(generation, width)| format!("{{generation: {generation}, width: {width}}}"));
    draft.line(
        "The generation that GPU and slot reach together, and the lanes in use.",
        "pcie",
        &pcie,
    );
    let nvlinks = same(gpus, |it| {
        read(&it.nvlinks).map(|links| links.iter().filter(|link| link.active).count())
    })
    .and_then(|active| match active {
        0 => Err("none is active".to_owned()),
        active => Ok(active.to_string()),
    });
    draft.line("Active NVLinks of each.", "nvlinks", &nvlinks);
    write_vbios(draft, gpus);
}

/// Only as a suggestion: a card that was exchanged rightly has another VBIOS.
fn write_vbios(draft: &mut Draft, gpus: &[GpuFacts]) {
    let mut versions: Vec<String> = gpus
        .iter()
        .filter_map(|it| it.vbios_version.value())
        .map(|it| quoted(it))
        .collect();
    versions.sort();
    versions.dedup();
    if versions.is_empty() {
        return;
    }
    draft.add(format_args!(
        "  # Take the mark away to allow these VBIOS versions only.\n  # vbios: [{}]\n",
        versions.join(", ")
    ));
}

fn write_services(draft: &mut Draft, facts: &Facts) {
    if facts.host.services.is_empty() {
        return;
    }
    draft.section("services");
    for (name, state) in &facts.host.services {
        let requirement = read(state).and_then(|it| match (it.active, it.installed) {
            (true, _) => Ok("active".to_owned()),
            (false, true) => Err("it is installed but not active".to_owned()),
            (false, false) => Err("it is not installed".to_owned()),
        });
        let key = if name
            .chars()
            .all(|it| it.is_ascii_alphanumeric() || "-_@.".contains(it))
        {
            name.clone()
        } else {
            quoted(name)
        };
        let why = format!("systemd's {}.service.", one_line(name));
        draft.line(&why, &key, &requirement);
    }
}

/// The value that all GPUs have.
fn same<T: PartialEq>(gpus: &[GpuFacts], of: impl Fn(&GpuFacts) -> Found<T>) -> Found<T> {
    let mut values = gpus.iter().map(of);
    let first = values
        .next()
        .ok_or_else(|| "no GPU was read".to_owned())??;
    for value in values {
        if value? != first {
            return Err("the GPUs differ".to_owned());
        }
    }
    Ok(first)
}

fn read<T>(reading: &Reading<T>) -> Found<&T> {
    match reading {
        Reading::Value(value) => Ok(value),
        Reading::NotSupported => Err("this node has no such thing".to_owned()),
        Reading::NotRead(reason) => Err(format!("it could not be read: {reason}")),
    }
}

/// A JSON string is a YAML string.
fn quoted(text: &str) -> String {
    serde_json::Value::String(one_line(text)).to_string()
}

/// A driver's text, without characters that would end a comment or that YAML refuses.
fn one_line(text: &str) -> String {
    text.chars()
        .filter(|it| !it.is_control() && !"\u{2028}\u{2029}\u{feff}\u{fffe}\u{ffff}".contains(*it))
        .take(200)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{
        CudaToolkit, EccMode, HostFacts, KernelModuleFlavor, KernelModules, MemoryUse, MigMode,
        NvLink, PcieLink, Power, ServiceState,
    };
    use crate::findings::Verdict;
    use crate::level::Level;
    use crate::profile::{PcieProfile, Profile, ServiceRequirement};

    /// Eight H200 as `nvidia-smi -q -x` showed them, driver 580.159.04.
    fn h200_node() -> Facts {
        let gpu = |index: u8| GpuFacts {
            uuid: Reading::Value(format!("GPU-{index}")),
            name: Reading::Value("NVIDIA H200".to_owned()),
            memory: Reading::Value(MemoryUse {
                total_bytes: 143_771 << 20,
                ..MemoryUse::default()
            }),
            persistence_mode: Reading::Value(true),
            ecc_mode: Reading::Value(EccMode {
                current: true,
                pending: true,
            }),
            mig: Reading::Value(MigMode::default()),
            compute_mode: Reading::Value(ComputeMode::Default),
            power: Reading::Value(Power {
                limit_mw: 700_000,
                ..Power::default()
            }),
            pcie: Reading::Value(PcieLink {
                current_generation: 5,
                current_width: 16,
                max_generation: 5,
                max_width: 16,
                gpu_max_generation: Some(5),
            }),
            nvlinks: Reading::Value(
                (0..18)
                    .map(|link| NvLink {
                        link,
                        active: true,
                        ..NvLink::default()
                    })
                    .collect(),
            ),
            vbios_version: Reading::Value("96.00.A5.00.1A".to_owned()),
            ..GpuFacts::default()
        };
        let mut facts = Facts {
            level: Level::Quick,
            gpus: (0..8).map(gpu).collect(),
            host: HostFacts {
                kernel_modules: Reading::Value(KernelModules {
                    nvidia_version: Reading::Value("580.159.04".to_owned()),
                    nvidia_flavor: Reading::Value(KernelModuleFlavor::Open),
                    ..KernelModules::default()
                }),
                cuda_toolkits: Reading::Value(vec![CudaToolkit {
                    path: "/usr/local/cuda-12.8".to_owned(),
                    version: Reading::Value("12.8.1".to_owned()),
                    kind: CudaToolkitKind::Toolkit,
                    ..CudaToolkit::default()
                }]),
                ..HostFacts::default()
            },
            ..Facts::default()
        };
        facts.nvml.cuda_driver_version = Reading::Value(13_000);
        facts.nvml.gpu_count = Reading::Value(8);
        facts.host.services.insert(
            "nvidia-persistenced".to_owned(),
            Reading::Value(ServiceState {
                installed: true,
                enabled: true,
                active: true,
            }),
        );
        facts
            .host
            .services
            .insert("nvidia-fabricmanager".to_owned(), Reading::NotSupported);
        facts
    }

    fn written(facts: &Facts) -> (String, Profile) {
        let text = init(facts);
        let profile =
            parse(&text, "written", &[]).unwrap_or_else(|error| panic!("{error}\n{text}"));
        (text, profile)
    }

    #[test]
    fn says_what_the_node_is() {
        let (text, profile) = written(&h200_node());
        assert_eq!(
            profile.driver.minimum.map(|it| it.to_string()).as_deref(),
            Some("580.159.04")
        );
        assert_eq!(profile.driver.branch, Some(580));
        assert_eq!(profile.driver.kernel_module, Some(KernelModuleFlavor::Open));
        assert_eq!(
            profile
                .cuda
                .driver_minimum
                .map(|it| it.to_string())
                .as_deref(),
            Some("13.0")
        );
        assert_eq!(profile.cuda.toolkits, ["12.8".parse().expect("a version")]);
        assert_eq!(profile.gpus.model.as_deref(), Some("NVIDIA H200"));
        assert_eq!(profile.gpus.count, Some(8));
        assert_eq!(profile.gpus.memory_minimum_mib, Some(143_771));
        assert_eq!(profile.gpus.persistence_mode, Some(true));
        assert_eq!(profile.gpus.ecc, Some(true));
        assert_eq!(profile.gpus.mig, Some(false));
        assert_eq!(profile.gpus.power_limit_w, Some(700));
        assert_eq!(profile.gpus.compute_mode, Some(ComputeMode::Default));
        let pcie = PcieProfile {
            generation: Some(5),
            width: Some(16),
        };
        assert_eq!(profile.gpus.pcie, pcie);
        assert_eq!(profile.gpus.nvlinks, Some(18));
        assert_eq!(
            profile.services["nvidia-persistenced"],
            ServiceRequirement::Active
        );
        assert!(
            text.contains("# nvidia-fabricmanager: not stated, this node has no such thing"),
            "{text}"
        );
        assert!(text.contains("# vbios: [\"96.00.A5.00.1A\"]"), "{text}");
    }

    #[test]
    fn what_was_not_read_is_a_comment_with_the_reason() {
        let mut facts = h200_node();
        facts.gpus[3].ecc_mode = Reading::NotRead("unknown error\n# gpus: 1".to_owned());
        facts.gpus[5].power = Reading::Value(Power {
            limit_mw: 500_000,
            ..Power::default()
        });
        facts.nvml.gpu_count = Reading::Value(9);
        let (text, profile) = written(&facts);
        assert_eq!(profile.gpus.ecc, None);
        assert!(
            text.contains("  # ecc: not stated, it could not be read: unknown error# gpus: 1\n"),
            "{text}"
        );
        assert_eq!(profile.gpus.power_limit_w, None);
        assert!(
            text.contains("  # power_limit_w: not stated, the GPUs differ\n"),
            "{text}"
        );
        assert!(
            text.contains("  # count: not stated, NVML counts 9 GPUs, 8 were read\n"),
            "{text}"
        );
    }

    #[test]
    fn what_contradicts_itself_is_a_comment() {
        let mut facts = h200_node();
        // A compat library on the path offers more than the driver does.
        facts.nvml.cuda_driver_version = Reading::Value(13_040);
        let (text, profile) = written(&facts);
        assert_eq!(profile.cuda.driver_minimum, None);
        assert!(
            text.contains("# driver_minimum: not stated, this node:"),
            "{text}"
        );
    }

    #[test]
    fn is_valid_whatever_the_facts_are() {
        let (text, profile) = written(&Facts::default());
        assert_eq!(profile, Profile::default(), "{text}");
        let mut facts = h200_node();
        for (index, name) in ["\u{0}\u{1b}[31m", "a\nb: c", "\"\\{[#", "\u{85}\u{2028}é"]
            .into_iter()
            .enumerate()
        {
            facts.gpus.truncate(1);
            facts.gpus[0].name = Reading::Value(name.to_owned());
            facts.gpus[0].vbios_version = Reading::Value(name.to_owned());
            facts.host.services.insert(
                format!("{name}{index}"),
                Reading::Value(ServiceState {
                    active: true,
                    ..ServiceState::default()
                }),
            );
            facts.simulated = Some(name.to_owned());
            let _ = written(&facts);
        }
    }

    #[test]
    fn the_node_passes_its_own_profile() {
        let facts = crate::test_machine::healthy_node();
        let (text, profile) = written(&facts);
        for finding in crate::judge(&facts, &profile, Level::Extended) {
            assert!(
                !matches!(finding.verdict, Verdict::Fail | Verdict::Error),
                "{finding:#?}\n{text}"
            );
        }
    }
}
