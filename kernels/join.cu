// join: one part's columns into their place of y; src/ops/join.rs.
#include "common/rows.cuh"

struct JoinArgs {
    View x, y;
    // Column of y where x begins.
    u32 first, spare;
};

// Grid: (rows, columns of x / (4 threads)).
KERNEL_OF(256, join_part, JoinArgs) {
    u32 row = blockIdx.x, rows = *a.y.rows;
    begin();
    if (row >= rows) return;
    const float* x = row_at(a.x, row);
    float* y = row_at(a.y, row) + a.first;
    each_column(a.x.width, [&](u32 i) { return x[i]; }, [&](u32 i, float v) { y[i] = v; });
}
