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

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::ptr::null_mut;

use libloading::os::unix::{Library as UnixLibrary, RTLD_GLOBAL, RTLD_NOW};

pub(crate) use compute::{
    Argument, DeviceMemory, Event, HostWords, Kernel, LaunchShape, TensorMap,
};
pub(crate) use cublaslt::{ComputeType, Cublaslt, DataType, ProductPlan, ProductTypes};

use crate::driver_libraries;

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
            Self::Status { call, code, name } => write!(f, "{call} answered {name} ({code})"),
        }
    }
}

pub(crate) type CudaResult<T> = Result<T, CudaFailure>;

/// A loaded `libcuda.so.1`; never unloaded, since the driver's own threads may outlive any use of
/// it.
pub(crate) struct CudaLibrary {
    library: &'static libloading::Library,
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
        Ok(Self {
            library: Box::leak(Box::new(library)),
            loaded_by_path: loaded.by_path,
            unloadable: loaded.unloadable,
        })
    }

    /// The path by which it had to be loaded, since the loader does not find its name.
    pub(crate) fn loaded_by_path(&self) -> Option<&str> {
        self.loaded_by_path.as_deref()
    }

    /// What the loader said of the name, where it found a file that cannot be loaded.
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

    /// The function that the library exports under one of these names, the newest first.
    ///
    /// # Safety
    /// `F` must be the type that cuda.h declares for each of the names.
    unsafe fn function<F: Copy>(&self, names: &[&'static str]) -> CudaResult<F> {
        names
            .iter()
            // SAFETY: the caller vouches for the type.
            .find_map(|name| unsafe { self.library.get::<F>(name.as_bytes()) }.ok())
            .map(|symbol| *symbol)
            .ok_or(CudaFailure::MissingFunction { call: names[0] })
    }

    fn checked(&self, call: &'static str, code: u32) -> CudaResult<()> {
        if code == CUDA_SUCCESS {
            return Ok(());
        }
        Err(CudaFailure::Status {
            call,
            code,
            name: self.result_name(code),
        })
    }

    /// The name that the driver gives a result.
    pub(crate) fn result_name(&self, code: u32) -> String {
        type GetErrorName = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: cuda.h declares `CUresult cuGetErrorName(CUresult, const char **)`.
        let known = unsafe { self.function::<GetErrorName>(&["cuGetErrorName"]) }
            // SAFETY: the pointer is to a live pointer, which the driver sets to a string of its
            // own.
            .is_ok_and(|get_name| unsafe { get_name(code, &raw mut name) } == CUDA_SUCCESS);
        if !known || name.is_null() {
            return format!("CUDA error {code}");
        }
        // SAFETY: not null, and the driver's names are C strings that live as long as the library.
        let name = unsafe { CStr::from_ptr(name) };
        name.to_string_lossy().into_owned()
    }

    /// `cuInit`; 0 is success. The code is the fact here, not a failure.
    pub(crate) fn initialize(&self) -> CudaResult<u32> {
        type Init = unsafe extern "C" fn(c_uint) -> u32;
        // SAFETY: cuda.h declares `CUresult cuInit(unsigned int)`.
        let init = unsafe { self.function::<Init>(&["cuInit"]) }?;
        // SAFETY: cuInit may be called at any time; its flags must be 0.
        Ok(unsafe { init(0) })
    }

    /// 1000 x major + 10 x minor; works without initialisation.
    pub(crate) fn driver_version(&self) -> CudaResult<u32> {
        let version: c_int = self.get("cuDriverGetVersion", &["cuDriverGetVersion"])?;
        Ok(version.cast_unsigned())
    }

    /// All devices that CUDA shows to this process.
    pub(crate) fn devices(&self) -> CudaResult<Vec<Device<'_>>> {
        type GetDevice = unsafe extern "C" fn(*mut c_int, c_int) -> u32;
        let count: c_int = self.get("cuDeviceGetCount", &["cuDeviceGetCount"])?;
        // SAFETY: cuda.h declares `CUresult cuDeviceGet(CUdevice *, int)`, and CUdevice is an int.
        let get_device = unsafe { self.function::<GetDevice>(&["cuDeviceGet"]) }?;
        (0..count)
            .map(|ordinal| {
                let mut handle = 0;
                // SAFETY: the pointer is to a live int.
                self.checked("cuDeviceGet", unsafe {
                    get_device(&raw mut handle, ordinal)
                })?;
                Ok(Device { cuda: self, handle })
            })
            .collect()
    }

    /// A call of the shape `CUresult f(T *)`, where `T` is an int.
    fn get(&self, call: &'static str, names: &[&'static str]) -> CudaResult<c_int> {
        type Get = unsafe extern "C" fn(*mut c_int) -> u32;
        // SAFETY: the callers pass names of functions that take one `int *`.
        let function = unsafe { self.function::<Get>(names) }?;
        let mut value = 0;
        // SAFETY: the pointer is to a live int.
        self.checked(call, unsafe { function(&raw mut value) })?;
        Ok(value)
    }
}

