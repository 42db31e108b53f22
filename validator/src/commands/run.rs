//! `gpu-validator run`: read this machine, judge it, report.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::burn_options::BurnOfRun;
use super::history::{HistoryFolder, HistoryOptions};
use super::progress::ProgressLine;
use super::report_files::{ClaimedOutputs, ReportFiles};
use super::report_options::ReportOptions;
use super::run_remote::{self, RemoteOptions};
use super::selection::SelectionOptions;
use crate::interrupt::Interrupt;
use crate::plan::BurnProgress;
use crate::probe::{Deadlines, ProbeOptions};
use crate::session;
use crate::session::{Progress, SessionOptions};
use validator_core::facts::{FACTS_FORMAT, Facts};
use validator_core::findings::{ExitStatus, Run};
use validator_core::level::{Level, Stage};
use validator_core::profile::Profile;
use validator_core::selection::Selection;

/// Read this machine, judge it, report
///
/// Stages: the host; NVML and CUDA; the GPUs at work. Reports are written anew after each, so that
/// a run which is killed still leaves one, marked incomplete.
#[derive(Debug, clap::Args)]
#[command(after_long_help = crate::commands::EXIT_CODES)]
pub(crate) struct Arguments {
    /// How much to read
    #[arg(long, value_parser = crate::cli_values::level(), default_value_t, env = "GPU_VALIDATOR_LEVEL")]
    level: Level,
    #[command(flatten)]
    burn: BurnOfRun,
    #[command(flatten)]
    selection: SelectionOptions,
    #[command(flatten)]
    report: ReportOptions,
    /// Write what was seen, so that `gpu-validator judge` can judge it again; `-` for standard
    /// output
    #[arg(long, value_name = "FILE", env = "GPU_VALIDATOR_FACTS")]
    facts: Option<PathBuf>,
    #[command(flatten)]
    history: HistoryOptions,
    /// Read the host's files below this folder
    #[arg(long, value_name = "DIR")]
    sysroot: Option<PathBuf>,
    /// Deadlines of driver calls times this: tests in which a driver hangs need not wait as long as
    /// a real GPU may take
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, hide = true)]
    deadline_scale: f64,
    // The last, for its heading.
    #[command(flatten)]
    remote: RemoteOptions,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitStatus> {
    let selection = arguments.selection.selection()?;
    if arguments.remote.is_given() {
        anyhow::ensure!(
            !arguments.selection.is_given(),
            "--only, --skip and --gpu are of no effect with --target; judge the facts that it brings back: gpu-validator judge --only"
        );
        anyhow::ensure!(
            !arguments.history.is_given(),
            "--history and --no-history are of no effect with --target: a run on another machine keeps no history"
        );
        return run_remote::run(&run_remote::Request {
            options: &arguments.remote,
            level: arguments.level,
            report: &arguments.report,
            facts: arguments.facts.as_deref(),
        });
    }
    arguments.remote.refuse_without_target()?;
    let interrupt = stop_on_signals()?;
    let _outputs = ClaimedOutputs::of(&arguments.report, arguments.facts.as_deref(), &[])?;
    let (profile, profile_name) = arguments.report.profile()?;
    refuse_missing_sysroot(arguments.sysroot.as_deref())?;
    let mut probe = probe_options(arguments.level, arguments.sysroot.clone(), &profile);
    probe.deadlines = probe.deadlines.scaled(arguments.deadline_scale);
    let _claim = crate::sentinel_requests::claim();
    let mut options = SessionOptions::from(probe);
    options.gpus.clone_from(&arguments.selection.gpu);
    options.burn = arguments.burn.plan(arguments.level, &profile)?;
    options.allocation = arguments.burn.allocation(arguments.level, &options.burn);
    let asked = Asked {
        profile: &profile,
        profile_name: &profile_name,
        report: &arguments.report,
        facts: arguments.facts.as_deref(),
        forbid_simulated: arguments.report.refuses_simulated(),
        selection,
        history: arguments.history.folder(arguments.sysroot.is_some()),
    };
    let run = look_and_report(options, &asked, &interrupt);
    asked
        .selection
        .refuse_unknown_gpus(&run.facts)
        .map_err(anyhow::Error::msg)?;
    Ok(run.exit_status())
}

