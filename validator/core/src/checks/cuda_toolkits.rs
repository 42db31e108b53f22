//! Every CUDA toolkit on the machine works with its driver and GPUs.
//!
//! ## Why
//! "Driver version is insufficient", "no kernel image is available" and "unsupported PTX version"
//! are what users of GPU images meet most. All three follow from three tables, and can be predicted
//! before a job meets them.
//!
//! ## How it is judged
//! Each toolkit (and each `nvidia-cuda-runtime` wheel) against the driver and the architecture of
//! every GPU:
//!
//! - works in full: the driver is at least the toolkit's own, and the toolkit compiles for the GPU:
//!   pass;
//! - works by minor-version compatibility: an older driver of at least the major version's minimum.
//!   Machine code runs, PTX of this toolkit does not: pass, with a note;
//! - has no machine code for the GPU, only PTX that the driver compiles: a warning;
//! - impossible: the driver is older than the minimum, the toolkit gave the GPU's architecture up,
//!   or it has only PTX and the driver is too old for that: fail where the profile requires this
//!   toolkit (`cuda.toolkits`), and where no toolkit of the machine works, as the one that programs
//!   get by default then does not either; a warning where another toolkit works, and always for a
//!   wheel or an HPC SDK, which concerns only those who select it.
//!
//! A `cuda-compat` library that CUDA really uses counts as the driver. Toolkits of `cuda.toolkits`
//! in the profile must be there. Skipped when there is no toolkit and none is required.
//!
//! ## What to do
//! Install a driver (or where the GPUs allow it the `cuda-compat` package) that is new enough, or a
//! toolkit that still knows the GPU.
//!
//! ## Source
//! CUDA Toolkit Release Notes (driver and architecture tables),
//! <https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/>; CUDA Compatibility,
//! <https://docs.nvidia.com/deploy/cuda-compatibility/>

use std::collections::BTreeSet;

use crate::check::{Check, Judge};
use crate::expect;
use crate::facts::{ComputeCapability, CudaToolkit, CudaToolkitKind, Facts};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::{CudaVersion, Profile};
use crate::queries;
use crate::reference::{self, ArchitectureSupport, CompatVerdict, CudaToolkitRow, DriverVersion};
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "cuda_toolkits",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/deploy/cuda-compatibility/",
};

/// What toolkits are judged against.
struct Machine {
    /// Kernel module, or the `cuda-compat` library that CUDA uses in its place.
    driver: DriverVersion,
    kernel_driver_branch: u32,
    capabilities: BTreeSet<ComputeCapability>,
    /// Forward compatibility applies to every GPU.
    compat_applies: bool,
}

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let toolkits = facts.host.cuda_toolkits.required("CUDA toolkits")?;
    let mut tally = Tally::default();
    judge_required(toolkits, &profile.cuda.toolkits, &mut tally);
    if !toolkits.is_empty() {
        match machine_of(facts, profile) {
            Ok(machine) => judge_toolkits(toolkits, &machine, profile, &mut tally),
            // A toolkit that must be there and is not is a fault whatever the driver.
            Err(outcome) if tally.worst() != Some(Verdict::Fail) => return Err(outcome),
            Err(_) => {}
        }
    }
    let worst = tally.worst();
    let outcome = tally.outcome(Outcome::skip(
        "no CUDA toolkit was found, and none is configured in the profile",
    ));
    Ok(match worst {
        Some(Verdict::Fail | Verdict::Warn) => outcome.remedy(
            "install a driver that is new enough, a toolkit that knows the GPUs, or remove the toolkit that cannot work",
        ),
        _ => outcome,
    })
}

