//! The exported functions. Names, parameters and results are NVIDIA's; what is not here is in
//! `unsupported.rs`.

use super::driver::{
    Driver, current_handle, forget_current, guarded, init, pop_current, push_current, set_current,
};
use super::image;
use super::kernels::tensor_map::TensorMap;
use super::kernels::{self, Launch};
use super::memory_faults::{self, Direction, Operation};
use super::objects::{EVENTS, Event, FUNCTIONS, Function, MODULES, Module, STREAMS, Stream};
use super::result::{
    CuResult, ILLEGAL_ADDRESS, ILLEGAL_INSTRUCTION, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND,
    NOT_SUPPORTED, Outcome, PEER_ACCESS_ALREADY_ENABLED, PEER_ACCESS_NOT_ENABLED,
};
use super::{corruption, device_memory, memory, result};
use crate::gpu::{ComputeMode, CudaCall, Gpu};
use crate::node::Node;
use crate::threads::lock;
use std::collections::HashSet;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Arc, Mutex, OnceLock};

type Device = c_int;
type Handle = usize;
type DevicePointer = u64;

/// Writes a result of an API function.
///
/// # Safety
/// A pointer that is not null points to a `T` of the caller's.
pub(super) unsafe fn put<T>(place: *mut T, value: T) -> Outcome {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: checked above; the caller answers for the rest.
    unsafe { place.write(value) };
    Ok(())
}

/// Declares exported functions: each runs its body with the driver, after `cuInit`.
macro_rules! functions {
    ($($(#[$doc:meta])* fn $name:ident($driver:ident $(, $arg:ident: $type:ty)* $(,)?) $body:block)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// As NVIDIA's documentation of the function requires of its pointers.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> $crate::cuda::result::CuResult {
                // SAFETY: the body uses the caller's pointers as the function's contract allows.
                $crate::cuda::driver::call(stringify!($name), |$driver| $crate::cuda::api::unsafe_body(|| $body))
            }
        )*
        /// These functions by name.
        pub(super) static FUNCTIONS_BY_NAME: &[$crate::cuda::Exported] = $crate::cuda::exported![$($name)*];
    };
}
pub(super) use functions;

/// Marks where the bodies of `functions!` stand; they hold their own `unsafe` blocks.
pub(super) fn unsafe_body(body: impl FnOnce() -> Outcome) -> Outcome {
    body()
}

/// Exported functions that work before `cuInit`.
pub(super) static BEFORE_INIT: &[super::Exported] = super::exported![
    cuInit cuDriverGetVersion cuGetErrorName cuGetErrorString cuGetProcAddress cuGetProcAddress_v2
];

// ---- Before cuInit ----

/// Initialises the driver API.
#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> CuResult {
    guarded("cuInit", || {
        if flags == 0 {
            init()
        } else {
            Err(INVALID_VALUE)
        }
    })
}

/// # Safety
/// `version` is null or points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> CuResult {
    guarded("cuDriverGetVersion", || {
        let node = Node::of_this_process().map_err(|_| result::UNKNOWN)?;
        // SAFETY: as the caller promises.
        unsafe { put(version, node.scenario().driver.cuda_version_number()) }
    })
}

/// # Safety
/// `text` is null or points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: CuResult, text: *mut *const c_char) -> CuResult {
    // SAFETY: as the caller promises.
    unsafe { error_text(result::name(code), text) }
}

/// # Safety
/// `text` is null or points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(code: CuResult, text: *mut *const c_char) -> CuResult {
    // SAFETY: as the caller promises.
    unsafe { error_text(result::text(code), text) }
}

unsafe fn error_text(known: Option<&'static CStr>, text: *mut *const c_char) -> CuResult {
    let pointer = known.map_or(std::ptr::null(), CStr::as_ptr);
    // SAFETY: the exported functions pass their caller's pointer.
    match unsafe { put(text, pointer) } {
        Ok(()) if known.is_some() => result::SUCCESS,
        _ => INVALID_VALUE,
    }
}

// ---- Devices ----

fn uuid_bytes(gpu: &Gpu) -> [u8; 16] {
    let mut bytes = [0; 16];
    let digits: Vec<u8> = gpu
        .uuid
        .bytes()
        .skip(4)
        .filter(u8::is_ascii_hexdigit)
        .collect();
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        let text = std::str::from_utf8(pair).unwrap_or("0");
        *byte = u8::from_str_radix(text, 16).unwrap_or(0);
    }
    bytes
}

/// `CUdevice_attribute` values that programs query; the rest are 0, as for a feature that is
/// absent.
fn attribute(gpu: &Gpu, number: u32) -> i64 {
    let [domain, bus, device, _] = gpu.pci_parts().unwrap_or_default();
    match number {
        1..=3 | 111 => 1024, // threads per block, block x and y; shared memory that the driver keeps per block
        4 => 64,             // block z
        5 => i64::from(i32::MAX), // grid x
        6 | 7 => 65_535,     // grid y and z
        8 => 48 << 10,       // shared memory per block
        9 | 12 | 82 => 64 << 10, // constant memory; registers per block and per SM
        10 | 106 => 32,      // warp size; blocks per SM
        13 => i64::from(gpu.clocks.max.sm_mhz) * 1000,
        16 => i64::from(gpu.sm_count),
        20 => match gpu.compute_mode {
            ComputeMode::Default => 0,
            ComputeMode::Prohibited => 2,
            ComputeMode::ExclusiveProcess => 3,
        },
        33 => i64::from(bus),
        34 => i64::from(device),
        35 => i64::from(gpu.ecc.mode == Some(true)),
        36 => i64::from(gpu.clocks.max.memory_mhz) * 1000,
        37 => i64::from(gpu.memory_bus_width_bits),
        38 => i64::try_from(gpu.l2_cache.0).unwrap_or(0),
        39 => 2048,                                            // threads per SM
        15 | 19 | 31 | 41 | 78 | 79 | 80 | 89 | 95 | 115 => 1, // overlap, host mapping, concurrent kernels, UVA, …
        40 => 5,                                               // copy engines
        50 => i64::from(domain),
        75 => i64::from(gpu.compute_capability[0]),
        76 => i64::from(gpu.compute_capability[1]),
        81 => shared_memory_per_sm(gpu),
        97 => shared_memory_per_sm(gpu) - 1024,
        _ => 0,
    }
}

/// Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
fn shared_memory_per_sm(gpu: &Gpu) -> i64 {
    let kibibytes = match gpu.compute_capability {
        [7, 0] => 96,
        [7, 5] => 64,
        [8, 0] => 164,
        [8 | 12, _] => 100,
        _ => 228,
    };
    kibibytes << 10
}

functions! {
    fn cuDeviceGetCount(driver, count: *mut c_int) {
        unsafe { put(count, c_int::try_from(driver.devices.len()).unwrap_or(0)) }
    }
    fn cuDeviceGet(driver, device: *mut Device, ordinal: c_int) {
        driver.gpu_index(ordinal)?;
        unsafe { put(device, ordinal) }
    }
    fn cuDeviceGetName(driver, name: *mut c_char, length: c_int, device: Device) {
        let gpu = driver.gpu_index(device)?;
        let text = driver.with_gpu(gpu, |values| values.name.clone());
        let length = usize::try_from(length).unwrap_or(0);
        if name.is_null() || length == 0 {
            return Err(INVALID_VALUE);
        }
        let kept = text.len().min(length - 1);
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, kept);
            name.add(kept).write(0);
        }
        Ok(())
    }
    fn cuDeviceGetUuid(driver, uuid: *mut [u8; 16], device: Device) {
        let gpu = driver.gpu_index(device)?;
        unsafe { put(uuid, driver.with_gpu(gpu, uuid_bytes)) }
    }
    fn cuDeviceGetUuid_v2(driver, uuid: *mut [u8; 16], device: Device) {
        let gpu = driver.gpu_index(device)?;
        unsafe { put(uuid, driver.with_gpu(gpu, uuid_bytes)) }
    }
    fn cuDeviceTotalMem_v2(driver, bytes: *mut usize, device: Device) {
        let gpu = driver.gpu_index(device)?;
        let total = driver.with_gpu(gpu, |values| values.memory.0.saturating_sub(values.memory_reserved.0));
        unsafe { put(bytes, usize::try_from(total).unwrap_or(usize::MAX)) }
    }
    fn cuDeviceGetAttribute(driver, value: *mut c_int, number: c_uint, device: Device) {
        let gpu = driver.gpu_index(device)?;
        let wanted = driver.with_gpu(gpu, |values| attribute(values, number));
        unsafe { put(value, c_int::try_from(wanted).unwrap_or(c_int::MAX)) }
    }
    fn cuDeviceGetPCIBusId(driver, text: *mut c_char, length: c_int, device: Device) {
        let gpu = driver.gpu_index(device)?;
        let address = driver.with_gpu(gpu, |values| values.pci_address.to_uppercase());
        let length = usize::try_from(length).unwrap_or(0);
        if text.is_null() || length <= address.len() {
            return Err(INVALID_VALUE);
        }
        unsafe {
            std::ptr::copy_nonoverlapping(address.as_ptr().cast(), text, address.len());
            text.add(address.len()).write(0);
        }
        Ok(())
    }
    fn cuDeviceGetByPCIBusId(driver, device: *mut Device, text: *const c_char) {
        if text.is_null() {
            return Err(INVALID_VALUE);
        }
        let wanted = unsafe { CStr::from_ptr(text) }.to_string_lossy().to_lowercase();
        let found = driver.devices.iter().find(|gpu| driver.with_gpu(**gpu, |values| values.pci_address == wanted));
        unsafe { put(device, driver.ordinal_of(*found.ok_or(INVALID_VALUE)?)) }
    }
    fn cuDeviceComputeCapability(driver, major: *mut c_int, minor: *mut c_int, device: Device) {
        let gpu = driver.gpu_index(device)?;
        let [first, second] = driver.with_gpu(gpu, |values| values.compute_capability);
        unsafe {
            put(major, first.cast_signed())?;
            put(minor, second.cast_signed())
        }
    }
    fn cuDeviceCanAccessPeer(driver, can: *mut c_int, device: Device, peer: Device) {
        driver.gpu_index(device)?;
        driver.gpu_index(peer)?;
        unsafe { put(can, c_int::from(device != peer)) }
    }

    // ---- Contexts ----

    fn cuDevicePrimaryCtxRetain(driver, context: *mut Handle, device: Device) {
        let gpu = driver.gpu_index(device)?;
        unsafe { put(context, driver.retain_primary_context(gpu)?) }
    }
    fn cuDevicePrimaryCtxRelease_v2(driver, device: Device) {
        driver.release_primary_context(driver.gpu_index(device)?)
    }
    fn cuDevicePrimaryCtxReset_v2(driver, device: Device) {
        driver.reset_primary_context(driver.gpu_index(device)?);
        Ok(())
    }
    fn cuDevicePrimaryCtxSetFlags_v2(driver, device: Device, flags: c_uint) {
        driver.set_primary_context_flags(driver.gpu_index(device)?, flags);
        Ok(())
    }
    fn cuDevicePrimaryCtxGetState(driver, device: Device, flags: *mut c_uint, active: *mut c_int) {
        let gpu = driver.gpu_index(device)?;
        let (set, is_active) = driver.primary_context_state(gpu);
        unsafe {
            put(flags, set)?;
            put(active, c_int::from(is_active))
        }
    }
    fn cuCtxCreate_v2(driver, context: *mut Handle, _flags: c_uint, device: Device) {
        let created = driver.create_context(driver.gpu_index(device)?)?;
        unsafe { put(context, created.handle())? };
        push_current(created.handle());
        Ok(())
    }
    fn cuCtxDestroy_v2(driver, context: Handle) {
        driver.destroy_context(&driver.context(context)?);
        forget_current(context);
        Ok(())
    }
    fn cuCtxSetCurrent(driver, context: Handle) {
        set_current(if context == 0 { None } else { Some(driver.context(context)?.handle()) });
        Ok(())
    }
    fn cuCtxGetCurrent(driver, context: *mut Handle) {
        let _ = driver;
        unsafe { put(context, current_handle().unwrap_or(0)) }
    }
    fn cuCtxPushCurrent_v2(driver, context: Handle) {
        push_current(driver.context(context)?.handle());
        Ok(())
    }
    fn cuCtxPopCurrent_v2(driver, context: *mut Handle) {
        let _ = driver;
        let popped = pop_current().ok_or(result::INVALID_CONTEXT)?;
        if context.is_null() { Ok(()) } else { unsafe { put(context, popped) } }
    }
    fn cuCtxGetDevice(driver, device: *mut Device) {
        unsafe { put(device, driver.ordinal_of(driver.current()?.gpu)) }
    }
    fn cuCtxGetApiVersion(driver, _context: Handle, version: *mut c_uint) {
        let _ = driver;
        unsafe { put(version, 3020) }
    }
    fn cuCtxGetFlags(driver, flags: *mut c_uint) {
        driver.current()?;
        unsafe { put(flags, 0) }
    }
    fn cuCtxSynchronize(driver) {
        let context = driver.current()?;
        driver.injected_error(context.gpu, CudaCall::Synchronize)
    }
    fn cuCtxGetStreamPriorityRange(driver, least: *mut c_int, greatest: *mut c_int) {
        driver.current()?;
        unsafe {
            if !least.is_null() { put(least, 0)? }
            if greatest.is_null() { Ok(()) } else { put(greatest, -5) }
        }
    }
    fn cuCtxSetCacheConfig(driver, _config: c_uint) {
        driver.current().map(drop)
    }
    fn cuCtxEnablePeerAccess(driver, peer: Handle, flags: c_uint) {
        let here = driver.current()?;
        let peer = driver.context(peer)?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let added = peer_accesses().lock().map_err(|_| result::UNKNOWN)?.insert((here.handle(), peer.handle()));
        if added { Ok(()) } else { Err(PEER_ACCESS_ALREADY_ENABLED) }
    }
    fn cuCtxDisablePeerAccess(driver, peer: Handle) {
        let here = driver.current()?;
        let removed = peer_accesses().lock().map_err(|_| result::UNKNOWN)?.remove(&(here.handle(), peer));
        if removed { Ok(()) } else { Err(PEER_ACCESS_NOT_ENABLED) }
    }

    // ---- Memory ----

    fn cuMemGetInfo_v2(driver, free: *mut usize, total: *mut usize) {
        let gpu = driver.current()?.gpu;
        let whole = driver.with_gpu(gpu, |values| values.memory.0.saturating_sub(values.memory_reserved.0));
        let really_free = driver.memory_capacity(gpu).saturating_sub(driver.state_of(gpu).memory_used());
        let shown = driver.with_gpu(gpu, |values| values.cuda_free_memory_maximum);
        let left = shown.map_or(really_free, |most| really_free.min(most.0));
        unsafe {
            put(free, usize::try_from(left).unwrap_or(usize::MAX))?;
            put(total, usize::try_from(whole).unwrap_or(usize::MAX))
        }
    }
    fn cuMemAlloc_v2(driver, pointer: *mut DevicePointer, bytes: usize) {
        let context = driver.current()?;
        driver.injected_error(context.gpu, CudaCall::MemoryAllocation)?;
        unsafe { put(pointer, device_memory::allocate(driver, context.gpu, context.handle(), bytes as u64)?) }
    }
    fn cuMemAllocAsync(driver, pointer: *mut DevicePointer, bytes: usize, _stream: Handle) {
        let context = driver.current()?;
        driver.injected_error(context.gpu, CudaCall::MemoryAllocation)?;
        unsafe { put(pointer, device_memory::allocate(driver, context.gpu, context.handle(), bytes as u64)?) }
    }
    fn cuMemAllocManaged(driver, pointer: *mut DevicePointer, bytes: usize, _flags: c_uint) {
        let context = driver.current()?;
        unsafe { put(pointer, device_memory::allocate(driver, context.gpu, context.handle(), bytes as u64)?) }
    }
    fn cuMemFree_v2(driver, pointer: DevicePointer) {
        driver.current()?;
        if pointer == 0 { Ok(()) } else { device_memory::free(driver, pointer) }
    }
    fn cuMemFreeAsync(driver, pointer: DevicePointer, _stream: Handle) {
        driver.current()?;
        device_memory::free(driver, pointer)
    }
    fn cuMemAllocHost_v2(driver, pointer: *mut u64, bytes: usize) {
        let context = driver.current()?;
        unsafe { put(pointer, memory::allocate_host(context.gpu, context.handle(), bytes as u64)?) }
    }
    fn cuMemHostAlloc(driver, pointer: *mut u64, bytes: usize, _flags: c_uint) {
        let context = driver.current()?;
        unsafe { put(pointer, memory::allocate_host(context.gpu, context.handle(), bytes as u64)?) }
    }
    fn cuMemHostGetDevicePointer_v2(driver, pointer: *mut u64, host: u64, _flags: c_uint) {
        driver.current()?;
        memory::find(host).ok_or(INVALID_VALUE)?;
        unsafe { put(pointer, host) }
    }
    fn cuMemFreeHost(driver, pointer: u64) {
        device_memory::free(driver, pointer)
    }
    fn cuMemHostRegister_v2(driver, _pointer: u64, _bytes: usize, _flags: c_uint) {
        driver.current().map(drop)
    }
    fn cuMemHostUnregister(driver, _pointer: u64) {
        driver.current().map(drop)
    }
    fn cuMemGetAddressRange_v2(driver, base: *mut DevicePointer, bytes: *mut usize, pointer: DevicePointer) {
        driver.current()?;
        let found = memory::find(pointer).ok_or(NOT_FOUND)?;
        unsafe {
            if !base.is_null() { put(base, found.base)? }
            if bytes.is_null() { Ok(()) } else { put(bytes, usize::try_from(found.length).unwrap_or(0)) }
        }
    }
    fn cuPointerGetAttribute(driver, value: *mut c_void, number: c_uint, pointer: DevicePointer) {
        let found = memory::find(pointer).ok_or(INVALID_VALUE)?;
        if value.is_null() {
            return Err(INVALID_VALUE);
        }
        match number {
            // Memory type: 1 host, 2 device.
            2 => unsafe { put(value.cast::<c_uint>(), if found.host { 1 } else { 2 }) },
            3 | 4 => unsafe { put(value.cast::<u64>(), pointer) },
            9 => unsafe { put(value.cast::<c_int>(), driver.ordinal_of(found.gpu)) },
            _ => Err(NOT_SUPPORTED),
        }
    }
    fn cuMemcpyHtoD_v2(driver, to: DevicePointer, from: *const c_void, bytes: usize) {
        copy(driver, 0, to, from.addr() as u64, bytes)
    }
    fn cuMemcpyDtoH_v2(driver, to: *mut c_void, from: DevicePointer, bytes: usize) {
        copy(driver, 0, to.addr() as u64, from, bytes)
    }
    fn cuMemcpyDtoD_v2(driver, to: DevicePointer, from: DevicePointer, bytes: usize) {
        copy(driver, 0, to, from, bytes)
    }
    fn cuMemcpy(driver, to: DevicePointer, from: DevicePointer, bytes: usize) {
        copy(driver, 0, to, from, bytes)
    }
    fn cuMemcpyHtoDAsync_v2(driver, to: DevicePointer, from: *const c_void, bytes: usize, stream: Handle) {
        copy(driver, stream, to, from.addr() as u64, bytes)
    }
    fn cuMemcpyDtoHAsync_v2(driver, to: *mut c_void, from: DevicePointer, bytes: usize, stream: Handle) {
        copy(driver, stream, to.addr() as u64, from, bytes)
    }
    fn cuMemcpyDtoDAsync_v2(driver, to: DevicePointer, from: DevicePointer, bytes: usize, stream: Handle) {
        copy(driver, stream, to, from, bytes)
    }
    fn cuMemcpyAsync(driver, to: DevicePointer, from: DevicePointer, bytes: usize, stream: Handle) {
        copy(driver, stream, to, from, bytes)
    }
    fn cuMemcpyPeer(driver, to: DevicePointer, _to_context: Handle, from: DevicePointer, _from_context: Handle, bytes: usize) {
        copy(driver, 0, to, from, bytes)
    }
    fn cuMemcpyPeerAsync(driver, to: DevicePointer, _to_context: Handle, from: DevicePointer, _from_context: Handle, bytes: usize, stream: Handle) {
        copy(driver, stream, to, from, bytes)
    }
    fn cuMemsetD8_v2(driver, to: DevicePointer, value: u8, count: usize) {
        fill(driver, 0, to, value, count)
    }
    fn cuMemsetD16_v2(driver, to: DevicePointer, value: u16, count: usize) {
        fill(driver, 0, to, value, count)
    }
    fn cuMemsetD32_v2(driver, to: DevicePointer, value: u32, count: usize) {
        fill(driver, 0, to, value, count)
    }
    fn cuMemsetD8Async(driver, to: DevicePointer, value: u8, count: usize, stream: Handle) {
        fill(driver, stream, to, value, count)
    }
    fn cuMemsetD16Async(driver, to: DevicePointer, value: u16, count: usize, stream: Handle) {
        fill(driver, stream, to, value, count)
    }
    fn cuMemsetD32Async(driver, to: DevicePointer, value: u32, count: usize, stream: Handle) {
        fill(driver, stream, to, value, count)
    }

    fn cuMemsetD2D32_v2(driver, to: DevicePointer, pitch: usize, value: u32, width: usize, height: usize) {
        fill_rows(driver, 0, to, pitch, value, width, height)
    }
    fn cuMemsetD2D32Async(driver, to: DevicePointer, pitch: usize, value: u32, width: usize, height: usize, stream: Handle) {
        fill_rows(driver, stream, to, pitch, value, width, height)
    }

    // ---- Streams and events ----

    fn cuStreamCreate(driver, stream: *mut Handle, _flags: c_uint) {
        unsafe { put(stream, Stream::create(&*driver.current()?)) }
    }
    fn cuStreamCreateWithPriority(driver, stream: *mut Handle, _flags: c_uint, _priority: c_int) {
        unsafe { put(stream, Stream::create(&*driver.current()?)) }
    }
    fn cuStreamDestroy_v2(driver, stream: Handle) {
        driver.current()?;
        STREAMS.remove(stream).map(drop)
    }
    fn cuStreamSynchronize(driver, stream: Handle) {
        let stream = stream_of(driver, stream)?;
        driver.injected_error(stream.gpu, CudaCall::Synchronize)
    }
    fn cuStreamQuery(driver, stream: Handle) {
        let stream = stream_of(driver, stream)?;
        driver.injected_error(stream.gpu, CudaCall::Synchronize)
    }
    fn cuStreamWaitEvent(driver, stream: Handle, event: Handle, _flags: c_uint) {
        let stream = stream_of(driver, stream)?;
        if let Some(clock_ns) = EVENTS.get(event)?.clock_ns() {
            stream.wait_until(clock_ns);
        }
        Ok(())
    }
    fn cuStreamGetFlags(driver, stream: Handle, flags: *mut c_uint) {
        stream_of(driver, stream)?;
        unsafe { put(flags, 0) }
    }
    fn cuStreamGetPriority(driver, stream: Handle, priority: *mut c_int) {
        stream_of(driver, stream)?;
        unsafe { put(priority, 0) }
    }
    fn cuStreamIsCapturing(driver, stream: Handle, status: *mut c_uint) {
        stream_of(driver, stream)?;
        unsafe { put(status, 0) }
    }
    fn cuLaunchHostFunc(driver, stream: Handle, function: Option<unsafe extern "C" fn(*mut c_void)>, data: *mut c_void) {
        stream_of(driver, stream)?;
        unsafe { function.ok_or(INVALID_VALUE)?(data) };
        Ok(())
    }
    fn cuEventCreate(driver, event: *mut Handle, _flags: c_uint) {
        driver.current()?;
        unsafe { put(event, EVENTS.insert(Event::default())) }
    }
    fn cuEventDestroy_v2(driver, event: Handle) {
        driver.current()?;
        EVENTS.remove(event).map(drop)
    }
    fn cuEventRecord(driver, event: Handle, stream: Handle) {
        EVENTS.get(event)?.record(stream_of(driver, stream)?.clock_ns());
        Ok(())
    }
    fn cuEventRecordWithFlags(driver, event: Handle, stream: Handle, _flags: c_uint) {
        EVENTS.get(event)?.record(stream_of(driver, stream)?.clock_ns());
        Ok(())
    }
    fn cuEventSynchronize(driver, event: Handle) {
        let context = driver.current()?;
        EVENTS.get(event)?;
        driver.injected_error(context.gpu, CudaCall::Synchronize)
    }
    fn cuEventQuery(driver, event: Handle) {
        let context = driver.current()?;
        EVENTS.get(event)?;
        driver.injected_error(context.gpu, CudaCall::Synchronize)
    }
    fn cuEventElapsedTime(driver, milliseconds: *mut f32, start: Handle, end: Handle) {
        elapsed(driver, milliseconds, start, end)
    }
    fn cuEventElapsedTime_v2(driver, milliseconds: *mut f32, start: Handle, end: Handle) {
        elapsed(driver, milliseconds, start, end)
    }

    // ---- Modules and kernels ----

    fn cuModuleLoadData(driver, module: *mut Handle, data: *const c_void) {
        load_module(driver, module, data)
    }
    fn cuModuleLoadDataEx(driver, module: *mut Handle, data: *const c_void, _count: c_uint, _options: *mut c_uint, _values: *mut *mut c_void) {
        load_module(driver, module, data)
    }
    fn cuModuleLoad(driver, module: *mut Handle, path: *const c_char) {
        if path.is_null() {
            return Err(INVALID_VALUE);
        }
        let path = unsafe { CStr::from_ptr(path) }.to_str().map_err(|_| INVALID_VALUE)?;
        let mut bytes = std::fs::read(path).map_err(|_| 301u32)?;
        bytes.push(0);
        load_module(driver, module, bytes.as_ptr().cast())
    }
    fn cuModuleUnload(driver, module: Handle) {
        driver.current()?;
        MODULES.remove(module).map(drop)
    }
    fn cuModuleGetFunction(driver, function: *mut Handle, module: Handle, name: *const c_char) {
        driver.current()?;
        if name.is_null() {
            return Err(INVALID_VALUE);
        }
        let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| NOT_FOUND)?.to_owned();
        if !MODULES.get(module)?.image.entries.contains(&name) {
            return Err(NOT_FOUND);
        }
        unsafe { put(function, FUNCTIONS.insert(Function { name, module, attributes: Mutex::default() })) }
    }
    fn cuModuleGetLoadingMode(driver, mode: *mut c_uint) {
        let _ = driver;
        unsafe { put(mode, 2) }
    }
    fn cuFuncGetAttribute(driver, value: *mut c_int, number: c_uint, function: Handle) {
        driver.current()?;
        let function = FUNCTIONS.get(function)?;
        let set = function.attributes.lock().map_err(|_| result::UNKNOWN)?.get(&number).copied();
        // Threads per block; registers.
        let default = match number { 0 => 1024, 4 => 32, _ => 0 };
        unsafe { put(value, set.unwrap_or(default)) }
    }
    fn cuFuncSetAttribute(driver, function: Handle, number: c_uint, value: c_int) {
        let gpu = driver.current()?.gpu;
        let function = FUNCTIONS.get(function)?;
        let shared_bytes_maximum = driver.with_gpu(gpu, |values| attribute(values, 97));
        if number == DYNAMIC_SHARED_BYTES_MAXIMUM && !(0..=shared_bytes_maximum).contains(&i64::from(value)) {
            return Err(INVALID_VALUE);
        }
        function.attributes.lock().map_err(|_| result::UNKNOWN)?.insert(number, value);
        Ok(())
    }
    fn cuFuncSetCacheConfig(driver, function: Handle, _config: c_uint) {
        driver.current()?;
        FUNCTIONS.get(function).map(drop)
    }
    fn cuFuncGetModule(driver, module: *mut Handle, function: Handle) {
        driver.current()?;
        unsafe { put(module, FUNCTIONS.get(function)?.module) }
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(driver, blocks: *mut c_int, function: Handle, threads: c_int, shared_bytes: usize) {
        let gpu = driver.current()?.gpu;
        FUNCTIONS.get(function)?;
        if threads <= 0 {
            return Err(INVALID_VALUE);
        }
        let per_sm = usize::try_from(driver.with_gpu(gpu, shared_memory_per_sm)).unwrap_or(0);
        let by_memory = per_sm / (shared_bytes + 1024);
        let by_threads = usize::try_from(2048 / threads).unwrap_or(0);
        unsafe { put(blocks, c_int::try_from(by_memory.min(by_threads).min(32)).unwrap_or(0)) }
    }
    fn cuTensorMapEncodeTiled(
        driver, map: *mut TensorMap, data_type: c_uint, rank: c_uint, address: u64, dimensions: *const u64,
        strides: *const u64, tile: *const u32, element_strides: *const u32, interleave: c_uint, swizzle: c_uint,
        l2_promotion: c_uint, fill: c_uint,
    ) {
        let _ = driver;
        if !map.addr().is_multiple_of(64) || !(1..=5).contains(&rank) {
            return Err(INVALID_VALUE);
        }
        let short = |value: c_uint| u8::try_from(value).map_err(|_| INVALID_VALUE);
        let mut encoded = TensorMap {
            address,
            data_type: short(data_type)?,
            rank: short(rank)?,
            interleave: short(interleave)?,
            swizzle: short(swizzle)?,
            l2_promotion: short(l2_promotion)?,
            fill: short(fill)?,
            ..TensorMap::empty()
        };
        let rank = rank as usize;
        encoded.dimensions[..rank].copy_from_slice(unsafe { list(dimensions, rank)? });
        encoded.strides[..rank - 1].copy_from_slice(unsafe { list(strides, rank - 1)? });
        for (place, value) in encoded.tile.iter_mut().zip(unsafe { list(tile, rank)? }) {
            *place = u16::try_from(*value).map_err(|_| INVALID_VALUE)?;
        }
        for (place, value) in encoded.element_strides.iter_mut().zip(unsafe { list(element_strides, rank)? }) {
            *place = short(*value)?;
        }
        unsafe { put(map, encoded.encode()?) }
    }
    fn cuLaunchKernel(
        driver, function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared_bytes: c_uint, stream: Handle, parameters: *const *const c_void, _extra: *const *const c_void,
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        launch(driver, function, grid, block, shared_bytes, stream, parameters)
    }
    fn cuLaunchKernelEx(driver, config: *const LaunchConfig, function: Handle, parameters: *const *const c_void, _extra: *const *const c_void) {
        if config.is_null() {
            return Err(INVALID_VALUE);
        }
        let config = unsafe { config.read() };
        launch(driver, function, config.grid, config.block, config.shared_bytes, config.stream, parameters)
    }
}

