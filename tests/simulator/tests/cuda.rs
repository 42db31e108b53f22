//! The CUDA driver interface, called as a program calls it, each case in a process of its own on a
//! prepared node.

#![allow(unsafe_code, reason = "the driver's C interface")]

mod on_node;

use on_node::{NODE, on_node};
use simulator::cuda::api::*;
use simulator::cuda::library::*;
use simulator::cuda::result;
use std::ffi::{CString, c_void};

const CHECK_PTX: &str = include_str!("../../../validator/src/workload/check/check.ptx");

/// Starts the driver with a context on the first device.
unsafe fn start() {
    unsafe {
        assert_eq!(cuInit(0), result::SUCCESS);
        let mut context = 0;
        assert_eq!(
            cuDevicePrimaryCtxRetain(&raw mut context, 0),
            result::SUCCESS
        );
        assert_eq!(cuCtxSetCurrent(context), result::SUCCESS);
    }
}

/// Runs the check kernel over `count` values and returns them, or the first error.
unsafe fn run_check_kernel(count: u32, seed: u32) -> Result<Vec<u32>, u32> {
    let ok = |code| {
        if code == result::SUCCESS {
            Ok(())
        } else {
            Err(code)
        }
    };
    let ptx = CString::new(CHECK_PTX).expect("PTX has no NUL");
    let mut values = vec![0u32; count as usize];
    let bytes = values.len() * 4;
    unsafe {
        let (mut module, mut function, mut out) = (0, 0, 0u64);
        ok(cuModuleLoadData(&raw mut module, ptx.as_ptr().cast()))?;
        ok(cuModuleGetFunction(
            &raw mut function,
            module,
            c"gpu_validator_check".as_ptr(),
        ))?;
        ok(cuMemAlloc_v2(&raw mut out, bytes))?;
        let parameters: [*const c_void; 3] = [
            (&raw const out).cast(),
            (&raw const count).cast(),
            (&raw const seed).cast(),
        ];
        let blocks = count.div_ceil(256);
        ok(cuLaunchKernel(
            function,
            blocks,
            1,
            1,
            256,
            1,
            1,
            0,
            0,
            parameters.as_ptr(),
            std::ptr::null(),
        ))?;
        ok(cuCtxSynchronize())?;
        ok(cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), out, bytes))?;
        ok(cuMemFree_v2(out))?;
    }
    Ok(values)
}

#[test]
fn the_check_kernel_runs() {
    on_node("the_check_kernel_runs", "h200x1", &[], &[], || unsafe {
        start();
        let values = run_check_kernel(1000, 7).unwrap();
        assert_eq!(values, run_check_kernel(1000, 7).unwrap());
        assert_ne!(values, run_check_kernel(1000, 8).unwrap());
        // The value of a thread does not depend on how many there are.
        assert_eq!(values[..300], run_check_kernel(300, 7).unwrap());
    });
}

#[test]
fn a_flipped_bit_changes_one_value() {
    on_node(
        "a_flipped_bit_changes_one_value",
        "h200x1",
        &["wrong-bit-every-time"],
        &["gpu.speed=1"],
        || unsafe {
            start();
            let wrong = run_check_kernel(5000, 1).unwrap();
            let again = run_check_kernel(5000, 1).unwrap();
            let differing = wrong.iter().zip(&again).filter(|(a, b)| a != b).count();
            // Each launch has its own bit wrong, so two launches differ in two places (or in one,
            // were they to coincide).
            assert!((1..=2).contains(&differing), "{differing}");
        },
    );
}

#[test]
fn memory_is_counted_and_runs_out() {
    let name = "memory_is_counted_and_runs_out";
    on_node(
        name,
        "h200x1",
        &[],
        &[
            "gpu.memory=2GiB",
            "gpu.memory_reserved=64MiB",
            "gpu.cuda_free_memory_maximum=null",
        ],
        || unsafe {
            start();
            let (mut free, mut total, mut first, mut second) = (0, 0, 0, 0);
            assert_eq!(
                cuMemGetInfo_v2(&raw mut free, &raw mut total),
                result::SUCCESS
            );
            assert_eq!((free, total), ((2048 - 64) << 20, (2048 - 64) << 20));
            assert_eq!(cuMemAlloc_v2(&raw mut first, 1 << 30), result::SUCCESS);
            assert_eq!(
                cuMemAlloc_v2(&raw mut second, 1 << 30),
                result::OUT_OF_MEMORY
            );
            assert_eq!(
                cuMemGetInfo_v2(&raw mut free, &raw mut total),
                result::SUCCESS
            );
            assert_eq!(free, (1024 - 64) << 20);
            assert_eq!(cuMemFree_v2(first), result::SUCCESS);
            assert_eq!(cuMemFree_v2(first), result::INVALID_VALUE);
        },
    );
}

