//! `gpu-validator allocation`: many processes share the GPUs, and must leave nothing.

use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use super::burn::chosen_gpus;
use super::burn_options::{ALLOCATION_MEMORY, BurnDuration, WorkerMemory};
use super::report_files::{ClaimedOutputs, ReportFiles};
use super::report_options::ReportOptions;
use super::run::{probe_options, refuse_simulated, stop_on_signals, watch};
use super::running_burns::RuntimeFolder;
use super::terminal::to_stderr;
use crate::interrupt::Interrupt;
use crate::plan::{AllocationOptions, AllocationProgress, LayoutOptions};
use crate::probe::ProbeOptions;
use crate::session::SessionOptions;
use validator_core::facts::{Facts, Layout};
use validator_core::findings::{ExitStatus, Run};
use validator_core::level::Level;
use validator_core::report::{allocation_table, layouts_table};

/// Share the GPUs among many processes, and verify that each gets its own and that nothing is left
///
/// Workers are real processes, each with one GPU, in turn. They allocate memory, compute, verify
/// every word, free, and repeat. Then one GPU is compared with all of them, a worker requests more
/// memory than is free, and half of the workers are killed. Ctrl-C stops within a second and
/// reports what was measured.
#[derive(Debug, clap::Args)]
#[command(after_long_help = crate::commands::EXIT_CODES)]
pub(crate) struct Arguments {
    /// Start COMMAND under each of these layouts instead of workers: single, all, subset, none
    ///
    /// `single` gives it the last GPU, `subset` every other one, `none` no GPU, so that it must
    /// fall back to the CPU.
    #[arg(
        long,
        value_name = "LIST",
        value_enum,
        value_delimiter = ',',
        requires = "command",
        conflicts_with_all = ["workers", "duration", "minimum_success"]
    )]
    layouts: Vec<LayoutName>,
    /// How long COMMAND may run under each layout: 90s, 5m
    #[arg(long, value_name = "TIME", default_value = "10m", requires = "command")]
    time_limit: BurnDuration,
    /// Your own command, under every layout unless --layouts names some
    #[arg(
        last = true,
        value_name = "COMMAND",
        conflicts_with_all = ["workers", "duration", "minimum_success"]
    )]
    command: Vec<OsString>,
    /// Workers, on all GPUs together [default: two for each GPU]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=WORKERS_MAXIMUM))]
    workers: Option<u32>,
    /// How long all workers work: 90s, 5m. The phases after that take half as long again
    #[arg(long, value_name = "TIME", default_value = "60s")]
    duration: BurnDuration,
    /// Memory that each worker allocates, again and again: 256MiB, 1GiB
    #[arg(long, value_name = "SIZE", default_value = ALLOCATION_MEMORY, env = "GPU_VALIDATOR_ALLOCATION_MEMORY")]
    memory: WorkerMemory,
    /// Share of the workers that must succeed, in percent
    #[arg(long, value_name = "PERCENT", default_value = "100")]
    minimum_success: Percent,
    /// Only these GPUs, by UUID or PCI address; by default all that CUDA_VISIBLE_DEVICES leaves
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    gpu: Vec<String>,
    /// Test a GPU although other processes use it
    #[arg(long)]
    share: bool,
    /// Has no effect: the test removes everything that it makes, with and without this option
    #[arg(long, hide = true)]
    cleanup: bool,
    #[command(flatten)]
    report: ReportOptions,
    /// Write what was seen, so that `gpu-validator judge` can judge it again; `-` for standard
    /// output
    #[arg(long, value_name = "FILE", env = "GPU_VALIDATOR_FACTS")]
    facts: Option<PathBuf>,
    /// Read the host's files below this folder
    #[arg(long, value_name = "DIR")]
    sysroot: Option<PathBuf>,
    /// Deadlines of driver calls times this: tests in which a driver hangs need not wait as long as
    /// a real GPU may take
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, hide = true)]
    deadline_scale: f64,
}

/// A layout by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum LayoutName {
    Single,
    All,
    Subset,
    None,
}

impl From<LayoutName> for Layout {
    fn from(name: LayoutName) -> Self {
        match name {
            LayoutName::Single => Self::Single,
            LayoutName::All => Self::All,
            LayoutName::Subset => Self::Subset,
            LayoutName::None => Self::None,
        }
    }
}

/// NVML lists 950 processes of a GPU at most.
// Source: NVIDIA/open-gpu-kernel-modules, ctrl2080gpu.h.
const WORKERS_MAXIMUM: i64 = 950;
/// The checks of the test are judged from here on.
const LEVEL: Level = Level::Extended;

/// From 0 to 100.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Percent(f64);

impl FromStr for Percent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.trim_end_matches('%').parse::<f64>();
        let valid = number.ok().filter(|it| (0.0..=100.0).contains(it));
        valid
            .map(Self)
            .ok_or_else(|| "a share is a number from 0 to 100".to_owned())
    }
}