/// `CUlaunchConfig`; its attributes (clusters and the like) change speed on a GPU, never results.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: Handle,
    attributes: *const c_void,
    attribute_count: c_uint,
}

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const DYNAMIC_SHARED_BYTES_MAXIMUM: c_uint = 8;

/// What a kernel gets whose attribute is not set.
const DYNAMIC_SHARED_BYTES_DEFAULT: u32 = 48 << 10;

/// An array that the caller passes.
///
/// # Safety
/// A pointer that is not null points to so many values, which stay as they are during the call.
pub(super) unsafe fn list<'caller, T>(first: *const T, length: usize) -> Outcome<&'caller [T]> {
    match length {
        0 => Ok(&[]),
        _ if first.is_null() => Err(INVALID_VALUE),
        // SAFETY: as the caller promises.
        _ => Ok(unsafe { std::slice::from_raw_parts(first, length) }),
    }
}

fn peer_accesses() -> &'static Mutex<HashSet<(usize, usize)>> {
    static ENABLED: OnceLock<Mutex<HashSet<(usize, usize)>>> = OnceLock::new();
    ENABLED.get_or_init(Mutex::default)
}

/// Null and the two special handles of the legacy and per-thread default streams stand for the
/// context's own.
pub(super) fn stream_of(driver: &Driver, handle: Handle) -> Outcome<Arc<Stream>> {
    let context = driver.current()?;
    if handle <= 2 {
        Ok(Arc::clone(&context.default_stream))
    } else {
        STREAMS.get(handle)
    }
}

