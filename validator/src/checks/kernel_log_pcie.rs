//! The PCIe bus reports no errors of GPUs and NVSwitches.
//!
//! ## Why
//! A link that corrects errors all the time is a slow link, and one that reports errors it cannot correct loses the GPU next:
//! a riser, a slot, a retimer. The kernel counts and logs them (Advanced Error Reporting) where NVML shows nothing.
//!
//! ## How it is judged
//! For each NVIDIA function on the bus, the larger of the kernel's AER counter since boot and the errors in the kernel log:
//! a fatal error fails, a non-fatal one warns, and so do more than 480 corrected ones. A fatal error that the log tells of a
//! port, which may or may not lead to a GPU, warns. Where the kernel keeps no counters (virtual machines, mostly) the log
//! alone is judged; how far it reaches back is judged by `kernel_log_xid`.
//!
//! ## What to do
//! `lspci -vvv -s <address>`; reseat the card or its riser, update the system's firmware, or move the instance to other
//! hardware.
//!
//! ## Source
//! Linux, PCI Express Advanced Error Reporting, <https://docs.kernel.org/PCI/pcieaer-howto.html>; DCGM's pcie test allows 480
//! AER errors.

use std::collections::BTreeMap;

use crate::check::{Check, Judge};
use crate::facts::{Facts, PciDevice, Reading};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::kernel_log::{self, AerSeverity, KernelEvent};
use crate::level::{Level, Stage};
use crate::machine::{self, counted};
use crate::profile::Profile;
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "kernel_log_pcie",
    stage: Stage::Host,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.kernel.org/PCI/pcieaer-howto.html",
};

/// Corrected errors since boot that are still no reason to look: the limit of DCGM's pcie test.
const CORRECTABLE_MAXIMUM: u64 = 480;

/// Errors of one function since boot.
#[derive(Clone, Copy, Debug, Default)]
struct Errors {
    correctable: u64,
    nonfatal: u64,
    fatal: u64,
}

impl Errors {
    fn add(&mut self, severity: AerSeverity) {
        match severity {
            AerSeverity::Correctable => self.correctable += 1,
            AerSeverity::NonFatal => self.nonfatal += 1,
            AerSeverity::Fatal => self.fatal += 1,
        }
    }

    /// The kernel limits how often it logs, and its counters may be missing: the larger of both is nearer to the truth.
    fn or_counters(self, device: &PciDevice) -> Self {
        Self {
            correctable: self.correctable.max(device.aer_correctable.unwrap_or(0)),
            nonfatal: self.nonfatal.max(device.aer_nonfatal.unwrap_or(0)),
            fatal: self.fatal.max(device.aer_fatal.unwrap_or(0)),
        }
    }
}

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let devices = facts.host.pci_devices.required("the PCI bus")?;
    let devices: Vec<&PciDevice> = devices
        .iter()
        .filter(|device| device.is_gpu() || device.is_nvswitch())
        .collect();
    if devices.is_empty() {
        return Err(machine::reported_by(
            "gpu_count",
            "no NVIDIA GPU is on the PCI bus",
            profile,
        ));
    }
    let mut logged = logged_errors(facts);
    let mut tally = Tally::default();
    for device in &devices {
        let errors = logged
            .remove(device.address.as_str())
            .unwrap_or_default()
            .or_counters(device);
        judge_device(device, errors, &mut tally);
    }
    for (address, errors) in &logged {
        if errors.fatal > 0 {
            tally.warn(format!(
                "{} of {address}, which may lead to a GPU",
                counted_errors(errors.fatal, "fatal")
            ));
        }
    }
    let counted_by_kernel = devices.iter().all(|device| {
        device.aer_correctable.is_some()
            && device.aer_nonfatal.is_some()
            && device.aer_fatal.is_some()
    });
    let log_was_read = matches!(facts.host.kernel_log, Reading::Value(_));
    let worst = tally.worst();
    if !counted_by_kernel && !log_was_read && worst != Some(Verdict::Fail) {
        return Err(machine::reported_by(
            "kernel_log_xid",
            "the kernel keeps no counters of PCIe errors here, and its log could not be read",
            profile,
        ));
    }
    let outcome = tally.outcome(Outcome::error("no PCIe device was judged"));
    Ok(match worst {
        Some(Verdict::Pass) => Outcome::pass(format!(
            "no PCIe errors of {} by {}",
            counted(devices.len(), "NVIDIA device"),
            match (counted_by_kernel, log_was_read) {
                (true, true) => "the kernel's counters and log",
                (true, false) => "the kernel's counters",
                (false, _) => "the kernel log",
            }
        )),
        Some(Verdict::Warn | Verdict::Fail) => outcome.remedy(
            "look at the link: lspci -vvv -s ADDRESS; reseat the card or its riser, update the system's firmware, or move \
             the instance to other hardware",
        ),
        _ => outcome,
    })
}

/// What the log tells, by the address of the reporting function; an empty address where it names none.
fn logged_errors(facts: &Facts) -> BTreeMap<String, Errors> {
    let mut errors: BTreeMap<String, Errors> = BTreeMap::new();
    let Some(log) = facts.host.kernel_log.value() else {
        return errors;
    };
    for event in kernel_log::events(&log.records) {
        if let KernelEvent::Aer {
            severity,
            pci_address,
        } = event.event
        {
            let address = pci_address.unwrap_or_else(|| "a port without an address".to_owned());
            errors.entry(address).or_default().add(severity);
        }
    }
    errors
}

