//! The node's state that processes share: one mapped file with a slot for each process on each GPU.
//!
//! There is no lock, so a process that is killed cannot leave one held. A slot is owned by one word
//! that holds the process id and its start time; readers ignore, and new processes take over, slots
//! whose owner is gone. So memory and process entries of a killed process vanish, as they do on a
//! real driver.

#![allow(unsafe_code, reason = "the shared state is a mapped file")]

use anyhow::{Context, Result, ensure};
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// The largest node: eight GPUs, and room for twice that.
pub const MAX_GPUS: usize = 16;
/// Processes that can be on one GPU at a time.
pub const MAX_PROCESSES: usize = 64;
/// Events that are kept; an event set that is read more rarely loses the oldest.
const EVENT_CAPACITY: usize = 256;
const MAGIC: u64 = 0x4750_5553_494d_0005;
/// Changes in time that a node can have, those that were set while it ran included.
pub const MAX_CHANGES: usize = 256;

/// Which timed changes took effect, a bit each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Fired([u64; MAX_CHANGES / 64]);

impl Fired {
    pub fn has(&self, change: usize) -> bool {
        self.0[change / 64] & (1 << (change % 64)) != 0
    }

    /// The same without this change.
    pub(crate) fn without(mut self, change: usize) -> Self {
        self.0[change / 64] &= !(1 << (change % 64));
        self
    }
}

#[repr(C)]
struct Layout {
    magic: AtomicU64,
    started_ns: AtomicU64,
    /// How often the scenario was replaced since the node was prepared.
    generation: AtomicU64,
    /// One bit a timed change that took effect.
    fired: [AtomicU64; MAX_CHANGES / 64],
    /// Events so far.
    event_head: AtomicU64,
    /// The low half of `event_head` once more, as the word that waiters sleep on.
    event_wake: AtomicU32,
    _padding: AtomicU32,
    /// Records in the kernel log so far, which is the next record's sequence number.
    kernel_records: AtomicU64,
    events: [AtomicU64; EVENT_CAPACITY],
    gpus: [GpuState; MAX_GPUS],
}

/// One GPU's part of the shared state.
#[repr(C)]
#[derive(Debug)]
pub struct GpuState {
    launches: AtomicU64,
    /// Launches of the kernels that `wrong_results` is about.
    spoilable_launches: AtomicU64,
    /// What sysfs shows of the PCIe link (`Node::show_link`).
    shown_link: AtomicU64,
    /// Memory that was freed and not given back (`FreeFault`), in bytes.
    kept_bytes: AtomicU64,
    pub(crate) dynamics: crate::dynamics::DynamicState,
    processes: [ProcessSlot; MAX_PROCESSES],
}

/// What one process does on one GPU.
#[repr(C)]
#[derive(Debug)]
pub struct ProcessSlot {
    /// Process id in the upper half, start time (clock ticks since boot) in the lower; 0 is free.
    owner: AtomicU64,
    memory_bytes: AtomicU64,
    /// Kernels and copies that run now.
    running: AtomicU32,
    /// CUDA contexts that are open; NVML lists processes that have one.
    contexts: AtomicU32,
    /// The MIG instance that the process works in, counted from 1; 0 is the whole GPU.
    mig_instance: AtomicU32,
    _padding: AtomicU32,
}

/// A process on a GPU, as NVML lists it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessOnGpu {
    pub pid: u32,
    pub memory_bytes: u64,
    pub running: u32,
    pub contexts: u32,
    /// Position in the GPU's list of MIG instances; none for the whole GPU.
    pub mig_instance: Option<u32>,
}

/// Something that happened on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    pub gpu: u32,
    pub xid: u32,
}

/// The mapped state of one node.
#[derive(Debug)]
pub struct State {
    layout: NonNull<Layout>,
}

// SAFETY: everything in the mapping is atomic, and it is never unmapped while a `State` lives.
unsafe impl Send for State {}
// SAFETY: as above.
unsafe impl Sync for State {}

impl Drop for State {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this length, and nothing borrows from it any
        // more.
        unsafe { libc::munmap(self.layout.as_ptr().cast(), size_of::<Layout>()) };
    }
}