#[test]
fn a_kernel_that_writes_out_of_bounds_poisons_its_context() {
    on_node(
        "a_kernel_that_writes_out_of_bounds_poisons_its_context",
        "h200x1",
        &[],
        &[],
        || unsafe {
            start();
            let ptx = CString::new(CHECK_PTX).unwrap();
            let (mut module, mut function) = (0, 0);
            assert_eq!(
                cuModuleLoadData(&raw mut module, ptx.as_ptr().cast()),
                result::SUCCESS
            );
            assert_eq!(
                cuModuleGetFunction(&raw mut function, module, c"gpu_validator_check".as_ptr()),
                result::SUCCESS
            );
            let (out, count, seed) = (0x10_0000u64, 256u32, 0u32);
            let parameters: [*const c_void; 3] = [
                (&raw const out).cast(),
                (&raw const count).cast(),
                (&raw const seed).cast(),
            ];
            let code = cuLaunchKernel(
                function,
                1,
                1,
                1,
                256,
                1,
                1,
                0,
                0,
                parameters.as_ptr(),
                std::ptr::null(),
            );
            assert_eq!(code, result::ILLEGAL_ADDRESS);
            assert_eq!(cuCtxSynchronize(), result::ILLEGAL_ADDRESS);
        },
    );
}

#[test]
fn nothing_works_before_initialisation() {
    on_node(
        "nothing_works_before_initialisation",
        "h200x1",
        &[],
        &[],
        || unsafe {
            let mut count = 0;
            assert_eq!(cuDeviceGetCount(&raw mut count), result::NOT_INITIALIZED);
            assert_eq!(cuInit(0), result::SUCCESS);
            assert_eq!(cuDeviceGetCount(&raw mut count), result::SUCCESS);
            assert_eq!(count, 1);
        },
    );
}

/// C = A x B with BF16 operands and FP32 results, as cuBLASLt computes it: column-major, A
/// transposed.
unsafe fn multiply_bf16(a: &[u16], b: &[u16], size: u64) -> Result<Vec<f32>, u32> {
    use simulator::cublaslt::api::*;
    let ok = |code| {
        if code == result::SUCCESS {
            Ok(())
        } else {
            Err(code)
        }
    };
    let bytes = a.len() * 2;
    let mut product = vec![0f32; a.len()];
    unsafe {
        let (mut left, mut right, mut out) = (0, 0, 0);
        for (pointer, values) in [(&raw mut left, a), (&raw mut right, b)] {
            ok(cuMemAlloc_v2(pointer, bytes))?;
            ok(cuMemcpyHtoD_v2(*pointer, values.as_ptr().cast(), bytes))?;
        }
        ok(cuMemAlloc_v2(&raw mut out, bytes * 2))?;
        let (mut handle, mut description, mut narrow, mut wide) = (0, 0, 0, 0);
        ok(cublasLtCreate(&raw mut handle))?;
        // CUBLAS_COMPUTE_32F, CUDA_R_32F.
        ok(cublasLtMatmulDescCreate(&raw mut description, 68, 0))?;
        let transposed = 1u32;
        ok(cublasLtMatmulDescSetAttribute(
            description,
            3,
            (&raw const transposed).cast(),
            4,
        ))?;
        ok(cublasLtMatrixLayoutCreate(
            &raw mut narrow,
            14,
            size,
            size,
            size.cast_signed(),
        ))?;
        ok(cublasLtMatrixLayoutCreate(
            &raw mut wide,
            0,
            size,
            size,
            size.cast_signed(),
        ))?;
        let (alpha, beta) = (1f32, 0f32);
        ok(cublasLtMatmul(
            handle,
            description,
            (&raw const alpha).cast(),
            left,
            narrow,
            right,
            narrow,
            (&raw const beta).cast(),
            out,
            wide,
            out,
            wide,
            std::ptr::null(),
            std::ptr::null_mut(),
            0,
            0,
        ))?;
        ok(cuMemcpyDtoH_v2(product.as_mut_ptr().cast(), out, bytes * 2))?;
    }
    Ok(product)
}

