// position_scale: y = x * (1 + beta ln(1 + floor(position / original))); src/ops/position_scale.rs.
#include "common/rows.cuh"

struct PositionScaleArgs {
    View x, y;
    const Batch* batch;
    float beta;
    u32 original;
};

// Grid: (rows, columns / (4 threads)).
KERNEL_OF(256, position_scale, PositionScaleArgs) {
    u32 row = blockIdx.x, rows = *a.y.rows;
    begin();
    if (row >= rows) return;
    const float* x = row_at(a.x, row);
    float* y = row_at(a.y, row);
    u32 turns = a.batch->positions[row] / a.original;
    float factor = turns ? (float)(1.0 + (double)a.beta * log(1.0 + (double)turns)) : 1.0f;
    each_column(a.y.width, [&](u32 i) { return x[i] * factor; }, [&](u32 i, float v) { y[i] = v; });
}
