//! `gpu-validator burn`: work every GPU at its power limit and verify every product.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::bail;

use super::burn_options::{BurnDuration, BurnMemory, gibibytes};
use super::burn_view::BurnView;
use super::report_files::{ClaimedOutputs, ReportFiles};
use super::report_options::ReportOptions;
use super::run::{probe_options, refuse_missing_sysroot, refuse_simulated, stop_on_signals, watch};
use super::running_burns::{
    EndedBurn, RunningBurn, RuntimeFolder, Stopped, already_burned, start_in_background,
};
use super::terminal::{status_with_output, to_stderr, to_stdout};
use crate::plan::BurnOptions;
use crate::session::SessionOptions;
use crate::session::standby::Standby;
use crate::session::worked_gpus::visible_gpus;
use validator_core::facts::{Facts, Precision};
use validator_core::findings::{ExitStatus, Run};
use validator_core::gpu_names::gpu_named;
use validator_core::level::Level;
use validator_core::plan::EngineChoice;
use validator_core::report::answer_of;

/// Work every GPU at its power limit and verify every product
///
/// Reads the machine as `run` does, then multiplies matrices on every GPU at once with nothing
/// but the driver. The reference product is proved with exact operands, by Freivalds' check and by
/// rows that the host computes; every element of every product is then compared with it. Ctrl-C
/// stops within a second and reports what was measured.
#[derive(Debug, clap::Args)]
#[command(after_long_help = crate::commands::EXIT_CODES, args_conflicts_with_subcommands = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Option<BurnCommand>,
    /// How long to multiply, all precisions together: 90s, 5m, 1h
    #[arg(long, value_name = "TIME", default_value = "60s")]
    duration: BurnDuration,
    /// Precisions of the products, one after another; by default what heats a GPU most
    #[arg(long, value_name = "LIST", value_parser = crate::cli_values::precision(), value_delimiter = ',')]
    precision: Vec<Precision>,
    /// Only these GPUs, by index, PCI address or UUID; by default all that CUDA_VISIBLE_DEVICES
    /// leaves
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
    /// GEMM implementation
    #[arg(long, value_parser = crate::cli_values::engine(), default_value = "auto")]
    engine: EngineChoice,
    /// Burn a GPU although other processes use it
    #[arg(long)]
    share: bool,
    /// Burn in the background: returns once the burn began; `burn status` shows it, `burn wait`
    /// waits for its exit code, `burn stop` ends it
    #[arg(long)]
    detach: bool,
    /// This is the process in the background, whose output goes to this file
    #[arg(long, value_name = "FILE", hide = true)]
    in_background: Option<PathBuf>,
    /// Flip so many bits of the results between product and check, each in a product of its own
    #[arg(long, value_name = "COUNT", default_value_t = 0, hide = true)]
    inject: u32,
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

/// Burns in the background.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum BurnCommand {
    /// Show the burns that run on this machine, and the result of the last one that ended
    Status {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Wait until the burns that run on this machine end; exits with the code of the worst of them,
    /// or of the last burn
    Wait,
    /// Stop the burns that run on this machine; returns when the GPUs' memory is free and the
    /// reports are written
    Stop,
}

/// The checks of the load stage are judged from here on.
const LEVEL: Level = Level::Standard;

pub(crate) fn burn(arguments: &Arguments) -> anyhow::Result<ExitStatus> {
    match arguments.command {
        Some(BurnCommand::Status { json }) => status(json),
        Some(BurnCommand::Wait) => wait(),
        Some(BurnCommand::Stop) => stop(),
        None if arguments.detach => detach(arguments),
        None => burn_here(arguments),
    }
}

fn status(json: bool) -> anyhow::Result<ExitStatus> {
    let folder = RuntimeFolder::open()?;
    let running = folder.running();
    let last = folder.last_ended();
    let mut text = String::new();
    if json {
        let status = serde_json::json!({"running": running, "last": last});
        to_stdout(&format!("{status:#}\n"));
        return Ok(ExitStatus::Passed);
    }
    for burn in &running {
        text.push_str(&in_words(burn));
    }
    if running.is_empty() {
        text.push_str("no burn is running\n");
    }
    if let Some(last) = &last {
        text.push_str(&ended_in_words(last));
    }
    to_stdout(&text);
    Ok(ExitStatus::Passed)
}

