// What every kernel file shares: the report that verification fills and the checksum of one strip of a result.
// KERNELS.md describes both for the host.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;
typedef unsigned short u16;

// A strip is 16 rows of 256 consecutive 32-bit words: small enough to localise, large enough that its sum costs little.
constexpr u32 STRIP_ROWS = 16;
constexpr u32 STRIP_WORDS = 256;

// How the words of a result are read when NaN and infinity are looked for.
constexpr u32 KIND_INTEGER = 0;
constexpr u32 KIND_F32 = 1;
constexpr u32 KIND_F64 = 2;

struct Record {
    u32 row;
    u32 column;
    u32 sweep;
    u32 sm;
    u64 expected;
    u64 got;
};

struct Report {
    u64 checked;     // strips or elements that were read and judged
    u64 mismatches;  // of these, how many differ
    u64 nonfinite;   // elements that are NaN or infinite, where the kernel counts them
    u32 recorded;    // records asked for until the list was full: at least `capacity` then
    u32 capacity;    // set by the host
    // `capacity` records follow.
    __device__ __forceinline__ Record* records() { return reinterpret_cast<Record*>(this + 1); }
};

__device__ __forceinline__ u32 own_sm() {
    u32 sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    return sm;
}

__device__ __forceinline__ void add_record(Report* report, u32 row, u32 column, u32 sweep, u32 sm, u64 expected,
                                           u64 got) {
    // Enough is known once the list is full; a result that is wrong everywhere must not queue at this counter.
    if (*const_cast<volatile u32*>(&report->recorded) >= report->capacity) {
        return;
    }
    const u32 slot = atomicAdd(&report->recorded, 1u);
    if (slot < report->capacity) {
        report->records()[slot] = Record{row, column, sweep, sm, expected, got};
    }
}

// The checksum of a strip: each column c is a polynomial of its 16 words, p(c) = sum of word * ROW_FACTOR^(15 - row)
// modulo 2^32, and the strip is the sum of p(c) * weight(c) modulo 2^64. ROW_FACTOR is odd, so one wrong word always
// changes its p; weights are odd and below 2^32, so a changed p always changes the sum. Weights are hashed so that
// regular patterns of wrong words do not cancel. One 32-bit multiply-add a word: cheaper than 64-bit sums by 1.5 % of a
// BF16 product on an H200.
constexpr u32 ROW_FACTOR = 0x9E3779B1u;

__device__ __forceinline__ u32 strip_weight(u32 column) {
    u32 weight = (column + 1u) * 0x9E3779B9u;
    weight ^= weight >> 15;
    weight *= 0x2C1B3C6Du;
    weight ^= weight >> 12;
    return weight | 1u;
}

// The eight weights of a lane, which reads words 4 lane .. + 3 and 128 + 4 lane .. + 3 of each row.
struct StripWeights {
    u32 weight[8];

    __device__ __forceinline__ explicit StripWeights(u32 lane) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            weight[i] = strip_weight(i / 4 * 128 + lane * 4 + i % 4);
        }
    }
};

// 16 bytes from memory: past L1, and the first to leave L2, so that the next reader meets the memory and not a copy.
__device__ __forceinline__ uint4 load_result(const void* address) {
    uint4 value;
    asm volatile("ld.global.cs.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

// Two neighbouring words of a result: written through to memory before anything that will be used again.
__device__ __forceinline__ void store_pair(float* address, float first, float second) {
    asm volatile("st.global.cs.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(first), "f"(second) : "memory");
}

__device__ __forceinline__ void store_pair(double* address, double first, double second) {
    asm volatile("st.global.cs.v2.f64 [%0], {%1, %2};" ::"l"(address), "d"(first), "d"(second) : "memory");
}

__device__ __forceinline__ void store_pair(int* address, int first, int second) {
    asm volatile("st.global.cs.v2.s32 [%0], {%1, %2};" ::"l"(address), "r"(first), "r"(second) : "memory");
}

__device__ __forceinline__ u32 count_nonfinite(u32 word, u32 column, u32 kind) {
    if (kind == KIND_F32) {
        return (word & 0x7F800000u) == 0x7F800000u;
    }
    return kind == KIND_F64 && (column & 1u) != 0u && (word & 0x7FF00000u) == 0x7FF00000u;
}

// One warp sums one strip; every lane gets the sum. `COUNT`: also count this lane's NaN and infinities.
template <bool COUNT>
__device__ __forceinline__ u64 strip_checksum(const u32* strip, u32 pitch_words, u32 lane, const StripWeights& weights,
                                              u32 kind, u32& nonfinite) {
    u32 polynomial[8] = {};
#pragma unroll 1
    for (u32 row = 0; row < STRIP_ROWS; row += 2) {
        uint4 part[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            part[i] = load_result(strip + u64(row + i / 2) * pitch_words + lane * 4 + i % 2 * 128);
        }
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 words[4] = {part[i].x, part[i].y, part[i].z, part[i].w};
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                u32& value = polynomial[i % 2 * 4 + j];
                value = value * ROW_FACTOR + words[j];
                if (COUNT) {
                    nonfinite += count_nonfinite(words[j], j, kind);
                }
            }
        }
    }
    u64 sum = 0;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        sum += u64(polynomial[i]) * weights.weight[i];
    }
#pragma unroll
    for (u32 offset = 16; offset != 0; offset /= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
    }
    return sum;
}
