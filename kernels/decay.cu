// decay: the forget gate of gated delta rules; src/ops/decay.rs has the definition.
#include "common/math.cuh"

struct DecayArgs {
    View x, y;
    const float* a_log;
    const float* bias;
    // Elements of a head.
    u32 gates, negated;
    // 0 for none.
    float floor;
    u32 spare;
};

// Grid: (rows, columns / threads).
KERNEL_OF(256, decay, DecayArgs) {
    begin();
    u32 row = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= *a.y.rows || i >= a.y.width) return;
    float stored = a.a_log[i / a.gates];
    float rate = a.negated ? -stored : expf(stored);
    float x = row_at(a.x, row)[i] + a.bias[i];
    row_at(a.y, row)[i] = a.floor == 0.0f ? expf(-rate * softplus(x)) : expf(a.floor / (1.0f + expf(-rate * x)));
}
