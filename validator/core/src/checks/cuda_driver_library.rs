//! The CUDA driver library loads and initialises.
//!
//! ## Why
//! Every CUDA program begins with `libcuda.so.1` and `cuInit`. When that fails, no program on this
//! node reaches a GPU, while `nvidia-smi`, which does not use CUDA, may report no error.
//!
//! ## How it is judged
//! A process of its own loads the library and calls `cuInit`. An error code fails, with its meaning
//! in words: 802 is a fabric manager that does not run, 803 a libcuda that does not fit the kernel
//! module, 804 a `cuda-compat` package on a GPU that does not support it, 999 mostly a missing
//! `nvidia_uvm`. It fails, too, when no libcuda is on the loader's path though the driver is
//! loaded, or when the loader finds one that it cannot load (an empty file, for instance). A
//! process that hung or crashed is an error. It warns when the library lies in a folder where the
//! loader does not search: this validator tries such folders, other programs do not.
//!
//! `CUDA_DEVICE_ORDER` with any other value than `PCI_BUS_ID` or `FASTEST_FIRST`, nothing included,
//! is reported as the cause where `cuInit` fails for it.
//!
//! ## What to do
//! Follow the finding's remedy for the code. `/usr/local/cuda*/compat` and `…/stubs` do not belong
//! into `LD_LIBRARY_PATH` by default.
//!
//! ## Source
//! CUDA Driver API, error codes,
//! <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html>; DCGM's deployment check
//! "CUDA Main Library".

use crate::check::{Check, Judge};
use crate::facts::{CudaResult, Facts, Reading};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;
use crate::reference::explain_cuda_error;

pub(crate) const CHECK: Check = Check {
    id: "cuda_driver_library",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html",
};

/// `CUDA_ERROR_NO_DEVICE` (cuda.h).
const NO_DEVICE: u32 = 100;
/// `CUDA_ERROR_INVALID_DEVICE`: what `cuInit` answers where `CUDA_VISIBLE_DEVICES` names a GPU
/// twice.
const INVALID_DEVICE: u32 = 101;

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let cuda = &facts.cuda;
    match (&cuda.library, &cuda.init) {
        (Reading::Value(path), Reading::Value(init)) if init.code == 0 => {
            if !cuda.probe_trouble.is_empty() {
                return Ok(Outcome::warn(format!(
                    "CUDA initialised with trouble: {}",
                    cuda.probe_trouble.join("; ")
                ))
                .expected("every call returns")
                .remedy("check for Xids: dmesg | grep NVRM"));
            }
            if let Some(by_path) = &cuda.loaded_by_path {
                let unloadable = cuda.unloadable.as_deref();
                return Ok(queries::not_on_loader_path(
                    "libcuda.so.1",
                    by_path,
                    unloadable,
                ));
            }
            Ok(Outcome::pass(format!("CUDA initialises with {path}")))
        }
        (_, Reading::Value(init)) => judge_failed_init(init, facts, profile),
        _ => judge_not_initialised(facts, profile),
    }
}

fn judge_failed_init(init: &CudaResult, facts: &Facts, profile: &Profile) -> Judgement {
    if [NO_DEVICE, INVALID_DEVICE].contains(&init.code) {
        queries::loaded_driver(facts, profile)?;
        if init.code == NO_DEVICE && facts.gpus.is_empty() {
            return Err(queries::reported_by(
                "gpu_count",
                "CUDA finds no GPU, and neither does NVML",
                profile,
            ));
        }
        if super::cuda_visible_devices::is_garbled(facts) {
            return Err(queries::reported_by(
                "cuda_visible_devices",
                "CUDA_VISIBLE_DEVICES hides every GPU from CUDA",
                profile,
            ));
        }
    }
    let observed = format!("{} ({})", init.name, init.code);
    if init.code == INVALID_DEVICE
        && let Some(order) = unknown_order(facts)
    {
        return Ok(Outcome::fail(format!(
            "CUDA does not initialise: {observed}: CUDA_DEVICE_ORDER is `{order}`, which CUDA does not know"
        ))
        .expected("PCI_BUS_ID or FASTEST_FIRST")
        .observed(order)
        .remedy("unset CUDA_DEVICE_ORDER; set to nothing it is as wrong as with another word"));
    }
    let outcome = match explain_cuda_error(init.code) {
        Some(explanation) => Outcome::fail(format!(
            "CUDA does not initialise: {observed}: {}",
            explanation.meaning
        ))
        .remedy(explanation.remedy.clone()),
        None => Outcome::fail(format!("CUDA does not initialise: {observed}"))
            .remedy("read the kernel log: dmesg | grep NVRM"),
    };
    Ok(outcome.expected("CUDA_SUCCESS (0)").observed(observed))
}