impl State {
    /// Makes the state file of a new node, whose time starts now.
    pub fn create(path: &Path) -> Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(path)
            .with_context(|| format!("create the node state {}", path.display()))?;
        file.set_len(size_of::<Layout>() as u64)
            .with_context(|| format!("size the node state {}", path.display()))?;
        let state = Self::map(&file, path)?;
        state.layout().started_ns.store(now_ns(), Ordering::Relaxed);
        state.layout().magic.store(MAGIC, Ordering::Release);
        Ok(state)
    }

    /// Maps the state file of a node that was prepared before.
    pub fn open(path: &Path) -> Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .with_context(|| format!("open the node state {}", path.display()))?;
        let length = file
            .metadata()
            .with_context(|| format!("inspect {}", path.display()))?
            .len();
        ensure!(
            length == size_of::<Layout>() as u64,
            "the node state {} was made by another version of the simulator",
            path.display()
        );
        let state = Self::map(&file, path)?;
        ensure!(
            state.layout().magic.load(Ordering::Acquire) == MAGIC,
            "the node state {} was made by another version of the simulator",
            path.display()
        );
        Ok(state)
    }

    fn map(file: &File, path: &Path) -> Result<Self> {
        // SAFETY: a shared mapping of a file that is as long as `Layout`; the result is checked
        // before use.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size_of::<Layout>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        ensure!(
            address != libc::MAP_FAILED,
            "map the node state {}: {}",
            path.display(),
            std::io::Error::last_os_error()
        );
        let layout = NonNull::new(address.cast::<Layout>()).context("mapped at address zero")?;
        Ok(Self { layout })
    }

    fn layout(&self) -> &Layout {
        // SAFETY: the mapping lives as long as `self`, is aligned to a page, and every bit pattern
        // of its atomics is valid.
        unsafe { self.layout.as_ref() }
    }

    /// Time since the node was prepared.
    pub fn elapsed(&self) -> Duration {
        Duration::from_nanos(
            now_ns().saturating_sub(self.layout().started_ns.load(Ordering::Relaxed)),
        )
    }

    /// The GPU's shared part; GPUs are numbered as in the scenario.
    pub fn gpu(&self, index: usize) -> &GpuState {
        &self.layout().gpus[index]
    }

    /// How often the scenario was replaced.
    pub fn generation(&self) -> u64 {
        self.layout().generation.load(Ordering::Acquire)
    }

    /// Makes every process read the scenario again.
    pub(crate) fn next_generation(&self) {
        self.layout().generation.fetch_add(1, Ordering::AcqRel);
    }

    /// Which timed changes took effect.
    pub fn fired(&self) -> Fired {
        let words = &self.layout().fired;
        Fired(std::array::from_fn(|word| {
            words[word].load(Ordering::Acquire)
        }))
    }

    /// Marks a timed change; true for the one caller that did it first.
    pub fn fire(&self, change: usize) -> bool {
        let bit = 1 << (change % 64);
        let word = &self.layout().fired[change / 64];
        word.fetch_or(bit, Ordering::AcqRel) & bit == 0
    }

    /// Sets the number of records that the kernel log starts with.
    pub(crate) fn set_kernel_records(&self, count: u64) {
        self.layout().kernel_records.store(count, Ordering::Release);
    }

    /// The sequence number of the kernel log's next record.
    pub(crate) fn next_kernel_record(&self) -> u64 {
        self.layout().kernel_records.fetch_add(1, Ordering::AcqRel)
    }

    /// Number of events so far; a new event set delivers those that come after.
    pub fn event_count(&self) -> u64 {
        self.layout().event_head.load(Ordering::Acquire)
    }

    /// Adds an event and wakes every waiter of the node.
    pub fn push_event(&self, event: Event) {
        let layout = self.layout();
        let position = layout.event_head.fetch_add(1, Ordering::AcqRel);
        layout.events[slot_of(position)].store(encode_event(position, event), Ordering::Release);
        layout.event_wake.fetch_add(1, Ordering::AcqRel);
        // SAFETY: wakes waiters on a word of the mapping; no memory is written.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                layout.event_wake.as_ptr(),
                libc::FUTEX_WAKE,
                i32::MAX,
                std::ptr::null::<libc::timespec>(),
            )
        };
    }

    /// The event at `position`, if it was written. None also stands for one that was overwritten,
    /// or whose writer was killed.
    pub fn event(&self, position: u64) -> Option<Event> {
        decode_event(
            position,
            self.layout().events[slot_of(position)].load(Ordering::Acquire),
        )
    }

    /// Sleeps until an event is added, or for `timeout` at most.
    pub fn wait_for_event(&self, seen: u64, timeout: Duration) {
        let layout = self.layout();
        let word = layout.event_wake.load(Ordering::Acquire);
        if layout.event_head.load(Ordering::Acquire) != seen {
            return;
        }
        let timespec = libc::timespec {
            tv_sec: timeout.as_secs().cast_signed(),
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        // SAFETY: waits on a word of the mapping with a time-out that lives through the call.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                layout.event_wake.as_ptr(),
                libc::FUTEX_WAIT,
                word,
                std::ptr::from_ref(&timespec),
            )
        };
    }
}

