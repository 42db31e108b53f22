//! Environment variables that load code into CUDA programs or change how they compute.

/// What each variable does to CUDA programs: DCGM's list, and others of NVIDIA's documentation of
/// CUDA's and cuBLAS's environment variables and of ld.so(8).
pub const INJECTED_VARIABLES: [(&str, &str); 24] = [
    (
        "CUDA_INJECTION32_PATH",
        "loads a library into every CUDA program",
    ),
    (
        "CUDA_INJECTION64_PATH",
        "loads a library into every CUDA program",
    ),
    ("NSIGHT_CUDA_DEBUGGER", "lets a debugger attach"),
    ("CUDA_AUTO_BOOST", "changes the GPU's clocks"),
    ("CUDA_PROFILE", "profiles every CUDA program"),
    ("COMPUTE_PROFILE", "profiles every CUDA program"),
    ("OPENCL_PROFILE", "profiles every OpenCL program"),
    ("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "writes GPU core dumps"),
    ("CUDA_ENABLE_LIGHTWEIGHT_COREDUMP", "writes GPU core dumps"),
    ("CUDA_COREDUMP_FILE", "writes GPU core dumps"),
    (
        "CUDA_DEVICE_WAITS_ON_EXCEPTION",
        "stops programs at an exception",
    ),
    ("CUDA_LAUNCH_BLOCKING", "makes every kernel launch wait"),
    ("CUDA_FORCE_JIT", "compiles every kernel anew"),
    ("CUDA_FORCE_PTX_JIT", "compiles every kernel anew"),
    ("CUDA_DISABLE_JIT", "refuses programs that must be compiled"),
    ("CUDA_DISABLE_PTX_JIT", "refuses programs that need PTX"),
    (
        "NVIDIA_TF32_OVERRIDE",
        "changes the precision of matrix products",
    ),
    (
        "CUBLAS_EMULATE_SINGLE_PRECISION",
        "lets matrix products in FP32 be emulated",
    ),
    (
        "CUBLAS_EMULATE_DOUBLE_PRECISION",
        "lets matrix products in FP64 be emulated",
    ),
    (
        "CUBLAS_EMULATION_STRATEGY",
        "selects the matrix products that are emulated",
    ),
    (
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "gives each process a part of the multiprocessors",
    ),
    (
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
        "gives each process a part of the memory",
    ),
    ("LD_PRELOAD", "loads a library into every program"),
    ("LD_AUDIT", "loads a library into every program"),
];
