//! `gpu-validator hook post-job`: what did the job leave on the GPUs?

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::super::report_files::append_to_step_summary;
use super::super::run::{probe_options, stop_on_signals};
use super::super::terminal::to_stdout;
use super::{FailOn, RunnerOptions, tell};
use crate::interrupt::Interrupt;
use crate::probe::ProbeOptions;
use crate::runner_hook::assigned_gpus::AssignedGpus;
use crate::runner_hook::job_record::{Job, JobRecord, KeptRecord};
use crate::runner_hook::leftovers::{self, Ending, GpuUser, Standing};
use validator_core::facts::{Facts, GpuFacts, KernelLog, Reading};
use validator_core::findings::{ExitStatus, Finding, Verdict};
use validator_core::level::Level;
use validator_core::profile::Profile;
use validator_core::queries::name_of;
use validator_core::report::markdown_text;

/// After a job: terminate leftover GPU processes, verify that their memory is free again, note
/// new Xids
///
/// Ends only processes of its own user that started during the job and hold the driver: SIGTERM,
/// then SIGKILL. The job's own result stays as it is, unless --fail-on changes it; what is not
/// clean stops the next job's pre-job hook.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXIT_CODES)]
pub(crate) struct Arguments {
    #[command(flatten)]
    runner: RunnerOptions,
    /// How long a process may take to end after SIGTERM, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 5, env = "GPU_VALIDATOR_HOOK_GRACE", value_parser = clap::value_parser!(u64).range(..=600))]
    grace: u64,
    /// How long the driver may take to free memory, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10, env = "GPU_VALIDATOR_HOOK_MEMORY_WAIT", value_parser = clap::value_parser!(u64).range(..=600))]
    memory_wait: u64,
    /// What fails the job
    #[arg(
        long,
        value_enum,
        default_value = "never",
        env = "GPU_VALIDATOR_HOOK_POST_FAIL_ON"
    )]
    fail_on: FailOn,
    /// Its policy.xid lists the Xids that matter
    #[arg(long, value_name = "FILE", env = "GPU_VALIDATOR_PROFILE")]
    profile: Option<PathBuf>,
    /// Accept simulated driver libraries, for tests
    #[arg(long)]
    simulated_ok: bool,
    /// Annotate the job and append to its summary; on by itself where GITHUB_ACTIONS is true
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    github: Option<bool>,
}

const EXIT_CODES: &str = "\
Exit codes:
  0  the GPUs are clean, or --fail-on does not require more
  1  the job left something that could not be removed, or an Xid blames a GPU
  2  something could not be read
  3  bad input: the profile or the arguments are wrong";

/// A line and its severity.
#[derive(Debug)]
struct Note {
    verdict: Verdict,
    text: String,
}

fn note(verdict: Verdict, text: impl Into<String>) -> Note {
    Note {
        verdict,
        text: text.into(),
    }
}

const TITLE: &str = "GPUs after the job";

pub(crate) fn post_job(arguments: &Arguments) -> anyhow::Result<ExitStatus> {
    let job = Job::from_environment();
    let github = arguments
        .github
        .unwrap_or_else(|| std::env::var_os("GITHUB_ACTIONS").is_some_and(|it| it == "true"));
    let profile = match &arguments.profile {
        Some(path) => crate::profile_file::load(path)?,
        None => Profile::default(),
    };
    let notes = match JobRecord::find(&job, &arguments.runner.folders()) {
        Ok(Some(kept)) => clean(arguments, &kept, &profile)?,
        // The job did not start, or no pre-job hook ran before it.
        Ok(None) => {
            to_stdout(
                "no record of this job: no pre-job hook let it start, so nothing is cleaned after it\n",
            );
            return Ok(ExitStatus::Passed);
        }
        Err(error) => vec![note(
            Verdict::Error,
            format!("what the GPUs were like before the job is not known: {error:#}"),
        )],
    };
    show(github, &notes);
    let worst = notes.iter().map(|it| it.verdict).max();
    let status = match worst {
        Some(Verdict::Fail) => ExitStatus::Failed,
        Some(Verdict::Error) => ExitStatus::NotJudged,
        _ => ExitStatus::Passed,
    };
    Ok(if arguments.fail_on.fails(status) {
        status
    } else {
        ExitStatus::Passed
    })
}

