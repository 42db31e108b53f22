//! Contexts, streams, events, modules and functions: what handles point to.

use super::image::Image;
use super::result::{CuResult, Outcome, SUCCESS};
use crate::threads::lock;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

/// A context on one GPU.
#[derive(Debug)]
pub(super) struct Context {
    handle: usize,
    /// Index into the scenario's list of GPUs.
    pub(super) gpu: usize,
    sticky_error: AtomicU32,
    /// `cuCtxSetLimit` values by limit.
    pub(super) limits: Mutex<HashMap<u32, usize>>,
    /// The default stream's clock, in nanoseconds of GPU time.
    pub(super) default_stream: Arc<Stream>,
}

impl Context {
    pub(super) fn new(gpu: usize, handle: usize) -> Self {
        Self {
            handle,
            gpu,
            sticky_error: AtomicU32::new(SUCCESS),
            limits: Mutex::default(),
            default_stream: Arc::new(Stream::new(gpu, handle)),
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

/// A stream: work in it has ended when the launching call returns, so all it keeps is the GPU time
/// that has passed in it.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) gpu: usize,
    /// Handle of the context that it was made in.
    pub(super) context: usize,
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

/// A library and the module that stands for it in every context.
#[derive(Debug)]
pub(super) struct Library {
    pub(super) module: usize,
    /// Handles of its kernels, in the order of the image. A kernel's handle is a function's, too.
    pub(super) kernels: Vec<usize>,
}

/// A kernel of a module.
#[derive(Debug)]
pub(super) struct Function {
    pub(super) name: String,
    pub(super) module: usize,
    /// `cuFuncSetAttribute` values by attribute number.
    pub(super) attributes: Mutex<HashMap<u32, i32>>,
}

/// Objects of one kind by handle. Handles are numbers that are never given twice, so that a stale
/// one is found out.
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

    /// The handle of an object that fits.
    pub(super) fn find(&self, fits: impl Fn(&T) -> bool) -> Option<usize> {
        let objects = lock(&self.objects);
        let found = objects.iter().find(|(_, object)| fits(object));
        found.map(|(handle, _)| *handle)
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
/// `cuLibraryLoadData`'s: modules that belong to no context.
pub(super) static LIBRARIES: Table<Library> = Table::new();
pub(super) static FUNCTIONS: Table<Function> = Table::new();

impl Stream {
    fn new(gpu: usize, context: usize) -> Self {
        Self {
            gpu,
            context,
            clock_ns: AtomicU64::new(0),
        }
    }

    pub(super) fn create(context: &Context) -> usize {
        STREAMS.insert(Self::new(context.gpu, context.handle))
    }
}

/// Handles start far from small numbers, which callers use for "default stream" and the like.
pub(super) fn next_handle() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x10_0000);
    NEXT.fetch_add(16, Ordering::Relaxed)
}