/// `last burn: process 4711, ended 2026-11-20T03:04:05Z, exit code 0: PASS: node is ready: …`.
fn ended_in_words(burn: &EndedBurn) -> String {
    use validator_core::report::one_line;
    let log = burn.log.as_ref().map_or_else(String::new, |it| {
        format!(", log {}", one_line(&it.display().to_string()))
    });
    format!(
        "last burn: process {}, ended {}, exit code {}{log}\n  {}\n",
        burn.pid,
        one_line(&burn.ended_at),
        burn.exit_code,
        one_line(&burn.answer)
    )
}

fn wait() -> anyhow::Result<ExitStatus> {
    let folder = RuntimeFolder::open()?;
    let running = folder.running();
    let ended: Vec<Option<EndedBurn>> = if running.is_empty() {
        let Some(last) = folder.last_ended() else {
            bail!("no burn is running, and none has ended since the machine started");
        };
        vec![Some(last)]
    } else {
        let ended = running.iter().map(|burn| {
            burn.wait();
            folder.result_of(burn)
        });
        ended.collect()
    };
    for burn in &ended {
        match burn {
            Some(burn) => to_stdout(&ended_in_words(burn)),
            None => to_stdout("a burn ended without a result: it was killed\n"),
        };
    }
    let codes = ended
        .iter()
        .map(|it| it.as_ref().map(|it| i32::from(it.exit_code)));
    let statuses = codes.map(status_of);
    // What is wrong comes before what was not judged, and that before a GPU in use.
    let severity = |it: &ExitStatus| match it {
        ExitStatus::Failed => 4,
        ExitStatus::BadInput => 3,
        ExitStatus::NotJudged => 2,
        ExitStatus::Busy => 1,
        ExitStatus::Passed => 0,
    };
    Ok(statuses
        .max_by_key(severity)
        .unwrap_or(ExitStatus::NotJudged))
}

/// The status of a burn by the exit code of its process.
fn status_of(code: Option<i32>) -> ExitStatus {
    match code {
        Some(0) => ExitStatus::Passed,
        Some(1) => ExitStatus::Failed,
        Some(3) => ExitStatus::BadInput,
        Some(4) => ExitStatus::Busy,
        _ => ExitStatus::NotJudged,
    }
}

fn in_words(burn: &RunningBurn) -> String {
    use std::fmt::Write as _;
    use validator_core::report::one_line;
    let mut text = format!(
        "process {}: {} for {:.0} s",
        burn.pid,
        validator_core::queries::counted(burn.gpus.len(), "GPU"),
        burn.duration_s
    );
    // Writing to a string does not fail.
    if let Some(log) = &burn.log {
        let _ = write!(text, ", log {}", one_line(&log.display().to_string()));
    }
    text.push('\n');
    for line in &burn.progress {
        let _ = writeln!(text, "  {}", one_line(line));
    }
    text
}

fn stop() -> anyhow::Result<ExitStatus> {
    let running = RuntimeFolder::open()?.running();
    if running.is_empty() {
        to_stdout("no burn is running\n");
    }
    for burn in &running {
        let how = match burn.stop()? {
            Stopped::Ended => "stopped, its reports are written",
            Stopped::Killed => "did not stop and was killed; it wrote no final reports",
            Stopped::NotThere => "was over already",
        };
        to_stdout(&format!("process {} {how}\n", burn.pid));
    }
    Ok(ExitStatus::Passed)
}

fn detach(arguments: &Arguments) -> anyhow::Result<ExitStatus> {
    let folder = RuntimeFolder::open()?;
    refuse_second_burn(&folder, &arguments.gpu)?;
    let own = std::env::args_os().skip(1).filter(|it| it != "--detach");
    match start_in_background(&folder, own)? {
        Ok(burn) => {
            to_stdout(&in_words(&burn));
            to_stdout(
                "gpu-validator burn status shows it, burn wait returns its exit code, burn stop ends it\n",
            );
            Ok(ExitStatus::Passed)
        }
        Err((code, said)) => {
            to_stderr(&said);
            Ok(status_of(code))
        }
    }
}

/// Reports it at once where it is plain without a query of the driver; the locks decide.
fn refuse_second_burn(folder: &RuntimeFolder, named: &[String]) -> anyhow::Result<()> {
    for burn in folder.running() {
        let gpu = burn
            .gpus
            .iter()
            .find(|it| named.is_empty() || named.iter().any(|name| it.eq_ignore_ascii_case(name)));
        if let Some(uuid) = gpu {
            return Err(already_burned(uuid, Some(&burn)).into());
        }
    }
    Ok(())
}

