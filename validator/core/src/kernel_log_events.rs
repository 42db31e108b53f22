//! What lines of the kernel log mean.
//!
//! Pure: text in, events out. The lines come from several drivers and many kernel versions, so
//! everything that is not recognised is simply no event; nothing here panics, whatever the text.

use std::collections::{BTreeMap, BTreeSet};

use crate::facts::KernelLogRecord;

/// The meaning of one message of the kernel log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelEvent {
    /// `NVRM: Xid (PCI:0000:3b:00): 79, …`
    Xid(Xid),
    /// `nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 …`
    Sxid(Sxid),
    /// `NVRM: Xid (` or `SXid (`, and then something else than expected: certainly trouble, but not
    /// which.
    Unparsed { pci_address: Option<String> },
    /// A GPU that left the bus, in a message without an Xid number: "fallen off the bus", "GPU lost
    /// from the bus", `NV_ERR_GPU_IS_LOST`, "disconnected".
    FallenOffBus { pci_address: Option<String> },
    /// The driver refuses work until a reset: `NV_ERR_RESET_REQUIRED`.
    ResetRequired { pci_address: Option<String> },
    /// The driver refuses work until a reboot: "requiring os reboot to recover".
    RebootRequired,
    /// `pcieport 0000:3a:00.0: pciehp: Slot(33): Link Down`, or `Card not present`.
    SlotLinkDown { pci_address: Option<String> },
    /// `pcieport 0000:3a:00.0: pciehp: Slot(33): Link Up`.
    SlotLinkUp { pci_address: Option<String> },
    /// `INFO: task nvidia-smi:4242 blocked for more than 122 seconds.` of a task that waits in the
    /// driver.
    HungTask { task: String },
    /// `BUG: unable to handle page fault …` in the driver's functions.
    KernelCrash,
    /// `watchdog: BUG: soft lockup - CPU#5 stuck for 26s! [UVM GPU1 BH:1234]`, or a stall of RCU,
    /// in the driver's functions. The task where the message names one.
    Lockup { task: Option<String> },
    /// The kernel module's greeting: what the driver reported before belongs to an earlier load of
    /// it.
    DriverLoaded,
    /// The kernel found an NVIDIA display controller on the bus.
    GpuEnumerated { pci_address: String },
    /// PCIe Advanced Error Reporting.
    Aer {
        severity: AerSeverity,
        /// The function that reports the error: a GPU, or a port above it.
        pci_address: Option<String>,
    },
    /// The nvidia module could not start this GPU or NVSwitch (`RmInitAdapter failed`,
    /// `probe … failed`, "the GPU is likely in a bad state", a memory region that was not
    /// assigned: `BAR1 is 0M @ 0x0`).
    GpuInitializationFailed { pci_address: Option<String> },
    /// `NVRM: API mismatch`: user space and kernel module are of different drivers.
    ApiMismatch,
    /// nouveau has taken this GPU.
    NouveauBound { pci_address: Option<String> },
}

