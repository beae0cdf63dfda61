// Rows and columns of values, as elementwise kernels walk over them.
#pragma once
#include "frame.cuh"

DEVICE float* row_at(const View& v, u32 row) { return v.data + (u64)row * v.stride; }
DEVICE Q8Block* row_at(const Q8View& v, u32 row) { return v.data + (u64)row * v.stride; }

// Lets the next kernel begin and waits for those before. What comes first may only read what no kernel writes: weights, numbers of rows.
DEVICE void begin() {
    let_next_begin();
    wait_for_before();
}

// Asks for `bytes` bytes to be brought into the second cache, by all threads of a block.
DEVICE void prefetch_lines(const u8* p, u32 bytes) {
    for (u32 i = threadIdx.x * 128; i < bytes; i += blockDim.x * 128) prefetch(p + i);
}

// Calls `f` for the columns of this thread: of a grid (rows, blocks), at least columns / (4 threads) of them.
template <class F> DEVICE void each_column(u32 width, F f) {
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        u32 i = (blockIdx.y + j * gridDim.y) * blockDim.x + threadIdx.x;
        if (i < width) f(i);
    }
}
// As each_column, `put(i, load(i))`: all loads are on their way before the first store, which might be to the same place for all a compiler knows.
template <class Load, class Put> DEVICE void each_column(u32 width, Load load, Put put) {
    decltype(load(0u)) v[4] = {};
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        u32 i = (blockIdx.y + j * gridDim.y) * blockDim.x + threadIdx.x;
        if (i < width) v[j] = load(i);
    }
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        u32 i = (blockIdx.y + j * gridDim.y) * blockDim.x + threadIdx.x;
        if (i < width) put(i, v[j]);
    }
}
