// norm: y = norm(x) over each run of `group` elements of a row; src/ops/norm.rs has the definition.
#include "common/rows.cuh"

struct NormArgs {
    View x, y;
    // Null for 1 and 0; index `column % *_len`.
    const float* weight;
    const float* bias;
    u32 weight_len, bias_len;
    u32 group;
    // 1: mean and variance; 0: mean square.
    u32 layer;
    float eps;
    u32 spare;
};

// Elements that a thread keeps; longer groups are read again.
static const u32 KEPT = 16;

// Grid: (rows, groups of a row); a block norms one group.
KERNEL_OF(256, norm, NormArgs) {
    SHARED float scratch[32];
    u32 row = blockIdx.x, start = blockIdx.y * a.group, rows = *a.x.rows, step = blockDim.x;
    // Weights are on their way before the kernels before have ended.
    float weight[KEPT], kept[KEPT];
#pragma unroll
    for (u32 j = 0; j < KEPT; j++) {
        u32 i = threadIdx.x + j * step;
        weight[j] = a.weight && i < a.group ? a.weight[(start + i) % a.weight_len] : 1.0f;
    }
    begin();
    if (row >= rows) return;
    const float* x = a.x.data + (u64)row * a.x.stride + start;
#pragma unroll
    for (u32 j = 0; j < KEPT; j++) {
        u32 i = threadIdx.x + j * step;
        kept[j] = i < a.group ? x[i] : 0.0f;
    }
    u32 rest = threadIdx.x + KEPT * step;
    float mean = 0.0f;
    if (a.layer) {
        float sum = 0.0f;
#pragma unroll
        for (u32 j = 0; j < KEPT; j++) sum += kept[j];
        for (u32 i = rest; i < a.group; i += step) sum += x[i];
        mean = block_sum(sum, scratch) / (float)a.group;
    }
    float squares = 0.0f;
#pragma unroll
    for (u32 j = 0; j < KEPT; j++) {
        float v = threadIdx.x + j * step < a.group ? kept[j] - mean : 0.0f;
        squares = fused(v, v, squares);
    }
    for (u32 i = rest; i < a.group; i += step) squares = fused(x[i] - mean, x[i] - mean, squares);
    float factor = 1.0f / root(block_sum(squares, scratch) / (float)a.group + a.eps);
#pragma unroll
    for (u32 j = 0; j < KEPT; j++) {
        u32 i = threadIdx.x + j * step;
        if (i >= a.group) break;
        float v = (kept[j] - mean) * factor;
        if (a.weight) v *= weight[j];
        store_one(a.y, row, start + i, a.bias ? v + a.bias[(start + i) % a.bias_len] : v);
    }
    for (u32 i = rest; i < a.group; i += step) {
        float v = (x[i] - mean) * factor;
        if (a.weight) v *= a.weight[(start + i) % a.weight_len];
        if (a.bias) v += a.bias[(start + i) % a.bias_len];
        store_one(a.y, row, start + i, v);
    }
}
