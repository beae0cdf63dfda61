// scale_by: a stored factor, one or one for each column; src/ops/scale_by.rs.
#include "common/rows.cuh"

struct ScaleByArgs {
    View x, y;
    const float* factor;
    u32 factors, spare;
};

// Grid: (rows, columns / (4 threads)).
KERNEL_OF(256, scale_by, ScaleByArgs) {
    u32 row = blockIdx.x, rows = *a.y.rows;
    begin();
    if (row >= rows) return;
    const float* x = row_at(a.x, row);
    float* y = row_at(a.y, row);
    each_column(a.y.width, [&](u32 i) { return a.factor[a.factors == 1 ? 0 : i] * x[i]; }, [&](u32 i, float v) { y[i] = v; });
}