/// One CUDA device.
pub(crate) struct Device<'a> {
    cuda: &'a CudaLibrary,
    handle: c_int,
}

impl<'a> Device<'a> {
    pub(crate) fn name(&self) -> CudaResult<String> {
        type GetName = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> u32;
        // SAFETY: cuda.h declares `CUresult cuDeviceGetName(char *, int, CUdevice)`.
        let function = unsafe { self.cuda.function::<GetName>(&["cuDeviceGetName"]) }?;
        self.text("cuDeviceGetName", |buffer, length| {
            // SAFETY: the buffer has the length that is passed.
            unsafe { function(buffer, length, self.handle) }
        })
    }

    /// `0000:3b:00.0`.
    pub(crate) fn pci_address(&self) -> CudaResult<String> {
        type GetBusId = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> u32;
        // SAFETY: cuda.h declares `CUresult cuDeviceGetPCIBusId(char *, int, CUdevice)`.
        let function = unsafe { self.cuda.function::<GetBusId>(&["cuDeviceGetPCIBusId"]) }?;
        let address = self.text("cuDeviceGetPCIBusId", |buffer, length| {
            // SAFETY: the buffer has the length that is passed.
            unsafe { function(buffer, length, self.handle) }
        })?;
        Ok(address.to_lowercase())
    }

    /// The UUID in NVML's spelling: `GPU-…`, or `MIG-…` for a MIG device, which its name tells.
    pub(crate) fn uuid(&self) -> CudaResult<String> {
        type GetUuid = unsafe extern "C" fn(*mut [u8; 16], c_int) -> u32;
        // SAFETY: cuda.h declares `CUresult cuDeviceGetUuid_v2(CUuuid *, CUdevice)`, and CUuuid is
        // 16 bytes.
        let function = unsafe {
            self.cuda
                .function::<GetUuid>(&["cuDeviceGetUuid_v2", "cuDeviceGetUuid"])
        }?;
        let mut bytes = [0; 16];
        // SAFETY: the pointer is to 16 live bytes.
        let code = unsafe { function(&raw mut bytes, self.handle) };
        self.cuda.checked("cuDeviceGetUuid_v2", code)?;
        let kind = if self.name()?.contains(" MIG ") {
            "MIG"
        } else {
            "GPU"
        };
        Ok(format!("{kind}-{}", uuid_text(bytes)))
    }

    pub(crate) fn total_memory_bytes(&self) -> CudaResult<u64> {
        type TotalMemory = unsafe extern "C" fn(*mut usize, c_int) -> u32;
        // SAFETY: cuda.h declares `CUresult cuDeviceTotalMem_v2(size_t *, CUdevice)`.
        let function = unsafe { self.cuda.function::<TotalMemory>(&["cuDeviceTotalMem_v2"]) }?;
        let mut bytes = 0;
        // SAFETY: the pointer is to a live size_t.
        let code = unsafe { function(&raw mut bytes, self.handle) };
        self.cuda.checked("cuDeviceTotalMem_v2", code)?;
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
        type GetAttribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> u32;
        // SAFETY: cuda.h declares
        // `CUresult cuDeviceGetAttribute(int *, CUdevice_attribute, CUdevice)`.
        let function = unsafe {
            self.cuda
                .function::<GetAttribute>(&["cuDeviceGetAttribute"])
        }?;
        let mut value = 0;
        // SAFETY: the pointer is to a live int.
        let code = unsafe { function(&raw mut value, attribute, self.handle) };
        self.cuda.checked("cuDeviceGetAttribute", code)?;
        Ok(value.max(0).cast_unsigned())
    }

    fn text(
        &self,
        call: &'static str,
        fill: impl FnOnce(*mut c_char, c_int) -> u32,
    ) -> CudaResult<String> {
        let mut buffer = [0u8; 256];
        // The driver is told one byte less, so that the last one stays NUL whatever it writes.
        self.cuda
            .checked(call, fill(buffer.as_mut_ptr().cast(), 255))?;
        let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(0);
        Ok(String::from_utf8_lossy(&buffer[..end]).into_owned())
    }