fn slot_of(position: u64) -> usize {
    usize::try_from(position % EVENT_CAPACITY as u64).unwrap_or(0)
}

/// One word an event, so that it is there whole or not at all: position (32 bits), GPU (8), Xid
/// (24).
fn encode_event(position: u64, event: Event) -> u64 {
    ((position + 1) << 32) | u64::from(event.gpu & 0xff) << 24 | u64::from(event.xid & 0x00ff_ffff)
}

fn decode_event(position: u64, word: u64) -> Option<Event> {
    let [gpu, x2, x1, x0] = low_half(word).to_be_bytes();
    (word >> 32 == (position + 1) & 0xffff_ffff).then(|| Event {
        gpu: gpu.into(),
        xid: u32::from_be_bytes([0, x2, x1, x0]),
    })
}

fn low_half(word: u64) -> u32 {
    u32::try_from(word & 0xffff_ffff).unwrap_or(0)
}

impl GpuState {
    /// Kernels launched on this GPU since the node was prepared.
    pub fn launches(&self) -> u64 {
        self.launches.load(Ordering::Relaxed)
    }

    /// Counts a launch and returns its number, from 0.
    pub fn count_launch(&self) -> u64 {
        self.launches.fetch_add(1, Ordering::Relaxed)
    }

    /// Notes what sysfs shows of the link; true where it showed something else.
    pub(crate) fn note_link(&self, link: (u32, u32)) -> bool {
        let word = u64::from(link.0) << 32 | u64::from(link.1);
        self.shown_link.swap(word, Ordering::AcqRel) != word
    }

    /// Time of load so far, in nanoseconds.
    pub fn loaded_ns(&self) -> u64 {
        self.dynamics.loaded_ns()
    }

    /// Launches so far of the kernels that the fault of wrong results is about.
    pub fn spoilable_launches(&self) -> u64 {
        self.spoilable_launches.load(Ordering::Relaxed)
    }

    /// Counts one of them and returns its number, from 0.
    pub(crate) fn count_spoilable_launch(&self) -> u64 {
        self.spoilable_launches.fetch_add(1, Ordering::Relaxed)
    }

    /// This process's slot, claimed when it has none yet; none when the GPU's process table is
    /// full.
    pub fn attach(&self) -> Option<&ProcessSlot> {
        let me = owner_of(std::process::id())?;
        self.processes
            .iter()
            .find(|slot| slot.owner.load(Ordering::Acquire) == me)
            .or_else(|| self.processes.iter().find(|slot| slot.claim(me)))
    }

    /// Processes that live, with what they hold.
    pub fn processes(&self) -> Vec<ProcessOnGpu> {
        self.processes
            .iter()
            .filter_map(ProcessSlot::read)
            .collect()
    }

    /// Memory that living processes hold, and that was not freed, in bytes.
    pub fn memory_used(&self) -> u64 {
        let processes = self.processes();
        let held: u64 = processes.iter().map(|process| process.memory_bytes).sum();
        held + self.kept_bytes.load(Ordering::Acquire)
    }

    /// Leaks memory for good.
    pub(crate) fn keep_memory(&self, bytes: u64) {
        self.kept_bytes.fetch_add(bytes, Ordering::AcqRel);
    }

    /// Whether a living process runs a kernel.
    pub fn busy(&self) -> bool {
        self.processes.iter().any(|slot| {
            slot.running.load(Ordering::Acquire) > 0 && is_alive(slot.owner.load(Ordering::Acquire))
        })
    }
}

impl ProcessSlot {
    fn claim(&self, me: u64) -> bool {
        let owner = self.owner.load(Ordering::Acquire);
        if owner != 0 && is_alive(owner) {
            return false;
        }
        // The claiming word is this process's own, so that a claimer that is killed here leaves a
        // slot that others reclaim.
        if self
            .owner
            .compare_exchange(owner, me, Ordering::AcqRel, Ordering::Acquire)
            .is_err()
        {
            return false;
        }
        self.memory_bytes.store(0, Ordering::Release);
        self.running.store(0, Ordering::Release);
        self.contexts.store(0, Ordering::Release);
        self.mig_instance.store(0, Ordering::Release);
        true
    }

