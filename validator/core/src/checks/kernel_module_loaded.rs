//! The NVIDIA kernel module is loaded.
//!
//! ## Why
//! Without the kernel module `nvidia` no GPU exists for NVML, CUDA or a container: the node takes
//! no GPU work at all. After a kernel update the module is often missing because it was not built
//! for the new kernel.
//!
//! ## How it is judged
//! `nvidia` must be among the loaded modules. It fails when GPUs are on the PCI bus and the module
//! is not loaded. Where there is no NVIDIA GPU on the bus either, there is no evidence that the
//! module should be there, so it cannot be judged. An NVML that answers is proof enough in a
//! sandbox that hides the modules.
//!
//! ## What to do
//! `modprobe nvidia` and read the kernel log. If the module does not exist for this kernel:
//! `dkms status`, install the headers of the running kernel and the driver package again. If
//! `nouveau` holds the GPU, denylist it.
//!
//! ## Source
//! NVIDIA Driver Installation Guide,
//! <https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/>

use crate::check::{Check, Judge};
use crate::facts::{Facts, KernelModules, PciDevice};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;

pub(crate) const CHECK: Check = Check {
    id: "kernel_module_loaded",
    stage: Stage::Host,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",
};

fn judge(facts: &Facts, _: &Profile) -> Judgement {
    let modules = facts.host.kernel_modules.required("kernel modules")?;
    if queries::driver_is_loaded(facts, modules) {
        return Ok(Outcome::pass(loaded(modules)));
    }
    let gpus = queries::pci_gpus(facts)?;
    if gpus.is_empty() {
        return Ok(Outcome::error(
            "kernel module nvidia is not loaded, and no NVIDIA GPU is on the PCI bus that would need it",
        )
        .remedy("run this on a GPU node, or find out why the GPUs are not on the PCI bus: lspci -d 10de:"));
    }
    Ok(Outcome::fail(format!(
        "kernel module nvidia is not loaded, {} on the PCI bus need{} it",
        queries::counted(gpus.len(), "GPU"),
        if gpus.len() == 1 { "s" } else { "" }
    ))
    .expected("kernel module nvidia loaded")
    .observed(bound_drivers(&gpus))
    .remedy(
        "load it and read the kernel log: modprobe nvidia; dmesg | grep -i nvrm; if there is no module for this \
         kernel, install its headers and the driver again: dkms status",
    ))
}

fn loaded(modules: &KernelModules) -> String {
    let version = modules.nvidia_version.value();
    let version = version.map_or(String::new(), |it| format!(" {it}"));
    let flavor = modules.nvidia_flavor.value();
    let flavor = flavor.map_or(String::new(), |it| format!(" ({it})"));
    format!("kernel module nvidia{version}{flavor} is loaded")
}

fn bound_drivers(gpus: &[&PciDevice]) -> String {
    gpus.iter()
        .map(|gpu| {
            format!(
                "{}: {}",
                gpu.address,
                gpu.driver.as_deref().unwrap_or("no kernel driver")
            )
        })
        .collect::<Vec<_>>()
        .join("\n")
}

#[cfg(test)]
mod tests {
    use crate::facts::{Facts, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check, unload_driver};

    fn judge(facts: &Facts) -> Finding {
        judge_host_check(&super::CHECK, facts, "{}")
    }

    fn node_without_module() -> Facts {
        let mut facts = healthy_node();
        unload_driver(&mut facts);
        facts
    }

    #[test]
    fn passes_when_loaded() {
        let finding = judge(&healthy_node());
        assert_eq!(finding.verdict, Verdict::Pass);
        assert_eq!(
            finding.summary,
            "kernel module nvidia 580.159.04 (open) is loaded"
        );
    }

    #[test]
    fn fails_when_gpus_wait_for_it() {
        let finding = judge(&node_without_module());
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "kernel module nvidia is not loaded, 8 GPUs on the PCI bus need it"
        );
    }

    #[test]
    fn nvml_is_proof_in_a_sandbox_that_hides_modules() {
        let mut facts = node_without_module();
        facts.nvml = healthy_node().nvml;
        assert_eq!(judge(&facts).verdict, Verdict::Pass);
    }

    #[test]
    fn errs_when_there_is_no_gpu_either() {
        let mut facts = node_without_module();
        facts.host.pci_devices = Reading::Value(Vec::new());
        assert_eq!(judge(&facts).verdict, Verdict::Error);
    }

    #[test]
    fn errs_when_modules_or_the_bus_were_not_read() {
        let mut facts = node_without_module();
        facts.host.pci_devices = Reading::NotRead("permission denied".to_owned());
        assert_eq!(judge(&facts).verdict, Verdict::Error);
        facts.host.kernel_modules = Reading::NotRead("permission denied".to_owned());
        assert_eq!(judge(&facts).verdict, Verdict::Error);
    }
}
