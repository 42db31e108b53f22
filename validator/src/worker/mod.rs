//! The hidden `gpu-validator worker …` processes: the only code that calls the driver.

pub(crate) mod clock;
mod command;
pub(crate) mod conversation;
pub(crate) mod one_gpu;
pub(crate) mod process;
pub(crate) mod stand_still;

pub(crate) use command::Nodes;
pub use command::{WorkerCommand, run};

/// Asks the kernel to kill this process when the one that started it dies, and dies at once when it already has.
///
/// The kernel counts threads: the signal comes when the thread that started this process ends. The probes' threads end
/// no sooner than what their workers have to tell.
fn die_with_parent() {
    let parent = rustix::process::getppid();
    // A kernel that refuses leaves the deadline of the parent, which needs no help while it lives.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    if rustix::process::getppid() != parent {
        std::process::exit(1);
    }
}
