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

// Grid: (rows, groups of a row); a block norms one group.
KERNEL_OF(256, norm, NormArgs) {
    SHARED float scratch[33];
    u32 row = blockIdx.x, start = blockIdx.y * a.group, rows = *a.x.rows;
    begin();
    if (row >= rows) return;
    const float* x = a.x.data + (u64)row * a.x.stride + start;
    float* y = a.y.data + (u64)row * a.y.stride + start;
    float mean = 0.0f;
    if (a.layer) {
        float sum = 0.0f;
        for (u32 i = threadIdx.x; i < a.group; i += blockDim.x) sum += x[i];
        mean = block_sum(sum, scratch) / (float)a.group;
    }
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < a.group; i += blockDim.x) squares = fused(x[i] - mean, x[i] - mean, squares);
    float factor = 1.0f / root(block_sum(squares, scratch) / (float)a.group + a.eps);
    for (u32 i = threadIdx.x; i < a.group; i += blockDim.x) {
        float v = (x[i] - mean) * factor;
        if (a.weight) v *= a.weight[(start + i) % a.weight_len];
        if (a.bias) v += a.bias[(start + i) % a.bias_len];
        y[i] = v;
    }
}
