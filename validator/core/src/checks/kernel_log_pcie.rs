//! The PCIe bus reports no errors of GPUs and NVSwitches.
//!
//! ## Why
//! A link that corrects errors all the time is a slow link, and one that reports errors it cannot
//! correct loses the GPU next: a riser, a slot, a retimer. The kernel counts and logs them
//! (Advanced Error Reporting) where NVML shows nothing.
//!
//! ## How it is judged
//! For each NVIDIA function on the bus, the larger of the kernel's AER counter since boot and the
//! errors in the kernel log: a fatal error fails, a non-fatal one warns and more than 480 of them
//! fail, and more than 480 corrected ones warn. A port above a GPU or NVSwitch is judged like it;
//! errors of other devices are not judged, and neither are those of a port where `/sys` does not
//! show what is below it. A port whose recovery of the devices below it failed counts as one with a
//! non-fatal error. A slot whose link went down and did not come up again warns, unless the number
//! of GPUs on the bus is the expected one, and so does the port above a GPU whose link went down.
//! Where the kernel keeps no counters (virtual machines,
//! mostly) the log alone is judged. An error that the firmware reports (APEI) and a link that the
//! port has disabled (Downstream Port Containment, a fatal error) count like those that the kernel
//! finds itself; how far it reaches back is judged by `kernel_log_xid`.
//!
//! ## What to do
//! `lspci -vvv -s <address>`; reseat the card or its riser, update the system's firmware, or move
//! the instance to other hardware.
//!
//! ## Source
//! Linux, PCI Express Advanced Error Reporting, <https://docs.kernel.org/PCI/pcieaer-howto.html>;
//! DCGM's pcie test allows 480 AER errors.

use std::collections::BTreeMap;

use crate::cause::{CauseKind, RecommendedAction};
use crate::check::{Check, Judge};
use crate::expect;
use crate::facts::{Facts, PciDevice, Reading};
use crate::findings::{Evidence, Judgement, Outcome, Verdict};
use crate::kernel_log_events::{self, AerSeverity, KernelEvent};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries::{self, counted};
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
    fn add(&mut self, severity: AerSeverity, count: u64) {
        match severity {
            AerSeverity::Correctable => self.correctable += count,
            AerSeverity::NonFatal => self.nonfatal += count,
            AerSeverity::Fatal => self.fatal += count,
        }
    }

    /// The kernel limits how often it logs, and its counters may be missing: the larger of both is
    /// nearer to the truth.
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
        return Err(queries::reported_by(
            "gpu_count",
            "no NVIDIA GPU is on the PCI bus",
            profile,
        ));
    }
    let mut logged = logged_errors(facts);
    let mut objections = Objections::default();
    for device in &devices {
        let errors = logged
            .remove(device.address.as_str())
            .unwrap_or_default()
            .or_counters(device);
        let name = name_of(device);
        objections.judge(&name, device, errors);
        objections.tally.pass(name);
    }
    let below = |port: &str| {
        devices.iter().find(|device| {
            let ports = device.upstream_ports.iter().flatten();
            ports.into_iter().any(|it| it == port)
        })
    };
    for (address, errors) in &logged {
        if let Some(device) = below(address) {
            let name = format!("port {address} above {}", device.address);
            objections.judge(&name, device, *errors);
        }
    }
    judge_slots(facts, profile, &devices, &mut objections);
    let Objections { tally, evidence } = objections;
    let counted_by_kernel = devices.iter().all(|device| {
        device.aer_correctable.is_some()
            && device.aer_nonfatal.is_some()
            && device.aer_fatal.is_some()
    });
    let log_was_read = matches!(facts.host.kernel_log, Reading::Value(_));
    let worst = tally.worst();
    if !counted_by_kernel && !log_was_read && worst != Some(Verdict::Fail) {
        return Err(queries::reported_by(
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
            "check the link: lspci -vvv -s ADDRESS; reseat the card or its riser, update the system's firmware, or move \
             the instance to other hardware",
        )
        .evidence(evidence),
        _ => outcome,
    })
}

