//! The driver's state in this process: visible devices, contexts, and what every call does first.

use super::objects::{Context, next_handle};
use super::result::{
    CONTEXT_IS_DESTROYED, CuResult, INVALID_CONTEXT, INVALID_DEVICE, NO_DEVICE, NOT_INITIALIZED,
    Outcome, SUCCESS, UNKNOWN,
};
use crate::gpu::{CudaCall, Gpu};
use crate::node::{Node, hang, misbehave};
use crate::scenario::KernelModule;
use crate::state::{GpuState, ProcessSlot};
use crate::threads::lock;
use std::cell::RefCell;
use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock};

static DRIVER: OnceLock<Driver> = OnceLock::new();

/// The driver after `cuInit`.
pub(super) struct Driver {
    pub(super) node: &'static Node,
    /// GPUs by CUDA ordinal, as indexes into the scenario's list.
    pub(super) devices: Vec<usize>,
    /// The MIG instance that stands for a GPU in this process, by its position in the GPU's list.
    /// CUDA gives a process one MIG device at most.
    mig: Option<(usize, usize)>,
    primary_contexts: Mutex<HashMap<usize, PrimaryContext>>,
    /// Every context that was not destroyed, by handle.
    contexts: Mutex<HashMap<usize, Arc<Context>>>,
}

/// A GPU's primary context, which all users of the CUDA runtime in a process share.
struct PrimaryContext {
    /// The same for the process's life, as on a real driver.
    handle: usize,
    flags: u32,
    /// Retains that no release has taken back. The last release resets the context; a reset leaves
    /// the retains as they are.
    retained: u32,
}

thread_local! {
    /// Handles of contexts, the current one last. Never dropped: a program may call the driver from
    /// `atexit`, when thread-local values with a destructor are gone.
    static CURRENT: RefCell<ManuallyDrop<Vec<usize>>> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

/// Runs an API function that needs `cuInit` to have succeeded.
pub(super) fn call(name: &str, body: impl FnOnce(&'static Driver) -> Outcome) -> CuResult {
    guarded(name, || body(DRIVER.get().ok_or(NOT_INITIALIZED)?))
}

/// Runs an API function that works before `cuInit`, too. A bug of the simulator must end as an
/// error, not unwind into C.
pub(super) fn guarded(name: &str, body: impl FnOnce() -> Outcome) -> CuResult {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let node = Node::of_this_process().map_err(|_| UNKNOWN)?;
        if let Some(code) = misbehave(&node.scenario().cuda, name) {
            return if code == SUCCESS { Ok(()) } else { Err(code) };
        }
        body()
    }));
    match outcome {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => UNKNOWN,
    }
}

/// `cuInit`. It may be called again; a failure may be mended in between, so it is not remembered.
pub(super) fn init() -> Outcome {
    if DRIVER.get().is_some() {
        return Ok(());
    }
    let node = Node::of_this_process().map_err(|_| UNKNOWN)?;
    let scenario = node.scenario();
    // As a real driver (580.159.04) takes it, exactly written; set to nothing is an error, too.
    let order = std::env::var("CUDA_DEVICE_ORDER");
    if order.is_ok_and(|it| it != "PCI_BUS_ID" && it != "FASTEST_FIRST") {
        return Err(INVALID_DEVICE);
    }
    if scenario.driver.kernel_module == KernelModule::NotLoaded {
        return Err(NO_DEVICE);
    }
    if scenario.cuda.init_error != SUCCESS {
        return Err(scenario.cuda.init_error);
    }
    open_uvm(node);
    let mut seen = Vec::new();
    for (index, gpu) in scenario.gpus.iter().enumerate() {
        let may_be_opened = may_open(node, gpu);
        if !may_be_opened && scenario.cuda.needs_every_device_node {
            return Err(UNKNOWN);
        }
        if may_be_opened && gpu.hangs_cuda_init {
            hang();
        }
        if may_be_opened && gpu.visible_to.cuda && !gpu.lost {
            seen.push(index);
        }
    }
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let mig = mig_instance(visible.as_deref(), &seen, &scenario.gpus);
    let whole: Vec<usize> = seen
        .into_iter()
        .filter(|index| scenario.gpus[*index].mig.mode != Some(true))
        .collect();
    let devices = match (mig, visible) {
        (Some((gpu, _)), _) => vec![gpu],
        (None, Some(list)) => {
            let uuid_of = |index: &usize| scenario.gpus[*index].uuid.as_str();
            let uuids: Vec<&str> = whole.iter().map(uuid_of).collect();
            let named = visible_devices(&list, &uuids)?;
            named.into_iter().map(|device| whole[device]).collect()
        }
        (None, None) => whole,
    };
    if devices.is_empty() {
        return Err(NO_DEVICE);
    }
    DRIVER.get_or_init(|| Driver {
        node,
        devices,
        mig,
        primary_contexts: Mutex::default(),
        contexts: Mutex::default(),
    });
    Ok(())
}

