//! What is asked of the driver beside a burn: it takes the driver long, and no burn depends on it.
//!
//! The driver does one thing after another, for whichever process. What gets ready to work the GPUs comes first, then what the
//! libraries say of all of them (`cuInit` opens each GPU) and what the GPUs read from their flash memory (70 ms each,
//! BENCHMARKS.md).

use std::thread::JoinHandle;

use super::cuda::{self, CudaOutcome};
use super::nvml::{self, NvmlOutcome, Part};
use super::{Interrupt, ProbeOptions, timed};
use crate::facts::Facts;

/// The late probes at work.
#[derive(Debug)]
pub(crate) struct LateProbes(JoinHandle<Told>);

/// What they were told, with the milliseconds that each took.
struct Told {
    cuda: (CudaOutcome, f64),
    inforom: Option<(NvmlOutcome, f64)>,
}

impl LateProbes {
    /// Starts them when `wait` returns, and says in the facts that what they bring is not known yet.
    pub(crate) fn start(
        options: &ProbeOptions,
        interrupt: &Interrupt,
        facts: &mut Facts,
        wait: impl FnOnce() + Send + 'static,
    ) -> Self {
        facts.cuda = cuda::nothing_read("CUDA was still being asked").cuda;
        let (options, interrupt) = (options.clone(), interrupt.clone());
        // An NVML that does not start has said why, and would take as long again.
        let nvml_works = facts.nvml.initialized.value() == Some(&true);
        Self(std::thread::spawn(move || {
            wait();
            let inforom = || nvml::probe(&options, &interrupt, Part::Inforom, &|_| {});
            Told {
                cuda: timed(|| cuda::probe(&options, &interrupt)),
                inforom: nvml_works.then(|| timed(inforom)),
            }
        }))
    }

    /// Waits for their end, and puts what they were told into the facts.
    pub(crate) fn add_to(self, facts: &mut Facts) {
        let Ok(Told { cuda, inforom }) = self.0.join() else {
            let trouble = "the thread of the late probes panicked".to_owned();
            facts.cuda.probe_trouble.push(trouble);
            return;
        };
        cuda.0.add_to(facts);
        facts.timings_ms.insert("cuda".to_owned(), cuda.1);
        if let Some((outcome, milliseconds)) = inforom {
            outcome.add_inforom_to(facts);
            facts.timings_ms.insert("inforom".to_owned(), milliseconds);
        }
    }
}
