//! `gpu-validator hook pre-job`: may this runner take the job?

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::super::burn_options::BurnMemory;
use super::super::report_files::{ClaimedOutputs, ReportFiles};
use super::super::report_options::ReportOptions;
use super::super::run::{probe_options, refuse_simulated, stop_on_signals, watch};
use super::{FailOn, LabelOptions, RunnerOptions, tell};
use crate::interrupt::Interrupt;
use crate::plan::BurnOptions;
use crate::probe::ProbeOptions;
use crate::runner_hook::assigned_gpus::{AssignedGpus, Assignment};
use crate::runner_hook::job_record::{Job, JobRecord};
use crate::runner_hook::quarantine::Quarantine;
use crate::runner_hook::state_folder::StateFolders;
use crate::session::standby::Standby;
use validator_core::facts::{Facts, GpuFacts};
use validator_core::findings::{ExitStatus, Finding, Run, Subject, Verdict};
use validator_core::level::Level;
use validator_core::report::{verdict_sentence, verdict_word};

/// Before a job: read the runner's GPUs, let them multiply for 2 seconds, and stop the job if
/// they are not fit
///
/// A runner whose GPUs fail is quarantined: every later job fails at once, until
/// `gpu-validator hook release`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = crate::commands::EXIT_CODES)]
pub(crate) struct Arguments {
    #[command(flatten)]
    runner: RunnerOptions,
    /// How long to multiply: 2s, 500ms; 0 for not at all
    #[arg(
        long,
        value_name = "TIME",
        default_value = "2s",
        env = "GPU_VALIDATOR_HOOK_BURN"
    )]
    burn: BurnTime,
    /// Memory that the burn fills, of what is free: 25%, 2GiB
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "25%",
        env = "GPU_VALIDATOR_HOOK_BURN_MEMORY"
    )]
    burn_memory: BurnMemory,
    /// What stops the job
    #[arg(
        long,
        value_enum,
        default_value = "not-pass",
        env = "GPU_VALIDATOR_HOOK_FAIL_ON"
    )]
    fail_on: FailOn,
    /// What quarantines the runner, of what stops the job
    #[arg(
        long,
        value_enum,
        default_value = "fail",
        env = "GPU_VALIDATOR_HOOK_QUARANTINE_ON"
    )]
    quarantine_on: QuarantineOn,
    #[command(flatten)]
    labels: LabelOptions,
    #[command(flatten)]
    report: ReportOptions,
    /// Write what was seen, so that `gpu-validator judge` can judge it again
    #[arg(long, value_name = "FILE", env = "GPU_VALIDATOR_FACTS")]
    facts: Option<PathBuf>,
}

/// What quarantines a runner. GPUs that others use never do: the next job may find them free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum QuarantineOn {
    /// A failed check
    Fail,
    /// A failed check, or something that could not be judged
    NotJudged,
    /// Nothing
    Never,
}

impl QuarantineOn {
    fn holds(self, status: ExitStatus) -> bool {
        match status {
            ExitStatus::Failed => self != Self::Never,
            ExitStatus::NotJudged => self == Self::NotJudged,
            ExitStatus::Passed | ExitStatus::Busy | ExitStatus::BadInput => false,
        }
    }
}

/// `2s`, `500ms`, `0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BurnTime(Duration);

impl FromStr for BurnTime {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        /// A hook that takes longer keeps every job waiting.
        const LONGEST_S: f64 = 600.0;
        let (number, factor) = match text.strip_suffix("ms") {
            Some(number) => (number, 0.001),
            None => (text.strip_suffix('s').unwrap_or(text), 1.0),
        };
        let seconds = number.parse::<f64>().map_or(f64::NAN, |it| it * factor);
        // Below a tenth of a second nothing is multiplied.
        if seconds != 0.0 && !(0.1..=LONGEST_S).contains(&seconds) {
            return Err(format!(
                "a burn takes 0.1 s at least and {LONGEST_S} s at most: 2s, 500ms; 0 is none"
            ));
        }
        Ok(Self(Duration::from_secs_f64(seconds)))
    }
}

