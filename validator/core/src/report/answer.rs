//! The answer of a run in one paragraph: the verdict, its cause, the GPU, and what to do.

use super::text::{capitalized, cause_summary, counted, one_line};
use super::verdict;
use crate::diagnosis::{CauseGpu, CauseKind, RecommendedAction, RootCause};
use crate::facts::{Facts, GpuProcess};
use crate::findings::{ExitStatus, Run, Verdict};
use crate::level::Level;

/// GPUs that a sentence names before it counts the others.
const GPUS_NAMED: usize = 3;

/// The first line of a report for people:
/// `FAIL: GPU 1 (0000:64:00.0, serial …) has fallen off the bus (Xid 79), 60 s ago. Drain …`.
///
/// `causes` are the run's, as [`crate::diagnosis::diagnose`] ranks them.
pub(crate) fn answer(run: &Run, causes: &[RootCause]) -> String {
    let simulated = if run.facts.simulated.is_some() {
        "SIMULATED "
    } else {
        ""
    };
    format!("{simulated}{}: {}", word(run), sentences(run, causes))
}

/// The answer of a run, as every report for people begins with it.
pub fn answer_of(run: &Run) -> String {
    answer(run, &crate::diagnosis::diagnose(run))
}

/// The verdict; a run that passes with warnings is `WARN`.
pub(crate) fn word(run: &Run) -> &'static str {
    match run.exit_status() {
        ExitStatus::Passed if run.counts().warn > 0 => "WARN",
        status => verdict::word(status),
    }
}

/// The cause that the answer names: the first one to act on, where the verdict rests on a cause.
pub(super) fn named_cause<'c>(run: &Run, causes: &'c [RootCause]) -> Option<&'c RootCause> {
    match run.exit_status() {
        ExitStatus::Failed => causes.first(),
        ExitStatus::NotJudged if explained_by_the_run(run).is_none() => {
            let inconclusive = causes.iter().filter(|it| it.verdict == Verdict::Error);
            inconclusive
                .clone()
                .find(|it| it.kind != CauseKind::InUse)
                .or_else(|| inconclusive.clone().next())
        }
        ExitStatus::Busy => causes.iter().find(|it| is_in_use(it)),
        _ => None,
    }
}

/// The answer without the verdict, for formats that write the verdict as a heading.
pub(super) fn sentences(run: &Run, causes: &[RootCause]) -> String {
    one_line(&text(run, causes))
}

fn text(run: &Run, causes: &[RootCause]) -> String {
    match (run.exit_status(), named_cause(run, causes)) {
        (ExitStatus::Passed, _) => format!("{}.", verdict::sentence(run)),
        (ExitStatus::Busy, _) => busy(run, causes),
        (_, Some(cause)) => {
            let further = causes
                .iter()
                .filter(|it| *it != cause && it.verdict != Verdict::Warn)
                .count();
            let further = match further {
                0 => String::new(),
                count => format!(" {} below.", counted(count, "further problem")),
            };
            format!(
                "{}. {}.{further}",
                without_full_stop(&problem(cause)),
                without_full_stop(&capitalized(&action(cause)))
            )
        }
        (_, None) => match explained_by_the_run(run) {
            Some(reason) => format!("{reason}."),
            None => format!("{}.", verdict::sentence(run)),
        },
    }
}

/// Why a run is inconclusive whatever its findings are: it is incomplete, or no GPU was judged.
fn explained_by_the_run(run: &Run) -> Option<String> {
    if run.exit_status() != ExitStatus::NotJudged {
        return None;
    }
    if let Some(reason) = &run.incomplete {
        return Some(format!("the run is incomplete: {reason}"));
    }
    if run.level == Level::Image || verdict::judged_gpus(run) > 0 {
        return None;
    }
    let missing = super::node_summary::missing(&run.facts);
    let first = missing.first()?;
    let first = first.strip_prefix("GPU: ").unwrap_or(first);
    Some(format!("no GPU was judged: {first}"))
}

/// `GPU 1 (0000:64:00.0, serial 165…) has fallen off the bus (Xid 79), 60 s ago`.
fn problem(cause: &RootCause) -> String {
    let summary = cause_summary(cause);
    let Some(gpus) = gpus_in_words(&cause.gpus) else {
        return summary;
    };
    match as_predicate(&summary).filter(|_| cause.gpus.len() == 1) {
        Some(predicate) => format!("{gpus} {predicate}"),
        None => format!("{gpus}: {summary}"),
    }
}

