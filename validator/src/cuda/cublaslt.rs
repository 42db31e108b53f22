//! cuBLASLt's calls for a burn, by dlopen: a handle, a plan of one product, and the product.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::rc::Rc;

use libloading::os::unix::{Library as UnixLibrary, RTLD_LOCAL, RTLD_NOW};

use super::{CudaFailure, CudaResult};

// Source of all numbers: cublasLt.h, cublas_api.h and library_types.h of CUDA 11.0 to 13.0, which
// agree in them.
const SUCCESS: u32 = 0;
const NOT_SUPPORTED: u32 = 15;
const DESCRIPTION_TRANSPOSE_A: c_int = 3;
/// Sums of FP8 products are kept in the tensor cores, as every program that wants speed requests.
const DESCRIPTION_FAST_ACCUMULATION: c_int = 25;
const PREFERENCE_REDUCTION_SCHEMES: c_int = 3;
const PREFERENCE_WORKSPACE_BYTES: c_int = 1;
const TRANSPOSED: c_int = 1;

/// `cudaDataType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum DataType {
    F32 = 0,
    F64 = 1,
    F16 = 2,
    S8 = 3,
    S32 = 10,
    Bf16 = 14,
    E4m3 = 28,
}

/// `cublasComputeType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum ComputeType {
    F32 = 68,
    F64 = 70,
    S32 = 72,
    F32FastTf32 = 77,
}

/// C = A · Bᵀ of m x k and n x k, all row-major.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProductTypes {
    pub(crate) operand: DataType,
    /// Of the result, and of its scale.
    pub(crate) result: DataType,
    pub(crate) compute: ComputeType,
}

type Handle = *mut c_void;
type Create = unsafe extern "C" fn(*mut Handle) -> u32;
type Destroy = unsafe extern "C" fn(Handle) -> u32;
type GetVersion = unsafe extern "C" fn() -> usize;
type StatusName = unsafe extern "C" fn(u32) -> *const c_char;
type DescriptionCreate = unsafe extern "C" fn(*mut Handle, c_int, c_int) -> u32;
type SetAttribute = unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> u32;
type LayoutCreate = unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> u32;
type GetHeuristic = unsafe extern "C" fn(
    Handle,
    Handle,
    Handle,
    Handle,
    Handle,
    Handle,
    Handle,
    c_int,
    *mut Heuristic,
    *mut c_int,
) -> u32;
type Matmul = unsafe extern "C" fn(
    Handle,
    Handle,
    *const c_void,
    u64,
    Handle,
    u64,
    Handle,
    *const c_void,
    u64,
    Handle,
    u64,
    Handle,
    *const c_void,
    u64,
    usize,
    Handle,
) -> u32;

/// `cublasLtMatmulHeuristicResult_t`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Heuristic {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: u32,
    waves: f32,
    reserved: [c_int; 4],
}

struct Functions {
    create: Create,
    destroy: Destroy,
    description_create: DescriptionCreate,
    description_destroy: Destroy,
    description_set: SetAttribute,
    layout_create: LayoutCreate,
    layout_destroy: Destroy,
    preference_create: Create,
    preference_destroy: Destroy,
    preference_set: SetAttribute,
    heuristic: GetHeuristic,
    matmul: Matmul,
    status_name: Option<StatusName>,
    version: GetVersion,
}

/// A loaded cuBLASLt with a handle on the current context.
pub(crate) struct Cublaslt {
    functions: Functions,
    handle: Handle,
    path: PathBuf,
}