/// Of annotations about the runner: readers of the job must see at once that the job is not to
/// blame.
const TITLE: &str = "infrastructure: GPU runner not fit for work";

pub(crate) fn pre_job(arguments: &Arguments) -> anyhow::Result<ExitStatus> {
    let job = Job::from_environment();
    let github = arguments.report.github();
    let folders = arguments.runner.folders();
    let outputs = ClaimedOutputs::of(&arguments.report, arguments.facts.as_deref(), &[]);
    match Quarantine::of_runner(&job.runner, &folders) {
        Ok(None) => {}
        Ok(Some((file, mark))) => {
            tell(github, "error", TITLE, &quarantined(&file.path(), &mark));
            return Ok(ExitStatus::Failed);
        }
        Err(error) => {
            let message = format!("the quarantine of this runner could not be read: {error:#}");
            tell(github, "error", TITLE, &message);
            return Ok(ExitStatus::NotJudged);
        }
    }
    // The record of a job whose end no hook noticed must not be taken for this one's.
    let validated = outputs.and_then(|_outputs| {
        JobRecord::discard(&job, &folders)?;
        validate(arguments, &job)
    });
    if let Err(error) = &validated {
        tell(
            github,
            "error",
            TITLE,
            &format!("nothing was judged: {error:#}"),
        );
    }
    validated
}

fn quarantined(path: &std::path::Path, mark: &Quarantine) -> String {
    let before = if mark.job.url.is_empty() {
        String::new()
    } else {
        format!("\nfound before: {}", mark.job.url)
    };
    let folder = path.parent().unwrap_or(path).display();
    format!(
        "this runner is quarantined since {}: {}{before}\n\
         The job did not start and is not to blame; run it again on another runner.\n\
         When the machine is repaired: gpu-validator hook release --state {folder}",
        mark.since, mark.reason
    )
}

fn validate(arguments: &Arguments, job: &Job) -> anyhow::Result<ExitStatus> {
    let (profile, profile_name) = arguments.report.profile()?;
    let interrupt = stop_on_signals()?;
    let mut options = probe_options(Level::Quick, arguments.runner.sysroot.clone(), &profile);
    options.deadlines = options.deadlines.scaled(arguments.runner.deadline_scale);
    let mut facts = watch(options.clone().into(), &interrupt, &mut |_, _| {});
    let assigned = Assignment::from_environment(&arguments.runner.gpu).resolve(&facts)?;
    refuse_simulated(&mut facts, arguments.report.refuses_simulated());
    let quick = assigned.judged(facts.clone(), &profile, &profile_name, Level::Quick);
    // Load brings no new evidence about GPUs that have failed already, and the job waits.
    let run = if arguments.burn.0.is_zero()
        || quick.exit_status() == ExitStatus::Failed
        || quick.incomplete.is_some()
    {
        quick
    } else {
        burn(arguments, &assigned, &options, &interrupt, &mut facts);
        without_check_kernel(assigned.judged(facts, &profile, &profile_name, Level::Standard))
    };
    let busy = busy_gpus(&assigned, &run.facts);
    let status = match run.exit_status() {
        // Without a burn nothing has noticed that others use the GPUs.
        ExitStatus::Passed if !busy.is_empty() => ExitStatus::Busy,
        status => status,
    };
    let verdict = verdict(&run, status, &busy);
    let folders = arguments.runner.folders();
    let mut message = format!("{verdict}\nread: {}", assigned.in_words());
    let stops = arguments.fail_on.fails(status);
    // What lets this job in keeps no later one out.
    if stops && arguments.quarantine_on.holds(status) {
        message.push('\n');
        message.push_str(&quarantine(arguments, job, &verdict, &folders));
    }
    let github = arguments.report.github();
    if stops {
        message.push_str(
            "\nThe job did not start and is not to blame; run it again on another runner.",
        );
        tell(github, "error", TITLE, &message);
    } else if status != ExitStatus::Passed {
        message.push_str("\nThe job goes on, as configured by --fail-on.");
        tell(github, "warning", TITLE, &message);
    }
    report(arguments, &run, status, &verdict);
    if stops {
        return Ok(status);
    }
    remember(
        &assigned, job, &run.facts, &options, &interrupt, &folders, github,
    );
    Ok(ExitStatus::Passed)
}

