//! The driver's libraries, firmware and fabric manager are of the modules' version.
//!
//! ## Why
//! The parts of a driver come in many packages. One that is not held at its version is newer in the
//! image than the kernel modules, and no instance of it starts CUDA.
//!
//! ## How it is judged
//! At level image only, from files. Against the version of the kernel modules on the disk: the
//! `libnvidia-ml` and `libcuda` that the loader would take (both must be there), the GSP firmware
//! below `/lib/firmware/nvidia` (must be there for the open modules, which need it), and fabric
//! manager where it is installed. CUDA toolkits that the profile requires (`cuda.toolkits`) must be
//! there. A `libcuda` of a `cuda-compat` package on the loader's path fails: whether it may be used
//! depends on GPUs that the image does not know.
//!
//! ## What to do
//! Install every part by the same full version, and hold them (`dnf versionlock`, `apt-mark hold`).
//!
//! ## Source
//! CUDA Compatibility, <https://docs.nvidia.com/deploy/cuda-compatibility/>; Fabric Manager User
//! Guide (its version must be the driver's),
//! <https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/>

use crate::check::{Check, Judge};
use crate::facts::{Facts, KernelModuleFlavor, LibraryFile, ModuleFile, Reading};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::{CudaVersion, Profile};
use crate::queries;
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "image_driver_components",
    stage: Stage::Host,
    level: Level::Image,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/deploy/cuda-compatibility/",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let image = queries::image(facts)?;
    let Some(module) = super::image_kernel_modules::first_module(image) else {
        return Err(queries::reported_by(
            "image_kernel_modules",
            "no kernel module of the driver was read",
            profile,
        ));
    };
    let mut tally = Tally::default();
    judge_library(
        "libnvidia-ml",
        &facts.host.libnvidia_ml_files,
        module,
        &mut tally,
    );
    judge_library("libcuda", &facts.host.libcuda_files, module, &mut tally);
    judge_firmware(&facts.host.gsp_firmware_versions, module, &mut tally);
    judge_fabric_manager(&image.fabric_manager_version, module, &mut tally);
    for wanted in &profile.cuda.toolkits {
        judge_toolkit(*wanted, facts, &mut tally)?;
    }
    let worst = tally.worst();
    let outcome = tally.outcome(Outcome::error("no component of the driver was read"));
    Ok(match worst {
        Some(Verdict::Pass) => Outcome::pass(format!(
            "libnvidia-ml, libcuda, firmware and what else is installed are of driver {}",
            module.version
        )),
        Some(Verdict::Fail) => outcome
            .expected(format!(
                "{}, the version of the kernel modules",
                module.version
            ))
            .remedy("install every part of the driver by the same full version and hold them"),
        _ => outcome,
    })
}

fn judge_library(
    name: &str,
    files: &Reading<Vec<LibraryFile>>,
    module: &ModuleFile,
    tally: &mut Tally,
) {
    let files = match files.required(name) {
        Ok(files) => files,
        Err(outcome) => return tally.error(outcome.summary),
    };
    match files.first() {
        None => tally.fail(format!("the loader finds no {name}")),
        Some(file) => match &file.version {
            Some(version) if *version == module.version => {
                tally.pass(format!("{name} is {version}"));
            }
            Some(version) => tally.fail(format!(
                "{name} is {version} ({}), the kernel modules are {}",
                file.resolved, module.version
            )),
            None => tally.error(format!("the name of {} has no version", file.resolved)),
        },
    }
}

fn judge_firmware(versions: &Reading<Vec<String>>, module: &ModuleFile, tally: &mut Tally) {
    match versions.required("GSP firmware") {
        Ok(versions) if versions.contains(&module.version) => {
            tally.pass(format!("GSP firmware {} is installed", module.version));
        }
        // The proprietary modules run the GPUs that have no GSP without it.
        Ok(versions) if versions.is_empty() && module.flavor == KernelModuleFlavor::Proprietary => {
        }
        Ok(versions) if versions.is_empty() => {
            tally.fail("the open modules need GSP firmware, and none is installed");
        }
        Ok(versions) => tally.fail(format!(
            "GSP firmware is {}, the kernel modules are {}",
            versions.join(", "),
            module.version
        )),
        Err(outcome) => tally.error(outcome.summary),
    }
}