/// By what a run judges and where it reports.
pub(crate) struct Asked<'a> {
    pub(crate) profile: &'a Profile,
    pub(crate) profile_name: &'a str,
    pub(crate) report: &'a ReportOptions,
    pub(crate) facts: Option<&'a Path>,
    pub(crate) forbid_simulated: bool,
    pub(crate) selection: Selection,
    /// Where figures of earlier runs are kept.
    pub(crate) history: Option<HistoryFolder>,
}

/// A whole run: looks at this machine, judges it, and writes the reports after every stage.
pub(crate) fn look_and_report(
    options: SessionOptions,
    asked: &Asked<'_>,
    interrupt: &Interrupt,
) -> Run {
    let level = options.probe.level;
    let history = asked.history.as_ref().map(HistoryFolder::read);
    let mut files = ReportFiles::new(asked.report, asked.facts);
    let judged = |facts| {
        let facts = Facts {
            history: history.clone(),
            ..facts
        };
        let run = Run::judged(facts, asked.profile, asked.profile_name, level);
        asked.selection.applied_to(run)
    };

    // A report of an earlier run must not be taken for this one's when this one dies at once. It is
    // also the earliest moment to say that a report cannot be written.
    files.write(&judged(unfinished(&nothing_seen(&options.probe), "start")));
    let mut facts = watch(options, interrupt, &mut |stage, facts| {
        files.write(&judged(unfinished(facts, &format!("stage {stage}"))));
    });
    refuse_simulated(&mut facts, asked.forbid_simulated);
    let run = judged(facts);
    files.finish(&run, asked.report);
    if let Some(folder) = &asked.history {
        folder.keep(&run.facts);
    }
    run
}

/// Looks at the machine in the three stages, with a line of progress, and returns what was seen.
/// `after_stage` gets the facts so far after each stage but the last.
pub(crate) fn watch(
    options: SessionOptions,
    interrupt: &Interrupt,
    after_stage: &mut dyn FnMut(Stage, &Facts),
) -> Facts {
    let progress = ProgressLine::start();
    let nothing = nothing_seen(&options.probe);
    let deadline = options.probe.deadlines.run.map(|it| Instant::now() + it);
    let seen = match probe_in_thread(options, interrupt.clone()) {
        Ok(seen) => seen,
        Err(error) => {
            return Facts {
                interrupted: Some(error.to_string()),
                ..nothing
            };
        }
    };
    follow(
        &seen,
        nothing,
        interrupt,
        deadline,
        &mut |told| match told {
            Progress::Stage(stage, facts) => {
                if let Some(next) = stage_after(stage) {
                    progress.begin(next);
                    after_stage(stage, facts);
                }
            }
            Progress::Burn(gpus) => progress.burn(gpus),
        },
    )
}

