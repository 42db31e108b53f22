// Tensor-core GEMM for sm_80 and newer, and FP64 on its matrix unit.

#include "mma.cuh"

MMA_TYPE(bf16, float, "f", "m16n8k16.row.col.f32.bf16.bf16.f32")
MMA_TYPE(f16, float, "f", "m16n8k16.row.col.f32.f16.f16.f32")
MMA_TYPE(tf32, float, "f", "m16n8k8.row.col.f32.tf32.tf32.f32")
MMA_TYPE(s8, int, "r", "m16n8k32.row.col.s32.s8.s8.s32")

#define GEMM_SM80(type, result_type)                                                                                   \
    extern "C" __global__ void __launch_bounds__(Narrow::THREADS, 1)                                                   \
        gemm_sm80_##type(const u8* a, const u8* b, result_type* result, u32 m, u32 n, u32 k_bytes, u32* tile_sm) {     \
        gemm<mma_##type>(a, b, result, m, n, k_bytes, tile_sm);                                                        \
    }

GEMM_SM80(bf16, float)
GEMM_SM80(f16, float)
GEMM_SM80(tf32, float)
GEMM_SM80(s8, int)

extern "C" __global__ void __launch_bounds__(Double::THREADS, 2)
    gemm_sm80_f64(const u8* a, const u8* b, double* result, u32 m, u32 n, u32 k_bytes, u32* tile_sm) {
    gemm_f64(a, b, result, m, n, k_bytes, tile_sm);
}