impl Cublaslt {
    /// Loads the library at `path`, which has no effect on what other libraries resolve, and makes
    /// a handle. The calling thread must have a context.
    pub(crate) fn load(path: &Path) -> Result<Rc<Self>, String> {
        let name: &OsStr = path.as_os_str();
        // SAFETY: loading runs the library's initialisers; NVIDIA's have no precondition.
        let library = unsafe { UnixLibrary::open(Some(name), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|error| error.to_string())?;
        // Never unloaded: its threads and exit handlers may outlive any use of it.
        let library: &'static libloading::Library = Box::leak(Box::new(library.into()));
        let functions = functions(library)?;
        let mut handle = null_mut();
        // SAFETY: the pointer is to a live handle.
        let code = unsafe { (functions.create)(&raw mut handle) };
        let cublaslt = Self {
            functions,
            handle,
            path: path.to_owned(),
        };
        match cublaslt.checked("cublasLtCreate", code) {
            Ok(()) => Ok(Rc::new(cublaslt)),
            Err(failure) => Err(failure.to_string()),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// `13.1.0`.
    pub(crate) fn version(&self) -> String {
        // SAFETY: takes nothing and may be called at any time.
        version_text(unsafe { (self.functions.version)() })
    }

    fn checked(&self, call: &'static str, code: u32) -> CudaResult<()> {
        if code == SUCCESS {
            return Ok(());
        }
        let unnamed = || format!("cuBLAS status {code}");
        let name = self.functions.status_name.map_or_else(unnamed, |get_name| {
            // SAFETY: any number may be requested; the answer is a static string or null.
            let name = unsafe { get_name(code) };
            if name.is_null() {
                return unnamed();
            }
            // SAFETY: not null, and a C string that lives as long as the library.
            let name = unsafe { CStr::from_ptr(name) };
            name.to_string_lossy().into_owned()
        });
        Err(CudaFailure::Status { call, code, name })
    }

    /// Plans products of this size with `workspace_bytes` of memory at `workspace`; `None` where
    /// the library has no way to compute them.
    pub(crate) fn plan(
        self: &Rc<Self>,
        types: ProductTypes,
        [m, n, k]: [u32; 3],
        (workspace, workspace_bytes): (u64, u64),
    ) -> CudaResult<Option<ProductPlan>> {
        let [m, n, k] = [m, n, k].map(u64::from);
        // Row-major C is column-major Cᵀ = B · Aᵀ, so that the operands change places.
        let description = self.description(types)?;
        let left = self.layout(types.operand, k, n)?;
        let right = self.layout(types.operand, k, m)?;
        let result = self.layout(types.result, n, m)?;
        let preference = self.preference(workspace_bytes)?;
        let mut found = Heuristic {
            algorithm: [0; 8],
            workspace_bytes: 0,
            state: 0,
            waves: 0.0,
            reserved: [0; 4],
        };
        let mut count = 0;
        // SAFETY: all handles are live, there is room for one result, and the count is a live int.
        let code = unsafe {
            (self.functions.heuristic)(
                self.handle,
                description.handle,
                left.handle,
                right.handle,
                result.handle,
                result.handle,
                preference.handle,
                1,
                &raw mut found,
                &raw mut count,
            )
        };
        if code == NOT_SUPPORTED || (code == SUCCESS && (count < 1 || found.state != SUCCESS)) {
            return Ok(None);
        }
        self.checked("cublasLtMatmulAlgoGetHeuristic", code)?;
        Ok(Some(ProductPlan {
            cublaslt: Rc::clone(self),
            types,
            description,
            left,
            right,
            result,
            algorithm: found.algorithm,
            workspace,
            workspace_bytes,
        }))
    }

    fn description(self: &Rc<Self>, types: ProductTypes) -> CudaResult<Object> {
        let mut handle = null_mut();
        // SAFETY: the pointer is to a live handle; the enumerations are cuBLASLt's.
        let code = unsafe {
            (self.functions.description_create)(
                &raw mut handle,
                types.compute as c_int,
                types.result as c_int,
            )
        };
        self.checked("cublasLtMatmulDescCreate", code)?;
        let description = self.object(handle, self.functions.description_destroy);
        let set = self.functions.description_set;
        self.set(
            (set, "cublasLtMatmulDescSetAttribute"),
            handle,
            DESCRIPTION_TRANSPOSE_A,
            &TRANSPOSED.to_ne_bytes(),
        )?;
        if types.operand == DataType::E4m3 {
            // Libraries that do not know it have no other way of adding either.
            let _ = self.set(
                (set, "cublasLtMatmulDescSetAttribute"),
                handle,
                DESCRIPTION_FAST_ACCUMULATION,
                &[1],
            );
        }
        Ok(description)
    }

    fn layout(self: &Rc<Self>, data_type: DataType, rows: u64, columns: u64) -> CudaResult<Object> {
        let mut handle = null_mut();
        // SAFETY: the pointer is to a live handle; the matrix is column-major without gaps.
        let code = unsafe {
            (self.functions.layout_create)(
                &raw mut handle,
                data_type as c_int,
                rows,
                columns,
                rows.cast_signed(),
            )
        };
        self.checked("cublasLtMatrixLayoutCreate", code)?;
        Ok(self.object(handle, self.functions.layout_destroy))
    }

    fn preference(self: &Rc<Self>, workspace_bytes: u64) -> CudaResult<Object> {
        let mut handle = null_mut();
        // SAFETY: the pointer is to a live handle.
        let code = unsafe { (self.functions.preference_create)(&raw mut handle) };
        self.checked("cublasLtMatmulPreferenceCreate", code)?;
        let preference = self.object(handle, self.functions.preference_destroy);
        let set = (
            self.functions.preference_set,
            "cublasLtMatmulPreferenceSetAttribute",
        );
        self.set(
            set,
            handle,
            PREFERENCE_WORKSPACE_BYTES,
            &workspace_bytes.to_ne_bytes(),
        )?;
        // No sum of parts that several blocks computed, so that the bits are the same every time.
        self.set(
            set,
            handle,
            PREFERENCE_REDUCTION_SCHEMES,
            &0_u32.to_ne_bytes(),
        )?;
        Ok(preference)
    }

    fn set(
        &self,
        (function, call): (SetAttribute, &'static str),
        object: Handle,
        attribute: c_int,
        bytes: &[u8],
    ) -> CudaResult<()> {
        // SAFETY: the object is live, and the library copies as many bytes as are there.
        let code = unsafe { function(object, attribute, bytes.as_ptr().cast(), bytes.len()) };
        self.checked(call, code)
    }

    fn object(self: &Rc<Self>, handle: Handle, destroy: Destroy) -> Object {
        Object {
            handle,
            destroy,
            _library: Rc::clone(self),
        }
    }
}

impl Drop for Cublaslt {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: the handle is live and destroyed once. A failure changes nothing any more.
            unsafe { (self.functions.destroy)(self.handle) };
        }
    }
}

fn functions(library: &'static libloading::Library) -> Result<Functions, String> {
    fn find<F: Copy>(library: &'static libloading::Library, name: &str) -> Result<F, String> {
        // SAFETY: each caller names the type that cublasLt.h declares for the function; device
        // addresses are pointers there and u64 here, which the calling convention passes alike.
        unsafe { library.get::<F>(name.as_bytes()) }
            .map(|it| *it)
            .map_err(|_| format!("it has no function {name}"))
    }
    Ok(Functions {
        create: find(library, "cublasLtCreate")?,
        destroy: find(library, "cublasLtDestroy")?,
        description_create: find(library, "cublasLtMatmulDescCreate")?,
        description_destroy: find(library, "cublasLtMatmulDescDestroy")?,
        description_set: find(library, "cublasLtMatmulDescSetAttribute")?,
        layout_create: find(library, "cublasLtMatrixLayoutCreate")?,
        layout_destroy: find(library, "cublasLtMatrixLayoutDestroy")?,
        preference_create: find(library, "cublasLtMatmulPreferenceCreate")?,
        preference_destroy: find(library, "cublasLtMatmulPreferenceDestroy")?,
        preference_set: find(library, "cublasLtMatmulPreferenceSetAttribute")?,
        heuristic: find(library, "cublasLtMatmulAlgoGetHeuristic")?,
        matmul: find(library, "cublasLtMatmul")?,
        status_name: find(library, "cublasLtGetStatusName").ok(),
        version: find(library, "cublasLtGetVersion")?,
    })
}

/// 130100 is 13.1.0; before 11.1 the numbers had a digit less.
fn version_text(version: usize) -> String {
    let major = if version >= 100_000 { 10_000 } else { 1000 };
    let (minor, patch) = (version % major / 100, version % 100);
    format!("{}.{minor}.{patch}", version / major)
}

/// A description, a layout or a preference.
struct Object {
    handle: Handle,
    destroy: Destroy,
    /// Keeps the library's handle alive.
    _library: Rc<Cublaslt>,
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: the handle is live and destroyed once. A failure changes nothing any more.
        unsafe { (self.destroy)(self.handle) };
    }
}

/// One size of product, ready to be computed any number of times.
pub(crate) struct ProductPlan {
    cublaslt: Rc<Cublaslt>,
    types: ProductTypes,
    description: Object,
    left: Object,
    right: Object,
    result: Object,
    algorithm: [u64; 8],
    workspace: u64,
    workspace_bytes: u64,
}

impl ProductPlan {
    /// Puts the product of the operands at `a` and `b` into the default stream, to be written at
    /// `result`. Wrong addresses can harm the GPU's memory alone, which holds nothing but the
    /// burn's own data.
    pub(crate) fn multiply(&self, [a, b]: [u64; 2], result: u64) -> CudaResult<()> {
        let (one, zero) = scalars(self.types.result);
        let functions = &self.cublaslt.functions;
        // SAFETY: all handles are live; the scalars are of the scale's type, which is the result's,
        // and are read before the call returns.
        let code = unsafe {
            (functions.matmul)(
                self.cublaslt.handle,
                self.description.handle,
                one.as_ptr().cast(),
                b,
                self.left.handle,
                a,
                self.right.handle,
                zero.as_ptr().cast(),
                result,
                self.result.handle,
                result,
                self.result.handle,
                self.algorithm.as_ptr().cast(),
                self.workspace,
                usize::try_from(self.workspace_bytes).unwrap_or(0),
                null_mut(),
            )
        };
        self.cublaslt.checked("cublasLtMatmul", code)
    }
}

/// One and zero of this type, aligned as any number wants to be.
fn scalars(data_type: DataType) -> ([u64; 1], [u64; 1]) {
    let one = match data_type {
        DataType::F64 => 1_f64.to_bits(),
        DataType::S32 => 1,
        _ => u64::from(1_f32.to_bits()),
    };
    ([one.to_le()], [0])
}

#[cfg(test)]
mod tests {
    use super::version_text;

    #[test]
    fn versions_are_read_as_their_files_are_named() {
        assert_eq!(version_text(130_100), "13.1.0");
        assert_eq!(version_text(120_901), "12.9.1");
        assert_eq!(version_text(11_000), "11.0.0");
    }
}