/// Ends what the job left. The record goes last: a hook that is killed before, or fails for want of
/// threads, runs again.
fn clean(arguments: &Arguments, kept: &KeptRecord, profile: &Profile) -> anyhow::Result<Vec<Note>> {
    let Ok(looked) = std::panic::catch_unwind(|| look(arguments, &kept.record, profile)) else {
        let text = "the GPUs could not be read after the job: this host has no thread, descriptor or memory left";
        return Ok(vec![note(Verdict::Error, text)]);
    };
    let mut notes = looked?;
    if let Err(error) = kept.remove() {
        notes.push(note(Verdict::Error, format!("{error:#}")));
    }
    Ok(notes)
}

fn look(arguments: &Arguments, record: &JobRecord, profile: &Profile) -> anyhow::Result<Vec<Note>> {
    let interrupt = stop_on_signals()?;
    let mut options = probe_options(Level::Quick, arguments.runner.sysroot.clone(), profile);
    options.deadlines = options.deadlines.scaled(arguments.runner.deadline_scale);
    let own = own_gpus(record);
    let mut facts = own.narrowed(&crate::probe::gpus(&options, &interrupt));
    let mut notes = missing_gpus(record, &facts);
    if facts.simulated.is_some()
        && !arguments.simulated_ok
        && !crate::commands::simulated_ok::by_root()
    {
        let text = "the driver libraries are simulated, which only --simulated-ok accepts";
        notes.push(note(Verdict::Error, text));
    }
    let users = leftovers::users_of(facts.gpus.iter(), record.began_ticks);
    let ended = leftovers::end(
        &users,
        record.began_ticks,
        Duration::from_secs(arguments.grace),
    );
    notes.extend(users.iter().filter_map(not_ended));
    notes.extend(ended.iter().map(|(user, ending)| ended_note(user, ending)));
    facts = wait_for_memory(arguments, record, &own, facts, &options, &interrupt);
    notes.extend(facts.gpus.iter().filter_map(|gpu| memory_note(gpu, record)));
    let log = match record.kernel_log_end {
        Some(end) => crate::probe::kernel_log_since(end, &options, &interrupt),
        None => Reading::NotRead("the kernel log could not be read before the job".to_owned()),
    };
    notes.push(xid_note(&own, &facts, profile, &log));
    if let Some(reason) = interrupt.reason() {
        notes.push(note(
            Verdict::Error,
            format!("the hook was stopped: {reason}"),
        ));
    }
    Ok(notes)
}

/// The GPUs that were the runner's when the job began; what the job did to the environment does not
/// change them.
fn own_gpus(record: &JobRecord) -> AssignedGpus {
    AssignedGpus::whole(record.gpus.clone())
}

/// GPUs that were there before the job, or all if none is left.
fn missing_gpus(record: &JobRecord, facts: &Facts) -> Vec<Note> {
    let known = record.memory_used_bytes.keys();
    let own = known.filter(|uuid| record.gpus.as_ref().is_none_or(|own| own.contains(uuid)));
    let missing: Vec<&str> = own
        .filter(|uuid| facts.gpu(uuid).is_none())
        .map(String::as_str)
        .collect();
    let mut notes: Vec<Note> = facts
        .nvml
        .probe_trouble
        .iter()
        .map(|it| note(Verdict::Error, format!("NVML: {it}")))
        .collect();
    if !missing.is_empty() {
        notes.push(note(
            Verdict::Error,
            format!(
                "NVML does not list any more what was there before the job: {}",
                missing.join(", ")
            ),
        ));
    }
    for gpu in &facts.gpus {
        if let Some(lost) = &gpu.lost {
            notes.push(note(
                Verdict::Fail,
                format!("{} was lost during the job: {lost}", name_of(gpu)),
            ));
        } else if let Reading::NotRead(reason) = &gpu.processes {
            notes.push(note(
                Verdict::Error,
                format!(
                    "{}: its processes could not be read: {reason}",
                    name_of(gpu)
                ),
            ));
        } else if gpu.processes == Reading::NotSupported {
            notes.push(note(
                Verdict::Error,
                format!("{}: the driver does not list its processes", name_of(gpu)),
            ));
        }
    }
    notes
}

