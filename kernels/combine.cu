// combine: the weighted sum of a row's experts, and the shared expert beside it; src/ops/combine.rs has the definition.
#include "common/math.cuh"

struct CombineArgs {
    View x, route;
    // Not connected where there is none.
    View shared, gate, identity;
    View y;
    u32 experts, spare;
};

// Grid: (rows, columns / threads); a thread sums one column, slots in order.
KERNEL_OF(256, combine, CombineArgs) {
    begin();
    u32 row = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= *a.y.rows || i >= a.y.width) return;
    u32 slots = a.route.width / 2;
    const float* route = row_at(a.route, row);
    const float* x = row_at(a.x, row);
    float sum = 0.0f;
    for (u32 slot = 0; slot < slots; slot++) {
        float w = route[slots + slot];
        if ((u32)route[slot] < a.experts) sum = fused(w, x[(u64)slot * a.y.width + i], sum);
        else if (a.identity.data) sum = fused(w, row_at(a.identity, row)[i], sum);
    }
    if (a.shared.data) {
        float g = a.gate.data ? sigmoid(row_at(a.gate, row)[0]) : 1.0f;
        sum = fused(g, row_at(a.shared, row)[i], sum);
    }
    row_at(a.y, row)[i] = sum;
}
