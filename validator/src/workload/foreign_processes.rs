//! Watches for processes of others on the GPUs of a worker.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::probe::watch_processes_of_others;
use validator_core::queries::processes_in_words;

/// Poll interval of NVML's process lists: each read holds driver locks, some 5 ms for the graphics
/// list.
// Source: flightlessmango/MangoHud#2104, 4.5 ms on an RTX 4090.
const POLL: Duration = Duration::from_millis(200);
/// Poll interval for the end of the watch.
const END_POLL: Duration = Duration::from_millis(5);
/// Time in which NVML returns at the end; a process that exits within its calls may crash.
const TIME_TO_END: Duration = Duration::from_secs(1);

/// Threads that read NVML until this is dropped.
pub(super) struct ForeignProcessWatch {
    seen: Arc<Mutex<Option<String>>>,
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl ForeignProcessWatch {
    pub(super) fn start(uuids: &[String]) -> std::io::Result<Self> {
        let mut watch = Self {
            seen: Arc::default(),
            is_over: Arc::default(),
            threads: Vec::new(),
        };
        for uuid in uuids {
            let (seen, is_over) = (Arc::clone(&watch.seen), Arc::clone(&watch.is_over));
            let uuid = uuid.clone();
            let thread = crate::threads::spawn("to watch for other processes", move || {
                watch_processes_of_others(&uuid, |processes| {
                    if !processes.is_empty() {
                        let text = processes_in_words(&processes);
                        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
                        seen.get_or_insert(text);
                    }
                    let next = Instant::now() + POLL;
                    while !is_over.load(Ordering::Relaxed) && Instant::now() < next {
                        std::thread::sleep(END_POLL);
                    }
                    !is_over.load(Ordering::Relaxed)
                });
            })?;
            watch.threads.push(thread);
        }
        Ok(watch)
    }

    /// The first foreign processes that were seen, in words.
    pub(super) fn seen(&self) -> Option<String> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.clone()
    }
}

impl Drop for ForeignProcessWatch {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let deadline = Instant::now() + TIME_TO_END;
        while self.threads.iter().any(|it| !it.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(END_POLL);
        }
    }
}