/// Judges each toolkit by itself, and softens the failures that concern nobody who did not choose
/// that toolkit.
fn judge_toolkits(
    toolkits: &[CudaToolkit],
    machine: &Machine,
    profile: &Profile,
    tally: &mut Tally,
) {
    let judged: Vec<(&CudaToolkit, Tally)> = toolkits
        .iter()
        .map(|toolkit| {
            let mut own = Tally::default();
            judge_toolkit(toolkit, machine, &mut own);
            (toolkit, own)
        })
        .collect();
    let one_works = judged.iter().any(|(toolkit, own)| {
        toolkit.kind == CudaToolkitKind::Toolkit
            && matches!(own.worst(), Some(Verdict::Pass | Verdict::Warn))
    });
    for (toolkit, own) in judged {
        let is_of_one_environment = toolkit.kind != CudaToolkitKind::Toolkit;
        if is_of_one_environment || (one_works && !is_asked_for(toolkit, profile)) {
            tally.add_softened(own);
        } else {
            tally.add(own);
        }
    }
}

fn is_asked_for(toolkit: &CudaToolkit, profile: &Profile) -> bool {
    toolkit.kind == CudaToolkitKind::Toolkit
        && toolkit
            .version
            .value()
            .and_then(|text| text.parse::<CudaVersion>().ok())
            .is_some_and(|found| {
                profile
                    .cuda
                    .toolkits
                    .iter()
                    .any(|wanted| is_release(found, *wanted))
            })
}

/// Whether `found` is the release that `wanted` names, with or without an update number.
fn is_release(found: CudaVersion, wanted: CudaVersion) -> bool {
    (found.major, found.minor) == (wanted.major, wanted.minor)
        && (wanted.update.is_none() || wanted.update == found.update)
}

fn judge_required(toolkits: &[CudaToolkit], required: &[CudaVersion], tally: &mut Tally) {
    for wanted in required {
        let is_there = toolkits
            .iter()
            .filter(|toolkit| toolkit.kind == CudaToolkitKind::Toolkit)
            .filter_map(|toolkit| toolkit.version.value()?.parse::<CudaVersion>().ok())
            .any(|found| is_release(found, *wanted));
        if is_there {
            continue;
        }
        let unread = toolkits.iter().find(|it| it.version.value().is_none());
        match unread {
            // It may be the one that is wanted; its own error follows.
            Some(_) => {}
            None => tally.fail(format!(
                "CUDA toolkit {wanted} is not on this machine, the profile requires it"
            )),
        }
    }
}

fn machine_of(facts: &Facts, profile: &Profile) -> Result<Machine, Outcome> {
    let kernel_driver = queries::driver_version(facts, profile)?;
    let gpus = queries::gpu_architectures(facts, profile)?;
    let mut capabilities = BTreeSet::new();
    for gpu in gpus {
        let capability = gpu.compute_capability.ok_or_else(|| {
            Outcome::error(format!("compute capability of {} is not known", gpu.gpu))
        })?;
        capabilities.insert(capability);
    }
    Ok(Machine {
        kernel_driver_branch: kernel_driver.branch(),
        driver: compat_driver(facts).unwrap_or(kernel_driver),
        capabilities,
        compat_applies: expect::models_of(facts).iter().all(|it| it.data_center),
    })
}

/// The version of the `cuda-compat` library that CUDA initialised with, if it did.
fn compat_driver(facts: &Facts) -> Option<DriverVersion> {
    let library = facts.cuda.library.value()?;
    if facts.cuda.init.value()?.code != 0 {
        return None;
    }
    let packages = facts.host.cuda_compat.value()?;
    let used = packages
        .iter()
        .find(|package| library.starts_with(&format!("{}/", package.path)))?;
    used.libcuda_version.as_ref()?.parse().ok()
}

fn judge_toolkit(toolkit: &CudaToolkit, machine: &Machine, tally: &mut Tally) {
    let parsed = toolkit
        .version
        .required(&format!("version of the CUDA toolkit {}", toolkit.path))
        .map_err(|outcome| outcome.summary)
        .and_then(|text| text.parse::<CudaVersion>());
    let mut version = match parsed {
        Ok(version) => version,
        Err(error) => {
            tally.error(error);
            return;
        }
    };
    // The third number of a wheel's version is a build number, not an update.
    if toolkit.kind == CudaToolkitKind::PythonWheel {
        version.update = None;
    }
    let name = format!("CUDA {version} ({})", toolkit.path);
    match reference::cuda_toolkit(version) {
        Some(row) => judge_listed(&name, version, row, machine, tally),
        None => judge_unlisted(&name, version, machine, tally),
    }
}

