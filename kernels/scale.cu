// scale: a constant factor; src/ops/scale.rs.
#include "common/rows.cuh"

struct ScaleArgs {
    View x, y;
    float factor;
    u32 spare;
};

// Grid: (rows, columns / (4 threads)).
KERNEL_OF(256, scale_rows, ScaleArgs) {
    u32 row = blockIdx.x, rows = *a.y.rows;
    begin();
    if (row >= rows) return;
    const float* x = row_at(a.x, row);
    float* y = row_at(a.y, row);
    each_column(a.y.width, [&](u32 i) { return a.factor * x[i]; }, [&](u32 i, float v) { y[i] = v; });
}
