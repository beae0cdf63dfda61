// add: y = a + b, alone or with the RMS norm that follows; src/ops/add.rs has the definitions.
#include "common/add_norm.cuh"

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
    each_column(a.y.width, [&](u32 i) { return x0[i] + x1[i]; }, [&](u32 i, float v) { y[i] = v; });
}

struct AddNormArgs {
    View a, b, sum, y;
    const float* weight;
    float eps;
    u32 spare;
};

// Grid: (rows, blocks that share a row).
KERNEL_OF(1024, add_norm, AddNormArgs) {
    SHARED float scratch[32];
    u32 row = blockIdx.x, rows = *a.y.rows;
    NormWeights w = norm_weights(a.weight, a.y.width);
    begin();
    if (row >= rows) return;
    add_and_norm(row_at(a.a, row), row_at(a.b, row), row_at(a.sum, row), a.weight, w, a.y.width, a.eps, scratch, [&](u32 i, float v) { store_one(a.y, row, i, v); });
}
