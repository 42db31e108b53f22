//! A session: the stages of a run, the workers that stand by for the load, and the probes that are
//! deferred until then.

pub(crate) mod allocation;
pub(crate) mod burn;
mod burn_process;
mod burn_state;
pub(crate) mod check_kernel;
mod deferred_probes;
mod devices;
mod samples;
mod sensors;
pub(crate) mod sentinel;
pub(crate) mod standby;
pub(crate) mod worked_gpus;
mod workload_process;
mod workloads;

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use validator_core::facts::{BurnPlan, FACTS_FORMAT, Facts, GpuFacts, KubernetesFacts, Reading};
use validator_core::gpu_names::gpu_named;
use validator_core::level::{Level, Stage};

use crate::interrupt::Interrupt;
use crate::plan::{AllocationOptions, BurnOptions, BurnProgress};
use crate::probe;
use crate::probe::Part;
use crate::probe::ProbeOptions;
use crate::threads::{Scoped, spawn_scoped};
use crate::timed::{milliseconds_since, timed};
use standby::Standby;

/// What a session does: how it reads the machine, and the load that it puts on the GPUs.
#[derive(Clone, Debug)]
pub(crate) struct SessionOptions {
    pub(crate) probe: ProbeOptions,
    /// The GPUs that may be worked, by index, PCI address or UUID; empty: all that
    /// `CUDA_VISIBLE_DEVICES` leaves.
    pub(crate) gpus: Vec<String>,
    /// The burn at level standard and above, or the reason why there is none.
    pub(crate) burn: Result<BurnOptions, String>,
    /// The allocation test at level extended, on the GPUs that the burn works, or the reason why
    /// there is none.
    pub(crate) allocation: Result<AllocationOptions, String>,
    /// Prepares a burn that the caller starts after the session.
    pub(crate) standby: Option<Arc<Standby>>,
}

impl From<ProbeOptions> for SessionOptions {
    fn from(probe: ProbeOptions) -> Self {
        Self {
            probe,
            gpus: Vec::new(),
            burn: Err("no burn was requested".to_owned()),
            allocation: Err("no allocation test was requested".to_owned()),
            standby: None,
        }
    }
}

