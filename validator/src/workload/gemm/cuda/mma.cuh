// The multiplication C = A * B^T of the sm_80 and sm_89 kernels: mma.sync on tiles that cp.async brings into a ring of
// shared memory. A [m][k] and B [n][k] are contiguous in k. Every narrow type consumes 32 bytes of K an instruction with
// the same fragments, so one body serves all.
#pragma once

#include "strip.cuh"
#include "walk.cuh"

constexpr u32 BLOCK_K_BYTES = 128;

// The shape of a block: its tile of C and its threads.
struct Narrow {
    static constexpr u32 ROWS = 128;
    static constexpr u32 COLUMNS = 256;
    static constexpr u32 THREADS = 256;
};

// Half the tile and half the threads, two blocks an SM: while one waits at its barrier, the other multiplies.
struct Double {
    static constexpr u32 ROWS = 64;
    static constexpr u32 COLUMNS = 128;
    static constexpr u32 THREADS = 128;
};

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return u32(__cvta_generic_to_shared(pointer));
}

// Where 16-byte chunk `chunk` (0..7) of row `row` lies in a tile of 128-byte rows: no two of the eight rows that one
// ldmatrix reads share a bank.
__device__ __forceinline__ u32 tile_offset(u32 row, u32 chunk) {
    return row * BLOCK_K_BYTES + ((chunk ^ (row & 7u)) << 4);
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

// Rows `row0` .. + ROWS of an operand, bytes `k_byte` .. + 128, into shared memory: whole lines of the cache.
template <u32 ROWS, u32 THREADS>
__device__ __forceinline__ void copy_rows(u32 destination, const u8* operand, u64 pitch, u32 row0, u32 k_byte) {
    const u32 row = threadIdx.x / 8;
    const u32 chunk = threadIdx.x % 8;
    const u8* source = operand + u64(row0 + row) * pitch + k_byte + chunk * 16;
    destination += tile_offset(row, chunk);
#pragma unroll
    for (u32 i = 0; i < ROWS * 8 / THREADS; ++i) {
        copy_16(destination + i * (THREADS / 8) * BLOCK_K_BYTES, source);
        source += u64(THREADS / 8) * pitch;
    }
}

// The tiles of both operands on their way through a ring of two or three stages: as many as the launch gave shared memory
// for, because GPUs differ in it and the third is worth 15 %.
template <class Shape>
struct Operands {
    static constexpr u32 A_BYTES = Shape::ROWS * BLOCK_K_BYTES;
    static constexpr u32 STAGE_BYTES = A_BYTES + Shape::COLUMNS * BLOCK_K_BYTES;
    const u8* a;
    const u8* b;
    u32 row;
    u32 column;
    u32 k_bytes;
    u32 ring;
    u32 ring_end;
    u32 k_fetched = 0;
    // The stages to read from and to copy into.
    u32 tile_a;
    u32 tile_fetched;

    __device__ __forceinline__ Operands(const u8* a, const u8* b, u32 m, u32 n, u32 k_bytes, u32* tile_sm)
        : a(a), b(b), k_bytes(k_bytes) {
        extern __shared__ __align__(128) u8 dynamic_shared[];
        u32 bytes;
        asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
        ring = shared_address(dynamic_shared);
        ring_end = ring + (bytes >= 3 * STAGE_BYTES ? 3 : 2) * STAGE_BYTES;
        tile_a = ring;
        tile_fetched = ring;
        // Bands of 1024 rows of C.
        const Walk<1024 / Shape::ROWS> walk = {m / Shape::ROWS, n / Shape::COLUMNS};
        u32 tile_row, tile_column;
        walk.place(blockIdx.x, tile_row, tile_column);
        row = tile_row * Shape::ROWS;
        column = tile_column * Shape::COLUMNS;
        if (tile_sm != nullptr && threadIdx.x == 0) {
            tile_sm[tile_row * walk.columns + tile_column] = own_sm();
        }
        fetch();
        if (three_stages()) {
            fetch();
        }
    }

    __device__ __forceinline__ bool three_stages() const { return ring_end - ring == 3 * STAGE_BYTES; }

    __device__ __forceinline__ u32 following(u32 stage) const {
        return stage + STAGE_BYTES == ring_end ? ring : stage + STAGE_BYTES;
    }

    __device__ __forceinline__ u32 tile_b() const { return tile_a + A_BYTES; }

    // Starts the copies of the next step, or of nothing past the end, as one group either way.
    __device__ __forceinline__ void fetch() {
        if (k_fetched < k_bytes) {
            copy_rows<Shape::ROWS, Shape::THREADS>(tile_fetched, a, k_bytes, row, k_fetched);
            copy_rows<Shape::COLUMNS, Shape::THREADS>(tile_fetched + A_BYTES, b, k_bytes, column, k_fetched);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        k_fetched += BLOCK_K_BYTES;
        tile_fetched = following(tile_fetched);
    }

    // Waits, with every thread, for the step after the ones that were awaited before; a third stage stays under way.
    __device__ __forceinline__ void await() const {
        if (three_stages()) {
            asm volatile("cp.async.wait_group 1;" ::: "memory");
        } else {
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        }
        __syncthreads();
    }

    __device__ __forceinline__ void advance() { tile_a = following(tile_a); }
};

// What one warp multiplies in 32 bytes of K: four 16-row pieces of A, four 16-column pieces of B.
struct Fragments {
    u32 a[4][4];
    u32 b[4][4];

    __device__ __forceinline__ void load(u32 tile_a, u32 tile_b, u32 warp_row, u32 warp_column, u32 lane, u32 part) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            load_matrices(a[i], tile_a + tile_offset(warp_row + i * 16 + lane % 16, part * 2 + lane / 16));
            load_matrices(b[i], tile_b + tile_offset(warp_column + i * 16 + lane % 8 + lane / 16 * 8,
                                                     part * 2 + lane / 8 % 2));
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

// Warps of 64 x 64 each. A step is 128 bytes of K in four parts; while one is multiplied, the fragments of the
// next are on their way from shared memory.
template <class Mma>
__device__ __forceinline__ void gemm(const u8* a, const u8* b, typename Mma::Accumulator* result, u32 m, u32 n,
                                     u32 k_bytes, u32* tile_sm) {
    typedef typename Mma::Accumulator Accumulator;
    Operands<Narrow> operands(a, b, m, n, k_bytes, tile_sm);
    const u32 lane = threadIdx.x % 32;
    const u32 warp_row = threadIdx.x / 32 / (Narrow::COLUMNS / 64) * 64;
    const u32 warp_column = threadIdx.x / 32 % (Narrow::COLUMNS / 64) * 64;
    Accumulator d[4][8][4] = {};
    Fragments first;
    Fragments second;

    operands.await();
    first.load(operands.tile_a, operands.tile_b(), warp_row, warp_column, lane, 0);
    for (u32 k = 0; k < k_bytes; k += BLOCK_K_BYTES) {
        second.load(operands.tile_a, operands.tile_b(), warp_row, warp_column, lane, 1);
        operands.fetch();
        multiply<Mma>(d, first);
        first.load(operands.tile_a, operands.tile_b(), warp_row, warp_column, lane, 2);
        multiply<Mma>(d, second);
        second.load(operands.tile_a, operands.tile_b(), warp_row, warp_column, lane, 3);
        multiply<Mma>(d, first);
        operands.await();
        operands.advance();
        // Past the last step this reads a stage that was fetched before, and nothing uses it.
        first.load(operands.tile_a, operands.tile_b(), warp_row, warp_column, lane, 0);
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

__device__ __forceinline__ void load_doubles(double (&pair)[2], u32 address) {
    asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(pair[0]), "=d"(pair[1]) : "r"(address));
}

// Four warps side by side, 64 x 32 each. Which four of K an instruction takes is free as long as A and B agree: element k of
// the 16-byte chunk 2 t or 2 t + 1 for lane t of four, which no two lanes of a quarter warp find in the same banks.
__device__ __forceinline__ void gemm_f64(const u8* a, const u8* b, double* result, u32 m, u32 n, u32 k_bytes,
                                         u32* tile_sm) {
    Operands<Double> operands(a, b, m, n, k_bytes, tile_sm);
    const u32 lane = threadIdx.x % 32;
    const u32 warp_column = threadIdx.x / 32 * 32;
    double d[4][4][4] = {};

    for (u32 k = 0; k < k_bytes; k += BLOCK_K_BYTES) {
        operands.await();
        operands.fetch();
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 chunk = lane % 4 * 2 + half;
            double fragment_b[4][2];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                load_doubles(fragment_b[j], operands.tile_b() + tile_offset(warp_column + j * 8 + lane / 4, chunk));
            }
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                double fragment_a[2];
                load_doubles(fragment_a, operands.tile_a + tile_offset(i * 8 + lane / 4, chunk));
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    double* pair = &d[i / 2][j][i % 2 * 2];
#pragma unroll
                    for (u32 element = 0; element < 2; ++element) {
                        asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                                     : "+d"(pair[0]), "+d"(pair[1])
                                     : "d"(fragment_a[element]), "d"(fragment_b[j][element]));
                    }
                }
            }
        }
        operands.advance();
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
