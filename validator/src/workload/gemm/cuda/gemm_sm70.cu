// The plain family: C = A * B^T on the ordinary arithmetic units of sm_70 and newer. A [m][k] and B [n][k] are contiguous
// in k. Every accumulator takes its products in the order of k, each by one fused multiply-add (FP32, FP64) or one dp4a
// (INT8), so a host computes the same bits.

#include "strip.cuh"

constexpr u32 THREADS = 256;

// What lies in shared memory is `Word`: one element of K, or four INT8.
struct plain_f32 {
    typedef float Word;
    typedef float Accumulator;
    static constexpr u32 TILE = 128;
    static constexpr u32 WORDS = 4;        // words that a thread fetches of each operand and step
    static constexpr u32 FETCH_BYTES = 16;
    static __device__ __forceinline__ void fetch(Word (&words)[WORDS], const u8* source) {
        const float4 v = *reinterpret_cast<const float4*>(source);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    }
    static __device__ __forceinline__ float multiply_add(float a, float b, float sum) { return __fmaf_rn(a, b, sum); }
};

struct plain_bf16 : plain_f32 {
    static constexpr u32 FETCH_BYTES = 8;
    static __device__ __forceinline__ void fetch(Word (&words)[WORDS], const u8* source) {
        const uint2 v = *reinterpret_cast<const uint2*>(source);
        words[0] = __uint_as_float(v.x << 16), words[1] = __uint_as_float(v.x & 0xFFFF0000u);
        words[2] = __uint_as_float(v.y << 16), words[3] = __uint_as_float(v.y & 0xFFFF0000u);
    }
};

struct plain_f16 : plain_f32 {
    static constexpr u32 FETCH_BYTES = 8;
    static __device__ __forceinline__ float convert(u32 bits) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(u16(bits)));
        return value;
    }
    static __device__ __forceinline__ void fetch(Word (&words)[WORDS], const u8* source) {
        const uint2 v = *reinterpret_cast<const uint2*>(source);
        words[0] = convert(v.x), words[1] = convert(v.x >> 16);
        words[2] = convert(v.y), words[3] = convert(v.y >> 16);
    }
};

struct plain_s8 {
    typedef int Word;
    typedef int Accumulator;
    static constexpr u32 TILE = 128;
    static constexpr u32 WORDS = 4;
    static constexpr u32 FETCH_BYTES = 16;
    static __device__ __forceinline__ void fetch(Word (&words)[WORDS], const u8* source) {
        const int4 v = *reinterpret_cast<const int4*>(source);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    }
    static __device__ __forceinline__ int multiply_add(int a, int b, int sum) {
        asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(b));
        return sum;
    }
};

struct plain_f64 {
    typedef double Word;
    typedef double Accumulator;
    static constexpr u32 TILE = 64;
    static constexpr u32 WORDS = 2;
    static constexpr u32 FETCH_BYTES = 16;
    static __device__ __forceinline__ void fetch(Word (&words)[WORDS], const u8* source) {
        const double2 v = *reinterpret_cast<const double2*>(source);
        words[0] = v.x, words[1] = v.y;
    }
    static __device__ __forceinline__ double multiply_add(double a, double b, double sum) { return __fma_rn(a, b, sum); }
};

