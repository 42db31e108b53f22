// What every kernel file shares: the report that verification fills, and how results are stored. KERNELS.md describes the
// report for the host.
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
