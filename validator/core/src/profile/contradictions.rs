//! What no machine can be: values of a profile that exclude each other, or that name what does not
//! exist.

use super::error::ProfileError;
use super::source::{Find, Source};
use super::{BURN_SECONDS, BurnProfile, CudaVersion, Profile, Requirement};
use crate::facts::KernelModuleFlavor;
use crate::level::Level;
use crate::nearest_name::nearest_name_hint;
use crate::reference::{self, ArchitectureSupport, GpuModel};

/// A value that cannot hold, where it is written, and what would be right.
struct Contradiction {
    path: Vec<String>,
    find: Find,
    message: String,
    hint: Option<String>,
}

type Found = Option<Contradiction>;

/// Refuses the first value of one file that is wrong whatever other files say.
pub(super) fn refuse_impossible_values(
    profile: &Profile,
    source: &Source,
    known_checks: &[&str],
) -> Result<(), ProfileError> {
    let found = checks(profile, known_checks)
        .or_else(|| numbers(profile))
        .or_else(|| kubernetes(profile))
        .or_else(|| names(profile));
    found.map_or(Ok(()), |found| {
        Err(error(&found, std::slice::from_ref(source)))
    })
}

/// Refuses the first contradiction of a resolved profile; `sources` are its files, the extending
/// one first.
pub(super) fn refuse_contradictions(
    profile: &Profile,
    sources: &[Source],
) -> Result<(), ProfileError> {
    let found = xids(profile)
        .or_else(|| mig(profile))
        .or_else(|| driver(profile))
        .or_else(|| toolkits(profile))
        .or_else(|| burn_deadlines(profile))
        .or_else(|| model(profile));
    found.map_or(Ok(()), |found| Err(error(&found, sources)))
}

fn error(found: &Contradiction, sources: &[Source]) -> ProfileError {
    let path: Vec<&str> = found.path.iter().map(String::as_str).collect();
    // The file nearest to the requested one wins, as its value does.
    let (source, position) = sources
        .iter()
        .find_map(|it| Some((it, Some(it.locate(&path, found.find)?))))
        .unwrap_or((&sources[0], None));
    source.error_at(position, &found.message, found.hint.as_deref())
}

#[expect(
    clippy::unnecessary_wraps,
    reason = "every caller returns what it found"
)]
fn at(path: &str, message: impl Into<String>) -> Found {
    Some(Contradiction {
        path: path.split('.').map(str::to_owned).collect(),
        find: Find::Value,
        message: message.into(),
        hint: None,
    })
}

/// Settings of checks that do not exist, or without a reason.
fn checks(profile: &Profile, known_checks: &[&str]) -> Found {
    profile.checks.iter().find_map(|(id, setting)| {
        let path = vec!["checks".to_owned(), id.clone()];
        if !known_checks.contains(&id.as_str()) {
            return Some(Contradiction {
                path,
                find: Find::Key,
                message: format!("unknown check `{id}`"),
                hint: Some(nearest_name_hint(id, known_checks.iter().copied())),
            });
        }
        if setting.reason.trim().is_empty() {
            return Some(Contradiction {
                path: [path, vec!["reason".to_owned()]].concat(),
                find: Find::Value,
                message: format!("the severity of `{id}` is changed without a reason"),
                hint: Some("give the reason, which the report shows".to_owned()),
            });
        }
        None
    })
}