/// A `CUDA_DEVICE_ORDER` with which `cuInit` fails: all but two words, exactly written (driver
/// 580.159.04 on an H200).
fn unknown_order(facts: &Facts) -> Option<&str> {
    let order = facts.host.environment.value()?.get("CUDA_DEVICE_ORDER")?;
    (!["PCI_BUS_ID", "FASTEST_FIRST"].contains(&order.as_str())).then_some(order)
}

fn judge_not_initialised(facts: &Facts, profile: &Profile) -> Judgement {
    queries::loaded_driver(facts, profile)?;
    let nothing_to_load = facts.host.libcuda_files.value().is_some_and(Vec::is_empty);
    if nothing_to_load && facts.cuda.library.value().is_none() {
        return Ok(Outcome::fail(
            "kernel module nvidia is loaded, but no libcuda.so.1 is on the loader's path",
        )
        .expected("libcuda.so.1 of the driver's version")
        .remedy("install the driver's compute libraries of exactly the module's version, then run ldconfig"));
    }
    let reason = match (&facts.cuda.library, &facts.cuda.init) {
        (Reading::NotRead(reason), _) | (_, Reading::NotRead(reason)) => reason.as_str(),
        _ => "not supported",
    };
    let trouble = facts.cuda.probe_trouble.join("; ");
    let mut summary = format!("CUDA could not be queried: {reason}");
    if !trouble.is_empty() && trouble != reason {
        summary = format!("{summary} ({trouble})");
    }
    Ok(Outcome::error(summary).remedy(
        "try it by hand, for instance with deviceQuery; for a hang check for Xids: dmesg | grep NVRM",
    ))
}

#[cfg(test)]
mod tests {
    use crate::facts::{CudaFacts, CudaResult, Facts, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check, unload_driver};

    fn judge(facts: &Facts) -> Finding {
        judge_host_check(&super::CHECK, facts, "{}")
    }

    fn node_with_init(code: u32, name: &str) -> Facts {
        let mut facts = healthy_node();
        facts.cuda.init = Reading::Value(CudaResult {
            code,
            name: name.to_owned(),
        });
        facts.cuda.devices = Reading::NotRead("cuInit failed".to_owned());
        facts
    }

    #[test]
    fn passes_when_it_initialises() {
        let finding = judge(&healthy_node());
        assert_eq!(finding.verdict, Verdict::Pass);
        assert_eq!(
            finding.summary,
            "CUDA initialises with /usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04"
        );
    }

    #[test]
    fn explains_what_init_answers() {
        for (code, name, words) in [
            (802, "CUDA_ERROR_SYSTEM_NOT_READY", "fabric"),
            (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "libcuda"),
            (804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "compat"),
            (999, "CUDA_ERROR_UNKNOWN", "nvidia-uvm"),
            (100, "CUDA_ERROR_NO_DEVICE", "no GPU"),
            (34, "CUDA_ERROR_STUB_LIBRARY", "stub"),
        ] {
            let finding = judge(&node_with_init(code, name));
            assert_eq!(finding.verdict, Verdict::Fail, "{name}");
            let text = format!("{} {}", finding.summary, finding.remedy.unwrap_or_default());
            assert!(text.contains(name) && text.contains(words), "{text}");
        }
    }

    #[test]
    fn a_code_without_an_explanation_still_fails() {
        assert_eq!(
            judge(&node_with_init(12_345, "12345")).verdict,
            Verdict::Fail
        );
    }

    #[test]
    fn fails_when_the_library_is_not_installed() {
        let mut facts = healthy_node();
        facts.cuda = CudaFacts::default();
        facts.cuda.library = Reading::NotRead("libcuda.so.1: cannot open".to_owned());
        facts.host.libcuda_files = Reading::Value(Vec::new());
        assert_eq!(judge(&facts).verdict, Verdict::Fail);
    }

