// heads: norms and rotation of a row's queries and keys, and its keys and values into their page; src/ops/heads.rs has the definition.
#include "common/rows.cuh"

struct HeadsArgs {
    View q, k, v, table, y;
    const Batch* batch;
    // Null for no norm; index `column % *_len`.
    const float* q_norm;
    const float* k_norm;
    Kv kv;
    u32 q_len, k_len;
    float q_eps, k_eps;
    u32 heads, head_dim;
    // 1: elements 2i and 2i + 1 turn together; 0: i and i + half.
    u32 pairs;
    u32 state;
};

static const u32 WARPS = 4, WIDEST = 512;

// Grid: (rows, heads of queries, keys and values / 4); a warp takes a head.
KERNEL_OF(128, heads, HeadsArgs) {
    SHARED float heads[WARPS][WIDEST];
    u32 row = blockIdx.x, rows = *a.y.rows, warp = threadIdx.x / 32, unit = blockIdx.y * WARPS + warp;
    begin();
    if (row >= rows || unit >= a.heads + 2 * a.kv.heads) return;
    u32 position = a.batch->positions[row], at = position % PAGE;
    u8* page = a.batch->pages[(u64)a.batch->segment_of[row] * a.batch->kv_states + a.state][position / PAGE];
    if (unit >= a.heads + a.kv.heads) {
        u32 head = unit - a.heads - a.kv.heads;
        const float* v = row_at(a.v, row) + head * a.kv.value_dim;
        for (u32 d = lane(); d < a.kv.value_dim; d += 32) kv_store(a.kv, page, value_of(a.kv, head, at, d), v[d]);
        return;
    }
    bool is_query = unit < a.heads;
    u32 head = is_query ? unit : unit - a.heads, first = head * a.head_dim;
    const float* x = row_at(is_query ? a.q : a.k, row) + first;
    const float* weight = is_query ? a.q_norm : a.k_norm;
    float* turned = heads[warp];
    float squares = 0.0f;
    for (u32 d = lane(); d < a.head_dim; d += 32) {
        float v = x[d];
        turned[d] = v;
        squares = fused(v, v, squares);
    }
    if (weight) {
        float factor = 1.0f / root(warp_sum(squares) / (float)a.head_dim + (is_query ? a.q_eps : a.k_eps));
        u32 len = is_query ? a.q_len : a.k_len;
        for (u32 d = lane(); d < a.head_dim; d += 32) turned[d] = turned[d] * factor * weight[(first + d) % len];
    }
    warp_barrier();
    const float* table = row_at(a.table, row);
    u32 rotary = a.table.width, half = rotary / 2;
    for (u32 d = lane(); d < a.head_dim; d += 32) {
        float v = turned[d];
        if (d < rotary) {
            bool second = a.pairs ? d & 1 : d >= half;
            u32 angle = a.pairs ? d / 2 : second ? d - half : d;
            float other = turned[a.pairs ? d ^ 1 : second ? d - half : d + half];
            float c = table[angle], s = table[half + angle];
            v = second ? v * c + other * s : v * c - other * s;
        }
        if (is_query) row_at(a.y, row)[first + d] = v;
        else kv_store(a.kv, page, key_of(a.kv, head, at, d), v);
    }
}