/// Numbers that no machine has.
fn numbers(profile: &Profile) -> Found {
    let gpus = &profile.gpus;
    let policy = &profile.policy;
    let zero = [
        ("gpus.count", gpus.count.map(u64::from)),
        ("gpus.memory_minimum_mib", gpus.memory_minimum_mib),
        ("gpus.power_limit_w", gpus.power_limit_w.map(u64::from)),
        ("gpus.pcie.generation", gpus.pcie.generation.map(u64::from)),
        ("driver.branch", profile.driver.branch.map(u64::from)),
    ]
    .into_iter()
    .find(|(_, value)| *value == Some(0))
    .and_then(|(path, _)| at(path, format!("`{path}` is 0, which no GPU node has")));
    let width = gpus
        .pcie
        .width
        .filter(|it| ![1, 2, 4, 8, 16, 32].contains(it))
        .and_then(|it| at("gpus.pcie.width", format!("no PCIe link has {it} lanes")));
    let hours = policy
        .xid
        .window_hours
        .filter(|it| !(it.is_finite() && *it > 0.0))
        .and_then(|it| at("policy.xid.window_hours", format!("{it} hours are no time")));
    let deadline = profile.levels.iter().find_map(|(level, settings)| {
        let seconds = settings
            .kernel_deadline_s
            .filter(|it| !(it.is_finite() && *it > 0.0))?;
        at(
            &format!("levels.{level}.kernel_deadline_s"),
            format!("{seconds} seconds are no time"),
        )
    });
    let temperature = [
        ("policy.temperature_maximum_c", policy.temperature_maximum_c),
        (
            "policy.memory_temperature_maximum_c",
            policy.memory_temperature_maximum_c,
        ),
    ]
    .into_iter()
    .find_map(|(path, value)| {
        let celsius = value.filter(|it| !(1..=150).contains(it))?;
        at(
            path,
            format!("{celsius} °C is no temperature that a running GPU can be held to"),
        )
    });
    zero.or(width)
        .or(hours)
        .or(deadline)
        .or(temperature)
        .or_else(|| burns(profile))
}

/// Values of a burn that no burn can have.
fn burns(profile: &Profile) -> Found {
    profile.levels.iter().find_map(|(level, settings)| {
        let burn = &settings.burn;
        let at_key = |key: &str, message: String| at(&format!("levels.{level}.{key}"), message);
        if let Some(seconds) = settings
            .deadline_s
            .filter(|it| !(it.is_finite() && *it > 0.0))
        {
            return at_key("deadline_s", format!("{seconds} seconds are no time"));
        }
        if *level < Level::Standard && *burn != BurnProfile::default() {
            return at_key("burn", format!("level {level} works no GPU"));
        }
        if let Some(seconds) = burn.duration_s.filter(|it| !BURN_SECONDS.contains(it)) {
            let message =
                format!("a burn takes 0.1 s at least and a week at most, not {seconds} s");
            return at_key("burn.duration_s", message);
        }
        let is_share = |it: &f64| *it > 0.0 && *it <= 100.0;
        if let Some(percent) = burn.memory_percent.filter(|it| !is_share(it)) {
            let message =
                format!("a share of the memory is more than 0 and at most 100, not {percent}");
            return at_key("burn.memory_percent", message);
        }
        let precisions = &burn.precisions;
        let twice =
            (1..precisions.len()).find(|it| precisions[..*it].contains(&precisions[*it]))?;
        let message = format!("{} is there twice", precisions[twice]);
        at_key(&format!("burn.precisions.{twice}"), message)
    })
}

/// A burn that cannot end before the run is stopped.
fn burn_deadlines(profile: &Profile) -> Found {
    profile.levels.iter().find_map(|(level, settings)| {
        let deadline_s = settings.deadline_s?;
        let duration_s = settings.burn.duration(*level)?.as_secs_f64();
        if duration_s < deadline_s {
            return None;
        }
        let key = match settings.burn.duration_s {
            Some(_) => "burn.duration_s",
            None => "deadline_s",
        };
        at(
            &format!("levels.{level}.{key}"),
            format!("the burn takes {duration_s} s, the whole run may take {deadline_s} s"),
        )
    })
}

/// Names that can match nothing.
fn names(profile: &Profile) -> Found {
    let service = profile.services.keys().find_map(|name| {
        let bare = name.strip_suffix(".service");
        let message = match bare {
            Some(bare) => format!("services are named without `.service`: `{bare}`"),
            None if name.trim().is_empty() => "a service has no name".to_owned(),
            None => return None,
        };
        Some(Contradiction {
            path: vec!["services".to_owned(), name.clone()],
            find: Find::Key,
            message,
            hint: None,
        })
    });
    let model = profile
        .gpus
        .model
        .as_ref()
        .filter(|it| it.trim().is_empty())
        .and_then(|_| at("gpus.model", "the GPU model has no name"));
    let vbios = profile
        .gpus
        .vbios
        .iter()
        .position(|it| it.trim().is_empty())
        .and_then(|index| at(&format!("gpus.vbios.{index}"), "a VBIOS version is empty"));
    service.or(model).or(vbios)
}

