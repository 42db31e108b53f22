//! A `cuda-compat` package helps where it is selected, and shadows no newer driver.
//!
//! ## Why
//! The package brings a newer `libcuda` for an older kernel module. Left on the loader's path after
//! a driver upgrade, its old `libcuda` is taken before the driver's newer one, and CUDA fails with
//! 803 or offers less than the driver can. On GPUs other than data center ones it fails with 804.
//!
//! ## How it is judged
//! Each compat folder that the loader selects (`LD_LIBRARY_PATH`, `ld.so.conf`) against the branch
//! of the kernel module by NVIDIA's matrix: compatible passes; not needed warns; one that holds an
//! older `libcuda` than the driver fails. A driver that is no base for the package fails, and so do
//! GPUs that are not data center products, unless CUDA initialises all the same: then an
//! unsupported base warns. A folder that nothing selects is no fault. `cuda.compat_package` of the
//! profile may require or forbid one. Skipped when there is none.
//!
//! ## What to do
//! Remove the package after a driver upgrade, or take its folder out of `LD_LIBRARY_PATH` and
//! `/etc/ld.so.conf.d`.
//!
//! ## Source
//! CUDA Compatibility, forward compatibility,
//! <https://docs.nvidia.com/deploy/cuda-compatibility/forward-compatibility.html>

use crate::check::{Check, Judge};
use crate::expect;
use crate::facts::{CudaCompatPackage, Facts};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::{CudaVersion, Profile, Requirement};
use crate::queries;
use crate::reference::{self, CompatVerdict, DriverVersion};
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "cuda_compat_package",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/deploy/cuda-compatibility/forward-compatibility.html",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let packages = facts.host.cuda_compat.required("cuda-compat packages")?;
    let requirement = profile.cuda.compat_package;
    match (requirement, packages.first()) {
        (Some(Requirement::Required), None) => {
            return Ok(Outcome::fail(
                "no cuda-compat package is on this machine, the profile requires one",
            )
            .remedy("install the cuda-compat package of the CUDA version that jobs need"));
        }
        (Some(Requirement::Forbidden), Some(package)) => {
            return Ok(Outcome::fail(format!(
                "the cuda-compat package {} is on this machine, the profile forbids it",
                package.path
            ))
            .remedy("remove the package"));
        }
        (Some(Requirement::Forbidden), None) => {
            return Ok(Outcome::pass("no cuda-compat package is on this machine"));
        }
        (_, None) => return Ok(Outcome::skip("no cuda-compat package is on this machine")),
        (_, Some(_)) => {}
    }
    let driver = queries::driver_version(facts, profile)?;
    let mut tally = Tally::default();
    for package in packages {
        if package.on_loader_path {
            judge_selected(package, &driver, facts, &mut tally);
        } else {
            tally.pass(format!("{} is not selected by the loader", package.path));
        }
    }
    let worst = tally.worst();
    let outcome = tally.outcome(Outcome::error("no cuda-compat package was judged"));
    Ok(match worst {
        Some(Verdict::Fail | Verdict::Warn) => outcome.remedy(
            "remove the package, or take its folder out of LD_LIBRARY_PATH and /etc/ld.so.conf.d",
        ),
        _ => outcome,
    })
}

fn judge_selected(
    package: &CudaCompatPackage,
    driver: &DriverVersion,
    facts: &Facts,
    tally: &mut Tally,
) {
    let path = &package.path;
    let libcuda: Option<DriverVersion> = package
        .libcuda_version
        .as_ref()
        .and_then(|it| it.parse().ok());
    if let Some(libcuda) = libcuda.as_ref().filter(|libcuda| *libcuda < driver) {
        tally.fail(format!(
            "{path} holds libcuda {libcuda} and shadows that of the newer driver {driver}"
        ));
        return;
    }
    let cuda_works = queries::cuda_initialised(facts);
    let models = expect::models_of(facts);
    if let Some(model) = models.iter().find(|it| !it.data_center)
        && !cuda_works
    {
        tally.fail(format!(
            "{path} is selected, but forward compatibility does not apply to {}",
            model.name
        ));
        return;
    }
    let Some(cuda) = cuda_version(package, libcuda.as_ref()) else {
        tally.error(format!("the CUDA version of {path} is not known"));
        return;
    };
    let branch = driver.branch();
    match reference::compat_verdict(cuda, branch) {
        CompatVerdict::Compatible => {
            tally.pass(format!("{path} lets CUDA {cuda} run on driver {driver}"));
        }
        CompatVerdict::NotNeeded => tally.warn(format!(
            "{path} is selected but not needed: driver {driver} offers CUDA {cuda} itself"
        )),
        CompatVerdict::NotCompatible if cuda_works => {
            tally.warn(format!(
                "{path} works with driver branch {branch}, which is no base for CUDA {cuda} in NVIDIA's matrix"
            ));
        }
        CompatVerdict::NotCompatible => tally.fail(format!(
            "{path} is selected, but driver branch {branch} is no base for CUDA {cuda}"
        )),
        CompatVerdict::UnknownPackage if cuda_works => {
            tally.warn(format!(
                "{path} works with driver {driver}, but NVIDIA's matrix does not list CUDA {cuda}"
            ));
        }
        CompatVerdict::UnknownPackage => tally.error(format!(
            "NVIDIA's matrix does not list CUDA {cuda} of {path}, so whether driver {driver} is a base for it is not known"
        )),
    }
}