fn burn_here(arguments: &Arguments) -> anyhow::Result<ExitStatus> {
    if arguments.in_background.is_some() {
        // A session of its own: the end of the terminal is not the end of the burn.
        let _ = rustix::process::setsid();
    }
    let interrupt = stop_on_signals()?;
    let _outputs = ClaimedOutputs::of(&arguments.report, arguments.facts.as_deref(), &[])?;
    let (profile, profile_name) = arguments.report.profile()?;
    refuse_missing_sysroot(arguments.sysroot.as_deref())?;
    let folder = RuntimeFolder::open()?;
    refuse_second_burn(&folder, &arguments.gpu)?;
    let _claim = crate::sentinel_requests::claim();
    let mut probe = probe_options(LEVEL, arguments.sysroot.clone(), &profile);
    probe.deadlines = probe.deadlines.scaled(arguments.deadline_scale);
    let mut options = BurnOptions {
        duration: arguments.duration.0,
        precisions: arguments.precision.clone(),
        gpus: arguments.gpu.clone(),
        memory: arguments.memory.0,
        share: arguments.share,
        inject: arguments.inject,
        seed: arguments.seed,
        engine: arguments.engine,
    };
    let standby = Arc::new(Standby::new(options.clone()));
    let session = SessionOptions {
        standby: Some(Arc::clone(&standby)),
        ..SessionOptions::from(probe.clone())
    };
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
    let mut facts = watch(session, &interrupt, &mut |_, facts| {
        files.write(&judged(not_burned(facts)));
    });
    // Until the reports are written this burn is not over: the next burn does not start, and status
    // does not report that none runs.
    let mut held = None;
    if facts.interrupted.is_none() {
        files.write(&judged(not_burned(&facts)));
        options.gpus = chosen_gpus(&arguments.gpu, &facts)?;
        let gpus = if options.gpus.is_empty() {
            let uuids = facts
                .gpus
                .iter()
                .filter_map(|gpu| gpu.uuid.value().cloned());
            uuids.collect()
        } else {
            options.gpus.clone()
        };
        let locks = folder.lock(&gpus)?;
        let mut announcement =
            folder.announce(gpus, options.duration, arguments.in_background.clone())?;
        let mut view = BurnView::new(&facts, options.duration);
        crate::session::burn::burn(
            &options,
            &probe,
            &standby,
            &mut facts,
            &interrupt,
            &mut |gpus| {
                announcement.progress(|| view.lines(gpus));
                view.show(gpus);
            },
        );
        crate::session::read_after_load(&probe, &interrupt, &mut facts);
        held = Some((locks, announcement));
    }
    refuse_simulated(&mut facts, arguments.report.refuses_simulated());
    let run = judged(facts);
    to_stderr(&summary(&run.facts));
    files.finish(&run, &arguments.report);
    let status = status_with_output(run.exit_status());
    if let Some((_, announcement)) = &held {
        announcement.ended(status as u8, &answer_of(&run));
    }
    drop(held);
    Ok(status)
}

/// The UUIDs of the GPUs that were named; without names, of those that `CUDA_VISIBLE_DEVICES`
/// leaves where it is set.
pub(super) fn chosen_gpus(named: &[String], facts: &Facts) -> anyhow::Result<Vec<String>> {
    if named.is_empty() {
        let visible = visible_gpus(facts).map_err(anyhow::Error::msg)?;
        return Ok(visible.unwrap_or_default());
    }
    named.iter().map(|name| uuid_of(name, facts)).collect()
}

fn uuid_of(name: &str, facts: &Facts) -> anyhow::Result<String> {
    let gpu = gpu_named(name, facts).map_err(anyhow::Error::msg)?;
    let uuid = gpu.uuid.value().cloned();
    uuid.ok_or_else(|| anyhow::anyhow!("GPU {name}: its UUID could not be read"))
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
        for note in std::iter::once(&run.engine_choice).chain(&run.notes) {
            let _ = writeln!(text, "{uuid}: {note}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use validator_core::facts::Reading;
    use validator_core::test_machine::healthy_node;

    #[test]
    fn a_named_gpu_without_a_uuid_is_refused() {
        let mut facts = healthy_node();
        let uuid = facts.gpus[2].uuid.value().cloned();
        let chosen = chosen_gpus(&["2".to_owned()], &facts).expect("known");
        assert_eq!(chosen.first(), uuid.as_ref());
        facts.gpus[2].uuid = Reading::NotRead("no answer".to_owned());
        let error = chosen_gpus(&["2".to_owned()], &facts).expect_err("no UUID");
        assert_eq!(error.to_string(), "GPU 2: its UUID could not be read");
    }
}