/// Texts that name no resource or taint, and times that are none.
fn kubernetes(profile: &Profile) -> Found {
    let kubernetes = &profile.kubernetes;
    let seconds = [
        (
            "kubernetes.allocatable_within_s",
            kubernetes.allocatable_within_s,
        ),
        (
            "kubernetes.gpu_pod.deadline_s",
            kubernetes.gpu_pod.deadline_s,
        ),
    ]
    .into_iter()
    .find_map(|(path, value)| {
        let seconds = value.filter(|it| !(it.is_finite() && *it >= 0.0 && *it <= 86_400.0))?;
        at(path, format!("{seconds} seconds are no time to wait"))
    });
    let zero = [
        ("kubernetes.replicas", kubernetes.replicas),
        ("kubernetes.gpu_pod.count", kubernetes.gpu_pod.count),
    ]
    .into_iter()
    .find(|(_, value)| *value == Some(0))
    .and_then(|(path, _)| at(path, format!("`{path}` is 0")));
    let taint = kubernetes.taints.iter().position(|it| {
        let effect = it.rsplit_once(':').map(|(_, effect)| effect);
        !matches!(
            effect,
            Some("NoSchedule" | "NoExecute" | "PreferNoSchedule")
        )
    });
    let taint = taint.and_then(|index| {
        at(
            &format!("kubernetes.taints.{index}"),
            format!(
                "`{}` is no taint, expected one like `nvidia.com/gpu=true:NoSchedule`",
                kubernetes.taints[index]
            ),
        )
    });
    seconds.or(zero).or(taint)
}

/// Xids with two fates.
fn xids(profile: &Profile) -> Found {
    let policy = &profile.policy.xid;
    let lists = [
        ("fail", &policy.fail),
        ("warn", &policy.warn),
        ("ignore", &policy.ignore),
    ];
    for (index, (name, list)) in lists.iter().enumerate() {
        for (other_name, other) in &lists[index + 1..] {
            let twice = other
                .iter()
                .enumerate()
                .find(|(_, number)| list.contains(number));
            if let Some((position, number)) = twice {
                return at(
                    &format!("policy.xid.{other_name}.{position}"),
                    format!("Xid {number} is in `{name}` and in `{other_name}`"),
                );
            }
        }
    }
    None
}

fn mig(profile: &Profile) -> Found {
    let devices = profile.gpus.mig_devices?;
    match profile.gpus.mig {
        Some(true) => None,
        Some(false) if devices == 0 => None,
        Some(false) => at(
            "gpus.mig_devices",
            format!("`mig_devices` is {devices}, but `mig` is false"),
        ),
        None => at("gpus.mig_devices", "`mig_devices` needs `mig: true`"),
    }
}

fn driver(profile: &Profile) -> Found {
    let branch = profile.driver.branch?;
    if let Some(minimum) = profile
        .driver
        .minimum
        .as_ref()
        .filter(|it| it.branch() != branch)
    {
        return at(
            "driver.minimum",
            format!("`driver.minimum` is {minimum}, but `driver.branch` is {branch}"),
        );
    }
    let offered = reference::driver_branch(branch)?.cuda;
    let wanted = profile.cuda.driver_minimum?;
    if (wanted.major, wanted.minor) <= (offered.major, offered.minor) {
        return None;
    }
    at(
        "cuda.driver_minimum",
        format!("driver branch {branch} offers CUDA {offered}, `cuda.driver_minimum` is {wanted}"),
    )
}

/// Toolkits that the required driver cannot run.
fn toolkits(profile: &Profile) -> Found {
    // Forward compatibility is there to run them.
    if profile.cuda.compat_package == Some(Requirement::Required) {
        return None;
    }
    profile.cuda.toolkits.iter().enumerate().find_map(|(index, toolkit)| {
        let path = format!("cuda.toolkits.{index}");
        let needed = reference::minor_version_minimum(toolkit.major)?;
        if let Some(minimum) = profile.driver.minimum.as_ref().filter(|it| *it < needed) {
            return at(
                &path,
                format!(
                    "CUDA {toolkit} needs driver {needed} or newer, `driver.minimum` allows {minimum}"
                ),
            );
        }
        let branch = profile.driver.branch.filter(|it| *it < needed.branch())?;
        at(
            &path,
            format!("CUDA {toolkit} needs driver {needed} or newer, `driver.branch` is {branch}"),
        )
    })
}

