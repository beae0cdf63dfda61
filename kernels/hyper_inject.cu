// hyper_inject: a sublayer's output added to each residual stream by a weight; src/ops/hyper_inject.rs has the definition.
#include "common/math.cuh"

struct HyperInjectArgs {
    View out, x, weight, y;
};

// Grid: (rows, columns of all streams / threads).
KERNEL_OF(256, hyper_inject, HyperInjectArgs) {
    begin();
    u32 row = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= *a.y.rows || i >= a.y.width) return;
    float factor = 2.0f * sigmoid(row_at(a.weight, row)[i / a.out.width]);
    row_at(a.y, row)[i] = fused(factor, row_at(a.out, row)[i % a.out.width], row_at(a.x, row)[i]);
}
