// expand_heads: [key | value] of each head apart, the shared key part behind each key; src/ops/expand_heads.rs has the definition.
#include "common/math.cuh"

struct ExpandHeadsArgs {
    // `shared` is not connected where there is none.
    View x, shared, k, v;
    u32 heads, key_dim, value_dim, spare;
};

// Grid: (rows, columns of k and v together / threads).
KERNEL_OF(256, expand_heads, ExpandHeadsArgs) {
    begin();
    u32 row = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= *a.x.rows || i >= a.k.width + a.v.width) return;
    const float* x = row_at(a.x, row);
    u32 own = a.key_dim + a.value_dim;
    if (i >= a.k.width) {
        i -= a.k.width;
        row_at(a.v, row)[i] = x[i / a.value_dim * own + a.key_dim + i % a.value_dim];
        return;
    }
    u32 wide = a.key_dim + a.shared.width, head = i / wide, d = i % wide;
    row_at(a.k, row)[i] = d < a.key_dim ? x[head * own + d] : row_at(a.shared, row)[d - a.key_dim];
}
