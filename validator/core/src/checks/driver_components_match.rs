//! Kernel module, NVML, libcuda and GSP firmware are of one driver version.
//!
//! ## Why
//! The parts of a driver speak to each other in a private language that changes with every version.
//! After an upgrade without a reboot, or with two packages that own parts of the driver, nothing
//! starts: `Driver/library version mismatch`, CUDA error 803, or a GPU that does not initialise.
//!
//! ## How it is judged
//! Every version that can be read must equal that of the loaded kernel module: what NVML reports of
//! the driver, NVML's own, the `libnvidia-ml` and `libcuda` files that the loader would take, and
//! the firmware that each GPU's GSP runs. Where the loader would find no such file although NVML or
//! CUDA was loaded, the loaded file's name must contain the version, or it is an `error`. A
//! `libcuda` from a `cuda-compat` folder is left to `cuda_compat_package`. A pass names what was
//! compared.
//!
//! ## What to do
//! Reboot after a driver upgrade. If that does not help, remove every NVIDIA driver package and
//! install one version.
//!
//! ## Source
//! CUDA Compatibility, <https://docs.nvidia.com/deploy/cuda-compatibility/>; open kernel modules
//! need GSP firmware and user-space components of the same release
//! (<https://github.com/NVIDIA/open-gpu-kernel-modules>).

use crate::check::{Check, Judge};
use crate::facts::{Facts, GpuFacts, LibraryFile, Reading};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;
use crate::reference::DriverVersion;
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "driver_components_match",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/deploy/cuda-compatibility/",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let module = queries::driver_version(facts, profile)?;
    let mut tally = Tally::default();
    let nvml_answers = facts.nvml.initialized == Reading::Value(true);
    let mut compared = vec!["kernel module"];
    if compare_library(
        &facts.host.libnvidia_ml_files,
        nvml_answers.then(|| facts.nvml.library_path.as_deref().unwrap_or_default()),
        "libnvidia-ml",
        (facts, &module),
        &mut tally,
    ) {
        compared.push("libnvidia-ml");
    }
    if compare_library(
        &facts.host.libcuda_files,
        facts.cuda.library.value().map(String::as_str),
        "libcuda",
        (facts, &module),
        &mut tally,
    ) {
        compared.push("libcuda");
    }
    if nvml_answers {
        compare_nvml(facts, &module, &mut tally);
        compared.push("NVML");
        let mut any_gsp = false;
        for gpu in &facts.gpus {
            any_gsp |= compare_gsp_firmware(gpu, &module, &mut tally);
        }
        if any_gsp {
            compared.push("GSP firmware");
        }
    }
    let worst = tally.worst();
    if !nvml_answers && worst != Some(Verdict::Fail) {
        return Err(queries::reported_by(
            "nvml_library",
            "NVML's version could not be compared because NVML does not answer",
            profile,
        ));
    }
    let outcome = tally.outcome(Outcome::error("no component of the driver was compared"));
    Ok(match worst {
        Some(Verdict::Pass) => Outcome::pass(format!(
            "{} are of driver {module}",
            compared.join(", ")
        )),
        Some(Verdict::Fail) => outcome
            .expected(format!("{module}, the version of the loaded kernel module"))
            .remedy(
                "reboot to load the module that was installed; if that does not help, remove every NVIDIA driver package \
                 and install one version",
            ),
        _ => outcome,
    })
}

/// Whether the file lies in the folder of a `cuda-compat` package.
fn is_of_compat_package(facts: &Facts, resolved: &str) -> bool {
    let packages = facts.host.cuda_compat.value().into_iter().flatten();
    packages
        .into_iter()
        .any(|package| resolved.starts_with(&format!("{}/", package.path)))
}

/// Compares the file that the loader would take, else the one that is `loaded`; whether there was
/// one to compare.
fn compare_library(
    files: &Reading<Vec<LibraryFile>>,
    loaded: Option<&str>,
    name: &str,
    (facts, module): (&Facts, &DriverVersion),
    tally: &mut Tally,
) -> bool {
    let files = match files.required("the loader's libraries") {
        Ok(files) => files,
        Err(outcome) => {
            tally.error(format!("{name}: {}", outcome.summary));
            return false;
        }
    };
    let own = files
        .iter()
        .find(|file| !is_of_compat_package(facts, &file.resolved));
    let (path, version) = match (own, loaded) {
        (Some(file), _) => (file.resolved.as_str(), file.version.as_deref()),
        (None, Some(loaded)) if !is_of_compat_package(facts, loaded) => {
            (loaded, version_in_name(loaded))
        }
        // A library that is not there is reported by nvml_library and cuda_driver_library.
        (None, _) => return false,
    };
    match version {
        Some(version) => compare(path, version, module, tally),
        None if own.is_some() => tally.error(format!(
            "the version of {path} cannot be determined from its name"
        )),
        None => tally.error(format!(
            "{name} is loaded, but the loader finds no such file whose version could be compared"
        )),
    }
    true
}