    fn read(&self) -> Option<ProcessOnGpu> {
        let owner = self.owner.load(Ordering::Acquire);
        (owner != 0 && is_alive(owner)).then(|| ProcessOnGpu {
            pid: pid_of(owner),
            memory_bytes: self.memory_bytes.load(Ordering::Acquire),
            running: self.running.load(Ordering::Acquire),
            contexts: self.contexts.load(Ordering::Acquire),
            mig_instance: self.mig_instance.load(Ordering::Acquire).checked_sub(1),
        })
    }

    /// Gives the slot back, as the end of the last context does.
    pub fn detach(&self) {
        self.memory_bytes.store(0, Ordering::Release);
        self.running.store(0, Ordering::Release);
        self.contexts.store(0, Ordering::Release);
        self.owner.store(0, Ordering::Release);
    }

    /// Takes memory if the GPU (`capacity` bytes for all processes together) still has it.
    pub fn take_memory(&self, gpu: &GpuState, bytes: u64, capacity: u64) -> bool {
        // A request that is plainly too large must not have others refused for a moment.
        if gpu.memory_used().saturating_add(bytes) > capacity {
            return false;
        }
        self.memory_bytes.fetch_add(bytes, Ordering::AcqRel);
        // Two processes that take the last memory at once both see the sum and may both be refused,
        // never both be served.
        if gpu.memory_used() <= capacity {
            return true;
        }
        self.release_memory(bytes);
        false
    }

    pub fn release_memory(&self, bytes: u64) {
        self.memory_bytes.fetch_sub(bytes, Ordering::AcqRel);
    }

    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes.load(Ordering::Acquire)
    }

    /// Notes that the process works in a MIG instance, by its position in the GPU's list.
    pub fn set_mig_instance(&self, instance: Option<u32>) {
        self.mig_instance
            .store(instance.map_or(0, |index| index + 1), Ordering::Release);
    }

    pub fn open_context(&self) {
        self.contexts.fetch_add(1, Ordering::AcqRel);
    }

    /// Closes a context; returns how many are still open.
    pub fn close_context(&self) -> u32 {
        self.contexts
            .fetch_sub(1, Ordering::AcqRel)
            .saturating_sub(1)
    }

    /// Work starts; the caller ends it with `end_work`. `Node::begin_work` also moves the load
    /// model.
    pub(crate) fn begin_work(&self) {
        self.running.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn end_work(&self) {
        self.running.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The owner word of a process: its id and start time, which no later process with the same id
/// shares.
fn owner_of(pid: u32) -> Option<u64> {
    Some(u64::from(pid) << 32 | u64::from(start_time(pid)?))
}

fn pid_of(owner: u64) -> u32 {
    u32::try_from(owner >> 32).unwrap_or(0)
}

fn is_alive(owner: u64) -> bool {
    start_time(pid_of(owner)) == Some(low_half(owner))
}

/// Start time in clock ticks since boot (`/proc/<pid>/stat`, field 22); none when there is no such
/// process, or only its zombie.
pub(crate) fn start_time(pid: u32) -> Option<u32> {
    let mut buffer = [0; 1024];
    let length = File::open(format!("/proc/{pid}/stat"))
        .ok()?
        .read(&mut buffer)
        .ok()?;
    let text = String::from_utf8_lossy(&buffer[..length]);
    // The process's name is in parentheses and may hold any character, so fields are counted after
    // the last one.
    let mut fields = text.rsplit_once(')')?.1.split_ascii_whitespace();
    let process_state = fields.next()?;
    if matches!(process_state, "Z" | "X") {
        return None;
    }
    let ticks: u64 = fields.nth(18)?.parse().ok()?;
    Some(low_half(ticks))
}

/// Nanoseconds on a clock that every process shares and that is never set.
pub fn now_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes one timespec that lives through the call.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_read_back_and_a_missing_one_is_not() {
        let event = Event { gpu: 7, xid: 149 };
        assert_eq!(decode_event(300, encode_event(300, event)), Some(event));
        assert_eq!(decode_event(44, encode_event(300, event)), None);
        assert_eq!(decode_event(0, 0), None);
    }

    #[test]
    fn an_owner_is_alive_only_with_its_own_start_time() {
        let me = owner_of(std::process::id()).unwrap();
        assert!(is_alive(me));
        assert!(!is_alive(me ^ 1));
        assert!(!is_alive(u64::from(u32::MAX) << 32));
    }
}
