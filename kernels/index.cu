// index_select, index_blocks: scores of compressed keys, and the best of them ascending; src/ops/index.rs has the definitions.
//
// Scores travel as numbers that order like them: higher ones are better, 0 is no candidate, and what is not a number is the least.
#include "common/records.cuh"
#include "common/select.cuh"

struct IndexArgs {
    // `weights` is not connected for 1; `blocks` where every visible key is a candidate.
    View q, weights, blocks, y;
    const Batch* batch;
    Records keys;
    // [rows of this launch][stride]: a number for each candidate; then `best_stride` for each block of keys.
    u32* values;
    u32 stride, best_stride;
    // First row of this launch, and how many.
    u32 first_row, rows;
    // Keys of a block.
    u32 block;
    u32 top_k;
    // Whether blocks are chosen; whether positions are named instead of keys.
    u32 whole_blocks, positions;
};

static const u32 INDEX_KEYS = 32, INDEX_HEADS = 16;

// Keys that a row may meet, and how many candidates its numbers are about.
DEVICE u32 visible_of(const IndexArgs& a, u32 row) { return (a.batch->positions[row] + 1) / a.keys.every; }
DEVICE u32 candidates_of(const IndexArgs& a, u32 visible) { return a.blocks.data ? least(a.blocks.width, over_up(visible, a.block)) * a.block : visible; }
// Key of a candidate; beyond the visible ones where there is none.
DEVICE u32 key_of(const IndexArgs& a, u32 row, u32 candidate) {
    if (!a.blocks.data) return candidate;
    float chosen = row_at(a.blocks, row)[candidate / a.block];
    return chosen >= 0.0f ? (u32)chosen * a.block + candidate % a.block : ~0u;
}

// Grid: (candidates / 32, rows): a lane has a key, a warp four of sixteen heads at a time; heads are added in one order.
// Dynamic shared memory: 32 keys and 16 heads, see `score_bytes` in src/ops/index.rs.
KERNEL_OF(128, index_scores, IndexArgs) {
    begin();
    SHARED_BYTES(memory);
    SHARED float sums[4][INDEX_KEYS];
    u32 row = a.first_row + blockIdx.y, first = blockIdx.x * INDEX_KEYS, warp = threadIdx.x / 32;
    if (row >= *a.q.rows) return;
    u32 visible = visible_of(a, row), candidates = candidates_of(a, visible);
    if (first >= candidates) return;
    u32* values = a.values + (u64)blockIdx.y * (a.stride + a.best_stride) + first;
    u32 mine = first + lane() < candidates ? key_of(a, row, first + lane()) : ~0u;
    // Where all are kept, scores do not matter.
    u32 all = a.whole_blocks ? over_up(visible, a.block) : visible;
    if (all <= a.top_k) {
        if (warp == 0 && first + lane() < candidates) values[lane()] = mine < visible ? 1 : 0;
        return;
    }
    u32 width = a.keys.width, wide = over_up(width, 4) * 4, pitch = wide + 1, heads = a.q.width / width;
    float* q = (float*)memory;
    float* keys = q + INDEX_HEADS * wide;
    u8* const* pages = pages_of(*a.batch, a.batch->segment_of[row], a.keys.kv);
    for (u32 i = warp; i < INDEX_KEYS; i += 4) {
        u32 key = first + i < candidates ? key_of(a, row, first + i) : ~0u;
        for (u32 d = lane(); d < wide; d += 32) keys[i * pitch + d] = key < visible && d < width ? record_load(a.keys, record_of(a.keys, pages, key), d) : 0.0f;
    }
    float score = 0.0f;
    for (u32 h = 0; h < heads; h += INDEX_HEADS) {
        barrier();
        for (u32 i = threadIdx.x; i < INDEX_HEADS * wide; i += blockDim.x) {
            u32 head = h + i / wide, d = i % wide;
            q[i] = head < heads && d < width ? row_at(a.q, row)[head * width + d] : 0.0f;
        }
        barrier();
        float dot[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        const float* key = keys + lane() * pitch;
        const float* own = q + warp * 4 * wide;
        for (u32 d = 0; d < wide; d += 4) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                Words4 w = load16(own + i * wide + d);
                dot[i] = fused(float_of(w.x), key[d], dot[i]), dot[i] = fused(float_of(w.y), key[d + 1], dot[i]);
                dot[i] = fused(float_of(w.z), key[d + 2], dot[i]), dot[i] = fused(float_of(w.w), key[d + 3], dot[i]);
            }
        }
        for (u32 i = 0; i < 4; i++) {
            u32 head = h + warp * 4 + i;
            if (head < heads) score = fused(a.weights.data ? row_at(a.weights, row)[head] : 1.0f, largest(dot[i], 0.0f), score);
        }
    }
    sums[warp][lane()] = score;
    barrier();
    if (warp == 0 && first + lane() < candidates) {
        score = (sums[0][lane()] + sums[1][lane()]) + (sums[2][lane()] + sums[3][lane()]);
        values[lane()] = mine < visible ? ordered(score) : 0;
    }
}

// Grid: (blocks of keys / threads, rows): each block's best key; the newest block is better than any.
KERNEL_OF(128, index_best, IndexArgs) {
    begin();
    u32 row = a.first_row + blockIdx.y, b = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= *a.q.rows) return;
    u32 visible = visible_of(a, row), blocks = over_up(visible, a.block);
    if (b >= blocks) return;
    u32* values = a.values + (u64)blockIdx.y * (a.stride + a.best_stride);
    u32 best = 0;
    for (u32 j = b * a.block; j < least(visible, (b + 1) * a.block); j++) best = most(best, values[j]);
    values[a.stride + b] = b == blocks - 1 ? ~0u : best;
}

// Grid: (rows): the best `top_k` of a row's numbers, found by their bits from the top, written in order.
KERNEL_OF(256, index_select, IndexArgs) {
    begin();
    SHARED Selection selection;
    u32 row = a.first_row + blockIdx.x;
    if (row >= *a.q.rows) return;
    u32 visible = visible_of(a, row), n = a.whole_blocks ? over_up(visible, a.block) : candidates_of(a, visible);
    const u32* values = a.values + (u64)blockIdx.x * (a.stride + a.best_stride) + (a.whole_blocks ? a.stride : 0);
    float* y = row_at(a.y, row);
    u32 every = a.positions ? a.keys.every : 1;
    auto put = [&](u32 rank, u32 i) {
        u32 key = a.whole_blocks ? i : key_of(a, row, i);
        for (u32 e = 0; e < every; e++) y[rank * every + e] = (float)(key * every + e);
    };
    u32 kept = select_best(n, a.top_k, selection, [&](u32 i) { return values[i]; }, put) * every;
    // Positions after the last complete group, then nothing.
    u32 end = a.batch->positions[row] + 1, open = a.positions ? end % every : 0;
    for (u32 i = kept + threadIdx.x; i < a.y.width; i += blockDim.x) y[i] = i < kept + open ? (float)(end - open + i - kept) : -1.0f;
}