fn elapsed(driver: &Driver, milliseconds: *mut f32, start: Handle, end: Handle) -> Outcome {
    driver.current()?;
    let clock = |event| EVENTS.get(event)?.clock_ns().ok_or(INVALID_HANDLE);
    let (start, end) = (clock(start)?, clock(end)?);
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "the interface is a float"
    )]
    let difference = ((end as f64 - start as f64) / 1e6) as f32;
    // SAFETY: the exported functions pass their caller's pointer.
    unsafe { put(milliseconds, difference) }
}

fn copy(driver: &Driver, stream: Handle, to: u64, from: u64, bytes: usize) -> Outcome {
    let stream = stream_of(driver, stream)?;
    driver.injected_error(stream.gpu, CudaCall::Copy)?;
    for address in [to, from] {
        // What begins in device memory must end in it; other addresses are the caller's own memory.
        if memory::find(address).is_some() && !memory::holds(address, bytes as u64) {
            return Err(INVALID_VALUE);
        }
    }
    if bytes > 0 && (to == 0 || from == 0) {
        return Err(INVALID_VALUE);
    }
    let _work = driver.node.begin_work(stream.gpu, driver.slot(stream.gpu)?);
    let scenario = driver.node.scenario();
    let is_on_device = |address| memory::find(address).is_some_and(|it| !it.host);
    let direction = match (is_on_device(from), is_on_device(to)) {
        (true, true) => Direction::OnDevice,
        (true, false) => Direction::ToHost,
        _ => Direction::ToDevice,
    };
    let operation = Operation::Copy {
        direction,
        to,
        bytes: bytes as u64,
    };
    let memory_faults = memory_faults::begin(&scenario.gpus[stream.gpu], stream.gpu, operation);
    // SAFETY: device ends were checked above, host ends are as the caller promises; ranges may
    // overlap.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
    memory_faults.end();
    // 50 GB/s, the order of PCIe 5.0 x16.
    stream.pass(bytes as u64 / 50);
    Ok(())
}

