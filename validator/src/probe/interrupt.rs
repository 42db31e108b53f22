//! The wish to stop early.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Whether a signal asked the run to stop; every wait of the probes looks at it.
///
/// Its flag fits `signal_hook::flag::register_usize(SIGTERM, interrupt.flag(), SIGTERM)`.
#[derive(Clone, Debug, Default)]
pub struct Interrupt {
    signal: Arc<AtomicUsize>,
}

impl Interrupt {
    /// Stored in the place of a signal's number when the profile's time for the run is over.
    pub const DEADLINE: usize = usize::MAX;

    /// The number that a signal handler stores: 0 while the run may go on, else the number of the signal.
    pub fn flag(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.signal)
    }

    /// Asks to stop, as this signal would.
    pub fn request(&self, signal: usize) {
        self.signal.store(signal, Ordering::SeqCst);
    }

    /// The number of the signal that asked to stop.
    pub fn signal(&self) -> Option<usize> {
        match self.signal.load(Ordering::SeqCst) {
            0 => None,
            signal => Some(signal),
        }
    }

    /// What the facts say of an early end: `signal 15 (SIGTERM)`.
    pub fn reason(&self) -> Option<String> {
        self.signal().map(|signal| match signal {
            1 => "signal 1 (SIGHUP)".to_owned(),
            2 => "signal 2 (SIGINT)".to_owned(),
            15 => "signal 15 (SIGTERM)".to_owned(),
            Self::DEADLINE => {
                "the time that the profile gives a run at this level is over".to_owned()
            }
            other => format!("signal {other}"),
        })
    }
}
