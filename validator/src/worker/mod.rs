//! Child processes: spawn, JSON lines, deadlines, how they ended; only they call the driver.

pub(crate) mod clock;
pub(crate) mod device_isolation;
pub(crate) mod launcher;
pub(crate) mod listener;
pub(crate) mod nodes;
pub(crate) mod own_processes;
pub(crate) mod process;
pub(crate) mod protocol;
pub(crate) mod suspension;

pub(crate) use nodes::Nodes;

/// Makes the kernel kill this process when its parent dies, and ends at once when it already has.
///
/// The kernel counts threads: the signal comes when the thread that started this process ends. The
/// probes' threads end no sooner than their workers' reports.
pub(crate) fn die_with_parent() {
    let parent = rustix::process::getppid();
    // A kernel that refuses leaves the deadline of the parent, which needs no help while it lives.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    if rustix::process::getppid() != parent {
        std::process::exit(1);
    }
}
