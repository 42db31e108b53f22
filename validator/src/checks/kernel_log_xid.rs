//! The kernel log tells of no Xid or `SXid` that takes a GPU or NVSwitch out of service.
//!
//! ## Why
//! Xids are the driver's own words on what went wrong: a GPU that fell off the bus, memory that could not be contained,
//! firmware that stopped. NVML forgets them; the kernel log keeps them.
//!
//! ## How it is judged
//! Every message since boot, or of the last `policy.xid.window_hours` of the profile, by the class of its number in the
//! reference table: those that need a reset, a reboot, an inspection or new software fail; a contained memory error and
//! numbers without a public meaning warn; messages for information, and those that blame the application, are only told.
//! A message of an Xid that cannot be read warns with its text.
//! Xids 144 to 150 and `SXid` messages say themselves whether they are fatal. "Fallen off the bus" counts as Xid 79 even without a
//! number. `policy.xid` of the profile moves numbers between `fail`, `warn` and `ignore`.
//!
//! The kernel forgets its oldest messages. When nothing bad was found but the log does not reach back to boot, that is a
//! warning where it covers at least two hours, and an error where it covers less, or less than the profile's window.
//!
//! ## What to do
//! What the finding says for its number. After the repair: reboot, or set a window, as old messages stay in the log.
//!
//! ## Source
//! NVIDIA Xid catalogue, <https://docs.nvidia.com/deploy/xid-errors/>; two hours are what azurehpc-health-checks looks back.

use std::collections::BTreeMap;

use crate::check::{Check, Judge};
use crate::facts::{Facts, KernelLog};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::kernel_log::{self, KernelEvent, Sxid, TimedEvent, Xid};
use crate::level::{Level, Stage};
use crate::machine;
use crate::profile::{Profile, XidPolicy, XidSeverity};
use crate::reference::{self, XidClass};
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "kernel_log_xid",
    stage: Stage::Host,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/deploy/xid-errors/",
};

/// How far the log must reach back for "no Xid" to mean anything, where the profile names no window: what
/// azurehpc-health-checks looks at (`check_gpu_xid`, the last two hours).
const LOOK_BACK_MINIMUM_S: f64 = 2.0 * SECONDS_PER_HOUR;
const SECONDS_PER_HOUR: f64 = 3_600.0;
/// "GPU has fallen off the bus" (Xid catalogue).
const FALLEN_OFF_THE_BUS: u32 = 79;
/// Of a message from the kernel log, so many characters are shown.
const MESSAGE_LENGTH: usize = 200;

/// One kind of trouble on one GPU or switch.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Trouble {
    /// `Xid 79 (GPU has fallen off the bus)`
    what: String,
    /// `on GPU-… (0000:3b:00.0)`
    place: String,
}

struct Seen {
    verdict: Verdict,
    count: usize,
    last_age_s: Option<f64>,
    last_message: String,
    remedy: String,
}

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let log = facts
        .host
        .kernel_log
        .required("the kernel log")
        .map_err(|outcome| {
            outcome.remedy("run as root, or allow it: sysctl kernel.dmesg_restrict=0, or add the user to group adm")
        })?;
    let policy = &profile.policy.xid;
    let window_s = policy.window_hours.map(|hours| hours * SECONDS_PER_HOUR);
    let troubles = troubles(log, window_s, policy, facts);

    let mut tally = Tally::default();
    let mut told = Vec::new();
    let mut messages = Vec::new();
    let mut remedies = Vec::new();
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
        .remedy(remedies[0].1))
}