/// Opens the unified memory driver's node, as a real `cuInit` does, until the process ends.
fn open_uvm(node: &Node) {
    if let Ok(file) = std::fs::File::open(node.folder().join("sysroot/dev/nvidia-uvm")) {
        std::mem::forget(file);
    }
}

/// Whether this process may open the GPU's device node. A GPU whose node it may not open is left
/// out; one whose node is missing is not, since `nvidia-modprobe` would make it.
fn may_open(node: &Node, gpu: &Gpu) -> bool {
    if !gpu.device_node_allowed {
        return false;
    }
    let path = format!("sysroot/dev/nvidia{}", gpu.minor_number);
    match std::fs::File::open(node.folder().join(path)) {
        Ok(_) => true,
        Err(error) => error.kind() != std::io::ErrorKind::PermissionDenied,
    }
}

/// The one MIG device of the process, if it has one: that whose UUID (or the start of it) is the
/// first entry of `CUDA_VISIBLE_DEVICES`, or where that is not set, the first one of all. While
/// there is one, CUDA offers no whole GPU.
// Source: NVIDIA Multi-Instance GPU User Guide, "CUDA visible devices".
fn mig_instance(visible: Option<&str>, seen: &[usize], gpus: &[Gpu]) -> Option<(usize, usize)> {
    let wanted = match visible {
        None => "MIG-",
        Some(list) => list
            .split(',')
            .next()
            .map(str::trim)
            .filter(|entry| entry.starts_with("MIG-"))?,
    };
    seen.iter()
        .filter(|index| gpus[**index].mig.mode == Some(true))
        .flat_map(|index| {
            let instances = gpus[*index].mig.instances.iter().enumerate();
            instances.map(move |(position, instance)| (*index, position, instance))
        })
        .find(|(_, _, instance)| instance.compute_instance && instance.uuid.starts_with(wanted))
        .map(|(gpu, position, _)| (gpu, position))
}

/// `CUDA_VISIBLE_DEVICES` as the real driver reads it: `captures/cuda-visible-devices.json`. The
/// list ends at the first entry that names nothing, and one that names a GPU for the second time is
/// an error of `cuInit`.
fn visible_devices(list: &str, uuids: &[&str]) -> Result<Vec<usize>, CuResult> {
    let by_uuid = list.starts_with("GPU-");
    let mut devices = Vec::new();
    for entry in list.split(',') {
        let found = if by_uuid {
            device_of_uuid(entry, uuids)
        } else {
            leading_number(entry).filter(|ordinal| *ordinal < uuids.len())
        };
        let Some(device) = found else { break };
        if devices.contains(&device) {
            return Err(INVALID_DEVICE);
        }
        devices.push(device);
    }
    if devices.is_empty() {
        return Err(NO_DEVICE);
    }
    Ok(devices)
}

/// The only GPU whose UUID begins like the entry, digit by digit; any text may follow the last
/// digit of a UUID.
fn device_of_uuid(entry: &str, uuids: &[&str]) -> Option<usize> {
    let wanted = entry.strip_prefix("GPU-")?.replace('-', "");
    if wanted.is_empty() {
        return None;
    }
    let fits = |device: &usize| {
        let digits = uuids[*device].trim_start_matches("GPU-").replace('-', "");
        let mut pairs = digits.chars().zip(wanted.chars());
        pairs.all(|(one, other)| one.eq_ignore_ascii_case(&other))
    };
    let fitting: Vec<usize> = (0..uuids.len()).filter(fits).collect();
    (fitting.len() == 1).then(|| fitting[0])
}

/// What C's `strtoul` makes of the entry, kept in an `int`.
fn leading_number(entry: &str) -> Option<usize> {
    let text = std::ffi::CString::new(entry).ok()?;
    let mut end = std::ptr::null_mut();
    #[allow(unsafe_code, reason = "C's own reading of a number")]
    // SAFETY: the text ends in NUL, and `end` is written with a place within it.
    let number = unsafe { libc::strtoul(text.as_ptr(), &raw mut end, 10) };
    if end.cast_const() == text.as_ptr() {
        return None;
    }
    #[expect(clippy::cast_possible_truncation, reason = "as the driver keeps it")]
    let number = number as i32;
    usize::try_from(number).ok()
}

impl PrimaryContext {
    fn new() -> Self {
        Self {
            handle: next_handle(),
            flags: 0,
            retained: 0,
        }
    }
}

