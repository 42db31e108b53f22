//! Xids as NVML reports them: as events, to every listener. They need no right to read the kernel
//! log, and come whatever is written to that.

use nvml_wrapper_sys::bindings::{nvmlEventData_t, nvmlEventSet_t, nvmlEventTypeXidCriticalError};

use super::super::calls::Called;
use super::super::status::ERROR_TIMEOUT;
use super::{Device, checked, symbol};

/// The Xids of one device since this was made. (Despite its name the event comes for Xids of every
/// kind: 13, 31 and 43 were seen on an H200.)
pub(in super::super) struct XidEvents<'a> {
    device: &'a Device<'a>,
    set: nvmlEventSet_t,
}

impl<'a> XidEvents<'a> {
    /// Takes the driver 0.8 ms (BENCHMARKS.md).
    pub(in super::super) fn of(device: &'a Device<'a>) -> Called<Self> {
        let functions = &device.nvml.functions;
        let set = device.calls.make("nvmlEventSetCreate", || {
            let function = symbol(&functions.nvmlEventSetCreate)?;
            let mut set: nvmlEventSet_t = std::ptr::null_mut();
            // SAFETY: writes one handle.
            checked(unsafe { function(&raw mut set) })?;
            Ok(set)
        })?;
        // From here on dropping it frees the set.
        let events = Self { device, set };
        let types = u64::from(nvmlEventTypeXidCriticalError);
        device.calls.make("nvmlDeviceRegisterEvents", || {
            let function = symbol(&functions.nvmlDeviceRegisterEvents)?;
            // SAFETY: both handles are NVML's own, and live.
            checked(unsafe { function(device.handle, types, set) })
        })?;
        Ok(events)
    }

    /// The next Xid since the last call; does not wait for one (2 µs).
    pub(in super::super) fn next(&self) -> Called<Option<u32>> {
        let functions = &self.device.nvml.functions;
        let event = self.device.calls.make("nvmlEventSetWait_v2", || {
            let function = symbol(&functions.nvmlEventSetWait_v2)?;
            let mut event = nvmlEventData_t {
                device: self.device.handle,
                eventType: 0,
                eventData: 0,
                gpuInstanceId: 0,
                computeInstanceId: 0,
            };
            // SAFETY: the set is NVML's own, and live; writes one event.
            checked(unsafe { function(self.set, &raw mut event, 0) })?;
            Ok(event)
        });
        match event {
            Ok(event) => Ok(u32::try_from(event.eventData).ok()),
            Err(failure) if failure.status() == Some(ERROR_TIMEOUT) => Ok(None),
            Err(failure) => Err(failure),
        }
    }
}

impl Drop for XidEvents<'_> {
    fn drop(&mut self) {
        if let Ok(function) = symbol(&self.device.nvml.functions.nvmlEventSetFree) {
            // SAFETY: the set is NVML's own, and not used after this.
            unsafe { function(self.set) };
        }
    }
}
