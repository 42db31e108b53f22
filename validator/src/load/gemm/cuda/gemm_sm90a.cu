// GEMM for Hopper: C = A * B^T with A [m][k] and B [n][k] both contiguous in k, C [m][n] in the type of the accumulators.
//
// Two blocks form a cluster and compute 256 rows of C, 128 each. In a block, one thread of the first warpgroup copies
// tiles of A and B by TMA into a ring of shared memory (each block fetches half of B's tile and multicasts it to both),
// and two consumer warpgroups multiply 64 rows each. The other three warps of the first warpgroup have nothing to fetch,
// so they read an earlier result back from memory and check it against its checksums meanwhile: the memory is idle enough
// under a GEMM that verification costs next to nothing.

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
    static constexpr u32 ARRIVALS = 8;  // every warp
    typedef Ring<STAGES, STAGE_BYTES> Stages;

    static __device__ __forceinline__ void load(double& first, double& second, u32 address) {
        asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(first), "=d"(second) : "r"(address));
    }

    static __device__ __forceinline__ void multiply_16x8x8(double* d, const double (&a)[4], const double (&b)[2]) {
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
            : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
    }

    // A stage holds 16 of K, two instructions. Which eight of them an instruction takes, and which two of those lane t of
    // four holds, is free as long as A and B agree: the lane's 16-byte chunk 2 t or 2 t + 1, which no two lanes of a
    // quarter warp find in the same banks.
    static __device__ __forceinline__ void multiply(double (&d)[64], Stages& ring, u32 k_steps, u32 consumer, u32 thread) {
        const u32 lane = thread % 32;
        const u32 row = lane / 4;
        u32 offset[2];
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            offset[half] = row * BLOCK_K_BYTES + ((lane % 4 * 2 + half) ^ row) * 16;
        }
#pragma unroll
        for (u32 i = 0; i < 64; ++i) {
            d[i] = 0.0;
        }
        for (u32 step_k = 0; step_k < k_steps; ++step_k) {
            const u32 rows_a = ring.tile_a() + consumer * (A_BYTES / 2);
            const u32 rows_b = ring.tile_b() + thread / 32 * 32 * BLOCK_K_BYTES;
            ring.wait_full();
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                double b[4][2];
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    load(b[j][0], b[j][1], rows_b + j * 8 * BLOCK_K_BYTES + offset[half]);
                }
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    double a[4];
                    load(a[0], a[2], rows_a + i * 16 * BLOCK_K_BYTES + offset[half]);
                    load(a[1], a[3], rows_a + (i * 16 + 8) * BLOCK_K_BYTES + offset[half]);
#pragma unroll
                    for (u32 j = 0; j < 4; ++j) {
                        multiply_16x8x8(d + (i * 4 + j) * 4, a, b[j]);
                    }
                }
            }
            // The loads must have read before the stage is given back: without this fence the arrival overtakes the last
            // of them, and the next tile lands under it (seen: 2000 wrong elements in every 8192-cubed product).
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
            if (lane < CLUSTER) {
                barrier_arrive_cluster(ring.empty_barrier(), lane);
            }
            ring.advance();
        }
    }

    static __device__ __forceinline__ void store(const double (&d)[64], double* corner, u32 pitch, u32 thread) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            double* upper = corner + u64(i * 16 + thread % 32 / 4) * pitch + thread / 32 * 32 + thread % 4 * 2;
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const double* block = d + (i * 4 + j) * 4;
                store_pair(upper + j * 8, block[0], block[1]);
                store_pair(upper + u64(8) * pitch + j * 8, block[2], block[3]);
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