impl Driver {
    /// The GPU of a CUDA ordinal, as an index into the scenario's list.
    pub(super) fn gpu_index(&self, ordinal: i32) -> Outcome<usize> {
        let ordinal = usize::try_from(ordinal).map_err(|_| INVALID_DEVICE)?;
        self.devices.get(ordinal).copied().ok_or(INVALID_DEVICE)
    }

    pub(super) fn ordinal_of(&self, gpu: usize) -> i32 {
        let position = self
            .devices
            .iter()
            .position(|index| *index == gpu)
            .unwrap_or(0);
        i32::try_from(position).unwrap_or(0)
    }

    /// This GPU's values as they are now; those of the MIG instance where one stands for the GPU.
    pub(super) fn with_gpu<T>(&self, gpu: usize, look: impl FnOnce(&Gpu) -> T) -> T {
        let scenario = self.node.scenario();
        let whole = &scenario.gpus[gpu];
        match self
            .instance_of(gpu)
            .and_then(|position| whole.mig.instances.get(position))
        {
            None => look(whole),
            Some(instance) => look(&Gpu {
                name: format!("{} MIG {}", whole.name, instance.profile),
                uuid: instance.uuid.clone(),
                memory: instance.memory,
                memory_reserved: crate::quantity::Bytes(0),
                sm_count: instance.sm_count,
                ..whole.clone()
            }),
        }
    }

    fn instance_of(&self, gpu: usize) -> Option<usize> {
        self.mig
            .filter(|(index, _)| *index == gpu)
            .map(|(_, position)| position)
    }

    /// What all processes on the GPU together may hold before this one gets no more, in bytes.
    pub(super) fn memory_capacity(&self, gpu: usize) -> u64 {
        let Some(position) = self.instance_of(gpu) else {
            return self.node.memory_capacity(gpu);
        };
        // An instance's memory is its own: what processes of the other instances hold leaves it
        // alone.
        let own = u32::try_from(position).ok();
        let processes = self.node.state().gpu(gpu).processes();
        let of_others: u64 = processes
            .iter()
            .filter(|process| process.mig_instance != own)
            .map(|process| process.memory_bytes)
            .sum();
        self.with_gpu(gpu, |instance| instance.memory.0) + of_others
    }

