// mean_groups: the mean of the records of a group of positions; src/ops/mean_groups.rs has the definition.
#include "common/records.cuh"

struct MeanGroupsArgs {
    View y;
    const Batch* batch;
    Records source;
    // Positions of a group.
    u32 every, spare;
};

// Grid: (rows, columns / threads).
KERNEL_OF(256, mean_groups, MeanGroupsArgs) {
    begin();
    u32 row = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= *a.y.rows || i >= a.y.width) return;
    u32 end = a.batch->positions[row] + 1;
    float sum = 0.0f;
    if (end % a.every == 0) {
        u8* const* pages = pages_of(*a.batch, a.batch->segment_of[row], a.source.kv);
        for (u32 p = end - a.every; p < end; p++) sum += record_load(a.source, record_of(a.source, pages, p), i);
    }
    row_at(a.y, row)[i] = sum / (float)a.every;
}