/// Small integers in BF16, whose products and sums are exact in FP32.
fn small_integers(count: u32, seed: u32) -> Vec<u16> {
    let value = |index: u32| f32::from(u8::try_from((index * 7 + seed) % 15).expect("small")) - 7.0;
    (0..count)
        .map(|index| (value(index).to_bits() >> 16).try_into().expect("16 bits"))
        .collect()
}

fn expected_product(a: &[u16], b: &[u16], size: usize) -> Vec<f32> {
    let value = |bits: u16| f32::from_bits(u32::from(bits) << 16);
    let element = |place: usize| {
        let (column, row) = (place / size, place % size);
        (0..size)
            .map(|inner| value(a[row * size + inner]) * value(b[column * size + inner]))
            .sum()
    };
    (0..size * size).map(element).collect()
}

#[test]
fn cublaslt_multiplies() {
    on_node("cublaslt_multiplies", "h200x1", &[], &[], || unsafe {
        start();
        let (a, b) = (small_integers(64 * 64, 1), small_integers(64 * 64, 5));
        let expected = expected_product(&a, &b, 64);
        assert_eq!(multiply_bf16(&a, &b, 64).unwrap(), expected);
        assert_eq!(multiply_bf16(&a, &b, 64).unwrap(), expected);
    });
}

#[test]
fn a_mig_instance_stands_for_its_gpu_with_its_own_memory() {
    on_node(
        "a_mig_instance_stands_for_its_gpu_with_its_own_memory",
        "mig",
        &[],
        &["gpu.cuda_free_memory_maximum=null"],
        || unsafe {
            start();
            let (mut free, mut total, mut pointer) = (0, 0, 0);
            assert_eq!(
                cuMemGetInfo_v2(&raw mut free, &raw mut total),
                result::SUCCESS
            );
            // A slice of 1g.10gb, of a GPU of 80 GB.
            assert_eq!((free, total), (9984 << 20, 9984 << 20));
            assert_eq!(
                cuMemAlloc_v2(&raw mut pointer, 10 << 30),
                result::OUT_OF_MEMORY
            );
            assert_eq!(cuMemAlloc_v2(&raw mut pointer, 9 << 30), result::SUCCESS);
            let folder = std::env::var_os(NODE).unwrap();
            let node = simulator::node::Node::open(folder.as_ref()).unwrap();
            let process = node.state().gpu(0).processes()[0];
            assert_eq!(
                (process.mig_instance, process.memory_bytes),
                (Some(0), 9 << 30)
            );
            run_check_kernel(1000, 7).unwrap();
        },
    );
}

#[test]
fn a_primary_context_lives_until_its_last_release() {
    let name = "a_primary_context_lives_until_its_last_release";
    on_node(name, "h200x1", &[], &[], || unsafe {
        assert_eq!(cuInit(0), result::SUCCESS);
        assert_eq!(cuDevicePrimaryCtxRelease_v2(0), result::INVALID_CONTEXT);
        let (mut first, mut second) = (0, 0);
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut first, 0), result::SUCCESS);
        assert_eq!(
            cuDevicePrimaryCtxRetain(&raw mut second, 0),
            result::SUCCESS
        );
        assert_eq!(first, second);
        assert_eq!(cuDevicePrimaryCtxRelease_v2(0), result::SUCCESS);
        assert_eq!(cuCtxSetCurrent(first), result::SUCCESS);
        let mut pointer = 0;
        assert_eq!(cuMemAlloc_v2(&raw mut pointer, 1 << 20), result::SUCCESS);
        assert_eq!(cuDevicePrimaryCtxRelease_v2(0), result::SUCCESS);
        assert_eq!(
            cuMemAlloc_v2(&raw mut pointer, 1 << 20),
            result::CONTEXT_IS_DESTROYED
        );
        assert_eq!(cuCtxSetCurrent(first), result::INVALID_CONTEXT);
        assert_eq!(cuDevicePrimaryCtxRelease_v2(0), result::INVALID_CONTEXT);
        // Retained once more, it is the same context, and active again where it was current.
        assert_eq!(
            cuDevicePrimaryCtxRetain(&raw mut second, 0),
            result::SUCCESS
        );
        assert_eq!(first, second);
        assert_eq!(cuMemAlloc_v2(&raw mut pointer, 1 << 20), result::SUCCESS);
    });
}

