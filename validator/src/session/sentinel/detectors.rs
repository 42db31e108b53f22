//! What shows a CUDA process before NVML lists it: the open of `/dev/nvidia-uvm`.
//!
//! inotify reports it at once, but not through a node that a container runtime made by mknod; the
//! module's reference count works through containers, but misses opens that are shorter than its
//! poll interval. Neither names a process.

use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;

use super::Event;
use crate::interrupt::Interrupt;
use crate::worker::clock;

/// The node that `cuInit` opens and NVML's clients do not.
const UVM: &str = "nvidia-uvm";
const REFERENCE_COUNT: &str = "sys/module/nvidia_uvm/refcnt";
/// Poll interval of the reference count: a read takes microseconds.
const REFERENCE_POLL: Duration = Duration::from_millis(5);
/// The same while no GPU is worked and a newcomer has nothing to wait for.
const REFERENCE_POLL_AT_REST: Duration = Duration::from_millis(100);
/// The module may be loaded later, or again.
const MODULE_POLL: Duration = Duration::from_secs(1);
/// Poll interval for the end of a watch.
const END_POLL: Duration = Duration::from_millis(200);

/// Starts both below `root`, with the short poll interval while `has_workers`. Returns what is
/// missing, as notes.
pub(super) fn start(
    root: &Path,
    events: &Sender<Event>,
    interrupt: &Interrupt,
    has_workers: &Arc<AtomicBool>,
) -> Vec<String> {
    let mut notes = Vec::new();
    let folder = root.join("dev");
    match watch_opens(&folder) {
        Ok(watch) => {
            let (events, interrupt) = (events.clone(), interrupt.clone());
            let follow = move || follow_opens(&watch, &folder, &events, &interrupt);
            let started = crate::threads::spawn("to watch nvidia-uvm", follow);
            notes.extend(started.err().map(|error| error.to_string()));
        }
        Err(error) => notes.push(format!(
            "{} cannot be watched ({error}): newcomers are seen by the reference count and by NVML",
            folder.display()
        )),
    }
    let path = root.join(REFERENCE_COUNT);
    if std::fs::read(&path).is_err() {
        notes.push(format!(
            "{} cannot be read yet: the driver module is not loaded",
            path.display()
        ));
    }
    let references = References {
        path,
        events: events.clone(),
        interrupt: interrupt.clone(),
        has_workers: Arc::clone(has_workers),
    };
    let follow = move || references.follow();
    let started = crate::threads::spawn("to read the reference count", follow);
    notes.extend(started.err().map(|error| error.to_string()));
    notes
}

/// A watch for opens of the node, and for the folder in which the node may appear.
fn watch_opens(folder: &Path) -> rustix::io::Result<rustix::fd::OwnedFd> {
    let watch = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
    inotify::add_watch(&watch, folder, inotify::WatchFlags::CREATE)?;
    add_node(&watch, folder);
    Ok(watch)
}

/// The node may be missing until CUDA is used for the first time.
fn add_node(watch: &rustix::fd::OwnedFd, folder: &Path) {
    let _ = inotify::add_watch(watch, folder.join(UVM), inotify::WatchFlags::OPEN);
}

fn follow_opens(
    watch: &rustix::fd::OwnedFd,
    folder: &Path,
    events: &Sender<Event>,
    interrupt: &Interrupt,
) {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let wait = Timespec::try_from(END_POLL).unwrap_or_default();
    while interrupt.signal().is_none() {
        let _ = poll(&mut [PollFd::new(watch, PollFlags::IN)], Some(&wait));
        let mut reader = inotify::Reader::new(watch, &mut buffer);
        let mut is_opened = false;
        let mut is_created = false;
        while let Ok(event) = reader.next() {
            is_opened |= event.events().contains(inotify::ReadFlags::OPEN);
            is_created |= event
                .file_name()
                .is_some_and(|it| it.to_bytes() == UVM.as_bytes());
        }
        if is_created {
            add_node(watch, folder);
        }
        let source = "nvidia-uvm was opened";
        if (is_opened || is_created) && !tell(events, source) {
            return;
        }
    }
}

/// The poll of the reference count.
struct References {
    path: PathBuf,
    events: Sender<Event>,
    interrupt: Interrupt,
    has_workers: Arc<AtomicBool>,
}

impl References {
    fn follow(&self) {
        while self.interrupt.signal().is_none() {
            if let Ok(file) = std::fs::File::open(&self.path)
                && !self.follow_counts(&file)
            {
                return;
            }
            std::thread::sleep(MODULE_POLL);
        }
    }

    /// Until the module is gone; false where the sentinel is gone.
    fn follow_counts(&self, file: &std::fs::File) -> bool {
        let mut before: Option<u64> = None;
        while self.interrupt.signal().is_none() {
            let mut text = [0; 32];
            let Ok(length) = file.read_at(&mut text, 0) else {
                return true;
            };
            let count = text
                .get(..length)
                .and_then(|it| std::str::from_utf8(it).ok());
            if let Some(count) = count.and_then(|it| it.trim().parse().ok()) {
                if before.is_some_and(|it| count > it)
                    && !tell(&self.events, "the reference count of nvidia-uvm grew")
                {
                    return false;
                }
                before = Some(count);
            }
            std::thread::sleep(if self.has_workers.load(Ordering::Relaxed) {
                REFERENCE_POLL
            } else {
                REFERENCE_POLL_AT_REST
            });
        }
        true
    }
}

fn tell(events: &Sender<Event>, source: &'static str) -> bool {
    let at_s = clock::now_s();
    events.send(Event::Alarm { source, at_s }).is_ok()
}
