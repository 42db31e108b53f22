//! No other kernel driver holds the GPUs.
//!
//! ## Why
//! `nouveau`, `nova` or `nvidiafb` bound to a GPU keeps the NVIDIA driver from taking it. Loaded
//! but not bound, it takes the GPU at the next reset or rescan.
//!
//! ## How it is judged
//! Fails when one of these drivers is bound to a GPU, warns when one is only loaded. A GPU bound to
//! `vfio-pci` was given to a virtual machine on purpose; `gpu_count` reports that it is missing
//! here.
//!
//! ## What to do
//! Denylist the driver and build the initial RAM disk again, then reboot:
//! `echo 'blacklist nouveau' > /etc/modprobe.d/denylist-nouveau.conf; update-initramfs -u` (or
//! `dracut --force`).
//!
//! ## Source
//! DCGM's deployment check "Denylist" fails on `nouveau`; NVIDIA Driver Installation Guide,
//! <https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/>

use crate::check::{Check, Judge};
use crate::facts::Facts;
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;

pub(crate) const CHECK: Check = Check {
    id: "denylisted_driver_absent",
    stage: Stage::Host,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",
};

/// Kernel modules that drive NVIDIA GPUs and are not NVIDIA's own.
const DENYLISTED_MODULES: [&str; 3] = ["nouveau", "nova_core", "nvidiafb"];

/// Whether a bound PCI driver is one of them; the kernel writes nova's name as `NovaCore` or
/// `nova_core`.
fn is_denylisted_driver(driver: &str) -> bool {
    let driver = driver.to_ascii_lowercase();
    driver == "nouveau" || driver == "nvidiafb" || driver.starts_with("nova")
}

fn judge(facts: &Facts, _: &Profile) -> Judgement {
    let modules = facts.host.kernel_modules.required("kernel modules")?;
    let gpus = queries::pci_gpus(facts)?;
    let bound: Vec<String> = gpus
        .iter()
        .filter_map(|gpu| Some((gpu, gpu.driver.as_deref()?)))
        .filter(|(_, driver)| is_denylisted_driver(driver))
        .map(|(gpu, driver)| format!("{driver} is bound to {}", gpu.address))
        .collect();
    if let Some(first) = bound.first() {
        let more = match bound.len() {
            1 => String::new(),
            count => format!(" and {} more", count - 1),
        };
        return Ok(Outcome::fail(format!("kernel driver {first}{more}"))
            .expected("GPUs bound to nvidia")
            .observed(bound.join("\n"))
            .remedy("denylist the driver in /etc/modprobe.d, build the initial RAM disk again and reboot"));
    }
    let loaded: Vec<&str> = DENYLISTED_MODULES
        .into_iter()
        .filter(|module| modules.loaded.contains_key(*module))
        .collect();
    if loaded.is_empty() {
        return Ok(Outcome::pass("no other driver for NVIDIA GPUs is loaded"));
    }
    Ok(Outcome::warn(format!(
        "kernel module {} is loaded, though bound to no GPU",
        loaded.join(", ")
    ))
    .expected("not loaded")
    .remedy("denylist it in /etc/modprobe.d, so that it cannot take a GPU at the next reset"))
}

#[cfg(test)]
mod tests {
    use crate::facts::{Facts, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check};

    fn judge(facts: &Facts) -> Finding {
        judge_host_check(&super::CHECK, facts, "{}")
    }

    fn bind_first_gpu_to(driver: &str) -> Facts {
        let mut facts = healthy_node();
        if let Reading::Value(devices) = &mut facts.host.pci_devices {
            devices[0].driver = Some(driver.to_owned());
        }
        facts
    }

    fn load_module(facts: &mut Facts, module: &str) {
        if let Reading::Value(modules) = &mut facts.host.kernel_modules {
            modules.loaded.insert(module.to_owned(), None);
        }
    }

    #[test]
    fn passes_with_the_nvidia_driver_alone() {
        assert_eq!(judge(&healthy_node()).verdict, Verdict::Pass);
    }

    #[test]
    fn fails_when_one_is_bound() {
        for driver in ["nouveau", "NovaCore", "nova_core", "nvidiafb"] {
            assert_eq!(judge(&bind_first_gpu_to(driver)).verdict, Verdict::Fail);
        }
        let finding = judge(&bind_first_gpu_to("nouveau"));
        assert!(
            finding
                .summary
                .starts_with("kernel driver nouveau is bound to 0000:"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn warns_when_one_is_only_loaded() {
        for module in ["nouveau", "nova_core", "nvidiafb"] {
            let mut facts = healthy_node();
            load_module(&mut facts, module);
            assert_eq!(judge(&facts).verdict, Verdict::Warn, "{module}");
        }
    }

    #[test]
    fn a_gpu_given_to_a_virtual_machine_is_no_fault_here() {
        assert_eq!(judge(&bind_first_gpu_to("vfio-pci")).verdict, Verdict::Pass);
    }

    #[test]
    fn errs_when_the_bus_was_not_read() {
        let mut facts = healthy_node();
        facts.host.pci_devices = Reading::NotRead("no /sys".to_owned());
        assert_eq!(judge(&facts).verdict, Verdict::Error);
    }
}