/// `580.159.04` of `/usr/lib/libcuda.so.580.159.04`.
fn version_in_name(path: &str) -> Option<&str> {
    let (_, version) = path.rsplit_once(".so.")?;
    version.contains('.').then_some(version)
}

fn compare_nvml(facts: &Facts, module: &DriverVersion, tally: &mut Tally) {
    match facts.nvml.driver_version.required("NVML's driver version") {
        Ok(version) => compare("the driver that NVML speaks to", version, module, tally),
        Err(outcome) => tally.error(outcome.summary),
    }
    match facts.nvml.nvml_version.required("NVML's version") {
        // NVML puts the CUDA version's major number before the driver's: 13.580.159.04.
        Ok(version) => match version.split_once('.') {
            Some((_, driver)) => compare("NVML", driver, module, tally),
            None => tally.error(format!("NVML's version `{version}` makes no sense")),
        },
        Err(outcome) => tally.error(outcome.summary),
    }
}

/// Whether there was a version to compare.
fn compare_gsp_firmware(gpu: &GpuFacts, module: &DriverVersion, tally: &mut Tally) -> bool {
    let what = format!("GSP firmware of {}", queries::name_of(gpu));
    match &gpu.gsp_firmware_version {
        Reading::Value(version) => compare(&what, version, module, tally),
        // Without a GSP, or with it turned off, there is no firmware to match.
        Reading::NotSupported => {}
        // NVML gives no other value of a lost GPU either; its own checks report that.
        Reading::NotRead(_) if gpu.lost.is_some() => {}
        Reading::NotRead(reason) => tally.error(format!("{what} could not be read: {reason}")),
    }
    gpu.gsp_firmware_version.value().is_some()
}