fn judge_listed(
    name: &str,
    version: CudaVersion,
    row: &CudaToolkitRow,
    machine: &Machine,
    tally: &mut Tally,
) {
    let driver = &machine.driver;
    let in_full = *driver >= row.driver;
    let minimum = reference::minor_version_minimum(version.major).unwrap_or(&row.driver);
    if !in_full && driver < minimum {
        let compat = if machine.compat_applies
            && reference::compat_verdict(version, machine.kernel_driver_branch)
                == CompatVerdict::Compatible
        {
            format!(" (or cuda-compat-{}-{})", version.major, version.minor)
        } else {
            String::new()
        };
        tally.fail(format!(
            "{name} needs driver {minimum} or newer{compat}, this is {driver}"
        ));
        return;
    }
    let mut notes = Vec::new();
    for capability in &machine.capabilities {
        match reference::architecture_support(version, *capability) {
            ArchitectureSupport::Native => {}
            ArchitectureSupport::OlderMachineCode(older) => notes.push(format!(
                "GPUs of compute capability {capability} run its code for {older}"
            )),
            ArchitectureSupport::PtxOnly if in_full => {
                tally.warn(format!(
                    "{name} has no machine code for compute capability {capability}: only programs with PTX run"
                ));
                return;
            }
            ArchitectureSupport::PtxOnly => {
                tally.fail(format!(
                    "{name} has no machine code for compute capability {capability}, and driver {driver} is too old to \
                     compile its PTX"
                ));
                return;
            }
            ArchitectureSupport::Dropped => {
                tally.fail(format!(
                    "{name} no longer supports compute capability {capability}"
                ));
                return;
            }
        }
    }
    if in_full {
        notes.insert(0, "works in full".to_owned());
    } else {
        notes.insert(
            0,
            format!(
                "works by minor-version compatibility, programs need machine code for the GPU: its own driver is {}, this \
                 is {driver}",
                row.driver
            ),
        );
    }
    tally.pass(format!("{name} {}", notes.join(", ")));
}

/// A toolkit older or newer than the reference table.
fn judge_unlisted(name: &str, version: CudaVersion, machine: &Machine, tally: &mut Tally) {
    let newer_than_the_table = reference::cuda_toolkits()
        .last()
        .is_some_and(|row| (version.major, version.minor) > (row.version.major, row.version.minor));
    if !newer_than_the_table {
        tally.warn(format!(
            "{name} is older than the reference table, so whether it knows the GPUs could not be determined"
        ));
        return;
    }
    match reference::minor_version_minimum(version.major) {
        Some(minimum) if machine.driver < *minimum => tally.fail(format!(
            "{name} needs driver {minimum} or newer, this is {}",
            machine.driver
        )),
        Some(_) => tally.warn(format!(
            "{name} is newer than the reference table; machine code of it runs by minor-version compatibility"
        )),
        None => tally.error(format!(
            "{name} is newer than the reference table, so what it needs is not known"
        )),
    }
}

