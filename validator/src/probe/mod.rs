//! Looks at the machine and fills the facts; nothing else does.
//!
//! A probe never fails: what could not be read is recorded as not read, with the reason. The driver is asked in child
//! processes only (see [`crate::worker`]), so that a call which hangs or crashes costs its own reading and no more.

mod interrupt;
pub(crate) mod libraries;
mod nvml;
mod options;

use std::time::{Instant, SystemTime};

pub use interrupt::Interrupt;
pub(crate) use nvml::{NvmlWorker, simulator_scenario};
pub use options::{Deadlines, ProbeOptions};

use crate::facts::{FACTS_FORMAT, Facts};
use crate::level::Stage;

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
    for stage in [Stage::Host, Stage::Gpu, Stage::Load] {
        if let Some(reason) = interrupt.reason() {
            facts.interrupted = Some(reason);
            break;
        }
        on_stage(stage, &facts);
    }
    facts
        .timings_ms
        .insert("total".to_owned(), milliseconds_since(started));
    facts
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