fn compare(what: &str, version: &str, module: &DriverVersion, tally: &mut Tally) {
    match version.parse::<DriverVersion>() {
        Err(error) => tally.error(format!("{what}: {error}")),
        Ok(version) if version == *module => tally.pass(format!("{what} is of {version}")),
        Ok(version) => tally.fail(format!(
            "{what} is of {version}, the loaded kernel module is {module}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use crate::facts::{CudaCompatPackage, Facts, LibraryFile, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check};

    fn judge(facts: &Facts) -> Finding {
        judge_host_check(&super::CHECK, facts, "{}")
    }

    fn library(path: &str, version: Option<&str>) -> LibraryFile {
        LibraryFile {
            path: path.to_owned(),
            resolved: path.to_owned(),
            version: version.map(str::to_owned),
        }
    }

    /// Every GPU's firmware is of this version.
    fn node_with_firmware(version: &str) -> Facts {
        let mut facts = healthy_node();
        for gpu in &mut facts.gpus {
            gpu.gsp_firmware_version = Reading::Value(version.to_owned());
        }
        facts
    }

    #[test]
    fn passes_when_all_are_of_one_version() {
        let finding = judge(&node_with_firmware("580.159.04"));
        assert_eq!(finding.verdict, Verdict::Pass, "{finding:#?}");
    }

    #[test]
    fn gpus_without_a_gsp_have_nothing_to_match() {
        let mut facts = node_with_firmware("580.159.04");
        for gpu in &mut facts.gpus {
            gpu.gsp_firmware_version = Reading::NotSupported;
        }
        assert_eq!(judge(&facts).verdict, Verdict::Pass);
    }

    #[test]
    fn fails_when_one_component_is_of_another_version() {
        let breakages: [fn(&mut Facts); 5] = [
            |facts| {
                facts.host.libcuda_files = Reading::Value(vec![library(
                    "/usr/lib/libcuda.so.580.95.05",
                    Some("580.95.05"),
                )]);
            },
            |facts| {
                facts.host.libnvidia_ml_files = Reading::Value(vec![library(
                    "/usr/lib/libnvidia-ml.so.590.44.01",
                    Some("590.44.01"),
                )]);
            },
            |facts| facts.nvml.driver_version = Reading::Value("580.95.05".to_owned()),
            |facts| facts.nvml.nvml_version = Reading::Value("13.580.95.05".to_owned()),
            |facts| facts.gpus[2].gsp_firmware_version = Reading::Value("580.95.05".to_owned()),
        ];
        for break_one in breakages {
            let mut facts = node_with_firmware("580.159.04");
            break_one(&mut facts);
            let finding = judge(&facts);
            assert_eq!(finding.verdict, Verdict::Fail);
            assert!(
                finding
                    .summary
                    .ends_with("the loaded kernel module is 580.159.04"),
                "{}",
                finding.summary
            );
        }
    }

    #[test]
    fn an_upgrade_without_reboot_is_told_although_nvml_does_not_answer() {
        let mut facts = healthy_node();
        facts.gpus.clear();
        facts.nvml.initialized = Reading::NotRead("driver/library version mismatch".to_owned());
        facts.host.libnvidia_ml_files = Reading::Value(vec![library(
            "/usr/lib/libnvidia-ml.so.580.200.01",
            Some("580.200.01"),
        )]);
        assert_eq!(judge(&facts).verdict, Verdict::Fail);
    }

    #[test]
    fn leaves_an_nvml_that_does_not_answer_to_its_own_check() {
        let mut facts = healthy_node();
        facts.gpus.clear();
        facts.nvml.initialized = Reading::NotRead("no library".to_owned());
        let finding = judge(&facts);
        assert_eq!(finding.verdict, Verdict::Skip);
        assert!(finding.summary.contains("nvml_library"));
    }

    #[test]
    fn a_pass_names_only_what_was_compared() {
        let mut facts = healthy_node();
        for gpu in &mut facts.gpus {
            gpu.gsp_firmware_version = Reading::NotSupported;
        }
        let everything = "kernel module, libnvidia-ml, libcuda, NVML are of driver 580.159.04";
        assert_eq!(judge(&facts).summary, everything);
        facts.host.libcuda_files = Reading::Value(Vec::new());
        facts.cuda.library = Reading::NotRead("no library".to_owned());
        let finding = judge(&facts);
        assert_eq!(finding.verdict, Verdict::Pass);
        let without = "kernel module, libnvidia-ml, NVML are of driver 580.159.04";
        assert_eq!(finding.summary, without);
    }

    #[test]
    fn a_library_that_only_its_path_loads_is_compared_by_its_name() {
        let mut facts = healthy_node();
        facts.host.libcuda_files = Reading::Value(Vec::new());
        let mut loaded = |path: &str| {
            facts.cuda.library = Reading::Value(path.to_owned());
            judge(&facts).verdict
        };
        assert_eq!(loaded("/opt/lib/libcuda.so.580.159.04"), Verdict::Pass);
        assert_eq!(loaded("/opt/lib/libcuda.so.570.26"), Verdict::Fail);
        assert_eq!(loaded("/opt/lib/libcuda.so.1"), Verdict::Error);
        let mut facts = healthy_node();
        facts.host.libnvidia_ml_files = Reading::Value(Vec::new());
        facts.nvml.library_path = None;
        assert_eq!(judge(&facts).verdict, Verdict::Error);
    }

    #[test]
    fn a_compat_library_is_judged_elsewhere() {
        let mut facts = node_with_firmware("580.159.04");
        facts.host.cuda_compat = Reading::Value(vec![CudaCompatPackage {
            path: "/usr/local/cuda-13.1/compat".to_owned(),
            ..CudaCompatPackage::default()
        }]);
        if let Reading::Value(files) = &mut facts.host.libcuda_files {
            files.insert(
                0,
                library(
                    "/usr/local/cuda-13.1/compat/libcuda.so.590.44.01",
                    Some("590.44.01"),
                ),
            );
        }
        assert_eq!(judge(&facts).verdict, Verdict::Pass);
    }

    #[test]
    fn errs_when_a_version_was_not_read() {
        let breakages: [fn(&mut Facts); 5] = [
            |facts| facts.host.libcuda_files = Reading::NotRead("not probed".to_owned()),
            |facts| {
                facts.host.libcuda_files =
                    Reading::Value(vec![library("/usr/lib/libcuda.so.1", None)]);
            },
            |facts| facts.nvml.driver_version = Reading::NotRead("unknown error".to_owned()),
            |facts| facts.nvml.nvml_version = Reading::Value("580".to_owned()),
            |facts| {
                facts.gpus[1].gsp_firmware_version = Reading::NotRead("time-out".to_owned());
            },
        ];
        for break_one in breakages {
            let mut facts = node_with_firmware("580.159.04");
            break_one(&mut facts);
            assert_eq!(judge(&facts).verdict, Verdict::Error);
        }
    }
}
