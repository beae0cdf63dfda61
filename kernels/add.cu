// add: y = a + b, alone or with the RMS norm that follows; src/ops/add.rs has the definitions.
#include "common/rows.cuh"

struct AddArgs {
    View a, b, y;
};

// Grid: (rows, columns / (4 threads)).
KERNEL_OF(256, add_rows, AddArgs) {
    u32 row = blockIdx.x, rows = *a.y.rows;
    begin();
    if (row >= rows) return;
    const float* x0 = row_at(a.a, row);
    const float* x1 = row_at(a.b, row);
    float* y = row_at(a.y, row);
    each_column(a.y.width, [&](u32 i) { y[i] = x0[i] + x1[i]; });
}

struct AddNormArgs {
    View a, b, sum, y;
    const float* weight;
    float eps;
    u32 spare;
};

// Elements of a row that a thread keeps while the row is summed; longer rows are read again.
static const u32 KEPT = 8;

// Grid: (rows); a block takes a row.
KERNEL_OF(1024, add_norm, AddNormArgs) {
    SHARED float scratch[33];
    u32 row = blockIdx.x, rows = *a.y.rows;
    begin();
    if (row >= rows) return;
    const float* x0 = row_at(a.a, row);
    const float* x1 = row_at(a.b, row);
    float* total = row_at(a.sum, row);
    float* y = row_at(a.y, row);
    u32 width = a.y.width, step = blockDim.x;
    float kept[KEPT], squares = 0.0f;
#pragma unroll
    for (u32 j = 0; j < KEPT; j++) {
        u32 i = threadIdx.x + j * step;
        kept[j] = i < width ? x0[i] + x1[i] : 0.0f;
        if (i < width) total[i] = kept[j];
        squares = fused(kept[j], kept[j], squares);
    }
    for (u32 i = threadIdx.x + KEPT * step; i < width; i += step) {
        float v = x0[i] + x1[i];
        total[i] = v;
        squares = fused(v, v, squares);
    }
    float factor = 1.0f / root(block_sum(squares, scratch) / (float)width + a.eps);
#pragma unroll
    for (u32 j = 0; j < KEPT; j++) {
        u32 i = threadIdx.x + j * step;
        if (i < width) y[i] = kept[j] * factor * a.weight[i];
    }
    for (u32 i = threadIdx.x + KEPT * step; i < width; i += step) y[i] = total[i] * factor * a.weight[i];
}
