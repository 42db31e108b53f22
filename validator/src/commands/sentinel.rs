//! `gpu-validator sentinel`: work idle GPUs, and yield them at once to anyone else.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};

use super::burn::chosen_gpus;
use super::burn_options::BurnMemory;
use super::run::{probe_options, stop_on_signals};
use super::simulated_ok;
use super::terminal::{to_stderr, to_stdout};
use crate::plan::MemoryShare;
use crate::probe::ProbeOptions;
use crate::runtime_folder;
use crate::sentinel_requests::{self, Named};
use crate::session::sentinel::{SentinelGpu, SentinelOptions};
use crate::workload::Task;
use crate::workload::check::CheckTask;
use crate::workload::gemm::rotation::GemmTask;
use crate::workload::memory::MemoryTask;
use crate::workload::reserve::ReserveTask;
use validator_core::facts::Reading;
use validator_core::findings::ExitStatus;
use validator_core::level::Level;
use validator_core::profile::Profile;
use validator_core::report::sentinel_junit;
use validator_core::sentinel::policy::{Settings, State};
use validator_core::sentinel::status::Status;

const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// Time in which the sentinel frees the GPUs for `pause --wait`, before that fails.
const PAUSE_PATIENCE: Duration = Duration::from_secs(10);
/// From one check kernel to the next.
const CHECK_INTERVAL_S: f64 = 1.0;

/// Work idle GPUs with verified computations, and yield them at once to other processes
///
/// One worker a GPU. A GPU is worked after it was idle for the grace time; when another process
/// starts to use it, the worker stops, frees its memory and ends. No process but the own workers is
/// ever signalled. Ctrl-C stops within a second.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Option<SentinelCommand>,
    /// What the workers do
    #[arg(
        long,
        value_enum,
        default_value_t,
        env = "GPU_VALIDATOR_SENTINEL_WORKLOAD"
    )]
    workload: SentinelWorkload,
    /// Memory that a worker holds, of what is free: 88%, 2GiB; the check kernel needs no more than a
    /// few MiB and takes no more
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "2GiB",
        env = "GPU_VALIDATOR_SENTINEL_MEMORY"
    )]
    memory: BurnMemory,
    /// Only these GPUs, by UUID or PCI address; by default all that CUDA_VISIBLE_DEVICES leaves
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    gpu: Vec<String>,
    /// Largest share of a GPU's power limit: 60%
    #[arg(
        long,
        value_name = "PERCENT",
        value_parser = percent,
        env = "GPU_VALIDATOR_SENTINEL_MAX_POWER"
    )]
    max_power: Option<f64>,
    /// Time for which a GPU is idle before it is worked: 10s, 5m
    #[arg(
        long,
        value_name = "TIME",
        value_parser = time,
        default_value = "10s",
        env = "GPU_VALIDATOR_SENTINEL_GRACE"
    )]
    grace: Duration,
    /// Time without another process before a GPU that was yielded is worked again
    #[arg(
        long,
        value_name = "TIME",
        value_parser = time,
        default_value = "30s",
        env = "GPU_VALIDATOR_SENTINEL_QUIET"
    )]
    quiet: Duration,
    /// Workers that are started on a GPU within an hour, at most
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 20,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    starts_an_hour: u32,
    /// Write the status as JSON, each second
    #[arg(long, value_name = "FILE", env = "GPU_VALIDATOR_SENTINEL_STATUS")]
    status_file: Option<PathBuf>,
    /// Write metrics for Prometheus, each second
    #[arg(long, value_name = "FILE", env = "GPU_VALIDATOR_SENTINEL_METRICS")]
    metrics_file: Option<PathBuf>,
    /// Accept simulated driver libraries, as in tests
    #[arg(long)]
    simulated_ok: bool,
    /// Read the host's files below this folder
    #[arg(long, value_name = "DIR")]
    sysroot: Option<PathBuf>,
}

/// The sentinel that runs on this machine.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum SentinelCommand {
    /// Show the state of every GPU; fails where no sentinel runs
    Status,
    /// Stop the sentinel; returns when the GPUs' memory is free
    Stop,
    /// Have the sentinel leave GPUs until `resume`; also before it is started
    Pause {
        /// Only these GPUs, by UUID
        #[arg(long, value_name = "LIST", value_delimiter = ',')]
        gpu: Vec<String>,
        /// Return when the GPUs are free of the sentinel
        #[arg(long)]
        wait: bool,
    },
    /// Lift the pause
    Resume {
        /// Only of these GPUs, by UUID
        #[arg(long, value_name = "LIST", value_delimiter = ',')]
        gpu: Vec<String>,
    },
    /// Report the state as JUnit, a test case a GPU; exit code 1 where one is faulty
    Report {
        /// Where to write it; `-` for standard output
        #[arg(long, value_name = "FILE")]
        junit: PathBuf,
    },
}

