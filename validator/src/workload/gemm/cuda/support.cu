// Everything around the products: operands, checksums, the comparison that names elements, Freivalds' check, and the
// injected fault. Not fast paths; each is bound by memory.

#include "checksum.cuh"
#include "operand.cuh"

// Fills `elements` elements of `type`; `out` is aligned to 8 bytes and its size is a multiple of 8 bytes.
extern "C" __global__ void __launch_bounds__(256)
    generate_operand(u64* out, u64 elements, u64 seed, u32 type, u32 mode) {
    const u32 bytes = operand_bytes(type);
    const u32 per_word = 8 / bytes;
    const u64 words = elements / per_word;
    for (u64 word = u64(blockIdx.x) * blockDim.x + threadIdx.x; word < words; word += u64(gridDim.x) * blockDim.x) {
        u64 packed = 0;
        for (u32 i = 0; i < per_word; ++i) {
            packed |= operand_bits(type, mode, random_word(seed, word * per_word + i)) << (8 * bytes * i);
        }
        out[word] = packed;
    }
}

// Reads a result of `rows` x `words` 32-bit words and, strip by strip, either writes its checksums (`report` null) or
// compares them with `checksums`. One warp a strip.
extern "C" __global__ void __launch_bounds__(256)
    verify_strips(const u32* result, u32 rows, u32 words, u32 kind, u64* checksums, u64* nonfinite_count,
                  Report* report, u32 sweep) {
    const u32 lane = threadIdx.x % 32;
    const StripWeights weights(lane);
    const u32 columns = words / STRIP_WORDS;
    const u64 strips = u64(rows / STRIP_ROWS) * columns;
    const u32 warps = gridDim.x * (blockDim.x / 32);
    u32 checked = 0;
    u32 nonfinite = 0;
    for (u64 strip = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; strip < strips; strip += warps) {
        const u32 row = u32(strip / columns) * STRIP_ROWS;
        const u32 word = u32(strip % columns) * STRIP_WORDS;
        const u64 got = strip_checksum<true>(result + u64(row) * words + word, words, lane, weights, kind, nonfinite);
        if (lane == 0) {
            ++checked;
            if (report == nullptr) {
                checksums[strip] = got;
            } else if (got != checksums[strip]) {
                atomicAdd(&report->mismatches, 1ull);
                add_record(report, row, word, sweep, own_sm(), checksums[strip], got);
            }
        }
    }
    if (nonfinite != 0) {
        atomicAdd(report == nullptr ? nonfinite_count : &report->nonfinite, u64(nonfinite));
    }
    if (report != nullptr && checked != 0) {
        atomicAdd(&report->checked, u64(checked));
    }
}

// Compares rows row0 .. row0 + rows, words word0 .. word0 + words of two results, element by element, and records
// those that differ or are not finite, with the SM that computed their tile where `tile_sm` tells.
extern "C" __global__ void __launch_bounds__(256)
    compare_elements(const u32* result, const u32* reference, u32 pitch_words, u32 row0, u32 rows, u32 word0, u32 words,
                     u32 kind, const u32* tile_sm, u32 tile_rows, u32 tile_words, Report* report, u32 sweep) {
    const u32 element_words = kind == KIND_F64 ? 2 : 1;
    const u32 columns = words / element_words;
    const u64 elements = u64(rows) * columns;
    u32 checked = 0;
    u32 mismatches = 0;
    u32 nonfinite = 0;
    for (u64 element = u64(blockIdx.x) * blockDim.x + threadIdx.x; element < elements;
         element += u64(gridDim.x) * blockDim.x) {
        const u32 row = row0 + u32(element / columns);
        const u32 word = word0 + u32(element % columns) * element_words;
        const u64 place = u64(row) * pitch_words + word;
        u64 got = __ldcs(result + place);
        u64 expected = __ldcs(reference + place);
        u32 top = u32(got);
        if (element_words == 2) {
            top = __ldcs(result + place + 1);
            got |= u64(top) << 32;
            expected |= u64(__ldcs(reference + place + 1)) << 32;
        }
        const u32 bad = count_nonfinite(top, 1, kind);
        ++checked;
        nonfinite += bad;
        if (got != expected || bad != 0) {
            ++mismatches;
            u32 sm = 0xFFFFFFFFu;
            if (tile_sm != nullptr) {
                sm = tile_sm[(row / tile_rows) * (pitch_words / tile_words) + word / tile_words];
            }
            add_record(report, row, word / element_words, sweep, sm, expected, got);
        }
    }
    atomicAdd(&report->checked, u64(checked));
    if (mismatches != 0) {
        atomicAdd(&report->mismatches, u64(mismatches));
    }
    if (nonfinite != 0) {
        atomicAdd(&report->nonfinite, u64(nonfinite));
    }
}

__device__ __forceinline__ double term(double element, double factor, u32 absolute) {
    return absolute != 0 ? fabs(element) * fabs(factor) : element * factor;
}

// y[row] = sum over columns of matrix[row][column] * x[column] in FP64; with `absolute`, of the absolute values.
// One warp a row.
extern "C" __global__ void __launch_bounds__(256)
    multiply_rows(const void* matrix, u32 type, u32 rows, u32 columns, const double* x, double* y, u32 absolute) {
    const u32 lane = threadIdx.x % 32;
    const u32 warps = gridDim.x * (blockDim.x / 32);
    for (u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; row < rows; row += warps) {
        double sum = 0.0;
        for (u32 column = lane; column < columns; column += 32) {
            sum += term(element_value(matrix, u64(row) * columns + column, type), x[column], absolute);
        }
        for (u32 offset = 16; offset != 0; offset /= 2) {
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
        }
        if (lane == 0) {
            y[row] = sum;
        }
    }
}

// y[column] = sum over rows of matrix[row][column] * x[row] in FP64; with `absolute`, of the absolute values.
// One thread a column.
extern "C" __global__ void __launch_bounds__(64)
    multiply_columns(const void* matrix, u32 type, u32 rows, u32 columns, const double* x, double* y, u32 absolute) {
    const u32 column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) {
        return;
    }
    double sum = 0.0;
#pragma unroll 8
    for (u32 row = 0; row < rows; ++row) {
        sum += term(element_value(matrix, u64(row) * columns + column, type), x[row], absolute);
    }
    y[column] = sum;
}

// Flips one bit of the word at `address`: the injected fault.
extern "C" __global__ void flip_bit(u32* address, u32 bit) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        atomicXor(address, 1u << bit);
    }
}
