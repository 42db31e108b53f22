//! The FFI corner of CUDA: the driver API by dlopen, with small typed wrappers.
//!
//! A `CUresult` stays a number: a driver may be newer than any list of its answers. A missing
//! function is an error like any other. Everything that is allocated is freed when its wrapper is
//! dropped, in an order that the borrow checker holds: buffers and modules do not outlive their
//! context.
#![expect(
    unsafe_code,
    reason = "the only place that calls the CUDA driver's C functions"
)]

mod compute;
mod cublaslt;
mod functions;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::rc::Rc;

use libloading::os::unix::{Library as UnixLibrary, RTLD_GLOBAL, RTLD_NOW};

pub(crate) use compute::{
    Argument, DeviceMemory, Event, HostWords, Kernel, LaunchShape, TensorMap,
};
pub(crate) use cublaslt::{ComputeType, Cublaslt, DataType, ProductPlan, ProductTypes};

use crate::driver_libraries;
use functions::DriverFunctions;

// Source: cuda.h, CUresult.
const CUDA_SUCCESS: u32 = 0;
pub(crate) const CUDA_ERROR_OUT_OF_MEMORY: u32 = 2;
pub(crate) const CUDA_ERROR_DEVICE_UNAVAILABLE: u32 = 46;
// Source: cuda.h, CUdevice_attribute.
const ATTRIBUTE_MULTIPROCESSOR_COUNT: c_int = 16;
const ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: c_int = 75;
const ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: c_int = 76;

/// Why a driver call gave nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CudaFailure {
    /// The library has no such function.
    MissingFunction { call: &'static str },
    /// The call answered with an error.
    Status {
        call: &'static str,
        code: u32,
        /// `CUDA_ERROR_SYSTEM_NOT_READY`, by the driver's own naming.
        name: String,
    },
}

impl std::fmt::Display for CudaFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::MissingFunction { call } => write!(f, "libcuda has no function {call}"),
            Self::Status { call, code, name } => write!(f, "{call} returned {name} ({code})"),
        }
    }
}

pub(crate) type CudaResult<T> = Result<T, CudaFailure>;

/// A loaded `libcuda.so.1`; never unloaded, since the driver's own threads may outlive any use of
/// it.
pub(crate) struct CudaLibrary {
    library: &'static libloading::Library,
    functions: DriverFunctions,
    loaded_by_path: Option<String>,
    unloadable: Option<String>,
}

impl CudaLibrary {
    /// Loads the library by its name, else from the places where drivers put it.
    pub(crate) fn load() -> Result<Self, String> {
        let loaded = driver_libraries::load("libcuda.so.1", |name| {
            // SAFETY: loading runs the library's initialisers; libcuda's have no precondition.
            unsafe { UnixLibrary::open(Some(name), RTLD_NOW | RTLD_GLOBAL) }
        })?;
        let library: libloading::Library = loaded.library.into();
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        let address_of = |name: &'static str| {
            // SAFETY: an address is a pointer, whatever the type of what lies there.
            let symbol = unsafe { library.get::<*mut c_void>(name.as_bytes()) }.ok()?;
            Some(*symbol).filter(|it| !it.is_null())
        };
        Ok(Self {
            library,
            // SAFETY: libcuda exports what cuda.h declares.
            functions: unsafe { DriverFunctions::resolve(address_of) },
            loaded_by_path: loaded.by_path,
            unloadable: loaded.unloadable,
        })
    }

    /// The path by which it had to be loaded, since the loader does not find its name.
    pub(crate) fn loaded_by_path(&self) -> Option<&str> {
        self.loaded_by_path.as_deref()
    }

    /// The loader's error for the name, where it found a file that cannot be loaded.
    pub(crate) fn unloadable(&self) -> Option<&str> {
        self.unloadable.as_deref()
    }

    /// The file that was loaded.
    pub(crate) fn path() -> Option<String> {
        driver_libraries::loaded_path("libcuda.so")
    }

    /// The scenario of a simulated library.
    pub(crate) fn simulator_scenario(&self) -> Option<String> {
        driver_libraries::simulator_scenario(self.library)
    }

    /// The name that the driver gives a result.
    pub(crate) fn result_name(&self, code: u32) -> String {
        self.functions.result_name(code)
    }

    /// `cuInit`; 0 is success. The code is the fact here, not a failure.
    pub(crate) fn initialize(&self) -> CudaResult<u32> {
        // SAFETY: cuInit may be called at any time; its flags must be 0.
        match unsafe { self.functions.cuInit(0) } {
            Ok(()) => Ok(CUDA_SUCCESS),
            Err(CudaFailure::Status { code, .. }) => Ok(code),
            Err(missing) => Err(missing),
        }
    }

    /// 1000 x major + 10 x minor; works without initialisation.
    pub(crate) fn driver_version(&self) -> CudaResult<u32> {
        let mut version: c_int = 0;
        // SAFETY: the pointer is to a live int.
        unsafe { self.functions.cuDriverGetVersion(&raw mut version) }?;
        Ok(version.cast_unsigned())
    }

    /// All devices that CUDA shows to this process.
    pub(crate) fn devices(&self) -> CudaResult<Vec<Device<'_>>> {
        let mut count: c_int = 0;
        // SAFETY: the pointer is to a live int.
        unsafe { self.functions.cuDeviceGetCount(&raw mut count) }?;
        (0..count)
            .map(|ordinal| {
                let mut handle = 0;
                // SAFETY: the pointer is to a live int.
                unsafe { self.functions.cuDeviceGet(&raw mut handle, ordinal) }?;
                Ok(Device { cuda: self, handle })
            })
            .collect()
    }
}

