//! Driver queries in parallel with a burn: it takes the driver long, and no burn depends on it.
//!
//! The driver serializes calls across processes. What gets ready to work the GPUs comes first, then
//! what the libraries say of all of them (`cuInit` opens each GPU) and what the GPUs read from
//! their flash memory (70 ms each, BENCHMARKS.md).

use std::time::{Duration, Instant};

use crate::interrupt::Interrupt;
use crate::probe::ProbeOptions;
use crate::probe::cuda::{self, CudaOutcome};
use crate::probe::nvml::{self, NvmlOutcome, Part};
use crate::threads::{Deferrable, spawn_or_defer};
use crate::timed::timed;
use validator_core::facts::Facts;

/// How much longer they may take when the run is to stop: they mostly end by themselves, and less
/// is missing from the report.
const GRACE: Duration = Duration::from_millis(300);
/// How often it is looked whether they have ended.
const LOOK: Duration = Duration::from_millis(2);

/// The deferred probes at work.
#[derive(Debug)]
pub(crate) struct DeferredProbes {
    thread: Deferrable<Reported>,
    /// Their own.
    interrupt: Interrupt,
}

/// Their results, with the milliseconds that each took.
struct Reported {
    cuda: (CudaOutcome, f64),
    inforom: Option<(NvmlOutcome, f64)>,
}

impl DeferredProbes {
    /// Starts them when `wait` returns, or in [`Self::add_to`] where the host refuses a thread, and
    /// says in the facts that what they bring is not known yet.
    pub(crate) fn start(
        options: &ProbeOptions,
        facts: &mut Facts,
        wait: impl FnOnce() + Send + 'static,
    ) -> Self {
        facts.cuda = cuda::nothing_read("the CUDA probe was still running").cuda;
        let (options, interrupt) = (options.clone(), Interrupt::default());
        let heard = interrupt.clone();
        // An NVML that does not start has reported the reason, and would take as long again.
        let nvml_works = facts.nvml.initialized.value() == Some(&true);
        let thread = spawn_or_defer(move || {
            wait();
            let inforom = || nvml::probe(&options, &heard, Part::Inforom, &|_| {});
            Reported {
                cuda: timed(|| cuda::probe(&options, &heard)),
                inforom: nvml_works.then(|| timed(inforom)),
            }
        });
        Self { thread, interrupt }
    }

    /// Waits for their end, and puts their results into the facts.
    pub(crate) fn add_to(self, facts: &mut Facts, interrupt: &Interrupt) {
        let mut deadline = None;
        while !self.thread.is_finished() {
            if let Some(signal) = interrupt.signal()
                && Instant::now() >= *deadline.get_or_insert_with(|| Instant::now() + GRACE)
            {
                self.interrupt.request(signal);
            }
            std::thread::sleep(LOOK);
        }
        if let Some(signal) = interrupt.signal() {
            self.interrupt.request(signal);
        }
        let Ok(Reported {
            cuda: (cuda, milliseconds),
            inforom,
        }) = self.thread.join()
        else {
            let trouble = "the thread of the deferred probes panicked".to_owned();
            facts.cuda.probe_trouble.push(trouble);
            return;
        };
        cuda.add_to(milliseconds, facts);
        if let Some((outcome, milliseconds)) = inforom {
            outcome.add_inforom_to(facts);
            facts.timings_ms.insert("inforom".to_owned(), milliseconds);
        }
    }
}
