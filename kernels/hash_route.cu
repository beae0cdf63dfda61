// hash_route: experts by token; src/ops/hash_route.rs has the definition.
#include "common/math.cuh"
#include "formats/panel.cuh"

struct HashRouteArgs {
    View logits, y;
    const Batch* batch;
    Part part;
    // Rows of `part.cols`, instead of the part's panels; or null.
    const float* vector;
    u32 normalize;
    float scale;
};

// Grid: (rows / threads). Tokens of other parts are left to those.
KERNEL_OF(64, hash_route, HashRouteArgs) {
    begin();
    u32 row = blockIdx.x * blockDim.x + threadIdx.x, top_k = a.part.cols;
    if (row >= *a.y.rows) return;
    u32 token = (u32)a.batch->tokens[row] - a.part.first;
    if (token >= a.part.rows) return;
    const float* logits = row_at(a.logits, row);
    float* y = row_at(a.y, row);
    float total = 0.0f;
    for (u32 k = 0; k < top_k; k++) {
        float id = a.vector ? a.vector[(u64)token * top_k + k] : element_of(a.part, panel_at(a.part, token / 16), token % 16, k);
        u32 expert = least((u32)largest(id, 0.0f), a.logits.width - 1);
        y[k] = (float)expert;
        y[top_k + k] = root(softplus(logits[expert]));
        total += y[top_k + k];
    }
    total = a.normalize ? total + 1e-20f : 1.0f;
    for (u32 k = 0; k < top_k; k++) y[top_k + k] = over(y[top_k + k], total) * a.scale;
}
