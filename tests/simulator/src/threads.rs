//! Work on several threads, of which the host may refuse some (`RLIMIT_NPROC`): a driver that
//! panics then would look like a broken GPU.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::Builder;

/// Calls `work` for each item: on the caller's thread, and on as many more as the host grants, up
/// to `threads` in all.
pub(crate) fn in_parallel<I: Iterator + Send>(
    threads: usize,
    items: I,
    work: impl Fn(I::Item) + Sync,
) {
    let left = Mutex::new(items);
    let next = || lock(&left).next();
    let take_all = || {
        while let Some(item) = next() {
            work(item);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            if Builder::new().spawn_scoped(scope, take_all).is_err() {
                break;
            }
        }
        take_all();
    });
}

/// A poisoned lock only means that a call of the program under test panicked inside; the data is
/// kept valid at each step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
