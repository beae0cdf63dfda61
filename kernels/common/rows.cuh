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

// Calls `f` for the columns of this thread: of a grid (rows, columns / (4 threads)).
template <class F> DEVICE void each_column(u32 width, F f) {
    u32 first = blockIdx.y * blockDim.x * 4 + threadIdx.x;
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        u32 i = first + j * blockDim.x;
        if (i < width) f(i);
    }
}