fn in_words(user: &GpuUser) -> String {
    format!(
        "{} (pid {}, {} MiB) on {}",
        user.name,
        user.pid,
        user.memory_bytes >> 20,
        user.gpus.join(", ")
    )
}

/// The line for a process that this hook leaves alone.
fn not_ended(user: &GpuUser) -> Option<Note> {
    let who = in_words(user);
    match user.standing {
        Standing::Leftover => None,
        Standing::Older => Some(note(
            Verdict::Warn,
            format!("{who} was there before the job and is left alone"),
        )),
        Standing::Runner => Some(note(
            Verdict::Warn,
            format!("{who} is the runner itself, or started it"),
        )),
        Standing::NotOurs => Some(note(
            Verdict::Fail,
            format!(
                "{who} started during the job and belongs to another user, so it was not ended: sudo kill {}",
                user.pid
            ),
        )),
        Standing::Unproven => Some(note(
            Verdict::Error,
            format!(
                "{who} was not ended: the process of this number does not hold the driver; NVML may count outside this container"
            ),
        )),
        Standing::Unseen => Some(note(
            Verdict::Error,
            format!(
                "{who} was not ended: no such process can be seen from here; search for it outside this container"
            ),
        )),
    }
}

fn ended_note(user: &GpuUser, ending: &Ending) -> Note {
    let who = in_words(user);
    match ending {
        Ending::Gone => note(Verdict::Pass, format!("{who} ended by itself")),
        Ending::Terminated => note(
            Verdict::Warn,
            format!("the job left {who}; SIGTERM ended it"),
        ),
        Ending::Killed => note(
            Verdict::Warn,
            format!("the job left {who}; it ignored SIGTERM, SIGKILL ended it"),
        ),
        Ending::Survived(reason) => note(
            Verdict::Fail,
            format!("the job left {who}, and it lives: {reason}"),
        ),
    }
}

const MIB: u64 = 1 << 20;
/// What a GPU may hold more than before the job: the limit of Meta's gcm health checks for an
/// unused GPU.
const MEMORY_TOLERANCE_BYTES: u64 = 15 * MIB;
/// Reading the memory takes the driver a few milliseconds; it frees a process's memory within a
/// second or two.
const BETWEEN_LOOKS: Duration = Duration::from_millis(200);

/// Memory that is in use above what was before the job, in MiB; `None` where it is unknown.
fn surplus_mib(gpu: &GpuFacts, record: &JobRecord) -> Option<u64> {
    let before = record.memory_used_bytes.get(gpu.uuid.value()?)?;
    let used = gpu.memory.value()?.used_bytes;
    Some(used.saturating_sub(before + MEMORY_TOLERANCE_BYTES) / MIB)
}

/// The driver frees the memory of an ended process a moment later. Looks again until it has, or the
/// time is over.
fn wait_for_memory(
    arguments: &Arguments,
    record: &JobRecord,
    own: &AssignedGpus,
    mut facts: Facts,
    options: &ProbeOptions,
    interrupt: &Interrupt,
) -> Facts {
    let deadline = Instant::now() + Duration::from_secs(arguments.memory_wait);
    let leaked = |facts: &Facts| {
        facts
            .gpus
            .iter()
            .any(|gpu| surplus_mib(gpu, record).is_some_and(|it| it > 0))
    };
    while leaked(&facts) && Instant::now() < deadline && interrupt.signal().is_none() {
        std::thread::sleep(BETWEEN_LOOKS);
        facts = own.narrowed(&crate::probe::gpus(options, interrupt));
    }
    facts
}

