//! The kernel log has no error that takes a GPU or NVSwitch out of service.
//!
//! ## Why
//! The driver reports what went wrong in the kernel log: a GPU that fell off the bus, memory that
//! could not be contained, firmware that stopped. NVML forgets it; the kernel log keeps it.
//!
//! ## How it is judged
//! Every message since boot, or of the last `policy.xid.window_hours` of the profile. Xids are
//! judged by the class of their number in the reference table: those that need a reset, a reboot,
//! an inspection or new software fail; a contained memory error and numbers without a public
//! meaning warn; messages for information, and those that blame the application, are only reported.
//! A message of an Xid that cannot be read warns with its text. `policy.xid` of the profile moves
//! numbers between `fail`, `warn` and `ignore`.
//!
//! Some messages carry their own verdict. Xids 144 to 150 and `SXid` messages state whether they
//! are fatal; the three lines of an `SXid` are one event. Xid 154 names the recovery action that
//! the driver requests, and its newest message counts. Xid 45 names the Xid that caused it, which
//! is judged where the log does not have it. ECC errors state whether they request a reset (`RST`,
//! `D-RST`). Xid 92 warns, and fails from the third on; Xid 157 warns.
//!
//! Messages without a number are evidence, too: a GPU that has fallen off the bus, is lost or
//! disconnected counts as Xid 79; "reset required" and "requiring os reboot to recover" fail. A
//! task that hangs in the driver's functions, or locks a processor up there, warns, and fails where
//! it is the driver's own or was reported again; a crash of the kernel in the driver fails, and so
//! does a fatal error of UVM, after which CUDA works on no GPU. A device that the driver could not
//! initialize (`RmInitAdapter failed`) fails, and warns where it works now. A GPU without its power
//! cable counts as Xid 54, one whose configuration space is inaccessible as Xid 79.
//!
//! Xid 13 and 31 blame the application, unless the same multiprocessor is named for different
//! processes: three warn, five fail, as long as no other multiprocessor of the GPU and no other GPU
//! is named.
//!
//! An error that was followed by a new load of the driver, or by an Xid 154 that reports no
//! recovery action, warns where the GPU answers and NVML reports no recovery action. One that came
//! back after two such recoveries fails again. In a container, messages of GPUs that it does not
//! have are only reported.
//!
//! The kernel forgets its oldest messages. When nothing bad was found but the log does not reach
//! back to boot, that is a warning where it covers at least two hours, and an error where it covers
//! less, or less than the profile's window.
//!
//! ## What to do
//! What the finding names for its number. After the repair: reload the driver or reboot.
//!
//! ## Source
//! NVIDIA Xid catalogue, <https://docs.nvidia.com/deploy/xid-errors/>, with its workflows for Xid
//! 13, 31 and 45; the wordings are those of NVIDIA/open-gpu-kernel-modules. Two hours are what
//! azurehpc-health-checks covers. gpud recommends an inspection of the hardware after two reboots.
//! The numbers for Xid 92 lie between NVIDIA's resolution (ignore) and azurehpc-health-checks
//! (fails at the first); those for Xid 13 and 31 are this project's own.

use std::collections::{BTreeMap, BTreeSet};

use crate::cause::{CauseKind, RecommendedAction};
use crate::check::{Check, Judge};
use crate::facts::{Facts, GpuFacts, KernelLog, Reading, RecoveryAction};
use crate::findings::Evidence;
use crate::findings::{Judgement, Outcome, Verdict};
use crate::kernel_log_events::{self, KernelEvent, RequestedRecovery, Sxid, TimedEvent, Xid};
use crate::level::{Level, Stage};
use crate::profile::{Profile, XidPolicy, XidSeverity};
use crate::queries;
use crate::reference::{self, XidClass};
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "kernel_log_xid",
    stage: Stage::Host,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/deploy/xid-errors/",
};

/// How far the log must reach back for "no Xid" to mean anything, where the profile names no
/// window: what azurehpc-health-checks looks at (`check_gpu_xid`, the last two hours).
const LOOK_BACK_MINIMUM_S: f64 = 2.0 * SECONDS_PER_HOUR;
const SECONDS_PER_HOUR: f64 = 3_600.0;
/// "GPU has fallen off the bus" (Xid catalogue).
const FALLEN_OFF_THE_BUS: u32 = 79;
/// "High single-bit ECC error rate" and "Resource Retirement Failure" (Xid catalogue).
const HIGH_SINGLE_BIT_ERROR_RATE: u32 = 92;
const RETIREMENT_FAILURE: u32 = 157;
/// Messages of a high error rate at which a GPU fails: between NVIDIA's resolution (ignore) and
/// that of azurehpc-health-checks, which fails at the first.
const HIGH_RATES_MAXIMUM: u64 = 3;
/// Different processes that one multiprocessor stopped: this project's own numbers, as NVIDIA's
/// workflows for Xid 13 and 31 name none.
const PROCESSES_OF_ONE_UNIT_WARN: usize = 3;
const PROCESSES_OF_ONE_UNIT_FAIL: usize = 5;
/// Source: gpud recommends an inspection of the hardware when an error comes back after two
/// reboots.
const RECOVERIES_MAXIMUM: usize = 2;
/// Of a message from the kernel log, so many characters are shown.
const MESSAGE_LENGTH: usize = 200;

/// One kind of trouble on one GPU or switch.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Trouble {
    /// `Xid 79 (GPU has fallen off the bus)`
    what: String,
    /// `on GPU-… (0000:3b:00.0)`
    place: String,
    pci_address: Option<String>,
}

struct Seen {
    verdict: Verdict,
    kind: CauseKind,
    action: RecommendedAction,
    count: u64,
    /// The recoveries that it came after.
    periods: BTreeSet<usize>,
    /// Every message of it was followed by a recovery.
    has_recovered: bool,
    last_age_s: Option<f64>,
    last_message: String,
    remedy: String,
}

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let log = facts
        .host
        .kernel_log
        .required("the kernel log")
        .map_err(|unread| {
            Outcome::from(unread).remedy("run as root, or allow it: sysctl kernel.dmesg_restrict=0, or add the user to group adm")
        })?;
    let policy = &profile.policy.xid;
    let window_s = policy.window_hours.map(|hours| hours * SECONDS_PER_HOUR);
    let troubles = troubles(log, window_s, policy, facts);

    let mut tally = Tally::default();
    let mut told = Vec::new();
    let mut messages = Vec::new();
    let mut remedies = Vec::new();
    let mut evidence = Vec::new();
    for (trouble, seen) in &troubles {
        let text = describe(trouble, seen);
        match seen.verdict {
            Verdict::Fail => tally.fail(&text),
            Verdict::Warn => tally.warn(&text),
            _ => told.push(text),
        }
        if seen.verdict != Verdict::Pass {
            messages.push(format!("{}: {}", seen.verdict, seen.last_message));
            remedies.push((seen.verdict, seen.remedy.as_str()));
            evidence.push(Evidence {
                pci_address: trouble.pci_address.clone(),
                verdict: seen.verdict,
                kind: seen.kind,
                recommended_action: seen.action,
                summary: describe(trouble, seen),
                line: Some(seen.last_message.clone()),
            });
        }
    }
    judge_coverage(log, window_s, &mut tally);
    let worst = tally.worst();
    let outcome = tally.outcome(Outcome::pass(pass_summary(log, window_s, &told)));
    if messages.is_empty() {
        return Ok(match worst {
            None => outcome,
            Some(_) => outcome.remedy(
                "keep more of the log: a persistent journal (Storage=persistent), a larger ring buffer (log_buf_len=), or \
                 a window in the profile: policy: {xid: {window_hours: 2}}",
            ),
        });
    }
    remedies.sort_by_key(|(verdict, _)| std::cmp::Reverse(*verdict));
    Ok(outcome
        .expected("no Xid that blames a GPU")
        .observed(messages.join("\n"))
        .remedy(remedies[0].1)
        .evidence(evidence))
}