/// Progress while the machine is read.
#[derive(Debug)]
pub(crate) enum Progress<'p> {
    /// A stage ended, with the facts so far.
    Stage(Stage, &'p Facts),
    /// How far the burn of each GPU is.
    Burn(&'p [BurnProgress]),
}

/// Looks at the machine in three stages and returns what was seen.
///
/// `on_progress` gets the facts so far at the end of each stage, so that reports can be written
/// although a later stage never returns. A request to stop ends the run early: children are killed,
/// the facts so far are returned, and they say so in [`Facts::interrupted`].
pub(crate) fn collect(
    session: &SessionOptions,
    interrupt: &Interrupt,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Facts {
    let options = &session.probe;
    let started = Instant::now();
    let mut facts = Facts {
        format: FACTS_FORMAT,
        validator_version: env!("CARGO_PKG_VERSION").to_owned(),
        collected_at: rfc3339_utc(SystemTime::now()),
        level: options.level,
        // Until it is read: not read, and not absent.
        kubernetes: (options.level >= Level::Standard).then(KubernetesFacts::default),
        ..Facts::default()
    };
    let standby = standby_for(session);
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
    // The driver is slow to answer and the host's files are not, so that they are read in parallel.
    std::thread::scope(|scope| {
        let nvml = spawn_scoped(scope, || {
            let told = timed(|| probe::nvml::probe(options, interrupt, part, &on_gpu));
            if let Some(standby) = &standby {
                standby.watch_sensors(options);
            }
            told
        });
        let cuda = (standby.is_none())
            .then(|| spawn_scoped(scope, || timed(|| probe::cuda::probe(options, interrupt))));
        let environment = (options.level >= Level::Standard)
            .then(|| spawn_scoped(scope, || timed(|| probe::environment::discover_by(options))));
        let (host, host_ms) = timed(|| probe::host::probe(options, interrupt));
        facts.host = host;
        facts.timings_ms.insert("host".to_owned(), host_ms);
        facts.interrupted = interrupt.reason();
        on_progress(Progress::Stage(Stage::Host, &facts));
        probe::add_nvml(&mut facts, nvml.join());
        if let Some(cuda) = cuda {
            probe::add_cuda(&mut facts, cuda.join());
        }
        // A thread that panicked has read nothing, which is what the facts then are.
        if let Some(Ok((found, milliseconds))) = environment.map(Scoped::join) {
            facts.environment = Some(found);
            facts
                .timings_ms
                .insert("environment".to_owned(), milliseconds);
        }
    });
    if let Some(standby) = &standby {
        standby.start_deferred_probes(options, interrupt, &mut facts);
    }
    name_the_lost_gpu(&mut facts);
    if options.level >= Level::Standard && interrupt.signal().is_none() {
        let (seen, milliseconds) = timed(|| probe::kubernetes::probe(options, interrupt, &facts));
        facts.kubernetes = Some(seen);
        facts
            .timings_ms
            .insert("kubernetes".to_owned(), milliseconds);
    }
    facts.interrupted = interrupt.reason();
    on_progress(Progress::Stage(Stage::Gpu, &facts));
    if options.level >= Level::Standard && facts.interrupted.is_none() {
        let standby = standby.as_deref();
        let ((), load_ms) = timed(|| work(session, interrupt, standby, &mut facts, on_progress));
        facts.timings_ms.insert("load".to_owned(), load_ms);
        // The caller that burns reads the node after its burn.
        if session.standby.is_none() {
            read_after_load(options, interrupt, &mut facts);
        }
        // After the burn, whose workers hold the GPUs' memory.
        probe::environment::prove_by(options, interrupt, &mut facts);
        let gpu_pods = probe::kubernetes::gpu_pods(options, interrupt, &facts);
        if let Some(kubernetes) = &mut facts.kubernetes {
            kubernetes.gpu_pods = gpu_pods;
        }
        facts.interrupted = interrupt.reason();
    }
    if let Some(standby) = &standby {
        if facts.interrupted.is_some() {
            standby.dismiss();
        }
        // Where the caller burns, the deferred probes are awaited after the burn.
        if session.standby.is_none() || facts.interrupted.is_some() {
            standby.add_deferred_probes(&mut facts, interrupt);
        }
    }
    facts
        .timings_ms
        .insert("total".to_owned(), milliseconds_since(started));
    on_progress(Progress::Stage(Stage::Load, &facts));
    facts
}

/// Reads the node's state again after the load, when the workers have ended: what changed under
/// load is evidence, and the judge applies every check to this reading, too.
pub(crate) fn read_after_load(options: &ProbeOptions, interrupt: &Interrupt, facts: &mut Facts) {
    if interrupt.signal().is_some() {
        return;
    }
    // A call that hung or crashed before would only do so again, for as long, and what it left
    // unread is an error already.
    let nvml_works = facts.nvml.probe_trouble.is_empty();
    let (state, milliseconds) = timed(|| probe::state(options, interrupt, nvml_works));
    facts.after_load = Some(Box::new(state));
    facts
        .timings_ms
        .insert("after_load".to_owned(), milliseconds);
}

/// Where a burn is to come, here or with the caller.
fn standby_for(session: &SessionOptions) -> Option<Arc<Standby>> {
    if session.probe.level < Level::Standard {
        return None;
    }
    let burn = session.burn.as_ref().ok();
    let own = || {
        let named = |burn: &BurnOptions| BurnOptions {
            gpus: session.gpus.clone(),
            ..burn.clone()
        };
        burn.map(|burn| Arc::new(Standby::new(named(burn))))
    };
    session.standby.clone().or_else(own)
}

/// The small verified kernel on every GPU, then the burn.
fn work(
    session: &SessionOptions,
    interrupt: &Interrupt,
    standby: Option<&Standby>,
    facts: &mut Facts,
    on_progress: &mut dyn FnMut(Progress<'_>),
) {
    facts.load.cuda_kernel = check_kernel::run_on_all_gpus(session, interrupt, standby, facts);
    if interrupt.reason().is_some() {
        return;
    }
    let burn = session.burn.clone().and_then(|burn| {
        let gpus = gpus_to_work(session, facts)?;
        Ok(BurnOptions { gpus, ..burn })
    });
    match burn {
        Ok(burn) => {
            let own = Standby::new(burn.clone());
            let standby = standby.unwrap_or(&own);
            burn::burn(
                &burn,
                &session.probe,
                standby,
                facts,
                interrupt,
                &mut |gpus| {
                    on_progress(Progress::Burn(gpus));
                },
            );
            if session.probe.level >= Level::Extended && interrupt.reason().is_none() {
                workloads::test_memory(&burn, &session.probe, standby, facts, interrupt);
            }
            if let Ok(allocation) = &session.allocation
                && interrupt.reason().is_none()
            {
                let gpus = burn.gpus.clone();
                let options = AllocationOptions {
                    gpus,
                    ..allocation.clone()
                };
                let probe = &session.probe;
                allocation::test_allocation(&options, probe, facts, interrupt, &mut |_| {});
            }
        }
        Err(reason) => facts.load.burn_plan = Some(BurnPlan::Off(reason)),
    }
}

/// The UUIDs of the GPUs to work; empty: every GPU.
fn gpus_to_work(session: &SessionOptions, facts: &Facts) -> Result<Vec<String>, String> {
    if session.gpus.is_empty() {
        return Ok(worked_gpus::visible_gpus(facts)?.unwrap_or_default());
    }
    let named = session.gpus.iter().map(|name| gpu_named(name, facts));
    let named = named.collect::<Result<Vec<_>, _>>()?;
    let uuids: Vec<String> = named
        .iter()
        .filter_map(|gpu| gpu.uuid.value().cloned())
        .collect();
    // No names mean every GPU to a burn.
    if uuids.is_empty() {
        return Err("the UUIDs of the GPUs named by --gpu could not be read".to_owned());
    }
    Ok(uuids)
}

/// NVML gives a lost GPU a number and no address. Where it counts as many GPUs as the driver has
/// bound, and all others have their addresses, the one that is left is its own.
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

fn rfc3339_utc(time: SystemTime) -> String {
    jiff::Timestamp::try_from(time).map_or_else(
        |_| String::new(),
        |timestamp| timestamp.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use validator_core::facts::{GpuFacts, PciDevice};

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
