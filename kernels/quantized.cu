// quantized: operations whose result only products of 8-bit activations read, written as such; src/ops/quantized.rs has the definitions.
#include "common/activation.cuh"
#include "common/add_norm.cuh"
#include "common/q8.cuh"

struct AddNormQuantizeArgs {
    View a, b, sum;
    Q8View y;
    const float* weight;
    float eps;
    u32 spare;
};

// Grid: (rows, blocks that share a row of a multiple of 32 elements); a warp has whole blocks of it.
KERNEL_OF(1024, add_norm_quantize, AddNormQuantizeArgs) {
    SHARED float scratch[32];
    u32 row = blockIdx.x, rows = *a.y.rows;
    NormWeights w = norm_weights(a.weight, a.y.width);
    begin();
    if (row >= rows) return;
    Q8Block* y = row_at(a.y, row);
    add_and_norm(row_at(a.a, row), row_at(a.b, row), row_at(a.sum, row), a.weight, w, a.y.width, a.eps, scratch,
                 [&](u32 i, float v) { quantize_block(v, y + i / 32); });
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
    const float* up = a.up.data ? row_at(a.up, row) : nullptr;
    Q8Block* y = row_at(a.y, row);
    each_activated(a.act, row_at(a.gate, row), up, a.y.width, a.limit, a.slope, [&](u32 i, float v) { quantize_block(v, y + i / 32); });
}
