//! Event sets, which deliver Xids and wake those who wait for them.

use super::call::{
    Answer, Call, Failure, Handle, HandleKind, INVALID_ARGUMENT, NOT_SUPPORTED, Out, TIMEOUT, nvml,
};
use nvml_wrapper_sys::bindings as sys;
use std::collections::HashMap;
use std::ffi::c_uint;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Events that can be registered for, as on a real H200; only Xids and double-bit ECC errors ever
/// come.
const SUPPORTED: u64 = sys::nvmlEventTypeAll as u64;
/// Changes in time take effect when they are read; poll interval of a waiter.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// The Xid that also counts as a double-bit ECC error.
const DOUBLE_BIT_ECC_XID: u32 = 48;

#[derive(Debug)]
struct EventSet {
    /// The next event of the node to read.
    position: AtomicU64,
    /// GPUs with the event types that are wanted of each.
    registered: Mutex<Vec<(usize, u64)>>,
}

static EVENT_SETS: LazyLock<Mutex<HashMap<usize, Arc<EventSet>>>> = LazyLock::new(Mutex::default);

/// `nvmlEventSet_t`: a number that looks like a pointer.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
struct EventSetHandle(usize);

fn find(handle: EventSetHandle) -> Result<Arc<EventSet>, Failure> {
    let sets = EVENT_SETS.lock().unwrap_or_else(PoisonError::into_inner);
    sets.get(&handle.0).cloned().ok_or(INVALID_ARGUMENT)
}

/// The types under which an event is delivered.
fn types_of(xid: u32) -> u64 {
    let double_bit = if xid == DOUBLE_BIT_ECC_XID {
        sys::nvmlEventTypeDoubleBitEccError
    } else {
        0
    };
    u64::from(sys::nvmlEventTypeXidCriticalError | double_bit)
}

impl EventSet {
    /// The next event with a registration, if there is one by now.
    fn next(&self, call: &Call) -> Option<sys::nvmlEventData_t> {
        let state = call.node.state();
        loop {
            let position = self.position.load(Ordering::Acquire);
            if position >= state.event_count() {
                return None;
            }
            if self
                .position
                .compare_exchange(position, position + 1, Ordering::AcqRel, Ordering::Acquire)
                .is_err()
            {
                continue;
            }
            let Some(event) = state.event(position) else {
                continue;
            };
            let registered = self
                .registered
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let wanted = registered
                .iter()
                .filter(|(gpu, _)| *gpu == event.gpu as usize)
                .map(|(_, types)| types & types_of(event.xid))
                .fold(0, |all, types| all | types);
            if wanted == 0 {
                continue;
            }
            // An event is delivered once, as the Xid if that is registered.
            let xid = u64::from(sys::nvmlEventTypeXidCriticalError);
            let event_type = if wanted & xid != 0 { xid } else { wanted };
            return Some(sys::nvmlEventData_t {
                device: Handle::new(HandleKind::Gpu, event.gpu as usize, 0).pointer(),
                eventType: event_type,
                eventData: if event_type == xid {
                    u64::from(event.xid)
                } else {
                    0
                },
                gpuInstanceId: u32::MAX,
                computeInstanceId: u32::MAX,
            });
        }
    }
}

fn wait(
    call: &Call,
    handle: EventSetHandle,
    out: Out<sys::nvmlEventData_t>,
    timeout_ms: c_uint,
) -> Answer {
    let set = find(handle)?;
    if out.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    let deadline = Instant::now() + Duration::from_millis(u64::from(timeout_ms));
    loop {
        call.node.advance();
        let seen = call.node.state().event_count();
        if let Some(event) = set.next(call) {
            return out.set(event);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(TIMEOUT);
        }
        call.node.state().wait_for_event(seen, left.min(LOOK_EVERY));
    }
}

nvml! {
    fn nvmlEventSetCreate(out: Out<EventSetHandle>) |call| {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        // Multiples of 16 look like addresses of aligned memory.
        let handle = NEXT.fetch_add(1, Ordering::Relaxed) * 16;
        out.set(EventSetHandle(handle))?;
        let set = EventSet {
            position: AtomicU64::new(call.node.state().event_count()),
            registered: Mutex::default(),
        };
        EVENT_SETS.lock().unwrap_or_else(PoisonError::into_inner).insert(handle, Arc::new(set));
        Ok(())
    }

    fn nvmlEventSetFree(set: EventSetHandle) |_| {
        let removed = EVENT_SETS.lock().unwrap_or_else(PoisonError::into_inner).remove(&set.0);
        removed.map(|_| ()).ok_or(INVALID_ARGUMENT)
    }

    fn nvmlDeviceGetSupportedEventTypes(device: Handle, out: Out<u64>) |call| {
        call.gpu(device)?;
        out.set(SUPPORTED)
    }

    fn nvmlDeviceRegisterEvents(device: Handle, types: u64, set: EventSetHandle) |call| {
        let device = call.gpu(device)?;
        if types & !SUPPORTED != 0 {
            return Err(NOT_SUPPORTED);
        }
        let set = find(set)?;
        set.registered.lock().unwrap_or_else(PoisonError::into_inner).push((device.index, types));
        Ok(())
    }

    fn nvmlEventSetWait(set: EventSetHandle, out: Out<sys::nvmlEventData_t>, timeout_ms: c_uint) |call| {
        wait(call, set, out, timeout_ms)
    }
    fn nvmlEventSetWait_v2(set: EventSetHandle, out: Out<sys::nvmlEventData_t>, timeout_ms: c_uint) |call| {
        wait(call, set, out, timeout_ms)
    }
}
