//! `gpu-validator run`: look at this machine, judge it, report.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context as _;

use super::progress::Progress;
use super::report_files::ReportFiles;
use super::report_options::ReportOptions;
use crate::facts::{FACTS_FORMAT, Facts};
use crate::findings::{ExitStatus, Run};
use crate::level::{Level, Stage};
use crate::probe::{self, Interrupt, ProbeOptions};
use crate::profile::Profile;

/// Look at this machine, judge it, report
///
/// Stages: the host; NVML and CUDA; the GPUs at work. Reports are written anew after each, so that a run which is
/// killed still leaves one, marked incomplete.
#[derive(Debug, clap::Args)]
#[command(after_long_help = crate::cli::EXIT_CODES)]
pub(crate) struct Arguments {
    /// How much to look at
    #[arg(long, value_enum, default_value_t, env = "GPU_VALIDATOR_LEVEL")]
    level: Level,
    #[command(flatten)]
    report: ReportOptions,
    /// Write what was seen, so that `gpu-validator judge` can judge it again; `-` for standard output
    #[arg(long, value_name = "FILE", env = "GPU_VALIDATOR_FACTS")]
    facts: Option<PathBuf>,
    /// Read the host's files below this folder
    #[arg(long, value_name = "DIR")]
    sysroot: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitStatus> {
    let (profile, profile_name) = arguments.report.profile()?;
    let interrupt = stop_on_signals()?;
    let options = probe_options(arguments.level, arguments.sysroot.clone(), &profile);
    let mut files = ReportFiles::new(&arguments.report, arguments.facts.as_deref());
    let judged = |facts| Run::judged(facts, &profile, &profile_name, arguments.level);

    // A report of an earlier run must not be taken for this one's when this one dies at once. It is also the earliest
    // moment to say that a report cannot be written.
    files.write(&judged(unfinished(&nothing_seen(&options), "start")));
    let mut facts = {
        let progress = Progress::start();
        probe::collect(&options, &interrupt, &mut |stage, facts| match stage {
            Stage::Host => {
                progress.begin(Stage::Gpu);
                files.write(&judged(unfinished(facts, "stage host")));
            }
            Stage::Gpu => {
                progress.begin(Stage::Load);
                files.write(&judged(unfinished(facts, "stage gpu")));
            }
            Stage::Load => {}
        })
    };
    refuse_simulated(&mut facts, arguments.report.forbid_simulated);
    let run = judged(facts);
    files.finish(&run, &arguments.report);
    Ok(run.exit_status())
}

/// How the probes look, as level and profile ask.
pub(crate) fn probe_options(
    level: Level,
    sysroot: Option<PathBuf>,
    profile: &Profile,
) -> ProbeOptions {
    let mut options = ProbeOptions {
        level,
        sysroot,
        services: profile.services.keys().cloned().collect(),
        ..ProbeOptions::default()
    };
    let deadline = profile
        .levels
        .get(&level)
        .and_then(|it| it.kernel_deadline_s)
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    if let Some(deadline) = deadline {
        options.deadlines.cuda_kernel = deadline;
    }
    options
}

/// The first SIGINT or SIGTERM asks the probes to stop, so that reports are written; the second ends the process at once.
pub(crate) fn stop_on_signals() -> anyhow::Result<Interrupt> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    use signal_hook::flag;
    let interrupt = Interrupt::default();
    let asked_before = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        let number = usize::try_from(signal).unwrap_or_default();
        // Order matters: the end is registered before the flag that arms it, so that the first signal never ends it.
        flag::register_conditional_shutdown(
            signal,
            ExitStatus::NotJudged as i32,
            Arc::clone(&asked_before),
        )
        .and_then(|_| flag::register(signal, Arc::clone(&asked_before)))
        .and_then(|_| flag::register_usize(signal, interrupt.flag(), number))
        .context("signal handlers cannot be installed")?;
    }
    Ok(interrupt)
}

/// Facts before the first probe: nothing of them can pass.
fn nothing_seen(options: &ProbeOptions) -> Facts {
    Facts {
        format: FACTS_FORMAT,
        validator_version: env!("CARGO_PKG_VERSION").to_owned(),
        collected_at: jiff::Timestamp::now()
            .strftime("%Y-%m-%dT%H:%M:%SZ")
            .to_string(),
        level: options.level,
        ..Facts::default()
    }
}

fn unfinished(facts: &Facts, reached: &str) -> Facts {
    Facts {
        interrupted: Some(format!("the run did not get beyond its {reached}")),
        ..facts.clone()
    }
}

/// Makes facts that simulated libraries answered count as not judged, where the caller forbids them.
pub(crate) fn refuse_simulated(facts: &mut Facts, forbidden: bool) {
    if forbidden && facts.simulated.is_some() && facts.interrupted.is_none() {
        facts.interrupted = Some(
            "simulated driver libraries answered, which --forbid-simulated refuses".to_owned(),
        );
    }
}