impl KernelEvent {
    /// The PCI function that the event names: `0000:3b:00.0`.
    pub fn pci_address(&self) -> Option<&str> {
        match self {
            Self::Xid(xid) => xid.pci_address.as_deref(),
            Self::Sxid(sxid) => sxid.pci_address.as_deref(),
            Self::Unparsed { pci_address }
            | Self::FallenOffBus { pci_address }
            | Self::Aer { pci_address, .. }
            | Self::ResetRequired { pci_address }
            | Self::SlotLinkDown { pci_address }
            | Self::SlotLinkUp { pci_address }
            | Self::GpuInitializationFailed { pci_address }
            | Self::NouveauBound { pci_address } => pci_address.as_deref(),
            Self::GpuEnumerated { pci_address } => Some(pci_address),
            Self::ApiMismatch
            | Self::RebootRequired
            | Self::HungTask { .. }
            | Self::KernelCrash
            | Self::Lockup { .. }
            | Self::DriverLoaded => None,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Xid {
    /// `0000:3b:00.0`, lower case; function 0 where the message names none.
    pub pci_address: Option<String>,
    pub number: u32,
    /// `None` where the driver writes `<unknown>` or nothing.
    pub pid: Option<u32>,
    pub process: Option<String>,
    /// What follows number, process id and name.
    pub detail: String,
    /// Xids 144 to 150 say how bad they are in their text.
    pub nvlink: Option<NvlinkXid>,
}

/// The NVLink 5 part of Xids 144 to 150: `NETIR_LINK_EVT Nonfatal XC0 i0 Link 04 (0x004000c6 …)`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NvlinkXid {
    pub fatal: bool,
    pub link: Option<u32>,
    /// Bits 20 to 25 of the first number in parentheses.
    pub sub_code: Option<u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sxid {
    pub pci_address: Option<String>,
    pub number: u32,
    /// `Fatal` or `Non-fatal` in the text, which is authoritative; `None` where it has neither.
    pub fatal: Option<bool>,
    /// The second and third line of an event: `Severity 1 Engine instance 30 …` and
    /// `Data {0x50610002, …}`.
    pub continues: bool,
    pub detail: String,
}

/// What an Xid 154 changed the recovery action to:
/// `GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)`. Drivers name the
/// same codes differently: 0x1 is `GPU Reset Required` or `PF FLR`, 0x2 `Node Reboot Required` or
/// `OS Reboot`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestedRecovery {
    None,
    Reset,
    Reboot,
    Drain,
    /// A code and words that this version does not know.
    Unknown,
}

impl Xid {
    /// The recovery action that an Xid 154 announces.
    pub fn requested_recovery(&self) -> Option<RequestedRecovery> {
        if self.number != 154 {
            return None;
        }
        let (_, target) = self.detail.rsplit_once(" to ")?;
        let words = target.to_ascii_lowercase();
        // Source of the codes: nvml.h, nvmlDeviceGpuRecoveryAction_t.
        let code = words.strip_prefix("0x").and_then(|it| {
            u32::from_str_radix(it.split(|c: char| !c.is_ascii_hexdigit()).next()?, 16).ok()
        });
        Some(if words.contains("reboot") {
            RequestedRecovery::Reboot
        } else if words.contains("drain") {
            RequestedRecovery::Drain
        } else if words.contains("reset") || words.contains("flr") {
            RequestedRecovery::Reset
        } else {
            match code {
                Some(0) => RequestedRecovery::None,
                None if words.contains("none") => RequestedRecovery::None,
                Some(1) => RequestedRecovery::Reset,
                Some(2) => RequestedRecovery::Reboot,
                Some(3 | 4) => RequestedRecovery::Drain,
                _ => RequestedRecovery::Unknown,
            }
        })
    }

    /// The Xid that an Xid 45 names as its cause: `… caused by previous Xid 149`.
    pub fn cause(&self) -> Option<u32> {
        let (_, number) = self.detail.split_once("caused by previous Xid ")?;
        leading_number(number).map(|(number, _)| number)
    }

    /// Whether the text of an ECC error requests a reset:
    /// `Contained: SM (0x1). RST: No, D-RST: Yes`.
    pub fn requests_reset(&self) -> bool {
        let words: Vec<&str> = self
            .detail
            .split(|c: char| c.is_whitespace() || matches!(c, ',' | '.' | ';'))
            .filter(|it| !it.is_empty())
            .collect();
        words.array_windows().any(|[name, value]| {
            matches!(*name, "RST:" | "D-RST:") && value.eq_ignore_ascii_case("yes")
        })
    }

    /// The multiprocessor or the client of one that the text names: `GPC 3, TPC 1, SM 0` of Xid 13,
    /// `GPC3 GPCCLIENT_T1_8` of Xid 31.
    pub fn unit(&self) -> Option<String> {
        match self.number {
            13 => {
                let (_, rest) = self.detail.split_once("(GPC ")?;
                let (unit, _) = rest.split_once(')')?;
                unit.contains("SM ").then(|| format!("GPC {unit}"))
            }
            31 => {
                let words: Vec<&str> = self.detail.split_whitespace().collect();
                let at = words.iter().position(|it| it.starts_with("GPCCLIENT_"))?;
                let client = words.get(at)?;
                // Without the GPC's number the client is one of several.
                let gpc = words
                    .get(at.checked_sub(1)?)
                    .filter(|it| it.starts_with("GPC"))?;
                Some(format!("{gpc} {client}"))
            }
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AerSeverity {
    Correctable,
    NonFatal,
    Fatal,
}

/// An event and its record.
#[derive(Clone, Debug, PartialEq)]
pub struct TimedEvent {
    /// Seconds before collection, where the log has them.
    pub age_s: Option<f64>,
    /// The kernel's own time stamp.
    pub at_s: Option<f64>,
    /// How many messages this event stands for: repeats are kept as a count.
    pub count: u64,
    pub event: KernelEvent,
    /// The record's text (of several, the last).
    pub text: String,
}

/// Whether a record belongs in the facts.
pub fn is_relevant(text: &str) -> bool {
    text.contains("NVRM:")
        || text.contains("SXid")
        || text.contains("nvidia-nvswitch")
        || (text.contains("nvidia-uvm") || text.contains("nvidia-modeset"))
            && contains_ignoring_case(text, "error")
        || contains_ignoring_case(text, "nouveau")
        || text.contains("AER:")
        || text.contains("PCIe Bus Error")
        || contains_ignoring_case(text, "fallen off the bus")
        || (text.contains("pciehp")
            && (contains_ignoring_case(text, "link ")
                || contains_ignoring_case(text, "not present")))
        || (text.contains("nvidia") && text.contains("failed with error"))
        || text.contains(" blocked for more than ")
        || text.contains("[nvidia")
        || text.contains(CONTAINMENT)
        || hardware_error_part(text).is_some()
        || parse_crash(text).is_some()
        || text.contains(ENUMERATED_VENDOR)
        || ((contains_ignoring_case(text, "nvidia") || contains_ignoring_case(text, "nvrm:"))
            && parse_driver_message(text).is_some())
}

/// How the kernel names the vendor of a function that it finds:
/// `pci 0000:3b:00.0: [10de:2335] type 00 class 0x030200`.
const ENUMERATED_VENDOR: &str = ": [10de:";

/// Downstream Port Containment: the port has disabled its link after an error.
// Source: Linux, `drivers/pci/pcie/dpc.c`.
const CONTAINMENT: &str = "DPC: containment event";

/// Whether a record is one of the many that follow a GSP time-out and repeat it: the call history
/// of the GPU's firmware processor. The first of a run is enough.
pub fn is_flood(text: &str) -> bool {
    text.contains("NVRM:")
        && (text.contains("RPC history")
            || text.contains("RPC event history")
            || text.contains("  entry   function ")
            || is_history_row(text))
}

/// A row of that history: ` NVRM:   -3   76  GSP_RM_CONTROL  0x…`.
fn is_history_row(text: &str) -> bool {
    let Some((_, row)) = text.split_once("NVRM:") else {
        return false;
    };
    let row = row
        .trim_start()
        .trim_start_matches(|c: char| !c.is_whitespace() && c != '-' && !c.is_ascii_digit());
    let mut words = row.split_whitespace();
    let entry = words
        .next()
        .is_some_and(|word| word.parse::<i32>().is_ok_and(|it| it <= 0));
    let function = words.next().is_some_and(|word| word.parse::<u32>().is_ok());
    entry && function && words.next().is_some()
}

/// All events of the records, in their order.
///
/// Messages that span records are one event: `The NVIDIA GPU 0000:18:00.0` /
/// `… installed in this system has` / `fallen off the bus …`; an AER announcement with the bus
/// error that it announces; the three lines of an `SXid`; a hung task or a crash of the kernel with
/// the functions of the driver in its call trace; the lines of an error that the firmware reports.
pub fn events(records: &[KernelLogRecord]) -> Vec<TimedEvent> {
    let mut events: Vec<TimedEvent> = Vec::new();
    let mut gpu_named_before: Option<String> = None;
    let mut announcement_before = false;
    let mut severities: BTreeMap<u64, AerSeverity> = BTreeMap::new();
    for (index, record) in records.iter().enumerate() {
        if is_flood(&record.text) {
            continue;
        }
        if let Some(part) = hardware_error_part(&record.text) {
            events.extend(firmware_error(part, record, &mut severities));
            continue;
        }
        let named = record
            .text
            .find("The NVIDIA GPU ")
            .and_then(|at| first_pci_address(&record.text[at..]));
        let Some(mut event) = parse(&record.text) else {
            if named.is_some() {
                gpu_named_before = named;
            }
            continue;
        };
        if let KernelEvent::FallenOffBus { pci_address } = &mut event
            && pci_address.is_none()
        {
            *pci_address = gpu_named_before.take();
        }
        let may_be_of_another_driver = matches!(
            event,
            KernelEvent::HungTask { .. } | KernelEvent::KernelCrash | KernelEvent::Lockup { .. }
        );
        if may_be_of_another_driver
            && !is_in_the_driver(
                task_of(&event),
                record,
                records.get(index + 1..).unwrap_or_default(),
            )
        {
            continue;
        }
        let announcement = is_aer_announcement(&record.text);
        let announced_already = announcement_before
            && !announcement
            && matches!((&event, events.last().map(|it| &it.event)),
                (KernelEvent::Aer { severity, .. }, Some(KernelEvent::Aer { severity: announced, .. }))
                    if severity == announced);
        if announced_already {
            events.pop();
        }
        announcement_before = announcement;
        events.push(TimedEvent {
            age_s: record.age_s,
            at_s: record.at_s,
            count: record.repeats.saturating_add(1),
            event,
            text: record.text.clone(),
        });
    }
    without_continuations(events)
}

fn task_of(event: &KernelEvent) -> Option<&str> {
    match event {
        KernelEvent::HungTask { task } => Some(task),
        KernelEvent::Lockup { task } => task.as_deref(),
        _ => None,
    }
}

/// Whether a task is one of the driver's kernel threads or tools.
pub(crate) fn is_the_drivers_task(task: &str) -> bool {
    // Source: the names of the driver's kernel threads and tools.
    ["nvidia", "nv_queue", "nv_open_q", "UVM "]
        .iter()
        .any(|it| task.starts_with(it))
}

/// A hung task or a crash belongs to a GPU where the task is the driver's own, or where its call
/// trace has a function of the driver's modules.
fn is_in_the_driver(
    task: Option<&str>,
    record: &KernelLogRecord,
    following: &[KernelLogRecord],
) -> bool {
    /// The kernel prints the trace at once; between two tasks it may pass some time.
    const TRACE_LENGTH_S: f64 = 1.0;
    let of_the_trace = |it: &&KernelLogRecord| match (it.at_s, record.at_s) {
        (Some(at), Some(from)) => at - from <= TRACE_LENGTH_S,
        _ => true,
    };
    task.is_some_and(is_the_drivers_task)
        || following
            .iter()
            .take_while(|it| !it.text.contains(" blocked for more than "))
            .filter(of_the_trace)
            .any(|it| it.text.contains("[nvidia"))
}

/// A line of an error that the firmware reports (APEI):
/// `{1}[Hardware Error]:  Error 0, type: fatal`.
// Source: Linux, `drivers/firmware/efi/cper.c` and `drivers/acpi/apei/ghes.c`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HardwareErrorPart {
    /// The number of the error, which all of its lines have.
    number: u64,
    severity: Option<AerSeverity>,
    /// The PCIe function that it names.
    pub(crate) pci_address: Option<String>,
}

pub(crate) fn hardware_error_part(text: &str) -> Option<HardwareErrorPart> {
    let (before, rest) = text.split_once("[Hardware Error]:")?;
    let (_, number) = before.rsplit_once('{')?;
    let number = number.trim_end().strip_suffix('}')?.parse().ok()?;
    let severity = rest
        .split_once("event severity: ")
        .or_else(|| rest.split_once(", type: "))
        .and_then(|(_, word)| match word.trim() {
            "fatal" => Some(AerSeverity::Fatal),
            "recoverable" => Some(AerSeverity::NonFatal),
            "corrected" => Some(AerSeverity::Correctable),
            _ => None,
        });
    let pci_address = rest
        .split_once("device_id: ")
        .and_then(|(_, device)| first_pci_address(device));
    (severity.is_some() || pci_address.is_some()).then_some(HardwareErrorPart {
        number,
        severity,
        pci_address,
    })
}

/// The error when its function is named, with the severity that an earlier line stated.
fn firmware_error(
    part: HardwareErrorPart,
    record: &KernelLogRecord,
    severities: &mut BTreeMap<u64, AerSeverity>,
) -> Option<TimedEvent> {
    if let Some(severity) = part.severity {
        severities.insert(part.number, severity);
    }
    let address = part.pci_address?;
    Some(TimedEvent {
        age_s: record.age_s,
        at_s: record.at_s,
        count: record.repeats.saturating_add(1),
        event: KernelEvent::Aer {
            severity: *severities.get(&part.number)?,
            pci_address: Some(address),
        },
        text: record.text.clone(),
    })
}

/// The second and third lines of an `SXid` say nothing that its first line does not.
fn without_continuations(events: Vec<TimedEvent>) -> Vec<TimedEvent> {
    let key = |event: &KernelEvent| match event {
        KernelEvent::Sxid(sxid) => Some((sxid.pci_address.clone(), sxid.number)),
        _ => None,
    };
    let continues = |event: &KernelEvent| matches!(event, KernelEvent::Sxid(it) if it.continues);
    let whole: BTreeSet<_> = events
        .iter()
        .filter(|it| !continues(&it.event))
        .filter_map(|it| key(&it.event))
        .collect();
    let mut alone: BTreeSet<_> = BTreeSet::new();
    events
        .into_iter()
        .filter(|it| {
            let Some(key) = key(&it.event).filter(|_| continues(&it.event)) else {
                return true;
            };
            // Where the first line is gone, one of the others stands for all.
            !whole.contains(&key) && (is_severity_line(&it.text) || alone.insert(key))
        })
        .collect()
}

fn is_severity_line(text: &str) -> bool {
    text.contains(", Severity ")
}

/// The records without those that name one of these PCI addresses.
///
/// The message of a GPU that fell off the bus spans records, of which only the first names it; all
/// of them are left out.
pub fn without_gpus(records: Vec<KernelLogRecord>, addresses: &[&str]) -> Vec<KernelLogRecord> {
    let is_theirs =
        |address: Option<String>| address.is_some_and(|it| addresses.contains(&it.as_str()));
    let mut inside_their_message = false;
    let mut kept = Vec::new();
    for record in records {
        let event = parse(&record.text);
        let ends_message = matches!(
            &event,
            Some(KernelEvent::FallenOffBus { pci_address: None })
        );
        if inside_their_message && (event.is_none() || ends_message) {
            inside_their_message = !ends_message;
            continue;
        }
        let named = match record.text.find("The NVIDIA GPU ") {
            Some(at) => first_pci_address(&record.text[at..]),
            None => event.and_then(|it| it.pci_address().map(str::to_owned)),
        };
        let begins_message = record.text.contains("The NVIDIA GPU ");
        if is_theirs(named) {
            inside_their_message = begins_message;
        } else {
            inside_their_message = false;
            kept.push(record);
        }
    }
    kept
}

/// The meaning of one record.
pub fn parse(text: &str) -> Option<KernelEvent> {
    parse_xid(text)
        .map(KernelEvent::Xid)
        .or_else(|| parse_sxid(text).map(KernelEvent::Sxid))
        .or_else(|| parse_aer(text))
        .or_else(|| parse_containment(text))
        .or_else(|| parse_crash(text))
        .or_else(|| parse_slot(text))
        .or_else(|| parse_hung_task(text))
        .or_else(|| parse_enumeration(text))
        .or_else(|| parse_driver_message(text))
        .or_else(|| {
            let is_xid = text.contains("NVRM: Xid (") || text.contains("SXid (");
            is_xid.then(|| KernelEvent::Unparsed {
                pci_address: first_pci_address(text),
            })
        })
}

fn parse_xid(text: &str) -> Option<Xid> {
    let (_, rest) = text.split_once("NVRM: Xid (")?;
    let (place, rest) = rest.split_once(')')?;
    let rest = &rest[rest.find(':')? + 1..];
    let (number, mut detail) = leading_number(rest.trim_start())?;
    detail = detail.trim_start_matches([',', ' ']);
    let mut xid = Xid {
        pci_address: first_pci_address(place),
        number,
        ..Xid::default()
    };
    if let Some(rest) = detail.strip_prefix("pid=") {
        let (pid, rest) = rest.split_once(',').unwrap_or((rest, ""));
        xid.pid = pid.trim_matches(['\'', ' ']).parse().ok();
        detail = rest.trim_start();
    }
    if let Some(rest) = detail.strip_prefix("name=") {
        let (name, rest) = rest.split_once(',').unwrap_or((rest, ""));
        let name = name.trim_matches(['\'', ' ']);
        xid.process = (!name.is_empty() && name != "<unknown>").then(|| name.to_owned());
        detail = rest.trim_start();
    }
    detail.trim_end().clone_into(&mut xid.detail);
    if (144..=150).contains(&number) {
        xid.nvlink = parse_nvlink_detail(detail);
    }
    Some(xid)
}

fn parse_nvlink_detail(detail: &str) -> Option<NvlinkXid> {
    let words: Vec<&str> = detail.split_whitespace().collect();
    let fatal = severity_word(detail)?;
    let link = words
        .array_windows()
        .find(|[name, _]| *name == "Link")
        .and_then(|[_, number]| leading_number(number).map(|(number, _)| number));
    let interrupt_info = detail
        .split_once("(0x")
        .and_then(|(_, rest)| rest.split(|c: char| !c.is_ascii_hexdigit()).next())
        .and_then(|digits| u32::from_str_radix(digits, 16).ok());
    Some(NvlinkXid {
        fatal,
        link,
        sub_code: interrupt_info.map(|it| it >> 20 & 0x3f),
    })
}

/// `Fatal`, `FATAL:`, `(Fatal)`, `Nonfatal,`, `Non-fatal`: whatever stands around the word.
fn severity_word(detail: &str) -> Option<bool> {
    detail
        .split(|c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '_')
        .map(str::to_ascii_lowercase)
        .find_map(|word| match word.trim_matches('-') {
            "fatal" => Some(true),
            "nonfatal" | "non-fatal" => Some(false),
            _ => None,
        })
}

fn parse_sxid(text: &str) -> Option<Sxid> {
    let (_, rest) = text.split_once("SXid (")?;
    let (place, rest) = rest.split_once(')')?;
    let (number, detail) = leading_number(rest.trim_start_matches([':', ' ']))?;
    let detail = detail.trim_start_matches([',', ' ']).trim_end();
    let severity = detail
        .strip_prefix("Severity ")
        .and_then(leading_number)
        .map(|(number, _)| number > 0);
    let continues = severity.is_some() || detail.starts_with("Data {");
    // The first words alone: what follows describes the link.
    let first_words = detail.split_once(',').map_or(detail, |(first, _)| first);
    let fatal = severity.or_else(|| severity_word(first_words));
    Some(Sxid {
        continues,
        pci_address: first_pci_address(place),
        number,
        fatal,
        detail: detail.to_owned(),
    })
}

fn is_aer_announcement(text: &str) -> bool {
    text.contains("AER:")
        && (text.contains("error received") || text.contains("error message received"))
}

fn parse_aer(text: &str) -> Option<KernelEvent> {
    let announced = is_aer_announcement(text);
    // The link was reset, and what is below the port did not come back.
    // Source: Linux, `drivers/pci/pcie/err.c`.
    if text.contains("AER: device recovery failed") {
        return Some(KernelEvent::Aer {
            severity: AerSeverity::NonFatal,
            pci_address: first_pci_address(text),
        });
    }
    let told = if announced {
        &text[text.find("AER:")?..]
    } else {
        &text[text.find("PCIe Bus Error: severity=")?..]
    };
    let lower = told.to_ascii_lowercase();
    // Kernels before and after 6.10 say "Corrected" and "Correctable", "Uncorrected" and
    // "Uncorrectable".
    let severity = if lower.contains("(fatal)") {
        AerSeverity::Fatal
    } else if lower.contains("uncorrect") {
        AerSeverity::NonFatal
    } else if lower.contains("correct") {
        AerSeverity::Correctable
    } else {
        return None;
    };
    // An announcement names the reporting function after the words; a bus error names it before
    // them.
    let pci_address = if announced {
        first_pci_address(told).or_else(|| first_pci_address(text))
    } else {
        first_pci_address(text)
    };
    Some(KernelEvent::Aer {
        severity,
        pci_address,
    })
}

/// `pcieport 0000:37:01.0: DPC: containment event, status:0x1f05 source:0x3a00`, and from Linux
/// 6.15 on `… status:0x200d, ERR_FATAL received from 0000:3a:00.0`. The link is disabled, whatever
/// the severity of the error was.
fn parse_containment(text: &str) -> Option<KernelEvent> {
    let (port, rest) = text.split_once(CONTAINMENT)?;
    let port = first_pci_address(port);
    // A source of 0 is the port itself.
    let source = rest
        .split_once("source:0x")
        .and_then(|(_, id)| u16::from_str_radix(id.trim().get(..4)?, 16).ok())
        .filter(|id| *id != 0)
        .zip(port.as_deref())
        .and_then(|(id, port)| {
            let domain = port.get(..4)?;
            let (bus, device, function) = (id >> 8, id >> 3 & 0x1f, id & 0x7);
            Some(format!("{domain}:{bus:02x}:{device:02x}.{function}"))
        });
    Some(KernelEvent::Aer {
        severity: AerSeverity::Fatal,
        pci_address: source.or_else(|| first_pci_address(rest)).or(port),
    })
}

/// Crashes and lockups of the kernel, in the words of x86 and arm64.
// Source: Linux, `arch/x86/mm/fault.c`, `arch/x86/kernel/traps.c`, `arch/arm64/mm/fault.c`,
// `kernel/watchdog.c`, `kernel/watchdog_perf.c`, `kernel/rcu/tree_stall.h` and `tree_exp.h`.
fn parse_crash(text: &str) -> Option<KernelEvent> {
    const CRASHES: [&str; 5] = [
        "BUG: unable to handle ",
        "BUG: kernel NULL pointer dereference",
        "general protection fault",
        "kernel BUG at ",
        "Unable to handle kernel ",
    ];
    const STALLS: [&str; 4] = [
        "detected stalls on CPUs",
        "detected expedited stalls on CPUs",
        "self-detected stall on CPU",
        "Watchdog detected hard LOCKUP on cpu",
    ];
    if CRASHES.iter().any(|it| text.contains(it)) {
        return Some(KernelEvent::KernelCrash);
    }
    if let Some((_, task)) = text.split_once("soft lockup - CPU#") {
        let task = task.rsplit_once('[').map(|(_, task)| task);
        let name = task
            .and_then(|it| it.rsplit_once(':'))
            .map(|it| it.0.to_owned());
        return Some(KernelEvent::Lockup { task: name });
    }
    let is_stall = STALLS.iter().any(|it| text.contains(it));
    is_stall.then_some(KernelEvent::Lockup { task: None })
}

/// Source of the words: Linux, `drivers/pci/hotplug/pciehp_ctrl.c`.
fn parse_slot(text: &str) -> Option<KernelEvent> {
    let (_, message) = text.split_once("pciehp")?;
    let message = message.to_ascii_lowercase();
    if message.contains("ignored") {
        return None;
    }
    let pci_address = first_pci_address(text);
    if message.contains("link down") || message.contains("card not present") {
        Some(KernelEvent::SlotLinkDown { pci_address })
    } else if message.contains("link up") {
        Some(KernelEvent::SlotLinkUp { pci_address })
    } else {
        None
    }
}

/// Source of the words: Linux, `kernel/hung_task.c`.
fn parse_hung_task(text: &str) -> Option<KernelEvent> {
    let (task, _) = text.split_once(" blocked for more than ")?;
    let (_, task) = task.split_once("task ")?;
    Some(KernelEvent::HungTask {
        task: task.trim().to_owned(),
    })
}

/// `pci 0000:3b:00.0: [10de:2335] type 00 class 0x030200`, also with words between (kernels from
/// 6.7 on).
fn parse_enumeration(text: &str) -> Option<KernelEvent> {
    text.find(ENUMERATED_VENDOR)?;
    let (_, class) = text.split_once("class 0x")?;
    // 0x03: a display controller.
    class
        .starts_with("03")
        .then(|| first_pci_address(text))?
        .map(|pci_address| KernelEvent::GpuEnumerated { pci_address })
}

/// The wordings with which the driver reports that a GPU left the bus.
// Source: NVIDIA/open-gpu-kernel-modules (osHandleGpuLost, NV_ERR_GPU_IS_LOST, nv-pci.c) and its
// issue 688.
fn is_lost(lower: &str) -> bool {
    const OF_THE_DRIVER: [&str; 8] = [
        "gpu lost from the bus",
        "nv_err_gpu_is_lost",
        "gpu is lost",
        "gpu has been lost",
        "attempting to remove device",
        "surprise remov",
        // The kernel reads all ones from the function (Linux, `drivers/pci/pci.c`).
        "d0, device inaccessible",
        "(config space inaccessible)",
    ];
    if lower.contains("fallen off the bus") {
        return true;
    }
    let by_the_driver = lower.contains("nvrm:") || lower.contains("nvidia");
    let disconnected = lower.contains("disconnected")
        && (lower.contains("gpu") || lower.contains("device"))
        && !lower.contains("connector")
        && !lower.contains("display");
    by_the_driver && (disconnected || OF_THE_DRIVER.iter().any(|it| lower.contains(it)))
}

fn parse_driver_message(text: &str) -> Option<KernelEvent> {
    let pci_address = first_pci_address(text);
    if text.contains("NVRM: loading NVIDIA") {
        return Some(KernelEvent::DriverLoaded);
    }
    let lower = text.to_ascii_lowercase();
    if is_lost(&lower) {
        return Some(KernelEvent::FallenOffBus { pci_address });
    }
    let of_the_driver = lower.contains("nvrm:") || lower.contains("nvidia");
    // Source: NVIDIA/open-gpu-kernel-modules, `uvm_global.c`: every later call of CUDA fails.
    let uvm_stopped = lower.contains("nvidia-uvm") && lower.contains("global fatal error");
    if uvm_stopped || of_the_driver && lower.contains("reboot") && lower.contains("requir") {
        return Some(KernelEvent::RebootRequired);
    }
    let reset_required = lower.contains("nv_err_reset_required")
        || lower.contains("reset required")
        || lower.contains("requires reset")
        || lower.contains("requires a reset");
    if of_the_driver && reset_required {
        return Some(KernelEvent::ResetRequired { pci_address });
    }
    if text.contains("NVRM: API mismatch") {
        return Some(KernelEvent::ApiMismatch);
    }
    // The driver's words for a GSP that stopped, without the number of Xid 119 and without an
    // address. Source: NVIDIA/open-gpu-kernel-modules, `kernel_gsp.c`.
    let is_of_the_gsp = lower.contains("gsp") || lower.contains("libos");
    if text.contains("NVRM:") && is_of_the_gsp && lower.contains("heartbeat timed out") {
        return Some(KernelEvent::Xid(Xid {
            pci_address,
            number: 119,
            detail: text.trim().to_owned(),
            ..Xid::default()
        }));
    }
    // The driver's own words for what Xid 54 reports.
    if text.contains("NVRM:") && text.contains("does not have the necessary power cables") {
        return Some(KernelEvent::Xid(Xid {
            pci_address,
            number: 54,
            detail: text.trim().to_owned(),
            ..Xid::default()
        }));
    }
    let module_failed = (text.contains("NVRM:")
        && (text.contains("RmInitAdapter failed")
            || text.contains("rm_init_adapter failed")
            || text.contains("NVIDIA probe routine failed")
            || text.contains("is 0M @ 0x0")
            || text.contains("the GPU is likely in a bad state")))
        || (text.contains("nvidia")
            && text.contains("probe")
            && text.contains("failed with error"));
    if module_failed {
        return Some(KernelEvent::GpuInitializationFailed { pci_address });
    }
    // `nouveau 0000:01:00.0: NVIDIA GA102 (b72000a1)` is how nouveau announces the chip that it
    // drives.
    let rest = text.split_once("nouveau ")?.1;
    let bound = rest.contains(": NVIDIA ") || rest.contains("bios: version");
    (bound && pci_address.is_some()).then_some(KernelEvent::NouveauBound { pci_address })
}

/// The first thing that reads like a PCI address, in the facts' spelling: `0000:3b:00.0`.
///
/// Accepted are four or eight digits of domain, with or without `PCI:` before and a function after
/// it. A UUID or a time of day does not pass: both lack the exact widths.
fn first_pci_address(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let mut rest = bytes;
    let mut is_boundary = true;
    while let Some((first, others)) = rest.split_first() {
        if is_boundary && let Some(address) = pci_address_at(rest) {
            return Some(address);
        }
        is_boundary = !first.is_ascii_hexdigit();
        rest = others;
    }
    None
}

fn pci_address_at(bytes: &[u8]) -> Option<String> {
    let hex_run = |from: usize| {
        let from = bytes.get(from..).unwrap_or_default();
        let digits = from.iter().take_while(|byte| byte.is_ascii_hexdigit());
        digits.count()
    };
    let domain_digits = hex_run(0);
    if domain_digits != 4 && domain_digits != 8 {
        return None;
    }
    let bus_at = domain_digits + 1;
    let device_at = bus_at + 3;
    let colons = bytes.get(domain_digits) == Some(&b':') && bytes.get(bus_at + 2) == Some(&b':');
    if !colons || hex_run(bus_at) != 2 || hex_run(device_at) != 2 {
        return None;
    }
    let number = |from: usize, digits: usize| {
        let digits = bytes.get(from..from + digits)?;
        let digits = std::str::from_utf8(digits).ok()?;
        u32::from_str_radix(digits, 16).ok()
    };
    let function_at = device_at + 3;
    let function = if bytes.get(device_at + 2) == Some(&b'.') {
        bytes
            .get(function_at)
            .filter(|digit| (b'0'..=b'7').contains(*digit))
            .map_or(0, |digit| u32::from(digit - b'0'))
    } else {
        0
    };
    Some(format!(
        "{:04x}:{:02x}:{:02x}.{function}",
        number(0, domain_digits)?,
        number(bus_at, 2)?,
        number(device_at, 2)?
    ))
}

fn leading_number(text: &str) -> Option<(u32, &str)> {
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    Some((text[..end].parse().ok()?, &text[end..]))
}

fn contains_ignoring_case(text: &str, needle: &str) -> bool {
    text.as_bytes()
        .windows(needle.len())
        .any(|window| window.eq_ignore_ascii_case(needle.as_bytes()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A record that is an event and is not kept would be a fault that passes.
    #[test]
    fn every_event_is_relevant() {
        for text in [
            "nvidia 0000:3b:00.0: GPU is lost",
            "Nvrm: GPU 0000:3b:00.0: gpu has been lost",
            "nvidia 0000:3b:00.0: device disconnected",
            "NVIDIA driver: a reboot is required to recover",
            "nvidia: reset required on 0000:3b:00.0",
            "pcieport 0000:00:01.0: pciehp: Slot(1): Link Down",
            "pcieport 0000:00:01.0: pciehp: Slot(1): Card not present",
            "INFO: task nvidia-smi:42 blocked for more than 120 seconds.",
        ] {
            assert!(parse(text).is_some(), "{text}");
            assert!(is_relevant(text), "{text}");
        }
    }

    #[test]
    fn messages_of_some_gpus_are_left_out_whole() {
        let records = |texts: &[&str]| -> Vec<KernelLogRecord> {
            let record = |text: &&str| KernelLogRecord {
                age_s: None,
                at_s: None,
                repeats: 0,
                text: (*text).to_owned(),
            };
            texts.iter().map(record).collect()
        };
        let all = records(&[
            "NVRM: Xid (PCI:0000:3b:00): 13, a",
            "NVRM: The NVIDIA GPU 0000:18:00.0",
            "NVRM: (PCI ID: 10de:2330) installed in this system has",
            "NVRM: fallen off the bus and is not responding to commands.",
            "NVRM: Xid (PCI:0000:18:00): 79, b",
            "NVRM: something of no GPU",
        ]);
        let kept = without_gpus(all.clone(), &["0000:18:00.0"]);
        assert_eq!(kept, [all[0].clone(), all[5].clone()]);
        let kept = without_gpus(all.clone(), &["0000:3b:00.0"]);
        assert_eq!(kept, all[1..]);
        // A message that is cut off takes no other GPU's with it.
        let cut = records(&[
            "NVRM: The NVIDIA GPU 0000:18:00.0",
            "NVRM: Xid (PCI:0000:3b:00): 13, a",
        ]);
        assert_eq!(without_gpus(cut.clone(), &["0000:18:00.0"]), cut[1..]);
    }

    fn xid(text: &str) -> Xid {
        match parse(text) {
            Some(KernelEvent::Xid(xid)) => xid,
            other => panic!("{text} is read as {other:?}"),
        }
    }

    fn records(lines: &[&str]) -> Vec<KernelLogRecord> {
        lines
            .iter()
            .map(|line| KernelLogRecord {
                age_s: Some(1.0),
                at_s: None,
                repeats: 0,
                text: (*line).to_owned(),
            })
            .collect()
    }

    #[test]
    fn an_xid_that_cannot_be_read_is_an_event_all_the_same() {
        for (text, address) in [
            (
                "NVRM: Xid (PCI:0000:3b:00): seventy-nine",
                Some("0000:3b:00.0"),
            ),
            ("NVRM: Xid (PCI:0000:3b", None),
            (
                "NVRM: Xid (PCI:0000:3b:00): 99999999999, pid=1",
                Some("0000:3b:00.0"),
            ),
            (
                "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): Fatal",
                Some("0000:c1:00.0"),
            ),
        ] {
            assert_eq!(
                parse(text),
                Some(KernelEvent::Unparsed {
                    pci_address: address.map(str::to_owned)
                }),
                "{text}"
            );
        }
        let lost = parse("NVRM: Xid (PCI:0000:3b:00): GPU has fallen off the bus.");
        assert!(matches!(lost, Some(KernelEvent::FallenOffBus { .. })));
    }

    #[test]
    fn both_forms_of_an_xid() {
        let new = xid(
            "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        );
        assert_eq!(new.number, 79);
        assert_eq!(new.pci_address.as_deref(), Some("0000:3b:00.0"));
        assert_eq!((new.pid, new.process), (None, None));
        assert_eq!(new.detail, "GPU has fallen off the bus.");
        let old = xid("NVRM: Xid (0000:03:00): 14, Channel 00000001");
        assert_eq!(
            (old.number, old.pci_address.as_deref()),
            (14, Some("0000:03:00.0"))
        );
        assert_eq!(old.detail, "Channel 00000001");
    }

    #[test]
    fn an_xid_names_its_process() {
        let event = xid(
            "NVRM: Xid (PCI:0000:c7:00): 31, pid=4242, name=python3, Ch 00000008, intr 00000000. MMU Fault",
        );
        assert_eq!(
            (event.pid, event.process.as_deref()),
            (Some(4242), Some("python3"))
        );
        assert_eq!(event.detail, "Ch 00000008, intr 00000000. MMU Fault");
        let quoted = xid("NVRM: Xid (PCI:0000:c7:00): 43, pid='77', name='a b', Ch 1");
        assert_eq!(
            (quoted.pid, quoted.process.as_deref()),
            (Some(77), Some("a b"))
        );
    }

    #[test]
    fn an_xid_of_a_mig_instance_names_the_gpu() {
        let event =
            xid("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 13, pid=9, name=x, Graphics Exception");
        assert_eq!(
            (event.number, event.pci_address.as_deref()),
            (13, Some("0000:01:00.0"))
        );
    }

    #[test]
    fn nvlink_xids_carry_their_severity() {
        let event = xid(
            "NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 04 (0x004000c6 0x00000000 0x0 0x0 0x0 0x0)",
        );
        assert_eq!(
            event.nvlink,
            Some(NvlinkXid {
                fatal: true,
                link: Some(4),
                sub_code: Some(4)
            })
        );
        let nonfatal = xid(
            "NVRM: Xid (PCI:0018:01:00): 145, RLW_REMAP Nonfatal XC1 i1 Link -1 (0x00000004 0x0)",
        );
        assert_eq!(
            nonfatal.nvlink,
            Some(NvlinkXid {
                fatal: false,
                link: None,
                sub_code: Some(0)
            })
        );
        assert_eq!(
            xid("NVRM: Xid (PCI:0018:01:00): 79, Fatal (0x1)").nvlink,
            None
        );
    }

    #[test]
    fn sxids_say_fatal_or_not() {
        let text = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)";
        let Some(KernelEvent::Sxid(event)) = parse(text) else {
            panic!("no SXid")
        };
        assert_eq!((event.number, event.fatal), (12028, Some(false)));
        assert_eq!(event.pci_address.as_deref(), Some("0000:c1:00.0"));
        let Some(KernelEvent::Sxid(fatal)) = parse(
            "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
        ) else {
            panic!("no SXid")
        };
        assert_eq!(fatal.fatal, Some(true));
        let Some(KernelEvent::Sxid(neither)) =
            parse("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Data {0x1}")
        else {
            panic!("no SXid")
        };
        assert_eq!(neither.fatal, None);
    }

    #[test]
    fn fallen_off_the_bus_without_a_number_on_one_line_and_on_three() {
        assert_eq!(
            parse("NVRM: GPU 0000:3B:00.0: GPU has fallen off the bus."),
            Some(KernelEvent::FallenOffBus {
                pci_address: Some("0000:3b:00.0".to_owned())
            })
        );
        let events = events(&records(&[
            "NVRM: The NVIDIA GPU 0000:18:00.0",
            "NVRM: (PCI ID: 10de:2335) installed in this system has",
            "NVRM: fallen off the bus and is not responding to commands.",
        ]));
        assert_eq!(events.len(), 1);
        assert_eq!(events[0].event.pci_address(), Some("0000:18:00.0"));
    }

    #[test]
    fn aer_in_old_and_new_words() {
        let cases = [
            (
                "nvidia 0000:3b:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
                AerSeverity::Correctable,
                "0000:3b:00.0",
            ),
            (
                "nvidia 0000:3b:00.0: PCIe Bus Error: severity=Correctable, type=Data Link Layer, (Transmitter ID)",
                AerSeverity::Correctable,
                "0000:3b:00.0",
            ),
            (
                "pcieport 0000:00:03.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer, (Requester ID)",
                AerSeverity::NonFatal,
                "0000:00:03.0",
            ),
            (
                "pcieport 0000:00:03.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Inaccessible, (Unregistered Agent ID)",
                AerSeverity::Fatal,
                "0000:00:03.0",
            ),
            (
                "pcieport 0000:00:03.0: AER: Multiple Corrected error received: 0000:03:00.0",
                AerSeverity::Correctable,
                "0000:03:00.0",
            ),
            (
                "pcieport 0000:00:03.0: AER: Uncorrectable (Non-Fatal) error message received from 0000:03:00.0",
                AerSeverity::NonFatal,
                "0000:03:00.0",
            ),
        ];
        for (text, severity, address) in cases {
            assert_eq!(
                parse(text),
                Some(KernelEvent::Aer {
                    severity,
                    pci_address: Some(address.to_owned())
                }),
                "{text}"
            );
        }
        assert_eq!(
            parse("pcieport 0000:00:03.0: AER: enabled with IRQ 24"),
            None
        );
    }

    #[test]
    fn a_disabled_link_is_a_fatal_error_of_what_sent_it() {
        for (text, address) in [
            (
                "pcieport 0000:37:01.0: DPC: containment event, status:0x1f05 source:0x3a00",
                "0000:3a:00.0",
            ),
            (
                "pcieport 0000:37:01.0: DPC: containment event, status:0x200d, ERR_FATAL received from 0000:3a:00.0",
                "0000:3a:00.0",
            ),
            (
                "pcieport 0000:37:01.0: DPC: containment event, status:0x1f01 source:0x0000",
                "0000:37:01.0",
            ),
            (
                "pcieport 0000:37:01.0: DPC: containment event, status:0x1f01 source:é",
                "0000:37:01.0",
            ),
        ] {
            assert!(is_relevant(text), "{text}");
            assert_eq!(
                parse(text),
                Some(KernelEvent::Aer {
                    severity: AerSeverity::Fatal,
                    pci_address: Some(address.to_owned())
                }),
                "{text}"
            );
        }
    }

    #[test]
    fn an_error_of_the_firmware_has_the_severity_of_its_number() {
        let events = events(&records(&[
            "{1}[Hardware Error]: event severity: fatal",
            "{2}[Hardware Error]: event severity: corrected",
            "{1}[Hardware Error]:   section_type: PCIe error",
            "{2}[Hardware Error]:   device_id: 0000:9b:00.0",
            "{1}[Hardware Error]:   device_id: 0000:3a:00.0",
            "{1}[Hardware Error]:   vendor_id: 0x10de, device_id: 0x2330",
            "{3}[Hardware Error]:   device_id: 0000:18:00.0",
        ]));
        let of = |it: &TimedEvent| match &it.event {
            KernelEvent::Aer { severity, .. } => {
                (*severity, it.event.pci_address().map(str::to_owned))
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(
            events.iter().map(of).collect::<Vec<_>>(),
            [
                (AerSeverity::Correctable, Some("0000:9b:00.0".to_owned())),
                (AerSeverity::Fatal, Some("0000:3a:00.0".to_owned())),
            ]
        );
        assert!(is_relevant(
            "{1}[Hardware Error]:   device_id: 0000:3a:00.0"
        ));
    }

    #[test]
    fn a_crash_counts_where_its_trace_is_in_the_driver() {
        let crash = |trace: &str| {
            let lines = records(&[
                "BUG: kernel NULL pointer dereference, address: 0000000000000000",
                trace,
            ]);
            assert!(is_relevant(&lines[0].text));
            events(&lines)
                .into_iter()
                .map(|it| it.event)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            crash("RIP: 0010:_raw_q_flush+0x87/0x110 [nvidia_uvm]"),
            [KernelEvent::KernelCrash]
        );
        assert_eq!(crash("RIP: 0010:mlx5e_poll+0x87/0x110 [mlx5_core]"), []);
        let lockup = |text: &str| events(&records(&[text])).len();
        assert_eq!(
            lockup("watchdog: BUG: soft lockup - CPU#5 stuck for 26s! [UVM GPU1 BH:1234]"),
            1
        );
        assert_eq!(
            lockup("watchdog: BUG: soft lockup - CPU#5 stuck for 26s! [java:4242]"),
            0
        );
    }

    #[test]
    fn words_of_the_driver_for_what_has_a_number_elsewhere() {
        let power =
            xid("NVRM: GPU 0000:01:00.0: GPU does not have the necessary power cables connected.");
        assert_eq!(
            (power.number, power.pci_address.as_deref()),
            (54, Some("0000:01:00.0"))
        );
        let uvm =
            "nvidia-uvm: Encountered a global fatal error: Robust Channel error [NV_ERR_RC_ERROR]";
        assert_eq!(parse(uvm), Some(KernelEvent::RebootRequired));
        assert!(is_relevant(uvm));
        let gone = "nvidia 0000:3a:00.0: Unable to change power state from D3cold to D0, device inaccessible";
        assert_eq!(
            parse(gone),
            Some(KernelEvent::FallenOffBus {
                pci_address: Some("0000:3a:00.0".to_owned())
            })
        );
        assert!(is_relevant(gone));
        assert!(parse("nvme 0000:04:00.0: Unable to change power state from D3cold to D0, device inaccessible").is_none());
    }

    #[test]
    fn an_announced_bus_error_is_one_event() {
        let events = events(&records(&[
            "pcieport 0000:00:03.0: AER: Corrected error received: 0000:03:00.0",
            "nvidia 0000:03:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer",
            "nvidia 0000:03:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer",
        ]));
        assert_eq!(events.len(), 2);
    }

    #[test]
    fn a_gsp_time_out_is_one_event_however_long_its_history() {
        let lines = records(&[
            "NVRM: Xid (PCI:0000:9b:00): 119, pid=2, name=x, Timeout after 6s of waiting for RPC response from GPU5 GSP!",
            "NVRM: GPU5 RPC history (CPU -> GSP):",
            "NVRM:     entry function                   data0              data1              ts_start",
            "NVRM:      0    76   GSP_RM_CONTROL          0x000000002080a7d7 0x0000000000000004",
            "NVRM:     -1    76   GSP_RM_CONTROL          0x000000002080a7d7 0x0000000000000004",
            "NVRM: GPU5 RPC event history (CPU <- GSP):",
        ]);
        assert_eq!(events(&lines).len(), 1);
        assert!(is_flood(&lines[1].text) && is_flood(&lines[3].text) && is_flood(&lines[4].text));
        assert!(!is_flood(&lines[0].text));
    }

    #[test]
    fn drivers_that_do_not_start_and_drivers_that_should_not_be_there() {
        assert_eq!(
            parse("NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x55:2477)"),
            Some(KernelEvent::GpuInitializationFailed {
                pci_address: Some("0000:3b:00.0".to_owned())
            })
        );
        assert_eq!(
            parse("nvidia: probe of 0000:3b:00.0 failed with error -1"),
            Some(KernelEvent::GpuInitializationFailed {
                pci_address: Some("0000:3b:00.0".to_owned())
            })
        );
        assert_eq!(
            parse("nouveau 0000:01:00.0: NVIDIA GA102 (b72000a1)"),
            Some(KernelEvent::NouveauBound {
                pci_address: Some("0000:01:00.0".to_owned())
            })
        );
        assert_eq!(
            parse("NVRM: API mismatch: the client has the version 580.95.05, but"),
            Some(KernelEvent::ApiMismatch)
        );
        assert_eq!(parse("usb 1-1: new high-speed USB device"), None);
    }

    #[test]
    fn only_lines_that_matter_are_kept() {
        assert!(is_relevant("NVRM: Xid (PCI:0000:3b:00): 79, x"));
        assert!(is_relevant(
            "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 1, Fatal"
        ));
        assert!(is_relevant("Nouveau 0000:01:00.0: x"));
        // The greeting of the module ends what an earlier load of it reported.
        assert!(is_relevant(
            "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.159.04"
        ));
        assert!(!is_relevant(
            "nvidia-nvlink: Nvlink Core is being initialized, major device number 236"
        ));
        assert!(!is_relevant("e1000e: eth0 NIC Link is Down"));
    }

    proptest! {
        #[test]
        fn nothing_panics(text in "\\PC{0,200}") {
            let _ = parse(&text);
            let _ = is_relevant(&text) | is_flood(&text);
        }

        #[test]
        fn nothing_panics_on_torn_messages(
            head in prop::sample::select(vec!["NVRM: Xid (", "nvidia-nvswitch0: SXid (", "x: PCIe Bus Error: severity=", "AER: error received", "nouveau ", "NVRM: The NVIDIA GPU "]),
            tail in "[-PCI:0-9a-f.,() =é]{0,60}",
        ) {
            let record = KernelLogRecord { age_s: None, at_s: None, repeats: 0, text: format!("{head}{tail}") };
            let _ = events(&[record.clone(), record]);
        }
    }
}
