//! Functions that programs on CUDA 12 and 13 use in addition to those of `api.rs`: libraries, which
//! are modules of no context, memory pools, and queries of contexts, streams and functions.

use super::api::{functions, list, load_image, put, stream_of};
use super::device_memory;
use super::driver::{Driver, push_current};
use super::objects::{FUNCTIONS, Function, LIBRARIES, Library, MODULES, Module, next_handle};
use super::result::{
    INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, Outcome, UNSUPPORTED_LIMIT,
};
use crate::gpu::CudaCall;
use crate::state::ProcessSlot;
use crate::threads::lock;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::{LazyLock, Mutex};

type Device = c_int;
type Handle = usize;

/// `CUmemPoolProps`, as far as it names the place of the pool's memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PoolProperties {
    allocation_type: c_uint,
    handle_types: c_uint,
    /// 1 is a device.
    location_type: c_uint,
    location_id: c_int,
}

/// `CUctxCreateParams`; execution affinities and CUDA in graphics change nothing here.
#[repr(C)]
#[derive(Debug)]
pub struct ContextParameters {
    affinities: *const c_void,
    affinity_count: c_int,
    graphics: *const c_void,
}

/// A pool of `cuMemPoolCreate`, or a device's default one. Freed memory goes back at once, so a
/// pool holds what is in use.
#[derive(Debug)]
struct Pool {
    gpu: usize,
    /// Values that were set, by `CUmemPool_attribute`.
    attributes: HashMap<c_uint, u64>,
}

#[derive(Debug, Default)]
struct Pools {
    by_handle: HashMap<Handle, Pool>,
    default_of_gpu: HashMap<usize, Handle>,
    current_of_gpu: HashMap<usize, Handle>,
}