/// Turns NVIDIA's name of an Xid into a predicate where it is a sentence on the GPU:
/// `Xid 79 (GPU has fallen off the bus), 60 s ago` to `has fallen off the bus (Xid 79), 60 s ago`.
fn as_predicate(summary: &str) -> Option<String> {
    let (time, summary) = match summary.strip_prefix("after the load: ") {
        Some(summary) => (" after the load", summary),
        None => ("", summary),
    };
    let (number, rest) = summary.strip_prefix("Xid ")?.split_once(" (GPU ")?;
    let (predicate, rest) = rest.split_once(')')?;
    let is_sentence = predicate.starts_with("has ") && number.parse::<u32>().is_ok();
    is_sentence.then(|| format!("{predicate} (Xid {number}){time}{rest}"))
}

fn gpus_in_words(gpus: &[CauseGpu]) -> Option<String> {
    match gpus {
        [] => None,
        [gpu] => Some(with_serial(gpu)),
        gpus if gpus.len() <= GPUS_NAMED => {
            let names: Vec<String> = gpus.iter().map(ToString::to_string).collect();
            Some(names.join(", "))
        }
        gpus => Some(counted(gpus.len(), "GPU")),
    }
}

/// `GPU 1 (0000:64:00.0, serial 1650223000001)`: the serial number identifies the board that is
/// replaced.
fn with_serial(gpu: &CauseGpu) -> String {
    let name = gpu.to_string();
    match (&gpu.serial, name.strip_suffix(')')) {
        (Some(serial), Some(open)) => format!("{open}, serial {serial})"),
        _ => name,
    }
}

/// What to do first. Software has a remedy of its own; hardware that fails again after a reset or a
/// reboot is replaced.
pub(super) fn action(cause: &RootCause) -> String {
    let action = cause.recommended_action;
    let own = cause.remedy.as_ref().filter(|_| {
        matches!(
            action,
            RecommendedAction::FixSoftware | RecommendedAction::Wait
        )
    });
    let sentence = own.map_or(action.sentence(), String::as_str);
    let is_repeatable = matches!(action, RecommendedAction::Reset | RecommendedAction::Reboot);
    if is_repeatable && cause.kind.is_hardware() {
        return format!("{sentence}; if the error returns, replace the GPU (RMA)");
    }
    sentence.to_owned()
}

/// `GPU 3 (0000:86:00.0) is used by python (pid 4242, 40 GiB). Validate again later.`
fn busy(run: &Run, causes: &[RootCause]) -> String {
    let in_use: Vec<&RootCause> = causes.iter().filter(|it| is_in_use(it)).collect();
    let gpus: Vec<&CauseGpu> = in_use.iter().flat_map(|it| &it.gpus).collect();
    let Some(first) = in_use.first().filter(|_| !gpus.is_empty()) else {
        return format!("{}.", verdict::sentence(run));
    };
    let mut users: Vec<String> = gpus
        .iter()
        .take(GPUS_NAMED)
        .map(|gpu| format!("{gpu} is {}", used_by(gpu, &run.facts)))
        .collect();
    if gpus.len() > GPUS_NAMED {
        let further = counted(gpus.len() - GPUS_NAMED, "further GPU");
        users.push(format!("{further} in use"));
    }
    let action = capitalized(&action(first));
    format!("{}. {}.", users.join("; "), without_full_stop(&action))
}

/// A GPU that was not judged because it is in use; a warning on its processes alone keeps nothing
/// from being judged.
fn is_in_use(cause: &RootCause) -> bool {
    cause.kind == CauseKind::InUse && cause.verdict == Verdict::Error
}

fn used_by(gpu: &CauseGpu, facts: &Facts) -> String {
    const PROCESSES_NAMED: usize = 2;
    let processes = processes_on(gpu, facts);
    if processes.is_empty() {
        return "in use".to_owned();
    }
    let mut names: Vec<String> = processes
        .iter()
        .take(PROCESSES_NAMED)
        .map(|it| process(it))
        .collect();
    if processes.len() > PROCESSES_NAMED {
        names.push(format!("{} more", processes.len() - PROCESSES_NAMED));
    }
    format!("used by {}", names.join(", "))
}

