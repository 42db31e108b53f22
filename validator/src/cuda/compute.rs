//! Driver calls of a burn beyond the check kernel: memory by address, kernels by name, events,
//! tensor maps.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::rc::Rc;

use super::{Context, CudaFailure, CudaResult, Device, LoadedModule, Module};

// Source: cuda.h, CUdevice_attribute and CUfunction_attribute.
const ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_int = 97;
const FUNCTION_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
// Source: cuda.h, CUevent_flags: waiting sleeps instead of spinning.
const EVENT_BLOCKING_SYNC: c_uint = 1;
// Source: cuda.h, CUtensorMapDataType, CUtensorMapInterleave, CUtensorMapSwizzle,
// CUtensorMapL2promotion, …OOBfill.
const TENSOR_MAP_UINT8: c_int = 0;
const TENSOR_MAP_INTERLEAVE_NONE: c_int = 0;
const TENSOR_MAP_SWIZZLE_128B: c_int = 3;
const TENSOR_MAP_L2_PROMOTION_256B: c_int = 3;
const TENSOR_MAP_FILL_NONE: c_int = 0;

/// More than any embedded kernel has.
const ARGUMENTS_MAXIMUM: usize = 16;

/// A `CUtensorMap`, which the driver wants aligned to 64 bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct TensorMap([u64; 16]);

/// One argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Argument {
    /// A device address, or 0.
    Pointer(u64),
    U32(u32),
    U64(u64),
    TensorMap(TensorMap),
}

/// Room for an argument of any kind, so that the driver never reads beyond it whatever the kernel
/// declares.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Slot([u64; 16]);

impl From<Argument> for Slot {
    fn from(argument: Argument) -> Self {
        let mut slot = [0; 16];
        match argument {
            Argument::Pointer(value) | Argument::U64(value) => slot[0] = value,
            Argument::U32(value) => slot[0] = u64::from(value).to_le(),
            Argument::TensorMap(map) => slot = map.0,
        }
        Self(slot)
    }
}

/// Blocks, threads of a block, and dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaunchShape {
    pub(crate) grid: (u32, u32),
    pub(crate) block: u32,
    pub(crate) shared_bytes: u32,
}

impl Device<'_> {
    /// Dynamic shared memory that a block may have when its kernel requests it, in bytes.
    pub(crate) fn shared_memory_per_block_optin(&self) -> CudaResult<u32> {
        self.attribute(ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    }
}

impl<'a> Context<'a> {
    /// Loads a cubin, or PTX that ends in NUL.
    pub(crate) fn load_image(&self, image: &[u8]) -> CudaResult<Module<'_, 'a>> {
        // A cubin contains its own length; text is distinguished from it by its end.
        if image.starts_with(b"\x7fELF") {
            // SAFETY: the image is a whole cubin, embedded at build time.
            return unsafe { self.load_data(image.as_ptr().cast()) };
        }
        let text = CStr::from_bytes_with_nul(image).map_err(|_| CudaFailure::Status {
            call: "cuModuleLoadData",
            code: 200,
            name: "CUDA_ERROR_INVALID_IMAGE".to_owned(),
        })?;
        self.load_module(text)
    }

    /// Free and total memory of the device, in bytes.
    pub(crate) fn memory_bytes(&self) -> CudaResult<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are to live size_t.
        unsafe { (self.cuda.functions).cuMemGetInfo_v2(&raw mut free, &raw mut total) }?;
        Ok((free as u64, total as u64))
    }

    /// Memory of the device; what it holds is undefined.
    pub(crate) fn allocate(&self, bytes: u64) -> CudaResult<DeviceMemory<'_, 'a>> {
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut address = 0;
        // SAFETY: the pointer is to a live device pointer.
        unsafe { (self.cuda.functions).cuMemAlloc_v2(&raw mut address, size) }?;
        Ok(DeviceMemory {
            context: self,
            address,
            bytes,
        })
    }

    /// Page-locked memory of the host, all zero.
    pub(crate) fn host_words(&self, words: usize) -> CudaResult<HostWords<'_, 'a>> {
        let bytes = words * size_of::<u64>();
        let mut start = null_mut();
        // SAFETY: the pointer is to a live pointer.
        unsafe { (self.cuda.functions).cuMemAllocHost_v2(&raw mut start, bytes) }?;
        let start: *mut u64 = start.cast();
        // SAFETY: the driver gave room for `words` words, page-aligned.
        unsafe { std::ptr::write_bytes(start, 0, words) };
        Ok(HostWords {
            context: self,
            start,
            words,
        })
    }

    /// An event with a time stamp, on which waiting sleeps.
    pub(crate) fn event(&self) -> CudaResult<Event<'_, 'a>> {
        let mut handle = null_mut();
        // SAFETY: the pointer is to a live handle.
        unsafe { (self.cuda.functions).cuEventCreate(&raw mut handle, EVENT_BLOCKING_SYNC) }?;
        Ok(Event {
            context: self,
            handle,
        })
    }

    /// The map of an operand of `rows` rows of `row_bytes` bytes in boxes of `box_rows` rows of 128
    /// bytes.
    pub(crate) fn tensor_map(
        &self,
        address: u64,
        rows: u32,
        row_bytes: u32,
        box_rows: u32,
    ) -> CudaResult<TensorMap> {
        let mut map = TensorMap([0; 16]);
        let dimensions = [u64::from(row_bytes), u64::from(rows)];
        let strides = [u64::from(row_bytes)];
        let box_size = [128, box_rows];
        let element_strides = [1, 1];
        // SAFETY: the map is live and aligned, the arrays have the lengths that rank 2 requires.
        unsafe {
            self.cuda.functions.cuTensorMapEncodeTiled(
                &raw mut map,
                TENSOR_MAP_UINT8,
                2,
                address,
                dimensions.as_ptr(),
                strides.as_ptr(),
                box_size.as_ptr(),
                element_strides.as_ptr(),
                TENSOR_MAP_INTERLEAVE_NONE,
                TENSOR_MAP_SWIZZLE_128B,
                TENSOR_MAP_L2_PROMOTION_256B,
                TENSOR_MAP_FILL_NONE,
            )
        }?;
        Ok(map)
    }
}

