// residual_mix: attention over depth; src/ops/residual_mix.rs has the definition.
#include "common/math.cuh"

static const u32 MIX_SOURCES = 64;
struct ResidualMixArgs {
    View y;
    const float* query;
    const float* norm;
    u32 sources;
    float eps;
    View source[MIX_SOURCES];
};

// Grid: (rows); a block reads each source twice. Sums in f64: a softmax of dot products of long rows.
KERNEL_OF(256, residual_mix, ResidualMixArgs) {
    begin();
    SHARED double scratch[33];
    SHARED float weight[MIX_SOURCES];
    u32 row = blockIdx.x, width = a.y.width;
    if (row >= *a.y.rows) return;
    double scores[MIX_SOURCES];
    double top = -1e300, total = 0.0;
    for (u32 s = 0; s < a.sources; s++) {
        const float* x = row_at(a.source[s], row);
        double square = 0.0, dot = 0.0;
        for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
            square += (double)x[i] * x[i];
            dot += (double)x[i] * a.query[i] * a.norm[i];
        }
        square = block_sum(square, scratch);
        scores[s] = block_sum(dot, scratch) / sqrt(square / width + a.eps);
        top = scores[s] > top ? scores[s] : top;
    }
    for (u32 s = 0; s < a.sources; s++) total += scores[s] = exp(scores[s] - top);
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < a.sources; s++) weight[s] = (float)(scores[s] / total);
    }
    barrier();
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        float sum = 0.0f;
        for (u32 s = 0; s < a.sources; s++) sum = fused(weight[s], row_at(a.source[s], row)[i], sum);
        row_at(a.y, row)[i] = sum;
    }
}