/// Everything that the log reports within the window, by what and where.
fn troubles(
    log: &KernelLog,
    window_s: Option<f64>,
    policy: &XidPolicy,
    facts: &Facts,
) -> BTreeMap<Trouble, Seen> {
    let events = kernel_log_events::events(&log.records);
    let history = History::of(&events, facts);
    let mut troubles: BTreeMap<Trouble, Seen> = BTreeMap::new();
    // A message whose age is not known may be inside the window, so it is judged.
    let inside = |event: &TimedEvent| {
        window_s.is_none_or(|window_s| event.age_s.is_none_or(|age_s| age_s <= window_s))
    };
    for event in events.iter().filter(|it| inside(it)) {
        let Some(mut judged) = judge_event(event, &history, policy) else {
            continue;
        };
        let address = event
            .event
            .pci_address()
            .or(history.only_lost(&event.event));
        let is_of_others = address.is_some_and(|it| is_not_in_this_container(it, facts));
        if is_of_others {
            judged
                .what
                .push_str(", of a GPU that this container does not have,");
            judged.verdict = Verdict::Pass;
        }
        let trouble = Trouble {
            what: judged.what,
            place: place(address, facts),
            pci_address: address.map(str::to_owned),
        };
        let seen = troubles.entry(trouble).or_insert_with(|| Seen {
            verdict: judged.verdict,
            kind: judged.kind,
            action: judged.action,
            count: 0,
            last_age_s: None,
            last_message: String::new(),
            remedy: judged.remedy,
            periods: BTreeSet::new(),
            has_recovered: true,
        });
        seen.count += event.count;
        // The newest decides, whatever the order of messages with equal stamps.
        if seen.last_message.is_empty() || event.age_s <= seen.last_age_s {
            seen.last_age_s = event.age_s;
            seen.last_message = event.text.chars().take(MESSAGE_LENGTH).collect();
        }
        // The same number may come as fatal and as not fatal.
        if judged.verdict > seen.verdict {
            seen.verdict = judged.verdict;
            seen.action = judged.action;
        }
        seen.periods.insert(history.period(event, address));
        seen.has_recovered &= history.has_recovered(event, address);
    }
    for (trouble, seen) in &mut troubles {
        if let Some(verdict) = judge_number_of_times(trouble, seen) {
            seen.verdict = seen.verdict.max(verdict);
        }
        soften_recovered(trouble, seen);
    }
    troubles
}

/// An Xid that is only reported may be a reason by its number.
fn judge_number_of_times(trouble: &Trouble, seen: &Seen) -> Option<Verdict> {
    let is_high_rate = trouble.what.starts_with("Xid 92 ") && seen.verdict == Verdict::Warn;
    (is_high_rate && seen.count >= HIGH_RATES_MAXIMUM).then_some(Verdict::Fail)
}

/// What a later recovery cleared warns; what came back after several does not.
fn soften_recovered(trouble: &Trouble, seen: &mut Seen) {
    if seen.verdict != Verdict::Fail {
        return;
    }
    if seen.periods.len() > RECOVERIES_MAXIMUM {
        seen.action = RecommendedAction::Rma;
        seen.remedy = format!(
            "{} came back after {} recoveries: run the vendor's diagnostics and replace the hardware",
            trouble.what,
            seen.periods.len() - 1
        );
    } else if seen.has_recovered && seen.action != RecommendedAction::Rma {
        seen.verdict = Verdict::Warn;
        seen.action = RecommendedAction::Drain;
        "cleared by a later recovery; if it comes back, have the hardware inspected"
            .clone_into(&mut seen.remedy);
    }
}

