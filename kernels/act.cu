// act: y = act(gate) * up; src/ops/act.rs has the definitions.
#include "common/activation.cuh"

struct ActMulArgs {
    View gate;
    // Not connected where the activation stands alone.
    View up;
    View y;
    Activation act;
    // `limit` bounds, or `beta` of Situ; `slope` is alpha, or Situ's bound of `up`.
    float limit, slope;
    u32 spare;
};

// Grid: (rows, columns / (4 threads)).
KERNEL_OF(256, act_mul, ActMulArgs) {
    u32 row = blockIdx.x, rows = *a.y.rows;
    begin();
    if (row >= rows) return;
    const float* up = a.up.data ? row_at(a.up, row) : nullptr;
    each_activated(a.act, row_at(a.gate, row), up, a.y.width, a.limit, a.slope, [&](u32 i, float v) { store_one(a.y, row, i, v); });
}
