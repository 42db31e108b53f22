//! `gpu-validator burn`: work every GPU at its power limit and verify every product.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::bail;

use super::burn_options::{BurnDuration, BurnMemory};
use super::report_files::ReportFiles;
use super::report_options::ReportOptions;
use super::run::{probe_options, refuse_simulated, stop_on_signals, watch};
use super::terminal::to_stderr;
use crate::facts::{Facts, Precision};
use crate::findings::{ExitStatus, Run};
use crate::level::Level;
use crate::probe::{BurnOptions, BurnProgress, BurnState, EngineChoice};

/// Work every GPU at its power limit and verify every product
///
/// Looks at the machine as `run` does, then multiplies matrices on every GPU at once with nothing but the driver. The
/// reference product is proved with exact operands, by Freivalds' check and by rows that the host computes; every element
/// of every product is then compared with it. Ctrl-C stops within a second and reports what was measured.
#[derive(Debug, clap::Args)]
#[command(after_long_help = crate::cli::EXIT_CODES)]
pub(crate) struct Arguments {
    /// How long to multiply, all precisions together: 90s, 5m, 1h
    #[arg(long, value_name = "TIME", default_value = "60s")]
    duration: BurnDuration,
    /// What to multiply, one after another; by default what heats a GPU most
    #[arg(long, value_name = "LIST", value_enum, value_delimiter = ',')]
    precision: Vec<Precision>,
    /// Only these GPUs, by UUID or PCI address; by default all that CUDA_VISIBLE_DEVICES leaves
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    gpu: Vec<String>,
    /// Memory that is filled with results, of what is free: 80%, 2GiB
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "95%",
        env = "GPU_VALIDATOR_BURN_MEMORY"
    )]
    memory: BurnMemory,
    /// Seed of the operands; the same seed gives the same bits on GPUs of one model
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
    /// Who multiplies
    #[arg(long, value_enum, default_value = "auto")]
    engine: EngineChoice,
    /// Burn a GPU although other processes use it
    #[arg(long)]
    share: bool,
    /// Flip so many bits of the results between product and check, each in a product of its own
    #[arg(long, value_name = "COUNT", default_value_t = 0, hide = true)]
    inject: u32,
    #[command(flatten)]
    report: ReportOptions,
    /// Write what was seen, so that `gpu-validator judge` can judge it again; `-` for standard output
    #[arg(long, value_name = "FILE", env = "GPU_VALIDATOR_FACTS")]
    facts: Option<PathBuf>,
    /// Read the host's files below this folder
    #[arg(long, value_name = "DIR")]
    sysroot: Option<PathBuf>,
}

/// The checks of the load stage are judged from here on.
const LEVEL: Level = Level::Standard;

pub(crate) fn burn(arguments: &Arguments) -> anyhow::Result<ExitStatus> {
    let (profile, profile_name) = arguments.report.profile()?;
    let interrupt = stop_on_signals()?;
    let probe = probe_options(LEVEL, arguments.sysroot.clone(), &profile);
    let mut files = ReportFiles::new(&arguments.report, arguments.facts.as_deref());
    let judged = |facts| Run::judged(facts, &profile, &profile_name, LEVEL);
    let not_burned = |facts: &Facts| Facts {
        interrupted: Some("the burn did not end".to_owned()),
        ..facts.clone()
    };

    // A report of an earlier run must not be taken for this one's when this one dies at once.
    files.write(&judged(not_burned(&Facts {
        level: LEVEL,
        ..Facts::default()
    })));
    let mut facts = watch(probe.clone(), &interrupt, &mut |_, facts| {
        files.write(&judged(not_burned(facts)));
    });
    if facts.interrupted.is_none() {
        files.write(&judged(not_burned(&facts)));
        let options = BurnOptions {
            duration: arguments.duration.0,
            precisions: arguments.precision.clone(),
            gpus: chosen_gpus(&arguments.gpu, &facts)?,
            memory: arguments.memory.0,
            share: arguments.share,
            inject: arguments.inject,
            seed: arguments.seed,
            engine: arguments.engine,
        };
        let mut lines = ProgressLines::default();
        crate::load::burn::burn(&options, &probe, &mut facts, &interrupt, &mut |gpus| {
            lines.show(gpus);
        });
    }
    refuse_simulated(&mut facts, arguments.report.forbid_simulated);
    let run = judged(facts);
    to_stderr(&summary(&run.facts));
    files.finish(&run, &arguments.report);
    Ok(run.exit_status())
}

/// The UUIDs of the GPUs that were named; without names, of those that `CUDA_VISIBLE_DEVICES` leaves where it is set.
fn chosen_gpus(named: &[String], facts: &Facts) -> anyhow::Result<Vec<String>> {
    if named.is_empty() {
        let visible = crate::load::burn::visible_gpus(facts).map_err(anyhow::Error::msg)?;
        return Ok(visible.unwrap_or_default());
    }
    named.iter().map(|name| uuid_of(name, facts)).collect()
}

