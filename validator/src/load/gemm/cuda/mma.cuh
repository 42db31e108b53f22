// The multiplication C = A * B^T of the sm_80 and sm_89 kernels: mma.sync on tiles that cp.async brings into a ring of
// shared memory. A [m][k] and B [n][k] are contiguous in k. Every narrow type consumes 32 bytes of K an instruction with
// the same fragments, so one body serves all.
#pragma once

#include "strip.cuh"
#include "walk.cuh"

constexpr u32 BLOCK_K_BYTES = 64;

// The shape of a block: its tile of C, its ring of shared memory and its threads.
struct Narrow {
    static constexpr u32 ROWS = 128;
    static constexpr u32 COLUMNS = 256;
    static constexpr u32 STAGES = 4;
    static constexpr u32 THREADS = 256;
};

// Half the tile and half the threads, two blocks an SM: while one waits at its barrier, the other multiplies.
struct Double {
    static constexpr u32 ROWS = 64;
    static constexpr u32 COLUMNS = 128;
    static constexpr u32 STAGES = 6;
    static constexpr u32 THREADS = 128;
};

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
template <u32 ROWS, u32 THREADS>
__device__ __forceinline__ void copy_rows(u32 destination, const u8* operand, u64 pitch, u32 row0, u32 k_byte) {
#pragma unroll
    for (u32 i = 0; i < ROWS * 4 / THREADS; ++i) {
        const u32 piece = threadIdx.x + i * THREADS;
        const u32 row = piece / 4;
        const u32 chunk = piece % 4;
        copy_16(destination + tile_offset(row, chunk), operand + u64(row0 + row) * pitch + k_byte + chunk * 16);
    }
}

template <class Shape>
struct Operands {
    static constexpr u32 A_BYTES = Shape::ROWS * BLOCK_K_BYTES;
    static constexpr u32 STAGE_BYTES = A_BYTES + Shape::COLUMNS * BLOCK_K_BYTES;
    const u8* a;
    const u8* b;
    u32 row;
    u32 column;
    u32 k_bytes;
    u32 shared;

    __device__ __forceinline__ Operands(const u8* a, const u8* b, u32 m, u32 n, u32 k_bytes, u32* tile_sm)
        : a(a), b(b), k_bytes(k_bytes) {
        extern __shared__ __align__(128) u8 dynamic_shared[];
        shared = shared_address(dynamic_shared);
        // Bands of 1024 rows of C.
        const Walk<1024 / Shape::ROWS> walk = {m / Shape::ROWS, n / Shape::COLUMNS};
        u32 tile_row, tile_column;
        walk.place(blockIdx.x, tile_row, tile_column);
        row = tile_row * Shape::ROWS;
        column = tile_column * Shape::COLUMNS;
        if (tile_sm != nullptr && threadIdx.x == 0) {
            tile_sm[tile_row * walk.columns + tile_column] = own_sm();
        }
    }

    __device__ __forceinline__ u32 tile_a(u32 step) const { return shared + (step % Shape::STAGES) * STAGE_BYTES; }
    __device__ __forceinline__ u32 tile_b(u32 step) const { return tile_a(step) + A_BYTES; }

    // Starts the copies of step `step`, or of nothing past the end, as one group either way.
    __device__ __forceinline__ void fetch(u32 step) const {
        if (step * BLOCK_K_BYTES < k_bytes) {
            copy_rows<Shape::ROWS, Shape::THREADS>(tile_a(step), a, k_bytes, row, step * BLOCK_K_BYTES);
            copy_rows<Shape::COLUMNS, Shape::THREADS>(tile_b(step), b, k_bytes, column, step * BLOCK_K_BYTES);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    // Waits until at most `PENDING` of the steps whose copies were started are still under way, in every thread.
    template <u32 PENDING>
    __device__ __forceinline__ void await() const {
        asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
        __syncthreads();
    }
};

// What one warp multiplies in 32 bytes of K: four 16-row pieces of A, four 16-column pieces of B.
struct Fragments {
    u32 a[4][4];
    u32 b[4][4];

    __device__ __forceinline__ void load(u32 tile_a, u32 tile_b, u32 warp_row, u32 warp_column, u32 lane, u32 half) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            load_matrices(a[i], tile_a + tile_offset(warp_row + i * 16 + lane % 16, half * 2 + lane / 16));
            load_matrices(b[i], tile_b + tile_offset(warp_column + i * 16 + lane % 8 + lane / 16 * 8,
                                                     half * 2 + lane / 8 % 2));
        }
    }
};