// 16 x 16 threads, each with a square of TILE / 16 rows and columns in two halves, TILE / 2 apart.
template <class Plain>
__device__ __forceinline__ void gemm(const u8* a, const u8* b, typename Plain::Accumulator* result, u32 m, u32 n,
                                     u32 k_bytes, u32* tile_sm) {
    typedef typename Plain::Word Word;
    constexpr u32 TILE = Plain::TILE;
    constexpr u32 STEP = Plain::WORDS * THREADS / TILE;  // words of K a step: 8
    constexpr u32 FETCHES = STEP / Plain::WORDS;         // threads that share a row
    constexpr u32 STEP_BYTES = FETCHES * Plain::FETCH_BYTES;
    constexpr u32 HALF = TILE / 32;
    constexpr u32 PITCH = TILE + 16 / sizeof(Word);
    __shared__ __align__(16) Word tile_a[2][STEP][PITCH];
    __shared__ __align__(16) Word tile_b[2][STEP][PITCH];

    const u32 row0 = blockIdx.y * TILE;
    const u32 column0 = blockIdx.x * TILE;
    const u32 warp = threadIdx.x / 32;
    const u32 lane = threadIdx.x % 32;
    const u32 x = ((warp % 2) * 8 + lane % 8) * HALF;
    const u32 y = ((warp / 2) * 4 + lane / 8) * HALF;
    const u32 fetch_row = threadIdx.x / FETCHES;
    const u32 fetch_part = threadIdx.x % FETCHES;
    const u8* source_a = a + u64(row0 + fetch_row) * k_bytes + fetch_part * Plain::FETCH_BYTES;
    const u8* source_b = b + u64(column0 + fetch_row) * k_bytes + fetch_part * Plain::FETCH_BYTES;
    if (tile_sm != nullptr && threadIdx.x == 0) {
        tile_sm[blockIdx.y * gridDim.x + blockIdx.x] = own_sm();
    }

    Word next_a[Plain::WORDS];
    Word next_b[Plain::WORDS];
    typename Plain::Accumulator sum[2 * HALF][2 * HALF] = {};
    const auto stash = [&](u32 buffer) {
#pragma unroll
        for (u32 i = 0; i < Plain::WORDS; ++i) {
            tile_a[buffer][fetch_part * Plain::WORDS + i][fetch_row] = next_a[i];
            tile_b[buffer][fetch_part * Plain::WORDS + i][fetch_row] = next_b[i];
        }
    };
    Plain::fetch(next_a, source_a);
    Plain::fetch(next_b, source_b);
    stash(0);
    __syncthreads();

    const u32 steps = k_bytes / STEP_BYTES;
    for (u32 step = 0; step < steps; ++step) {
        const u32 buffer = step % 2;
        if (step + 1 < steps) {
            Plain::fetch(next_a, source_a + u64(step + 1) * STEP_BYTES);
            Plain::fetch(next_b, source_b + u64(step + 1) * STEP_BYTES);
        }
#pragma unroll
        for (u32 k = 0; k < STEP; ++k) {
            Word part_a[2 * HALF];
            Word part_b[2 * HALF];
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                // HALF words are 16 bytes in every type.
                *reinterpret_cast<uint4*>(part_a + half * HALF) =
                    *reinterpret_cast<const uint4*>(&tile_a[buffer][k][half * (TILE / 2) + y]);
                *reinterpret_cast<uint4*>(part_b + half * HALF) =
                    *reinterpret_cast<const uint4*>(&tile_b[buffer][k][half * (TILE / 2) + x]);
            }
#pragma unroll
            for (u32 i = 0; i < 2 * HALF; ++i) {
#pragma unroll
                for (u32 j = 0; j < 2 * HALF; ++j) {
                    sum[i][j] = Plain::multiply_add(part_a[i], part_b[j], sum[i][j]);
                }
            }
        }
        if (step + 1 < steps) {
            stash(buffer ^ 1u);
        }
        __syncthreads();
    }

#pragma unroll
    for (u32 i = 0; i < 2 * HALF; ++i) {
        const u32 row = row0 + i / HALF * (TILE / 2) + y + i % HALF;
#pragma unroll
        for (u32 j = 0; j < 2 * HALF; j += 2) {
            const u32 column = column0 + j / HALF * (TILE / 2) + x + j % HALF;
            store_pair(result + u64(row) * n + column, sum[i][j], sum[i][j + 1]);
        }
    }
}

#define GEMM_SM70(type)                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                           \
        gemm_sm70_##type(const u8* a, const u8* b, plain_##type::Accumulator* result, u32 m, u32 n, u32 k_bytes,       \
                         u32* tile_sm) {                                                                               \
        gemm<plain_##type>(a, b, result, m, n, k_bytes, tile_sm);                                                      \
    }

GEMM_SM70(f64)
GEMM_SM70(f32)
GEMM_SM70(bf16)
GEMM_SM70(f16)
GEMM_SM70(s8)
