//! Looks at the machine and fills the facts; nothing else does.
//!
//! A probe never fails: what could not be read is recorded as not read, with the reason. The driver is asked in child
//! processes only (see [`crate::worker`]), so that a call which hangs or crashes costs its own reading and no more.

mod cuda;
mod host;
pub(crate) mod https;
mod interrupt;
pub(crate) mod kubernetes;
mod late;
pub(crate) mod libraries;
mod nvml;
mod options;

use std::sync::Arc;
use std::time::{Instant, SystemTime};

pub(crate) use cuda::run_worker as run_cuda_worker;
pub use interrupt::Interrupt;
pub(crate) use late::LateProbes;
pub(crate) use nvml::{
    NvmlWorker, Part, PowerKind, PowerMeter, SensorMessage, run_sensors_worker, simulator_scenario,
    users_of, with_power_meter,
};
pub use options::{Deadlines, ProbeOptions};

use crate::facts::{
    BurnPlan, FACTS_FORMAT, Facts, GpuFacts, KernelLog, KernelLogEnd, KubernetesFacts, Reading,
};
use crate::level::{Level, Stage};
pub use crate::load::burn::{BurnOptions, BurnProgress, BurnState, EngineChoice, MemoryShare};
use crate::load::standby::Standby;
use nvml::NvmlOutcome;