impl<'c, 'a> Module<'c, 'a> {
    /// The kernel of this name; with dynamic shared memory, as much is requested.
    pub(crate) fn kernel(&self, name: &CStr, shared_bytes: u32) -> CudaResult<Kernel<'c, 'a>> {
        let functions = &self.0.context.cuda.functions;
        let mut handle = null_mut();
        // SAFETY: the pointer is to a live handle, the module is loaded, the name ends in NUL.
        unsafe { functions.cuModuleGetFunction(&raw mut handle, self.0.handle, name.as_ptr()) }?;
        if shared_bytes > 0 {
            let attribute = FUNCTION_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bytes = shared_bytes.cast_signed();
            // SAFETY: the handle is a function of this module.
            unsafe { functions.cuFuncSetAttribute(handle, attribute, bytes) }?;
        }
        Ok(Kernel {
            module: Rc::clone(&self.0),
            handle,
        })
    }
}

/// A kernel, which keeps its module loaded.
pub(crate) struct Kernel<'c, 'a> {
    module: Rc<LoadedModule<'c, 'a>>,
    handle: *mut c_void,
}

impl Kernel<'_, '_> {
    /// Puts the kernel into the default stream. Wrong arguments can harm the GPU's memory, which
    /// holds nothing but the burn's own data; the host's memory is out of a kernel's reach.
    pub(crate) fn launch(&self, shape: LaunchShape, arguments: &[Argument]) -> CudaResult<()> {
        let mut slots = [Slot([0; 16]); ARGUMENTS_MAXIMUM];
        for (slot, argument) in slots.iter_mut().zip(arguments) {
            *slot = Slot::from(*argument);
        }
        let mut pointers = slots
            .each_mut()
            .map(|slot| std::ptr::from_mut(slot).cast::<c_void>());
        let functions = &self.module.context.cuda.functions;
        // SAFETY: the function is of this module, which is loaded; the default stream is null.
        // `pointers` has an entry for every parameter that an embedded kernel has and more, each to
        // 128 live bytes, the size of the largest parameter; the driver copies them before it
        // returns.
        unsafe {
            functions.cuLaunchKernel(
                self.handle,
                shape.grid.0,
                shape.grid.1,
                1,
                shape.block,
                1,
                1,
                shape.shared_bytes,
                null_mut(),
                pointers.as_mut_ptr(),
                null_mut(),
            )
        }
    }
}

/// Memory of the device.
pub(crate) struct DeviceMemory<'c, 'a> {
    context: &'c Context<'a>,
    address: u64,
    bytes: u64,
}

impl DeviceMemory<'_, '_> {
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The bytes from `offset` on, after everything in the stream before.
    pub(crate) fn read(&self, offset: u64, host: &mut [u8]) -> CudaResult<()> {
        assert!(
            offset + host.len() as u64 <= self.bytes,
            "reads beyond the end of an allocation"
        );
        let functions = &self.context.cuda.functions;
        let (start, bytes) = (host.as_mut_ptr().cast(), host.len());
        // SAFETY: both sides hold so many bytes, as was asserted.
        unsafe { functions.cuMemcpyDtoH_v2(start, self.address + offset, bytes) }
    }

    /// Sets every whole word.
    pub(crate) fn fill(&self, word: u32) -> CudaResult<()> {
        let words = usize::try_from(self.bytes / 4).unwrap_or(usize::MAX);
        // SAFETY: the allocation holds so many words.
        unsafe { (self.context.cuda.functions).cuMemsetD32_v2(self.address, word, words) }
    }