    /// Takes the device's primary context and makes it this thread's.
    pub(crate) fn context(&self) -> CudaResult<Context<'a>> {
        type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> u32;
        // SAFETY: cuda.h declares `CUresult cuDevicePrimaryCtxRetain(CUcontext *, CUdevice)`.
        let retain = unsafe { self.cuda.function::<Retain>(&["cuDevicePrimaryCtxRetain"]) }?;
        let mut handle = null_mut();
        // SAFETY: the pointer is to a live handle, which the driver fills in on success.
        let code = unsafe { retain(&raw mut handle, self.handle) };
        self.cuda.checked("cuDevicePrimaryCtxRetain", code)?;
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
        type SetCurrent = unsafe extern "C" fn(*mut c_void) -> u32;
        // SAFETY: cuda.h declares `CUresult cuCtxSetCurrent(CUcontext)`.
        let set_current = unsafe { self.cuda.function::<SetCurrent>(&["cuCtxSetCurrent"]) }?;
        // SAFETY: the handle is the driver's own, and retained as long as this value lives.
        let code = unsafe { set_current(self.handle) };
        self.cuda.checked("cuCtxSetCurrent", code)
    }

    /// Loads PTX, which the driver compiles for the device.
    pub(crate) fn load_module(&self, image: &CStr) -> CudaResult<Module<'_, 'a>> {
        // SAFETY: the image is text that ends in NUL, as PTX must.
        unsafe { self.load_data(image.as_ptr().cast()) }
    }

    /// # Safety
    /// `image` points to text that ends in NUL, or to a whole cubin.
    unsafe fn load_data(&self, image: *const c_void) -> CudaResult<Module<'_, 'a>> {
        type LoadData = unsafe extern "C" fn(*mut *mut c_void, *const c_void) -> u32;
        // SAFETY: cuda.h declares `CUresult cuModuleLoadData(CUmodule *, const void *)`.
        let load = unsafe { self.cuda.function::<LoadData>(&["cuModuleLoadData"]) }?;
        let mut handle = null_mut();
        // SAFETY: the caller vouches for the image; the pointer is to a live handle.
        let code = unsafe { load(&raw mut handle, image) };
        self.cuda.checked("cuModuleLoadData", code)?;
        Ok(Module {
            context: self,
            handle,
        })
    }

    /// Memory for `words` 32-bit words, all set to `word`.
    pub(crate) fn words(&self, words: usize, word: u32) -> CudaResult<Words<'_, 'a>> {
        type Allocate = unsafe extern "C" fn(*mut u64, usize) -> u32;
        type Set = unsafe extern "C" fn(u64, c_uint, usize) -> u32;
        // SAFETY: cuda.h declares `CUresult cuMemAlloc_v2(CUdeviceptr *, size_t)`.
        let allocate = unsafe { self.cuda.function::<Allocate>(&["cuMemAlloc_v2"]) }?;
        // SAFETY: cuda.h declares `CUresult cuMemsetD32_v2(CUdeviceptr, unsigned int, size_t)`.
        let set = unsafe { self.cuda.function::<Set>(&["cuMemsetD32_v2"]) }?;
        let mut address = 0;
        // SAFETY: the pointer is to a live device pointer.
        let code = unsafe { allocate(&raw mut address, words * size_of::<u32>()) };
        self.cuda.checked("cuMemAlloc_v2", code)?;
        let buffer = Words {
            context: self,
            address,
            count: words,
        };
        // SAFETY: the buffer was just allocated with room for `words` words.
        self.cuda
            .checked("cuMemsetD32_v2", unsafe { set(address, word, words) })?;
        Ok(buffer)
    }

    /// Waits until all work of this context is done; errors of kernels come out here.
    pub(crate) fn synchronize(&self) -> CudaResult<()> {
        type Synchronize = unsafe extern "C" fn() -> u32;
        // SAFETY: cuda.h declares `CUresult cuCtxSynchronize(void)`.
        let synchronize = unsafe { self.cuda.function::<Synchronize>(&["cuCtxSynchronize"]) }?;
        // SAFETY: a context is current on this thread, by construction.
        self.cuda
            .checked("cuCtxSynchronize", unsafe { synchronize() })
    }
}

impl Drop for Context<'_> {
    fn drop(&mut self) {
        type Release = unsafe extern "C" fn(c_int) -> u32;
        // SAFETY: cuda.h declares `CUresult cuDevicePrimaryCtxRelease(CUdevice)`, here under its
        // newer name.
        let release = unsafe {
            self.cuda
                .function::<Release>(&["cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRelease"])
        };
        if let Ok(release) = release {
            // SAFETY: this context holds one reference, which is given back once. A failure changes
            // nothing any more.
            unsafe { release(self.device) };
        }
    }
}

/// A loaded module.
pub(crate) struct Module<'c, 'a> {
    context: &'c Context<'a>,
    handle: *mut c_void,
}

