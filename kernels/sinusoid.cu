// sinusoid: positions added as sines and cosines; src/ops/sinusoid.rs.
#include "common/rows.cuh"

struct SinusoidArgs {
    View x, y;
    const Batch* batch;
    const float* frequencies;
    u32 offset, spare;
};

// Grid: (rows, columns / (4 threads)). Angles are rounded to f32 first, as the reference does.
KERNEL_OF(256, sinusoid, SinusoidArgs) {
    u32 row = blockIdx.x, rows = *a.y.rows;
    begin();
    if (row >= rows) return;
    const float* x = row_at(a.x, row);
    float* y = row_at(a.y, row);
    float position = (float)(a.batch->positions[row] + a.offset);
    u32 half = a.y.width / 2;
    each_column(a.y.width, [&](u32 i) {
        float v = x[i];
        if (i < half) v += (float)sin((double)times(position, a.frequencies[i]));
        else if (i < 2 * half) v += (float)cos((double)times(position, a.frequencies[i - half]));
        y[i] = v;
    });
}