template <class Mma>
__device__ __forceinline__ void multiply(typename Mma::Accumulator (&d)[4][8][4], const Fragments& fragments) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
            Mma::multiply(d[i][j], fragments.a[i], fragments.b[j / 2][j % 2 * 2], fragments.b[j / 2][j % 2 * 2 + 1]);
        }
    }
}

// Eight warps as 2 x 4, 64 x 64 each. A step is 64 bytes of K in two halves; while one half is multiplied, the fragments
// of the next are on their way from shared memory.
template <class Mma>
__device__ __forceinline__ void gemm(const u8* a, const u8* b, typename Mma::Accumulator* result, u32 m, u32 n,
                                     u32 k_bytes, u32* tile_sm) {
    typedef typename Mma::Accumulator Accumulator;
    constexpr u32 STAGES = Narrow::STAGES;
    const Operands<Narrow> operands(a, b, m, n, k_bytes, tile_sm);
    const u32 lane = threadIdx.x % 32;
    const u32 warp_row = (threadIdx.x / 32 / 4) * 64;
    const u32 warp_column = (threadIdx.x / 32 % 4) * 64;
    Accumulator d[4][8][4] = {};
    Fragments first;
    Fragments second;

    for (u32 step = 0; step < STAGES - 1; ++step) {
        operands.fetch(step);
    }
    operands.template await<STAGES - 2>();
    first.load(operands.tile_a(0), operands.tile_b(0), warp_row, warp_column, lane, 0);
    for (u32 step = 0; step * BLOCK_K_BYTES < k_bytes; ++step) {
        second.load(operands.tile_a(step), operands.tile_b(step), warp_row, warp_column, lane, 1);
        operands.fetch(step + STAGES - 1);
        multiply<Mma>(d, first);
        operands.template await<STAGES - 2>();
        // Past the last step this reads a stage that was fetched before, and nothing uses it.
        first.load(operands.tile_a(step + 1), operands.tile_b(step + 1), warp_row, warp_column, lane, 0);
        multiply<Mma>(d, second);
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

// One 16 x 8 block of FP64 accumulators and 16 of K: eight instructions of 8 x 8 x 4.
// a[2 k], a[2 k + 1]: rows g and g + 8 at K = t + 4 k; b[k]: K = t + 4 k, for lane 4 g + t.
__device__ __forceinline__ void multiply_f64(double (&d)[4], const double (&a)[8], const double (&b)[4]) {
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
#pragma unroll
        for (u32 row = 0; row < 2; ++row) {
            asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                         : "+d"(d[row * 2]), "+d"(d[row * 2 + 1])
                         : "d"(a[k * 2 + row]), "d"(b[k]));
        }
    }
}

// Four warps side by side, 64 x 32 each; two steps, 16 of K, at a time.
__device__ __forceinline__ void gemm_f64(const u8* a, const u8* b, double* result, u32 m, u32 n, u32 k_bytes,
                                         u32* tile_sm) {
    constexpr u32 STAGES = Double::STAGES;
    const Operands<Double> operands(a, b, m, n, k_bytes, tile_sm);
    const u32 lane = threadIdx.x % 32;
    const u32 warp_column = threadIdx.x / 32 * 32;
    double d[4][4][4] = {};

    for (u32 step = 0; step < STAGES - 2; ++step) {
        operands.fetch(step);
    }
    for (u32 step = 0; step * BLOCK_K_BYTES < k_bytes; step += 2) {
        operands.template await<STAGES - 4>();
        operands.fetch(step + STAGES - 2);
        operands.fetch(step + STAGES - 1);
        double fragment_b[4][4];
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
#pragma unroll
            for (u32 k = 0; k < 4; ++k) {
                fragment_b[j][k] = load_double(operands.tile_b(step + k / 2), warp_column + j * 8 + lane / 4,
                                               lane % 4 + k % 2 * 4);
            }
        }
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            double fragment_a[8];
#pragma unroll
            for (u32 part = 0; part < 8; ++part) {
                fragment_a[part] = load_double(operands.tile_a(step + part / 4), i * 16 + part % 2 * 8 + lane / 4,
                                               lane % 4 + part / 2 % 2 * 4);
            }
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                multiply_f64(d[i][j], fragment_a, fragment_b[j]);
            }
        }
    }

#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        double* upper = result + u64(operands.row + i * 16 + lane / 4) * n + operands.column + warp_column +
                        lane % 4 * 2;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            store_pair(upper + j * 8, d[i][j][0], d[i][j][1]);
            store_pair(upper + u64(8) * n + j * 8, d[i][j][2], d[i][j][3]);
        }
    }
}
