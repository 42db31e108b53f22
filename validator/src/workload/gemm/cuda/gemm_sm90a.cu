// GEMM for Hopper: C = A * B^T with A [m][k] and B [n][k] both contiguous in k, C [m][n] in the type of the accumulators.
//
// Two blocks form a cluster and compute 256 rows of C, 128 each. In a block, one thread of the first warpgroup copies
// tiles of A and B by TMA into a ring of shared memory (each block fetches half of B's tile and multicasts it to both),
// and two consumer warpgroups multiply 64 rows each. The other three warps of the first warpgroup have nothing to fetch,
// so they read an earlier result back from memory and check it against its checksums meanwhile: the memory is idle enough
// under a GEMM that verification costs next to nothing. For FP32 they also turn the tiles that were copied.

#include "hopper.cuh"
#include "wgmma.cuh"

// Tiles of 128 x 256 by wgmma.
template <class Wgmma>
struct WgmmaProduct {
    typedef typename Wgmma::Accumulator Accumulator;
    static constexpr u32 COLUMNS = 256;
    static constexpr u32 STAGES = 4;
    static constexpr u32 STAGE_BYTES = A_BYTES + COLUMNS * BLOCK_K_BYTES;
    static constexpr u32 ACCUMULATORS = 128;
    static constexpr bool TURNS = false;
    // One thread of each warpgroup says that a stage was read.
    static constexpr u32 ARRIVALS = 2;
    typedef Ring<STAGES, STAGE_BYTES> Stages;

    static __device__ __forceinline__ void multiply(Accumulator (&d)[128], Stages& ring, u32 k_steps, u32 consumer,
                                                    u32 thread) {
        u32 previous = 0;
        for (u32 step_k = 0; step_k < k_steps; ++step_k) {
            const u64 a = tile_descriptor(ring.tile_a() + consumer * (A_BYTES / 2));
            const u64 b = tile_descriptor(ring.tile_b());
            ring.wait_full();
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (u32 part = 0; part < 4; ++part) {
                Wgmma::issue(d, a + 2 * part, b + 2 * part, step_k != 0 || part != 0);
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            // The products of the step before are done, those of this one run on.
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (step_k != 0 && thread < CLUSTER) {
                barrier_arrive_cluster(previous, thread);
            }
            previous = ring.empty_barrier();
            ring.advance();
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (thread < CLUSTER) {
            barrier_arrive_cluster(previous, thread);
        }
    }

    static __device__ __forceinline__ void store(const Accumulator (&d)[128], Accumulator* corner, u32 pitch, u32 thread) {
        Accumulator* upper = corner + u64(thread / 32 * 16 + thread % 32 / 4) * pitch + thread % 4 * 2;
        Accumulator* lower = upper + u64(8) * pitch;
#pragma unroll
        for (u32 part = 0; part < 32; ++part) {
            store_pair(upper + part * 8, d[part * 4], d[part * 4 + 1]);
            store_pair(lower + part * 8, d[part * 4 + 2], d[part * 4 + 3]);
        }
    }
};

// Tiles of 128 x 128 by the FP64 matrix instruction; the warps of a warpgroup lie side by side, 64 x 32 each.
struct F64Product {
    typedef double Accumulator;
    static constexpr u32 COLUMNS = 128;
    static constexpr u32 STAGES = 6;
    static constexpr u32 STAGE_BYTES = A_BYTES + COLUMNS * BLOCK_K_BYTES;
    static constexpr u32 ACCUMULATORS = 64;
    static constexpr bool TURNS = false;
    static constexpr u32 ARRIVALS = 8;  // every warp
    typedef Ring<STAGES, STAGE_BYTES> Stages;

    static __device__ __forceinline__ void load(double& value, u32 address) {
        asm volatile("ld.shared.f64 %0, [%1];" : "=d"(value) : "r"(address));
    }

    static __device__ __forceinline__ void multiply_16x8x16(double* d, const double (&a)[8], const double (&b)[4]) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7,%8,%9,%10,%11}, "
            "{%12,%13,%14,%15}, {%0,%1,%2,%3};"
            : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
            : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]), "d"(b[1]),
              "d"(b[2]), "d"(b[3]));
    }

    // A stage holds 16 of K, one instruction's. Which rows of A and B an instruction takes is free: of 16 it takes the even and
    // the odd ones apart, for then no two lanes of half a warp find their 8 bytes in the same banks, and every operand is
    // loaded into the register where the instruction wants it.
    static __device__ __forceinline__ void multiply(double (&d)[64], Stages& ring, u32 k_steps, u32 consumer, u32 thread) {
        const u32 lane = thread % 32;
        const u32 row = lane / 4 * 2;
        const u32 place = row * BLOCK_K_BYTES + (lane % 4 / 2 ^ row % 8) * 16 + lane % 2 * 8;
        // Four of K are 32 bytes; an odd row lies 128 bytes on, its chunks swizzled by one more.
        const auto at = [](u32 rows, u32 odd, u32 four) { return (rows ^ (odd * 16 + four * 32)) + odd * BLOCK_K_BYTES; };
#pragma unroll
        for (u32 i = 0; i < 64; ++i) {
            d[i] = 0.0;
        }
        for (u32 step_k = 0; step_k < k_steps; ++step_k) {
            const u32 rows_a = ring.tile_a() + consumer * (A_BYTES / 2) + place;
            const u32 rows_b = ring.tile_b() + thread / 32 * 32 * BLOCK_K_BYTES + place;
            ring.wait_full();
            double b[4][4];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
#pragma unroll
                for (u32 part = 0; part < 4; ++part) {
                    load(b[j][part], at(rows_b, j % 2, part) + j / 2 * 16 * BLOCK_K_BYTES);
                }
            }
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                double a[8];
#pragma unroll
                for (u32 part = 0; part < 8; ++part) {
                    load(a[part], at(rows_a, part % 2, part / 2) + i * 16 * BLOCK_K_BYTES);
                }
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    multiply_16x8x16(d + (i * 4 + j) * 4, a, b[j]);
                }
            }
            give_stage_back(ring, lane);
            ring.advance();
        }
    }

    static __device__ __forceinline__ void store(const double (&d)[64], double* corner, u32 pitch, u32 thread) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            double* upper = corner + u64(i * 16 + thread % 32 / 4 * 2) * pitch + thread / 32 * 32 + thread % 4 * 4;