/// What is told while the machine is looked at.
#[derive(Debug)]
pub enum Progress<'p> {
    /// A stage ended, with the facts so far.
    Stage(Stage, &'p Facts),
    /// How far the burn of each GPU is.
    Burn(&'p [BurnProgress]),
}

/// Looks at the machine in three stages and returns what was seen.
///
/// `on_progress` gets the facts so far at the end of each stage, so that reports can be written although a later stage
/// never returns. A request to stop ends the run early: children are killed, the facts so far are returned, and
/// they say so in [`Facts::interrupted`].
pub fn collect(
    options: &ProbeOptions,
    interrupt: &Interrupt,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Facts {
    let started = Instant::now();
    let mut facts = Facts {
        format: FACTS_FORMAT,
        validator_version: env!("CARGO_PKG_VERSION").to_owned(),
        collected_at: rfc3339_utc(SystemTime::now()),
        level: options.level,
        // Until somebody has looked: not read, and not absent.
        kubernetes: (options.level >= Level::Standard).then(KubernetesFacts::default),
        ..Facts::default()
    };
    let standby = standby_for(options);
    let part = match &standby {
        Some(_) => Part::AllButInforom,
        None => Part::All,
    };
    // What gets ready to work a GPU does so while the rest of the machine is looked at.
    let on_gpu = |gpu: &GpuFacts| {
        if let Some(standby) = &standby {
            standby.prepare(gpu, options, interrupt);
        }
    };
    // The driver is slow to answer and the host's files are not, so that they are asked at the same time.
    std::thread::scope(|scope| {
        let nvml = scope.spawn(|| {
            let told = timed(|| nvml::probe(options, interrupt, part, &on_gpu));
            if let Some(standby) = &standby {
                standby.watch_sensors(options);
            }
            told
        });
        let cuda =
            (standby.is_none()).then(|| scope.spawn(|| timed(|| cuda::probe(options, interrupt))));
        let (host, host_ms) = timed(|| host::probe(options, interrupt));
        facts.host = host;
        facts.timings_ms.insert("host".to_owned(), host_ms);
        facts.interrupted = interrupt.reason();
        on_progress(Progress::Stage(Stage::Host, &facts));
        add_nvml(&mut facts, nvml.join());
        if let Some(cuda) = cuda {
            add_cuda(&mut facts, cuda.join());
        }
    });
    if let Some(standby) = &standby {
        standby.start_late(options, interrupt, &mut facts);
    }
    name_the_lost_gpu(&mut facts);
    if options.level >= Level::Standard && interrupt.signal().is_none() {
        let (seen, milliseconds) = timed(|| kubernetes::probe(options, interrupt, &facts));
        facts.kubernetes = Some(seen);
        facts
            .timings_ms
            .insert("kubernetes".to_owned(), milliseconds);
    }
    facts.interrupted = interrupt.reason();
    on_progress(Progress::Stage(Stage::Gpu, &facts));
    if options.level >= Level::Standard && facts.interrupted.is_none() {
        let standby = standby.as_deref();
        let ((), load_ms) = timed(|| work(options, interrupt, standby, &mut facts, on_progress));
        facts.timings_ms.insert("load".to_owned(), load_ms);
        let gpu_pods = kubernetes::gpu_pods(options, interrupt, &facts);
        if let Some(kubernetes) = &mut facts.kubernetes {
            kubernetes.gpu_pods = gpu_pods;
        }
        facts.interrupted = interrupt.reason();
    }
    if let Some(standby) = &standby {
        if facts.interrupted.is_some() {
            standby.dismiss();
        }
        // Where the caller burns, the late probes are waited for behind that.
        if options.standby.is_none() || facts.interrupted.is_some() {
            standby.add_late(&mut facts, interrupt);
        }
    }
    facts
        .timings_ms
        .insert("total".to_owned(), milliseconds_since(started));
    on_progress(Progress::Stage(Stage::Load, &facts));
    facts
}

/// Where a burn is to come, here or with the caller.
fn standby_for(options: &ProbeOptions) -> Option<Arc<Standby>> {
    if options.level < Level::Standard {
        return None;
    }
    let burn = options.burn.as_ref().ok();
    let own = || burn.map(|burn| Arc::new(Standby::new(burn.clone())));
    options.standby.clone().or_else(own)
}

/// The small verified kernel on every GPU, then the burn.
fn work(
    options: &ProbeOptions,
    interrupt: &Interrupt,
    standby: Option<&Standby>,
    facts: &mut Facts,
    on_progress: &mut dyn FnMut(Progress<'_>),
) {
    use crate::load;
    facts.load.cuda_kernel = load::cuda_kernel::run_on_all_gpus(options, interrupt, standby, facts);
    if interrupt.reason().is_some() {
        return;
    }
    let burn = options.burn.clone().and_then(|burn| {
        let gpus = load::burn::visible_gpus(facts)?.unwrap_or(burn.gpus);
        Ok(BurnOptions { gpus, ..burn })
    });
    match burn {
        Ok(burn) => {
            let own = Standby::new(burn.clone());
            let standby = standby.unwrap_or(&own);
            load::burn::burn(&burn, options, standby, facts, interrupt, &mut |gpus| {
                on_progress(Progress::Burn(gpus));
            });
        }
        Err(reason) => facts.load.burn_plan = Some(BurnPlan::Off(reason)),
    }
}

/// What NVML says of the GPUs as they are now; nothing else is asked.
pub(crate) fn gpus(options: &ProbeOptions, interrupt: &Interrupt) -> Facts {
    let mut facts = Facts::default();
    let (outcome, milliseconds) = timed(|| nvml::probe(options, interrupt, Part::All, &|_| {}));
    add_nvml(&mut facts, Ok((outcome, milliseconds)));
    facts
}

/// The kernel log as it is now.
pub(crate) fn kernel_log(options: &ProbeOptions, interrupt: &Interrupt) -> Reading<KernelLog> {
    host::kernel_log_of(options, interrupt)
}

/// What the kernel log gained since it ended at `end`; not read if some of that was written over.
pub(crate) fn kernel_log_since(
    end: KernelLogEnd,
    options: &ProbeOptions,
    interrupt: &Interrupt,
) -> Reading<KernelLog> {
    host::kernel_log_since(end, options, interrupt)
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
        Ok((outcome, milliseconds)) => outcome.add_to(milliseconds, facts),
        Err(_) => facts
            .cuda
            .probe_trouble
            .push("the thread that asks CUDA panicked".to_owned()),
    }
}

/// NVML gives a lost GPU a number and no address. Where it counts as many GPUs as the driver has bound, and all others
/// have their addresses, the one that is left is its own.
fn name_the_lost_gpu(facts: &mut Facts) {
    let Some(devices) = facts.host.pci_devices.value() else {
        return;
    };
    let bound: Vec<String> = devices
        .iter()
        .filter(|device| device.is_gpu() && device.driver.as_deref() == Some("nvidia"))
        .map(|device| device.address.clone())
        .collect();
    if bound.len() != facts.gpus.len() {
        return;
    }
    let is_taken = |address: &&String| {
        facts
            .gpus
            .iter()
            .any(|gpu| gpu.pci_address.value() == Some(*address))
    };
    let left: Vec<String> = bound.iter().filter(|it| !is_taken(it)).cloned().collect();
    let mut nameless = facts
        .gpus
        .iter_mut()
        .filter(|gpu| gpu.pci_address.value().is_none());
    if let ([address], Some(gpu), None) = (&left[..], nameless.next(), nameless.next()) {
        gpu.pci_address = Reading::Value(address.clone());
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{GpuFacts, PciDevice};

    fn machine(addresses: &[Option<&str>]) -> Facts {
        let mut facts = Facts::default();
        let device = |address: &str| PciDevice {
            address: address.to_owned(),
            class: 0x03_0200,
            driver: Some("nvidia".to_owned()),
            ..PciDevice::default()
        };
        facts.host.pci_devices =
            Reading::Value(vec![device("0000:3b:00.0"), device("0000:5e:00.0")]);
        facts.gpus = addresses
            .iter()
            .map(|address| GpuFacts {
                pci_address: address
                    .map_or_else(Reading::default, |it| Reading::Value(it.to_owned())),
                ..GpuFacts::default()
            })
            .collect();
        facts
    }

    #[test]
    fn the_only_gpu_without_an_address_has_the_only_one_left() {
        let mut facts = machine(&[Some("0000:3b:00.0"), None]);
        name_the_lost_gpu(&mut facts);
        assert_eq!(
            facts.gpus[1].pci_address,
            Reading::Value("0000:5e:00.0".to_owned())
        );
    }

    #[test]
    fn nothing_is_guessed() {
        for addresses in [
            &[None, None][..],
            &[Some("0000:3b:00.0"), None, None],
            &[None],
        ] {
            let mut facts = machine(addresses);
            let before = facts.clone();
            name_the_lost_gpu(&mut facts);
            assert_eq!(facts, before);
        }
    }

    #[test]
    fn a_time_reads_as_rfc_3339() {
        let time = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
        assert_eq!(rfc3339_utc(time), "2001-09-09T01:46:40Z");
    }
}
