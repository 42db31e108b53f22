// The checksum of one strip of a result, for the kernels that verify. KERNELS.md describes it for the host.
#pragma once

#include "strip.cuh"

// The checksum of a strip. Each column c of 16 words is reduced to two numbers:
//   polynomial(c) = sum of word * ROW_FACTOR^(15 - row) modulo 2^32: one wrong word always changes it, but the top bits of
//     two words can cancel;
//   bytes(c) = sum of byte k of word * byte k of ROW_WEIGHTS[row], over k and row: below 2^23, so no bit is cut off, and
//     no two rows weigh alike.
// The strip is the sum of polynomial(c) * weight(c) + bytes(c) * turned weight(c) modulo 2^64. KERNELS.md says what that
// finds for certain. Two instructions a word.
constexpr u32 ROW_FACTOR = 0xD68CF43Bu;

// Byte k of all rows is a Golomb ruler, shuffled: no two pairs of rows have the same difference.
__constant__ constexpr u32 ROW_WEIGHTS[STRIP_ROWS] = {
    0x7E83826Au, 0xF0F5F482u, 0xD74E52EDu, 0xEDF2F1BDu, 0xADD6F58Eu, 0x7C70444Eu, 0xB9BEBD55u, 0xE6B26F4Bu,
    0x6BEBEAD0u, 0xA5DCB1BFu, 0xF181DBFBu, 0x4E534DE0u, 0x49AA5F64u, 0x5BF68096u, 0x4060D54Au, 0xD145A9F2u,
};

// Odd, from 2^30 to 2^31, and hashed, so that regular patterns of wrong words do not cancel.
__device__ __forceinline__ u32 strip_weight(u32 column) {
    u32 weight = (column + 1u) * 0x9E3779B9u;
    weight ^= weight >> 15;
    weight *= 0x2C1B3C6Du;
    weight ^= weight >> 12;
    return weight >> 2 | 1u << 30 | 1u;
}

__device__ __forceinline__ u32 turned(u32 weight) {
    return __funnelshift_l(weight, weight, 16) | 1u;
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
    u32 bytes[8] = {};
    strip += lane * 4;
#pragma unroll 1
    for (u32 row = 0; row < STRIP_ROWS; row += 2, strip += 2 * u64(pitch_words)) {
        uint4 part[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            part[i] = load_result(strip + i / 2 * u64(pitch_words) + i % 2 * 128);
        }
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 words[4] = {part[i].x, part[i].y, part[i].z, part[i].w};
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const u32 column = i % 2 * 4 + j;
                polynomial[column] = polynomial[column] * ROW_FACTOR + words[j];
                bytes[column] = __dp4a(words[j], ROW_WEIGHTS[row + i / 2], bytes[column]);
                if (COUNT) {
                    nonfinite += count_nonfinite(words[j], j, kind);
                }
            }
        }
    }
    u64 sum = 0;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        sum += u64(polynomial[i]) * weights.weight[i] + u64(bytes[i]) * turned(weights.weight[i]);
    }
#pragma unroll
    for (u32 offset = 16; offset != 0; offset /= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
    }
    return sum;
}
