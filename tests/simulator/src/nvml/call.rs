//! What every NVML function shares: the check that NVML is initialised, faults by function name,
//! handles, and writing through the caller's pointers.

#![allow(
    unsafe_code,
    reason = "reads and writes through pointers that C callers pass"
)]

use crate::gpu::{Gpu, MigInstance};
use crate::node::{Node, misbehave, misbehave_for};
use crate::scenario::Scenario;
use nvml_wrapper_sys::bindings as sys;
use std::ffi::{CStr, c_char, c_uint};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// An `nvmlReturn_t` other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Failure(pub(super) u32);

pub(super) const UNINITIALIZED: Failure = Failure(sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED);
pub(super) const INVALID_ARGUMENT: Failure =
    Failure(sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
pub(super) const NOT_SUPPORTED: Failure = Failure(sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED);
pub(super) const NO_PERMISSION: Failure = Failure(sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION);
pub(super) const NOT_FOUND: Failure = Failure(sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND);
pub(super) const INSUFFICIENT_SIZE: Failure =
    Failure(sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE);
pub(super) const DRIVER_NOT_LOADED: Failure =
    Failure(sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED);
pub(super) const TIMEOUT: Failure = Failure(sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT);
pub(super) const CORRUPTED_INFOROM: Failure =
    Failure(sys::nvmlReturn_enum_NVML_ERROR_CORRUPTED_INFOROM);
pub(super) const GPU_IS_LOST: Failure = Failure(sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST);
pub(super) const LIB_RM_VERSION_MISMATCH: Failure =
    Failure(sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH);
pub(super) const ARGUMENT_VERSION_MISMATCH: Failure =
    Failure(sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
pub(super) const DEPRECATED: Failure = Failure(sys::nvmlReturn_enum_NVML_ERROR_DEPRECATED);
pub(super) const NO_DATA: Failure = Failure(sys::nvmlReturn_enum_NVML_ERROR_NO_DATA);
const UNKNOWN: u32 = sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN;

pub(super) type Answer = Result<(), Failure>;

/// How often `nvmlInit` was called more than `nvmlShutdown`.
static INITIALIZED: AtomicU32 = AtomicU32::new(0);

/// Defines exported NVML functions by their results.
macro_rules! nvml {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?) |$call:pat_param| $body:block)*) => {$(
        $(#[$attribute])*
        #[allow(unsafe_code, reason = "exported under NVML's name")]
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $kind),*) -> nvml_wrapper_sys::bindings::nvmlReturn_t {
            $crate::nvml::call::answer(stringify!($name), |$call| $body)
        }
    )*};
}
pub(super) use nvml;

/// The node as one call sees it.
pub(super) struct Call {
    /// The name of the function that was called.
    function: &'static str,
    pub(super) node: &'static Node,
    pub(super) scenario: Arc<Scenario>,
}

/// A GPU or MIG device that a handle names.
#[derive(Clone, Copy)]
pub(super) struct Device<'call> {
    /// Position in the scenario.
    pub(super) index: usize,
    pub(super) gpu: &'call Gpu,
    pub(super) mig: Option<(u32, &'call MigInstance)>,
}

/// Answers a call: fails unless NVML is initialised, and does what the scenario states for this
/// function.
pub(super) fn answer(function: &'static str, body: impl FnOnce(&Call) -> Answer) -> u32 {
    if INITIALIZED.load(Ordering::Acquire) == 0 {
        return UNINITIALIZED.0;
    }
    with_call(function, body)
}

pub(super) fn with_call(function: &'static str, body: impl FnOnce(&Call) -> Answer) -> u32 {
    // A panic must not unwind into C.
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let Ok(node) = Node::of_this_process() else {
            return DRIVER_NOT_LOADED.0;
        };
        let call = Call {
            function,
            node,
            scenario: node.scenario(),
        };
        if let Some(code) = misbehave(&call.scenario.nvml, function) {
            return code;
        }
        match body(&call) {
            Ok(()) => sys::nvmlReturn_enum_NVML_SUCCESS,
            Err(failure) => failure.0,
        }
    }))
    .unwrap_or(UNKNOWN)
}

/// `nvmlInit` under any of its names.
pub(super) fn initialize(function: &'static str) -> u32 {
    with_call(function, |call| {
        let driver = &call.scenario.driver;
        if driver.kernel_module == crate::scenario::KernelModule::NotLoaded {
            return Err(DRIVER_NOT_LOADED);
        }
        if driver.nvml_version() != driver.version {
            return Err(LIB_RM_VERSION_MISMATCH);
        }
        if call.scenario.nvml.init_error != 0 {
            return Err(Failure(call.scenario.nvml.init_error));
        }
        INITIALIZED.fetch_add(1, Ordering::AcqRel);
        Ok(())
    })
}

