// GEMM for Hopper: C = A * B^T with A [m][k] and B [n][k] both contiguous in k, C [m][n] in 32-bit accumulators.
//
// Two blocks form a cluster and compute 256 x 256 of C, 128 x 256 each. In a block, one thread of the first warpgroup
// copies tiles of A and B by TMA into a ring of shared memory (each block fetches half of B's tile and multicasts it to
// both), and two consumer warpgroups multiply 64 x 256 each by wgmma. The other three warps of the first warpgroup have
// nothing to fetch, so they read an earlier result back from memory and check it against its checksums meanwhile: the
// memory is idle enough under a GEMM that verification costs next to nothing.

#include "strip.cuh"
#include "walk.cuh"
#include "wgmma.cuh"

constexpr u32 TILE_M = 128;
constexpr u32 TILE_N = 256;
constexpr u32 CLUSTER = 2;
constexpr u32 BLOCK_K_BYTES = 128;
constexpr u32 STAGES = 4;
constexpr u32 A_BYTES = TILE_M * BLOCK_K_BYTES;
constexpr u32 B_BYTES = TILE_N * BLOCK_K_BYTES;
constexpr u32 STAGE_BYTES = A_BYTES + B_BYTES;
constexpr u32 THREADS = 384;
// Cluster rows that are walked before the next column: keeps the operands of one wave in L2.
constexpr u32 RASTER_ROWS = 8;

struct alignas(64) TensorMap {
    u64 opaque[16];
};

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return u32(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done; \n"
        "again: \n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; \n"
        "@done bra passed; \n"
        "bra again; \n"
        "passed: }" ::"r"(barrier), "r"(parity) : "memory");
}

// Tells block `rank` of the cluster that this warpgroup no longer reads the stage behind `barrier`. Without
// `.release.cluster`: wgmma has read the stage when its group is waited for, no store of ours has to be seen first, and
// that qualifier would put a fence of the whole GPU into every step.
__device__ __forceinline__ void barrier_arrive_cluster(u32 barrier, u32 rank) {
    asm volatile(
        "{ .reg .b32 remote; \n"
        "mapa.shared::cluster.u32 remote, %0, %1; \n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(barrier), "r"(rank) : "memory");
}

__device__ __forceinline__ void copy_tile(u32 destination, const TensorMap* map, u32 barrier, u32 k_byte, u32 row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            destination),
        "l"(map), "r"(barrier), "r"(k_byte), "r"(row)
        : "memory");
}

__device__ __forceinline__ void copy_tile_to_cluster(u32 destination, const TensorMap* map, u32 barrier, u32 k_byte,
                                                     u32 row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(destination),
        "l"(map), "r"(barrier), "r"(k_byte), "r"(row), "h"(u16((1u << CLUSTER) - 1u))
        : "memory");
}

// Shared-memory descriptor of a K-major tile in the 128-byte swizzle: groups of 8 rows are 1024 bytes apart.
__device__ __forceinline__ u64 tile_descriptor(u32 address) {
    return u64((address & 0x3FFFFu) >> 4) | (u64(1) << 16) | (u64(1024 >> 4) << 32) | (u64(1) << 62);
}

struct Ring {
    u32 stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1u;
        }
    }
};

struct Verification {
    const u32* result;     // an earlier result of the same size; null: nothing is verified
    const u64* checksums;  // one a strip, [m / 16][n / 256]
    Report* report;
    u32 sweep;
};

// Three warps check the strips of the tile that another cluster computed: half of all tiles away. NaN and infinity need
// no look of their own: the checksums are of a finite reference, so bits that equal it are finite.
__device__ __forceinline__ void verify_tile(const Verification& job, u32 row0, u32 column0, u32 n, u32 warp, u32 lane,
                                            const StripWeights& weights, u32& checked) {
    u32 uncounted = 0;
#pragma unroll 1
    for (u32 strip = warp; strip < TILE_M / STRIP_ROWS; strip += 3) {
        const u32 row = row0 + strip * STRIP_ROWS;
        const u64 got = strip_checksum<false>(job.result + u64(row) * n + column0, n, lane, weights, 0, uncounted);
        const u64 expected = job.checksums[u64(row / STRIP_ROWS) * (n / STRIP_WORDS) + column0 / STRIP_WORDS];
        if (lane == 0) {
            ++checked;
            if (got != expected) {
                atomicAdd(&job.report->mismatches, 1ull);
                add_record(job.report, row, column0, job.sweep, own_sm(), expected, got);
            }
        }
    }
}