/// Before the load, and those that were seen during it.
fn processes_on<'f>(gpu: &CauseGpu, facts: &'f Facts) -> Vec<&'f GpuProcess> {
    let listed = gpu
        .index
        .and_then(|index| facts.gpus.get(index)?.processes.value());
    let log = gpu
        .uuid
        .as_ref()
        .and_then(|uuid| facts.load.sensors.get(uuid));
    let mut processes: Vec<&GpuProcess> = listed.into_iter().flatten().collect();
    for newcomer in log.into_iter().flat_map(|it| &it.other_processes) {
        if !processes.iter().any(|it| it.pid == newcomer.pid) {
            processes.push(newcomer);
        }
    }
    processes
}

fn process(process: &GpuProcess) -> String {
    let name = process.name.as_deref().unwrap_or("a process");
    let memory = process
        .used_memory_bytes
        .map(|bytes| match bytes >> 20 {
            mib if mib >= 1024 => format!(", {} GiB", mib / 1024),
            mib => format!(", {mib} MiB"),
        })
        .unwrap_or_default();
    let user = process.user.as_deref();
    let user = user.map_or_else(String::new, |it| format!(", user {}", one_line(it)));
    format!("{} (pid {}{user}{memory})", one_line(name), process.pid)
}

fn without_full_stop(text: &str) -> &str {
    text.trim_end().trim_end_matches('.')
}

#[cfg(test)]
mod tests {
    use super::{answer, process};
    use crate::diagnosis::diagnose;
    use crate::facts::{Facts, KernelLogRecord, Reading};
    use crate::findings::Run;
    use crate::level::Level;
    use crate::test_machine::{healthy_node, python_process};

    fn answer_of(facts: Facts) -> String {
        let profile = crate::parse_profile("{}", "test profile").expect("an empty profile");
        let run = Run::judged(facts, &profile, "test profile", Level::Quick);
        answer(&run, &diagnose(&run))
    }

    #[test]
    fn a_healthy_node_is_ready() {
        assert_eq!(
            answer_of(healthy_node()),
            "PASS: node is ready: 8 GPUs judged, none failed."
        );
    }

    #[test]
    fn an_xid_names_the_gpu_and_what_to_do() {
        let mut facts = healthy_node();
        let address = facts.gpus[1].pci_address.value().expect("read").clone();
        let serial = facts.gpus[1].serial.value().expect("read").clone();
        let bus = address.trim_end_matches(".0");
        let Reading::Value(log) = &mut facts.host.kernel_log else {
            panic!("the healthy machine has a kernel log")
        };
        log.records.push(KernelLogRecord {
            text: format!("NVRM: Xid (PCI:{bus}): 79, GPU has fallen off the bus."),
            age_s: Some(600.0),
            at_s: Some(80_000.0),
            repeats: 0,
        });
        let answer = answer_of(facts);
        let begins =
            format!("FAIL: GPU 1 ({address}, serial {serial}) has fallen off the bus (Xid 79)");
        assert!(answer.starts_with(&begins), "{answer}");
        assert!(
            answer.ends_with(
                "Drain and reboot the node (on a cloud, stop and start the instance); if the error returns, replace the GPU (RMA)."
            ),
            "{answer}"
        );
    }

    #[test]
    fn a_warning_is_no_silent_pass() {
        let mut facts = healthy_node();
        facts.gpus[3].processes = Reading::Value(vec![python_process(40 << 10)]);
        let answer = answer_of(facts);
        assert!(
            answer.starts_with("WARN: node is ready: 8 GPUs judged, none failed, "),
            "{answer}"
        );
    }

    #[test]
    fn a_process_is_named_with_its_user_and_memory() {
        let mut user = python_process(40 << 10);
        assert_eq!(process(&user), "python3 (pid 4242, 40 GiB)");
        user.user = Some("jane".to_owned());
        assert_eq!(process(&user), "python3 (pid 4242, user jane, 40 GiB)");
    }

    #[test]
    fn without_a_gpu_the_first_missing_layer_is_the_reason() {
        let answer = answer_of(Facts {
            host: crate::facts::HostFacts {
                pci_devices: Reading::Value(Vec::new()),
                ..Default::default()
            },
            ..Facts::default()
        });
        assert_eq!(
            answer,
            "NOT JUDGED: no GPU was judged: no NVIDIA GPU on the PCI bus."
        );
    }
}