fn memory_note(gpu: &GpuFacts, record: &JobRecord) -> Option<Note> {
    let name = name_of(gpu);
    if gpu.lost.is_some() {
        return None;
    }
    match &gpu.memory {
        Reading::NotRead(reason) => {
            return Some(note(
                Verdict::Error,
                format!("{name}: its memory could not be read: {reason}"),
            ));
        }
        // Unified memory is the host's, which frees it with the process.
        Reading::NotSupported => return None,
        Reading::Value(_) => {}
    }
    let surplus = surplus_mib(gpu, record).filter(|it| *it > 0)?;
    let somebody = gpu.processes.value().is_some_and(|it| !it.is_empty());
    Some(if somebody {
        note(
            Verdict::Warn,
            format!(
                "{name}: {surplus} MiB more are in use than before the job, by the processes that are on it"
            ),
        )
    } else {
        note(
            Verdict::Fail,
            format!(
                "{name}: {surplus} MiB of memory were not given back, without a process that uses them; reset the GPU or reboot"
            ),
        )
    })
}

/// What the kernel log gained during the job, judged as before a job: by `policy.xid` and the Xid
/// catalogue.
fn xid_note(
    own: &AssignedGpus,
    facts: &Facts,
    profile: &Profile,
    log: &Reading<KernelLog>,
) -> Note {
    let log = match log {
        Reading::Value(log) => log,
        Reading::NotSupported => return note(Verdict::Error, "new Xids: there is no kernel log"),
        Reading::NotRead(reason) => {
            return note(
                Verdict::Error,
                format!("new Xids could not be read: {reason}"),
            );
        }
    };
    let mut seen = facts.clone();
    seen.host.kernel_log = Reading::Value(KernelLog {
        // It has all of what came since the job began, which is as far as it is judged here.
        since_boot: true,
        ..log.clone()
    });
    let seen = own.narrowed(&seen);
    let Some(finding) = xid_finding(&seen, profile) else {
        return note(
            Verdict::Error,
            "new Xids were not judged: the check is missing",
        );
    };
    let any = matches!(&seen.host.kernel_log, Reading::Value(log) if !log.records.is_empty());
    match finding.verdict {
        Verdict::Pass if !any => note(Verdict::Pass, "no new Xid"),
        Verdict::Skip => note(
            Verdict::Pass,
            format!("new Xids are not judged: {}", finding.summary),
        ),
        verdict => note(verdict, format!("during the job: {}", finding.summary)),
    }
}

fn xid_finding(facts: &Facts, profile: &Profile) -> Option<Finding> {
    let findings = validator_core::judge(facts, profile, Level::Quick);
    findings.into_iter().find(|it| it.check == "kernel_log_xid")
}

fn show(github: bool, notes: &[Note]) {
    for it in notes {
        match it.verdict {
            Verdict::Fail => tell(github, "error", TITLE, &it.text),
            Verdict::Warn | Verdict::Error => tell(github, "warning", TITLE, &it.text),
            Verdict::Pass | Verdict::Skip => {
                to_stdout(&format!(
                    "{TITLE}: {}\n",
                    validator_core::report::one_line(&it.text)
                ));
            }
        }
    }
    if github {
        let lines: Vec<String> = notes
            .iter()
            .map(|it| format!("- **{}** {}\n", it.verdict, markdown_text(&it.text)))
            .collect();
        append_to_step_summary(&format!("### {TITLE}\n\n{}\n", lines.concat()));
    }
}
