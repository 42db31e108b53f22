// Operand types: how they are generated and how they read as FP64. KERNELS.md has the same formulas for the host.
#pragma once

#include "strip.cuh"

// The codes of the `type` parameter. TF32 is stored as FP32 whose low 13 bits are zero.
constexpr u32 TYPE_F64 = 0;
constexpr u32 TYPE_F32 = 1;
constexpr u32 TYPE_TF32 = 2;
constexpr u32 TYPE_BF16 = 3;
constexpr u32 TYPE_F16 = 4;
constexpr u32 TYPE_E4M3 = 5;
constexpr u32 TYPE_S8 = 6;
constexpr u32 TYPE_S32 = 7;  // results only

constexpr u32 MODE_EXACT = 0;
constexpr u32 MODE_RANDOM = 1;
constexpr u32 MODE_SIGN = 2;

// SplitMix64: element `index` of the stream that starts at `seed`.
__device__ __forceinline__ u64 random_word(u64 seed, u64 index) {
    u64 word = seed + (index + 1) * 0x9E3779B97F4A7C15ull;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
    return word ^ (word >> 31);
}

// An IEEE-like pattern with a random sign, all `mantissa_bits` random, and one of four exponents: 1/8 <= |x| < 2.
__device__ __forceinline__ u64 random_pattern(u64 word, u32 mantissa_bits, u32 bias, u32 width) {
    const u64 sign = word >> 63;
    const u64 exponent = bias - 3 + ((word >> 61) & 3);
    const u64 mantissa = (word >> (61 - mantissa_bits)) & ((u64(1) << mantissa_bits) - 1);
    return (sign << (width - 1)) | (exponent << mantissa_bits) | mantissa;
}

// -radius ..= radius from the upper 32 bits.
__device__ __forceinline__ int random_integer(u64 word, u32 radius) {
    return int(((word >> 32) * (2 * radius + 1)) >> 32) - int(radius);
}

constexpr u32 EXACT_RADIUS = 15;
constexpr u32 EXACT_RADIUS_E4M3 = 2;

__device__ __forceinline__ u32 f16_bits(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ float f16_value(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// The bits of one generated element, in the low bits of the word.
__device__ __forceinline__ u64 operand_bits(u32 type, u32 mode, u64 word) {
    if (mode == MODE_SIGN) {
        return type == TYPE_F64 ? (word & (u64(1) << 63)) | 0x3FF0000000000000ull
                                : ((word >> 32) & 0x80000000ull) | 0x3F800000ull;
    }
    if (type == TYPE_S8) {
        return word >> 56;
    }
    if (mode == MODE_RANDOM) {
        switch (type) {
            case TYPE_F64: return random_pattern(word, 52, 1023, 64);
            case TYPE_F32: return random_pattern(word, 23, 127, 32);
            case TYPE_TF32: return random_pattern(word, 10, 127, 19) << 13;
            case TYPE_BF16: return random_pattern(word, 7, 127, 16);
            case TYPE_F16: return random_pattern(word, 10, 15, 16);
            default: return random_pattern(word, 3, 7, 8);
        }
    }
    const int integer = random_integer(word, type == TYPE_E4M3 ? EXACT_RADIUS_E4M3 : EXACT_RADIUS);
    switch (type) {
        case TYPE_F64: return u64(__double_as_longlong(double((long long)(word >> 44) - (1ll << 19))));
        case TYPE_BF16: return __float_as_uint(float(integer)) >> 16;
        case TYPE_F16: return f16_bits(float(integer));
        // 0, 1 and 2 in E4M3: exponent 7 is 2^0.
        case TYPE_E4M3: return integer == 0 ? 0 : (integer < 0 ? 0x80u : 0u) | ((integer & 1) != 0 ? 0x38u : 0x40u);
        default: return __float_as_uint(float(integer));
    }
}

__device__ __forceinline__ u32 operand_bytes(u32 type) {
    switch (type) {
        case TYPE_F64: return 8;
        case TYPE_BF16:
        case TYPE_F16: return 2;
        case TYPE_E4M3:
        case TYPE_S8: return 1;
        default: return 4;
    }
}

// E4M3 (finite only, as OCP's FP8): 0x7F and 0xFF are NaN.
__device__ __forceinline__ double e4m3_value(u8 bits) {
    const u32 exponent = (bits >> 3) & 15;
    const u32 mantissa = bits & 7;
    if ((bits & 0x7F) == 0x7F) {
        return __longlong_as_double(0x7FF8000000000000ll);
    }
    const double magnitude = exponent == 0 ? double(mantissa) / 512.0
                                           : double(8 + mantissa) * __longlong_as_double((long long)(exponent + 1013) << 52);
    return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

// Element `index` of a matrix as FP64; every type converts exactly.
__device__ __forceinline__ double element_value(const void* matrix, u64 index, u32 type) {
    switch (type) {
        case TYPE_F64: return static_cast<const double*>(matrix)[index];
        case TYPE_F32:
        case TYPE_TF32: return double(static_cast<const float*>(matrix)[index]);
        case TYPE_BF16: return double(__uint_as_float(u32(static_cast<const u16*>(matrix)[index]) << 16));
        case TYPE_F16: return double(f16_value(static_cast<const u16*>(matrix)[index]));
        case TYPE_E4M3: return e4m3_value(static_cast<const u8*>(matrix)[index]);
        case TYPE_S8: return double(static_cast<const signed char*>(matrix)[index]);
        default: return double(static_cast<const int*>(matrix)[index]);
    }
}
