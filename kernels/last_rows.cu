// last_rows: the last row of each sequence; src/ops/last_rows.rs.
#include "common/rows.cuh"

struct LastRowsArgs {
    View x, y;
    const Batch* batch;
};

// Grid: (segments, columns / (4 threads)).
KERNEL_OF(256, last_rows, LastRowsArgs) {
    u32 segment = blockIdx.x, segments = *a.y.rows;
    begin();
    if (segment >= segments) return;
    const float* x = row_at(a.x, a.batch->last_row[segment]);
    float* y = row_at(a.y, segment);
    each_column(a.y.width, [&](u32 i) { return x[i]; }, [&](u32 i, float v) { y[i] = v; });
}
