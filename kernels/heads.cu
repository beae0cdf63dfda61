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

// COUNT heads of a warp, of at most MOST elements a lane. `turned`: room for a head.
template <u32 MOST, u32 COUNT> DEVICE void heads_of(const HeadsArgs& a, float* turned) {
    u32 row = blockIdx.x, rows = *a.y.rows, first = (blockIdx.y * WARPS + threadIdx.x / 32) * COUNT, all = a.heads + 2 * a.kv.heads;
    bool there = row < rows && first < all;
    u32 rotary = a.table.width, half = rotary / 2, at = 0;
    // What no kernel of a run writes is read before the kernels before have ended: the page, and weights.
    u8* page = nullptr;
    float v[COUNT][MOST], w[COUNT][MOST], c[MOST], s[MOST];
    if (there && first + COUNT > a.heads) {
        u32 position = a.batch->positions[row];
        at = position % PAGE;
        page = a.batch->pages[(u64)a.batch->segment_of[row] * a.batch->kv_states + a.state][position / PAGE];
    }
    struct Head {
        u32 number, dim;
        bool is_query, is_value;
        const float* weight;
        DEVICE Head(const HeadsArgs& a, u32 unit) {
            is_query = unit < a.heads, is_value = unit >= a.heads + a.kv.heads;
            number = is_query ? unit : is_value ? unit - a.heads - a.kv.heads : unit - a.heads;
            dim = is_value ? a.kv.value_dim : a.head_dim;
            weight = is_value ? nullptr : is_query ? a.q_norm : a.k_norm;
        }
    };
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
        Head head(a, first + i);
#pragma unroll
        for (u32 j = 0; j < MOST; j++) {
            u32 d = lane() + j * 32;
            bool any = there && first + i < all && head.weight && d < head.dim;
            w[i][j] = any ? head.weight[(head.number * head.dim + d) % (head.is_query ? a.q_len : a.k_len)] : 1.0f;
        }
    }
    begin();
    if (!there) return;
    const float* table = row_at(a.table, row);
#pragma unroll
    for (u32 j = 0; j < MOST; j++) {
        u32 d = lane() + j * 32, angle = a.pairs ? d / 2 : d >= half ? d - half : d;
        c[j] = d < rotary ? table[angle] : 1.0f;
        s[j] = d < rotary ? table[half + angle] : 0.0f;
    }
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
        Head head(a, first + i);
        const float* x = row_at(head.is_query ? a.q : head.is_value ? a.v : a.k, row) + head.number * head.dim;
#pragma unroll
        for (u32 j = 0; j < MOST; j++) {
            u32 d = lane() + j * 32;
            v[i][j] = first + i < all && d < head.dim ? x[d] : 0.0f;
        }
    }
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
        if (first + i >= all) break;
        Head head(a, first + i);
        if (head.weight) {
            float squares = 0.0f;
#pragma unroll
            for (u32 j = 0; j < MOST; j++) squares = fused(v[i][j], v[i][j], squares);
            float factor = 1.0f / root(warp_sum(squares) / (float)a.head_dim + (head.is_query ? a.q_eps : a.k_eps));
#pragma unroll
            for (u32 j = 0; j < MOST; j++) v[i][j] = v[i][j] * factor * w[i][j];
        }
        u32 turns = head.is_value ? 0 : rotary;
        warp_barrier();
#pragma unroll
        for (u32 j = 0; j < MOST; j++) {
            u32 d = lane() + j * 32;
            if (d < turns) turned[d] = v[i][j];
        }
        warp_barrier();
#pragma unroll
        for (u32 j = 0; j < MOST; j++) {
            u32 d = lane() + j * 32;
            if (d >= head.dim) break;
            float r = v[i][j];
            if (d < turns) {
                bool second = a.pairs ? d & 1 : d >= half;
                float other = turned[a.pairs ? d ^ 1 : second ? d - half : d + half];
                r = second ? r * c[j] + other * s[j] : r * c[j] - other * s[j];
            }
            if (head.is_query) row_at(a.y, row)[head.number * head.dim + d] = r;
            else kv_store(a.kv, page, head.is_value ? value_of(a.kv, head.number, at, d) : key_of(a.kv, head.number, at, d), r);
        }
    }
}

// Grid: (rows, heads of queries, keys and values / 4); a warp takes a head.
KERNEL_OF(128, heads, HeadsArgs) {
    SHARED float heads[WARPS][WIDEST];
    float* turned = heads[threadIdx.x / 32];
    if (a.head_dim <= 128 && a.kv.value_dim <= 128) heads_of<4, 1>(a, turned);
    else heads_of<WIDEST / 32, 1>(a, turned);
}

// Grid: (rows, heads / 16); a warp takes four heads of up to 128 elements, so that many rows have more on their way.
KERNEL_OF(128, heads_of_many, HeadsArgs) {
    SHARED float heads[WARPS][128];
    heads_of<4, 4>(a, heads[threadIdx.x / 32]);
}