fn fill<T: Copy>(driver: &Driver, stream: Handle, to: u64, value: T, count: usize) -> Outcome {
    let stream = stream_of(driver, stream)?;
    let bytes = count.checked_mul(size_of::<T>()).ok_or(INVALID_VALUE)? as u64;
    if count > 0 && (!memory::holds(to, bytes) || !to.is_multiple_of(align_of::<T>() as u64)) {
        return Err(INVALID_VALUE);
    }
    let scenario = driver.node.scenario();
    // Memory is filled by a kernel of the driver's own.
    let memory_faults =
        memory_faults::begin(&scenario.gpus[stream.gpu], stream.gpu, Operation::Launch);
    if count > 0 {
        // SAFETY: the allocation holds all of it, aligned, and any bits are a `T`.
        unsafe { std::slice::from_raw_parts_mut(to as *mut T, count) }.fill(value);
    }
    memory_faults.end();
    stream.pass(bytes / 2_000);
    Ok(())
}

/// `width` values in each of `height` rows that begin `pitch` bytes apart.
fn fill_rows(
    driver: &Driver,
    stream: Handle,
    to: u64,
    pitch: usize,
    value: u32,
    width: usize,
    height: usize,
) -> Outcome {
    if height > 1 && pitch < width.saturating_mul(4) {
        return Err(INVALID_VALUE);
    }
    (0..height).try_for_each(|row| fill(driver, stream, to + (row * pitch) as u64, value, width))
}

