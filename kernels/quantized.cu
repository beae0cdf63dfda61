// quantized: operations whose result only products of 8-bit activations read, written as such; src/ops/quantized.rs has the definitions.
#include "common/activation.cuh"
#include "common/q8.cuh"
#include "common/rows.cuh"

struct AddNormQuantizeArgs {
    View a, b, sum;
    Q8View y;
    const float* weight;
    float eps;
    u32 spare;
};

// Elements of a row that a thread keeps while the row is summed; longer rows are read again.
static const u32 KEPT = 8;

// Grid: (rows); a block takes a row, of a multiple of 32 elements; a warp has whole blocks of it.
KERNEL_OF(1024, add_norm_quantize, AddNormQuantizeArgs) {
    SHARED float scratch[33];
    u32 row = blockIdx.x, rows = *a.y.rows;
    begin();
    if (row >= rows) return;
    const float* x0 = row_at(a.a, row);
    const float* x1 = row_at(a.b, row);
    float* total = row_at(a.sum, row);
    Q8Block* y = row_at(a.y, row);
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
        if (i < width) quantize_block(kept[j] * factor * a.weight[i], y + i / 32);
    }
    for (u32 i = threadIdx.x + KEPT * step; i < width; i += step) quantize_block(total[i] * factor * a.weight[i], y + i / 32);
}

struct ActQuantizeArgs {
    View gate;
    // Not connected where the activation stands alone.
    View up;
    Q8View y;
    Activation act;
    float limit, slope;
    u32 spare;
};

// Grid: (rows, columns / (4 threads)), of a multiple of 32 columns.
KERNEL_OF(256, act_quantize, ActQuantizeArgs) {
    u32 row = blockIdx.x, rows = *a.y.rows;
    begin();
    if (row >= rows) return;
    const float* gate = row_at(a.gate, row);
    const float* up = a.up.data ? row_at(a.up, row) : nullptr;
    Q8Block* y = row_at(a.y, row);
    each_column(a.y.width, [&](u32 i) {
        float v = activated(a.act, gate[i], a.limit, a.slope);
        quantize_block(up ? v * other_factor(a.act, up[i], a.limit, a.slope) : v, y + i / 32);
    });
}