/// Waits for the probes, which stop by themselves on a signal. Where one of them is stuck, the
/// facts up to its stage are what there is.
fn follow(
    seen: &Receiver<Seen>,
    nothing: Facts,
    interrupt: &Interrupt,
    deadline: Option<Instant>,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Facts {
    const LOOK_FOR_SIGNALS: Duration = Duration::from_millis(20);
    /// Probes look for the wish to stop in every wait; killing and reaping their children takes far
    /// less.
    const TIME_TO_STOP: Duration = Duration::from_secs(3);

    let mut last = nothing;
    let mut running = Stage::Host;
    let mut asked_at: Option<Instant> = None;
    loop {
        match seen.recv_timeout(LOOK_FOR_SIGNALS) {
            Ok(Seen::Stage(stage, facts)) => {
                running = stage_after(stage).unwrap_or(stage);
                on_progress(Progress::Stage(stage, &facts));
                last = *facts;
            }
            Ok(Seen::Burn(gpus)) => on_progress(Progress::Burn(&gpus)),
            Ok(Seen::All(facts)) => return *facts,
            // The thread ended without facts: it panicked, with a message on standard error.
            Err(RecvTimeoutError::Disconnected) => {
                last.interrupted = Some(format!("the probes of stage {running} panicked"));
                return last;
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        if deadline.is_some_and(|it| Instant::now() >= it) {
            interrupt.request_by_deadline();
        }
        if let Some(reason) = interrupt.reason() {
            let asked_at = *asked_at.get_or_insert_with(Instant::now);
            if asked_at.elapsed() > TIME_TO_STOP {
                last.interrupted = Some(format!("{reason}, while stage {running} was stuck"));
                return last;
            }
        }
    }
}

/// Messages of the probes' thread.
enum Seen {
    Stage(Stage, Box<Facts>),
    Burn(Vec<BurnProgress>),
    All(Box<Facts>),
}

fn probe_in_thread(
    options: SessionOptions,
    interrupt: Interrupt,
) -> std::io::Result<Receiver<Seen>> {
    let (tell, seen) = channel();
    crate::threads::spawn("for the probes", move || {
        // There is no listener any more once the run was given up.
        let facts = session::collect(&options, &interrupt, &mut |told| {
            let _ = tell.send(match told {
                Progress::Stage(stage, facts) => Seen::Stage(stage, Box::new(facts.clone())),
                Progress::Burn(gpus) => Seen::Burn(gpus.to_vec()),
            });
        });
        let _ = tell.send(Seen::All(Box::new(facts)));
    })?;
    Ok(seen)
}

fn stage_after(stage: Stage) -> Option<Stage> {
    match stage {
        Stage::Host => Some(Stage::Gpu),
        Stage::Gpu => Some(Stage::Load),
        Stage::Load => None,
    }
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
        services: services_of(profile, level),
        image_files: profile.image.files.clone(),
        kubernetes: profile.kubernetes.clone(),
        deadlines: Deadlines::of(level),
        pythons: profile.python.iter().map(|it| it.path.clone()).collect(),
        ..ProbeOptions::default()
    };
    let Some(settings) = profile.levels.get(&level) else {
        return options;
    };
    let duration = |seconds: Option<f64>| Duration::try_from_secs_f64(seconds?).ok();
    if let Some(deadline) = duration(settings.kernel_deadline_s) {
        options.deadlines.cuda_kernel = deadline;
    }
    options.deadlines.run = duration(settings.deadline_s);
    options
}

/// Every file below a folder that does not exist is missing, and would be judged as such.
pub(crate) fn refuse_missing_sysroot(sysroot: Option<&Path>) -> anyhow::Result<()> {
    match sysroot {
        Some(folder) if !folder.is_dir() => {
            anyhow::bail!(
                "--sysroot {}: expected an existing folder",
                folder.display()
            )
        }
        _ => Ok(()),
    }
}

fn services_of(profile: &Profile, level: Level) -> Vec<String> {
    let image = (level == Level::Image).then_some(&profile.image.enabled_services);
    let mut services: Vec<String> = profile.services.keys().cloned().collect();
    services.extend(image.into_iter().flatten().cloned());
    services
}

/// The first SIGINT, SIGTERM or SIGHUP stops the probes, so that reports are written; a second
/// SIGINT or SIGTERM ends the process at once. Every call returns the same interrupt.
pub(crate) fn stop_on_signals() -> anyhow::Result<Interrupt> {
    static INSTALLED: Mutex<Option<Interrupt>> = Mutex::new(None);
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(interrupt) = &*installed {
        return Ok(interrupt.clone());
    }
    let interrupt = install_signal_handlers()?;
    Ok(installed.insert(interrupt).clone())
}

fn install_signal_handlers() -> anyhow::Result<Interrupt> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    use signal_hook::flag;
    let interrupt = Interrupt::default();
    // nohup has it ignored, which stays so.
    if !is_ignored(SIGHUP) {
        let number = usize::try_from(SIGHUP).unwrap_or_default();
        flag::register_usize(SIGHUP, interrupt.flag(), number)
            .context("signal handlers cannot be installed")?;
    }
    let asked_before = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        let number = usize::try_from(signal).unwrap_or_default();
        // Order matters: the end is registered before the flag that arms it, so that the first
        // signal never ends it.
        flag::register_conditional_shutdown(
            signal,
            ExitStatus::NotJudged as i32,
            Arc::clone(&asked_before),
        )
        .and_then(|_| flag::register(signal, Arc::clone(&asked_before)))
        .and_then(|_| flag::register_usize(signal, interrupt.flag(), number))
        .context("signal handlers cannot be installed")?;
    }
    if !is_ignored(signal_hook::consts::SIGTSTP) {
        crate::job_control::stop_with_workers();
    }
    Ok(interrupt)
}