/// `nvmlShutdown`.
pub(super) fn shut_down() -> Answer {
    INITIALIZED
        .fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| {
            count.checked_sub(1)
        })
        .map(|_| ())
        .map_err(|_| UNINITIALIZED)
}

// Handles are numbers that look like pointers and are never followed.
const HANDLE_TAG: usize = 0x0053_0000_0000;
const KIND_SHIFT: usize = 16;
const GPU_SHIFT: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HandleKind {
    Gpu = 1,
    MigDevice = 2,
    GpuInstance = 3,
    ComputeInstance = 4,
}

/// `nvmlDevice_t`, `nvmlGpuInstance_t` or `nvmlComputeInstance_t`.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Handle(usize);

impl Handle {
    pub(super) fn new(kind: HandleKind, gpu: usize, instance: usize) -> Self {
        Self(HANDLE_TAG | (kind as usize) << KIND_SHIFT | gpu << GPU_SHIFT | instance)
    }

    /// What a caller passes through a function without parameters of its own.
    pub(super) fn from_register(register: usize) -> Self {
        Self(register)
    }

    /// The same handle as a pointer, for structs of the bindings.
    pub(super) fn pointer<T>(self) -> *mut T {
        std::ptr::without_provenance_mut(self.0)
    }

    fn decode(self) -> Option<(usize, usize, usize)> {
        let (kind, gpu, instance) = (
            self.0 >> KIND_SHIFT & 0xff,
            self.0 >> GPU_SHIFT & 0xff,
            self.0 & 0xff,
        );
        (self.0 & !0x00ff_ffff == HANDLE_TAG).then_some((kind, gpu, instance))
    }

    /// GPU and instance, when the handle is of this kind.
    pub(super) fn of_kind(self, kind: HandleKind) -> Option<(usize, usize)> {
        let (given, gpu, instance) = self.decode()?;
        (given == kind as usize).then_some((gpu, instance))
    }
}

impl Call {
    /// GPUs that NVML sees, by their position in the scenario.
    pub(super) fn visible_gpus(&self) -> Vec<usize> {
        let gpus = self.scenario.gpus.iter().enumerate();
        gpus.filter(|(_, gpu)| gpu.visible_to.nvml)
            .map(|(index, _)| index)
            .collect()
    }

    /// The device that a handle names, whatever kind it is; a GPU that fell off the bus is lost to
    /// every call.
    pub(super) fn device(&self, handle: Handle) -> Result<Device<'_>, Failure> {
        let (kind, index, instance) = handle.decode().ok_or(INVALID_ARGUMENT)?;
        let gpu = self
            .scenario
            .gpus
            .get(index)
            .filter(|gpu| gpu.visible_to.nvml)
            .ok_or(INVALID_ARGUMENT)?;
        if gpu.lost {
            return Err(GPU_IS_LOST);
        }
        if let Some(code) = misbehave_for(&gpu.nvml, self.function) {
            return Err(Failure(code));
        }
        match kind {
            _ if kind == HandleKind::Gpu as usize => Ok(Device {
                index,
                gpu,
                mig: None,
            }),
            _ if kind == HandleKind::MigDevice as usize => {
                let mig = gpu.mig.instances.get(instance).ok_or(INVALID_ARGUMENT)?;
                let number = u32::try_from(instance).map_err(|_| INVALID_ARGUMENT)?;
                Ok(Device {
                    index,
                    gpu,
                    mig: Some((number, mig)),
                })
            }
            _ => Err(INVALID_ARGUMENT),
        }
    }

    /// A whole GPU; most values are not reported for a MIG device.
    pub(super) fn gpu(&self, handle: Handle) -> Result<Device<'_>, Failure> {
        let device = self.device(handle)?;
        if device.mig.is_some() {
            Err(NOT_SUPPORTED)
        } else {
            Ok(device)
        }
    }

    pub(super) fn readings(&self, device: Device<'_>) -> crate::dynamics::Readings {
        self.node.readings(device.index)
    }
}

/// A value that this product does not have is not supported.
pub(super) fn supported<T>(value: Option<T>) -> Result<T, Failure> {
    value.ok_or(NOT_SUPPORTED)
}

/// A pointer that the caller wants a value written to.
#[repr(transparent)]
#[derive(Debug)]
pub(super) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// A pointer that the caller left in a struct.
    pub(super) fn from_pointer(pointer: *mut T) -> Self {
        Self(pointer)
    }

    pub(super) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Writes the value, or fails when the caller passed no place for it.
    pub(super) fn set(self, value: T) -> Answer {
        if self.0.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: the interface requires a pointer to a `T` that can be written.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Reads what the caller put there.
    pub(super) fn get(self) -> Result<T, Failure>
    where
        T: Copy,
    {
        if self.0.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: the interface requires a pointer to an initialised `T`.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// Element `index` of an array.
    pub(super) fn element(self, index: usize) -> Self {
        // Wrapping, because the caller states the length of the array.
        Self(self.0.wrapping_add(index))
    }

    /// Fills a struct whose first field holds its version and size, when that is `version`.
    pub(super) fn set_versioned(self, version: u32, value: T) -> Answer {
        if self.0.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let given = Out(self.0.cast::<c_uint>()).get()?;
        if given != version_of::<T>(version) {
            return Err(ARGUMENT_VERSION_MISMATCH);
        }
        self.set(value)
    }

    pub(super) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }
}