fn load_module(driver: &Driver, module: *mut Handle, data: *const c_void) -> Outcome {
    let context = driver.current()?;
    driver.injected_error(context.gpu, CudaCall::ModuleLoad)?;
    // SAFETY: as the caller of cuModuleLoadData promises.
    let image = unsafe { load_image(driver, context.gpu, data)? };
    // SAFETY: the exported functions pass their caller's pointer.
    unsafe { put(module, MODULES.insert(Module { image })) }
}

/// # Safety
/// `data` points to NUL-terminated PTX or to a whole cubin.
pub(super) unsafe fn load_image(
    driver: &Driver,
    gpu: usize,
    data: *const c_void,
) -> Outcome<image::Image> {
    let scenario = driver.node.scenario();
    let capability = scenario.gpus[gpu].compute_capability;
    // SAFETY: as the caller promises.
    unsafe { image::read(data, scenario.driver.cuda_version, capability) }
}

fn launch(
    driver: &Driver,
    function: Handle,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: Handle,
    parameters: *const *const c_void,
) -> Outcome {
    let context = driver.current()?;
    let stream = stream_of(driver, stream)?;
    let function = FUNCTIONS.get(function)?;
    let threads: u64 = block.iter().map(|it| u64::from(*it)).product();
    let allowed_shared_bytes = lock(&function.attributes)
        .get(&DYNAMIC_SHARED_BYTES_MAXIMUM)
        .and_then(|bytes| u32::try_from(*bytes).ok())
        .unwrap_or(0)
        .max(DYNAMIC_SHARED_BYTES_DEFAULT);
    let possible = !grid.contains(&0) && (1..=1024).contains(&threads);
    if !possible || shared_bytes > allowed_shared_bytes {
        return Err(INVALID_VALUE);
    }
    driver.injected_error(context.gpu, CudaCall::Launch)?;
    let Some(run) = kernels::find(&function.name) else {
        #[allow(
            clippy::print_stderr,
            reason = "a library has no other way to say what it cannot do"
        )]
        {
            eprintln!("gpu simulator: kernel {} has no CPU version", function.name);
        }
        return Err(NOT_SUPPORTED);
    };
    let number = driver.node.state().gpu(context.gpu).count_launch();
    let scenario = driver.node.scenario();
    let gpu = &scenario.gpus[context.gpu];
    let _work = driver
        .node
        .begin_work(context.gpu, driver.slot(context.gpu)?);
    let first_sm = corruption::first_sm(gpu, number);
    let strike = corruption::strike(driver.node, context.gpu, gpu, &function.name, first_sm);
    let is_stale = strike.is_some_and(|it| it.is_stale);
    let how = kernels::How { first_sm, is_stale };
    let launch = Launch::new(grid, block, shared_bytes, parameters, gpu, how);
    let memory_faults = memory_faults::begin(gpu, context.gpu, Operation::Launch);
    let done = run(&launch).map_err(|code| {
        if [ILLEGAL_ADDRESS, ILLEGAL_INSTRUCTION].contains(&code) {
            context.poison(code)
        } else {
            code
        }
    })?;
    if let Some(strike) = strike {
        let (node, outputs) = (driver.node, &done.outputs);
        corruption::spoil(node, context.gpu, gpu, &function.name, strike, outputs);
    }
    memory_faults.end();
    stream.pass(scaled_time(gpu, done.gpu_time_ns));
    Ok(())
}

