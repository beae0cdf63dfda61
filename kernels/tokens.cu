// token_ids, lookup: tokens as numbers, and rows of tables by computed ids; src/ops/tokens.rs has the definitions.
#include "common/math.cuh"
#include "formats/panel.cuh"

struct TokenIdsArgs {
    View y;
    const Batch* batch;
};

// Grid: (rows / threads).
KERNEL_OF(128, token_ids, TokenIdsArgs) {
    begin();
    u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < *a.y.rows) row_at(a.y, row)[0] = (float)a.batch->tokens[row];
}

struct LookupArgs {
    View ids, y;
    Part part;
    // Rows of `part.cols`, instead of the part's panels; or null.
    const float* vector;
    // First of the ids.
    u32 column, spare;
};

// Grid: (rows, ids, columns / threads). Ids of other parts are left to those.
KERNEL_OF(128, lookup, LookupArgs) {
    begin();
    u32 row = blockIdx.x, i = blockIdx.z * blockDim.x + threadIdx.x, cols = a.part.cols;
    if (row >= *a.y.rows || i >= cols) return;
    u32 id = bits_of(row_at(a.ids, row)[a.column + blockIdx.y]);
    if (id < a.part.first || id - a.part.first >= a.part.rows) return;
    id -= a.part.first;
    row_at(a.y, row)[blockIdx.y * cols + i] = a.vector ? a.vector[(u64)id * cols + i] : element_of(a.part, panel_at(a.part, id / 16), id % 16, i);
}