/// Wishes that the GPU model cannot fulfil.
fn model(profile: &Profile) -> Found {
    let wanted = profile.gpus.model.as_deref()?;
    let model = reference::gpu_models()
        .iter()
        .find(|it| it.name == wanted || it.is_named(wanted))?;
    module(profile, model)
        .or_else(|| model_driver(profile, model))
        .or_else(|| model_toolkits(profile, model))
        .or_else(|| model_parts(profile, model))
}

fn module(profile: &Profile, model: &GpuModel) -> Found {
    let flavor = profile
        .driver
        .kernel_module
        .filter(|it| !model.kernel_module.supports(*it))?;
    let other = match flavor {
        KernelModuleFlavor::Open => KernelModuleFlavor::Proprietary,
        KernelModuleFlavor::Proprietary => KernelModuleFlavor::Open,
    };
    at(
        "driver.kernel_module",
        format!(
            "the {} works with the {other} kernel module only",
            model.name
        ),
    )
}

fn model_driver(profile: &Profile, model: &GpuModel) -> Found {
    let (path, branch) = match (&profile.driver.branch, &profile.driver.minimum) {
        (Some(branch), _) => ("driver.branch", *branch),
        (None, Some(minimum)) => ("driver.minimum", minimum.branch()),
        (None, None) => return None,
    };
    let row = reference::driver_branch(branch)?;
    if model.compute_capability < row.compute_capability_minimum {
        return at(
            path,
            format!(
                "driver branch {branch} supports compute capability {} and newer, the {} has {}",
                row.compute_capability_minimum, model.name, model.compute_capability
            ),
        );
    }
    // A minimum that is too old for the GPU still allows newer drivers; a branch does not.
    let oldest = reference::oldest_driver_branch(model.compute_capability)?;
    if path == "driver.branch" && branch < oldest {
        return at(
            path,
            format!("the {} needs driver branch {oldest} or newer", model.name),
        );
    }
    None
}

fn model_toolkits(profile: &Profile, model: &GpuModel) -> Found {
    let dropped = |toolkit: &CudaVersion| {
        reference::cuda_toolkit(*toolkit).is_some()
            && reference::architecture_support(*toolkit, model.compute_capability)
                == ArchitectureSupport::Dropped
    };
    let index = profile.cuda.toolkits.iter().position(dropped)?;
    at(
        &format!("cuda.toolkits.{index}"),
        format!(
            "CUDA {} no longer supports compute capability {} of the {}",
            profile.cuda.toolkits[index], model.compute_capability, model.name
        ),
    )
}

fn model_parts(profile: &Profile, model: &GpuModel) -> Found {
    let gpus = &profile.gpus;
    let name = &model.name;
    if gpus.mig == Some(true) && !model.mig {
        return at("gpus.mig", format!("the {name} has no MIG"));
    }
    let too_much = [
        (
            "gpus.memory_minimum_mib",
            gpus.memory_minimum_mib,
            // Without ECC, GDDR cards show a sixteenth more.
            model.memory_mib.map(|it| it + it / 10),
            "MiB of memory at most",
        ),
        (
            "gpus.nvlinks",
            gpus.nvlinks.map(u64::from),
            model.nvlinks.map(u64::from),
            "NVLinks",
        ),
        (
            "gpus.pcie.generation",
            gpus.pcie.generation.map(u64::from),
            model.pcie_generation.map(u64::from),
            "as its PCIe generation",
        ),
        (
            "gpus.pcie.width",
            gpus.pcie.width.map(u64::from),
            model.pcie_width.map(u64::from),
            "PCIe lanes",
        ),
    ];
    too_much.into_iter().find_map(|(path, wanted, has, what)| {
        let (wanted, has) = (wanted?, has?);
        if wanted <= has {
            return None;
        }
        at(
            path,
            format!("`{path}` is {wanted}, the {name} has {has} {what}"),
        )
    })
}
