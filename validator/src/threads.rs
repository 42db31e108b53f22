//! Threads that a host with too few processes may refuse (`RLIMIT_NPROC`, the pids controller of a
//! control group), where `std::thread::spawn` and `Scope::spawn` panic. Clippy refuses those two in
//! this crate (`clippy.toml`).

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

type Work<'scope, T> = Box<dyn FnOnce() -> T + Send + 'scope>;

/// Starts a thread without which the caller cannot go on; `purpose` completes "no thread could be
/// started".
pub(crate) fn spawn<T: Send + 'static>(
    purpose: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<JoinHandle<T>> {
    Builder::new().spawn(work).map_err(|error| {
        let text = format!("no thread could be started {purpose}: {error}");
        std::io::Error::new(error.kind(), text)
    })
}

/// Work of [`spawn_or_defer`].
pub(crate) enum Deferrable<T> {
    Started(JoinHandle<T>),
    /// The host refused a thread, and the work is done when its result is waited for.
    Deferred(Work<'static, T>),
}

impl<T> std::fmt::Debug for Deferrable<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Started(_) => "Started",
            Self::Deferred(_) => "Deferred",
        })
    }
}

impl<T> Deferrable<T> {
    /// Whether nothing is left to wait for but what the caller does itself.
    pub(crate) fn is_finished(&self) -> bool {
        match self {
            Self::Started(thread) => thread.is_finished(),
            Self::Deferred(_) => true,
        }
    }

    /// The result; an error is the panic of the thread.
    pub(crate) fn join(self) -> std::thread::Result<T> {
        match self {
            Self::Started(thread) => thread.join(),
            Self::Deferred(work) => Ok(work()),
        }
    }
}

/// Runs `work` on a thread of its own, or in [`Deferrable::join`] where none can be started.
pub(crate) fn spawn_or_defer<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Deferrable<T> {
    match attempt(work, |run| Builder::new().spawn(run)) {
        Ok(thread) => Deferrable::Started(thread),
        Err(work) => Deferrable::Deferred(Box::new(work)),
    }
}

/// Work of [`spawn_scoped`] and [`spawn_scoped_or_defer`].
pub(crate) enum Scoped<'scope, T> {
    Started(ScopedJoinHandle<'scope, T>),
    /// The host refused a thread, and the caller has done the work.
    Done(T),
    /// The host refused a thread, and the work is done when its result is waited for.
    Deferred(Work<'scope, T>),
}

impl<T> Scoped<'_, T> {
    /// The result; an error is the panic of the thread.
    pub(crate) fn join(self) -> std::thread::Result<T> {
        match self {
            Self::Started(thread) => thread.join(),
            Self::Done(result) => Ok(result),
            Self::Deferred(work) => Ok(work()),
        }
    }
}

/// Runs `work` on a thread of its own, or at once where none can be started.
pub(crate) fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Scoped<'scope, T> {
    match spawn_scoped_or_defer(scope, work) {
        Scoped::Deferred(work) => Scoped::Done(work()),
        started => started,
    }
}

/// Runs `work` on a thread of its own, or in [`Scoped::join`] where none can be started.
pub(crate) fn spawn_scoped_or_defer<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Scoped<'scope, T> {
    match attempt(work, |run| Builder::new().spawn_scoped(scope, run)) {
        Ok(thread) => Scoped::Started(thread),
        Err(work) => Scoped::Deferred(Box::new(work)),
    }
}

/// Runs `work`, which takes its items from a common source, on so many threads: on the caller's
/// and on as many more as the host grants.
pub(crate) fn in_parallel(threads: usize, work: impl Fn() + Sync) {
    std::thread::scope(|scope| {
        for _ in 1..threads {
            if Builder::new().spawn_scoped(scope, &work).is_err() {
                break;
            }
        }
        work();
    });
}

/// The thread, or the work where it is refused: a refused spawn drops its closure, so that the
/// work is kept outside of it.
fn attempt<'scope, T, F, H>(
    work: F,
    spawn: impl FnOnce(Work<'scope, T>) -> std::io::Result<H>,
) -> Result<H, F>
where
    T: 'scope,
    F: FnOnce() -> T + Send + 'scope,
{
    let kept = Arc::new(Mutex::new(Some(work)));
    let on_thread = Arc::clone(&kept);
    let run = move || {
        let work = take(&on_thread);
        work.expect("the work is taken once: by this thread, or by the caller where there is none")(
        )
    };
    spawn(Box::new(run)).map_err(|_| take(&kept).expect("no thread has taken it"))
}

fn take<F>(kept: &Mutex<Option<F>>) -> Option<F> {
    kept.lock().unwrap_or_else(PoisonError::into_inner).take()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn work_is_done_by_a_thread() {
        let caller = std::thread::current().id();
        std::thread::scope(|scope| {
            let work = spawn_scoped(scope, || std::thread::current().id());
            assert_ne!(work.join().expect("no panic"), caller);
        });
        let work = spawn_or_defer(|| std::thread::current().id());
        assert_ne!(work.join().expect("no panic"), caller);
    }

    #[test]
    fn work_comes_back_to_the_caller_where_the_host_refuses_a_thread() {
        let refused = |_| Err::<(), _>(std::io::Error::from(std::io::ErrorKind::WouldBlock));
        let done = AtomicUsize::new(0);
        let work = || done.fetch_add(1, Ordering::Relaxed);
        let work = attempt(work, refused).expect_err("it is refused");
        assert_eq!(done.load(Ordering::Relaxed), 0);
        work();
        assert_eq!(done.load(Ordering::Relaxed), 1);
        let deferred = Deferrable::Deferred(Box::new(|| 7));
        assert!(deferred.is_finished());
        assert_eq!(deferred.join().expect("no panic"), 7);
    }

    #[test]
    fn all_items_are_taken_by_one_thread_or_by_many() {
        for threads in [0, 1, 4] {
            let left = AtomicUsize::new(100);
            let next =
                || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |it| it.checked_sub(1));
            in_parallel(threads, || while next().is_ok() {});
            assert_eq!(left.load(Ordering::Relaxed), 0, "{threads} threads");
        }
    }
}
