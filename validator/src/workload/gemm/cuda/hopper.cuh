// What the Hopper kernels share: two blocks of a cluster copy tiles of A and B by TMA into rings of shared memory, two
// consumer warpgroups of each block multiply them, and the warps that are left check an earlier result. A kernel brings a
// `Product`, which says how a tile is multiplied and stored.
#pragma once

#include "checksum.cuh"
#include "walk.cuh"

constexpr u32 TILE_M = 128;
constexpr u32 CLUSTER = 2;
constexpr u32 BLOCK_K_BYTES = 128;
constexpr u32 A_BYTES = TILE_M * BLOCK_K_BYTES;
// Every tile of C is 256 words wide: one strip.
constexpr u32 TILE_WORDS = STRIP_WORDS;
constexpr u32 THREADS = 384;
constexpr u32 CONSUMER_WARPS = 8;
// The warps of the first warpgroup that do not copy.
constexpr u32 HELPING_WARPS = 3;
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

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
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

// Tells block `rank` of the cluster that the stage behind `barrier` is no longer read here. Without `.release.cluster`,
// which would put a fence of the whole GPU into every step: wgmma has read the stage when its group is waited for, other
// readers fence for themselves, and no store of ours has to be seen first.
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

// The ring of shared memory as one thread walks it: for the producer the next stage to fill, for a consumer the next to
// read. `full` and `empty` are the first of `STAGES` barriers each.
template <u32 STAGES, u32 STAGE_BYTES>
struct Ring {
    u32 tiles;
    u32 full;
    u32 empty;
    u32 stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ u32 tile_a() const { return tiles + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 tile_b() const { return tile_a() + A_BYTES; }
    __device__ __forceinline__ u32 full_barrier() const { return full + 8 * stage; }
    __device__ __forceinline__ u32 empty_barrier() const { return empty + 8 * stage; }
    // For whole warps: lanes can see the phase change in different turns of the loop, and what follows needs them together.
    __device__ __forceinline__ void wait_full() const {
        barrier_wait(full_barrier(), parity);
        __syncwarp();
    }
    __device__ __forceinline__ void wait_empty() const { barrier_wait(empty_barrier(), parity ^ 1u); }

    // The ring behind this one, in memory and in barriers.
    __device__ __forceinline__ Ring next() const {
        Ring ring;
        ring.tiles = tiles + STAGES * STAGE_BYTES;
        ring.full = empty + 8 * STAGES;
        ring.empty = ring.full + 8 * STAGES;
        return ring;
    }

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1u;
        }
    }
};

// For whole warps that read a copied stage by ordinary loads. They must have read before it is given back: without the fence
// the arrival overtakes the last of the loads, and the next tile lands under them (seen: 2000 wrong elements in every
// 8192-cubed product).
template <class Stages>
__device__ __forceinline__ void give_stage_back(const Stages& ring, u32 lane) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (lane < CLUSTER) {
        barrier_arrive_cluster(ring.empty_barrier(), lane);
    }
}

struct Verification {
    const u32* result;     // an earlier result of the same size; null: nothing is verified
    const u64* checksums;  // one a strip, [m / 16][n / 256]
    Report* report;
    u32 sweep;
};

// The checking of an earlier result by one of the helping warps: strips of the tiles that another cluster computed, half of
// all tiles away. NaN and infinity need no look of their own: the checksums are of a finite reference, so bits that equal
// it are finite.
struct Verifier {
    const Verification& job;
    u32 words;  // of a row of the result
    u32 warp;
    u32 lane;
    StripWeights weights;
    u32 checked = 0;
    u32 row0 = 0;
    u32 column0 = 0;
    u32 strip = 0;

    __device__ __forceinline__ Verifier(const Verification& job, u32 words, u32 warp, u32 lane)
        : job(job), words(words), warp(warp), lane(lane), weights(lane) {}

    // Takes up its strips of the tile at `row` and `column` of tiles.
    __device__ __forceinline__ void begin(u32 row, u32 column) {
        row0 = row * TILE_M;
        column0 = column * TILE_WORDS;
        strip = job.result != nullptr ? warp : TILE_M / STRIP_ROWS;
    }

    __device__ __forceinline__ bool has_strips() const { return strip < TILE_M / STRIP_ROWS; }

    __device__ __forceinline__ void check_strip() {
        const u32 row = row0 + strip * STRIP_ROWS;
        u32 uncounted = 0;
        const u64 got = strip_checksum<false>(job.result + u64(row) * words + column0, words, lane, weights, 0, uncounted);
        const u64 expected = job.checksums[u64(row / STRIP_ROWS) * (words / STRIP_WORDS) + column0 / STRIP_WORDS];
        if (lane == 0) {
            ++checked;
            if (got != expected) {
                atomicAdd(&job.report->mismatches, 1ull);
                add_record(job.report, row, column0, job.sweep, own_sm(), expected, got);
            }
        }
        strip += HELPING_WARPS;
    }

    __device__ __forceinline__ void finish() const {
        if (checked != 0) {
            atomicAdd(&job.report->checked, u64(checked));
        }
    }
};

