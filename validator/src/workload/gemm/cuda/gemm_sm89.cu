// FP8 (E4M3) GEMM by mma.sync, which sm_89 brought.

#include "mma.cuh"

MMA_TYPE(e4m3, float, "f", "m16n8k32.row.col.f32.e4m3.e4m3.f32")

extern "C" __global__ void __launch_bounds__(Narrow::THREADS, 1)
    gemm_sm89_e4m3(const u8* a, const u8* b, float* result, u32 m, u32 n, u32 k_bytes, u32* tile_sm) {
    gemm<mma_e4m3>(a, b, result, m, n, k_bytes, tile_sm);
}
