// FP64 GEMM with the larger matrix instruction of sm_90.

#include "mma.cuh"

extern "C" __global__ void __launch_bounds__(Double::THREADS, 2)
    gemm_sm90_f64(const u8* a, const u8* b, double* result, u32 m, u32 n, u32 k_bytes, u32* tile_sm) {
    gemm_f64(a, b, result, m, n, k_bytes, tile_sm);
}