#pragma unroll
            for (u32 j = 0; j < 4; j += 2) {
                const double* even = d + (i * 4 + j) * 4;
                const double* odd = even + 4;
#pragma unroll
                for (u32 k = 0; k < 2; ++k) {
                    store_pair(upper + j * 8 + k * 2, even[k], odd[k]);
                    store_pair(upper + pitch + j * 8 + k * 2, even[2 + k], odd[2 + k]);
                }
            }
        }
    }
};

// Tiles of 128 x 256 by fused multiply-adds on the ordinary FP32 units, every accumulator in the order of k. The warps of a
// warpgroup lie side by side, 64 x 64 each; a thread has 8 rows and 16 columns of them.
//
// What limits it is how fast registers are read: one a cycle from each of two banks, the even and the odd ones (measured). The
// three operands of an instruction fit into that when one is the same as in the instruction before and the other two lie in
// different banks. So each row's products with all columns follow one another; accumulators lie in pairs of columns, as they
// are stored; and operands are wanted with neighbouring columns in neighbouring registers, exchanged in pairs, not with
// neighbours in k. The helping warps turn them.
struct F32Product {
    typedef float Accumulator;
    static constexpr u32 COLUMNS = 256;
    static constexpr u32 STAGES = 2;
    static constexpr u32 STAGE_BYTES = A_BYTES + COLUMNS * BLOCK_K_BYTES;
    static constexpr u32 ACCUMULATORS = 128;
    static constexpr bool TURNS = true;
    static constexpr u32 ARRIVALS = HELPING_WARPS;
    typedef Ring<STAGES, STAGE_BYTES> Stages;
    // A turned stage is three blocks of [32 of K][128 rows]: one of A and two of B.
    static constexpr u32 BLOCK_ROWS = 128;
    static constexpr u32 PITCH = BLOCK_ROWS * 4;

    struct Operands {
        float a[8];
        float b[16];
    };

    static __device__ __forceinline__ void load(float* words, u32 address) {
        asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(words[0]), "=f"(words[1]), "=f"(words[2]), "=f"(words[3])
                     : "r"(address));
    }

    // Turns a block: [row][k] becomes [k][row], even and odd rows exchanged. A lane takes one k and four rows at a time. Where the
    // four lie among the rows of a k is swizzled by k / 4, and the eight lanes of a quarter warp have different ones, so that
    // they write to different banks.
    static __device__ __forceinline__ void turn(u32 from, u32 to, u32 lane) {
        const u32 chunk = lane % 8;
        const u32 k = chunk * 4 + lane / 8;
        const u32 read = from + k * 4;
        const u32 write = to + k * PITCH + chunk * 16;
#pragma unroll
        for (u32 row = 0; row < BLOCK_ROWS; row += 16) {
            float words[16];
#pragma unroll
            for (u32 i = 0; i < 16; ++i) {
                asm volatile("ld.volatile.shared.f32 %0, [%1];"
                             : "=f"(words[i ^ 1])
                             : "r"((read ^ i % 8 * 16) + (row + i) * BLOCK_K_BYTES));
            }
#pragma unroll
            for (u32 i = 0; i < 16; i += 4) {
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"((write ^ (row + i) / 4 % 8 * 16) +
                                                                               (row + i) / 32 * 128),
                             "f"(words[i]), "f"(words[i + 1]), "f"(words[i + 2]), "f"(words[i + 3])
                             : "memory");
            }
        }
    }

    // B's first: ptxas then puts A's, which stays, where the address of a load between does not push it out.
    static __device__ __forceinline__ void fetch(Operands& operands, u32 block_a, u32 block_b, u32 k) {
#pragma unroll
        for (u32 part = 0; part < 4; ++part) {
            load(operands.b + part * 4, (block_b ^ part % 2 * 64) + k * PITCH + part / 2 * 128);
        }
#pragma unroll
        for (u32 part = 0; part < 2; ++part) {
            load(operands.a + part * 4, block_a + k * PITCH + part * 128);
        }
    }

    static __device__ __forceinline__ void multiply_add(float (&d)[128], const Operands& operands) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
