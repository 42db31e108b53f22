// The multiplication C = A * B^T of the sm_80 and sm_89 kernels: mma.sync on tiles that cp.async brings into a ring of
// shared memory. A [m][k] and B [n][k] are contiguous in k. Every narrow type consumes 32 bytes of K an instruction with
// the same fragments, so one body serves all.
#pragma once

#include "strip.cuh"
#include "walk.cuh"

constexpr u32 TILE_M = 128;
constexpr u32 TILE_N = 256;
constexpr u32 TILE_N_F64 = 128;
constexpr u32 BLOCK_K_BYTES = 64;
constexpr u32 STAGES = 4;
constexpr u32 THREADS = 256;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return u32(__cvta_generic_to_shared(pointer));
}

// Where 16-byte chunk `chunk` (0..3) of row `row` lies in a tile of 64-byte rows: no two of the eight rows that one
// ldmatrix reads, nor of the four that half a warp of FP64 reads, share a bank.
__device__ __forceinline__ u32 tile_offset(u32 row, u32 chunk) {
    const u32 turn = ((row >> 2) & 1u) | (row & 2u);
    return row * BLOCK_K_BYTES + ((chunk ^ turn) << 4);
}

__device__ __forceinline__ void copy_16(u32 destination, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

#define MMA_TYPE(type, accumulator, constraint, instruction)                                                           \
    struct mma_##type {                                                                                                \
        typedef accumulator Accumulator;                                                                               \
        static __device__ __forceinline__ void multiply(accumulator (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {      \
            asm volatile("mma.sync.aligned." instruction " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"      \
                         : "+" constraint(d[0]), "+" constraint(d[1]), "+" constraint(d[2]), "+" constraint(d[3])      \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                              \
        }                                                                                                              \
    };

// Rows `row0` .. + ROWS of an operand, bytes `k_byte` .. + 64, into shared memory.
template <u32 ROWS>
__device__ __forceinline__ void copy_rows(u32 destination, const u8* operand, u64 pitch, u32 row0, u32 k_byte) {
#pragma unroll
    for (u32 i = 0; i < ROWS * 4 / THREADS; ++i) {
        const u32 piece = threadIdx.x + i * THREADS;
        const u32 row = piece / 4;
        const u32 chunk = piece % 4;
        copy_16(destination + tile_offset(row, chunk), operand + u64(row0 + row) * pitch + k_byte + chunk * 16);
    }
}

template <u32 COLUMNS>
struct Operands {
    static constexpr u32 A_BYTES = TILE_M * BLOCK_K_BYTES;
    static constexpr u32 STAGE_BYTES = A_BYTES + COLUMNS * BLOCK_K_BYTES;
    const u8* a;
    const u8* b;
    u32 row;
    u32 column;
    u32 k_bytes;
    u32 shared;

    __device__ __forceinline__ u32 stage(u32 step) const { return shared + (step % STAGES) * STAGE_BYTES; }

    // Starts the copies of step `step`, or of nothing past the end, as one group either way.
    __device__ __forceinline__ void fetch(u32 step) const {
        if (step * BLOCK_K_BYTES < k_bytes) {
            copy_rows<TILE_M>(stage(step), a, k_bytes, row, step * BLOCK_K_BYTES);
            copy_rows<COLUMNS>(stage(step) + A_BYTES, b, k_bytes, column, step * BLOCK_K_BYTES);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    __device__ __forceinline__ void await_oldest() const {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
    }
};

template <u32 COLUMNS>
__device__ __forceinline__ Operands<COLUMNS> begin(const u8* a, const u8* b, u32 m, u32 n, u32 k_bytes, u32* tile_sm) {
    extern __shared__ __align__(128) u8 dynamic_shared[];
    const Walk<8> walk = {m / TILE_M, n / COLUMNS};
    u32 tile_row, tile_column;
    walk.place(blockIdx.x, tile_row, tile_column);
    if (tile_sm != nullptr && threadIdx.x == 0) {
        tile_sm[tile_row * walk.columns + tile_column] = own_sm();
    }
    Operands<COLUMNS> operands = {a, b, tile_row * TILE_M, tile_column * COLUMNS, k_bytes, shared_address(dynamic_shared)};
    for (u32 step = 0; step < STAGES - 1; ++step) {
        operands.fetch(step);
    }
    return operands;
}

// Eight warps as 2 x 4, 64 x 64 each.
template <class Mma>
__device__ __forceinline__ void gemm(const u8* a, const u8* b, typename Mma::Accumulator* result, u32 m, u32 n,
                                     u32 k_bytes, u32* tile_sm) {
    typedef typename Mma::Accumulator Accumulator;
    const Operands<TILE_N> operands = begin<TILE_N>(a, b, m, n, k_bytes, tile_sm);
    const u32 lane = threadIdx.x % 32;
    const u32 warp_row = (threadIdx.x / 32 / 4) * 64;
    const u32 warp_column = (threadIdx.x / 32 % 4) * 64;
    Accumulator d[4][8][4] = {};

    for (u32 step = 0; step * BLOCK_K_BYTES < k_bytes; ++step) {
        operands.await_oldest();
        operands.fetch(step + STAGES - 1);
        const u32 tile_a = operands.stage(step);
        const u32 tile_b = tile_a + operands.A_BYTES;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            u32 fragment_a[4][4];
            u32 fragment_b[4][4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                load_matrices(fragment_a[i], tile_a + tile_offset(warp_row + i * 16 + lane % 16, half * 2 + lane / 16));
            }
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                load_matrices(fragment_b[j], tile_b + tile_offset(warp_column + j * 16 + lane % 8 + lane / 16 * 8,
                                                                  half * 2 + lane / 8 % 2));
            }
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
#pragma unroll
                for (u32 j = 0; j < 8; ++j) {
                    Mma::multiply(d[i][j], fragment_a[i], fragment_b[j / 2][j % 2 * 2], fragment_b[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
    }

#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        Accumulator* upper = result + u64(operands.row + warp_row + i * 16 + lane / 4) * n + operands.column +
                             warp_column + lane % 4 * 2;
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            store_pair(upper + j * 8, d[i][j][0], d[i][j][1]);
            store_pair(upper + u64(8) * n + j * 8, d[i][j][2], d[i][j][3]);
        }
    }
}

__device__ __forceinline__ double load_double(u32 tile, u32 row, u32 k) {
    double value;
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(value) : "r"(tile + tile_offset(row, k / 2) + k % 2 * 8));
    return value;
}

// One 16 x 8 block of FP64 accumulators and 8 of K: on Hopper one instruction, before it four of 8 x 8 x 4.
// a[0], a[1]: rows g and g + 8 at k = t; a[2], a[3]: the same at k = t + 4; b[0], b[1]: k = t and t + 4.
__device__ __forceinline__ void multiply_f64(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
#pragma unroll
    for (u32 k = 0; k < 2; ++k) {
#pragma unroll
        for (u32 row = 0; row < 2; ++row) {
            asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                         : "+d"(d[row * 2]), "+d"(d[row * 2 + 1])
                         : "d"(a[k * 2 + row]), "d"(b[k]));
        }
    }
#endif
}

// Eight warps as 2 x 4, 64 x 32 each.
__device__ __forceinline__ void gemm_f64(const u8* a, const u8* b, double* result, u32 m, u32 n, u32 k_bytes,
                                         u32* tile_sm) {
    const Operands<TILE_N_F64> operands = begin<TILE_N_F64>(a, b, m, n, k_bytes, tile_sm);
    const u32 lane = threadIdx.x % 32;
    const u32 warp_row = (threadIdx.x / 32 / 4) * 64;
    const u32 warp_column = (threadIdx.x / 32 % 4) * 32;
    double d[4][4][4] = {};

    for (u32 step = 0; step * BLOCK_K_BYTES < k_bytes; ++step) {
        operands.await_oldest();
        operands.fetch(step + STAGES - 1);
        const u32 tile_a = operands.stage(step);
        const u32 tile_b = tile_a + operands.A_BYTES;
        double fragment_a[4][4];
        double fragment_b[4][2];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
#pragma unroll
            for (u32 part = 0; part < 4; ++part) {
                fragment_a[i][part] =
                    load_double(tile_a, warp_row + i * 16 + part % 2 * 8 + lane / 4, lane % 4 + part / 2 * 4);
            }
        }
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
#pragma unroll
            for (u32 part = 0; part < 2; ++part) {
                fragment_b[j][part] = load_double(tile_b, warp_column + j * 8 + lane / 4, lane % 4 + part * 4);
            }
        }
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                multiply_f64(d[i][j], fragment_a[i], fragment_b[j]);
            }
        }
    }

#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        double* upper = result + u64(operands.row + warp_row + i * 16 + lane / 4) * n + operands.column + warp_column +
                        lane % 4 * 2;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            store_pair(upper + j * 8, d[i][j][0], d[i][j][1]);
            store_pair(upper + u64(8) * n + j * 8, d[i][j][2], d[i][j][3]);
        }
    }
}