static POOLS: LazyLock<Mutex<Pools>> = LazyLock::new(Mutex::default);

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`, the first attribute of 64 bits; those before are flags.
const RELEASE_THRESHOLD: c_uint = 4;
/// `CU_MEMPOOL_ATTR_USED_MEM_HIGH`, the last attribute that CUDA 12 knows.
const USED_MEMORY_HIGH: c_uint = 8;

impl Pools {
    fn add(&mut self, gpu: usize) -> Handle {
        let handle = next_handle();
        let attributes = HashMap::new();
        self.by_handle.insert(handle, Pool { gpu, attributes });
        handle
    }

    fn default_of(&mut self, gpu: usize) -> Handle {
        if let Some(handle) = self.default_of_gpu.get(&gpu) {
            return *handle;
        }
        let handle = self.add(gpu);
        self.default_of_gpu.insert(gpu, handle);
        handle
    }
}

/// Limits of `cuCtxGetLimit` with what a new context has.
// Source: `CUlimit` of cuda.h, CUDA 13; the values are those of CUDA's documentation of
// `cuCtxSetLimit`.
const LIMITS: [(c_uint, usize); 7] = [
    (0, 1024),    // stack of a thread
    (1, 1 << 20), // printf's buffer
    (2, 8 << 20), // malloc's heap
    (3, 2),       // depth of synchronisation on the device
    (4, 2048),    // launches on the device that may be pending
    (5, 128),     // L2 fetch
    (6, 0),       // persisting L2
];

functions! {
    // ---- Libraries ----

    fn cuLibraryLoadData(
        driver, library: *mut Handle, code: *const c_void, _options: *mut c_uint, _values: *mut *mut c_void, _count: c_uint,
        _library_options: *mut c_uint, _library_values: *mut *mut c_void, _library_count: c_uint,
    ) {
        let image = unsafe { load_image(driver, driver.devices[0], code)? };
        let names = image.entries.clone();
        let module = MODULES.insert(Module { image });
        let kernels = names.into_iter().map(|name| function(name, module)).collect();
        unsafe { put(library, LIBRARIES.insert(Library { module, kernels })) }
    }
    fn cuLibraryUnload(driver, library: Handle) {
        let _ = driver;
        let library = LIBRARIES.remove(library)?;
        MODULES.remove(library.module).map(drop)
    }
    fn cuLibraryGetModule(driver, module: *mut Handle, library: Handle) {
        driver.current()?;
        unsafe { put(module, LIBRARIES.get(library)?.module) }
    }
    fn cuLibraryGetKernelCount(driver, count: *mut c_uint, library: Handle) {
        let _ = driver;
        unsafe { put(count, c_uint::try_from(LIBRARIES.get(library)?.kernels.len()).unwrap_or(0)) }
    }
    fn cuLibraryEnumerateKernels(driver, kernels: *mut Handle, count: c_uint, library: Handle) {
        let _ = driver;
        if kernels.is_null() {
            return Err(INVALID_VALUE);
        }
        for (index, kernel) in LIBRARIES.get(library)?.kernels.iter().take(count as usize).enumerate() {
            unsafe { put(kernels.wrapping_add(index), *kernel)? };
        }
        Ok(())
    }
    fn cuLibraryGetKernel(driver, kernel: *mut Handle, library: Handle, name: *const c_char) {
        let _ = driver;
        let name = unsafe { text(name)? };
        let library = LIBRARIES.get(library)?;
        let named = |handle: &&Handle| FUNCTIONS.get(**handle).is_ok_and(|it| it.name == name);
        unsafe { put(kernel, *library.kernels.iter().find(named).ok_or(NOT_FOUND)?) }
    }
    fn cuKernelGetFunction(driver, function: *mut Handle, kernel: Handle) {
        driver.current()?;
        FUNCTIONS.get(kernel)?;
        unsafe { put(function, kernel) }
    }
    fn cuKernelGetLibrary(driver, library: *mut Handle, kernel: Handle) {
        let _ = driver;
        let module = FUNCTIONS.get(kernel)?.module;
        unsafe { put(library, LIBRARIES.find(|it| it.module == module).ok_or(INVALID_HANDLE)?) }
    }
    fn cuKernelGetName(driver, name: *mut *const c_char, kernel: Handle) {
        let _ = driver;
        unsafe { put(name, name_of(kernel)?) }
    }
    fn cuFuncGetName(driver, name: *mut *const c_char, function: Handle) {
        let _ = driver;
        unsafe { put(name, name_of(function)?) }
    }
    fn cuFuncIsLoaded(driver, state: *mut c_uint, function: Handle) {
        let _ = driver;
        FUNCTIONS.get(function)?;
        unsafe { put(state, 1) }
    }
    fn cuFuncLoad(driver, function: Handle) {
        let _ = driver;
        FUNCTIONS.get(function).map(drop)
    }
    fn cuModuleGetFunctionCount(driver, count: *mut c_uint, module: Handle) {
        let _ = driver;
        unsafe { put(count, c_uint::try_from(MODULES.get(module)?.image.entries.len()).unwrap_or(0)) }
    }
    fn cuModuleGetGlobal_v2(driver, _pointer: *mut u64, _bytes: *mut usize, module: Handle, _name: *const c_char) {
        driver.current()?;
        // No kernel that runs here has global variables.
        MODULES.get(module)?;
        Err(NOT_FOUND)
    }

    // ---- Memory pools ----

    fn cuDeviceGetDefaultMemPool(driver, pool: *mut Handle, device: Device) {
        let gpu = driver.gpu_index(device)?;
        unsafe { put(pool, lock(&POOLS).default_of(gpu)) }
    }
    fn cuDeviceGetMemPool(driver, pool: *mut Handle, device: Device) {
        let gpu = driver.gpu_index(device)?;
        let mut pools = lock(&POOLS);
        let current = pools.current_of_gpu.get(&gpu).copied();
        let current = current.unwrap_or_else(|| pools.default_of(gpu));
        unsafe { put(pool, current) }
    }
    fn cuDeviceSetMemPool(driver, device: Device, pool: Handle) {
        let gpu = driver.gpu_index(device)?;
        let mut pools = lock(&POOLS);
        pools.by_handle.get(&pool).filter(|it| it.gpu == gpu).ok_or(INVALID_VALUE)?;
        pools.current_of_gpu.insert(gpu, pool);
        Ok(())
    }
    fn cuMemPoolCreate(driver, pool: *mut Handle, properties: *const PoolProperties) {
        const DEVICE: c_uint = 1;
        let properties = unsafe { list(properties, 1)? }[0];
        if properties.location_type != DEVICE {
            return Err(INVALID_VALUE);
        }
        let gpu = driver.gpu_index(properties.location_id).map_err(|_| INVALID_DEVICE)?;
        unsafe { put(pool, lock(&POOLS).add(gpu)) }
    }
    fn cuMemPoolDestroy(driver, pool: Handle) {
        let _ = driver;
        let mut pools = lock(&POOLS);
        if pools.default_of_gpu.values().any(|it| *it == pool) {
            return Err(INVALID_VALUE);
        }
        pools.current_of_gpu.retain(|_, it| *it != pool);
        pools.by_handle.remove(&pool).map(drop).ok_or(INVALID_VALUE)
    }
    fn cuMemPoolTrimTo(driver, pool: Handle, _keep: usize) {
        let _ = driver;
        lock(&POOLS).by_handle.get(&pool).map(drop).ok_or(INVALID_VALUE)
    }
    fn cuMemPoolSetAttribute(driver, pool: Handle, attribute: c_uint, value: *const c_void) {
        let _ = driver;
        if value.is_null() || !(1..=USED_MEMORY_HIGH).contains(&attribute) {
            return Err(INVALID_VALUE);
        }
        let value = if attribute < RELEASE_THRESHOLD {
            u64::from(unsafe { value.cast::<c_uint>().read_unaligned() })
        } else {
            unsafe { value.cast::<u64>().read_unaligned() }
        };
        let mut pools = lock(&POOLS);
        let pool = pools.by_handle.get_mut(&pool).ok_or(INVALID_VALUE)?;
        pool.attributes.insert(attribute, value);
        Ok(())
    }
    fn cuMemPoolGetAttribute(driver, pool: Handle, attribute: c_uint, value: *mut c_void) {
        if value.is_null() || !(1..=USED_MEMORY_HIGH).contains(&attribute) {
            return Err(INVALID_VALUE);
        }
        let pools = lock(&POOLS);
        let pool = pools.by_handle.get(&pool).ok_or(INVALID_VALUE)?;
        let set = pool.attributes.get(&attribute).copied();
        if attribute < RELEASE_THRESHOLD {
            // The three ways of reuse are on unless turned off.
            return unsafe { put(value.cast::<c_uint>(), c_uint::from(set != Some(0))) };
        }
        let is_threshold = attribute == RELEASE_THRESHOLD;
        let used = || driver.slot(pool.gpu).map_or(0, ProcessSlot::memory_bytes);
        unsafe { put(value.cast::<u64>(), if is_threshold { set.unwrap_or(0) } else { used() }) }
    }
    fn cuMemAllocFromPoolAsync(driver, pointer: *mut u64, bytes: usize, pool: Handle, _stream: Handle) {
        let gpu = lock(&POOLS).by_handle.get(&pool).map(|it| it.gpu).ok_or(INVALID_VALUE)?;
        let context = driver.current()?;
        driver.injected_error(gpu, CudaCall::MemoryAllocation)?;
        unsafe { put(pointer, device_memory::allocate(driver, gpu, context.handle(), bytes as u64)?) }
    }

    // ---- Contexts and streams ----

    fn cuCtxCreate_v3(driver, context: *mut Handle, _affinities: *const c_void, _count: c_int, _flags: c_uint, device: Device) {
        create_context(driver, context, device)
    }
    fn cuCtxCreate_v4(driver, context: *mut Handle, _parameters: *const ContextParameters, _flags: c_uint, device: Device) {
        create_context(driver, context, device)
    }
    fn cuCtxGetId(driver, context: Handle, id: *mut u64) {
        let context = if context == 0 { driver.current()? } else { driver.context(context)? };
        unsafe { put(id, context.handle() as u64) }
    }
    fn cuCtxGetDevice_v2(driver, device: *mut Device, context: Handle) {
        let context = if context == 0 { driver.current()? } else { driver.context(context)? };
        unsafe { put(device, driver.ordinal_of(context.gpu)) }
    }
    fn cuCtxSynchronize_v2(driver, context: Handle) {
        let context = if context == 0 { driver.current()? } else { driver.context(context)? };
        driver.injected_error(context.gpu, CudaCall::Synchronize)
    }
    fn cuCtxGetLimit(driver, value: *mut usize, limit: c_uint) {
        let context = driver.current()?;
        let of_new = LIMITS.iter().find(|(it, _)| *it == limit).ok_or(UNSUPPORTED_LIMIT)?.1;
        let set = lock(&context.limits).get(&limit).copied();
        unsafe { put(value, set.unwrap_or(of_new)) }
    }
    fn cuCtxSetLimit(driver, limit: c_uint, value: usize) {
        let context = driver.current()?;
        LIMITS.iter().find(|(it, _)| *it == limit).ok_or(UNSUPPORTED_LIMIT)?;
        lock(&context.limits).insert(limit, value);
        Ok(())
    }
    fn cuCtxGetCacheConfig(driver, config: *mut c_uint) {
        driver.current()?;
        unsafe { put(config, 0) }
    }
    fn cuStreamGetCtx(driver, stream: Handle, context: *mut Handle) {
        unsafe { put(context, stream_of(driver, stream)?.context) }
    }
    fn cuStreamGetCtx_v2(driver, stream: Handle, context: *mut Handle, green: *mut Handle) {
        unsafe {
            put(context, stream_of(driver, stream)?.context)?;
            if green.is_null() { Ok(()) } else { put(green, 0) }
        }
    }
    fn cuStreamGetDevice(driver, stream: Handle, device: *mut Device) {
        unsafe { put(device, driver.ordinal_of(stream_of(driver, stream)?.gpu)) }
    }
    fn cuStreamGetId(driver, stream: Handle, id: *mut u64) {
        let own = stream_of(driver, stream)?.context;
        unsafe { put(id, if stream <= 2 { own } else { stream } as u64) }
    }
}

fn create_context(driver: &'static Driver, context: *mut Handle, device: Device) -> Outcome {
    let created = driver.create_context(driver.gpu_index(device)?)?;
    // SAFETY: the exported functions pass their caller's pointer.
    unsafe { put(context, created.handle())? };
    push_current(created.handle());
    Ok(())
}

fn function(name: String, module: Handle) -> Handle {
    let attributes = Mutex::default();
    FUNCTIONS.insert(Function {
        name,
        module,
        attributes,
    })
}

/// # Safety
/// A pointer that is not null points to a C string.
unsafe fn text(pointer: *const c_char) -> Outcome<String> {
    if pointer.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: as the caller promises.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map(str::to_owned).map_err(|_| NOT_FOUND)
}

/// A function's name as a C string that lives as long as the process, one for each name.
fn name_of(function: Handle) -> Outcome<*const c_char> {
    static NAMES_IN_USE: LazyLock<Mutex<HashMap<String, CString>>> = LazyLock::new(Mutex::default);
    let name = FUNCTIONS.get(function)?.name.clone();
    let mut known = lock(&NAMES_IN_USE);
    let entry = known.entry(name.clone());
    Ok(entry
        .or_insert_with(|| CString::new(name).unwrap_or_default())
        .as_ptr())
}