#pragma unroll
            for (u32 step = 0; step < 16; ++step) {
                // To and fro, so that one operand stays from row to row, too.
                const u32 j = i % 2 == 0 ? step : 15 - step;
                d[i * 16 + j] = __fmaf_rn(operands.a[i ^ 1], operands.b[j ^ 1], d[i * 16 + j]);
            }
        }
    }

    static __device__ __forceinline__ void multiply(float (&d)[128], Stages& ring, u32 k_steps, u32 consumer, u32 thread) {
        const u32 lane = thread % 32;
        const u32 warp = thread / 32;
        const u32 first_a = consumer * 256 + lane % 8 * 16;
        const u32 first_b = A_BYTES + warp / 2 * A_BYTES + warp % 2 * 256 + lane / 8 * 16;
        // Loops that run once: ptxas then keeps every accumulator in one register and the instructions in order. It does not see
        // that k_steps is below 2^24.
        const u32 again = k_steps >> 24;
        u32 loops = 0;
#define ONCE_MORE (++loops & again) != 0
#pragma unroll
        for (u32 i = 0; i < 128; ++i) {
            d[i] = 0.0f;
        }
        for (u32 step_k = 0; step_k < k_steps; ++step_k) {
            ring.wait_full();
            // Blocks of four of K, in whose operands the same rows lie at the same places.
            const auto four = [&](u32 first, u32 index) { return ring.tile_a() + ((first ^ index * 16) + index * 4 * PITCH); };
            u32 block_a = four(first_a, 0), block_b = four(first_b, 0);
            Operands even, odd;
            do {
                fetch(even, block_a, block_b, 0);
            } while (ONCE_MORE);
#pragma unroll 2
            for (u32 index = 1; index <= 8; ++index) {
                do {
                    fetch(odd, block_a, block_b, 1);
                    multiply_add(d, even);
                } while (ONCE_MORE);
                do {
                    fetch(even, block_a, block_b, 2);
                    multiply_add(d, odd);
                } while (ONCE_MORE);
                do {
                    fetch(odd, block_a, block_b, 3);
                    multiply_add(d, even);
                } while (ONCE_MORE);
                // After the last four the first are fetched once more, and not used.
                block_a = four(first_a, index % 8), block_b = four(first_b, index % 8);
                do {
                    fetch(even, block_a, block_b, 0);
                    multiply_add(d, odd);
                } while (ONCE_MORE);
            }
            __syncwarp();
            if (lane == 0) {
                barrier_arrive(ring.empty_barrier());
            }
            ring.advance();
        }
#undef ONCE_MORE
    }

    static __device__ __forceinline__ void store(const float (&d)[128], float* corner, u32 pitch, u32 thread) {
        const u32 lane = thread % 32;
        float* place = corner + u64(lane % 8 * 4) * pitch + thread / 32 * 64 + lane / 8 * 4;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            float* row = place + u64(i / 4 * 32 + i % 4) * pitch;
#pragma unroll
            for (u32 j = 0; j < 16; j += 2) {
                store_pair(row + j / 4 * 16 + j % 4, d[i * 16 + j], d[i * 16 + j + 1]);
            }
        }
    }
};

#define GEMM_SM90A(type, product, result_type)                                                                          \
    extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)                           \
        gemm_sm90a_##type(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,                    \
                          result_type* result, u32 m, u32 n, u32 k_bytes, u32* tile_sm, const u32* verify_result,      \
                          const u64* verify_checksums, Report* report, u32 sweep) {                                    \
        gemm<product>(a, b, result, m, n, k_bytes, tile_sm,                                                       \
                           Verification{verify_result, verify_checksums, report, sweep});                        \
    }

GEMM_SM90A(bf16, WgmmaProduct<wgmma_bf16>, float)
GEMM_SM90A(f16, WgmmaProduct<wgmma_f16>, float)
GEMM_SM90A(tf32, WgmmaProduct<wgmma_tf32>, float)
GEMM_SM90A(e4m3, WgmmaProduct<wgmma_e4m3>, float)
GEMM_SM90A(s8, WgmmaProduct<wgmma_s8>, int)
GEMM_SM90A(f64, F64Product, double)
GEMM_SM90A(f32, F32Product, float)
