//! Threads that a host with too few processes may refuse: the work is then done by the caller, one
//! after another.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, Scope, ScopedJoinHandle};

/// Work of [`spawn_scoped`].
pub(crate) enum Scoped<'scope, T> {
    Started(ScopedJoinHandle<'scope, T>),
    /// The host refused a thread, and the caller has done the work.
    Done(T),
}

impl<T> Scoped<'_, T> {
    /// The result; an error is the panic of the thread.
    pub(crate) fn join(self) -> std::thread::Result<T> {
        match self {
            Self::Started(thread) => thread.join(),
            Self::Done(result) => Ok(result),
        }
    }
}

/// Runs `work` on a thread of its own, or at once where none can be started (`RLIMIT_NPROC`, the
/// pids controller of a control group); `Scope::spawn` panics there.
pub(crate) fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Scoped<'scope, T> {
    spawn_with(work, |run| Builder::new().spawn_scoped(scope, run))
}

fn spawn_with<'scope, T, F>(
    work: F,
    spawn: impl FnOnce(
        Box<dyn FnOnce() -> T + Send + 'scope>,
    ) -> std::io::Result<ScopedJoinHandle<'scope, T>>,
) -> Scoped<'scope, T>
where
    T: Send + 'scope,
    F: FnOnce() -> T + Send + 'scope,
{
    // A refused spawn drops its closure, so that the work is kept outside of it.
    let kept = Arc::new(Mutex::new(Some(work)));
    let on_thread = Arc::clone(&kept);
    let run = move || {
        let work = take(&on_thread);
        work.expect("the work is taken once: by this thread, or by the caller where there is none")(
        )
    };
    match spawn(Box::new(run)) {
        Ok(thread) => Scoped::Started(thread),
        Err(_) => Scoped::Done(take(&kept).expect("no thread has taken it")()),
    }
}

fn take<F>(kept: &Mutex<Option<F>>) -> Option<F> {
    kept.lock().unwrap_or_else(PoisonError::into_inner).take()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_done_by_a_thread() {
        let caller = std::thread::current().id();
        std::thread::scope(|scope| {
            let work = spawn_scoped(scope, || std::thread::current().id());
            assert_ne!(work.join().expect("no panic"), caller);
        });
    }

    #[test]
    fn work_is_done_by_the_caller_where_the_host_refuses_a_thread() {
        let caller = std::thread::current().id();
        let refused = |_| Err(std::io::Error::from(std::io::ErrorKind::WouldBlock));
        let work = spawn_with(|| std::thread::current().id(), refused);
        assert_eq!(work.join().expect("no panic"), caller);
    }
}