/// The burn on the runner's GPUs, and on no other.
fn burn(
    arguments: &Arguments,
    assigned: &AssignedGpus,
    options: &ProbeOptions,
    interrupt: &Interrupt,
    facts: &mut Facts,
) {
    let mut own = assigned.narrowed(facts);
    let gpus = own.gpus.iter().filter_map(|it| it.uuid.value().cloned());
    let burn = BurnOptions {
        gpus: gpus.collect(),
        memory: arguments.burn_memory.0,
        ..BurnOptions::lasting(arguments.burn.0)
    };
    let standby = Standby::new(burn.clone());
    crate::session::burn::burn(&burn, options, &standby, &mut own, interrupt, &mut |_| {});
    facts.load = own.load;
    facts.interrupted = own.interrupted;
    facts.level = Level::Standard;
}

/// The check kernel of level standard is left out: the burn tests more of each GPU, and starting
/// CUDA twice would cost eight GPUs as long again as the whole hook may take (BENCHMARKS.md).
fn without_check_kernel(mut run: Run) -> Run {
    let was_burned = |finding: &Finding| match &finding.subject {
        Subject::Gpu(gpu) => gpu
            .uuid
            .as_ref()
            .is_some_and(|uuid| run.facts.load.burn.contains_key(uuid)),
        Subject::Host | Subject::Environment(_) => false,
    };
    for finding in &mut run.findings {
        if finding.check == "cuda_kernel"
            && finding.verdict == Verdict::Error
            && was_burned(finding)
        {
            finding.verdict = Verdict::Skip;
            "left out before a job: the burn verifies more, and burn_completed reports whether it ran"
                .clone_into(&mut finding.summary);
            finding.remedy = None;
        }
    }
    run
}

/// The runner's GPUs that are in use, with their users.
fn busy_gpus(assigned: &AssignedGpus, facts: &Facts) -> Vec<String> {
    let own = |gpu: &&GpuFacts| match (&assigned.gpus, gpu.uuid.value()) {
        (Some(own), Some(uuid)) => own.contains(uuid),
        (Some(_), None) => false,
        (None, _) => true,
    };
    let mut users = Vec::new();
    for gpu in facts.gpus.iter().filter(own) {
        for process in gpu.processes.value().into_iter().flatten() {
            let name = process.name.as_deref().unwrap_or("a process");
            let uuid = gpu.uuid.value().map_or("a GPU", String::as_str);
            users.push(format!("{name} (pid {}) on {uuid}", process.pid));
        }
    }
    users
}

fn verdict(run: &Run, status: ExitStatus, busy: &[String]) -> String {
    let simulated = run.facts.simulated.as_ref().map_or("", |_| "SIMULATED ");
    let word = verdict_word(status);
    if status == ExitStatus::Busy {
        return format!(
            "{simulated}{word}: others use the GPUs: {}; an earlier job left that, or a user works on this machine; the GPUs are not to blame",
            busy.join(", ")
        );
    }
    format!("{simulated}{word}: {}", verdict_sentence(run))
}

