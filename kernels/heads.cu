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

// A warp's head, of at most MOST elements a lane. `turned`: room for a head.
template <u32 MOST> DEVICE void head_of(const HeadsArgs& a, float* turned) {
    u32 row = blockIdx.x, rows = *a.y.rows, unit = blockIdx.y * WARPS + threadIdx.x / 32;
    bool there = row < rows && unit < a.heads + 2 * a.kv.heads, is_value = unit >= a.heads + a.kv.heads, is_query = unit < a.heads;
    u32 head = is_query ? unit : is_value ? unit - a.heads - a.kv.heads : unit - a.heads;
    u32 first = head * a.head_dim, dim = is_value ? a.kv.value_dim : a.head_dim;
    const float* weight = is_value ? nullptr : is_query ? a.q_norm : a.k_norm;
    u32 len = is_query ? a.q_len : a.k_len, rotary = is_value ? 0 : a.table.width, half = rotary / 2;
    // What no kernel of a run writes is read before the kernels before have ended: the page, and weights.
    u32 at = 0;
    u8* page = nullptr;
    float v[MOST], w[MOST], c[MOST], s[MOST];
    if (there && !is_query) {
        u32 position = a.batch->positions[row];
        at = position % PAGE;
        page = a.batch->pages[(u64)a.batch->segment_of[row] * a.batch->kv_states + a.state][position / PAGE];
    }
#pragma unroll
    for (u32 j = 0; j < MOST; j++) {
        u32 d = lane() + j * 32;
        w[j] = there && weight && d < dim ? weight[(first + d) % len] : 1.0f;
    }
    begin();
    if (!there) return;
    const float* x = row_at(is_query ? a.q : is_value ? a.v : a.k, row) + head * dim;
    const float* table = row_at(a.table, row);
#pragma unroll
    for (u32 j = 0; j < MOST; j++) {
        u32 d = lane() + j * 32, angle = a.pairs ? d / 2 : d >= half ? d - half : d;
        v[j] = d < dim ? x[d] : 0.0f;
        c[j] = d < rotary ? table[angle] : 1.0f;
        s[j] = d < rotary ? table[half + angle] : 0.0f;
    }
    if (weight) {
        float squares = 0.0f;
#pragma unroll
        for (u32 j = 0; j < MOST; j++) squares = fused(v[j], v[j], squares);
        float factor = 1.0f / root(warp_sum(squares) / (float)a.head_dim + (is_query ? a.q_eps : a.k_eps));
#pragma unroll
        for (u32 j = 0; j < MOST; j++) v[j] = v[j] * factor * w[j];
    }
#pragma unroll
    for (u32 j = 0; j < MOST; j++) {
        u32 d = lane() + j * 32;
        if (d < rotary) turned[d] = v[j];
    }
    warp_barrier();
#pragma unroll
    for (u32 j = 0; j < MOST; j++) {
        u32 d = lane() + j * 32;
        if (d >= dim) break;
        float r = v[j];
        if (d < rotary) {
            bool second = a.pairs ? d & 1 : d >= half;
            float other = turned[a.pairs ? d ^ 1 : second ? d - half : d + half];
            r = second ? r * c[j] + other * s[j] : r * c[j] - other * s[j];
        }
        if (is_query) row_at(a.y, row)[first + d] = r;
        else kv_store(a.kv, page, is_value ? value_of(a.kv, head, at, d) : key_of(a.kv, head, at, d), r);
    }
}

// Grid: (rows, heads of queries, keys and values / 4); a warp takes a head.
KERNEL_OF(128, heads, HeadsArgs) {
    SHARED float heads[WARPS][WIDEST];
    float* turned = heads[threadIdx.x / 32];
    if (a.head_dim <= 128 && a.kv.value_dim <= 128) head_of<4>(a, turned);
    else head_of<WIDEST / 32>(a, turned);
}