pub(crate) fn allocation(arguments: &Arguments) -> anyhow::Result<ExitStatus> {
    let interrupt = stop_on_signals()?;
    let _outputs = ClaimedOutputs::of(&arguments.report, arguments.facts.as_deref(), &[])?;
    let (profile, profile_name) = arguments.report.profile()?;
    let folder = RuntimeFolder::open()?;
    let mut probe = probe_options(LEVEL, arguments.sysroot.clone(), &profile);
    probe.deadlines = probe.deadlines.scaled(arguments.deadline_scale);
    let session = SessionOptions::from(probe.clone());
    let mut files = ReportFiles::new(&arguments.report, arguments.facts.as_deref());
    let judged = |facts| Run::judged(facts, &profile, &profile_name, LEVEL);
    let not_tested = |facts: &Facts| Facts {
        interrupted: Some("the allocation test did not end".to_owned()),
        ..facts.clone()
    };
    // A report of an earlier run must not be taken for this one's when this one dies at once.
    files.write(&judged(not_tested(&Facts {
        level: LEVEL,
        ..Facts::default()
    })));
    let mut facts = watch(session, &interrupt, &mut |_, facts| {
        files.write(&judged(not_tested(facts)));
    });
    if facts.interrupted.is_none() {
        files.write(&judged(not_tested(&facts)));
        let gpus = chosen_gpus(&arguments.gpu, &facts)?;
        // A burn and this test would only measure one another.
        let _locks = folder.lock(&tested_gpus(&gpus, &facts))?;
        if arguments.command.is_empty() {
            test_workers(arguments, gpus, &probe, &mut facts, &interrupt);
        } else {
            test_command(arguments, gpus, &probe, &mut facts, &interrupt);
        }
        crate::session::read_after_load(&probe, &interrupt, &mut facts);
    }
    refuse_simulated(&mut facts, arguments.report.refuses_simulated());
    let run = judged(facts);
    to_stderr(&allocation_table(&run.facts));
    to_stderr(&layouts_table(&run.facts));
    files.finish(&run, &arguments.report);
    Ok(run.exit_status())
}

fn test_workers(
    arguments: &Arguments,
    gpus: Vec<String>,
    probe: &ProbeOptions,
    facts: &mut Facts,
    interrupt: &Interrupt,
) {
    let options = AllocationOptions {
        gpus,
        workers: arguments.workers,
        minimum_success_percent: arguments.minimum_success.0,
        ..AllocationOptions::lasting(arguments.duration.0, arguments.memory.0, arguments.share)
    };
    let mut view = LiveLine::new();
    let mut on_progress = |progress: &AllocationProgress| view.show(&in_words(progress));
    crate::session::allocation::test_allocation(
        &options,
        probe,
        facts,
        interrupt,
        &mut on_progress,
    );
}

fn test_command(
    arguments: &Arguments,
    gpus: Vec<String>,
    probe: &ProbeOptions,
    facts: &mut Facts,
    interrupt: &Interrupt,
) {
    let named: Vec<Layout> = arguments.layouts.iter().map(|it| (*it).into()).collect();
    let options = LayoutOptions {
        command: arguments.command.clone(),
        layouts: if named.is_empty() {
            Layout::EACH.to_vec()
        } else {
            named
        },
        gpus,
        time_limit: arguments.time_limit.0,
        share: arguments.share,
    };
    let mut view = LiveLine::new();
    let mut on_layout = |layout: Layout| view.show(&format!("layout {}", layout.name()));
    crate::session::allocation::test_layouts(&options, probe, facts, interrupt, &mut on_layout);
}

fn tested_gpus(chosen: &[String], facts: &Facts) -> Vec<String> {
    if !chosen.is_empty() {
        return chosen.to_vec();
    }
    let uuids = facts.gpus.iter().filter_map(|gpu| gpu.uuid.value());
    uuids.cloned().collect()
}

/// One line on a terminal while the test runs; nothing where standard error is no terminal.
struct LiveLine {
    is_terminal: bool,
    shown: Option<Instant>,
}

impl LiveLine {
    const ERASE: &str = "\r\u{1b}[2K";
    const PERIOD: Duration = Duration::from_millis(100);

    fn new() -> Self {
        Self {
            is_terminal: std::io::stderr().is_terminal(),
            shown: None,
        }
    }

    fn show(&mut self, text: &str) {
        let is_due = self.shown.is_none_or(|it| it.elapsed() >= Self::PERIOD);
        if self.is_terminal && is_due {
            self.shown = Some(Instant::now());
            to_stderr(&format!("{}{text}", Self::ERASE));
        }
    }
}

impl Drop for LiveLine {
    fn drop(&mut self) {
        if self.is_terminal {
            to_stderr(Self::ERASE);
        }
    }
}

fn in_words(progress: &AllocationProgress) -> String {
    let AllocationProgress {
        phase,
        workers,
        operations,
        failures,
        left,
    } = progress;
    let left = left.as_secs_f64();
    format!(
        "{}: {workers} workers, {operations} operations, {failures} failures, {left:.0} s left",
        validator_core::allocation::phase_name(*phase)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use validator_core::facts::AllocationPhase;

    #[test]
    fn shares_are_read_and_nonsense_is_refused() {
        let percent = |text: &str| text.parse::<Percent>().map(|it| it.0);
        assert_eq!(percent("80"), Ok(80.0));
        assert_eq!(percent("99.5%"), Ok(99.5));
        assert!(percent("101").is_err() && percent("NaN").is_err() && percent("").is_err());
    }

    #[test]
    fn the_line_names_the_phase_and_sums_up_the_workers() {
        let progress = AllocationProgress {
            phase: AllocationPhase::Steady,
            workers: 16,
            operations: 1234,
            failures: 1,
            left: Duration::from_secs(42),
        };
        assert_eq!(
            in_words(&progress),
            "steady: 16 workers, 1234 operations, 1 failures, 42 s left"
        );
    }
}