// Fills the rings of both blocks with the tiles of every product, in the order in which they are multiplied.
template <class Product>
__device__ __forceinline__ void produce(const TensorMap& map_a, const TensorMap& map_b, const Walk<RASTER_ROWS>& walk,
                                        u32 first, u32 step, u32 rank, u32 k_steps, typename Product::Stages ring) {
    constexpr u32 HALF_COLUMNS = Product::COLUMNS / CLUSTER;
    for (u32 index = first; index < walk.count(); index += step) {
        u32 cluster_row, column;
        walk.place(index, cluster_row, column);
        const u32 row_a = (cluster_row * CLUSTER + rank) * TILE_M;
        const u32 row_b = column * Product::COLUMNS + rank * HALF_COLUMNS;
        for (u32 step_k = 0; step_k < k_steps; ++step_k) {
            ring.wait_empty();
            barrier_expect(ring.full_barrier(), Product::STAGE_BYTES);
            copy_tile(ring.tile_a(), &map_a, ring.full_barrier(), step_k * BLOCK_K_BYTES, row_a);
            copy_tile_to_cluster(ring.tile_b() + rank * HALF_COLUMNS * BLOCK_K_BYTES, &map_b, ring.full_barrier(),
                                 step_k * BLOCK_K_BYTES, row_b);
            ring.advance();
        }
    }
}

// The work of a helping warp: it verifies, and where a product wants its operands turned it turns its share of every stage
// that was copied into the ring behind that of the copies.
template <class Product>
__device__ __forceinline__ void help(Verifier& verifier, const Walk<RASTER_ROWS>& walk, u32 first, u32 step, u32 rank,
                                     u32 k_steps, typename Product::Stages copied) {
    typename Product::Stages turned = copied.next();
    for (u32 index = first; index < walk.count(); index += step) {
        u32 cluster_row, column;
        walk.place((index + walk.count() / 2) % walk.count(), cluster_row, column);
        verifier.begin(cluster_row * CLUSTER + rank, column);
        if constexpr (Product::TURNS) {
            for (u32 step_k = 0; step_k < k_steps; ++step_k) {
                copied.wait_full();
                turned.wait_empty();
                __syncwarp();
                const u32 share = verifier.warp * (Product::STAGE_BYTES / HELPING_WARPS);
                Product::turn(copied.tile_a() + share, turned.tile_a() + share, verifier.lane);
                give_stage_back(copied, verifier.lane);
                if (verifier.lane == 0) {
                    barrier_arrive(turned.full_barrier());
                }
                copied.advance();
                turned.advance();
                // One strip now and then, while the stages ahead last.
                if (step_k % 8 == 0 && verifier.has_strips()) {
                    verifier.check_strip();
                }
            }
        }
#pragma unroll 1
        while (verifier.has_strips()) {
            verifier.check_strip();
        }
    }
    verifier.finish();
}

template <class Product>
__device__ __forceinline__ void gemm(const TensorMap& map_a, const TensorMap& map_b,
                                     typename Product::Accumulator* result, u32 m, u32 n, u32 k_bytes, u32* tile_sm,
                                     const Verification& verification) {
    extern __shared__ u8 dynamic_shared[];
    __shared__ alignas(8) u64 barriers[(Product::TURNS ? 4 : 2) * Product::STAGES];

    const u32 warp = threadIdx.x / 32;
    const u32 lane = threadIdx.x % 32;
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    typename Product::Stages ring;
    ring.tiles = (shared_address(dynamic_shared) + 1023u) & ~1023u;
    ring.full = shared_address(barriers);
    ring.empty = ring.full + 8 * Product::STAGES;

    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < Product::STAGES; ++stage) {
            barrier_init(ring.full + 8 * stage, 1);
            barrier_init(ring.empty + 8 * stage, Product::ARRIVALS * CLUSTER);
            if (Product::TURNS) {
                barrier_init(ring.next().full + 8 * stage, HELPING_WARPS);
                barrier_init(ring.next().empty + 8 * stage, CONSUMER_WARPS);
            }
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&map_a) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&map_b) : "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");

    const Walk<RASTER_ROWS> walk = {m / (TILE_M * CLUSTER), n / Product::COLUMNS};
    const u32 first = blockIdx.x / CLUSTER;
    const u32 step = gridDim.x / CLUSTER;
    const u32 k_steps = k_bytes / BLOCK_K_BYTES;

    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
        if (warp == 0) {
            if (lane == 0) {
                produce<Product>(map_a, map_b, walk, first, step, rank, k_steps, ring);
            }
            __syncwarp();
        } else if (Product::TURNS || verification.result != nullptr) {
            Verifier verifier(verification, n * (sizeof(*result) / 4), warp - 1, lane);
            help<Product>(verifier, walk, first, step, rank, k_steps, ring);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
        if (Product::TURNS) {
            ring = ring.next();
        }
        const u32 consumer = threadIdx.x / 128 - 1;
        const u32 thread = threadIdx.x % 128;
        for (u32 index = first; index < walk.count(); index += step) {
            u32 cluster_row, column;
            walk.place(index, cluster_row, column);
            const u32 tile_row = cluster_row * CLUSTER + rank;
            typename Product::Accumulator d[Product::ACCUMULATORS];
            Product::multiply(d, ring, k_steps, consumer, thread);
            Product::store(d, result + u64(tile_row * TILE_M + consumer * 64) * n + column * Product::COLUMNS, n, thread);
            if (tile_sm != nullptr && threadIdx.x == 128) {
                tile_sm[tile_row * walk.columns + column] = own_sm();
            }
        }
    }
    // No block may leave while the other can still write into its shared memory or arrive at its barriers.
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