fn judge_fabric_manager(version: &Reading<String>, module: &ModuleFile, tally: &mut Tally) {
    match version {
        Reading::Value(version) if *version == module.version => {
            tally.pass(format!("fabric manager is {version}"));
        }
        Reading::Value(version) => tally.fail(format!(
            "fabric manager is {version}, the kernel modules are {}",
            module.version
        )),
        Reading::NotRead(reason) => tally.error(format!("version of fabric manager: {reason}")),
        // Whether it must be there is for `image_services`.
        Reading::NotSupported => {}
    }
}

fn judge_toolkit(wanted: CudaVersion, facts: &Facts, tally: &mut Tally) -> Result<(), Outcome> {
    let toolkits = facts.host.cuda_toolkits.required("CUDA toolkits")?;
    let mut unread = None;
    for toolkit in toolkits {
        match toolkit.version.required("version of a CUDA toolkit") {
            Ok(version) => {
                let version: CudaVersion = version.parse().map_err(Outcome::error)?;
                let same_update = wanted.update.is_none() || wanted.update == version.update;
                if (version.major, version.minor) == (wanted.major, wanted.minor) && same_update {
                    tally.pass(format!("CUDA toolkit {wanted} is at {}", toolkit.path));
                    return Ok(());
                }
            }
            Err(outcome) => unread = Some(outcome.summary),
        }
    }
    match unread {
        Some(summary) => tally.error(summary),
        None => tally.fail(format!(
            "CUDA toolkit {wanted} is not installed, the profile requires it"
        )),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::facts::{Facts, LibraryFile, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_image, image_of, judge_image_check};

    fn judge(facts: &Facts, profile: &str) -> Finding {
        judge_image_check(&super::CHECK, facts, profile)
    }

    fn library(version: Option<&str>) -> Reading<Vec<LibraryFile>> {
        Reading::Value(vec![LibraryFile {
            path: "/usr/lib64/libcuda.so.1".to_owned(),
            resolved: "/usr/lib64/libcuda.so.x".to_owned(),
            version: version.map(str::to_owned),
        }])
    }

    #[test]
    fn passes_when_all_are_of_one_version() {
        let finding = judge(&healthy_image(), "cuda: {toolkits: [\"13.0\"]}");
        assert_eq!(finding.verdict, Verdict::Pass, "{finding:#?}");
        assert!(finding.summary.ends_with("are of driver 580.159.04"));
    }

    #[test]
    fn fails_for_each_part_of_another_version() {
        let changes: [fn(&mut Facts); 5] = [
            |it| it.host.libcuda_files = library(Some("580.200.01")),
            |it| it.host.libnvidia_ml_files = Reading::Value(Vec::new()),
            |it| it.host.gsp_firmware_versions = Reading::Value(Vec::new()),
            |it| it.host.gsp_firmware_versions = Reading::Value(vec!["570.86.15".to_owned()]),
            |it| {
                image_of(it).fabric_manager_version = Reading::Value("580.95.05".to_owned());
            },
        ];
        for change in changes {
            let mut facts = healthy_image();
            change(&mut facts);
            let finding = judge(&facts, "{}");
            assert_eq!(finding.verdict, Verdict::Fail, "{finding:#?}");
            assert!(finding.remedy.is_some());
        }
    }

    #[test]
    fn fails_without_a_toolkit_that_is_asked_for() {
        let finding = judge(&healthy_image(), "cuda: {toolkits: [\"12.8\"]}");
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "CUDA toolkit 12.8 is not installed, the profile requires it"
        );
    }

    #[test]
    fn errs_when_a_part_was_not_read() {
        let changes: [fn(&mut Facts); 4] = [
            |it| it.host.libcuda_files = library(None),
            |it| it.host.libcuda_files = Reading::default(),
            |it| it.host.gsp_firmware_versions = Reading::default(),
            |it| image_of(it).fabric_manager_version = Reading::default(),
        ];
        for change in changes {
            let mut facts = healthy_image();
            change(&mut facts);
            assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
        }
    }

    #[test]
    fn without_modules_it_is_left_to_the_check_that_reports_them() {
        let mut facts = healthy_image();
        image_of(&mut facts).kernels = Reading::Value(Vec::new());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Skip);
        let softened = "checks: {image_kernel_modules: {severity: warn, reason: known}}";
        assert_eq!(judge(&facts, softened).verdict, Verdict::Error);
    }
}