#[test]
fn a_reset_primary_context_stays_retained() {
    let name = "a_reset_primary_context_stays_retained";
    on_node(name, "h200x1", &[], &[], || unsafe {
        start();
        let (mut context, mut flags, mut active, mut pointer) = (0, 0, 0, 0);
        assert_eq!(cuMemAlloc_v2(&raw mut pointer, 1 << 30), result::SUCCESS);
        assert_eq!(cuDevicePrimaryCtxReset_v2(0), result::SUCCESS);
        let folder = std::env::var_os(NODE).unwrap();
        let node = simulator::node::Node::open(folder.as_ref()).unwrap();
        assert_eq!(node.memory_used(0), 0);
        let state = cuDevicePrimaryCtxGetState(0, &raw mut flags, &raw mut active);
        assert_eq!((state, active), (result::SUCCESS, 0));
        assert_eq!(
            cuDevicePrimaryCtxRetain(&raw mut context, 0),
            result::SUCCESS
        );
        // Retained twice by now.
        assert_eq!(cuDevicePrimaryCtxRelease_v2(0), result::SUCCESS);
        run_check_kernel(100, 1).unwrap();
    });
}

#[test]
fn one_of_two_contexts_gives_its_own_memory_back() {
    let name = "one_of_two_contexts_gives_its_own_memory_back";
    on_node(name, "h200x1", &[], &[], || unsafe {
        start();
        let (mut context, mut pointer) = (0, 0);
        assert_eq!(cuMemAlloc_v2(&raw mut pointer, 1 << 30), result::SUCCESS);
        assert_eq!(cuCtxCreate_v2(&raw mut context, 0, 0), result::SUCCESS);
        assert_eq!(cuMemAlloc_v2(&raw mut pointer, 2 << 30), result::SUCCESS);
        assert_eq!(cuCtxDestroy_v2(context), result::SUCCESS);
        let folder = std::env::var_os(NODE).unwrap();
        let node = simulator::node::Node::open(folder.as_ref()).unwrap();
        assert_eq!(node.memory_used(0), 1 << 30);
    });
}

#[test]
fn the_driver_can_be_called_while_a_program_ends() {
    extern "C" fn at_exit() {
        // SAFETY: the driver was started, and its functions take any handle.
        let released = unsafe {
            let mut context = 0;
            let current = cuCtxGetCurrent(&raw mut context);
            let synchronized = cuCtxSynchronize();
            (current, synchronized, cuDevicePrimaryCtxRelease_v2(0))
        };
        if released != (result::SUCCESS, result::SUCCESS, result::SUCCESS) {
            // SAFETY: ends the process at once; the test that started it sees the exit code.
            unsafe { libc::_exit(77) }
        }
    }
    let name = "the_driver_can_be_called_while_a_program_ends";
    on_node(name, "h200x1", &[], &[], || unsafe {
        // On the thread that runs the handlers of `atexit`, whose thread-local values are gone by
        // then.
        let thread = std::thread::spawn(|| {
            start();
            run_check_kernel(100, 1).unwrap();
            libc::atexit(at_exit);
            println!("test result: ok. 1 passed");
            std::io::Write::flush(&mut std::io::stdout()).unwrap();
            libc::exit(0);
        });
        thread.join().unwrap();
    });
}

/// `cuGetProcAddress` of a function for callers of this CUDA version.
unsafe fn address_of(name: &str, version: i32) -> (u32, *mut c_void) {
    let name = CString::new(name).unwrap();
    let mut address = std::ptr::null_mut();
    let code = unsafe { cuGetProcAddress(name.as_ptr(), &raw mut address, version, 0) };
    (code, address)
}

