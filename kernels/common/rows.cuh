// Rows and columns of values, as elementwise kernels walk over them.
#pragma once
#include "frame.cuh"

DEVICE float* row_at(const View& v, u32 row) { return v.data + (u64)row * v.stride; }
DEVICE Q8Block* row_at(const Q8View& v, u32 row) { return v.data + (u64)row * v.stride; }

// The word of columns `column` (even) and the next of a row that is laid for products.
DEVICE u32* word_at(const View& v, u32 row, u32 column) {
    if (v.words == View::FOR_GROUPS) {
        u64 atom = (u64)(column / 64) * v.tiles + row / 8;
        return (u32*)v.data + atom * 256 + row % 8 * 32 + (column / 8 % 8 ^ row % 8) * 4 + column / 2 % 4;
    }
    u32 tile = row / 8, within = row % 8 * 4 + column / 2 % 4, half = column / 8 % 2;
    u64 step = column / 16;
    if (v.tiles == 1) return (u32*)v.data + (step * 32 + within) * 2 + half;
    return (u32*)v.data + ((step * (v.tiles / 2) + tile / 2) * 32 + within) * 4 + tile % 2 * 2 + half;
}
// Two columns of a row, `column` even.
DEVICE void store_pair(const View& y, u32 row, u32 column, float v0, float v1) {
    if (y.tiles) {
        *word_at(y, row, column) = pair_bf16(v0, v1);
    } else {
        float* to = row_at(y, row) + column;
        to[0] = v0, to[1] = v1;
    }
}
// A column of a row. Where rows are words, whole warps call this, with columns side by side from an even one on.
DEVICE void store_one(const View& y, u32 row, u32 column, float v) {
    if (!y.tiles) {
        row_at(y, row)[column] = v;
        return;
    }
    float next = shuffle_xor(v, 1u);
    if (column % 2 == 0) *word_at(y, row, column) = pair_bf16(v, next);
}

// A product's two parts as a gate and what it is multiplied with, both of as many rows; neither with `on` 0.
struct Gating {
    u32 on;
    // The gate's activation, x sigmoid(linear x + cubic x^3).
    float linear, cubic;
    DEVICE float operator()(float gate, float up) const {
        const float LOG2_E = 1.4426950408889634f;
        return gate * up * reciprocal(1.0f + power_of_two(-LOG2_E * gate * fused(cubic, gate * gate, linear)));
    }
};

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