    /// Sets the first word of each of `rows` rows, `pitch_bytes` apart from `offset` on, in the
    /// stream's order.
    pub(crate) fn set_words(
        &self,
        offset: u64,
        pitch_bytes: u64,
        rows: u64,
        word: u32,
    ) -> CudaResult<()> {
        let last = rows.saturating_sub(1) * pitch_bytes + 4;
        assert!(
            rows > 0 && offset + last <= self.bytes,
            "sets words beyond the end of an allocation"
        );
        let functions = &self.context.cuda.functions;
        let size = |it: u64| usize::try_from(it).unwrap_or(usize::MAX);
        // SAFETY: all words lie in this allocation, as was asserted; the default stream is null.
        unsafe {
            functions.cuMemsetD2D32Async(
                self.address + offset,
                size(pitch_bytes),
                word,
                1,
                size(rows),
                null_mut(),
            )
        }
    }

    pub(crate) fn write(&self, offset: u64, host: &[u8]) -> CudaResult<()> {
        assert!(
            offset + host.len() as u64 <= self.bytes,
            "writes beyond the end of an allocation"
        );
        let functions = &self.context.cuda.functions;
        let (start, bytes) = (host.as_ptr().cast(), host.len());
        // SAFETY: both sides hold so many bytes, as was asserted.
        unsafe { functions.cuMemcpyHtoD_v2(self.address + offset, start, bytes) }
    }

    /// Frees the memory and returns the driver's answer, which a drop leaves out.
    pub(crate) fn free(self) -> CudaResult<()> {
        let memory = std::mem::ManuallyDrop::new(self);
        memory.free_once()
    }

    /// The last use of the memory.
    fn free_once(&self) -> CudaResult<()> {
        // SAFETY: the memory was allocated by this wrapper; `free` and `drop` each call this once,
        // and never both.
        unsafe { (self.context.cuda.functions).cuMemFree_v2(self.address) }
    }
}

impl Drop for DeviceMemory<'_, '_> {
    fn drop(&mut self) {
        // A failure changes nothing any more.
        let _ = self.free_once();
    }
}

/// Page-locked words of the host, which copies from the device reach without waiting.
pub(crate) struct HostWords<'c, 'a> {
    context: &'c Context<'a>,
    start: *mut u64,
    words: usize,
}

impl HostWords<'_, '_> {
    /// Enqueues a copy of the first words of `memory` from `offset` on into the words from `first`
    /// on. They are there once an event that was recorded after has passed.
    pub(crate) fn copy_later(
        &self,
        first: usize,
        count: usize,
        memory: &DeviceMemory<'_, '_>,
        offset: u64,
    ) -> CudaResult<()> {
        let bytes = count * size_of::<u64>();
        assert!(
            first + count <= self.words && offset + bytes as u64 <= memory.bytes,
            "copies beyond the end of an allocation"
        );
        let functions = &self.context.cuda.functions;
        let from = memory.address + offset;
        // SAFETY: both sides hold so many bytes; the words live until the context's work is done,
        // see Drop.
        unsafe {
            let to = self.start.add(first).cast();
            functions.cuMemcpyDtoHAsync_v2(to, from, bytes, null_mut())
        }
    }

    /// The word at `index` as it is now.
    pub(crate) fn word(&self, index: usize) -> u64 {
        assert!(index < self.words, "reads beyond the end of an allocation");
        // SAFETY: within the allocation; volatile, since the device writes it.
        unsafe { self.start.add(index).read_volatile() }
    }
}

impl Drop for HostWords<'_, '_> {
    fn drop(&mut self) {
        // Copies into it may still be under way.
        let _ = self.context.synchronize();
        // SAFETY: the memory was allocated by this wrapper and is freed once. A failure changes
        // nothing any more.
        let _ = unsafe { (self.context.cuda.functions).cuMemFreeHost(self.start.cast()) };
    }
}

/// A point in the default stream.
pub(crate) struct Event<'c, 'a> {
    context: &'c Context<'a>,
    handle: *mut c_void,
}

impl Event<'_, '_> {
    pub(crate) fn record(&self) -> CudaResult<()> {
        // SAFETY: the event is live; null is the default stream.
        unsafe { (self.context.cuda.functions).cuEventRecord(self.handle, null_mut()) }
    }

    /// Sleeps until the GPU has come here; errors of kernels come out here.
    pub(crate) fn wait(&self) -> CudaResult<()> {
        // SAFETY: the event is live.
        unsafe { (self.context.cuda.functions).cuEventSynchronize(self.handle) }
    }

    /// Seconds on the GPU from `earlier` to this; both must have passed.
    pub(crate) fn seconds_since(&self, earlier: &Event<'_, '_>) -> CudaResult<f64> {
        let functions = &self.context.cuda.functions;
        let mut milliseconds = 0.0;
        // SAFETY: the pointer is to a live float, the events are live.
        unsafe {
            functions.cuEventElapsedTime(&raw mut milliseconds, earlier.handle, self.handle)
        }?;
        Ok(f64::from(milliseconds) / 1000.0)
    }
}

impl Drop for Event<'_, '_> {
    fn drop(&mut self) {
        // SAFETY: the event is live and destroyed once. A failure changes nothing any more.
        let _ = unsafe { (self.context.cuda.functions).cuEventDestroy_v2(self.handle) };
    }
}
