// hyper_mix, hyper_collapse, hyper_expand: residual streams held to doubly stochastic mixing; src/ops/hyper.rs has the definitions.
#include "common/math.cuh"

static const u32 STREAMS = 8;

struct HyperMixArgs {
    View m, y;
    const float* scale;
    const float* base;
    u32 streams, rounds;
    float eps;
    u32 spare;
};

// Grid: (rows / threads). A thread mixes a row, in f64: few numbers, many divisions.
KERNEL_OF(32, hyper_mix, HyperMixArgs) {
    begin();
    u32 row = blockIdx.x * blockDim.x + threadIdx.x, h = a.streams;
    if (row >= *a.m.rows) return;
    const float* m = row_at(a.m, row);
    float* y = row_at(a.y, row);
    double eps = a.eps;
    for (u32 i = 0; i < least(2 * h, a.m.width); i++) {
        double x = sigmoid((double)m[i] * a.scale[i / h] + a.base[i]);
        y[i] = (float)(i < h ? x + eps : 2.0 * x);
    }
    if (a.m.width == h) return;
    double comb[STREAMS * STREAMS];
    for (u32 j = 0; j < h; j++) {
        double* line = comb + j * STREAMS;
        double top = -1e300, total = 0.0;
        for (u32 k = 0; k < h; k++) {
            u32 i = 2 * h + j * h + k;
            line[k] = (double)m[i] * a.scale[2] + a.base[i];
            top = line[k] > top ? line[k] : top;
        }
        for (u32 k = 0; k < h; k++) total += line[k] = exp(line[k] - top);
        for (u32 k = 0; k < h; k++) line[k] = line[k] / total + eps;
    }
    for (u32 round = 0; round < a.rounds; round++) {
        for (u32 j = 0; j < h && round > 0; j++) {
            double total = 0.0;
            for (u32 k = 0; k < h; k++) total += comb[j * STREAMS + k];
            for (u32 k = 0; k < h; k++) comb[j * STREAMS + k] /= total + eps;
        }
        for (u32 k = 0; k < h; k++) {
            double total = 0.0;
            for (u32 j = 0; j < h; j++) total += comb[j * STREAMS + k];
            for (u32 j = 0; j < h; j++) comb[j * STREAMS + k] /= total + eps;
        }
    }
    for (u32 i = 0; i < h * h; i++) y[2 * h + i] = (float)comb[i / h * STREAMS + i % h];
}

struct HyperCollapseArgs {
    // `pre` is not connected for the mean.
    View x, pre, y;
    u32 streams, spare;
};

// Grid: (rows, columns / threads).
KERNEL_OF(256, hyper_collapse, HyperCollapseArgs) {
    begin();
    u32 row = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= *a.y.rows || i >= a.y.width) return;
    const float* x = row_at(a.x, row);
    float sum = 0.0f;
    for (u32 c = 0; c < a.streams; c++) {
        float pre = a.pre.data ? row_at(a.pre, row)[c] : 1.0f / (float)a.streams;
        sum = fused(pre, x[c * a.y.width + i], sum);
    }
    row_at(a.y, row)[i] = sum;
}

struct HyperExpandArgs {
    // `x` and `mix` are not connected where streams begin.
    View out, x, mix, y;
    u32 streams, spare;
};

// Grid: (rows, columns of a stream / threads); a thread writes its column of every stream.
KERNEL_OF(256, hyper_expand, HyperExpandArgs) {
    begin();
    u32 row = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x, h = a.streams, width = a.out.width;
    if (row >= *a.y.rows || i >= width) return;
    float out = row_at(a.out, row)[i];
    float* y = row_at(a.y, row);
    if (!a.mix.data) {
        for (u32 k = 0; k < h; k++) y[k * width + i] = out;
        return;
    }
    const float* mix = row_at(a.mix, row);
    const float* x = row_at(a.x, row);
    float held[STREAMS];
    for (u32 j = 0; j < STREAMS; j++) held[j] = j < h ? x[j * width + i] : 0.0f;
    for (u32 k = 0; k < h; k++) {
        float sum = mix[h + k] * out;
        for (u32 j = 0; j < STREAMS; j++) {
            if (j < h) sum = fused(mix[2 * h + j * h + k], held[j], sum);
        }
        y[k * width + i] = sum;
    }
}