/// One CUDA device.
pub(crate) struct Device<'a> {
    cuda: &'a CudaLibrary,
    handle: c_int,
}

impl<'a> Device<'a> {
    pub(crate) fn name(&self) -> CudaResult<String> {
        text(|buffer, length| {
            // SAFETY: the buffer has the length that is passed.
            unsafe { (self.cuda.functions).cuDeviceGetName(buffer, length, self.handle) }
        })
    }

    /// `0000:3b:00.0`.
    pub(crate) fn pci_address(&self) -> CudaResult<String> {
        let address = text(|buffer, length| {
            // SAFETY: the buffer has the length that is passed.
            unsafe { (self.cuda.functions).cuDeviceGetPCIBusId(buffer, length, self.handle) }
        })?;
        Ok(address.to_lowercase())
    }

    /// The UUID in NVML's spelling: `GPU-…`, or `MIG-…` for a MIG device, recognised by its name.
    pub(crate) fn uuid(&self) -> CudaResult<String> {
        let mut bytes = [0; 16];
        // SAFETY: the pointer is to 16 live bytes.
        unsafe { (self.cuda.functions).cuDeviceGetUuid_v2(&raw mut bytes, self.handle) }?;
        let kind = if self.name()?.contains(" MIG ") {
            "MIG"
        } else {
            "GPU"
        };
        Ok(format!("{kind}-{}", uuid_text(bytes)))
    }

    pub(crate) fn total_memory_bytes(&self) -> CudaResult<u64> {
        let mut bytes = 0;
        // SAFETY: the pointer is to a live size_t.
        unsafe { (self.cuda.functions).cuDeviceTotalMem_v2(&raw mut bytes, self.handle) }?;
        Ok(bytes as u64)
    }

    pub(crate) fn multiprocessors(&self) -> CudaResult<u32> {
        self.attribute(ATTRIBUTE_MULTIPROCESSOR_COUNT)
    }