/// What the rest of the log and the GPUs' present state contribute to the judgement of one message.
struct History<'a> {
    facts: &'a Facts,
    /// Time stamps of the driver's loads.
    loads: Vec<f64>,
    /// Time stamps of Xids 154 that report no recovery action, by address.
    recoveries: Vec<(&'a str, f64)>,
    /// The newest recovery actions of Xid 154, by address: several of the same stamp stand beside
    /// each other.
    requested: BTreeMap<&'a str, (Option<f64>, RequestedRecovery)>,
    /// Numbers of the Xids by address.
    numbers: BTreeSet<(&'a str, u32)>,
    /// Units that Xids 13 and 31 name: (number, address) to unit to processes.
    units: BTreeMap<(u32, &'a str), BTreeMap<String, BTreeSet<u32>>>,
    /// Addresses of GPUs that a message reports as lost.
    lost: BTreeSet<&'a str>,
}

impl<'a> History<'a> {
    fn of(events: &'a [TimedEvent], facts: &'a Facts) -> Self {
        let mut history = Self {
            facts,
            loads: Vec::new(),
            recoveries: Vec::new(),
            requested: BTreeMap::new(),
            numbers: BTreeSet::new(),
            units: BTreeMap::new(),
            lost: BTreeSet::new(),
        };
        for event in events {
            match &event.event {
                KernelEvent::DriverLoaded => history.loads.extend(event.at_s),
                KernelEvent::Xid(xid) => history.add_xid(xid, event),
                KernelEvent::FallenOffBus {
                    pci_address: Some(address),
                } => {
                    history.lost.insert(address);
                }
                _ => {}
            }
        }
        history
    }

    fn add_xid(&mut self, xid: &'a Xid, event: &TimedEvent) {
        let Some(address) = xid.pci_address.as_deref() else {
            return;
        };
        self.numbers.insert((address, xid.number));
        if xid.number == FALLEN_OFF_THE_BUS {
            self.lost.insert(address);
        }
        if let (Some(unit), Some(pid)) = (xid.unit(), xid.pid) {
            let units = self.units.entry((xid.number, address)).or_default();
            units.entry(unit).or_default().insert(pid);
        }
        if let Some(requested) = xid.requested_recovery() {
            if requested == RequestedRecovery::None
                && let Some(at_s) = event.at_s
            {
                self.recoveries.push((address, at_s));
            }
            let newest = self
                .requested
                .entry(address)
                .or_insert((event.at_s, requested));
            let is_newer = event.at_s > newest.0;
            let is_as_new_and_worse = event.at_s == newest.0 && rank(requested) > rank(newest.1);
            if is_newer || is_as_new_and_worse {
                *newest = (event.at_s, requested);
            }
        }
    }

    /// The one GPU that other messages report as lost, for a message that names none.
    fn only_lost(&self, event: &KernelEvent) -> Option<&'a str> {
        let names_none = matches!(
            event,
            KernelEvent::FallenOffBus { pci_address: None }
                | KernelEvent::ResetRequired { pci_address: None }
        );
        let mut lost = self.lost.iter();
        match (names_none, lost.next(), lost.next()) {
            (true, Some(address), None) => Some(address),
            _ => None,
        }
    }

    /// Which recovery of the GPU the event came after, as a count.
    fn period(&self, event: &TimedEvent, address: Option<&str>) -> usize {
        let marks = self.marks(address);
        marks
            .filter(|mark| event.at_s.is_some_and(|at_s| at_s >= *mark))
            .count()
    }

    /// Loads of the driver, and recoveries of this GPU.
    fn marks(&self, address: Option<&str>) -> impl Iterator<Item = f64> {
        let of_the_gpu = self
            .recoveries
            .iter()
            .filter(move |(of, _)| address.is_some_and(|it| it == *of))
            .map(|(_, at_s)| *at_s);
        self.loads.iter().copied().chain(of_the_gpu)
    }

    /// A recovery came after the event, and NVML shows that it helped.
    fn has_recovered(&self, event: &TimedEvent, address: Option<&str>) -> bool {
        let Some(at_s) = event.at_s else {
            return false;
        };
        let came_after = self.marks(address).any(|mark| mark > at_s);
        let gpus = &self.facts.gpus;
        let is_the_gpus = |gpu: &&GpuFacts| {
            address.is_some_and(|it| gpu.pci_address.value().is_some_and(|of| of == it))
        };
        let works = match gpus.iter().find(is_the_gpus) {
            Some(gpu) => gpu_works(gpu),
            // A GPU that is not listed has not recovered; a switch or a message without an address
            // is all GPUs' matter.
            None if address.is_some_and(|it| !self.is_switch(it)) => false,
            None => !gpus.is_empty() && gpus.iter().all(gpu_works),
        };
        came_after && works
    }

    /// An NVSwitch at this address that its driver holds.
    fn has_a_driver(&self, address: &str) -> bool {
        let devices = self.facts.host.pci_devices.value();
        devices.is_some_and(|it| {
            it.iter().any(|device| {
                device.address == address && device.is_nvswitch() && device.driver.is_some()
            })
        })
    }

    fn is_switch(&self, address: &str) -> bool {
        let devices = self.facts.host.pci_devices.value();
        devices.is_some_and(|it| {
            it.iter()
                .any(|device| device.address == address && device.is_nvswitch())
        })
    }

    /// Different processes that an Xid stopped in the only unit that is named, of this GPU alone.
    fn processes_of_one_unit(&self, number: u32, address: &str) -> usize {
        let of_this = self.units.get(&(number, address));
        let of_others = self
            .units
            .iter()
            .filter(|((of_number, of), _)| *of_number == number && *of != address);
        let Some((unit, processes)) = of_this
            .filter(|it| it.len() == 1)
            .and_then(BTreeMap::first_key_value)
        else {
            return 0;
        };
        // An application that names the same unit on several GPUs is at fault itself.
        if of_others
            .into_iter()
            .any(|(_, units)| units.contains_key(unit))
        {
            return 0;
        }
        processes.len()
    }
}

fn rank(requested: RequestedRecovery) -> u8 {
    match requested {
        RequestedRecovery::None => 0,
        RequestedRecovery::Unknown => 1,
        RequestedRecovery::Drain => 2,
        RequestedRecovery::Reset => 3,
        RequestedRecovery::Reboot => 4,
    }
}

/// NVML reads it, and nothing waits for a reset.
fn gpu_works(gpu: &GpuFacts) -> bool {
    let no_action = matches!(
        gpu.recovery_action,
        Reading::Value(RecoveryAction::None) | Reading::NotSupported
    );
    let pending = gpu.row_remapping.value().is_some_and(|it| it.pending);
    gpu.uuid.value().is_some()
        && gpu.lost.is_none()
        && gpu.calls_hung.is_empty()
        && no_action
        && !pending
}

/// The kernel log is the host's, and this container has other GPUs: every GPU node that it has is
/// listed.
fn is_not_in_this_container(address: &str, facts: &Facts) -> bool {
    let is_listed = facts
        .gpus
        .iter()
        .any(|gpu| gpu.pci_address.value().is_some_and(|it| it == address));
    let all_are_known = facts.gpus.iter().all(|it| it.pci_address.value().is_some());
    let is_gpu_node = |path: &str| {
        path.strip_prefix("/dev/nvidia")
            .is_some_and(|it| !it.is_empty() && it.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let nodes = facts.host.device_nodes.value().map(|nodes| {
        let of_gpus = nodes.iter().filter(|it| is_gpu_node(&it.path));
        of_gpus.count()
    });
    let all_are_listed = nodes.is_some_and(|nodes| nodes <= facts.gpus.len());
    let is_switch = facts.host.pci_devices.value().is_some_and(|devices| {
        devices
            .iter()
            .any(|it| it.address == address && it.is_nvswitch())
    });
    queries::in_container(facts)
        && !facts.gpus.is_empty()
        && all_are_known
        && all_are_listed
        && !is_listed
        && !is_switch
}

/// What an event is, how it is judged, and what to do. Verdict `Pass` is for what is only reported.
struct Judged {
    what: String,
    verdict: Verdict,
    remedy: String,
    kind: CauseKind,
    action: RecommendedAction,
}

fn judge_event(event: &TimedEvent, history: &History<'_>, policy: &XidPolicy) -> Option<Judged> {
    match &event.event {
        KernelEvent::Xid(xid) => judge_xid(xid, history, policy),
        KernelEvent::FallenOffBus { pci_address } => judge_xid(
            &Xid {
                pci_address: pci_address.clone(),
                number: FALLEN_OFF_THE_BUS,
                ..Xid::default()
            },
            history,
            policy,
        ),
        KernelEvent::Sxid(sxid) => Some(judge_sxid(sxid)),
        KernelEvent::ResetRequired { .. } => Some(Judged {
            what: "the driver refuses work until a reset (reset required)".to_owned(),
            verdict: Verdict::Fail,
            remedy: "drain the GPU and reset it: nvidia-smi --gpu-reset".to_owned(),
            kind: CauseKind::RecoveryRequested,
            action: RecommendedAction::Reset,
        }),
        KernelEvent::RebootRequired => Some(Judged {
            what: "the driver refuses work until a reboot (requiring os reboot to recover)".to_owned(),
            verdict: Verdict::Fail,
            remedy: "drain and reboot the node: CUDA fails on all of its GPUs".to_owned(),
            kind: CauseKind::Driver,
            action: RecommendedAction::Reboot,
        }),
        KernelEvent::HungTask { task } => Some(judge_hung_task(task, event)),
        KernelEvent::Unparsed { .. } => Some(Judged {
            what: "an Xid message that could not be read".to_owned(),
            verdict: Verdict::Warn,
            remedy:
                "read the message, and find its number in the Xid catalogue: https://docs.nvidia.com/deploy/xid-errors/"
                    .to_owned(),
            kind: CauseKind::GpuHardware,
            action: RecommendedAction::Drain,
        }),
        KernelEvent::KernelCrash => Some(Judged {
            what: "the kernel crashed in the driver".to_owned(),
            verdict: Verdict::Fail,
            remedy: "drain and reboot the node: the driver keeps the locks of the task that crashed"
                .to_owned(),
            kind: CauseKind::Driver,
            action: RecommendedAction::Reboot,
        }),
        KernelEvent::Lockup { task } => Some(judge_lockup(task.as_deref(), event)),
        KernelEvent::GpuInitializationFailed { pci_address } => {
            Some(judge_initialization(pci_address.as_deref(), event, history))
        }
        KernelEvent::Aer { .. }
        | KernelEvent::SlotLinkDown { .. }
        | KernelEvent::SlotLinkUp { .. }
        | KernelEvent::DriverLoaded
        | KernelEvent::GpuEnumerated { .. }
        | KernelEvent::ApiMismatch
        | KernelEvent::NouveauBound { .. } => None,
    }
}

/// A processor that does not leave the driver's functions.
fn judge_lockup(task: Option<&str>, event: &TimedEvent) -> Judged {
    let is_the_drivers = task.is_some_and(kernel_log_events::is_the_drivers_task);
    Judged {
        what: match task {
            Some(task) => format!("task {task} locked a processor up in the driver"),
            None => "a processor stalled in the driver".to_owned(),
        },
        verdict: if is_the_drivers || event.count > 1 {
            Verdict::Fail
        } else {
            Verdict::Warn
        },
        remedy: "read the call trace in the kernel log; drain and reboot the node".to_owned(),
        kind: CauseKind::Driver,
        action: RecommendedAction::Reboot,
    }
}

/// A GPU that the driver could not start and that works now is at fault less than one that it never
/// started.
fn judge_initialization(
    address: Option<&str>,
    event: &TimedEvent,
    history: &History<'_>,
) -> Judged {
    let is_the_gpus = |gpu: &&GpuFacts| {
        address.is_some_and(|it| gpu.pci_address.value().is_some_and(|of| of == it))
    };
    let works = match history.facts.gpus.iter().find(is_the_gpus) {
        Some(gpu) => gpu_works(gpu),
        // A switch that has its driver works; a message without an address names no GPU.
        None => address.is_none_or(|it| history.has_a_driver(it)),
    };
    let verdict = match (works, history.has_recovered(event, address)) {
        (true, true) => Verdict::Pass,
        (true, false) => Verdict::Warn,
        (false, _) => Verdict::Fail,
    };
    Judged {
        what: "the driver could not initialize the device".to_owned(),
        verdict,
        remedy: "read the messages before it in the kernel log; reset the GPU or reboot, and have the hardware inspected \
                 if it comes back"
            .to_owned(),
        kind: CauseKind::GpuFirmware,
        action: RecommendedAction::Reset,
    }
}

fn judge_hung_task(task: &str, event: &TimedEvent) -> Judged {
    let is_the_drivers = kernel_log_events::is_the_drivers_task(task);
    // The kernel reports a task again at every interval in which it still waits.
    let reported_again = event.count > 1 || event.text.contains("blocked for more than 24");
    Judged {
        what: format!("task {task} hung in the driver"),
        verdict: if is_the_drivers || reported_again {
            Verdict::Fail
        } else {
            Verdict::Warn
        },
        remedy: "read the call trace in the kernel log; drain and reboot the node".to_owned(),
        kind: CauseKind::GpuFirmware,
        action: RecommendedAction::Reboot,
    }
}

/// The class's verdict, and what the text or the other messages of the GPU add to it.
fn judge_xid(xid: &Xid, history: &History<'_>, policy: &XidPolicy) -> Option<Judged> {
    let mut judged = judge_number(xid, policy)?;
    if policy.severity(xid.number).is_some() {
        return Some(judged);
    }
    let address = xid.pci_address.as_deref().unwrap_or_default();
    if let Some(requested) = xid.requested_recovery() {
        // Only what was requested last is still requested.
        let newest = history.requested.get(address).map(|it| it.1);
        if newest == Some(requested) {
            judge_request(requested, &mut judged);
        }
    }
    if let Some(cause) = xid.cause()
        && !history.numbers.contains(&(address, cause))
    {
        let by = Xid {
            number: cause,
            pci_address: xid.pci_address.clone(),
            ..Xid::default()
        };
        let by = judge_number(&by, policy)?;
        judged = Judged {
            what: format!("Xid 45 caused by {}", by.what),
            ..by
        };
    }
    if xid.requests_reset() {
        judged.verdict = Verdict::Fail;
        judged.action = RecommendedAction::Reset;
        "drain the GPU and reset it, which the message requests".clone_into(&mut judged.remedy);
    }
    let processes = history.processes_of_one_unit(xid.number, address);
    if let Some(unit) = xid
        .unit()
        .filter(|_| processes >= PROCESSES_OF_ONE_UNIT_WARN)
    {
        judged.what = format!(
            "{} in the same {unit} for {processes} different processes",
            judged.what
        );
        judged.verdict = if processes >= PROCESSES_OF_ONE_UNIT_FAIL {
            Verdict::Fail
        } else {
            Verdict::Warn
        };
        judged.action = RecommendedAction::Rma;
        "run the vendor's diagnostics: applications do not fail in one place of one GPU"
            .clone_into(&mut judged.remedy);
    }
    Some(judged)
}

fn judge_request(requested: RequestedRecovery, judged: &mut Judged) {
    let (verdict, action, what) = match requested {
        RequestedRecovery::None => (Verdict::Pass, RecommendedAction::Wait, "no action"),
        RequestedRecovery::Reset => (Verdict::Fail, RecommendedAction::Reset, "a reset"),
        RequestedRecovery::Reboot => (Verdict::Fail, RecommendedAction::Reboot, "a reboot"),
        RequestedRecovery::Drain => (Verdict::Fail, RecommendedAction::Drain, "a drain"),
        RequestedRecovery::Unknown => (
            Verdict::Warn,
            RecommendedAction::Drain,
            "an action without a known name",
        ),
    };
    judged.verdict = verdict;
    judged.action = action;
    judged.what = format!("{}: the driver requests {what}", judged.what);
    action.sentence().clone_into(&mut judged.remedy);
}

/// By the number alone.
fn judge_number(xid: &Xid, policy: &XidPolicy) -> Option<Judged> {
    let row = reference::xid(xid.number);
    let default = match row.map(|row| row.class) {
        // What the catalogue lets ignore, and what others fail a node for.
        Some(XidClass::Informational)
            if matches!(xid.number, HIGH_SINGLE_BIT_ERROR_RATE | RETIREMENT_FAILURE) =>
        {
            Verdict::Warn
        }
        Some(XidClass::Application | XidClass::Informational) => Verdict::Pass,
        Some(XidClass::Reset | XidClass::Reboot | XidClass::Hardware | XidClass::Software) => {
            Verdict::Fail
        }
        Some(XidClass::NvlinkBySeverity) if xid.nvlink.as_ref().is_some_and(|it| it.fatal) => {
            Verdict::Fail
        }
        Some(XidClass::Contained | XidClass::NvlinkBySeverity | XidClass::Unknown) | None => {
            Verdict::Warn
        }
    };
    let verdict = match policy.severity(xid.number) {
        Some(XidSeverity::Fail) => Verdict::Fail,
        Some(XidSeverity::Warn) => Verdict::Warn,
        Some(XidSeverity::Ignore) => return None,
        None => default,
    };
    let name = row.map_or("no public description", |row| row.name.as_str());
    let remedy = row.map_or(
        "send an nvidia-bug-report to NVIDIA: this number is not documented",
        |row| row.remedy.as_str(),
    );
    Some(Judged {
        what: format!("Xid {} ({name})", xid.number),
        verdict,
        remedy: remedy.to_owned(),
        kind: reference::cause_of_xid(xid.number),
        action: row.map_or(RecommendedAction::Drain, reference::Xid::recommended_action),
    })
}

fn judge_sxid(sxid: &Sxid) -> Judged {
    let (word, verdict) = match sxid.fatal {
        Some(true) => ("fatal", Verdict::Fail),
        Some(false) => ("not fatal", Verdict::Warn),
        None => ("of unknown severity", Verdict::Warn),
    };
    Judged {
        what: format!("SXid {} ({word})", sxid.number),
        verdict,
        remedy:
            "read /var/log/fabricmanager.log; after a fatal SXid reset all GPUs and NVSwitches of the board, or reboot"
                .to_owned(),
        kind: CauseKind::Nvlink,
        action: RecommendedAction::Reset,
    }
}

/// The GPU by its UUID where NVML knows the address.
fn place(pci_address: Option<&str>, facts: &Facts) -> String {
    let Some(address) = pci_address else {
        return "on a GPU that the message does not name".to_owned();
    };
    let gpu = facts
        .gpus
        .iter()
        .find(|gpu| gpu.pci_address.value().is_some_and(|it| it == address));
    match gpu {
        Some(gpu) => format!("on {}", queries::name_of(gpu)),
        None => format!("on {address}"),
    }
}

fn describe(trouble: &Trouble, seen: &Seen) -> String {
    let count = match seen.count {
        1 => String::new(),
        count => format!(", {count} times"),
    };
    let age = seen
        .last_age_s
        .map(|age_s| format!(", {} ago", duration(age_s)))
        .unwrap_or_default();
    let recovered = match seen.verdict {
        Verdict::Warn if seen.has_recovered => ", followed by a recovery",
        _ => "",
    };
    format!("{} {}{count}{age}{recovered}", trouble.what, trouble.place)
}

/// Says it when the log does not reach as far back as the judgement claims.
fn judge_coverage(log: &KernelLog, window_s: Option<f64>, tally: &mut Tally) {
    if log.oldest_record_age_s.is_none() && log.records.is_empty() {
        tally.error("the kernel log is empty, so nothing was judged");
        return;
    }
    if log.records_dropped > 0 {
        tally.error(format!(
            "{} about GPUs in the kernel log were not kept, so they were not judged",
            queries::counted(
                usize::try_from(log.records_dropped).unwrap_or(usize::MAX),
                "message"
            )
        ));
    }
    if log.since_boot {
        return;
    }
    let reach = log
        .oldest_record_age_s
        .map_or("an unknown time".to_owned(), duration);
    let covered_s = log.oldest_record_age_s.unwrap_or(0.0);
    match window_s {
        Some(window_s) if covered_s >= window_s => {}
        Some(window_s) => tally.error(format!(
            "the kernel log reaches back only {reach}, the profile requires {}",
            duration(window_s)
        )),
        None if covered_s >= LOOK_BACK_MINIMUM_S => tally.warn(format!(
            "no bad Xid in the kernel log, but it reaches back only {reach} and not to boot"
        )),
        None => tally.error(format!(
            "the kernel log reaches back only {reach} and not to boot, too little to judge"
        )),
    }
}

fn pass_summary(log: &KernelLog, window_s: Option<f64>, told: &[String]) -> String {
    let span = match window_s {
        Some(window_s)
            if !log.since_boot || log.oldest_record_age_s.is_some_and(|it| it > window_s) =>
        {
            format!("in the last {}", duration(window_s))
        }
        _ => "since boot".to_owned(),
    };
    if told.is_empty() {
        return format!("no Xid {span}");
    }
    format!(
        "no Xid that blames a GPU {span}; reported only: {}",
        told.join("; ")
    )
}

/// `45 s`, `12 min`, `3.5 h`, `4.2 days`.
fn duration(seconds: f64) -> String {
    if seconds < 120.0 {
        format!("{seconds:.0} s")
    } else if seconds < 2.0 * SECONDS_PER_HOUR {
        format!("{:.0} min", seconds / 60.0)
    } else if seconds < 48.0 * SECONDS_PER_HOUR {
        format!("{:.1} h", seconds / SECONDS_PER_HOUR)
    } else {
        format!("{:.1} days", seconds / (24.0 * SECONDS_PER_HOUR))
    }
}

#[cfg(test)]
mod tests {
    use crate::facts::{Facts, KernelLog, KernelLogRecord, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::reference::{XidClass, xid};
    use crate::test_machine::{healthy_node, judge_host_check};

    const HOUR_S: f64 = 3_600.0;

    fn judge(facts: &Facts, profile: &str) -> Finding {
        judge_host_check(&super::CHECK, facts, profile)
    }

    fn log(facts: &mut Facts) -> &mut KernelLog {
        match &mut facts.host.kernel_log {
            Reading::Value(log) => log,
            _ => unreachable!("the healthy machine has a log"),
        }
    }

    /// The healthy machine, whose kernel said this ten minutes ago.
    fn node_with(messages: &[&str]) -> Facts {
        let mut facts = healthy_node();
        for message in messages {
            log(&mut facts).records.push(KernelLogRecord {
                repeats: 0,
                age_s: Some(600.0),
                at_s: None,
                text: (*message).to_owned(),
            });
        }
        facts
    }

    /// A message with this Xid of the third GPU, in the form of the driver.
    fn xid_message(number: u32) -> String {
        let address = healthy_node().gpus[2]
            .pci_address
            .value()
            .cloned()
            .unwrap_or_default();
        let place = address.trim_end_matches(".0");
        format!("NVRM: Xid (PCI:{place}): {number}, pid=4242, name=python3, Ch 00000008")
    }

    fn judge_number(number: u32, profile: &str) -> Finding {
        judge(&node_with(&[&xid_message(number)]), profile)
    }

    #[test]
    fn passes_without_any() {
        let finding = judge(&healthy_node(), "{}");
        assert_eq!(finding.verdict, Verdict::Pass);
        assert_eq!(finding.summary, "no Xid since boot");
    }

    #[test]
    fn warns_of_an_xid_that_cannot_be_read_with_its_text() {
        let text = "NVRM: Xid (PCI:0000:12:00): seventy-nine";
        let finding = judge(&node_with(&[text]), "{}");
        assert_eq!(finding.verdict, Verdict::Warn);
        assert!(finding.observed.is_some_and(|it| it.contains(text)));
    }

    #[test]
    fn judges_by_class() {
        for (number, verdict) in [
            (79, Verdict::Fail),
            (48, Verdict::Fail),
            (95, Verdict::Fail),
            (119, Verdict::Fail),
            (74, Verdict::Fail),
            (94, Verdict::Warn),
            (13, Verdict::Pass),
            (31, Verdict::Pass),
            (43, Verdict::Pass),
            (45, Verdict::Pass),
            (63, Verdict::Pass),
            (154, Verdict::Pass),
            (92, Verdict::Warn),
            (157, Verdict::Warn),
            (9_999, Verdict::Warn),
        ] {
            let finding = judge_number(number, "{}");
            assert_eq!(
                finding.verdict, verdict,
                "Xid {number}: {}",
                finding.summary
            );
        }
    }

    #[test]
    fn every_application_level_xid_of_the_table_blames_no_gpu() {
        let mut seen = 0;
        for number in 0..200 {
            if xid(number).is_some_and(|row| row.class == XidClass::Application) {
                assert_eq!(
                    judge_number(number, "{}").verdict,
                    Verdict::Pass,
                    "{number}"
                );
                seen += 1;
            }
        }
        assert!(seen > 20, "{seen} application-level Xids in the table");
    }

    #[test]
    fn names_number_gpu_and_what_to_do() {
        let finding = judge_number(79, "{}");
        let uuid = healthy_node().gpus[2]
            .uuid
            .value()
            .cloned()
            .unwrap_or_default();
        assert!(
            finding.summary.starts_with("Xid 79 (") && finding.summary.contains(&uuid),
            "{}",
            finding.summary
        );
        assert!(
            finding.summary.ends_with("10 min ago"),
            "{}",
            finding.summary
        );
        let remedy = xid(79).map(|row| row.remedy.clone());
        assert_eq!(finding.remedy, remedy);
    }

    #[test]
    fn both_line_forms_and_the_bus_without_a_number() {
        for message in [
            "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            "NVRM: Xid (0000:03:00): 79, GPU has fallen off the bus.",
            "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
        ] {
            let finding = judge(&node_with(&[message]), "{}");
            assert_eq!(finding.verdict, Verdict::Fail, "{message}");
            assert!(finding.summary.starts_with("Xid 79"), "{}", finding.summary);
        }
    }

    #[test]
    fn repeated_messages_are_one_trouble() {
        let message = xid_message(79);
        let finding = judge(&node_with(&[&message, &message, &message]), "{}");
        assert!(
            finding.summary.contains(", 3 times, "),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn nvlink_xids_and_sxids_say_themselves_how_bad_they_are() {
        for (message, verdict) in [
            (
                "NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 04 (0x004000c6 0x0)",
                Verdict::Fail,
            ),
            (
                "NVRM: Xid (PCI:0018:01:00): 145, RLW_REMAP Nonfatal XC1 i1 Link -1 (0x00000004 0x0)",
                Verdict::Warn,
            ),
            (
                "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
                Verdict::Fail,
            ),
            (
                "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress",
                Verdict::Warn,
            ),
            (
                "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Data {0x1}",
                Verdict::Warn,
            ),
        ] {
            assert_eq!(
                judge(&node_with(&[message]), "{}").verdict,
                verdict,
                "{message}"
            );
        }
    }

    #[test]
    fn the_profile_moves_numbers() {
        assert_eq!(
            judge_number(79, "policy: {xid: {ignore: [79]}}").verdict,
            Verdict::Pass
        );
        assert_eq!(
            judge_number(79, "policy: {xid: {warn: [79]}}").verdict,
            Verdict::Warn
        );
        assert_eq!(
            judge_number(13, "policy: {xid: {fail: [13]}}").verdict,
            Verdict::Fail
        );
    }

    #[test]
    fn the_window_is_counted_back_from_collection() {
        // The message is ten minutes old.
        for (hours, verdict) in [("0.16", Verdict::Pass), ("0.17", Verdict::Fail)] {
            let profile = format!("policy: {{xid: {{window_hours: {hours}}}}}");
            assert_eq!(judge_number(79, &profile).verdict, verdict, "{hours}");
        }
        let mut facts = node_with(&[&xid_message(79)]);
        for record in &mut log(&mut facts).records {
            record.age_s = None;
        }
        let finding = judge(&facts, "policy: {xid: {window_hours: 0.16}}");
        assert_eq!(finding.verdict, Verdict::Fail, "its age is not known");
    }

    #[test]
    fn a_log_that_forgot_its_beginning_is_said() {
        let no_window = "{}";
        let window = "policy: {xid: {window_hours: 4}}";
        for (reach_s, profile, verdict) in [
            (Some(1.9 * HOUR_S), no_window, Verdict::Error),
            (Some(2.0 * HOUR_S), no_window, Verdict::Warn),
            (None, no_window, Verdict::Error),
            (Some(3.9 * HOUR_S), window, Verdict::Error),
            (Some(4.0 * HOUR_S), window, Verdict::Pass),
        ] {
            let mut facts = healthy_node();
            log(&mut facts).since_boot = false;
            log(&mut facts).oldest_record_age_s = reach_s;
            let finding = judge(&facts, profile);
            assert_eq!(finding.verdict, verdict, "{}", finding.summary);
        }
        let mut facts = node_with(&[&xid_message(79)]);
        log(&mut facts).since_boot = false;
        assert_eq!(judge(&facts, no_window).verdict, Verdict::Fail);
    }

    #[test]
    fn an_empty_log_and_dropped_messages_are_no_pass() {
        let mut facts = healthy_node();
        *log(&mut facts) = KernelLog {
            since_boot: true,
            ..KernelLog::default()
        };
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
        let mut facts = healthy_node();
        log(&mut facts).records_dropped = 1;
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
    }

    /// The healthy machine with these messages, so many seconds after boot; it has been up for a
    /// day.
    fn node_at(messages: &[(f64, &str)]) -> Facts {
        let mut facts = healthy_node();
        for (at_s, message) in messages {
            log(&mut facts).records.push(KernelLogRecord {
                age_s: Some(86_400.0 - at_s),
                at_s: Some(*at_s),
                repeats: 0,
                text: (*message).to_owned(),
            });
        }
        facts
    }

    #[test]
    fn messages_that_carry_their_own_verdict_are_read() {
        for (message, verdict) in [
            (
                "NVRM: Xid (PCI:0000:12:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
                Verdict::Fail,
            ),
            (
                "NVRM: Xid (PCI:0000:12:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (PF FLR)",
                Verdict::Fail,
            ),
            (
                "NVRM: Xid (PCI:0000:12:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)",
                Verdict::Fail,
            ),
            (
                "NVRM: Xid (PCI:0000:12:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)",
                Verdict::Fail,
            ),
            (
                "NVRM: Xid (PCI:0000:12:00): 154, GPU recovery action changed from 0x0 (None) to 0x9 (Dance)",
                Verdict::Warn,
            ),
            (
                "NVRM: Xid (PCI:0000:12:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
                Verdict::Pass,
            ),
            (
                "NVRM: Xid (PCI:0000:12:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6 0x0)",
                Verdict::Fail,
            ),
            (
                "NVRM: Xid (PCI:0000:12:00): 149, NETIR_LINK_EVT, Fatal, XC0 i0 Link 09 (0x025525c6 0x0)",
                Verdict::Fail,
            ),
            (
                "NVRM: Xid (PCI:0000:12:00): 149, NETIR_LINK_EVT [FATAL]: Link 09",
                Verdict::Fail,
            ),
            (
                "NVRM: Xid (PCI:0000:12:00): 149, NETIR_LINK_EVT Non-fatal: XC0 i0 Link 09 (0x025525c6 0x0)",
                Verdict::Warn,
            ),
            (
                "NVRM: Xid (PCI:0000:12:00): 45, pid=7, name=python3, Ch 00000008 caused by previous Xid 119",
                Verdict::Fail,
            ),
            (
                "NVRM: Xid (PCI:0000:12:00): 45, pid=7, name=python3, Ch 00000008 caused by previous Xid 31",
                Verdict::Pass,
            ),
            (
                "NVRM: Xid (PCI:0000:12:00): 94, pid=7, name=python3, Contained: SM (0x1). RST: No, D-RST: No",
                Verdict::Warn,
            ),
            (
                "NVRM: Xid (PCI:0000:12:00): 94, pid=7, name=python3, Contained: SM (0x1). RST: Yes, D-RST: No",
                Verdict::Fail,
            ),
            (
                "NVRM: nvGpuOpsReportFatalError: uvm encountered global fatal error 0x60, requiring os reboot to recover.",
                Verdict::Fail,
            ),
            (
                "NVRM: GPU0 nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED] (0x0000006C)",
                Verdict::Fail,
            ),
            (
                "NVRM: nvAssertOkFailedNoLog: Assertion failed: GPU lost from the bus [NV_ERR_GPU_IS_LOST] (0x0000000F)",
                Verdict::Fail,
            ),
            (
                "NVRM: GPU at 0000:12:00.0 has fallen off the bus",
                Verdict::Fail,
            ),
            ("NVRM: GPU 0000:12:00.0: GPU is lost.", Verdict::Fail),
            ("NVRM: GPU 0000:12:00.0: device disconnected", Verdict::Fail),
            (
                "INFO: task nvidia-smi:4242 blocked for more than 122 seconds.",
                Verdict::Fail,
            ),
            (
                "INFO: task jbd2/nvme0n1:300 blocked for more than 122 seconds.",
                Verdict::Pass,
            ),
        ] {
            let finding = judge(&node_at(&[(80_000.0, message)]), "{}");
            assert_eq!(finding.verdict, verdict, "{message}: {}", finding.summary);
        }
    }

    #[test]
    fn a_task_that_waits_in_the_driver_is_known_by_its_trace() {
        let hung = "INFO: task python3:4242 blocked for more than 122 seconds.";
        let frame = " os_acquire_rwlock_write+0x35/0x40 [nvidia]";
        let finding = judge(&node_at(&[(80_000.0, hung), (80_000.01, frame)]), "{}");
        assert_eq!(finding.verdict, Verdict::Warn, "{}", finding.summary);
        let again = "INFO: task python3:4242 blocked for more than 245 seconds.";
        let finding = judge(&node_at(&[(80_000.0, again), (80_000.01, frame)]), "{}");
        assert_eq!(finding.verdict, Verdict::Fail, "{}", finding.summary);
        // A trace of another task, long after.
        let finding = judge(&node_at(&[(80_000.0, hung), (80_100.0, frame)]), "{}");
        assert_eq!(finding.verdict, Verdict::Pass, "{}", finding.summary);
    }

    #[test]
    fn a_gpu_that_did_not_start_and_works_now_warns() {
        let mut facts = node_with(&[]);
        let address = facts.gpus[1]
            .pci_address
            .value()
            .cloned()
            .expect("an address");
        let text = format!("NVRM: GPU {address}: RmInitAdapter failed! (0x62:0x40:2168)");
        log(&mut facts).records = node_with(&[&text])
            .host
            .kernel_log
            .value()
            .expect("a log")
            .records
            .clone();
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Warn);
        facts.gpus.remove(1);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Fail);
    }

    #[test]
    fn a_crash_or_lockup_of_the_driver_wants_a_reboot() {
        let verdict = |messages: &[&str]| judge(&node_with(messages), "{}").verdict;
        let trace = "RIP: 0010:uvm_va_space_destroy+0x1/0x2 [nvidia_uvm]";
        assert_eq!(
            verdict(&[
                "BUG: unable to handle page fault for address: ffffa0b1c2d3e4f0",
                trace
            ]),
            Verdict::Fail
        );
        assert_eq!(
            verdict(&[
                "rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:",
                trace
            ]),
            Verdict::Warn
        );
        assert_eq!(
            verdict(&["watchdog: BUG: soft lockup - CPU#5 stuck for 26s! [UVM GPU1 BH:1234]"]),
            Verdict::Fail
        );
    }

    #[test]
    fn the_lines_of_an_sxid_are_one_event() {
        let lines = [
            (
                80_000.0,
                "nvidia-nvswitch0: SXid (PCI:0000:80:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
            ),
            (
                80_000.0,
                "nvidia-nvswitch0: SXid (PCI:0000:80:00.0): 20034, Severity 1 Engine instance 30 Sub-engine instance 00",
            ),
            (
                80_000.0,
                "nvidia-nvswitch0: SXid (PCI:0000:80:00.0): 20034, Data {0x50610002, 0x10100030}",
            ),
        ];
        let finding = judge(&node_at(&lines), "{}");
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(!finding.summary.contains("times"), "{}", finding.summary);
        assert_eq!(finding.evidence.len(), 1);
        // The severity stands in the second line, too.
        let finding = judge(&node_at(&lines[1..]), "{}");
        assert_eq!(finding.verdict, Verdict::Fail, "{}", finding.summary);
    }

    const LOADED: &str =
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build";
    const RESET_NEEDED: &str =
        "NVRM: Xid (PCI:0000:12:00): 95, pid=7, name=python3, Uncontained memory error";

    #[test]
    fn a_later_load_of_the_driver_clears_what_a_working_gpu_reported() {
        let cleared = [(1_000.0, RESET_NEEDED), (2_000.0, LOADED)];
        let finding = judge(&node_at(&cleared), "{}");
        assert_eq!(finding.verdict, Verdict::Warn, "{}", finding.summary);
        assert!(
            finding.summary.ends_with("followed by a recovery"),
            "{}",
            finding.summary
        );
        // Before it, at the same time, or without a stamp: nothing is cleared.
        for messages in [
            [(2_000.0, RESET_NEEDED), (1_000.0, LOADED)],
            [(2_000.0, LOADED), (2_000.0, RESET_NEEDED)],
        ] {
            assert_eq!(judge(&node_at(&messages), "{}").verdict, Verdict::Fail);
        }
        let mut facts = node_at(&cleared);
        facts.gpus[2].recovery_action = Reading::Value(crate::facts::RecoveryAction::GpuReset);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Fail);
        facts.gpus[2].recovery_action = Reading::NotRead("no answer".to_owned());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Fail);
    }

    #[test]
    fn an_xid_154_without_an_action_clears_that_gpu_alone() {
        let none = "NVRM: Xid (PCI:0000:12:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)";
        let asked = "NVRM: Xid (PCI:0000:12:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)";
        let messages = [(1_000.0, RESET_NEEDED), (1_000.1, asked), (2_000.0, none)];
        let finding = judge(&node_at(&messages), "{}");
        assert_eq!(finding.verdict, Verdict::Warn, "{}", finding.summary);
        let other = none.replace("12:00", "13:00");
        let messages = [(1_000.0, RESET_NEEDED), (2_000.0, other.as_str())];
        assert_eq!(judge(&node_at(&messages), "{}").verdict, Verdict::Fail);
    }

    #[test]
    fn what_comes_back_after_every_recovery_is_hardware() {
        let messages = [
            (1_000.0, RESET_NEEDED),
            (2_000.0, LOADED),
            (3_000.0, RESET_NEEDED),
            (4_000.0, LOADED),
            (5_000.0, RESET_NEEDED),
            (6_000.0, LOADED),
        ];
        let finding = judge(&node_at(&messages), "{}");
        assert_eq!(finding.verdict, Verdict::Fail, "{}", finding.summary);
        assert_eq!(
            finding.evidence[0].recommended_action,
            crate::diagnosis::RecommendedAction::Rma
        );
        assert_eq!(judge(&node_at(&messages[..4]), "{}").verdict, Verdict::Warn);
    }

    fn exception(at: usize, address: &str, sm: u32) -> String {
        format!(
            "NVRM: Xid (PCI:0000:{address}:00): 13, pid={}, name=python3, Graphics SM Warp Exception on (GPC 3, TPC 1, SM {sm}): Out Of Range Address",
            4000 + at
        )
    }

    #[test]
    fn one_multiprocessor_that_stops_many_jobs_is_hardware() {
        let of = |jobs: usize, change: &dyn Fn(usize) -> String| {
            let texts: Vec<String> = (0..jobs).map(change).collect();
            let stamped: Vec<(f64, &str)> =
                texts.iter().map(|it| (80_000.0, it.as_str())).collect();
            judge(&node_at(&stamped), "{}").verdict
        };
        assert_eq!(of(2, &|at| exception(at, "12", 0)), Verdict::Pass);
        assert_eq!(of(3, &|at| exception(at, "12", 0)), Verdict::Warn);
        assert_eq!(of(5, &|at| exception(at, "12", 0)), Verdict::Fail);
        // An application at fault names many multiprocessors, is one process, or fails on several
        // GPUs.
        let sm = |at: usize| u32::from(at > 2);
        assert_eq!(of(5, &|at| exception(at, "12", sm(at))), Verdict::Pass);
        assert_eq!(of(5, &|_| exception(0, "12", 0)), Verdict::Pass);
        let gpu = |at: usize| if at == 4 { "13" } else { "12" };
        assert_eq!(of(6, &|at| exception(at, gpu(at), 0)), Verdict::Pass);
    }

    #[test]
    fn a_high_rate_of_corrected_errors_fails_when_it_is_reported_again() {
        let rate = "NVRM: Xid (PCI:0000:12:00): 92, pid=0, High single-bit ECC error rate";
        assert_eq!(judge(&node_with(&[rate]), "{}").verdict, Verdict::Warn);
        assert_eq!(judge(&node_with(&[rate; 3]), "{}").verdict, Verdict::Fail);
    }

    #[test]
    fn a_container_is_not_failed_for_a_gpu_that_it_does_not_have() {
        let mut facts = node_with(&[&xid_message(79)]);
        facts.host.in_container = Reading::Value(true);
        facts.gpus.truncate(1);
        if let Reading::Value(nodes) = &mut facts.host.device_nodes {
            nodes.retain(|it| it.path == "/dev/nvidia0" || it.path == "/dev/nvidiactl");
        }
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Pass, "{}", finding.summary);
        // It has a node of a GPU that NVML does not list: that may be the one.
        if let Reading::Value(nodes) = &mut facts.host.device_nodes {
            nodes[0].path = "/dev/nvidia2".to_owned();
            let first = nodes[0].clone();
            nodes.push(crate::facts::DeviceNode {
                path: "/dev/nvidia0".to_owned(),
                ..first
            });
        }
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Fail);
    }

    #[test]
    fn the_order_of_messages_with_equal_stamps_does_not_matter() {
        let messages = [
            (5_000.0, RESET_NEEDED),
            (5_000.0, LOADED),
            (
                5_000.0,
                "NVRM: Xid (PCI:0000:12:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
            ),
            (
                5_000.0,
                "NVRM: Xid (PCI:0000:12:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
            ),
        ];
        for turn in 0..messages.len() {
            let mut turned = messages;
            turned.rotate_left(turn);
            assert_eq!(
                judge(&node_at(&turned), "{}").verdict,
                Verdict::Fail,
                "{turn}"
            );
        }
    }

    #[test]
    fn errs_with_a_remedy_when_it_was_not_read() {
        let mut facts = healthy_node();
        facts.host.kernel_log = Reading::NotRead("permission denied opening /dev/kmsg".to_owned());
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Error);
        assert!(finding.remedy.is_some());
    }
}
