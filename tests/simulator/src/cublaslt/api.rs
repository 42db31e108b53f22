//! The exported functions.

use super::matrix::{Element, Layout};
use super::product::{Operand, product};
use crate::cuda::kernels::{Blocks, Output, Tiles, product_time_ns};
use crate::node::{Node, misbehave};
use std::collections::{HashMap, HashSet};
use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// `cublasStatus_t`.
type Status = u32;

const SUCCESS: Status = 0;
const NOT_INITIALIZED: Status = 1;
const INVALID_VALUE: Status = 7;
const MAPPING_ERROR: Status = 11;
const EXECUTION_FAILED: Status = 13;
const INTERNAL_ERROR: Status = 14;
const NOT_SUPPORTED: Status = 15;

type Outcome = Result<(), Status>;
type Handle = usize;

/// `cublasLtMatmulDesc_t`: attributes by number, as the caller wrote their bytes.
type Attributes = HashMap<u32, Vec<u8>>;

#[derive(Debug, Default)]
struct Objects {
    handles: HashSet<Handle>,
    descriptions: HashMap<Handle, Attributes>,
    layouts: HashMap<Handle, Layout>,
    preferences: HashMap<Handle, Attributes>,
}

static OBJECTS: LazyLock<Mutex<Objects>> = LazyLock::new(Mutex::default);

fn objects() -> MutexGuard<'static, Objects> {
    OBJECTS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn next_handle() -> Handle {
    static NEXT: AtomicUsize = AtomicUsize::new(0x20_0000);
    NEXT.fetch_add(16, Ordering::Relaxed)
}

/// A bug of the simulator must end as an error, not unwind into C.
fn call(name: &str, body: impl FnOnce() -> Outcome) -> Status {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let node = Node::of_this_process().map_err(|_| NOT_INITIALIZED)?;
        match misbehave(&node.scenario().cublaslt, name) {
            Some(SUCCESS) => Ok(()),
            Some(status) => Err(status),
            None => body(),
        }
    }));
    match outcome {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(status)) => status,
        Err(_) => INTERNAL_ERROR,
    }
}

unsafe fn put<T>(place: *mut T, value: T) -> Outcome {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: checked above; the exported functions pass their caller's pointers.
    unsafe { place.write(value) };
    Ok(())
}

unsafe fn bytes_of(data: *const c_void, length: usize) -> Result<Vec<u8>, Status> {
    if data.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller of the exported function guarantees that many bytes.
    Ok(unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length) }.to_vec())
}