impl Module<'_, '_> {
    /// Launches a kernel with the signature `(u32 *out, u32 n, u32 seed)` over `blocks` blocks of
    /// `threads` threads.
    ///
    /// The kernel must write no more than `n` words, and `out` must hold as many.
    pub(crate) fn launch_words_kernel(
        &self,
        kernel: &CStr,
        blocks: u32,
        threads: u32,
        out: &Words<'_, '_>,
        seed: u32,
    ) -> CudaResult<()> {
        let function = self.function_handle(kernel)?;
        let mut address = out.address;
        let mut count = u32::try_from(out.count).unwrap_or(u32::MAX);
        let mut seed = seed;
        let mut parameters: [*mut c_void; 3] = [
            (&raw mut address).cast(),
            (&raw mut count).cast(),
            (&raw mut seed).cast(),
        ];
        let shape = LaunchShape {
            grid: (blocks, 1),
            block: threads,
            shared_bytes: 0,
        };
        // SAFETY: the parameters are live, and of the number and types that the caller says the
        // kernel has.
        unsafe { self.launch_with(function, shape, parameters.as_mut_ptr()) }
    }

    fn function_handle(&self, kernel: &CStr) -> CudaResult<*mut c_void> {
        type GetFunction =
            unsafe extern "C" fn(*mut *mut c_void, *mut c_void, *const c_char) -> u32;
        let cuda = self.context.cuda;
        // SAFETY: cuda.h declares
        // `CUresult cuModuleGetFunction(CUfunction *, CUmodule, const char *)`.
        let get_function = unsafe { cuda.function::<GetFunction>(&["cuModuleGetFunction"]) }?;
        let mut function = null_mut();
        // SAFETY: the pointer is to a live handle, the module is loaded, the name ends in NUL.
        let code = unsafe { get_function(&raw mut function, self.handle, kernel.as_ptr()) };
        cuda.checked("cuModuleGetFunction", code)?;
        Ok(function)
    }

    /// Puts a kernel into the default stream.
    ///
    /// # Safety
    /// `function` is of this module, and `parameters` has a pointer to a live value for each of its
    /// parameters; the driver copies them before it returns.
    unsafe fn launch_with(
        &self,
        function: *mut c_void,
        shape: LaunchShape,
        parameters: *mut *mut c_void,
    ) -> CudaResult<()> {
        type Launch = unsafe extern "C" fn(
            *mut c_void,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            *mut c_void,
            *mut *mut c_void,
            *mut *mut c_void,
        ) -> u32;
        let cuda = self.context.cuda;
        // SAFETY: cuda.h declares cuLaunchKernel with a function, six sizes, shared bytes, a stream
        // and two arrays.
        let launch = unsafe { cuda.function::<Launch>(&["cuLaunchKernel"]) }?;
        // SAFETY: the caller vouches for function and parameters; the default stream is null.
        let code = unsafe {
            launch(
                function,
                shape.grid.0,
                shape.grid.1,
                1,
                shape.block,
                1,
                1,
                shape.shared_bytes,
                null_mut(),
                parameters,
                null_mut(),
            )
        };
        cuda.checked("cuLaunchKernel", code)
    }
}

impl Drop for Module<'_, '_> {
    fn drop(&mut self) {
        type Unload = unsafe extern "C" fn(*mut c_void) -> u32;
        // SAFETY: cuda.h declares `CUresult cuModuleUnload(CUmodule)`.
        if let Ok(unload) = unsafe { self.context.cuda.function::<Unload>(&["cuModuleUnload"]) } {
            // SAFETY: the module is loaded and is unloaded once. A failure changes nothing any
            // more.
            unsafe { unload(self.handle) };
        }
    }
}

/// 32-bit words in the device's memory.
pub(crate) struct Words<'c, 'a> {
    context: &'c Context<'a>,
    address: u64,
    count: usize,
}

impl Words<'_, '_> {
    pub(crate) fn copy_to_host(&self) -> CudaResult<Vec<u32>> {
        type Copy = unsafe extern "C" fn(*mut c_void, u64, usize) -> u32;
        let cuda = self.context.cuda;
        // SAFETY: cuda.h declares `CUresult cuMemcpyDtoH_v2(void *, CUdeviceptr, size_t)`.
        let copy = unsafe { cuda.function::<Copy>(&["cuMemcpyDtoH_v2"]) }?;
        let mut host = vec![0u32; self.count];
        let bytes = self.count * size_of::<u32>();
        // SAFETY: both sides hold `bytes` bytes.
        let code = unsafe { copy(host.as_mut_ptr().cast(), self.address, bytes) };
        cuda.checked("cuMemcpyDtoH_v2", code)?;
        Ok(host)
    }
}

impl Drop for Words<'_, '_> {
    fn drop(&mut self) {
        type Free = unsafe extern "C" fn(u64) -> u32;
        // SAFETY: cuda.h declares `CUresult cuMemFree_v2(CUdeviceptr)`.
        if let Ok(free) = unsafe { self.context.cuda.function::<Free>(&["cuMemFree_v2"]) } {
            // SAFETY: the memory was allocated by this wrapper and is freed once. A failure changes
            // nothing any more.
            unsafe { free(self.address) };
        }
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
