//! The child between the validator and an interpreter: it limits itself, then becomes the
//! interpreter.

use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use rustix::process::{Resource, Rlimit, setrlimit};

/// Starts an interpreter with the probe program on its standard input. Standard output carries the
/// results: it becomes a descriptor of its own, and what the interpreter prints goes to standard
/// error.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Arguments {
    pub(crate) interpreter: PathBuf,
    pub(crate) framework: String,
    /// Rows and columns of the products
    pub(crate) size: u32,
    /// Seconds after which the interpreter prints where it is
    pub(crate) limit_s: f64,
    /// Processor time in seconds
    #[arg(long)]
    pub(crate) processor_time_s: u64,
    /// Run as this user
    #[arg(long)]
    pub(crate) user: Option<u32>,
    /// Run as this group
    #[arg(long)]
    pub(crate) group: Option<u32>,
}

/// The exit code where the interpreter does not start: that of a shell.
const NOT_STARTED: u8 = 127;

/// Becomes the interpreter; returns where that is not possible, with the reason on standard error.
pub(crate) fn launch(arguments: &Arguments) -> ExitCode {
    limit_own_resources(arguments.processor_time_s);
    let error = match command(arguments) {
        Ok(mut command) => command.exec(),
        Err(error) => error,
    };
    eprintln!("{}: {error}", arguments.interpreter.display());
    ExitCode::from(NOT_STARTED)
}

fn command(arguments: &Arguments) -> std::io::Result<Command> {
    let results = rustix::io::dup(std::io::stdout())?;
    // SIGKILL of the parent ends the interpreter, too, unless the user changes, which clears this.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    rustix::stdio::dup2_stdout(std::io::stderr())?;
    let mut command = Command::new(&arguments.interpreter);
    command
        .args(["-I", "-B", "-u", "-"])
        .arg(results.as_raw_fd().to_string())
        .arg(&arguments.framework)
        .arg(arguments.size.to_string())
        .arg(arguments.limit_s.to_string());
    if let (Some(user), Some(group)) = (arguments.user, arguments.group) {
        command.uid(user).gid(group);
    }
    // The descriptor stays open in the interpreter.
    std::mem::forget(results);
    Ok(command)
}

/// Address space is not limited: CUDA reserves more of it than the GPUs have memory. The parent
/// watches the resident set.
fn limit_own_resources(processor_time_s: u64) {
    let limits = [(Resource::Core, 0), (Resource::Cpu, processor_time_s)];
    for (resource, limit) in limits {
        // A lower limit that is set already stays.
        let _ = setrlimit(
            resource,
            Rlimit {
                current: Some(limit),
                maximum: Some(limit),
            },
        );
    }
    // Where the kernel runs out of memory, this process goes first.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
}