/// Runs a kernel of another library of this node: counted, timed and spoiled like one of a module.
/// Errors are the library's.
pub(crate) fn run_library_kernel(
    name: &str,
    stream: Handle,
    output: kernels::Output,
    gpu_time_ns: impl FnOnce(u32) -> u64,
    run: impl FnOnce() -> Result<(), u32>,
) -> Result<(), u32> {
    const EXECUTION_FAILED: u32 = 13;
    let driver = super::driver::initialized().ok_or(EXECUTION_FAILED)?;
    let context = driver.current().map_err(|_| EXECUTION_FAILED)?;
    let stream = stream_of(driver, stream).map_err(|_| EXECUTION_FAILED)?;
    driver
        .injected_error(context.gpu, CudaCall::Launch)
        .map_err(|_| EXECUTION_FAILED)?;
    let number = driver.node.state().gpu(context.gpu).count_launch();
    let scenario = driver.node.scenario();
    let gpu = &scenario.gpus[context.gpu];
    let slot = driver.slot(context.gpu).map_err(|_| EXECUTION_FAILED)?;
    let _work = driver.node.begin_work(context.gpu, slot);
    let first_sm = corruption::first_sm(gpu, number);
    let strike = corruption::strike(driver.node, context.gpu, gpu, name, first_sm);
    let memory_faults = memory_faults::begin(gpu, context.gpu, Operation::Launch);
    if !strike.is_some_and(|it| it.is_stale) {
        run()?;
    }
    if let Some(strike) = strike {
        corruption::spoil(driver.node, context.gpu, gpu, name, strike, &[output]);
    }
    memory_faults.end();
    stream.pass(scaled_time(gpu, gpu_time_ns(gpu.sm_count)));
    Ok(())
}