#[cfg(test)]
mod tests {
    use crate::facts::{
        ComputeCapability, CudaCompatPackage, CudaToolkit, CudaToolkitKind, Facts, Reading,
    };
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check, unload_driver};

    fn judge(facts: &Facts, profile: &str) -> Finding {
        judge_host_check(&super::CHECK, facts, profile)
    }

    fn toolkit(version: &str) -> CudaToolkit {
        CudaToolkit {
            path: format!("/usr/local/cuda-{version}"),
            version: Reading::Value(version.to_owned()),
            kind: CudaToolkitKind::Toolkit,
            ..CudaToolkit::default()
        }
    }

    /// A machine with this driver, GPUs of this compute capability, and one toolkit.
    fn node(driver: &str, (major, minor): (u32, u32), version: &str) -> Facts {
        let mut facts = healthy_node();
        if let Reading::Value(modules) = &mut facts.host.kernel_modules {
            modules.nvidia_version = Reading::Value(driver.to_owned());
        }
        for gpu in &mut facts.gpus {
            gpu.compute_capability = Reading::Value(ComputeCapability { major, minor });
        }
        facts.host.cuda_toolkits = Reading::Value(vec![toolkit(version)]);
        facts
    }

    #[test]
    fn judges_driver_and_architecture() {
        for (driver, architecture, version, verdict, words) in [
            // In full: at its own driver, and above.
            (
                "580.95.05",
                (9, 0),
                "13.0.2",
                Verdict::Pass,
                "works in full",
            ),
            (
                "580.159.04",
                (9, 0),
                "12.4.1",
                Verdict::Pass,
                "works in full",
            ),
            // Minor-version compatibility: from the major version's minimum on.
            (
                "580.95.04",
                (9, 0),
                "13.0.2",
                Verdict::Pass,
                "minor-version compatibility",
            ),
            (
                "580.65.06",
                (9, 0),
                "13.1.0",
                Verdict::Pass,
                "minor-version compatibility",
            ),
            (
                "580.65.05",
                (9, 0),
                "13.1.0",
                Verdict::Fail,
                "needs driver 580.65.06",
            ),
            (
                "570.124.06",
                (9, 0),
                "13.0.0",
                Verdict::Fail,
                "cuda-compat-13-0",
            ),
            // A toolkit that gave up the GPU.
            (
                "580.159.04",
                (7, 0),
                "13.0.0",
                Verdict::Fail,
                "no longer supports compute capability 7.0",
            ),
            (
                "580.159.04",
                (7, 0),
                "12.9.0",
                Verdict::Pass,
                "works in full",
            ),
            // A toolkit that does not know the GPU yet.
            (
                "580.159.04",
                (10, 0),
                "12.6.0",
                Verdict::Warn,
                "only programs with PTX",
            ),
            (
                "535.54.03",
                (10, 0),
                "12.6.0",
                Verdict::Fail,
                "too old to compile its PTX",
            ),
            (
                "580.159.04",
                (8, 9),
                "11.4.0",
                Verdict::Pass,
                "run its code for 8.6",
            ),
        ] {
            let finding = judge(&node(driver, architecture, version), "{}");
            assert_eq!(finding.verdict, verdict, "{}", finding.summary);
            assert!(finding.summary.contains(words), "{}", finding.summary);
        }
    }

    #[test]
    fn a_toolkit_that_cannot_work_fails_only_where_it_is_meant() {
        let mut facts = node("580.159.04", (7, 0), "12.8.1");
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Pass);
        if let Reading::Value(toolkits) = &mut facts.host.cuda_toolkits {
            toolkits.push(toolkit("13.0.1"));
        }
        let beside = judge(&facts, "{}");
        assert_eq!(beside.verdict, Verdict::Warn);
        assert!(beside.summary.contains("no longer supports"));
        let asked = judge(&facts, "cuda: {toolkits: ['13.0']}");
        assert_eq!(asked.verdict, Verdict::Fail);
        if let Reading::Value(toolkits) = &mut facts.host.cuda_toolkits {
            toolkits.remove(0);
        }
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Fail);
    }

    #[test]
    fn a_wheel_never_fails_and_makes_no_toolkit_work() {
        let mut facts = node("580.159.04", (7, 0), "13.0.88");
        let as_wheel = |facts: &mut Facts| {
            if let Reading::Value(toolkits) = &mut facts.host.cuda_toolkits {
                toolkits[0].kind = CudaToolkitKind::PythonWheel;
            }
        };
        as_wheel(&mut facts);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Warn);
        let mut facts = node("580.159.04", (7, 0), "12.8.90");
        as_wheel(&mut facts);
        if let Reading::Value(toolkits) = &mut facts.host.cuda_toolkits {
            toolkits.push(toolkit("13.0.1"));
        }
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Fail);
    }

    #[test]
    fn toolkits_outside_the_table() {
        for (version, verdict) in [
            ("10.2.89", Verdict::Warn),
            ("13.9.0", Verdict::Warn),
            ("99.0.0", Verdict::Error),
        ] {
            let finding = judge(&node("580.159.04", (9, 0), version), "{}");
            assert_eq!(finding.verdict, verdict, "{}", finding.summary);
        }
        let finding = judge(&node("570.124.06", (9, 0), "13.9.0"), "{}");
        assert_eq!(finding.verdict, Verdict::Fail);
    }

    #[test]
    fn a_wheel_is_judged_by_its_release_not_its_build_number() {
        let mut facts = node("570.26", (9, 0), "12.8.90");
        if let Reading::Value(toolkits) = &mut facts.host.cuda_toolkits {
            toolkits[0].kind = CudaToolkitKind::PythonWheel;
        }
        let finding = judge(&facts, "{}");
        assert!(
            finding.summary.contains("works in full"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn a_compat_library_that_cuda_uses_counts_as_the_driver() {
        let mut facts = node("570.124.06", (9, 0), "13.0.0");
        let path = "/usr/local/cuda-13.0/compat";
        facts.host.cuda_compat = Reading::Value(vec![CudaCompatPackage {
            path: path.to_owned(),
            cuda_version: Some("13.0".to_owned()),
            libcuda_version: Some("580.65.06".to_owned()),
            on_loader_path: true,
        }]);
        facts.cuda.library = Reading::Value(format!("{path}/libcuda.so.580.65.06"));
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Pass);
        facts.cuda.init = Reading::NotRead("time-out".to_owned());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Fail);
    }

    #[test]
    fn toolkits_that_the_profile_asks_for_must_be_there() {
        for (wanted, verdict) in [
            ("13.0", Verdict::Pass),
            ("13.0.2", Verdict::Pass),
            ("13.0.1", Verdict::Fail),
            ("12.8", Verdict::Fail),
        ] {
            let finding = judge(
                &node("580.159.04", (9, 0), "13.0.2"),
                &format!("cuda: {{toolkits: ['{wanted}']}}"),
            );
            assert_eq!(finding.verdict, verdict, "{wanted}");
        }
        let mut facts = healthy_node();
        facts.host.cuda_toolkits = Reading::Value(Vec::new());
        let finding = judge(&facts, "cuda: {toolkits: ['12.8']}");
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "CUDA toolkit 12.8 is not on this machine, the profile requires it"
        );
    }

    #[test]
    fn skips_without_toolkits() {
        let mut facts = healthy_node();
        facts.host.cuda_toolkits = Reading::Value(Vec::new());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Skip);
    }

    #[test]
    fn errs_when_a_version_was_not_read() {
        let mut facts = node("580.159.04", (9, 0), "13.0.2");
        if let Reading::Value(toolkits) = &mut facts.host.cuda_toolkits {
            toolkits[0].version = Reading::NotRead("no version.json".to_owned());
        }
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
        assert_eq!(
            judge(&facts, "cuda: {toolkits: ['13.0']}").verdict,
            Verdict::Error
        );
        facts.host.cuda_toolkits = Reading::NotRead("not probed".to_owned());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
    }

    #[test]
    fn leaves_other_root_causes_to_their_own_checks() {
        let mut facts = healthy_node();
        facts.gpus.clear();
        if let Reading::Value(devices) = &mut facts.host.pci_devices {
            devices.clear();
        }
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Skip);
        unload_driver(&mut facts);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Skip);
        assert_eq!(
            judge(&facts, "cuda: {toolkits: ['12.8']}").verdict,
            Verdict::Fail
        );
    }
}