/// Whether this process was started with the signal ignored.
// Source: proc_pid_status(5), SigIgn: a mask in hexadecimal, signal 1 is its lowest bit.
pub(crate) fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|it| it.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|it| u64::from_str_radix(it.trim(), 16).ok());
    mask.is_some_and(|it| it >> (signal - 1) & 1 == 1)
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

/// Makes facts that simulated libraries answered count as not judged, where the caller forbids
/// them.
pub(crate) fn refuse_simulated(facts: &mut Facts, forbidden: bool) {
    if forbidden && facts.simulated.is_some() && facts.interrupted.is_none() {
        facts.interrupted = Some(
            "the driver libraries are simulated, which only --simulated-ok accepts".to_owned(),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::{Seen, follow, nothing_seen, refuse_simulated};
    use crate::interrupt::Interrupt;
    use crate::probe::ProbeOptions;
    use crate::session::Progress;
    use validator_core::facts::Facts;
    use validator_core::level::Stage;
    use validator_core::test_machine::healthy_node;

    fn nothing() -> Facts {
        nothing_seen(&ProbeOptions::default())
    }

    fn follow_to_end(
        seen: &Receiver<Seen>,
        interrupt: &Interrupt,
        on_progress: &mut dyn FnMut(Progress<'_>),
    ) -> Facts {
        follow(seen, nothing(), interrupt, None, on_progress)
    }

    #[test]
    fn a_run_that_takes_too_long_is_stopped_and_says_so() {
        let (_tell, seen) = channel();
        let interrupt = Interrupt::default();
        let deadline = Some(std::time::Instant::now());
        let facts = follow(&seen, nothing(), &interrupt, deadline, &mut |_| {});
        assert_eq!(
            facts.interrupted.as_deref(),
            Some("the profile's deadline for the whole run passed, while stage host was stuck")
        );
    }

    #[test]
    fn stages_are_told_in_their_order_and_the_last_facts_are_returned() {
        let (tell, seen) = channel();
        for stage in [Stage::Host, Stage::Gpu, Stage::Load] {
            tell.send(Seen::Stage(stage, Box::new(nothing())))
                .expect("received");
        }
        tell.send(Seen::All(Box::new(healthy_node())))
            .expect("received");
        let mut stages = Vec::new();
        let facts = follow_to_end(&seen, &Interrupt::default(), &mut |told| {
            if let Progress::Stage(stage, _) = told {
                stages.push(stage);
            }
        });
        assert_eq!(stages, [Stage::Host, Stage::Gpu, Stage::Load]);
        assert_eq!(facts, healthy_node());
    }

    #[test]
    fn a_probe_that_is_stuck_is_left_behind_once_a_signal_came() {
        let (tell, seen) = channel();
        tell.send(Seen::Stage(Stage::Host, Box::new(healthy_node())))
            .expect("received");
        let interrupt = Interrupt::default();
        interrupt.request(15);
        let facts = follow_to_end(&seen, &interrupt, &mut |_| {});
        assert_eq!(
            facts.interrupted.as_deref(),
            Some("signal 15 (SIGTERM), while stage gpu was stuck")
        );
        assert_eq!(
            facts.gpus.len(),
            8,
            "the facts of the stage before are kept"
        );
    }

    #[test]
    fn probes_that_panic_leave_the_facts_before() {
        let (tell, seen) = channel();
        tell.send(Seen::Stage(Stage::Gpu, Box::new(healthy_node())))
            .expect("received");
        drop(tell);
        let facts = follow_to_end(&seen, &Interrupt::default(), &mut |_| {});
        assert_eq!(
            facts.interrupted.as_deref(),
            Some("the probes of stage load panicked")
        );
    }

    #[test]
    fn only_simulated_facts_are_refused() {
        let mut facts = healthy_node();
        refuse_simulated(&mut facts, true);
        assert_eq!(facts.interrupted, None);
        facts.simulated = Some("one healthy H200".to_owned());
        refuse_simulated(&mut facts, false);
        assert_eq!(facts.interrupted, None);
        refuse_simulated(&mut facts, true);
        assert!(facts.interrupted.is_some());
    }
}