    /// The GPU that has what this process allocates on `gpu`: that one, but for a fault.
    pub(super) fn state_of(&self, gpu: usize) -> &'static GpuState {
        let lands_on = self.with_gpu(gpu, |it| it.cuda_lands_on);
        let lands_on = lands_on.and_then(|it| usize::try_from(it).ok());
        self.node.state().gpu(lands_on.unwrap_or(gpu))
    }

    /// This process's entry on the GPU.
    pub(super) fn slot(&self, gpu: usize) -> Outcome<&'static ProcessSlot> {
        let slot = self
            .state_of(gpu)
            .attach()
            .ok_or(super::result::OUT_OF_MEMORY)?;
        slot.set_mig_instance(
            self.instance_of(gpu)
                .and_then(|position| u32::try_from(position).ok()),
        );
        Ok(slot)
    }

    /// `cuDevicePrimaryCtxRetain`.
    pub(super) fn retain_primary_context(&'static self, gpu: usize) -> Outcome<usize> {
        let mut primary = lock(&self.primary_contexts);
        let entry = primary.entry(gpu).or_insert_with(PrimaryContext::new);
        if !self.is_open(entry.handle) {
            self.open_context(gpu, entry.handle)?;
        }
        entry.retained += 1;
        Ok(entry.handle)
    }

    /// `cuDevicePrimaryCtxRelease`. A context that is not retained cannot be released.
    // Source: CUDA Driver API, "Primary Context Management".
    pub(super) fn release_primary_context(&self, gpu: usize) -> Outcome {
        let mut primary = lock(&self.primary_contexts);
        let entry = primary.get_mut(&gpu).ok_or(INVALID_CONTEXT)?;
        entry.retained = entry.retained.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        if entry.retained == 0 {
            self.close_context(entry.handle);
        }
        Ok(())
    }

    /// `cuDevicePrimaryCtxReset`: destroys what the context holds, also while it is retained.
    pub(super) fn reset_primary_context(&self, gpu: usize) {
        if let Some(entry) = lock(&self.primary_contexts).get(&gpu) {
            self.close_context(entry.handle);
        }
    }

    /// The primary context's flags, and whether it is active.
    pub(super) fn primary_context_state(&self, gpu: usize) -> (u32, bool) {
        let primary = lock(&self.primary_contexts);
        primary.get(&gpu).map_or((0, false), |entry| {
            (entry.flags, self.is_open(entry.handle))
        })
    }

    pub(super) fn set_primary_context_flags(&self, gpu: usize, flags: u32) {
        let mut primary = lock(&self.primary_contexts);
        let entry = primary.entry(gpu).or_insert_with(PrimaryContext::new);
        entry.flags = flags;
    }

    fn is_open(&self, handle: usize) -> bool {
        lock(&self.contexts).contains_key(&handle)
    }

    fn close_context(&self, handle: usize) {
        if let Ok(context) = self.context(handle) {
            self.destroy_context(&context);
        }
    }

    pub(super) fn create_context(&'static self, gpu: usize) -> Outcome<Arc<Context>> {
        self.open_context(gpu, next_handle())
    }

    fn open_context(&self, gpu: usize, handle: usize) -> Outcome<Arc<Context>> {
        self.injected_error(gpu, CudaCall::ContextCreation)?;
        let slot = self.slot(gpu)?;
        slot.open_context();
        let context = Arc::new(Context::new(gpu, handle));
        lock(&self.contexts).insert(context.handle(), Arc::clone(&context));
        Ok(context)
    }

    pub(super) fn destroy_context(&self, context: &Arc<Context>) {
        if lock(&self.contexts).remove(&context.handle()).is_none() {
            return;
        }
        let freed_bytes = super::memory::free_all(context.handle());
        if let Some(slot) = self.state_of(context.gpu).attach() {
            slot.release_memory(freed_bytes);
            if slot.close_context() == 0 {
                slot.detach();
            }
        }
    }

    pub(super) fn context(&self, handle: usize) -> Outcome<Arc<Context>> {
        lock(&self.contexts)
            .get(&handle)
            .cloned()
            .ok_or(INVALID_CONTEXT)
    }

    /// The current context, if no sticky error has poisoned it and its GPU is still there.
    pub(super) fn current(&self) -> Outcome<Arc<Context>> {
        let handle = current_handle().ok_or(INVALID_CONTEXT)?;
        let context = self.context(handle).map_err(|_| CONTEXT_IS_DESTROYED)?;
        match context.sticky_error() {
            SUCCESS => {}
            code => return Err(code),
        }
        if self.with_gpu(context.gpu, |gpu| gpu.lost) {
            return Err(context.poison(UNKNOWN));
        }
        Ok(context)
    }

    /// The error that the scenario wants from this kind of call on the GPU, if it does. A call that
    /// shall hang does not return.
    pub(super) fn injected_error(&self, gpu: usize, call: CudaCall) -> Outcome {
        if self.with_gpu(gpu, |values| values.cuda_hang == Some(call)) {
            hang();
        }
        self.with_gpu(gpu, |values| match &values.cuda_error {
            Some(error) if error.from == call => Err((error.code, error.sticky)),
            _ => Ok(()),
        })
        .map_err(|(code, sticky)| {
            if sticky && let Some(Ok(context)) = current_handle().map(|it| self.context(it)) {
                context.poison(code);
            }
            code
        })
    }
}

/// The driver, if `cuInit` succeeded in this process.
pub(super) fn initialized() -> Option<&'static Driver> {
    DRIVER.get()
}

pub(super) fn current_handle() -> Option<usize> {
    CURRENT.with_borrow(|stack| stack.last().copied())
}

pub(super) fn set_current(context: Option<usize>) {
    CURRENT.with_borrow_mut(|stack| {
        stack.pop();
        stack.extend(context);
    });
}

pub(super) fn push_current(context: usize) {
    CURRENT.with_borrow_mut(|stack| stack.push(context));
}

pub(super) fn pop_current() -> Option<usize> {
    CURRENT.with_borrow_mut(|stack| stack.pop())
}

/// A context that its owner destroys is no longer current to the calling thread; a primary context
/// that is reset still is.
pub(super) fn forget_current(context: usize) {
    CURRENT.with_borrow_mut(|stack| stack.retain(|it| *it != context));
}

#[cfg(test)]
mod tests {
    use super::{CuResult, visible_devices};
    use serde::Deserialize;

    #[derive(Deserialize)]
    struct Capture {
        uuids: Vec<String>,
        values: Vec<Asked>,
    }

    #[derive(Deserialize)]
    struct Asked {
        value: String,
        error: Option<CuResult>,
        #[serde(default)]
        devices: Vec<usize>,
    }

    #[test]
    fn visible_devices_are_those_of_a_real_driver() {
        let text = include_str!("../../captures/cuda-visible-devices.json");
        let Capture { uuids, values } = serde_json::from_str(text).expect("a capture");
        let uuids: Vec<&str> = uuids.iter().map(String::as_str).collect();
        for asked in values {
            let expected = asked.error.map_or(Ok(asked.devices), Err);
            let value = asked.value;
            assert_eq!(visible_devices(&value, &uuids), expected, "{value:?}");
        }
    }
}