/// What the workers do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum SentinelWorkload {
    /// Write a pattern and its inverse to the memory and compare every word, again and again
    #[default]
    Memory,
    /// Multiply matrices in every precision of the GPU in turn, and compare every element
    Gemm,
    /// Run the check kernel each second and compare every word; it takes little memory and power
    Check,
    /// Hold the memory and compute nothing
    Reserve,
}

pub(crate) fn sentinel(arguments: &Arguments) -> anyhow::Result<ExitStatus> {
    match &arguments.command {
        None => work(arguments),
        Some(SentinelCommand::Status) => status(),
        Some(SentinelCommand::Stop) => stop(),
        Some(SentinelCommand::Pause { gpu, wait }) => pause(gpu, *wait),
        Some(SentinelCommand::Resume { gpu }) => {
            sentinel_requests::resume(&runtime_folder::open()?, gpu)?;
            Ok(ExitStatus::Passed)
        }
        Some(SentinelCommand::Report { junit }) => report(junit),
    }
}

fn work(arguments: &Arguments) -> anyhow::Result<ExitStatus> {
    let interrupt = stop_on_signals()?;
    let folder = runtime_folder::open()?;
    let lock = sentinel_requests::lock(&folder)?;
    let probe = probe_options(Level::Quick, arguments.sysroot.clone(), &Profile::default());
    let (gpus, simulated) = visible(&arguments.gpu, &probe, &interrupt)?;
    if simulated.is_some() && !arguments.simulated_ok && !simulated_ok::by_root() {
        to_stderr("the driver libraries are simulated, which only --simulated-ok accepts\n");
        return Ok(ExitStatus::NotJudged);
    }
    let options = SentinelOptions {
        settings: Settings {
            grace: arguments.grace,
            quiet: arguments.quiet,
            starts_an_hour: usize::try_from(arguments.starts_an_hour).unwrap_or(usize::MAX),
        },
        task: task_of(arguments)?,
        memory: arguments.memory.0,
        power_percent: arguments.max_power,
        probe,
        status_file: arguments.status_file.clone(),
        metrics_file: arguments.metrics_file.clone(),
    };
    let mut log = |line: &str| {
        let line = validator_core::report::one_line(line);
        to_stdout(&format!("{line}\n"));
    };
    log(&format!("watching {} GPUs", gpus.len()));
    let status =
        crate::session::sentinel::watch(&options, gpus, simulated, &folder, &interrupt, &mut log)?;
    log("stopped");
    drop(lock);
    Ok(exit_status(&status))
}

/// The task of the workers.
fn task_of(arguments: &Arguments) -> anyhow::Result<Task> {
    let seed = u64::from(std::process::id());
    Ok(match arguments.workload {
        SentinelWorkload::Memory => Task::Memory(MemoryTask { seed }),
        SentinelWorkload::Gemm => {
            if let MemoryShare::Bytes(bytes) = arguments.memory.0
                && bytes < GemmTask::MEMORY_MINIMUM_BYTES
            {
                bail!("--memory: workload gemm needs 4MiB at least, not {bytes} bytes");
            }
            Task::Gemm(GemmTask {
                seed,
                ..GemmTask::default()
            })
        }
        SentinelWorkload::Check => Task::Check(CheckTask {
            interval_s: CHECK_INTERVAL_S,
        }),
        SentinelWorkload::Reserve => Task::Reserve(ReserveTask {}),
    })
}

fn exit_status(status: &Status) -> ExitStatus {
    let is_faulty = status.gpus.iter().any(|it| it.finding.is_some());
    if is_faulty {
        ExitStatus::Failed
    } else {
        ExitStatus::Passed
    }
}