fn uuid_of(name: &str, facts: &Facts) -> anyhow::Result<String> {
    let lower = name.to_lowercase();
    let same = |gpu: &&crate::facts::GpuFacts| {
        let address = gpu.pci_address.value().map_or("", String::as_str);
        let uuid = gpu.uuid.value().map_or("", String::as_str);
        uuid.eq_ignore_ascii_case(name)
            || address == lower
            || (!address.is_empty() && format!("0000:{lower}") == address)
    };
    if let Some(uuid) = facts
        .gpus
        .iter()
        .find(same)
        .and_then(|gpu| gpu.uuid.value())
    {
        return Ok(uuid.clone());
    }
    let known: Vec<String> = facts
        .gpus
        .iter()
        .filter_map(|gpu| gpu.uuid.value().cloned())
        .collect();
    bail!("no GPU {name}; there are: {}", known.join(", "))
}

/// Plain lines on standard error, every five seconds.
#[derive(Default)]
struct ProgressLines {
    shown: Option<Instant>,
}

impl ProgressLines {
    const PERIOD: Duration = Duration::from_secs(5);

    fn show(&mut self, gpus: &[BurnProgress]) {
        let running = gpus.iter().any(|it| it.state == BurnState::Running);
        let due = match self.shown {
            None => running,
            Some(shown) => shown.elapsed() >= Self::PERIOD,
        };
        if due {
            self.shown = Some(Instant::now());
            for gpu in gpus {
                to_stderr(&progress_line(gpu));
            }
        }
    }
}

fn progress_line(gpu: &BurnProgress) -> String {
    use std::fmt::Write as _;
    let state = match gpu.state {
        BurnState::Starting => "starting",
        BurnState::Running => "running",
        BurnState::Ended => "ended",
    };
    let mut line = format!("{} {state}", gpu.uuid);
    // Writing to a string does not fail.
    if let Some(precision) = gpu.precision {
        let _ = write!(
            line,
            " {precision} {:.1} TFLOP/s (mean {:.1}), {} products verified, {} mismatches, {:.1} GiB",
            gpu.tflops_now,
            gpu.tflops_mean,
            gpu.products_verified,
            gpu.mismatches,
            gibibytes(gpu.memory_bytes),
        );
    }
    if let Some(sensors) = gpu.sensors {
        if let Some(power) = sensors.power_mw {
            let _ = write!(line, ", {} W", power / 1000);
        }
        if let Some(clock) = sensors.sm_mhz {
            let _ = write!(line, ", {clock} MHz");
        }
        if let Some(degrees) = sensors.gpu_c {
            let _ = write!(line, ", {degrees} °C");
        }
    }
    let _ = writeln!(line, ", {:.0} s left", gpu.remaining_s);
    line
}

#[expect(clippy::cast_precision_loss, reason = "one digit is shown")]
fn gibibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

/// What each GPU did, one line for each precision.
fn summary(facts: &Facts) -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    for (uuid, run) in &facts.load.burn {
        let Some(run) = run.value() else { continue };
        for products in &run.precisions {
            let _ = writeln!(
                text,
                "{uuid} {}: {:.1} TFLOP/s, {} of {} products of {} x {} x {} verified, {} mismatches, {:.1} s, {:.1} GiB",
                products.precision,
                products.tflops,
                products.products_verified,
                products.products,
                products.m,
                products.n,
                products.k,
                products.mismatches,
                products.gpu_time_s,
                gibibytes(run.memory_used_bytes),
            );
        }
        for note in &run.notes {
            let _ = writeln!(text, "{uuid}: {note}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_machine::healthy_node;

    #[test]
    fn gpus_are_named_by_uuid_or_address() {
        let facts = healthy_node();
        let uuid = facts.gpus[2].uuid.value().cloned().unwrap_or_default();
        let address = facts.gpus[2]
            .pci_address
            .value()
            .cloned()
            .unwrap_or_default();
        let short = address.trim_start_matches("0000:").to_uppercase();
        for name in [uuid.clone(), address, short] {
            let chosen = chosen_gpus(&[name], &facts).expect("known");
            assert_eq!(chosen, std::slice::from_ref(&uuid));
        }
        let error = chosen_gpus(&["GPU-x".to_owned()], &facts).expect_err("unknown");
        assert!(
            error
                .to_string()
                .starts_with("no GPU GPU-x; there are: GPU-")
        );
    }

    #[test]
    fn a_line_says_what_a_gpu_does() {
        let gpu = BurnProgress {
            uuid: "GPU-a".to_owned(),
            state: BurnState::Running,
            precision: Some(Precision::Bf16),
            tflops_now: 660.4,
            tflops_mean: 661.2,
            products_verified: 300,
            mismatches: 0,
            elapsed_s: 1.0,
            remaining_s: 9.0,
            memory_bytes: 1 << 31,
            sensors: Some(crate::facts::SensorSample {
                power_mw: Some(698_200),
                ..crate::facts::SensorSample::default()
            }),
        };
        assert_eq!(
            progress_line(&gpu),
            "GPU-a running bf16 660.4 TFLOP/s (mean 661.2), 300 products verified, 0 mismatches, 2.0 GiB, 698 W, 9 s left\n"
        );
    }
}
