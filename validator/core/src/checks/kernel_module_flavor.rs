//! The kernel module's flavour, open or proprietary, fits the GPUs.
//!
//! ## Why
//! The open kernel module drives Turing and newer GPUs and is the only one for Grace Hopper and
//! Blackwell; Maxwell, Pascal and Volta need the proprietary one. With the wrong flavour the module
//! loads and finds no GPU.
//!
//! ## How it is judged
//! The loaded module's flavour against `driver.kernel_module` of the profile, else against what the
//! models of the GPUs on the PCI bus and in NVML support. One GPU that needs the proprietary module
//! decides for the machine. Where the reference table knows none of the models, their compute
//! capability decides: below 7.5 proprietary, from 10.0 on open. Skipped in a container that does
//! not see the host's module.
//!
//! Skipped in WSL2, whose driver is that of the Windows host.
//!
//! ## What to do
//! Install the other flavour of the same driver version (`nvidia-open` or `nvidia-driver` packages,
//! or `nvidia-installer --kernel-module-type=`) and reboot.
//!
//! ## Source
//! NVIDIA Transitions Fully Towards Open-Source GPU Kernel Modules,
//! <https://developer.nvidia.com/blog/nvidia-transitions-fully-towards-open-source-gpu-kernel-modules/>

use crate::check::{Check, Judge};
use crate::expect::{self, Expected};
use crate::facts::{ComputeCapability, Facts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;
use crate::reference::KernelModuleSupport;

pub(crate) const CHECK: Check = Check {
    id: "kernel_module_flavor",
    stage: Stage::Host,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://developer.nvidia.com/blog/nvidia-transitions-fully-towards-open-source-gpu-kernel-modules/",
};

/// Turing: the oldest architecture that the open module drives (NVIDIA's announcement of the open
/// modules).
const OPEN_FROM: ComputeCapability = ComputeCapability { major: 7, minor: 5 };
/// Blackwell: the oldest architecture that only the open module drives (same source).
const ONLY_OPEN_FROM: ComputeCapability = ComputeCapability {
    major: 10,
    minor: 0,
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    if queries::in_wsl(facts) {
        return Ok(Outcome::skip(
            "this is WSL2: the driver is that of the Windows host",
        ));
    }
    let flavor = &queries::loaded_driver(facts, profile)?.nvidia_flavor;
    if queries::in_container(facts) && flavor.value().is_none() {
        return Ok(Outcome::skip(
            "this is a container, from which the flavour of the host's kernel module is not visible",
        ));
    }
    let flavor = *flavor.required("flavour of kernel module nvidia")?;
    let Some(expected) = expect::kernel_module(facts, profile).or_else(|| by_architecture(facts))
    else {
        return Ok(Outcome::error(format!(
            "kernel module is {flavor}, but the model of no GPU is known to judge it by"
        ))
        .remedy("name the flavour in the profile: driver: {kernel_module: open}"));
    };
    let supported = describe(expected.value);
    if expected.value.supports(flavor) {
        return Ok(Outcome::pass(format!(
            "kernel module is {flavor}, {} requires {supported}",
            expected.source
        )));
    }
    Ok(Outcome::fail(format!(
        "kernel module is {flavor}, {} requires {supported}",
        expected.source
    ))
    .expected(supported)
    .observed(flavor)
    .remedy(format!(
        "install the {supported} kernel module of the same driver version and reboot"
    )))
}

fn describe(support: KernelModuleSupport) -> &'static str {
    match support {
        KernelModuleSupport::OpenOnly => "open",
        KernelModuleSupport::ProprietaryOnly => "proprietary",
        KernelModuleSupport::Either => "open or proprietary",
    }
}

/// What the oldest GPU's architecture leaves possible, for GPUs that the reference table does not
/// know.
fn by_architecture(facts: &Facts) -> Option<Expected<KernelModuleSupport>> {
    let oldest = queries::all_gpu_architectures(facts)
        .iter()
        .filter_map(|gpu| gpu.compute_capability)
        .min()?;
    Some(Expected {
        value: if oldest < OPEN_FROM {
            KernelModuleSupport::ProprietaryOnly
        } else if oldest < ONLY_OPEN_FROM {
            KernelModuleSupport::Either
        } else {
            KernelModuleSupport::OpenOnly
        },
        source: format!("a GPU of compute capability {oldest}"),
    })
}

#[cfg(test)]
mod tests {
    use crate::facts::{ComputeCapability, Facts, KernelModuleFlavor, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check, unload_driver};

    fn judge(facts: &Facts, profile: &str) -> Finding {
        judge_host_check(&super::CHECK, facts, profile)
    }

    fn set_flavor(facts: &mut Facts, flavor: Reading<KernelModuleFlavor>) {
        if let Reading::Value(modules) = &mut facts.host.kernel_modules {
            modules.nvidia_flavor = flavor;
        }
    }

    /// A machine of GPUs that no table knows, all of this compute capability.
    fn node_of(major: u32, minor: u32, flavor: KernelModuleFlavor) -> Facts {
        let mut facts = healthy_node();
        set_flavor(&mut facts, Reading::Value(flavor));
        if let Reading::Value(devices) = &mut facts.host.pci_devices {
            for device in devices {
                device.device_id = 0xffff;
            }
        }
        for gpu in &mut facts.gpus {
            gpu.name = Reading::Value("NVIDIA Unheard-of".to_owned());
            gpu.pci_device_id = Reading::Value(0xffff);
            gpu.compute_capability = Reading::Value(ComputeCapability { major, minor });
        }
        facts
    }

    #[test]
    fn hopper_takes_either() {
        let mut facts = healthy_node();
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Pass);
        set_flavor(&mut facts, Reading::Value(KernelModuleFlavor::Proprietary));
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Pass);
    }

    #[test]
    fn the_profile_decides_first() {
        let facts = healthy_node();
        assert_eq!(
            judge(&facts, "driver: {kernel_module: open}").verdict,
            Verdict::Pass
        );
        let finding = judge(&facts, "driver: {kernel_module: proprietary}");
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "kernel module is open, the profile requires proprietary"
        );
    }

    #[test]
    fn the_architecture_decides_for_unknown_models() {
        use KernelModuleFlavor::{Open, Proprietary};
        for (major, minor, flavor, verdict) in [
            (7, 0, Open, Verdict::Fail),
            (7, 0, Proprietary, Verdict::Pass),
            (7, 5, Open, Verdict::Pass),
            (9, 0, Proprietary, Verdict::Pass),
            (10, 0, Proprietary, Verdict::Fail),
            (10, 0, Open, Verdict::Pass),
        ] {
            let finding = judge(&node_of(major, minor, flavor), "{}");
            assert_eq!(finding.verdict, verdict, "{major}.{minor} {flavor}");
        }
    }

    #[test]
    fn errs_when_neither_flavour_nor_model_is_known() {
        let mut facts = healthy_node();
        set_flavor(&mut facts, Reading::NotRead("permission denied".to_owned()));
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);

        let mut facts = node_of(9, 0, KernelModuleFlavor::Open);
        facts.cuda.devices = Reading::NotRead("not probed".to_owned());
        for gpu in &mut facts.gpus {
            gpu.compute_capability = Reading::NotRead("unknown error".to_owned());
        }
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
    }

    #[test]
    fn a_container_may_not_see_it() {
        let mut facts = healthy_node();
        set_flavor(&mut facts, Reading::NotSupported);
        facts.host.in_container = Reading::Value(true);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Skip);
    }

    #[test]
    fn leaves_a_missing_module_to_its_own_check() {
        let mut facts = healthy_node();
        unload_driver(&mut facts);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Skip);
    }
}