/// A pass is reported in short: it is not read. Every other result is reported in full, with its
/// annotations.
fn report(arguments: &Arguments, run: &Run, status: ExitStatus, verdict: &str) {
    let options = &arguments.report;
    let mut files = ReportFiles::new(options, arguments.facts.as_deref());
    if status == ExitStatus::Passed && !options.verbose {
        files.finish_saying(run, &format!("GPUs before the job: {verdict}\n"));
    } else {
        files.finish(run, options);
    }
}

/// Marks the runner, takes its labels where that is wished, and returns what to say of it.
fn quarantine(arguments: &Arguments, job: &Job, reason: &str, folders: &StateFolders) -> String {
    use std::fmt::Write as _;
    let mut mark = Quarantine::now(reason.to_owned(), job.clone());
    let mut said = match mark.save(folders) {
        Ok(file) => {
            let path = file.path();
            format!(
                "This runner is quarantined from now on ({}); after the repair: gpu-validator hook release --state {}",
                path.display(),
                path.parent().unwrap_or(&path).display()
            )
        }
        Err(error) => format!(
            "This runner could NOT be quarantined, later jobs are only stopped by what they find: {error:#}"
        ),
    };
    let labels = arguments
        .labels
        .labels_of(
            &job.runner,
            &job.repository,
            arguments.runner.deadline_scale,
        )
        .and_then(|labels| labels.map(|it| it.remove()).transpose());
    // Writing to a string does not fail.
    match labels {
        Ok(None) => {}
        Ok(Some(labels)) if labels.is_empty() => {
            said.push_str("\nIt has no labels of its own at GitHub, so jobs for its operating system may still come.");
        }
        Ok(Some(labels)) => {
            let _ = write!(
                said,
                "\nIts labels at GitHub were removed: {}",
                labels.join(", ")
            );
            mark.labels_removed = labels;
            if let Err(error) = mark.save(folders) {
                let _ = write!(
                    said,
                    "; that they were could not be written down: {error:#}"
                );
            }
        }
        Err(error) => {
            let _ = write!(
                said,
                "\nIts labels at GitHub could not be removed: {error:#}"
            );
        }
    }
    said
}

/// Writes the record for the post-job hook. Without one that hook ends no process, which harms no
/// verdict.
fn remember(
    assigned: &AssignedGpus,
    job: &Job,
    facts: &Facts,
    options: &ProbeOptions,
    interrupt: &Interrupt,
    folders: &StateFolders,
    github: bool,
) {
    let log = crate::probe::kernel_log(options, interrupt);
    let record = JobRecord::beginning_now(job.clone(), assigned.gpus.clone(), facts, &log);
    if let Err(error) = record.save(folders) {
        tell(
            github,
            "warning",
            "GPU runner hook",
            &format!(
                "what the GPUs were like before the job could not be written down, so nothing is cleaned after it: {error:#}"
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_a_hook() {
        let time = |text: &str| text.parse().map(|it: BurnTime| it.0.as_millis());
        assert_eq!(time("2s"), Ok(2000));
        assert_eq!(time("500ms"), Ok(500));
        assert_eq!(time("0"), Ok(0));
        assert_eq!(time("1.5"), Ok(1500));
        for nonsense in ["", "s", "1h", "-1s", "NaN", "0.01s", "601s", "inf"] {
            assert!(nonsense.parse::<BurnTime>().is_err(), "{nonsense}");
        }
    }

    #[test]
    fn gpus_in_use_never_quarantine() {
        use QuarantineOn::{Fail, Never, NotJudged};
        for (on, holding) in [
            (Fail, &[ExitStatus::Failed][..]),
            (NotJudged, &[ExitStatus::Failed, ExitStatus::NotJudged]),
            (Never, &[]),
        ] {
            for status in [
                ExitStatus::Passed,
                ExitStatus::Failed,
                ExitStatus::NotJudged,
                ExitStatus::Busy,
                ExitStatus::BadInput,
            ] {
                assert_eq!(
                    on.holds(status),
                    holding.contains(&status),
                    "{on:?} {status:?}"
                );
            }
        }
    }
}