    /// Major and minor.
    pub(crate) fn compute_capability(&self) -> CudaResult<(u32, u32)> {
        Ok((
            self.attribute(ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            self.attribute(ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ))
    }

    fn attribute(&self, attribute: c_int) -> CudaResult<u32> {
        let functions = &self.cuda.functions;
        let mut value = 0;
        // SAFETY: the pointer is to a live int.
        unsafe { functions.cuDeviceGetAttribute(&raw mut value, attribute, self.handle) }?;
        Ok(value.max(0).cast_unsigned())
    }

    /// Takes the device's primary context and makes it this thread's.
    pub(crate) fn context(&self) -> CudaResult<Context<'a>> {
        let functions = &self.cuda.functions;
        let mut handle = null_mut();
        // SAFETY: the pointer is to a live handle, which the driver fills in on success.
        unsafe { functions.cuDevicePrimaryCtxRetain(&raw mut handle, self.handle) }?;
        let context = Context {
            cuda: self.cuda,
            device: self.handle,
            handle,
            of_this_thread: PhantomData,
        };
        context.make_current()?;
        Ok(context)
    }
}

/// The text that a call writes to a buffer of the length that it is passed.
fn text(fill: impl FnOnce(*mut c_char, c_int) -> CudaResult<()>) -> CudaResult<String> {
    let mut buffer = [0u8; 256];
    // The length is one byte less, so that the last one stays NUL whatever the driver writes.
    fill(buffer.as_mut_ptr().cast(), 255)?;
    let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(0);
    Ok(String::from_utf8_lossy(&buffer[..end]).into_owned())
}

fn uuid_text(bytes: [u8; 16]) -> String {
    let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let part = |range: std::ops::Range<usize>| hex[range].concat();
    [
        part(0..4),
        part(4..6),
        part(6..8),
        part(8..10),
        part(10..16),
    ]
    .join("-")
}

/// A device's primary context. It is current on the thread that made it, until that makes another
/// one current.
pub(crate) struct Context<'a> {
    cuda: &'a CudaLibrary,
    device: c_int,
    handle: *mut c_void,
    /// What is current is current on one thread.
    of_this_thread: PhantomData<*const ()>,
}

impl<'a> Context<'a> {
    /// Makes it current on this thread, which is needed before each use where the thread has
    /// several.
    pub(crate) fn make_current(&self) -> CudaResult<()> {
        // SAFETY: the handle is the driver's own, and retained as long as this value lives.
        unsafe { self.cuda.functions.cuCtxSetCurrent(self.handle) }
    }

    /// Loads PTX, which the driver compiles for the device.
    pub(crate) fn load_module(&self, image: &CStr) -> CudaResult<Module<'_, 'a>> {
        // SAFETY: the image is text that ends in NUL, as PTX must.
        unsafe { self.load_data(image.as_ptr().cast()) }
    }

    /// # Safety
    /// `image` points to text that ends in NUL, or to a whole cubin.
    unsafe fn load_data(&self, image: *const c_void) -> CudaResult<Module<'_, 'a>> {
        let mut handle = null_mut();
        // SAFETY: the caller vouches for the image; the pointer is to a live handle.
        unsafe { (self.cuda.functions).cuModuleLoadData(&raw mut handle, image) }?;
        let loaded = LoadedModule {
            context: self,
            handle,
        };
        Ok(Module(Rc::new(loaded)))
    }

    /// Waits until all work of this context is done; errors of kernels come out here.
    pub(crate) fn synchronize(&self) -> CudaResult<()> {
        // SAFETY: a context is current on this thread, by construction.
        unsafe { self.cuda.functions.cuCtxSynchronize() }
    }
}

impl Drop for Context<'_> {
    fn drop(&mut self) {
        // SAFETY: this context holds one reference, which is given back once. A failure changes
        // nothing any more.
        let _ = unsafe { (self.cuda.functions).cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// A loaded module. It is unloaded when the last of its kernels is gone, so that a workload can own
/// both.
pub(crate) struct Module<'c, 'a>(Rc<LoadedModule<'c, 'a>>);

struct LoadedModule<'c, 'a> {
    context: &'c Context<'a>,
    handle: *mut c_void,
}

impl Drop for LoadedModule<'_, '_> {
    fn drop(&mut self) {
        // SAFETY: the module is loaded and is unloaded once. A failure changes nothing any more.
        let _ = unsafe { (self.context.cuda.functions).cuModuleUnload(self.handle) };
    }
}

/// Text as the driver takes it; `None` when it holds a NUL.
pub(crate) fn c_text(text: &str) -> Option<CString> {
    CString::new(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_spelled_as_nvml_spells_it() {
        let bytes: [u8; 16] = std::array::from_fn(|index| u8::try_from(index * 17).expect("small"));
        assert_eq!(uuid_text(bytes), "00112233-4455-6677-8899-aabbccddeeff");
    }
}
