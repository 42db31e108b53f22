//! Contexts, streams, events, modules and functions: what handles point to.

use super::image::Image;
use super::result::{CuResult, SUCCESS};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use super::driver::{Outcome, lock};

/// A context on one GPU.
#[derive(Debug)]
pub(super) struct Context {
    handle: usize,
    /// Index into the scenario's list of GPUs.
    pub(super) gpu: usize,
    sticky_error: AtomicU32,
    /// The default stream's clock, in nanoseconds of GPU time.
    pub(super) default_stream: Arc<Stream>,
}

impl Context {
    pub(super) fn new(gpu: usize) -> Self {
        let default_stream = Arc::new(Stream {
            gpu,
            clock_ns: AtomicU64::new(0),
        });
        Self {
            handle: next_handle(),
            gpu,
            sticky_error: AtomicU32::new(SUCCESS),
            default_stream,
        }
    }

    pub(super) fn handle(&self) -> usize {
        self.handle
    }

    pub(super) fn sticky_error(&self) -> CuResult {
        self.sticky_error.load(Ordering::Acquire)
    }

    /// Makes every later call in this context return `code`, and returns it.
    pub(super) fn poison(&self, code: CuResult) -> CuResult {
        self.sticky_error.store(code, Ordering::Release);
        code
    }
}

/// A stream: work in it has ended when the launching call returns, so all it keeps is the GPU time that has passed in it.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) gpu: usize,
    clock_ns: AtomicU64,
}

impl Stream {
    pub(super) fn clock_ns(&self) -> u64 {
        self.clock_ns.load(Ordering::Acquire)
    }

    /// GPU time passes in this stream.
    pub(super) fn pass(&self, nanoseconds: u64) {
        self.clock_ns.fetch_add(nanoseconds, Ordering::AcqRel);
    }

    /// Work of this stream waits for a point in another one.
    pub(super) fn wait_until(&self, clock_ns: u64) {
        self.clock_ns.fetch_max(clock_ns, Ordering::AcqRel);
    }
}

#[derive(Debug, Default)]
pub(super) struct Event {
    /// GPU time at which it was recorded, plus one; 0 is never.
    recorded: AtomicU64,
}

impl Event {
    pub(super) fn record(&self, clock_ns: u64) {
        self.recorded.store(clock_ns + 1, Ordering::Release);
    }

    pub(super) fn clock_ns(&self) -> Option<u64> {
        self.recorded.load(Ordering::Acquire).checked_sub(1)
    }
}

#[derive(Debug)]
pub(super) struct Module {
    pub(super) image: Image,
}

/// A kernel of a module.
#[derive(Debug)]
pub(super) struct Function {
    pub(super) name: String,
    pub(super) module: usize,
    /// `cuFuncSetAttribute` values by attribute number.
    pub(super) attributes: Mutex<HashMap<u32, i32>>,
}

/// Objects of one kind by handle. Handles are numbers that are never given twice, so that a stale one is found out.
#[derive(Debug)]
pub(super) struct Table<T> {
    objects: LazyLock<Mutex<HashMap<usize, Arc<T>>>>,
}

impl<T> Table<T> {
    const fn new() -> Self {
        Self {
            objects: LazyLock::new(Mutex::default),
        }
    }

    pub(super) fn insert(&self, object: T) -> usize {
        let handle = next_handle();
        lock(&self.objects).insert(handle, Arc::new(object));
        handle
    }

    pub(super) fn get(&self, handle: usize) -> Outcome<Arc<T>> {
        lock(&self.objects)
            .get(&handle)
            .cloned()
            .ok_or(super::result::INVALID_HANDLE)
    }

    pub(super) fn remove(&self, handle: usize) -> Outcome<Arc<T>> {
        lock(&self.objects)
            .remove(&handle)
            .ok_or(super::result::INVALID_HANDLE)
    }
}

pub(super) static STREAMS: Table<Stream> = Table::new();
pub(super) static EVENTS: Table<Event> = Table::new();
pub(super) static MODULES: Table<Module> = Table::new();
pub(super) static FUNCTIONS: Table<Function> = Table::new();

impl Stream {
    pub(super) fn create(gpu: usize) -> usize {
        STREAMS.insert(Self {
            gpu,
            clock_ns: AtomicU64::new(0),
        })
    }
}

/// Handles start far from small numbers, which callers use for "default stream" and the like.
fn next_handle() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x10_0000);
    NEXT.fetch_add(16, Ordering::Relaxed)
}