#[test]
fn every_exported_function_is_offered_by_name() {
    let name = "every_exported_function_is_offered_by_name";
    on_node(name, "h200x1", &[], &[], || unsafe {
        assert_eq!(cuInit(0), result::SUCCESS);
        for name in [
            "cuLibraryLoadData",
            "cuGraphCreate",
            "cuDeviceGetDefaultMemPool",
            "cuCtxGetId",
            "cuCtxSynchronize",
            "cuMemAlloc",
        ] {
            let (code, address) = address_of(name, 12_040);
            assert_eq!(code, result::SUCCESS, "{name}");
            assert!(!address.is_null(), "{name}");
        }
        assert_eq!(address_of("cuNoSuchFunction", 12_040).0, result::NOT_FOUND);
        // What a caller of CUDA 12 means by the name is not what one of CUDA 13 means.
        let of_twelve = address_of("cuCtxSynchronize", 12_040).1;
        assert_ne!(of_twelve, address_of("cuCtxSynchronize", 13_000).1);
    });
}

#[test]
fn a_librarys_kernel_runs() {
    on_node("a_librarys_kernel_runs", "h200x1", &[], &[], || unsafe {
        assert_eq!(cuInit(0), result::SUCCESS);
        let ptx = CString::new(CHECK_PTX).unwrap();
        let (mut library, mut kernel, mut function, mut count) = (0, 0, 0, 0);
        let none: *mut c_void = std::ptr::null_mut();
        let loaded = cuLibraryLoadData(
            &raw mut library,
            ptx.as_ptr().cast(),
            none.cast(),
            none.cast(),
            0,
            none.cast(),
            none.cast(),
            0,
        );
        assert_eq!(loaded, result::SUCCESS);
        let counted = cuLibraryGetKernelCount(&raw mut count, library);
        assert_eq!((counted, count), (result::SUCCESS, 1));
        let found = cuLibraryGetKernel(&raw mut kernel, library, c"no_such_kernel".as_ptr());
        assert_eq!(found, result::NOT_FOUND);
        let found = cuLibraryGetKernel(&raw mut kernel, library, c"gpu_validator_check".as_ptr());
        assert_eq!(found, result::SUCCESS);
        start();
        let code = cuKernelGetFunction(&raw mut function, kernel);
        assert_eq!(code, result::SUCCESS);
        let mut out = 0u64;
        assert_eq!(cuMemAlloc_v2(&raw mut out, 1024), result::SUCCESS);
        let (values, seed) = (256u32, 7u32);
        let parameters: [*const c_void; 3] = [
            (&raw const out).cast(),
            (&raw const values).cast(),
            (&raw const seed).cast(),
        ];
        let nothing = std::ptr::null();
        let launched = cuLaunchKernel(
            function,
            1,
            1,
            1,
            256,
            1,
            1,
            0,
            0,
            parameters.as_ptr(),
            nothing,
        );
        assert_eq!(launched, result::SUCCESS);
        assert_eq!(cuLibraryUnload(library), result::SUCCESS);
        assert_eq!(cuLibraryUnload(library), result::INVALID_HANDLE);
    });
}

#[test]
fn a_default_memory_pool_gives_memory_and_keeps_what_it_is_set_to() {
    let name = "a_default_memory_pool_gives_memory_and_keeps_what_it_is_set_to";
    on_node(name, "h200x1", &[], &[], || unsafe {
        start();
        let (mut pool, mut again, mut pointer, mut threshold) = (0, 0, 0u64, 0u64);
        let code = cuDeviceGetDefaultMemPool(&raw mut pool, 0);
        assert_eq!(code, result::SUCCESS);
        assert_eq!(cuDeviceGetMemPool(&raw mut again, 0), result::SUCCESS);
        assert_eq!(pool, again);
        let keep: u64 = 1 << 30;
        let code = cuMemPoolSetAttribute(pool, 4, (&raw const keep).cast());
        assert_eq!(code, result::SUCCESS);
        let code = cuMemPoolGetAttribute(pool, 4, (&raw mut threshold).cast());
        assert_eq!((code, threshold), (result::SUCCESS, keep));
        let code = cuMemAllocFromPoolAsync(&raw mut pointer, 1 << 20, pool, 0);
        assert_eq!(code, result::SUCCESS);
        assert_eq!(cuMemFreeAsync(pointer, 0), result::SUCCESS);
        assert_eq!(cuMemPoolDestroy(pool), result::INVALID_VALUE);
    });
}
