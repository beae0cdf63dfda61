// softcap: y = cap tanh(x / cap); src/ops/softcap.rs.
#include "common/rows.cuh"

struct SoftcapArgs {
    View x, y;
    float cap;
    u32 spare;
};

// Grid: (rows, columns / (4 threads)).
KERNEL_OF(256, softcap_rows, SoftcapArgs) {
    u32 row = blockIdx.x, rows = *a.y.rows;
    begin();
    if (row >= rows) return;
    const float* x = row_at(a.x, row);
    float* y = row_at(a.y, row);
    each_column(a.y.width, [&](u32 i) { return a.cap * tanhf(x[i] / a.cap); }, [&](u32 i, float v) { y[i] = v; });
}
