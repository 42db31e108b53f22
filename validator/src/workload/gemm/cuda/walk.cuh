// The order in which tiles of the result are computed.
#pragma once

#include "strip.cuh"

// Bands of `BAND` tile rows, each walked column by column, so that the operands of the tiles in flight stay in L2.
template <u32 BAND>
struct Walk {
    u32 rows;
    u32 columns;

    __device__ __forceinline__ u32 count() const { return rows * columns; }

    __device__ __forceinline__ void place(u32 index, u32& row, u32& column) const {
        const u32 band = index / (BAND * columns);
        const u32 inside = index % (BAND * columns);
        const u32 rows_left = rows - band * BAND;
        const u32 band_rows = rows_left < BAND ? rows_left : BAND;
        row = band * BAND + inside % band_rows;
        column = inside / band_rows;
    }
};
