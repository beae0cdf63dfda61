// head_gate: one activated factor for each head; src/ops/head_gate.rs has the definition.
#include "common/activation.cuh"
#include "common/rows.cuh"

struct HeadGateArgs {
    View gate, x, y;
    // See ActMulArgs.
    Activation act;
    float limit, slope;
    u32 spare;
};

// Grid: (rows, columns / threads).
KERNEL_OF(256, head_gate, HeadGateArgs) {
    begin();
    u32 row = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= *a.y.rows || i >= a.y.width) return;
    float gate = row_at(a.gate, row)[i / (a.x.width / a.gate.width)];
    row_at(a.y, row)[i] = activated(a.act, gate, a.limit, a.slope) * row_at(a.x, row)[i];
}