/// NVML's version word: the struct's size, and its version in the upper byte.
pub(super) fn version_of<T>(version: u32) -> u32 {
    u32::try_from(size_of::<T>()).unwrap_or(u32::MAX) | version << 24
}

/// A buffer for text.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(super) struct TextOut(*mut c_char);

impl TextOut {
    /// A pointer that the caller passed in another way.
    pub(super) fn from_pointer(pointer: *mut c_char) -> Self {
        Self(pointer)
    }

    pub(super) fn set(self, length: c_uint, text: &str) -> Answer {
        if self.0.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        if (length as usize) <= text.len() {
            return Err(INSUFFICIENT_SIZE);
        }
        // SAFETY: the caller's buffer has `length` bytes, more than the text and its end.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), self.0.cast::<u8>(), text.len());
            self.0.add(text.len()).write(0);
        }
        Ok(())
    }
}

/// Text that the caller passes.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(super) struct TextIn(*const c_char);

impl TextIn {
    /// A pointer that the caller passed in another way.
    pub(super) fn from_pointer(pointer: *const c_char) -> Self {
        Self(pointer)
    }

    pub(super) fn get(self) -> Result<String, Failure> {
        if self.0.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: the interface requires a string that ends in a NUL.
        Ok(unsafe { CStr::from_ptr(self.0) }
            .to_string_lossy()
            .into_owned())
    }
}

/// Answers a list the way NVML does: with too small a count it returns the right one and fails.
pub(super) fn set_list<T: Copy>(count: Out<c_uint>, array: Out<T>, items: &[T]) -> Answer {
    let room = count.get()?;
    let needed = c_uint::try_from(items.len()).map_err(|_| INVALID_ARGUMENT)?;
    count.set(needed)?;
    if items.is_empty() {
        return Ok(());
    }
    if room < needed || array.is_null() {
        return Err(INSUFFICIENT_SIZE);
    }
    for (index, item) in items.iter().enumerate() {
        array.element(index).set(*item)?;
    }
    Ok(())
}

/// A fixed field of characters, filled with text and ended by a NUL.
pub(super) fn characters<const LENGTH: usize>(text: &str) -> [c_char; LENGTH] {
    let mut field = [0; LENGTH];
    for (place, byte) in field.iter_mut().take(LENGTH - 1).zip(text.bytes()) {
        *place = byte.cast_signed();
    }
    field
}

/// `nvmlEnableState_t`.
pub(super) fn enabled(on: bool) -> u32 {
    u32::from(on)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_told_apart() {
        let handle = Handle::new(HandleKind::MigDevice, 3, 6);
        assert_eq!(handle.of_kind(HandleKind::MigDevice), Some((3, 6)));
        assert_eq!(handle.of_kind(HandleKind::Gpu), None);
        assert_eq!(Handle(0).of_kind(HandleKind::Gpu), None);
        assert_eq!(Handle(0x7fff_1234_5678).of_kind(HandleKind::Gpu), None);
    }

    #[test]
    fn version_words_are_nvidias() {
        // As in nvml.h: nvmlMemory_v2 is 0x02000028, nvmlGpuFabricInfo_v3 0x3000028,
        // nvmlPlatformInfo_v2 0x200002c.
        assert_eq!(version_of::<sys::nvmlMemory_v2_t>(2), 0x0200_0028);
        assert_eq!(version_of::<sys::nvmlGpuFabricInfo_v3_t>(3), 0x0300_0028);
        assert_eq!(version_of::<sys::nvmlPlatformInfo_v2_t>(2), 0x0200_002c);
    }

    #[test]
    fn short_buffers_and_null_pointers_fail() {
        let mut buffer = [1; 4];
        let out = TextOut(buffer.as_mut_ptr());
        assert_eq!(out.set(4, "abcd"), Err(INSUFFICIENT_SIZE));
        assert_eq!(out.set(4, "abc"), Ok(()));
        assert_eq!(buffer, [97, 98, 99, 0]);
        assert_eq!(
            TextOut(std::ptr::null_mut()).set(4, ""),
            Err(INVALID_ARGUMENT)
        );
        assert_eq!(
            Out::<u32>(std::ptr::null_mut()).set(1),
            Err(INVALID_ARGUMENT)
        );
    }
}
