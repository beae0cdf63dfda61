// pool_groups, group_rope_table: groups of positions as one row; src/ops/pool_groups.rs has the definitions.
#include "common/records.cuh"

struct PoolGroupsArgs {
    View y;
    const Batch* batch;
    // Null for none.
    const float* bias;
    // [value | gate] of each position; each has one series of `dim`, or two.
    Records source;
    u32 every, dim;
    u32 overlap, spare;
};

// Member `i` of a group: its gate and value in the series that begins at `column`.
DEVICE void pool_member(const PoolGroupsArgs& a, u8* const* pages, u32 group, u32 i, u32 column, float& gate, float& value) {
    u32 width = a.source.width / 2;
    Record record = record_of(a.source, pages, group * a.every + i);
    value = record_load(a.source, record, column);
    gate = record_load(a.source, record, width + column) + (a.bias ? a.bias[i * width + column] : 0.0f);
}

// Grid: (rows, columns / threads); a thread pools one element: the largest gate first, then the sums.
KERNEL_OF(128, pool_groups, PoolGroupsArgs) {
    begin();
    u32 row = blockIdx.x, d = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= *a.y.rows || d >= a.dim) return;
    u32 position = a.batch->positions[row];
    if ((position + 1) % a.every != 0) {
        row_at(a.y, row)[d] = 0.0f;
        return;
    }
    u8* const* pages = pages_of(*a.batch, a.batch->segment_of[row], a.source.kv);
    u32 group = position / a.every, before = a.overlap && group > 0 ? a.every : 0;
    float top = -infinite(), total = 0.0f, sum = 0.0f;
    for (u32 pass = 0; pass < 2; pass++) {
        for (u32 m = 0; m < before + a.every; m++) {
            float gate, value;
            if (m < before) pool_member(a, pages, group - 1, m, d, gate, value);
            else pool_member(a, pages, group, m - before, (a.overlap ? a.dim : 0) + d, gate, value);
            if (pass == 0) {
                top = largest(top, gate);
            } else {
                float weight = expf(gate - top);
                total += weight;
                sum = fused(weight, value, sum);
            }
        }
    }
    row_at(a.y, row)[d] = sum / total;
}

struct GroupRopeTableArgs {
    View y;
    const Batch* batch;
    const float* frequencies;
    float factor;
    u32 every;
};

// Grid: (rows, frequencies / threads). Angles go through f64: positions are large, and few of them are computed.
KERNEL_OF(128, group_rope_table, GroupRopeTableArgs) {
    begin();
    u32 row = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x, half = a.y.width / 2;
    if (row >= *a.y.rows || i >= half) return;
    float position = (float)(a.batch->positions[row] / a.every * a.every);
    double angle = (double)times(position, a.frequencies[i]);
    float* y = row_at(a.y, row);
    y[i] = (float)cos(angle) * a.factor;
    y[half + i] = (float)sin(angle) * a.factor;
}