/// GPU time on this GPU of what takes an H200 at its power limit so long: by multiprocessors and
/// clock under load, and by how much the GPU is slower than its model.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "model time"
)]
fn scaled_time(gpu: &Gpu, nanoseconds: u64) -> u64 {
    const H200_SM_MHZ: f64 = 132.0 * 1550.0;
    let share = f64::from(gpu.sm_count) * f64::from(gpu.clocks.load_sm_mhz) / H200_SM_MHZ;
    let speed = (share * gpu.speed / f64::from(gpu.slowdown())).max(1e-3);
    (nanoseconds as f64 / speed) as u64
}

/// # Safety
/// `symbol` is a C string, `function` points to a pointer, `status` is null or points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> CuResult {
    // SAFETY: as the caller promises.
    unsafe { cuGetProcAddress_v2(symbol, function, version, flags, std::ptr::null_mut()) }
}

/// # Safety
/// `symbol` is a C string, `function` points to a pointer, `status` is null or points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    _flags: u64,
    status: *mut c_int,
) -> CuResult {
    guarded("cuGetProcAddress", || {
        if symbol.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: as the caller promises.
        let name = unsafe { CStr::from_ptr(symbol) };
        let node = Node::of_this_process().map_err(|_| result::UNKNOWN)?;
        let scenario = node.scenario();
        let newest = scenario.driver.cuda_version_number();
        let missing = &scenario.cuda.missing_symbols;
        let found = super::proc_address::find(name, version.min(newest), missing);
        // SAFETY: as the caller promises. Status 0 is found, 1 is no such symbol.
        unsafe {
            if !status.is_null() {
                put(status, c_int::from(found.is_none()))?;
            }
            put(function, found.unwrap_or(std::ptr::null_mut()))?;
        }
        // The symbol status names what is missing; without a place for it, the result does.
        if found.is_none() && status.is_null() {
            Err(NOT_FOUND)
        } else {
            Ok(())
        }
    })
}