    #[test]
    fn errs_when_it_could_not_be_asked() {
        let mut facts = healthy_node();
        facts.cuda = CudaFacts::default();
        assert_eq!(judge(&facts).verdict, Verdict::Error);
        facts.cuda.library = healthy_node().cuda.library;
        facts.cuda.init = Reading::NotRead("time-out after 60 s".to_owned());
        facts.cuda.probe_trouble = vec!["killed after 60 s in cuInit".to_owned()];
        let finding = judge(&facts);
        assert_eq!(finding.verdict, Verdict::Error);
        assert_eq!(
            finding.summary,
            "CUDA could not be queried: time-out after 60 s (killed after 60 s in cuInit)"
        );
    }

    #[test]
    fn warns_of_trouble_after_it_initialised() {
        let mut facts = healthy_node();
        facts.cuda.probe_trouble = vec!["ended by signal 11".to_owned()];
        assert_eq!(judge(&facts).verdict, Verdict::Warn);
    }

    #[test]
    fn warns_when_programs_do_not_find_it() {
        let mut facts = healthy_node();
        facts.cuda.loaded_by_path = Some("/run/nvidia/driver/usr/lib64/libcuda.so.1".to_owned());
        let finding = judge(&facts);
        assert_eq!(finding.verdict, Verdict::Warn);
        assert_eq!(
            finding.summary,
            "libcuda.so.1 lies in /run/nvidia/driver/usr/lib64, outside the loader's search path: programs do not find it"
        );
    }

    #[test]
    fn fails_when_programs_find_a_file_that_does_not_load() {
        let mut facts = healthy_node();
        facts.cuda.loaded_by_path = Some("/usr/lib64/libcuda.so.1".to_owned());
        let error = "/usr/lib/libcuda.so.1: file too short";
        facts.cuda.unloadable = Some(error.to_owned());
        let finding = judge(&facts);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(finding.summary.contains(error), "{}", finding.summary);
    }

    #[test]
    fn an_order_that_cuda_does_not_know_is_named() {
        let judged = |order: &str| {
            let mut facts = node_with_init(101, "CUDA_ERROR_INVALID_DEVICE");
            facts.host.environment =
                Reading::Value([("CUDA_DEVICE_ORDER".to_owned(), order.to_owned())].into());
            judge(&facts)
        };
        for order in ["", "pci_bus_id", "PCI_BUS_ID "] {
            let finding = judged(order);
            assert_eq!(finding.verdict, Verdict::Fail);
            let says = format!("CUDA_DEVICE_ORDER is `{order}`, which CUDA does not know");
            assert!(finding.summary.contains(&says), "{}", finding.summary);
        }
        let known = judged("PCI_BUS_ID").summary;
        assert!(!known.contains("CUDA_DEVICE_ORDER"), "{known}");
    }

    #[test]
    fn leaves_other_root_causes_to_their_own_checks() {
        let named = |facts: &Facts, check: &str| {
            let finding = judge(facts);
            assert_eq!(finding.verdict, Verdict::Skip, "{finding:#?}");
            assert!(finding.summary.contains(check), "{}", finding.summary);
        };
        let mut facts = node_with_init(100, "CUDA_ERROR_NO_DEVICE");
        facts.host.environment =
            Reading::Value([("CUDA_VISIBLE_DEVICES".to_owned(), String::new())].into());
        named(&facts, "cuda_visible_devices");

        let mut facts = node_with_init(101, "CUDA_ERROR_INVALID_DEVICE");
        facts.host.environment =
            Reading::Value([("CUDA_VISIBLE_DEVICES".to_owned(), "0,0".to_owned())].into());
        named(&facts, "cuda_visible_devices");

        let mut facts = node_with_init(100, "CUDA_ERROR_NO_DEVICE");
        facts.gpus.clear();
        named(&facts, "gpu_count");

        let mut facts = healthy_node();
        facts.cuda = CudaFacts::default();
        unload_driver(&mut facts);
        named(&facts, "kernel_module_loaded");
    }
}
