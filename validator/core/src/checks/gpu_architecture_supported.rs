//! The driver supports the architecture of every GPU.
//!
//! ## Why
//! Drivers drop old GPUs: 580 is the last branch for Maxwell, Pascal and Volta, so that a
//! newer driver on a P3 instance finds no GPU. And a driver older than a GPU does not know it:
//! Blackwell needs 570 or newer.
//!
//! ## How it is judged
//! A GPU that CUDA offers is supported. For every other GPU the branch of the loaded kernel module
//! is compared with its compute capability: the branch must not be newer than the last one that
//! supports it, nor older than the first. Other reasons why CUDA does not offer a GPU are judged by
//! `gpu_count` and `cuda_driver_library`.
//!
//! ## What to do
//! Install a driver of a branch that supports the GPUs.
//!
//! ## Source
//! CUDA Toolkit Release Notes, <https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/>; NVIDIA
//! data center driver release notes on discontinued architectures.

use crate::check::{Check, Judge};
use crate::facts::Facts;
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries::{self, GpuArchitecture, counted};
use crate::reference;
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "gpu_architecture_supported",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let driver = queries::driver_version(facts, profile)?;
    let gpus = queries::gpu_architectures(facts, profile)?;
    let branch = driver.branch();
    let mut tally = Tally::default();
    for gpu in &gpus {
        judge_gpu(gpu, branch, &mut tally);
    }
    let worst = tally.worst();
    let outcome = tally.outcome(Outcome::error("no GPU was judged"));
    Ok(match worst {
        Some(Verdict::Pass) => Outcome::pass(format!(
            "driver branch {branch} supports the architecture of {}",
            counted(gpus.len(), "GPU")
        )),
        Some(Verdict::Fail) => {
            outcome.remedy("install a driver of a branch that supports these GPUs, and reboot")
        }
        _ => outcome,
    })
}

fn judge_gpu(gpu: &GpuArchitecture, branch: u32, tally: &mut Tally) {
    let name = &gpu.gpu;
    if gpu.offered_by_cuda {
        tally.pass(format!("CUDA offers {name}"));
        return;
    }
    let Some(capability) = gpu.compute_capability else {
        tally.error(format!("compute capability of {name} is not known"));
        return;
    };
    let Some(row) = reference::driver_branch(branch) else {
        tally.error(format!(
            "driver branch {branch} is not in the reference table, so whether it supports {name} is not known"
        ));
        return;
    };
    let minimum = row.compute_capability_minimum;
    let oldest = reference::oldest_driver_branch(capability);
    if capability < minimum {
        tally.fail(format!(
            "{name} has compute capability {capability}, driver branch {branch} supports {minimum} and newer"
        ));
    } else if let Some(oldest) = oldest.filter(|oldest| branch < *oldest) {
        tally.fail(format!(
            "{name} has compute capability {capability}, for which driver branch {oldest} is the first; this is {branch}"
        ));
    } else {
        tally.pass(format!("{name} has compute capability {capability}"));
    }
}

#[cfg(test)]
mod tests {
    use crate::facts::{ComputeCapability, CudaFacts, Facts, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check, unload_driver};

    fn judge(facts: &Facts) -> Finding {
        judge_host_check(&super::CHECK, facts, "{}")
    }

    fn node(driver: &str, major: u32, minor: u32) -> Facts {
        let mut facts = healthy_node();
        if let Reading::Value(modules) = &mut facts.host.kernel_modules {
            modules.nvidia_version = Reading::Value(driver.to_owned());
        }
        for gpu in &mut facts.gpus {
            gpu.compute_capability = Reading::Value(ComputeCapability { major, minor });
        }
        facts.cuda = CudaFacts::default();
        facts
    }

    #[test]
    fn judges_by_branch_and_architecture() {
        for (driver, major, minor, verdict) in [
            ("580.159.04", 9, 0, Verdict::Pass),
            ("580.159.04", 7, 0, Verdict::Pass),
            ("590.48.01", 7, 0, Verdict::Fail),
            ("590.48.01", 7, 5, Verdict::Pass),
            ("535.54.03", 9, 0, Verdict::Pass),
            ("535.54.03", 10, 0, Verdict::Fail),
            ("570.124.06", 10, 0, Verdict::Pass),
        ] {
            let finding = judge(&node(driver, major, minor));
            assert_eq!(finding.verdict, verdict, "{driver} {major}.{minor}");
        }
    }

    #[test]
    fn what_cuda_offers_is_supported_whatever_a_table_says() {
        let mut facts = node("999.10", 9, 0);
        facts.cuda = healthy_node().cuda;
        assert_eq!(judge(&facts).verdict, Verdict::Pass);
    }

    #[test]
    fn errs_for_a_branch_that_no_table_knows() {
        assert_eq!(judge(&node("999.10", 9, 0)).verdict, Verdict::Error);
    }

    #[test]
    fn errs_when_an_architecture_is_not_known() {
        let mut facts = node("580.159.04", 9, 0);
        facts.gpus[0].compute_capability = Reading::NotRead("unknown error".to_owned());
        facts.gpus[0].name = Reading::Value("NVIDIA Unheard-of".to_owned());
        facts.gpus[0].pci_device_id = Reading::Value(0xffff);
        assert_eq!(judge(&facts).verdict, Verdict::Error);
    }

    #[test]
    fn leaves_what_is_missing_to_its_own_check() {
        let mut facts = node("580.159.04", 9, 0);
        facts.gpus.clear();
        if let Reading::Value(devices) = &mut facts.host.pci_devices {
            devices.clear();
        }
        assert_eq!(judge(&facts).verdict, Verdict::Skip);
        unload_driver(&mut facts);
        assert_eq!(judge(&facts).verdict, Verdict::Skip);
    }
}