/// The GPUs to watch, and the scenario of simulated libraries.
fn visible(
    named: &[String],
    probe: &ProbeOptions,
    interrupt: &crate::interrupt::Interrupt,
) -> anyhow::Result<(Vec<SentinelGpu>, Option<String>)> {
    let mut facts = crate::probe::gpus(probe, interrupt);
    if let Ok(list) = std::env::var(VISIBLE_DEVICES) {
        // CUDA's own answer: numbers in the list count in its order, which is not NVML's.
        facts.host.environment = Reading::Value([(VISIBLE_DEVICES.to_owned(), list)].into());
        let probe_cuda = || crate::probe::cuda::probe(probe, interrupt);
        let (outcome, milliseconds) = crate::timed::timed(probe_cuda);
        outcome.add_to(milliseconds, &mut facts);
    }
    let chosen = chosen_gpus(named, &facts)?;
    let mut gpus = Vec::new();
    for (number, gpu) in facts.gpus.iter().enumerate() {
        let Some(uuid) = gpu.uuid.value().cloned() else {
            continue;
        };
        if chosen.is_empty() || chosen.contains(&uuid) {
            gpus.push(SentinelGpu {
                name: format!("GPU {number}"),
                uuid,
                facts: gpu.clone(),
            });
        }
    }
    if gpus.is_empty() {
        bail!("NVML shows no GPU to watch");
    }
    Ok((gpus, facts.simulated))
}

fn status() -> anyhow::Result<ExitStatus> {
    let Some(status) = the_running_one()? else {
        to_stdout("no sentinel is running\n");
        return Ok(ExitStatus::NotJudged);
    };
    to_stdout(&status.text());
    Ok(exit_status(&status))
}

fn the_running_one() -> anyhow::Result<Option<Status>> {
    Ok(sentinel_requests::running(&runtime_folder::open()?))
}

fn stop() -> anyhow::Result<ExitStatus> {
    let folder = runtime_folder::open()?;
    let Some(status) = sentinel_requests::running(&folder) else {
        to_stdout("no sentinel is running\n");
        return Ok(ExitStatus::Passed);
    };
    let how = super::running_burns::stop_process(status.pid, status.started_ticks)?;
    to_stdout(&format!("process {} {how}\n", status.pid));
    Ok(ExitStatus::Passed)
}

fn pause(gpus: &[String], wait: bool) -> anyhow::Result<ExitStatus> {
    let folder = runtime_folder::open()?;
    sentinel_requests::pause(&folder, gpus)?;
    let named = Named(gpus.to_vec());
    if wait && !sentinel_requests::wait_until_clear(&folder, &named, PAUSE_PATIENCE) {
        to_stderr("the sentinel has not freed the GPUs within 10 s\n");
        return Ok(ExitStatus::NotJudged);
    }
    Ok(ExitStatus::Passed)
}

fn report(junit: &Path) -> anyhow::Result<ExitStatus> {
    let Some(status) = the_running_one()? else {
        to_stderr("no sentinel is running\n");
        return Ok(ExitStatus::NotJudged);
    };
    let text = sentinel_junit(&status)?;
    if junit.as_os_str() == "-" {
        to_stdout(&text);
    } else {
        super::report_files::write_whole(junit, text.as_bytes())
            .with_context(|| format!("cannot write {}", junit.display()))?;
    }
    let is_unknown = |it: &validator_core::sentinel::status::GpuStatus| it.state == State::Unknown;
    if status.gpus.iter().any(is_unknown) {
        return Ok(ExitStatus::NotJudged);
    }
    Ok(exit_status(&status))
}

/// A time as `10s`, `5m`, `1h`; a number alone is seconds.
fn time(text: &str) -> Result<Duration, String> {
    let (number, factor) = match text.char_indices().last() {
        Some((at, 's')) => (&text[..at], 1.0),
        Some((at, 'm')) => (&text[..at], 60.0),
        Some((at, 'h')) => (&text[..at], 3600.0),
        _ => (text, 1.0),
    };
    let seconds = number.parse::<f64>().ok().map(|it| it * factor);
    let is_sensible = |it: &f64| (0.0..=86400.0).contains(it);
    seconds
        .filter(is_sensible)
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "a time is a number and s, m or h, a day at most: 10s".to_owned())
}

fn percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').and_then(|it| it.parse::<f64>().ok());
    number
        .filter(|it| *it > 0.0 && *it <= 100.0)
        .ok_or_else(|| "a share is more than 0% and at most 100%".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_shares_are_read_with_their_unit() {
        assert_eq!(time("10s"), Ok(Duration::from_secs(10)));
        assert_eq!(time("0.1"), Ok(Duration::from_millis(100)));
        assert_eq!(time("5m"), Ok(Duration::from_mins(5)));
        for nonsense in ["", "s", "-1s", "NaN", "25h", "π"] {
            assert!(time(nonsense).is_err(), "{nonsense}");
        }
        assert_eq!(percent("60%"), Ok(60.0));
        for nonsense in ["60", "0%", "101%", "NaN%"] {
            assert!(percent(nonsense).is_err(), "{nonsense}");
        }
    }
}