fn judge_device(device: &PciDevice, errors: Errors, tally: &mut Tally) {
    let kind = if device.is_nvswitch() {
        "NVSwitch"
    } else {
        "GPU"
    };
    let name = format!("{kind} {}", device.address);
    if errors.fatal > 0 {
        tally.fail(format!(
            "{} of {name}",
            counted_errors(errors.fatal, "fatal")
        ));
    }
    if errors.nonfatal > 0 {
        tally.warn(format!(
            "{} of {name}",
            counted_errors(errors.nonfatal, "non-fatal")
        ));
    }
    if errors.correctable > CORRECTABLE_MAXIMUM {
        tally.warn(format!(
            "{} of {name}, more than {CORRECTABLE_MAXIMUM}",
            counted_errors(errors.correctable, "corrected")
        ));
    }
    tally.pass(name);
}

fn counted_errors(count: u64, kind: &str) -> String {
    counted(
        usize::try_from(count).unwrap_or(usize::MAX),
        &format!("{kind} PCIe error"),
    )
}

#[cfg(test)]
mod tests {
    use crate::facts::{Facts, KernelLogRecord, PciDevice, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check};

    fn judge(facts: &Facts) -> Finding {
        judge_host_check(&super::CHECK, facts, "{}")
    }

    fn first_gpu(facts: &mut Facts) -> &mut PciDevice {
        match &mut facts.host.pci_devices {
            Reading::Value(devices) => &mut devices[0],
            _ => unreachable!("the healthy machine has a bus"),
        }
    }

    /// A virtual machine, whose kernel keeps no counters.
    fn node_without_counters() -> Facts {
        let mut facts = healthy_node();
        if let Reading::Value(devices) = &mut facts.host.pci_devices {
            for device in devices {
                device.aer_correctable = None;
                device.aer_nonfatal = None;
                device.aer_fatal = None;
            }
        }
        facts
    }

    fn log(facts: &mut Facts, message: &str) {
        if let Reading::Value(log) = &mut facts.host.kernel_log {
            log.records.push(KernelLogRecord {
                age_s: Some(600.0),
                at_s: None,
                text: message.to_owned(),
            });
        }
    }

    #[test]
    fn passes_by_counters_or_by_the_log() {
        assert_eq!(judge(&healthy_node()).verdict, Verdict::Pass);
        let finding = judge(&node_without_counters());
        assert_eq!(finding.verdict, Verdict::Pass);
        assert!(
            finding.summary.ends_with("by the kernel log"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn judges_the_kernels_counters() {
        for (correctable, nonfatal, fatal, verdict) in [
            (480, 0, 0, Verdict::Pass),
            (481, 0, 0, Verdict::Warn),
            (0, 1, 0, Verdict::Warn),
            (0, 0, 1, Verdict::Fail),
        ] {
            let mut facts = healthy_node();
            let gpu = first_gpu(&mut facts);
            gpu.aer_correctable = Some(correctable);
            gpu.aer_nonfatal = Some(nonfatal);
            gpu.aer_fatal = Some(fatal);
            let finding = judge(&facts);
            assert_eq!(finding.verdict, verdict, "{}", finding.summary);
        }
    }

    #[test]
    fn judges_what_the_log_tells_of_a_gpu() {
        for (severity, verdict) in [
            ("Corrected", Verdict::Pass),
            ("Uncorrected (Non-Fatal)", Verdict::Warn),
            ("Uncorrectable (Fatal)", Verdict::Fail),
        ] {
            let mut facts = node_without_counters();
            let address = first_gpu(&mut facts).address.clone();
            log(
                &mut facts,
                &format!(
                    "nvidia {address}: PCIe Bus Error: severity={severity}, type=Physical Layer"
                ),
            );
            let finding = judge(&facts);
            assert_eq!(finding.verdict, verdict, "{}", finding.summary);
        }
    }

    #[test]
    fn a_port_is_blamed_only_for_what_is_fatal() {
        for (severity, verdict) in [
            ("Uncorrected (Non-Fatal)", Verdict::Pass),
            ("Uncorrected (Fatal)", Verdict::Warn),
        ] {
            let mut facts = healthy_node();
            log(
                &mut facts,
                &format!(
                    "pcieport 0000:00:03.0: PCIe Bus Error: severity={severity}, type=Inaccessible"
                ),
            );
            let finding = judge(&facts);
            assert_eq!(finding.verdict, verdict, "{}", finding.summary);
        }
    }

    #[test]
    fn without_counters_and_log_nothing_was_looked_at() {
        let unread = Reading::NotRead("permission denied opening /dev/kmsg".to_owned());
        let mut facts = node_without_counters();
        facts.host.kernel_log = unread.clone();
        let finding = judge(&facts);
        assert_eq!(finding.verdict, Verdict::Skip);
        assert!(finding.summary.contains("kernel_log_xid"));
        let mut facts = healthy_node();
        facts.host.kernel_log = unread;
        assert_eq!(judge(&facts).verdict, Verdict::Pass);
    }

    #[test]
    fn errs_when_the_bus_was_not_read_and_skips_without_gpus() {
        let mut facts = healthy_node();
        facts.host.pci_devices = Reading::NotRead("no /sys".to_owned());
        assert_eq!(judge(&facts).verdict, Verdict::Error);
        facts.host.pci_devices = Reading::Value(Vec::new());
        assert_eq!(judge(&facts).verdict, Verdict::Skip);
    }
}