template <class Wgmma>
__device__ __forceinline__ void gemm(const TensorMap& map_a, const TensorMap& map_b,
                                     typename Wgmma::Accumulator* result, u32 m, u32 n, u32 k_bytes, u32* tile_sm,
                                     const Verification& verification) {
    typedef typename Wgmma::Accumulator Accumulator;
    extern __shared__ u8 dynamic_shared[];
    __shared__ alignas(8) u64 barriers[2 * STAGES];

    const u32 tiles = (shared_address(dynamic_shared) + 1023u) & ~1023u;
    const u32 full = shared_address(barriers);
    const u32 empty = full + 8 * STAGES;
    const u32 warp = threadIdx.x / 32;
    const u32 lane = threadIdx.x % 32;
    const u32 warpgroup = threadIdx.x / 128;
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));

    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(empty + 8 * stage, 2 * CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&map_a) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&map_b) : "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");

    const Walk<RASTER_ROWS> walk = {m / (TILE_M * CLUSTER), n / TILE_N};
    const u32 first = blockIdx.x / CLUSTER;
    const u32 step = gridDim.x / CLUSTER;
    const u32 k_steps = k_bytes / BLOCK_K_BYTES;

    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (warp == 0) {
            if (lane == 0) {
                Ring ring;
                for (u32 index = first; index < walk.count(); index += step) {
                    u32 cluster_row, column;
                    walk.place(index, cluster_row, column);
                    const u32 row_a = (cluster_row * CLUSTER + rank) * TILE_M;
                    const u32 row_b = column * TILE_N + rank * (TILE_N / CLUSTER);
                    for (u32 step_k = 0; step_k < k_steps; ++step_k) {
                        const u32 stage_full = full + 8 * ring.stage;
                        const u32 stage_tiles = tiles + ring.stage * STAGE_BYTES;
                        barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1u);
                        barrier_expect(stage_full, STAGE_BYTES);
                        copy_tile(stage_tiles, &map_a, stage_full, step_k * BLOCK_K_BYTES, row_a);
                        copy_tile_to_cluster(stage_tiles + A_BYTES + rank * (B_BYTES / CLUSTER), &map_b, stage_full,
                                             step_k * BLOCK_K_BYTES, row_b);
                        ring.advance();
                    }
                }
            }
            __syncwarp();
        } else if (verification.result != nullptr) {
            const StripWeights weights(lane);
            u32 checked = 0;
            for (u32 index = first; index < walk.count(); index += step) {
                u32 cluster_row, column;
                walk.place((index + walk.count() / 2) % walk.count(), cluster_row, column);
                verify_tile(verification, (cluster_row * CLUSTER + rank) * TILE_M, column * TILE_N, n, warp - 1, lane,
                            weights, checked);
            }
            if (checked != 0) {
                atomicAdd(&verification.report->checked, u64(checked));
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        const u32 consumer = warpgroup - 1;
        const u32 thread = threadIdx.x % 128;
        Accumulator d[128];
        Ring ring;
        for (u32 index = first; index < walk.count(); index += step) {
            u32 cluster_row, column;
            walk.place(index, cluster_row, column);
            u32 previous = 0;
            for (u32 step_k = 0; step_k < k_steps; ++step_k) {
                const u32 stage_tiles = tiles + ring.stage * STAGE_BYTES;
                const u64 a = tile_descriptor(stage_tiles + consumer * (A_BYTES / 2));
                const u64 b = tile_descriptor(stage_tiles + A_BYTES);
                barrier_wait(full + 8 * ring.stage, ring.parity);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (u32 part = 0; part < 4; ++part) {
                    Wgmma::issue(d, a + 2 * part, b + 2 * part, step_k != 0 || part != 0);
                }
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (step_k != 0 && thread < CLUSTER) {
                    barrier_arrive_cluster(empty + 8 * previous, thread);
                }
                previous = ring.stage;
                ring.advance();
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (thread < CLUSTER) {
                barrier_arrive_cluster(empty + 8 * previous, thread);
            }

            const u32 tile_row = cluster_row * CLUSTER + rank;
            const u32 row = tile_row * TILE_M + consumer * 64 + (thread / 32) * 16 + lane / 4;
            Accumulator* upper = result + u64(row) * n + column * TILE_N + (lane % 4) * 2;
            Accumulator* lower = upper + u64(8) * n;
#pragma unroll
            for (u32 part = 0; part < 32; ++part) {
                store_pair(upper + part * 8, d[part * 4], d[part * 4 + 1]);
                store_pair(lower + part * 8, d[part * 4 + 2], d[part * 4 + 3]);
            }
            if (tile_sm != nullptr && threadIdx.x == 128) {
                tile_sm[tile_row * walk.columns + column] = own_sm();
            }
        }
    }
    // No block may leave while the other can still write into its shared memory or arrive at its barriers.
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

#define GEMM_SM90A(type, result_type)                                                                                 \
    extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)                           \
        gemm_sm90a_##type(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,                    \
                          result_type* result, u32 m, u32 n, u32 k_bytes, u32* tile_sm, const u32* verify_result,      \
                          const u64* verify_checksums, Report* report, u32 sweep) {                                    \
        gemm<wgmma_##type>(a, b, result, m, n, k_bytes, tile_sm,                                                       \
                           Verification{verify_result, verify_checksums, report, sweep});                        \
    }

GEMM_SM90A(bf16, float)
GEMM_SM90A(f16, float)
GEMM_SM90A(tf32, float)
GEMM_SM90A(e4m3, float)
GEMM_SM90A(s8, int)