/// The CUDA version of a package: that of its folder, else that of the driver branch which its
/// libcuda comes from.
fn cuda_version(
    package: &CudaCompatPackage,
    libcuda: Option<&DriverVersion>,
) -> Option<CudaVersion> {
    package
        .cuda_version
        .as_ref()
        .and_then(|it| it.parse().ok())
        .or_else(|| Some(reference::driver_branch(libcuda?.branch())?.cuda))
}

#[cfg(test)]
mod tests {
    use crate::facts::{CudaCompatPackage, CudaResult, Facts, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check, unload_driver};

    fn judge(facts: &Facts, profile: &str) -> Finding {
        judge_host_check(&super::CHECK, facts, profile)
    }

    /// A machine with this driver whose loader selects this package.
    fn node(driver: &str, cuda: Option<&str>, libcuda: Option<&str>) -> Facts {
        let mut facts = healthy_node();
        if let Reading::Value(modules) = &mut facts.host.kernel_modules {
            modules.nvidia_version = Reading::Value(driver.to_owned());
        }
        facts.host.cuda_compat = Reading::Value(vec![CudaCompatPackage {
            path: "/usr/local/cuda/compat".to_owned(),
            cuda_version: cuda.map(str::to_owned),
            libcuda_version: libcuda.map(str::to_owned),
            on_loader_path: true,
        }]);
        facts
    }

    fn break_cuda(facts: &mut Facts) {
        facts.cuda.init = Reading::Value(CudaResult {
            code: 803,
            name: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH".to_owned(),
        });
    }

    #[test]
    fn judges_by_the_matrix() {
        for (driver, cuda, libcuda, verdict, words) in [
            (
                "570.124.06",
                "13.0",
                "580.65.06",
                Verdict::Pass,
                "lets CUDA 13.0 run",
            ),
            (
                "535.54.03",
                "12.8",
                "570.124.06",
                Verdict::Pass,
                "lets CUDA 12.8 run",
            ),
            (
                "580.65.06",
                "13.0",
                "580.95.05",
                Verdict::Warn,
                "not needed",
            ),
            (
                "580.65.06",
                "13.0",
                "580.65.06",
                Verdict::Warn,
                "not needed",
            ),
            ("580.159.04", "13.0", "580.65.06", Verdict::Fail, "shadows"),
            ("580.159.04", "12.4", "550.54.15", Verdict::Fail, "shadows"),
        ] {
            let finding = judge(&node(driver, Some(cuda), Some(libcuda)), "{}");
            assert_eq!(finding.verdict, verdict, "{}", finding.summary);
            assert!(finding.summary.contains(words), "{}", finding.summary);
        }
    }

    #[test]
    fn a_driver_that_is_no_base_fails_unless_cuda_works() {
        let mut facts = node("550.54.15", Some("12.8"), Some("570.124.06"));
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Warn);
        break_cuda(&mut facts);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Fail);
    }

    #[test]
    fn a_package_that_no_matrix_lists() {
        let mut facts = node("580.159.04", Some("19.0"), Some("900.10"));
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Warn);
        break_cuda(&mut facts);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
    }

    #[test]
    fn the_libcuda_tells_the_version_where_the_folder_does_not() {
        let facts = node("570.124.06", None, Some("580.65.06"));
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Pass);
        assert_eq!(
            judge(&node("570.124.06", None, None), "{}").verdict,
            Verdict::Error
        );
    }

    #[test]
    fn does_not_apply_to_other_than_data_center_gpus() {
        let consumer = crate::reference::gpu_models()
            .iter()
            .find(|model| !model.data_center)
            .expect("the reference table has one");
        let mut facts = node("570.124.06", Some("13.0"), Some("580.65.06"));
        facts.gpus[0].name = Reading::Value(consumer.product_names[0].clone());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Pass);
        break_cuda(&mut facts);
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(
            finding.summary.contains("does not apply"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn what_nothing_selects_is_no_fault() {
        let mut facts = node("580.159.04", Some("12.4"), Some("550.54.15"));
        if let Reading::Value(packages) = &mut facts.host.cuda_compat {
            packages[0].on_loader_path = false;
        }
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Pass);
    }

    #[test]
    fn a_profile_may_require_or_forbid_one() {
        let with = node("570.124.06", Some("13.0"), Some("580.65.06"));
        let without = healthy_node();
        for (facts, asked, verdict) in [
            (&with, "required", Verdict::Pass),
            (&with, "allowed", Verdict::Pass),
            (&with, "forbidden", Verdict::Fail),
            (&without, "required", Verdict::Fail),
            (&without, "allowed", Verdict::Skip),
            (&without, "forbidden", Verdict::Pass),
        ] {
            let profile = format!("cuda: {{compat_package: {asked}}}");
            assert_eq!(judge(facts, &profile).verdict, verdict, "{asked}");
        }
        assert_eq!(judge(&without, "{}").verdict, Verdict::Skip);
    }

    #[test]
    fn errs_when_it_was_not_read() {
        let mut facts = healthy_node();
        facts.host.cuda_compat = Reading::NotRead("not probed".to_owned());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
    }

    #[test]
    fn leaves_a_missing_module_to_its_own_check() {
        let mut facts = node("570.124.06", Some("13.0"), Some("580.65.06"));
        unload_driver(&mut facts);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Skip);
    }
}
