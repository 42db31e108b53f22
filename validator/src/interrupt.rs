//! The wish to stop early.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Stands where the number of a signal would: the time of the run is over.
const DEADLINE: usize = usize::MAX;

/// Whether a signal or the run's deadline stops the run; every wait of the probes looks at it.
///
/// Its flag fits `signal_hook::flag::register_usize(SIGTERM, interrupt.flag(), SIGTERM)`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt {
    signal: Arc<AtomicUsize>,
}

impl Interrupt {
    /// The number that a signal handler stores: 0 while the run may go on, else the number of the
    /// signal.
    pub(crate) fn flag(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.signal)
    }

    /// Requests a stop, as this signal would.
    pub(crate) fn request(&self, signal: usize) {
        self.signal.store(signal, Ordering::SeqCst);
    }

    /// Requests a stop because the time of the run is over, unless a signal came before.
    pub(crate) fn request_by_deadline(&self) {
        let _ = self
            .signal
            .compare_exchange(0, DEADLINE, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// The number of the signal that requested the stop.
    pub(crate) fn signal(&self) -> Option<usize> {
        match self.signal.load(Ordering::SeqCst) {
            0 => None,
            signal => Some(signal),
        }
    }

    /// What the facts say of an early end: `signal 15 (SIGTERM)`.
    pub(crate) fn reason(&self) -> Option<String> {
        self.signal().map(|signal| match signal {
            1 => "signal 1 (SIGHUP)".to_owned(),
            2 => "signal 2 (SIGINT)".to_owned(),
            15 => "signal 15 (SIGTERM)".to_owned(),
            DEADLINE => "the profile's deadline for the whole run passed".to_owned(),
            other => format!("signal {other}"),
        })
    }
}