/// What the log tells, by the address of the reporting function; an empty address where it names
/// none.
fn logged_errors(facts: &Facts) -> BTreeMap<String, Errors> {
    let mut announced: BTreeMap<String, Errors> = BTreeMap::new();
    let mut errors: BTreeMap<String, Errors> = BTreeMap::new();
    let Some(log) = facts.host.kernel_log.value() else {
        return errors;
    };
    for event in kernel_log_events::events(&log.records) {
        if let KernelEvent::Aer {
            severity,
            pci_address,
        } = event.event
        {
            let address = pci_address.unwrap_or_else(|| "a port without an address".to_owned());
            // An error is announced and then printed: it is one error.
            let is_announcement = event.text.contains("AER:") && event.text.contains("received");
            let of = if is_announcement {
                &mut announced
            } else {
                &mut errors
            };
            of.entry(address).or_default().add(severity, event.count);
        }
    }
    for (address, of) in announced {
        let errors = errors.entry(address).or_default();
        *errors = Errors {
            correctable: errors.correctable.max(of.correctable),
            nonfatal: errors.nonfatal.max(of.nonfatal),
            fatal: errors.fatal.max(of.fatal),
        };
    }
    errors
}

/// Objections, each with the GPU that it is about.
#[derive(Default)]
struct Objections {
    tally: Tally,
    evidence: Vec<Evidence>,
}

impl Objections {
    fn add(&mut self, verdict: Verdict, device: &PciDevice, text: String) {
        match verdict {
            Verdict::Fail => self.tally.fail(&text),
            _ => self.tally.warn(&text),
        }
        self.evidence.push(Evidence {
            pci_address: Some(device.address.clone()),
            verdict,
            kind: CauseKind::Pcie,
            recommended_action: RecommendedAction::Drain,
            summary: text,
            line: None,
        });
    }

    /// A port above a GPU loses the GPU with its link, and is judged like it.
    fn judge(&mut self, name: &str, device: &PciDevice, errors: Errors) {
        let over = format!("more than {CORRECTABLE_MAXIMUM}");
        if errors.fatal > 0 {
            let text = format!("{} of {name}", counted_errors(errors.fatal, "fatal"));
            self.add(Verdict::Fail, device, text);
        }
        let nonfatal = counted_errors(errors.nonfatal, "non-fatal");
        if errors.nonfatal > CORRECTABLE_MAXIMUM {
            self.add(
                Verdict::Fail,
                device,
                format!("{nonfatal} of {name}, {over}"),
            );
        } else if errors.nonfatal > 0 {
            self.add(Verdict::Warn, device, format!("{nonfatal} of {name}"));
        }
        if errors.correctable > CORRECTABLE_MAXIMUM {
            let corrected = counted_errors(errors.correctable, "corrected");
            self.add(
                Verdict::Warn,
                device,
                format!("{corrected} of {name}, {over}"),
            );
        }
    }
}

fn name_of(device: &PciDevice) -> String {
    let kind = if device.is_nvswitch() {
        "NVSwitch"
    } else {
        "GPU"
    };
    format!("{kind} {}", device.address)
}