fn number(bytes: &[u8]) -> u64 {
    let mut all = [0; 8];
    let length = bytes.len().min(8);
    all[..length].copy_from_slice(&bytes[..length]);
    u64::from_le_bytes(all)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtCreate(handle: *mut Handle) -> Status {
    call("cublasLtCreate", || {
        let node = Node::of_this_process().map_err(|_| NOT_INITIALIZED)?;
        match node.scenario().cublaslt.init_error {
            SUCCESS => {}
            status => return Err(status),
        }
        let created = next_handle();
        objects().handles.insert(created);
        // SAFETY: as the caller promises.
        unsafe { put(handle, created) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtDestroy(handle: Handle) -> Status {
    call("cublasLtDestroy", || {
        if objects().handles.remove(&handle) {
            Ok(())
        } else {
            Err(NOT_INITIALIZED)
        }
    })
}

/// 10000 x major + 100 x minor + patch of the version in the library's file name.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    130_100
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetCudartVersion() -> usize {
    13_000
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtGetProperty(property: c_int, value: *mut c_int) -> Status {
    call("cublasLtGetProperty", || {
        let part = match property {
            0 => 13,
            1 => 1,
            2 => 0,
            _ => return Err(INVALID_VALUE),
        };
        // SAFETY: as the caller promises.
        unsafe { put(value, part) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetStatusName(status: Status) -> *const c_char {
    match status {
        SUCCESS => c"CUBLAS_STATUS_SUCCESS",
        NOT_INITIALIZED => c"CUBLAS_STATUS_NOT_INITIALIZED",
        3 => c"CUBLAS_STATUS_ALLOC_FAILED",
        INVALID_VALUE => c"CUBLAS_STATUS_INVALID_VALUE",
        8 => c"CUBLAS_STATUS_ARCH_MISMATCH",
        MAPPING_ERROR => c"CUBLAS_STATUS_MAPPING_ERROR",
        EXECUTION_FAILED => c"CUBLAS_STATUS_EXECUTION_FAILED",
        INTERNAL_ERROR => c"CUBLAS_STATUS_INTERNAL_ERROR",
        NOT_SUPPORTED => c"CUBLAS_STATUS_NOT_SUPPORTED",
        _ => c"CUBLAS_STATUS_UNKNOWN",
    }
    .as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetStatusString(status: Status) -> *const c_char {
    cublasLtGetStatusName(status)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescCreate(
    description: *mut Handle,
    compute: u32,
    scale: u32,
) -> Status {
    call("cublasLtMatmulDescCreate", || {
        let created = next_handle();
        let attributes = [
            (0, compute.to_le_bytes().to_vec()),
            (1, scale.to_le_bytes().to_vec()),
        ];
        objects().descriptions.insert(created, attributes.into());
        // SAFETY: as the caller promises.
        unsafe { put(description, created) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulDescDestroy(description: Handle) -> Status {
    call("cublasLtMatmulDescDestroy", || {
        objects()
            .descriptions
            .remove(&description)
            .map(drop)
            .ok_or(INVALID_VALUE)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescSetAttribute(
    description: Handle,
    attribute: u32,
    data: *const c_void,
    length: usize,
) -> Status {
    call("cublasLtMatmulDescSetAttribute", || {
        // SAFETY: as the caller promises.
        let bytes = unsafe { bytes_of(data, length)? };
        objects()
            .descriptions
            .get_mut(&description)
            .ok_or(INVALID_VALUE)?
            .insert(attribute, bytes);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutCreate(
    layout: *mut Handle,
    element: u32,
    rows: u64,
    columns: u64,
    leading_dimension: i64,
) -> Status {
    call("cublasLtMatrixLayoutCreate", || {
        let element = Element::from_code(element).ok_or(NOT_SUPPORTED)?;
        let created = next_handle();
        let description = Layout {
            element,
            rows,
            columns,
            leading_dimension,
            row_major: false,
            batches: 1,
        };
        objects().layouts.insert(created, description);
        // SAFETY: as the caller promises.
        unsafe { put(layout, created) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatrixLayoutDestroy(layout: Handle) -> Status {
    call("cublasLtMatrixLayoutDestroy", || {
        objects()
            .layouts
            .remove(&layout)
            .map(drop)
            .ok_or(INVALID_VALUE)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutSetAttribute(
    layout: Handle,
    attribute: u32,
    data: *const c_void,
    length: usize,
) -> Status {
    call("cublasLtMatrixLayoutSetAttribute", || {
        // SAFETY: as the caller promises.
        let value = number(&unsafe { bytes_of(data, length)? });
        let mut objects = objects();
        let layout = objects.layouts.get_mut(&layout).ok_or(INVALID_VALUE)?;
        match attribute {
            1 => layout.row_major = value == 1,
            2 => layout.rows = value,
            3 => layout.columns = value,
            4 => layout.leading_dimension = value.cast_signed(),
            5 => layout.batches = i32::try_from(value).map_err(|_| INVALID_VALUE)?,
            6 | 7 => {}
            _ => return Err(NOT_SUPPORTED),
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceCreate(preference: *mut Handle) -> Status {
    call("cublasLtMatmulPreferenceCreate", || {
        let created = next_handle();
        objects().preferences.insert(created, Attributes::new());
        // SAFETY: as the caller promises.
        unsafe { put(preference, created) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulPreferenceDestroy(preference: Handle) -> Status {
    call("cublasLtMatmulPreferenceDestroy", || {
        objects()
            .preferences
            .remove(&preference)
            .map(drop)
            .ok_or(INVALID_VALUE)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceSetAttribute(
    preference: Handle,
    attribute: u32,
    data: *const c_void,
    length: usize,
) -> Status {
    call("cublasLtMatmulPreferenceSetAttribute", || {
        // SAFETY: as the caller promises.
        let bytes = unsafe { bytes_of(data, length)? };
        objects()
            .preferences
            .get_mut(&preference)
            .ok_or(INVALID_VALUE)?
            .insert(attribute, bytes);
        Ok(())
    })
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct HeuristicResult {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    handle: Handle,
    description: Handle,
    a: Handle,
    b: Handle,
    c: Handle,
    d: Handle,
    _preference: Handle,
    wanted: c_int,
    results: *mut HeuristicResult,
    found: *mut c_int,
) -> Status {
    call("cublasLtMatmulAlgoGetHeuristic", || {
        let multiplication = Multiplication::of(handle, description, [a, b, c, d])?;
        multiplication.check()?;
        if wanted < 1 {
            return Err(INVALID_VALUE);
        }
        let result = HeuristicResult {
            algorithm: [1, 0, 0, 0, 0, 0, 0, 0],
            workspace_bytes: 0,
            state: SUCCESS,
            waves: 1.0,
            reserved: [0; 4],
        };
        // SAFETY: as the caller promises: room for `wanted` results.
        unsafe {
            put(results, result)?;
            put(found, 1)
        }
    })
}

/// Source: cublas_api.h, `CUBLAS_COMPUTE_32F_FAST_TF32`.
const COMPUTE_32F_FAST_TF32: u64 = 77;

/// A product that was described and can be computed.
#[derive(Debug)]
struct Multiplication {
    transposed: [bool; 2],
    /// Scale factors of FP8 operands, as device pointers.
    scales: [u64; 2],
    /// `cublasComputeType_t`.
    compute: u64,
    /// `cudaDataType_t` of alpha and beta.
    scale_type: u64,
    layouts: [Layout; 4],
}

impl Multiplication {
    fn of(handle: Handle, description: Handle, layouts: [Handle; 4]) -> Result<Self, Status> {
        let objects = objects();
        if !objects.handles.contains(&handle) {
            return Err(NOT_INITIALIZED);
        }
        let attributes = objects
            .descriptions
            .get(&description)
            .ok_or(INVALID_VALUE)?;
        let value = |attribute: u32| attributes.get(&attribute).map_or(0, |bytes| number(bytes));
        // Pointer modes other than "host", epilogues (1 is the default) and biases are not needed
        // by a burn.
        if value(2) != 0 || value(7) > 1 {
            return Err(NOT_SUPPORTED);
        }
        let layout = |handle: Handle| objects.layouts.get(&handle).copied().ok_or(INVALID_VALUE);
        let [a, b, c, d] = layouts;
        Ok(Self {
            transposed: [value(3) == 1, value(4) == 1],
            scales: [value(17), value(18)],
            compute: value(0),
            scale_type: value(1),
            layouts: [layout(a)?, layout(b)?, layout(c)?, layout(d)?],
        })
    }

    fn check(&self) -> Outcome {
        let [a, b, c, d] = &self.layouts;
        let sides = |layout: &Layout, transposed: bool| {
            if transposed {
                (layout.columns, layout.rows)
            } else {
                (layout.rows, layout.columns)
            }
        };
        let (rows, length) = sides(a, self.transposed[0]);
        let (inner, columns) = sides(b, self.transposed[1]);
        let fits = length == inner
            && (d.rows, d.columns) == (rows, columns)
            && (c.rows, c.columns) == (rows, columns);
        if !fits || self.layouts.iter().any(|it| it.bytes().is_none()) {
            return Err(INVALID_VALUE);
        }
        if self.layouts.iter().any(|it| it.batches != 1) || d.element == Element::E5m2 {
            return Err(NOT_SUPPORTED);
        }
        Ok(())
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmul(
    handle: Handle,
    description: Handle,
    alpha: *const c_void,
    a: u64,
    a_layout: Handle,
    b: u64,
    b_layout: Handle,
    beta: *const c_void,
    c: u64,
    c_layout: Handle,
    d: u64,
    d_layout: Handle,
    _algorithm: *const c_void,
    _workspace: *mut c_void,
    _workspace_bytes: usize,
    stream: Handle,
) -> Status {
    call("cublasLtMatmul", || {
        let multiplication = Multiplication::of(
            handle,
            description,
            [a_layout, b_layout, c_layout, d_layout],
        )?;
        multiplication.check()?;
        // SAFETY: as the caller promises; alpha and beta are of the scale type.
        let (alpha, beta) = unsafe {
            (
                scalar(alpha, multiplication.scale_type)?,
                scalar(beta, multiplication.scale_type)?,
            )
        };
        let [a_layout, b_layout, _, d_layout] = multiplication.layouts;
        let output = Output {
            address: d,
            element_size: d_layout.element.bytes(),
            elements: d_layout.bytes().unwrap_or(0) / d_layout.element.bytes() as u64,
            row_length: d_layout.leading_dimension.cast_unsigned(),
            blocks: Blocks::Tiles(Tiles {
                rows: 128,
                columns: 128,
                sm: Vec::new(),
            }),
        };
        let gpu_time = |sm_count| gpu_time_model(&multiplication, sm_count);
        crate::cuda::api::run_library_kernel("cublasLtMatmul", stream, output, gpu_time, || {
            let left = operand(a, a_layout, multiplication.transposed[0])?;
            let right = operand(b, b_layout, multiplication.transposed[1])?;
            let alpha = alpha * scale(multiplication.scales[0])? * scale(multiplication.scales[1])?;
            write(&multiplication, &product(&left, &right), alpha, beta, c, d)
        })
    })
}

unsafe fn scalar(pointer: *const c_void, scale_type: u64) -> Result<f64, Status> {
    if pointer.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller passes a number of the scale type.
    unsafe {
        match scale_type {
            0 => Ok(pointer.cast::<f32>().read_unaligned().into()),
            1 => Ok(pointer.cast::<f64>().read_unaligned()),
            10 => Ok(pointer.cast::<i32>().read_unaligned().into()),
            _ => Err(NOT_SUPPORTED),
        }
    }
}

/// A scale factor of an FP8 operand; no pointer means one.
fn scale(address: u64) -> Result<f64, Status> {
    if address == 0 {
        return Ok(1.0);
    }
    let bytes = crate::cuda::device_bytes(address, 4).ok_or(MAPPING_ERROR)?;
    let mut word = [0; 4];
    word.copy_from_slice(bytes);
    Ok(f32::from_le_bytes(word).into())
}

fn operand(address: u64, layout: Layout, transposed: bool) -> Result<Operand<'static>, Status> {
    let length = layout.bytes().ok_or(INVALID_VALUE)?;
    let memory = crate::cuda::device_bytes(address, length).ok_or(MAPPING_ERROR)?;
    Ok(Operand {
        layout,
        memory,
        transposed,
    })
}

fn write(
    multiplication: &Multiplication,
    sums: &[f64],
    alpha: f64,
    beta: f64,
    c: u64,
    d: u64,
) -> Outcome {
    let [_, _, c_layout, d_layout] = multiplication.layouts;
    let addend = if beta == 0.0 {
        None
    } else {
        Some(operand(c, c_layout, false)?)
    };
    let length = d_layout.bytes().ok_or(INVALID_VALUE)?;
    let memory = crate::cuda::device_bytes(d, length).ok_or(MAPPING_ERROR)?;
    let columns = usize::try_from(d_layout.columns).map_err(|_| INVALID_VALUE)?;
    for (index, sum) in sums.iter().enumerate() {
        let (row, column) = (index / columns, index % columns);
        let offset = addend
            .as_ref()
            .map_or(0.0, |it| beta * c_layout.get(it.memory, row, column));
        d_layout.set(memory, row, column, alpha * sum + offset);
    }
    Ok(())
}

/// Nanoseconds that a GPU of the H200's order takes; the speed of the simulated GPU scales it.
#[expect(clippy::cast_precision_loss, reason = "model time")]
fn gpu_time_model(multiplication: &Multiplication, sm_count: u32) -> u64 {
    let [a, _, _, d] = &multiplication.layouts;
    let inner = if multiplication.transposed[0] {
        a.rows
    } else {
        a.columns
    };
    let operations = 2 * d.rows * d.columns * inner;
    // Operations in a nanosecond: what an H200 sustains, see the validator's BENCHMARKS.md.
    let rate = match a.element {
        Element::F32 if multiplication.compute == COMPUTE_32F_FAST_TF32 => 370_000.0,
        Element::F64 | Element::F32 | Element::S32 => 50_000.0,
        Element::F16 | Element::Bf16 => 650_000.0,
        Element::E4m3 | Element::E5m2 => 1_200_000.0,
        Element::S8 => 880_000.0,
    };
    // Tiles of 128 x 256, the largest of its usual ones.
    let tiles = (d.rows.div_ceil(128) * d.columns.div_ceil(256)).max(1);
    let rounds = tiles.div_ceil(u64::from(sm_count.max(1)));
    product_time_ns(operations as f64 / rate, tiles, rounds, sm_count)
}