/// Everything that the log tells within the window, by what and where.
fn troubles(
    log: &KernelLog,
    window_s: Option<f64>,
    policy: &XidPolicy,
    facts: &Facts,
) -> BTreeMap<Trouble, Seen> {
    let mut troubles: BTreeMap<Trouble, Seen> = BTreeMap::new();
    // A message whose age is not known may be inside the window, so it is judged.
    let inside = |event: &TimedEvent| {
        window_s.is_none_or(|window_s| event.age_s.is_none_or(|age_s| age_s <= window_s))
    };
    for event in kernel_log::events(&log.records)
        .iter()
        .filter(|it| inside(it))
    {
        let place = place(event.event.pci_address(), facts);
        let Some((what, verdict, remedy)) = judge_event(&event.event, policy) else {
            continue;
        };
        let seen = troubles
            .entry(Trouble { what, place })
            .or_insert_with(|| Seen {
                verdict,
                count: 0,
                last_age_s: None,
                last_message: String::new(),
                remedy,
            });
        seen.count += 1;
        // Records are oldest first.
        seen.last_age_s = event.age_s;
        seen.last_message = event.text.chars().take(MESSAGE_LENGTH).collect();
        // The same number may come as fatal and as not fatal.
        seen.verdict = seen.verdict.max(verdict);
    }
    troubles
}

/// What an event is, how it is judged, and what to do. `Pass` is for what is only told.
fn judge_event(event: &KernelEvent, policy: &XidPolicy) -> Option<(String, Verdict, String)> {
    match event {
        KernelEvent::Xid(xid) => judge_xid(xid, policy),
        KernelEvent::FallenOffBus { pci_address } => judge_xid(
            &Xid {
                pci_address: pci_address.clone(),
                number: FALLEN_OFF_THE_BUS,
                ..Xid::default()
            },
            policy,
        ),
        KernelEvent::Sxid(sxid) => Some(judge_sxid(sxid)),
        KernelEvent::Unparsed { .. } => Some((
            "an Xid message that could not be read".to_owned(),
            Verdict::Warn,
            "read the message, and find its number in the Xid catalogue: https://docs.nvidia.com/deploy/xid-errors/"
                .to_owned(),
        )),
        KernelEvent::Aer { .. }
        | KernelEvent::GpuInitializationFailed { .. }
        | KernelEvent::ApiMismatch
        | KernelEvent::NouveauBound { .. } => None,
    }
}

fn judge_xid(xid: &Xid, policy: &XidPolicy) -> Option<(String, Verdict, String)> {
    let row = reference::xid(xid.number);
    let default = match row.map(|row| row.class) {
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
        "ask NVIDIA with an nvidia-bug-report what this number means",
        |row| row.remedy.as_str(),
    );
    Some((
        format!("Xid {} ({name})", xid.number),
        verdict,
        remedy.to_owned(),
    ))
}

fn judge_sxid(sxid: &Sxid) -> (String, Verdict, String) {
    let (word, verdict) = match sxid.fatal {
        Some(true) => ("fatal", Verdict::Fail),
        Some(false) => ("not fatal", Verdict::Warn),
        None => ("of unknown severity", Verdict::Warn),
    };
    (
        format!("SXid {} ({word})", sxid.number),
        verdict,
        "read /var/log/fabricmanager.log; after a fatal SXid reset all GPUs and NVSwitches of the board, or reboot".to_owned(),
    )
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
        Some(gpu) => format!("on {}", machine::name_of(gpu)),
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
    format!("{} {}{count}{age}", trouble.what, trouble.place)
}

/// Says it when the log does not reach as far back as the judgement claims.
fn judge_coverage(log: &KernelLog, window_s: Option<f64>, tally: &mut Tally) {
    if log.oldest_record_age_s.is_none() && log.records.is_empty() {
        tally.error("the kernel log is empty, so nothing was looked at");
        return;
    }
    if log.records_dropped > 0 {
        tally.error(format!(
            "{} of the kernel log were not kept, so they were not judged",
            machine::counted(
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
            "the kernel log reaches back only {reach}, the profile asks for {}",
            duration(window_s)
        )),
        None if covered_s >= LOOK_BACK_MINIMUM_S => tally.warn(format!(
            "no bad Xid in the kernel log, but it reaches back only {reach} and not to boot"
        )),
        None => tally.error(format!(
            "the kernel log reaches back only {reach} and not to boot, too little to tell"
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
        "no Xid that blames a GPU {span}; told only: {}",
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

    #[test]
    fn errs_with_a_remedy_when_it_was_not_read() {
        let mut facts = healthy_node();
        facts.host.kernel_log = Reading::NotRead("permission denied opening /dev/kmsg".to_owned());
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Error);
        assert!(finding.remedy.is_some());
    }
}