/// Slots whose link went down and did not come up again, and ports above a GPU whose link did.
fn judge_slots(
    facts: &Facts,
    profile: &Profile,
    devices: &[&PciDevice],
    objections: &mut Objections,
) {
    let Some(log) = facts.host.kernel_log.value() else {
        return;
    };
    let mut newest: BTreeMap<String, (Option<f64>, bool)> = BTreeMap::new();
    let mut went_down: BTreeMap<String, u64> = BTreeMap::new();
    for event in kernel_log_events::events(&log.records) {
        let (port, down) = match event.event {
            KernelEvent::SlotLinkDown { pci_address } => (pci_address, true),
            KernelEvent::SlotLinkUp { pci_address } => (pci_address, false),
            _ => continue,
        };
        let port = port.unwrap_or_default();
        if down {
            *went_down.entry(port.clone()).or_default() += event.count;
        }
        let last = newest.entry(port).or_insert((event.at_s, down));
        // Of messages with equal stamps the worse one counts.
        if event.at_s > last.0 || (event.at_s == last.0 && down) {
            *last = (event.at_s, down);
        }
    }
    // Where every GPU is there, what left its slot was another device: a drive, a network card.
    let gpus = devices.iter().filter(|it| it.is_gpu()).count();
    let all_gpus_are_there =
        expect::gpu_count(facts, profile).is_some_and(|it| gpus >= it.value as usize);
    for (port, count) in &went_down {
        let leads_to = devices
            .iter()
            .find(|it| it.upstream_ports.iter().flatten().any(|it| it == port));
        let is_down = newest.get(port).is_some_and(|it| it.1);
        match leads_to {
            Some(device) => objections.add(
                Verdict::Warn,
                device,
                format!(
                    "the link of port {port} above {} went down {count} times",
                    device.address
                ),
            ),
            None if is_down && !all_gpus_are_there => objections.tally.warn(format!(
                "the link of port {port} is down, and what was in its slot is not on the bus"
            )),
            None => {}
        }
    }
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
                repeats: 0,
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
    fn a_port_of_which_sysfs_shows_nothing_is_not_judged() {
        for message in [
            "pcieport 0000:00:03.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Inaccessible",
            "pcieport 0000:e0:01.0: DPC: containment event, status:0x1f05 source:0xe100",
            "pcieport 0000:e0:01.0: AER: device recovery failed",
        ] {
            let mut facts = healthy_node();
            log(&mut facts, message);
            let finding = judge(&facts);
            assert_eq!(finding.verdict, Verdict::Pass, "{}", finding.summary);
        }
    }

    #[test]
    fn a_recovery_that_failed_is_an_error_of_its_port() {
        let mut facts = node_below_a_port();
        log(
            &mut facts,
            "pcieport 0000:10:1f.0: AER: device recovery failed",
        );
        let finding = judge(&facts);
        assert_eq!(finding.verdict, Verdict::Warn, "{}", finding.summary);
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

    fn node_below_a_port() -> Facts {
        let mut facts = healthy_node();
        if let Reading::Value(devices) = &mut facts.host.pci_devices {
            for device in devices {
                device.upstream_ports = Some(vec![device.address.replace(":00.0", ":1f.0")]);
            }
        }
        facts
    }

    #[test]
    fn ports_above_a_gpu_are_judged_and_other_devices_are_not() {
        let port = "0000:10:1f.0";
        for (place, severity, times, verdict) in [
            (port, "Uncorrected (Fatal)", 1, Verdict::Fail),
            (port, "Uncorrected (Non-Fatal)", 1, Verdict::Warn),
            (port, "Uncorrected (Non-Fatal)", 481, Verdict::Fail),
            (port, "Corrected", 480, Verdict::Pass),
            (port, "Corrected", 481, Verdict::Warn),
            ("0000:c0:00.0", "Uncorrected (Fatal)", 1, Verdict::Pass),
            ("0000:c0:00.0", "Corrected", 5_000, Verdict::Pass),
        ] {
            let mut facts = node_below_a_port();
            log(
                &mut facts,
                &format!(
                    "pcieport {place}: PCIe Bus Error: severity={severity}, type=Data Link Layer"
                ),
            );
            if let Reading::Value(log) = &mut facts.host.kernel_log {
                log.records[1].repeats = times - 1;
            }
            let finding = judge(&facts);
            assert_eq!(
                finding.verdict, verdict,
                "{place} {severity} {times}: {}",
                finding.summary
            );
        }
    }

    #[test]
    fn a_slot_whose_link_stays_down_warns() {
        let judge_slot = |messages: &[&str]| {
            let mut facts = node_below_a_port();
            facts.host.ec2 = Reading::NotSupported;
            for message in messages {
                log(&mut facts, message);
            }
            judge(&facts).verdict
        };
        let down = "pcieport 0000:c0:00.0: pciehp: Slot(33): Link Down";
        let up = "pcieport 0000:c0:00.0: pciehp: Slot(33): Link Up";
        let ignored =
            "pcieport 0000:c0:00.0: pciehp: Slot(33): Link Down/Up ignored (recovered by DPC)";
        assert_eq!(judge_slot(&[down]), Verdict::Warn);
        assert_eq!(judge_slot(&[ignored]), Verdict::Pass);
        assert_eq!(judge_slot(&[up]), Verdict::Pass);
        assert_eq!(
            judge_slot(&["pcieport 0000:10:1f.0: pciehp: Slot(1): Link Down"]),
            Verdict::Warn
        );
    }

    #[test]
    fn a_slot_is_another_devices_where_every_expected_gpu_is_there() {
        let mut facts = node_below_a_port();
        log(
            &mut facts,
            "pcieport 0000:c0:00.0: pciehp: Slot(33): Link Down",
        );
        assert_eq!(judge(&facts).verdict, Verdict::Pass);
        if let Reading::Value(devices) = &mut facts.host.pci_devices {
            devices.remove(3);
        }
        assert_eq!(judge(&facts).verdict, Verdict::Warn);
    }
}
