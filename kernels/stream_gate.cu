// stream_gate: a value as each residual stream's gate lets it through; src/ops/stream_gate.rs has the definition.
#include "common/math.cuh"

struct StreamGateArgs {
    View key, query, value, y;
};

// Grid: (rows, streams).
KERNEL_OF(256, stream_gate, StreamGateArgs) {
    begin();
    SHARED double scratch[33];
    u32 row = blockIdx.x, width = a.value.width, first = blockIdx.y * width;
    if (row >= *a.y.rows) return;
    const float* key = row_at(a.key, row) + first;
    const float* query = row_at(a.query, row) + first;
    const float* value = row_at(a.value, row);
    double dot = 0.0;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) dot += (double)key[i] * query[i];
    dot = block_sum(dot, scratch) / sqrt((double)width);
    // The root of what is at least 1e-6, except for 0 itself, with the sign that it had.
    double size = dot < 0.0 ? -dot : dot, root = dot == 0.0 ? 0.0 : sqrt(size < 1e-6 ? 1e-6 : size);
    float factor = (float)sigmoid(dot < 0.0 ? -root : root);
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) row_at(a.y, row)[first + i] = factor * value[i];
}
