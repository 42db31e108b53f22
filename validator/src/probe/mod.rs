//! Looks at the machine and fills the facts; nothing else does.
//!
//! A probe never fails: what could not be read is recorded as not read, with the reason. The driver is asked in child
//! processes only (see [`crate::worker`]), so that a call which hangs or crashes costs its own reading and no more.

mod cuda;
mod host;
mod interrupt;
pub(crate) mod libraries;
mod nvml;
mod options;

use std::time::{Instant, SystemTime};

pub(crate) use cuda::run_worker as run_cuda_worker;
pub use interrupt::Interrupt;
pub(crate) use nvml::{NvmlWorker, simulator_scenario};
pub use options::{Deadlines, ProbeOptions};

use crate::facts::{FACTS_FORMAT, Facts};
use crate::level::{Level, Stage};
use nvml::NvmlOutcome;

/// Looks at the machine in three stages and returns what was seen.
///
/// `on_stage` is called at the end of each stage with the facts so far, so that reports can be written although a later
/// stage never returns. A request to stop ends the run early: children are killed, the facts so far are returned, and
/// they say so in [`Facts::interrupted`].
pub fn collect(
    options: &ProbeOptions,
    interrupt: &Interrupt,
    on_stage: &mut dyn FnMut(Stage, &Facts),
) -> Facts {
    let started = Instant::now();
    let mut facts = Facts {
        format: FACTS_FORMAT,
        validator_version: env!("CARGO_PKG_VERSION").to_owned(),
        collected_at: rfc3339_utc(SystemTime::now()),
        level: options.level,
        ..Facts::default()
    };
    // The driver is slow to answer and the host's files are not, so all three are asked at the same time.
    std::thread::scope(|scope| {
        let nvml = scope.spawn(|| timed(|| nvml::probe(options, interrupt)));
        let cuda = scope.spawn(|| timed(|| cuda::probe(options, interrupt)));
        let (host, host_ms) = timed(|| host::probe(options, interrupt));
        facts.host = host;
        facts.timings_ms.insert("host".to_owned(), host_ms);
        facts.interrupted = interrupt.reason();
        on_stage(Stage::Host, &facts);
        add_nvml(&mut facts, nvml.join());
        add_cuda(&mut facts, cuda.join());
    });
    facts.interrupted = interrupt.reason();
    on_stage(Stage::Gpu, &facts);
    if options.level >= Level::Standard && facts.interrupted.is_none() {
        let (runs, load_ms) =
            timed(|| crate::load::cuda_kernel::run_on_all_gpus(options, interrupt, &facts));
        facts.load.cuda_kernel = runs;
        facts.timings_ms.insert("load".to_owned(), load_ms);
        facts.interrupted = interrupt.reason();
    }
    facts
        .timings_ms
        .insert("total".to_owned(), milliseconds_since(started));
    on_stage(Stage::Load, &facts);
    facts
}

fn add_nvml(facts: &mut Facts, result: std::thread::Result<(NvmlOutcome, f64)>) {
    match result {
        Ok((outcome, milliseconds)) => {
            facts.nvml = outcome.nvml;
            facts.gpus = outcome.gpus;
            facts.simulated = facts.simulated.take().or(outcome.simulated);
            facts.timings_ms.insert("nvml".to_owned(), milliseconds);
        }
        Err(_) => facts
            .nvml
            .probe_trouble
            .push("the thread that asks NVML panicked".to_owned()),
    }
}

fn add_cuda(facts: &mut Facts, result: std::thread::Result<(cuda::CudaOutcome, f64)>) {
    match result {
        Ok((outcome, milliseconds)) => {
            facts.cuda = outcome.cuda;
            facts.simulated = facts.simulated.take().or(outcome.simulated);
            facts.timings_ms.insert("cuda".to_owned(), milliseconds);
        }
        Err(_) => facts
            .cuda
            .probe_trouble
            .push("the thread that asks CUDA panicked".to_owned()),
    }
}

/// The result and how many milliseconds it took.
fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    let result = work();
    (result, milliseconds_since(start))
}

fn milliseconds_since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1000.0
}

fn rfc3339_utc(time: SystemTime) -> String {
    jiff::Timestamp::try_from(time).map_or_else(
        |_| String::new(),
        |timestamp| timestamp.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
    )
}
